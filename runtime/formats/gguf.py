"""llama.cpp's cache types: blocks of 32 values along the row, in ggml's byte layout."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.gguf import BLOCK_BYTES, VALUES, Gguf
from runtime.levels import lookup, nearest
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import TINY, check_held, finished

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl of ggml-common.h."""


class GgufTwin(FormatTwin):
    """The reference conversions of ggml-quants.c (quantize_row_*_ref), whose rounding is followed bit by bit.

    A block is: scale (fp16), minimum (fp16, types _1), fifth bits (4 bytes, types q5), codes (two values a byte: j in
    the low half, j + 16 in the high one; q8_0: a signed byte a value).
    """

    part_name = "gguf"
    part: Gguf

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Blocks of a row one after another, [B, H, n, (d / 32) * bytes of a block]."""
        wide = x.float()
        blocks = wide.unflatten(-1, (-1, VALUES))
        if self.part.type == "iq4_nl":
            heads, codes = self._iq4_nl(blocks)
        else:
            heads, codes = self._uniform(blocks)
        check_held(self, wide, *heads)
        parts = [head.contiguous().view(torch.uint8) for head in heads]
        if self.part.type == "q8_0":
            parts.append(codes.to(torch.int8).view(torch.uint8))
        else:
            codes = codes.to(torch.uint8)
            if self.part.type.startswith("q5"):
                parts.append(pack(codes >> 4, 1))
            low, high = (codes & 15).split(VALUES // 2, dim=-1)
            parts.append(low | (high << 4))
        return {"blocks": torch.cat(parts, dim=-1).flatten(-2)}

    def _uniform(self, blocks: Tensor) -> tuple[list[Tensor], Tensor]:
        """Scale (and minimum) in fp16, and codes against the scale before its rounding."""
        kind = self.part.type
        if kind == "q8_0":
            step = blocks.abs().amax(-1, keepdim=True) / 127
            scaled = blocks * _inverse(step)
            return [step.half()], torch.trunc(scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled))
        levels = 2 ** int(kind[1])
        if kind.endswith("_1"):
            least = blocks.amin(-1, keepdim=True)
            step = (blocks.amax(-1, keepdim=True) - least) / (levels - 1)
            heads, codes = [step.half(), least.half()], (blocks - least) * _inverse(step) + 0.5
        else:
            peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            step = peak / -(levels / 2)
            heads, codes = [step.half()], blocks * _inverse(step) + (levels / 2 + 0.5)
        return heads, codes.trunc().clamp(0, levels - 1)

    def _iq4_nl(self, blocks: Tensor) -> tuple[list[Tensor], Tensor]:
        """The largest value takes the level -127; then the scale that fits best, values weighted by their squares."""
        levels = torch.tensor(IQ4_NL, dtype=torch.float32, device=blocks.device)
        peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        codes = nearest(blocks * _inverse(peak / levels[0]), levels)
        level, weight = lookup(codes, levels), blocks.square()
        fitted = (weight * level * blocks).sum(-1, keepdim=True) / (weight * level * level).sum(-1, keepdim=True)
        # ggml leaves a block below 1e-15 empty, its codes at zero
        empty = peak.abs() < 1e-15
        return [torch.where(empty, 0, fitted).half()], torch.where(empty, 0, codes)

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Values of whole blocks."""
        kind = self.part.type
        held = rows["blocks"].unflatten(-1, (-1, BLOCK_BYTES[kind]))
        ends = 4 if kind.endswith("_1") else 2
        heads = held[..., :ends].contiguous().view(torch.float16).float()
        scale, body = heads[..., :1], held[..., ends:]
        if kind == "q8_0":
            values = body.contiguous().view(torch.int8) * scale
        else:
            nibbles = body[..., -VALUES // 2 :]
            codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
            if kind.startswith("q5"):
                codes = codes | (unpack(body[..., :4], 1, VALUES) << 4)
            if kind == "iq4_nl":
                values = lookup(codes, torch.tensor(IQ4_NL, device=codes.device)) * scale
            elif kind.endswith("_1"):
                values = codes * scale + heads[..., 1:]
            else:
                values = (codes.float() - 2.0 ** (int(kind[1]) - 1)) * scale
        return finished(values.flatten(-2), self.setting.dtype)


def _inverse(step: Tensor) -> Tensor:
    """1 / step of either sign; 0 where step is 0 or so small that its fp16 is 0 anyway."""
    return torch.where(step.abs() >= TINY, step.reciprocal(), 0.0)
