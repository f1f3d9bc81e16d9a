"""Rows encoded by Triton behind those that a side holds; what it does not write is left to the format's twin."""

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor

from runtime.buffers import Paged
from runtime.kernels import triton_encode
from runtime.kernels.plans import Plan

AT_ONCE = 16
"""Rows of a program, where there are as many."""


def encoded(plan: Plan, x: Tensor, buffers: list[Paged]) -> bool:
    """Rows x [B, H, n, d] to the free rows of the buffers' last chunks, which have room; False: a scale overflowed."""
    codes, scale, *lows = (buffer.chunks[-1] for buffer in buffers)
    batch, heads, rows, width = x.shape
    padded = max(8, triton.next_power_of_2(width))
    groups = -(-width // plan.group)
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    together = AT_ONCE if rows > 1 else 1
    on = torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
    with on:
        triton_encode.encode[(-(-rows // together), batch * heads)](
            x, codes, scale, lows[0] if lows else scale, bad, rows,
            codes.shape[2] - (buffers[0].capacity - buffers[0].rows), *x.stride()[:3], codes.stride(1), scale.stride(1),
            HEADS=heads, WIDTH=width, BITS=plan.bits, GROUP=padded if groups == 1 else plan.group, GROUPS=groups,
            PADDED=padded, SYMMETRIC=plan.symmetric, TOGETHER=together, num_warps=1 if together == 1 else 4,
            enable_fp_fusion=False)  # fmt: skip
    return not bool(bad.item())


def writes(plan: Plan, width: int) -> bool:
    """Whether codes fill bytes evenly and groups are powers of two, or one is the whole row."""
    whole = plan.group >= width
    return plan.bits in (8, 4, 2, 1) and (whole or plan.group & (plan.group - 1) == 0)
