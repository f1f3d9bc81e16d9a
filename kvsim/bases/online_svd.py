"""A singular basis that turns with every row that arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.latent import Projection, check_rank, ready, row_bytes, svd_flops
from kvsim.parts import Buffer, Format, Latent, Place, Quantizer, Work, per_tokens, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class OnlineSvd(Projection):
    """Brand's update: p = x V^T, the residual's direction joins the basis, an SVD of (rank+1)^2 turns and truncates it.

    Full-precision coefficients of older rows are turned with the basis. Quantized ones are written once, so each
    flushed block keeps its coordinates and an rank x rank map into the present ones.
    """

    name: ClassVar[str] = "online_svd"
    summary: ClassVar[str] = "SVD basis updated by every row (Brand)"
    source: ClassVar[str] = "survey 5.2.1; Brand, Fast low-rank modifications of the thin SVD, 2006"
    survey: ClassVar[str] = "5.2.1"
    rewrites_rows: ClassVar[bool] = True

    rank: int = setting(32, low=1, always=True, what="coefficients a row and head")

    @property
    def minimum_rows(self) -> int:
        """The rank: fewer rows stay full."""
        return self.rank

    def check_format(self, part: Format) -> None:
        """A map for each block only pays where blocks have more rows than the rank."""
        super().check_format(part)
        if isinstance(part, Quantizer) and part.block_rows <= self.rank:
            raise KvsimError(
                f"online_svd stores a {self.rank} x {self.rank} map for each block of {part.name}, whose blocks have "
                f"{part.block_rows} rows; flush more rows at once, such as residual={2 * self.rank},flush=all"
            )

    def latent(self, place: Place) -> Latent:
        """rank coefficients for each head."""
        check_rank("online_svd", self.rank, place.width, place)
        return Latent(place.heads, self.rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Basis, fp32 singular values, and a map for each quantized block (blocks is 0 in full precision)."""
        there = ready(rows, self.rank)
        grows = per_tokens(64) * self.rank
        return (
            Buffer("basis", place.heads, self.rank * there, place.width, place.value_bits, rows_per_unit=0),
            Buffer("spectrum", place.heads, there, self.rank, 32, rows_per_unit=0),
            Buffer("maps", place.heads, blocks * self.rank * there, self.rank, place.value_bits, grows),
        )

    def fit_work(self, rows: Count, place: Place) -> Work:
        """The prompt in one batch, as svd does it."""
        there = ready(rows, self.rank)
        small, products = svd_flops(rows, place.width)
        products = place.heads * (products + 2.0 * rows * place.width * self.rank)
        held = there * self.rank * row_bytes(place)
        return Work(there * place.heads * small, there * rows * row_bytes(place), held, there * products)

    def write_work(self, place: Place) -> Work:
        """Projection and residual, an SVD of (rank+1)^2 with both sides (21 n^3), the turned basis written back."""
        r, w = self.rank, place.width
        products = place.heads * (4.0 * w * r + 2.0 * w * r * (r + 1))
        held = r * row_bytes(place)
        return Work(place.heads * 21.0 * (r + 1) ** 3, held, held, products)

    def rewrite_work(self, rows: Count, place: Place) -> Work:
        """Every stored row of full-precision coefficients is read, turned and written."""
        moved = 1.0 * rows * place.heads * self.rank * place.value_bits / 8
        return Work(0.0, moved, moved, 2.0 * rows * place.heads * self.rank**2)
