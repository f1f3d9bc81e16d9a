"""NVIDIA's 4-bit floats: E2M1 codes, an e4m3 scale for 16 values, an fp32 scale above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Buffer, Conversion, Place, Quantizer, per_tokens, setting
from kvsim.workload import Count

GROUP = 16


@dataclass(frozen=True)
class NvFp4(Quantizer):
    """Codes +-{0, .5, 1, 1.5, 2, 3, 4, 6}; 16 values of a row (the last group may be shorter) share an e4m3 scale.

    The fp32 scale that keeps those in range is, with scale=block, one for all heads of each flushed block (4.5 bits a
    value); rows of a block then cannot leave alone. scale=row stores one for each row and head instead (4.75 bits at
    width 128), and rows stay addressable. With residual=0 every decoded row is a block of its own.
    """

    name: ClassVar[str] = "nvfp4"
    summary: ClassVar[str] = "E2M1 codes, e4m3 scale per 16, fp32 scale above"
    source: ClassVar[str] = "NVIDIA, NVFP4 KV cache (TensorRT-LLM); row scale: FreeToken PR #408"
    survey: ClassVar[str] = "3.1.2, 3.2"
    encode_flops: ClassVar[float] = 8.0

    scale: str = setting("block", choices=("block", "row"), what="what shares the fp32 scale")

    @property
    def conversion(self) -> Conversion:
        """Codes are unpacked and scaled."""
        return "unpack"

    @property
    def row_addressable(self) -> bool:
        """A block's scale cannot be freed while one of its rows lives."""
        return self.scale == "row"

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes, group scales and fp32 scales."""
        if self.scale == "row":
            top = Buffer("row_scale", place.heads, rows, 1, 32)
        else:
            top = Buffer("block_scale", 1, blocks, 1, 32, per_tokens(self.block_rows))
        return (
            Buffer("codes", place.heads, rows, place.width, 4),
            Buffer("scale", place.heads, rows, -(-place.width // GROUP), 8),
            top,
        )
