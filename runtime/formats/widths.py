"""Integers of widths that are given, one for each head or channel group: what an allocation handed out."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.widths import Widths
from runtime.packing import pack_uneven, unpack_uneven
from runtime.parts import FormatTwin, Tensors
from runtime.scales import at_least, check_held, finished, grouped, inverse


class WidthsTwin(FormatTwin):
    """Each group as `int` of its width writes it; codes of a row's heads follow one another, lowest bits first."""

    part_name = "widths"
    part: Widths

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes [B, 1, n, bytes], fp16 scales and minima a row and group."""
        wide = x.float()
        groups = grouped(wide, self._sizes[0])
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        levels = (2.0 ** self._bits(x.device).float() - 1).view(1, self.place.heads, 1, -1, 1)
        least = low.to(torch.float16)
        scale = at_least((high - least.float()).clamp_(min=0) / levels, torch.float16)
        check_held(self, wide, scale, least)
        codes = torch.minimum(((groups - least.float()) * inverse(scale)).round_().clamp_(min=0), levels)
        codes = codes.flatten(3)[..., : x.shape[3]].to(torch.int32)
        row = codes.transpose(1, 2).flatten(2).unsqueeze(1)
        size = self.part.row_bytes(self.place.heads, self.place.width)
        return {
            "codes": pack_uneven(row, self._bits_of_values(x.device), size),
            "scale": scale.squeeze(-1),
            "min": least.squeeze(-1),
        }

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """code * scale + min."""
        row = unpack_uneven(rows["codes"], self._bits_of_values(rows["codes"].device))
        codes = row.squeeze(1).unflatten(2, (self.place.heads, self.place.width)).transpose(1, 2)
        values = grouped(codes.float(), self._sizes[0]) * rows["scale"].float().unsqueeze(-1)
        values = values + rows["min"].float().unsqueeze(-1)
        return finished(values.flatten(3)[..., : self.place.width], self.setting.dtype)

    @property
    def _sizes(self) -> list[int]:
        return self.part.groups(self.place.width)

    def _bits(self, device: torch.device) -> Tensor:
        """The width of every group, head by head."""
        return torch.tensor(self.part.of_groups(self.place.heads, self.place.width), device=device)

    def _bits_of_values(self, device: torch.device) -> Tensor:
        """The width of every value of a row, head by head, [1, 1, 1, H * d]."""
        sizes = torch.tensor(self._sizes * self.place.heads, device=device)
        return self._bits(device).repeat_interleave(sizes)[None, None, None]
