"""OCP microscaling floats: E2M1 or e4m3 codes with a power-of-two scale for 32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.mxfp import GROUP, MxFp
from runtime.levels import float8_table, from_e2m1, lookup, to_e2m1
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import check_held, finished, grouped

BIAS = 127
E4M3 = torch.float8_e4m3fn
TOP = torch.finfo(E4M3).max
LARGEST_EXPONENT = {4: 2, 8: 8}
"""Exponent of the largest normal number of E2M1 (6 = 1.5 * 2^2) and e4m3 (448 = 1.75 * 2^8)."""


class MxFpTwin(FormatTwin):
    """The standard's conversion: scale 2^(floor(log2 largest) - exponent of the largest element), elements saturate."""

    part_name = "mxfp"
    part: MxFp

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes and one biased exponent (e8m0 byte) a group."""
        wide = x.float()
        groups = grouped(wide, GROUP)
        peak = groups.abs().amax(-1)
        check_held(self, wide, peak)
        # frexp gives peak = m * 2^e with m in [1/2, 1), so that floor(log2 peak) = e - 1
        exponent = peak.frexp().exponent - 1 - LARGEST_EXPONENT[self.part.bits]
        exponent = torch.where(peak > 0, exponent, -BIAS).clamp_(-BIAS, BIAS)
        scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
        codes = to_e2m1(scaled) if self.part.bits == 4 else scaled.clamp_(-TOP, TOP).to(E4M3).view(torch.uint8)
        codes = codes.flatten(3)[..., : x.shape[3]]
        return {"codes": pack(codes, self.part.bits), "scale": (exponent + BIAS).to(torch.uint8)}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Code * 2^exponent."""
        codes = unpack(rows["codes"], self.part.bits, self.place.width)
        values = from_e2m1(codes) if self.part.bits == 4 else lookup(codes, float8_table(E4M3, codes.device))
        exponent = rows["scale"].to(torch.int32) - BIAS
        values = torch.ldexp(grouped(values, GROUP), exponent.unsqueeze(-1))
        return finished(values.flatten(3)[..., : codes.shape[3]], self.setting.dtype)
