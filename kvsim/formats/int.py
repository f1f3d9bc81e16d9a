"""Uniform integers with a scale (and a minimum) for each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, per_tokens, setting
from kvsim.workload import Count

SCALE_BITS = {"fp16": 16, "fp32": 32, "bf16": 16}


@dataclass(frozen=True)
class Int(Quantizer):
    """Per group: s = (max - min) / (2^b - 1), c = round((x - min) / s); symmetric codes are +-(2^(b-1) - 1).

    axis=token groups `group` neighbouring channels of one row (the last group may be shorter); row takes the whole row
    of a head, whatever its width; channel groups `group` consecutive rows of one channel; head and layer share one
    scale over `group` rows of a head, of all heads.
    """

    name: ClassVar[str] = "int"
    summary: ClassVar[str] = "uniform integers, one scale and minimum a group"
    source: ClassVar[str] = "survey 3.1.1, 3.2; Liu et al., KIVI, arXiv 2402.02750"
    survey: ClassVar[str] = "3.1.1, 3.2"

    bits: int = setting(4, low=1, high=8, always=True, what="bits a code")
    group: int | None = setting(None, low=1, what="values a group; none means min(64, width)")
    axis: str = setting("token", choices=("token", "row", "channel", "head", "layer"), what="along what a group runs")
    symmetric: bool = setting(False, what="no minimum, codes around zero")
    scale_dtype: str = setting("fp16", choices=tuple(SCALE_BITS), what="dtype of scale and minimum")

    def check(self) -> None:
        """A symmetric code needs a sign and a magnitude."""
        if self.symmetric and self.bits < 2:
            raise KvsimError("int: symmetric codes need bits of 2 or more")
        if self.axis == "row" and self.group is not None:
            raise KvsimError("int: axis=row has one group a row; leave group away, or use axis=token with it")
        super().check()

    @property
    def rows_together(self) -> int:
        """Rows that share a scale: the group where it runs over rows."""
        return 64 if self.group is None else self.group

    @property
    def unit(self) -> int:
        """Rows that are encoded together."""
        return 1 if self.axis in ("token", "row") else self.rows_together

    @property
    def conversion(self) -> Conversion:
        """Codes of 8 bits are scaled, smaller ones unpacked first."""
        return "scale" if self.bits == 8 else "unpack"

    @property
    def kernel_format(self) -> str:
        """int8, int4 ..."""
        return f"int{self.bits}"

    @property
    def row_addressable(self) -> bool:
        """Groups over rows tie rows together."""
        return self.axis in ("token", "row")

    def width_group(self, width: int) -> int:
        """Values of a group along the row (a row of width 0 has none)."""
        if self.axis == "row":
            return max(1, width)
        return max(1, min(64, width)) if self.group is None else self.group

    def check_place(self, place: Place) -> None:
        """A group along the row cannot be longer than the row."""
        super().check_place(place)
        if self.axis == "token" and self.group is not None and place.width and self.group > place.width:
            raise KvsimError(f"int: group={self.group} is longer than the row, at {place.where}; at most {place.width}")

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes row by row; scales and minima by group."""
        found = [Buffer("codes", place.heads, rows, place.width, self.bits)]
        scale = SCALE_BITS[self.scale_dtype]
        for name in ("scale",) if self.symmetric else ("scale", "min"):
            if self.axis in ("token", "row"):
                groups = -(-place.width // self.width_group(place.width))
                found.append(Buffer(name, place.heads, rows, groups, scale))
            else:
                heads = 1 if self.axis == "layer" else place.heads
                width = place.width if self.axis == "channel" else 1
                found.append(Buffer(name, heads, rows // self.unit, width, scale, per_tokens(self.unit)))
        return tuple(found)
