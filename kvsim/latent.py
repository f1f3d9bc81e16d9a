"""What bases share: the side of the rotation on which they project, and the arithmetic of attention in a latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.parts import Basis, Place, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Projection(Basis):
    """A basis whose coefficients answer queries directly, or from which keys are rebuilt tile by tile (rope=pre)."""

    rope: str = setting("post", choices=("post", "pre"), what="keys are projected after or before the rotation")

    @property
    def before_rope(self) -> bool:
        """Whether keys are projected before the rotation."""
        return self.rope == "pre"

    def head_flops(self, place: Place) -> float:
        """Arithmetic for one query head to enter the latent (keys) or for its output to leave it (values)."""
        return 2.0 * self.latent(place).width * place.width

    def rebuild_flops(self, place: Place) -> float:
        """Arithmetic to rebuild one row of all stored heads."""
        return place.heads * self.head_flops(place)

    def attend_flops(self, rows: Count, place: Place) -> Any:
        """One step beyond attention on full-width rows.

        In the latent each query head multiplies `latent.width` instead of `place.width` values a row, and pays once to
        enter or leave. Keys projected before the rotation are rebuilt and rotated (3 flops a value) for all rows.
        """
        held = 1.0 * rows * (rows >= self.minimum_rows)
        if self.before_rope and place.side == "k":
            return held * (self.rebuild_flops(place) + 3.0 * place.heads * place.width)
        saved = 2.0 * held * (self.latent(place).width - place.width)
        return place.n_heads * (saved + self.head_flops(place) * (held > 0))


def check_rank(name: str, rank: int, limit: int, place: Place, of: str = "the width") -> None:
    """Raise KvsimError where `rank` exceeds what a place has, naming the place."""
    if rank > limit:
        raise KvsimError(f"{name}: rank {rank} exceeds {limit}, {of} at {place.where}; use {limit} or less")


def ready(rows: Count, minimum: int) -> Any:
    """1 where there are rows enough to fit a basis, else 0."""
    return 1 * (rows >= minimum)


def svd_flops(rows: Count, width: int) -> tuple[Any, Any]:
    """Singular values and right vectors of a rows x width matrix, 4 n d^2 + 8 d^3 with d the shorter side.

    The first term is blocked reflections, which are matrix products; returned as (other arithmetic, products).
    Golub and Van Loan, Matrix Computations, section 8.6 (Golub-Reinsch, singular values and V).
    """
    short = 1.0 * np.minimum(rows, width)
    return 8.0 * short**3, 4.0 * np.maximum(rows, width) * short**2


def row_bytes(place: Place) -> float:
    """Bytes of one full-precision row of all stored heads."""
    return place.heads * place.width * place.value_bits / 8.0
