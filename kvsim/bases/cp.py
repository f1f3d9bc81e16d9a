"""CP: a sum of rank-one terms over tokens, heads and channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.latent import Projection, check_rank, ready, row_bytes
from kvsim.parts import Buffer, Latent, Place, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Cp(Projection):
    """K[t, h, d] = sum_r A[t, r] B[h, r] C[d, r], fitted by alternating least squares.

    A token adds a row of A by least squares on the Khatri-Rao product of B and C, hence rank <= heads * width.
    """

    name: ClassVar[str] = "cp"
    summary: ClassVar[str] = "canonical polyadic decomposition"
    source: ClassVar[str] = "survey 5.4; Kolda and Bader, SIAM Review 51(3), 2009 (ALS)"
    survey: ClassVar[str] = "5.4"

    rank: int = setting(64, low=1, always=True, what="terms, which is coefficients a row for all heads together")
    iterations: int = setting(25, low=1, high=1000, what="sweeps of alternating least squares")

    @property
    def minimum_rows(self) -> int:
        """The rank: fewer rows stay full."""
        return self.rank

    @property
    def joins_heads(self) -> bool:
        """One row of coefficients stands for several heads."""
        return True

    def latent(self, place: Place) -> Latent:
        """A row of A for all heads together."""
        check_rank("cp", self.rank, place.heads * place.width, place, "heads x width")
        return Latent(1, self.rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The fixed factors of heads and channels."""
        held = ready(rows, self.rank)
        return (
            Buffer("head_factor", 1, place.heads * held, self.rank, place.value_bits, rows_per_unit=0),
            Buffer("channel_factor", 1, place.width * held, self.rank, place.value_bits, rows_per_unit=0),
        )

    def head_flops(self, place: Place) -> float:
        """A query through C, scaled by its head's row of B (or an output the other way)."""
        return 2.0 * place.width * self.rank + self.rank

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Each sweep multiplies the rows with three Khatri-Rao products and solves three normal systems."""
        r, h, w, there = self.rank, place.heads, place.width, ready(rows, self.rank)
        n: Any = 1.0 * rows
        sweep = 3 * 2.0 * n * h * w * r + 2.0 * r * r * (n + h + w) * 2 + r**3
        fixed = sum(b.bytes for b in self.buffers(rows, 0, place))
        read = there * 3.0 * self.iterations * rows * row_bytes(place)
        return Work(0.0, read, 1.0 * fixed, there * self.iterations * sweep)

    def write_work(self, place: Place) -> Work:
        """A row times the Khatri-Rao product, then a solve with its factored normal matrix."""
        r = self.rank
        fixed = sum(int(b.bytes) for b in self.buffers(r, 0, place))
        return Work(place.heads * r + 2.0 * r * r, float(fixed), products=place.heads * self.head_flops(place))
