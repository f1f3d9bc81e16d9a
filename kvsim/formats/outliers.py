"""A correction: the largest values of each row kept exactly, beside the codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Correction, Place, budget_rows, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Outliers(Correction):
    """Per row and head the m = ceil(fraction * width) values farthest from the row's middle, in full precision.

    They are replaced before encoding, so that they do not stretch the scale, and put back after decoding. An index
    takes one byte up to width 256, two above.
    """

    name: ClassVar[str] = "outliers"
    summary: ClassVar[str] = "largest values of each row kept exactly"
    source: ClassVar[str] = "KVQuant dense-and-sparse, arXiv 2401.18079; Kang et al., GEAR, arXiv 2403.05527"
    survey: ClassVar[str] = "3.1.2"
    encode_flops: ClassVar[float] = 4.0

    fraction: float = setting(0.01, low=0, high=1, always=True, what="share of a row's values kept exactly")

    def check(self) -> None:
        """No outliers is no correction."""
        if self.fraction <= 0:
            raise KvsimError(f"outliers: fraction must be above 0, got {self.fraction}; drop +outliers to keep none")

    def count(self, width: int) -> int:
        """Values kept of a row: ceil(fraction * width), the fraction taken as the decimal that was written."""
        kept = budget_rows(self.fraction, width)
        assert isinstance(kept, int)
        return kept

    def read_flops(self, place: Place) -> float:
        """Each kept value is written over its decoded one."""
        return float(self.count(place.width))

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Values and where they belong."""
        kept = self.count(place.width)
        return (
            Buffer("values", place.heads, rows, kept, place.value_bits),
            Buffer("index", place.heads, rows, kept, 8 if place.width <= 256 else 16),
        )
