"""Integers whose width differs by channel group, decided once per sequence under a mean."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting, written
from kvsim.workload import Count


@dataclass(frozen=True)
class Mixed(Quantizer):
    """Each (head, channel group) gets one of the widths in `bits`, by sensitivity, so that a head's mean is kept.

    The widths are decided when the first rows are encoded and hold for the sequence (see kvsim.allocation). A row of
    a head takes ceil(mean * width / 8) bytes whatever widths were chosen, so bytes are exact before they are known.
    """

    name: ClassVar[str] = "mixed"
    summary: ClassVar[str] = "integers, a width for each channel group"
    source: ClassVar[str] = "survey 3.3"
    survey: ClassVar[str] = "3.3.1, 3.3.2"

    bits: tuple[int, ...] = setting((2, 4, 8), low=1, high=8, always=True, what="widths to choose from")
    mean: float = setting(4.0, low=1, high=8, always=True, what="mean bits a code over each head's row")
    by: str = setting("variance", choices=("variance", "attention", "hessian"), what="what sensitivity is measured by")
    group: int | None = setting(None, low=1, what="channels that share a width and a scale; none means min(64, width)")

    def check(self) -> None:
        """Widths rise, and the mean lies between the smallest and the largest."""
        if list(self.bits) != sorted(set(self.bits)):
            raise KvsimError(f"mixed: bits are widths in rising order such as (2,4,8), got {written(self.bits)}")
        if not self.bits[0] <= self.mean <= self.bits[-1]:
            raise KvsimError(f"mixed: mean={self.mean} must lie in {self.bits[0]} to {self.bits[-1]}, as bits do")
        super().check()

    @property
    def conversion(self) -> Conversion:
        """Codes are unpacked and scaled."""
        return "unpack"

    def check_place(self, place: Place) -> None:
        """A group cannot be longer than the row."""
        super().check_place(place)
        if self.group is not None and place.width and self.group > place.width:
            raise KvsimError(f"mixed: group={self.group} exceeds the row, at {place.where}; at most {place.width}")

    def row_bytes(self, width: int) -> int:
        """Bytes of one head's codes in a row: ceil(mean * width / 8), the mean being the decimal that was written."""
        share = Fraction(str(self.mean)) * width / 8
        return -(-share.numerator // share.denominator)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Padded code rows, fp16 scale and minimum a group and row, and the widths once something is encoded."""
        groups = -(-place.width // (self.group or 64))
        return (
            Buffer("codes", place.heads, rows, self.row_bytes(place.width), 8),
            Buffer("scale", place.heads, rows, groups, 16),
            Buffer("min", place.heads, rows, groups, 16),
            Buffer("widths", place.heads, 1 * (rows > 0), groups, 8, rows_per_unit=0),
        )
