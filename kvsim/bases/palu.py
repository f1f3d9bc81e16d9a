"""Palu: a latent for each group of heads, from decomposed projection weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.latent import Projection, check_rank, row_bytes
from kvsim.parts import Buffer, Latent, Place, Work, budget_rows, setting
from kvsim.workload import Count

GROUP = 4


@dataclass(frozen=True)
class Palu(Projection):
    """W = L R for each group of heads; h = R x is stored, keys are L h rotated at the read, L of values joins W_o.

    Here R acts on the cached rows (rank x group*width) and L is its decoder; both stay with the model. Palu rounds
    its searched ranks to multiples of 32; this takes one rank, or a ratio of a group's values, for every layer.
    """

    name: ClassVar[str] = "palu"
    summary: ClassVar[str] = "low-rank latent for each group of heads"
    source: ClassVar[str] = "Chang et al., Palu, arXiv 2407.21118"
    survey: ClassVar[str] = "5.3.2"
    calibrated: ClassVar[bool] = True

    rank: int | None = setting(None, low=1, what="coefficients of a group and row; none takes ratio")
    ratio: float = setting(0.5, low=0, high=1, what="coefficients as a share of a group's values, rounded up")
    group: int | None = setting(None, low=1, what="heads that share a latent; none: the largest divisor up to 4")
    rope: str = setting("pre", choices=("post", "pre"), what="keys are projected after or before the rotation")
    calibration: str | None = setting(None, what="file with the factors; needed to run, not to predict")

    def check(self) -> None:
        """One of rank and ratio, and a ratio that keeps something."""
        if self.rank is not None and self.ratio != 0.5:
            raise KvsimError("palu takes rank or ratio, not both")
        if self.ratio <= 0:
            raise KvsimError(f"palu: ratio must be above 0, got {self.ratio}")

    def heads_together(self, place: Place) -> int:
        """Heads of a group at this place."""
        if self.group is None:
            return max(g for g in range(1, GROUP + 1) if place.heads % g == 0)
        if place.heads % self.group:
            raise KvsimError(f"palu: group={self.group} does not divide the {place.heads} heads of {place.where}")
        return self.group

    @property
    def joins_heads(self) -> bool:
        """One row of coefficients stands for several heads."""
        return True

    def latent(self, place: Place) -> Latent:
        """rank coefficients for each group of heads."""
        together = self.heads_together(place)
        whole = together * place.width
        rank = int(budget_rows(self.ratio, whole)) if self.rank is None else self.rank
        check_rank("palu", rank, whole, place, f"the values of {together} heads")
        return Latent(place.heads // together, rank)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """The model's factors, a rank x width slice for each head."""
        rank = self.latent(place).width
        return tuple(
            Buffer(name, place.heads, rank, place.width, place.value_bits, rows_per_unit=0, per_model=True)
            for name in ("encoder", "decoder")
        )

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Nothing is fitted: all rows are read and projected."""
        return Work(read_bytes=rows * row_bytes(place), products=rows * self.rebuild_flops(place))

    def write_work(self, place: Place) -> Work:
        """One product with each group's encoder, which is read."""
        return Work(read_bytes=self.latent(place).width * row_bytes(place), products=self.rebuild_flops(place))
