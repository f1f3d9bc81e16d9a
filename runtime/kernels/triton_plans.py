"""Which formats the Triton kernels read, and whether they run here; it imports Triton only where it is asked to."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from runtime.kernels.plans import FLOAT8, FLOAT8_KINDS, GGUF, INT, ROWS, SCALES, TABLE, Plan
from runtime.parts import FormatTwin

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which bf16 products and asynchronous copies exist."""
WIDEST = 512
"""Channels of a row at most: a block of rows must fit a multiprocessor."""


@cache
def why_not(kind: str) -> str:
    """Why there are no Triton kernels on a kind of device; empty where there are."""
    if find_spec("triton") is None:
        return f"no kernels on {kind}: triton is not installed"
    if kind == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "" if interpreted else "Triton runs on a CPU only with TRITON_INTERPRET=1"
    if kind != "cuda" or torch.version.hip is not None:
        return f"no kernels on {'rocm' if kind == 'cuda' else kind}"
    if not torch.cuda.is_available():
        return "no kernels on cuda: torch sees no device"
    least = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return "" if least >= LEAST_CAPABILITY else f"no kernels on cuda below compute capability 8.0, this is {least}"


def plan(twin: FormatTwin) -> Plan | str:
    """The plan for a format at its place, or why there is none. Rows lie one after another: a block of them is whole
    lines of memory anyway."""
    width = twin.place.width
    if width > WIDEST:
        return f"rows of {width} values are wider than {WIDEST}"
    match twin.part_name:
        case "full":
            return Plan(ROWS, group=width, triton=True)
        case "int":
            return _int(twin)
        case "gguf" if twin.part.type in ("q8_0", "q4_0", "q4_1"):
            kind = twin.part.type
            return Plan(GGUF, int(kind[1]), 32, lows=kind.endswith("_1"), names=("blocks", "", ""), triton=True)
        case "gguf":
            return f"no kernel reads gguf type {twin.part.type}"
        case "float8":
            table = _scale if twin.part.scale == "tensor" else None
            return Plan(FLOAT8, FLOAT8_KINDS[twin.part.kind], width, table=table, triton=True)
        case "kmeans":
            names = ("codes", "scale", "middle")
            return Plan(TABLE, twin.part.bits, width, names=names, table=_codebook, triton=True)
    return f"no kernel reads {twin.part_name}"


def _int(twin: FormatTwin) -> Plan | str:
    part, width = twin.part, twin.place.width
    if part.axis not in ("token", "row", "channel"):
        return f"no kernel reads int with axis={part.axis}"
    unit = part.unit if part.axis == "channel" else 0
    if unit & (unit - 1):
        return f"int: groups of {unit} tokens are no power of two"
    group = width if unit else part.width_group(width)
    return Plan(INT, part.bits, group, unit, part.symmetric, SCALES[part.scale_dtype], triton=True)


def _scale(twin: FormatTwin) -> Tensor:
    return twin.model_buffers()["scale"].reshape(1, 1, 1)


def _codebook(twin: FormatTwin) -> Tensor:
    """[heads or 1, width or 1, levels] fp16, as the twin holds it."""
    return twin.model_buffers()["codebook"][0]
