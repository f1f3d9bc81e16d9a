"""Codes for the nearest of a few levels, and levels for codes; it does not know where the levels come from."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats (OCP MX v1.0, table 5); bit 3 of a code is the sign."""


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Index (uint8) of the level nearest to each value of x [B, H, n, d]; ties go to the upper level.

    levels: ascending fp32, [L], or [Hc, C, L] with Hc and C either 1 or the heads and width of x; L a power of two.
    A binary search over all values at once: log2(L) look-ups.
    """
    count = levels.shape[-1]
    middle = (levels[..., 1:] + levels[..., :-1]) / 2
    table = torch.cat((middle, middle[..., -1:]), dim=-1).reshape(-1)
    base = _first(levels, count)
    at = torch.zeros(x.shape, dtype=torch.int32, device=x.device).add_(base)
    step = count // 2
    while step:
        at.add_((x >= _look(table, at + (step - 1))).to(torch.int32), alpha=step)
        step //= 2
    return at.sub_(base).to(torch.uint8)


def lookup(codes: Tensor, levels: Tensor) -> Tensor:
    """Levels of codes [B, H, n, d], fp32; levels as in `nearest`, of any count."""
    return _look(levels.float().reshape(-1), codes.to(torch.int32) + _first(levels, levels.shape[-1]))


def _first(levels: Tensor, count: int) -> Tensor:
    """Where in the flat table each head's and channel's levels start, [Hc, 1, C] int32."""
    tables = levels.numel() // count
    start = torch.arange(tables, dtype=torch.int32, device=levels.device) * count
    return start.reshape(*(levels.shape[:-1] if levels.dim() > 1 else (1, 1))).unsqueeze(-2)


def _look(table: Tensor, at: Tensor) -> Tensor:
    # index_select is several times faster here than indexing
    return table.index_select(0, at.reshape(-1)).view(at.shape)


def to_e2m1(x: Tensor) -> Tensor:
    """Codes of values already divided by their scale: nearest, ties to even, saturating at 6."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    # a tie goes to the level whose mantissa bit is 0: up from 0.75, 1.75 and 3.5, down from the others
    for tie, up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= tie if up else size > tie
    return code | ((x < 0).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Values of codes, fp32."""
    return lookup(codes, torch.tensor(E2M1 + tuple(-v for v in E2M1), device=codes.device))


def float8_table(kind: torch.dtype, device: torch.device) -> Tensor:
    """The value of each byte, fp32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(kind).float().to(device)
