"""Integers of widths that are given, one for each head or channel group: what an allocation handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting, written
from kvsim.workload import Count


@dataclass(frozen=True)
class Widths(Quantizer):
    """Integers as `int` writes them along the row, with a width for each KV head or each of its channel groups.

    `bits` lists the groups of the first head, then of the next; a shorter list gives equally many groups in a row the
    same width: one number for all, a number a head, a number a group. Heads of a row share its bytes, so that what one
    head does without another can have.
    """

    name: ClassVar[str] = "widths"
    summary: ClassVar[str] = "integers, a given width for each head or channel group"
    source: ClassVar[str] = "survey 3.3.2"
    survey: ClassVar[str] = "3.3.2, 7.2"

    bits: tuple[int, ...] = setting((4,), low=1, high=8, always=True, what="bits a code of each head or channel group")
    group: int | None = setting(None, low=1, what="channels that share a width and a scale; none means min(64, width)")

    @property
    def conversion(self) -> Conversion:
        """Codes are unpacked and scaled."""
        return "unpack"

    @property
    def joins_heads(self) -> bool:
        """Codes of a row's heads follow one another without gaps."""
        return True

    def groups(self, width: int) -> list[int]:
        """Channels of each group of one head; the last may have fewer."""
        size = self.group or max(1, min(64, width))
        return [min(size, width - first) for first in range(0, width, size)]

    def of_groups(self, heads: int, width: int) -> list[int]:
        """The width of every group, head by head."""
        count = heads * len(self.groups(width))
        return [self.bits[i * len(self.bits) // count] for i in range(count)]

    def check_place(self, place: Place) -> None:
        """Widths fall on the groups evenly, and a group is no longer than the row."""
        super().check_place(place)
        if self.group is not None and place.width and self.group > place.width:
            raise KvsimError(f"widths: group={self.group} exceeds the row, at {place.where}; at most {place.width}")
        each = len(self.groups(place.width))
        if place.heads * each % len(self.bits):
            raise KvsimError(
                f"widths: bits={written(self.bits)} are {len(self.bits)} widths, and the {place.where} have "
                f"{place.heads} heads of {each} groups; give 1, {place.heads} or {place.heads * each}"
            )

    def row_bytes(self, heads: int, width: int) -> int:
        """Bytes of the codes of one row, all heads together."""
        sizes = self.groups(width) * heads
        return -(-sum(n * b for n, b in zip(sizes, self.of_groups(heads, width), strict=True)) // 8)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Code rows of all heads together; fp16 scale and minimum a group and row."""
        groups = len(self.groups(place.width))
        return (
            Buffer("codes", 1, rows, self.row_bytes(place.heads, place.width), 8),
            Buffer("scale", place.heads, rows, groups, 16),
            Buffer("min", place.heads, rows, groups, 16),
        )
