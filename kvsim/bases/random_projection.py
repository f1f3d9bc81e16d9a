"""A random matrix that nearly keeps products (Johnson-Lindenstrauss)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.latent import Projection, check_rank, row_bytes
from kvsim.parts import Buffer, Latent, Place, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class RandomProjection(Projection):
    """c = P x, x ~ P^T c with P (rank x width), one matrix for all heads of the side, stored with the model.

    gaussian: N(0, 1/r). sparse: +-sqrt(3/r) with probability 1/6 each, else 0 (stored dense). embedding: a count
    sketch, one bucket and one sign a channel. A useful distortion eps over n rows needs about 8 ln(n) / eps^2
    coefficients, which is more than a head has: 8 ln(4096) / 0.5^2 is 266.
    """

    name: ClassVar[str] = "random_projection"
    summary: ClassVar[str] = "random projection of rows"
    source: ClassVar[str] = "survey 5.3.1; Achlioptas, 2003; Clarkson and Woodruff, arXiv 1207.6365"
    survey: ClassVar[str] = "5.3.1"

    rank: int = setting(32, low=1, always=True, what="coefficients a row and head")
    kind: str = setting("gaussian", choices=("gaussian", "sparse", "embedding"), what="distribution of the matrix")

    @property
    def caution(self) -> str:
        """Johnson-Lindenstrauss needs r of about 8 ln n / eps^2 for a distortion eps: more than the width."""
        return (
            "random projections keep distances only at ranks above the width (8 ln n / eps^2); a fitted basis is better"
        )

    def latent(self, place: Place) -> Latent:
        """rank coefficients for each head."""
        check_rank("random_projection", self.rank, place.width, place)
        return Latent(place.heads, self.rank)

    def head_flops(self, place: Place) -> float:
        """A product with P; with a count sketch one signed sum a channel."""
        return 2.0 * place.width * (1 if self.kind == "embedding" else self.rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The model's matrix, or buckets (uint16) and signs (int8)."""
        if self.kind == "embedding":
            return (
                Buffer("buckets", 1, 1, place.width, 16, rows_per_unit=0, per_model=True),
                Buffer("signs", 1, 1, place.width, 8, rows_per_unit=0, per_model=True),
            )
        return (Buffer("matrix", 1, self.rank, place.width, place.value_bits, rows_per_unit=0, per_model=True),)

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Nothing is fitted: all rows are read and projected."""
        return Work(read_bytes=rows * row_bytes(place), products=1.0 * rows * place.heads * self.head_flops(place))

    def write_work(self, place: Place) -> Work:
        """One product for each head; the matrix is read."""
        held = sum(int(b.bytes) for b in self.buffers(0, 0, place))
        return Work(read_bytes=float(held), products=place.heads * self.head_flops(place))
