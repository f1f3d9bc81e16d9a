"""OCP microscaling floats: E2M1 or e4m3 codes with a power-of-two scale for 32 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count

GROUP = 32


@dataclass(frozen=True)
class MxFp(Quantizer):
    """Every 32 values of a row (the last group may be shorter) share an e8m0 scale: 4.25 or 8.25 bits a value."""

    name: ClassVar[str] = "mxfp"
    summary: ClassVar[str] = "microscaling floats, e8m0 scale per 32"
    source: ClassVar[str] = "OCP Microscaling Formats (MX) v1.0; Rouhani et al., arXiv 2310.10537"
    survey: ClassVar[str] = "3.1.2, 3.2"
    encode_flops: ClassVar[float] = 5.0

    bits: int = setting(4, low=4, high=8, always=True, what="bits a code: 4 (E2M1) or 8 (e4m3)")

    def check(self) -> None:
        """The standard's element types that are offered here have 4 and 8 bits."""
        if self.bits not in (4, 8):
            raise KvsimError(f"mxfp: bits is 4 (E2M1) or 8 (e4m3), got {self.bits}")
        super().check()

    @property
    def conversion(self) -> Conversion:
        """Bytes are cast and scaled, nibbles unpacked first."""
        return "scale" if self.bits == 8 else "unpack"

    @property
    def kernel_format(self) -> str:
        """mxfp4 or mxfp8."""
        return f"mxfp{self.bits}"

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes and one byte of scale a group."""
        return (
            Buffer("codes", place.heads, rows, place.width, self.bits),
            Buffer("scale", place.heads, rows, -(-place.width // GROUP), 8),
        )
