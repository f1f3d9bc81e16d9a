"""NVIDIA's 4-bit floats: E2M1 codes, an e4m3 scale for 16 values, an fp32 scale above it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.nvfp4 import GROUP, NvFp4
from runtime.levels import E2M1, float8_table, from_e2m1, lookup, to_e2m1
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import check_held, finished, grouped, inverse

E4M3 = torch.float8_e4m3fn
TOP = torch.finfo(E4M3).max


class NvFp4Twin(FormatTwin):
    """fp32 scale = largest / (6 * 448) of the block or row; group scale = largest / 6 / that, nearest e4m3."""

    part_name = "nvfp4"
    part: NvFp4

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes, group scales, and one fp32 scale for the block (all heads) or for each row."""
        wide = x.float()
        groups = grouped(wide, GROUP)
        peak = groups.abs().amax(-1)
        whole = (1, 2, 3) if self.part.scale == "block" else (3,)
        above = peak.amax(whole, keepdim=True) / (TOP * E2M1[-1])
        check_held(self, wide, above)
        wanted = peak * (inverse(above) / E2M1[-1])
        # a group far below the largest keeps the smallest scale rather than none
        least = torch.finfo(E4M3).smallest_normal / 8
        scale = torch.where(wanted > 0, wanted.clamp(least, TOP), wanted).to(E4M3)
        step = (scale.float() * above).unsqueeze(-1)
        codes = to_e2m1(groups * inverse(step)).flatten(3)[..., : x.shape[3]]
        return {"codes": pack(codes, 4), "scale": scale.view(torch.uint8), f"{self.part.scale}_scale": above}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Code * group scale * fp32 scale."""
        codes = unpack(rows["codes"], 4, self.place.width)
        scale = lookup(rows["scale"], float8_table(E4M3, codes.device))
        if self.part.scale == "block":
            scale = scale * rows["block_scale"].index_select(2, blocks.to(codes.device))
        else:
            scale = scale * rows["row_scale"]
        values = grouped(from_e2m1(codes), GROUP) * scale.unsqueeze(-1)
        return finished(values.flatten(3)[..., : codes.shape[3]], self.setting.dtype)

    def rows_per(self, name: str) -> int:
        """The block's scale is one a flush."""
        return 0 if name == "block_scale" else 1
