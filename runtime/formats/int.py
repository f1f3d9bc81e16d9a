"""Uniform integers with a scale (and a minimum) for each group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsim.formats.int import Int
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import SCALES, at_least, check_held, finished, grouped, inverse


class IntTwin(FormatTwin):
    """Codes against the stored (rounded) minimum and scale, so that a value is off by half a step at most.

    The scale is rounded up; a minimum that the scale's dtype cannot represent adds half its last place. A constant
    group keeps its value as the minimum, or, symmetric, as the scale with code 1.
    """

    part_name = "int"
    part: Int

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes, scale and (asymmetric) min."""
        wide = x.float()
        groups = self._groups(wide)
        low, high = groups.amin(self._over, keepdim=True), groups.amax(self._over, keepdim=True)
        dtype = SCALES[self.part.scale_dtype]
        if self.part.symmetric:
            levels = 2 ** (self.part.bits - 1) - 1
            peak = torch.maximum(high, -low)
            scale = at_least(torch.where(high == low, peak, peak / levels), dtype)
            check_held(self, wide, scale)
            codes = (groups * inverse(scale)).round_().clamp_(-levels, levels).add_(levels)
            found = {"scale": self._stored(scale)}
        else:
            levels = 2**self.part.bits - 1
            least = low.to(dtype)
            scale = at_least((high - least.float()).clamp_(min=0) / levels, dtype)
            check_held(self, wide, scale, least)
            codes = (groups - least.float()).mul_(inverse(scale)).round_().clamp_(0, levels)
            found = {"scale": self._stored(scale), "min": self._stored(least)}
        return {"codes": pack(self._rows(codes.to(torch.uint8), x.shape), self.part.bits)} | found

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """code * scale + min."""
        codes = unpack(rows["codes"], self.part.bits, self.place.width)
        shape = codes.shape
        if missing := -shape[2] % self.part.unit:  # a run may end within a unit
            codes = pad(codes, (0, 0, 0, missing))
        values = self._groups(codes.float())
        if self.part.symmetric:
            values = (values - (2 ** (self.part.bits - 1) - 1)) * self._spread(rows["scale"])
        else:
            values = (values * self._spread(rows["scale"])).add_(self._spread(rows["min"]))
        whole = torch.Size((*shape[:2], shape[2] + missing, shape[3]))
        return finished(self._rows(values, whole)[:, :, : shape[2]], self.setting.dtype)

    def rows_per(self, name: str) -> int:
        """Scales and minima of groups over rows stand for a unit."""
        return 1 if name == "codes" else self.part.unit

    @property
    def _over(self) -> tuple[int, ...]:
        """Dimensions of the grouped view that share a scale."""
        return {"channel": (3,), "head": (3, 4), "layer": (1, 3, 4)}.get(self.part.axis, (-1,))

    def _groups(self, x: Tensor) -> Tensor:
        """[B, H, n, d] as [B, H, n, groups, g] along the row, or [B, H, n/u, u, d] over rows."""
        if self.part.row_addressable:
            return grouped(x, self.part.width_group(self.place.width))
        return x.unflatten(2, (-1, self.part.unit))

    def _rows(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `_groups`."""
        if self.part.row_addressable:
            return groups.flatten(3)[..., : shape[3]]
        return groups.flatten(2, 3)

    def _stored(self, statistic: Tensor) -> Tensor:
        """Statistics with kept dimensions as a buffer [B, H', rows, w]."""
        return statistic.squeeze(-1 if self.part.row_addressable else 3)

    def _spread(self, stored: Tensor) -> Tensor:
        """A buffer as it broadcasts over the grouped view."""
        return stored.float().unsqueeze(-1 if self.part.row_addressable else 3)
