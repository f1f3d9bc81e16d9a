"""Logarithmic codes: a sign and a rounded power of two below the group's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Log(Quantizer):
    """Per group: s = max |x|; code 0 is zero, the others are sign(x) and round(log2(s / |x|)) in 0 .. 2^(b-1) - 2.

    2^(b-1) - 1 magnitudes of either sign and one zero; what lies below the smallest magnitude becomes that or zero.
    """

    name: ClassVar[str] = "log"
    summary: ClassVar[str] = "sign and rounded exponent, one scale a group"
    source: ClassVar[str] = "survey 3.1.2"
    survey: ClassVar[str] = "3.1.2"
    encode_flops: ClassVar[float] = 10.0

    bits: int = setting(4, low=2, high=8, always=True, what="bits a code, its sign included")
    group: int | None = setting(None, low=1, what="values a group along the row; none means min(64, width)")

    @property
    def conversion(self) -> Conversion:
        """A code is an index into 2^b powers of two."""
        return "lookup"

    @property
    def kernel_format(self) -> str:
        """log4, log8 ..."""
        return f"log{self.bits}"

    def check_place(self, place: Place) -> None:
        """A group along the row cannot be longer than the row."""
        super().check_place(place)
        if self.group is not None and place.width and self.group > place.width:
            raise KvsimError(f"log: group={self.group} is longer than the row, at {place.where}; at most {place.width}")

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes row by row and one fp16 scale a group."""
        groups = -(-place.width // (self.group or 64))
        return (
            Buffer("codes", place.heads, rows, place.width, self.bits),
            Buffer("scale", place.heads, rows, groups, 16),
        )
