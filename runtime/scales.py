"""Scales that are never infinite: groups, rounding into a narrow dtype, and the error where it cannot hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from runtime.parts import Twin

SCALES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in SCALES.items()}
TINY = torch.finfo(torch.float32).tiny
SLACK = 2.0**-20
"""Relative error of a scale computed in fp32 that is not worth a step up: data already on a grid keep their grid."""


def grouped(x: Tensor, group: int) -> Tensor:
    """[..., w] to [..., ceil(w/group), group]; the row's last value fills the last group, changing no range."""
    spare = -x.shape[-1] % group
    if spare:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], spare)), dim=-1)
    return x.unflatten(-1, (-1, group))


def at_least(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales (0 or more, fp32) in a narrower dtype, rounded up, so that nothing is clipped and only 0 becomes 0."""
    narrow = scale.to(dtype)
    if dtype == torch.float32:
        return narrow
    low = narrow.float() * (1 + SLACK) < scale
    # of positive floats the next larger one is the next integer
    return (narrow.view(torch.int16) + low.to(torch.int16)).view(dtype)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in fp32, 0 where the scale is 0 or so small that its inverse would overflow."""
    wide = scale.float()
    return torch.where(wide >= TINY, wide.reciprocal(), 0.0)


def check_held(twin: Twin[Any], x: Tensor, *stored: Tensor) -> None:
    """Raise KvsimError where stored scales are not finite, because x is not or because x is too large for them."""
    held = torch.isfinite(stored[0]).all()
    for tensor in stored[1:]:
        held = held & torch.isfinite(tensor).all()
    if held:
        return
    check_finite(twin, x)
    name = NAMES.get(stored[0].dtype, str(stored[0].dtype).removeprefix("torch."))
    raise KvsimError(
        f"{twin.part.name}: {twin.place.where} reach {float(x.abs().max()):.4g}, more than its {name} scale can carry; "
        f"use a wider scale (scale_dtype=fp32 of int) or format full"
    )


def check_finite(twin: Twin[Any], x: Tensor) -> None:
    """Raise KvsimError where x holds NaN or infinity."""
    if x.numel() and not torch.isfinite(torch.stack(x.aminmax())).all():
        raise KvsimError(
            f"{twin.part.name}: {twin.place.where} hold NaN or infinity, which no code stands for; "
            f"the model's activations overflowed: run it in bf16 or fp32"
        )


def finished(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded fp32 rows (changed in place) in the cache's dtype, where rounding must not make infinities."""
    top = torch.finfo(dtype).max
    return x.clamp_(-top, top).to(dtype)
