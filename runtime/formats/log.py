"""Logarithmic codes: a sign and a rounded power of two below the group's largest magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.log import Log
from runtime.levels import lookup
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import at_least, check_held, finished, grouped


class LogTwin(FormatTwin):
    """Code 0 is zero, 1 + e is scale * 2^-e and M + 1 + e its negative; e = 0 .. M-1 and M = 2^(bits-1) - 1."""

    part_name = "log"
    part: Log

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes and one fp16 scale a group; below the smallest magnitude, the nearer of that and zero."""
        wide = x.float()
        groups = grouped(wide, self._group)
        size = groups.abs()
        scale = at_least(size.amax(-1, keepdim=True), torch.float16)
        check_held(self, wide, scale)
        count = 2 ** (self.part.bits - 1) - 1
        top = scale.float()
        exponent = (top.log2() - size.log2()).round_().clamp_(0, count - 1)
        zero = size <= top * 2.0 ** -count
        codes = torch.where(zero, 0, exponent + 1 + (groups < 0) * count).to(torch.uint8)
        codes = codes.flatten(3)[..., : x.shape[3]]
        return {"codes": pack(codes, self.part.bits), "scale": scale.squeeze(-1)}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Sign, power of two, scale."""
        codes = unpack(rows["codes"], self.part.bits, self.place.width)
        count = 2 ** (self.part.bits - 1) - 1
        powers = 2.0 ** -torch.arange(count, dtype=torch.float32, device=codes.device)
        values = lookup(codes, torch.cat((powers.new_zeros(1), powers, -powers)))
        values = grouped(values, self._group) * rows["scale"].float().unsqueeze(-1)
        return finished(values.flatten(3)[..., : codes.shape[3]], self.setting.dtype)

    @property
    def _group(self) -> int:
        return self.part.group or min(64, self.place.width)
