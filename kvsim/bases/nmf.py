"""Non-negative factors of rows whose sign is split off or shifted away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.errors import KvsimError
from kvsim.latent import Projection, check_rank, ready, row_bytes
from kvsim.parts import Buffer, Latent, Place, Work, setting
from kvsim.workload import Count

SWEEPS = 20
"""Coordinate sweeps of the non-negative least squares that gives a new row its coefficients."""


@dataclass(frozen=True)
class Nmf(Projection):
    """X ~ W H with W, H >= 0, for each head. Keys and values have signs, which NMF has not:

    sign=split factors the positive and the negative part, X = X+ - X-, and stores 2 * rank coefficients and factors;
    sign=shift adds each channel's largest magnitude below zero and stores rank of them and that offset.
    """

    name: ClassVar[str] = "nmf"
    summary: ClassVar[str] = "non-negative matrix factorisation"
    source: ClassVar[str] = "survey 5.5; Lee and Seung, 2001"
    survey: ClassVar[str] = "5.5"

    rank: int = setting(16, low=1, always=True, what="factors of each part")
    sign: str = setting("split", choices=("split", "shift"), what="how signed rows become non-negative")
    iterations: int = setting(100, low=1, high=10000, what="multiplicative updates of the fit")

    @property
    def minimum_rows(self) -> int:
        """The rank: fewer rows stay full."""
        return self.rank

    @property
    def coefficients(self) -> int:
        """Coefficients a row and head."""
        return 2 * self.rank if self.sign == "split" else self.rank

    def latent(self, place: Place) -> Latent:
        """rank coefficients a head, twice that with sign=split."""
        check_rank("nmf", self.rank, place.width, place)
        if self.coefficients > place.width:
            raise KvsimError(
                f"nmf: sign=split stores {self.coefficients} coefficients for {place.width} values at {place.where}; "
                f"use rank={place.width // 2} or less, or sign=shift"
            )
        return Latent(place.heads, self.coefficients)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The factors H, and the offset of a shift."""
        there, bits = ready(rows, self.rank), place.value_bits
        factors = Buffer("factors", place.heads, self.coefficients * there, place.width, bits, rows_per_unit=0)
        if self.sign == "split":
            return (factors,)
        return (factors, Buffer("offset", place.heads, there, place.width, bits, rows_per_unit=0))

    def head_flops(self, place: Place) -> float:
        """A query through H (or an output the other way), and its product with the offset."""
        return 2.0 * place.width * (self.coefficients + (self.sign == "shift"))

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Each update takes two products of the rows with factors and two of coefficients with a rank x rank matrix."""
        r, there, parts = self.rank, ready(rows, self.rank), self.coefficients // self.rank
        n: Any = 1.0 * rows
        update = 4.0 * n * place.width * r + 4.0 * n * r * r + 4.0 * place.width * r * r
        fixed = sum(b.bytes for b in self.buffers(rows, 0, place))
        read = there * 2.0 * self.iterations * rows * row_bytes(place)
        return Work(0.0, read, 1.0 * fixed, there * self.iterations * place.heads * parts * update)

    def write_work(self, place: Place) -> Work:
        """Products with the factors, then sweeps over a rank x rank system for each part."""
        fixed = sum(int(b.bytes) for b in self.buffers(self.rank, 0, place))
        each = 2.0 * place.width * self.rank + SWEEPS * 2.0 * self.rank**2
        return Work(place.heads * (self.coefficients // self.rank) * each, float(fixed))
