"""The right singular vectors of the prompt's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.latent import Projection, check_rank, ready, row_bytes, svd_flops
from kvsim.parts import Buffer, Latent, Place, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Svd(Projection):
    """K = C V with V (rank x width) orthonormal, fitted once on the prompt; later rows are projected, c = x V^T.

    joint=none fits each stored head by itself; joint=heads one basis for all of them together.
    """

    name: ClassVar[str] = "svd"
    summary: ClassVar[str] = "truncated SVD of the prompt's rows"
    source: ClassVar[str] = "survey 5.2; Eckart and Young, 1936"
    survey: ClassVar[str] = "5.2"

    rank: int = setting(32, low=1, always=True, what="coefficients a row (of each head, or of all with joint=heads)")
    joint: str = setting("none", choices=("none", "heads"), what="heads that share a basis")

    @property
    def minimum_rows(self) -> int:
        """The rank: fewer rows stay full."""
        return self.rank

    @property
    def joins_heads(self) -> bool:
        """One row of coefficients stands for several heads."""
        return self.joint == "heads"

    def latent(self, place: Place) -> Latent:
        """rank coefficients for each head, or for all together."""
        if self.joint == "heads":
            check_rank("svd", self.rank, place.heads * place.width, place, "heads x width")
            return Latent(1, self.rank)
        check_rank("svd", self.rank, place.width, place)
        return Latent(place.heads, self.rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The basis of this sequence."""
        held = self.rank * ready(rows, self.rank)
        width = place.width * place.heads if self.joint == "heads" else place.width
        heads = self.latent(place).heads
        return (Buffer("basis", heads, held, width, place.value_bits, rows_per_unit=0),)

    def fit_work(self, rows: Count, place: Place) -> Work:
        """The decomposition, the projection of the rows, one reading of them and the basis written."""
        there = ready(rows, self.rank)
        heads = self.latent(place).heads
        width = place.heads * place.width // heads
        small, products = svd_flops(rows, width)
        products = heads * (products + 2.0 * rows * width * self.rank)
        return Work(
            there * heads * small,
            there * rows * row_bytes(place),
            there * self._basis_bytes(place),
            there * products,
        )

    def write_work(self, place: Place) -> Work:
        """One product with the basis, which is read."""
        return Work(read_bytes=self._basis_bytes(place), products=2.0 * self.rank * place.heads * place.width)

    def _basis_bytes(self, place: Place) -> float:
        return self.rank * row_bytes(place)
