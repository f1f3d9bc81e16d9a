"""llama.cpp's cache types: blocks of 32 values along the row, scale and codes together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count

VALUES = 32
BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
"""Bytes of a block of 32 values: fp16 scale (and minimum in _1), high bits of 5-bit codes, codes (ggml-common.h)."""


@dataclass(frozen=True)
class Gguf(Quantizer):
    """Whole blocks in ggml's byte layout, so that width must divide by 32."""

    name: ClassVar[str] = "gguf"
    summary: ClassVar[str] = "llama.cpp cache types, blocks of 32"
    source: ClassVar[str] = "ggml-common.h of llama.cpp; cache types in llama.cpp PR #7412"
    survey: ClassVar[str] = "3.2"

    type: str = setting("q8_0", choices=tuple(BLOCK_BYTES), always=True, what="ggml type of the cache")

    @property
    def conversion(self) -> Conversion:
        """Bytes are scaled, smaller codes unpacked first, iq4_nl looked up."""
        return {"q8_0": "scale", "iq4_nl": "lookup"}.get(self.type, "unpack")  # type: ignore[return-value]

    @property
    def kernel_format(self) -> str:
        """The ggml type."""
        return self.type

    def encode_row_flops(self, place: Place) -> float:
        """Maximum, product, rounding, packing; iq4_nl searches 16 levels and weighs the fit."""
        return {"q8_0": 4.0, "iq4_nl": 12.0}.get(self.type, self.encode_flops) * place.width

    def check_place(self, place: Place) -> None:
        """Rows are whole blocks."""
        super().check_place(place)
        if place.width % VALUES:
            raise KvsimError(f"gguf: {self.type} writes blocks of {VALUES} values, not {place.where}; use int")

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """One buffer of whole blocks."""
        return (Buffer("blocks", place.heads, rows, place.width // VALUES, 8 * BLOCK_BYTES[self.type]),)
