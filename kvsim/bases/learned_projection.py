"""A calibrated encoder and decoder for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.latent import Projection, check_rank, row_bytes
from kvsim.parts import Buffer, Latent, Place, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class LearnedProjection(Projection):
    """c = P x and x ~ D c with P (rank x width) and D (width x rank) of each head learned on calibration data."""

    name: ClassVar[str] = "learned_projection"
    summary: ClassVar[str] = "calibrated encoder and decoder a head"
    source: ClassVar[str] = "survey 5.3.2"
    survey: ClassVar[str] = "5.3.2"
    calibrated: ClassVar[bool] = True

    rank: int = setting(32, low=1, always=True, what="coefficients a row and head")
    calibration: str | None = setting(None, what="file with the matrices; needed to run, not to predict")

    def latent(self, place: Place) -> Latent:
        """rank coefficients for each head."""
        check_rank("learned_projection", self.rank, place.width, place)
        return Latent(place.heads, self.rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The model's matrices."""
        return tuple(
            Buffer(name, place.heads, self.rank, place.width, place.value_bits, rows_per_unit=0, per_model=True)
            for name in ("encoder", "decoder")
        )

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Nothing is fitted: all rows are read and projected."""
        return Work(read_bytes=rows * row_bytes(place), products=2.0 * rows * place.heads * self.rank * place.width)

    def write_work(self, place: Place) -> Work:
        """One product with each head's encoder, which is read."""
        return Work(read_bytes=self.rank * row_bytes(place), products=2.0 * place.heads * self.rank * place.width)
