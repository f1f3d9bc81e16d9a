"""Dynamic ranks: what heads hold whose directions come and go, to the byte, and which directions a budget keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
NOTE_BYTES = 8
"""Beside a direction: its running energy (fp32) and the row from which it has coefficients (int32)."""


@dataclass(frozen=True)
class HeadState:
    """One head of one side: the row from which each kept direction has coefficients; rows written; rows in the tail.

    centred: a mean row is held, which rows are written without.
    """

    width: int
    births: tuple[int, ...]
    rows: int
    tail: int
    centred: bool = False

    @property
    def rank(self) -> int:
        """Directions kept."""
        return len(self.births)

    def bytes(self, value_bits: int) -> int:
        """Directions (`width` values each), a coefficient for every row since its birth, notes, mean, and full tail."""
        values = sum(self.width + self.rows - b for b in self.births) + (self.tail + self.centred) * self.width
        return values * value_bits // 8 + NOTE_BYTES * self.rank


def cache_bytes(states: Iterable[HeadState], value_bits: int) -> int:
    """Bytes of all heads of all sides, layers and sequences: exact once the ranks are known (`cache.states()`)."""
    return sum(s.bytes(value_bits) for s in states)


def limit_bytes(model: ModelSpec, share: float, tokens: int, value_bits: int) -> int:
    """What a sequence may hold: a share of the uncompressed cache of so many tokens."""
    if not 0 < share <= 1:
        raise KvsimError(f"ranks: share is above 0 and at most 1, got {share}")
    return int(share * model.cache_bytes(tokens, 1, value_bits))


def direction_bytes(width: int, rows: int, value_bits: int) -> int:
    """A direction with coefficients for `rows` rows."""
    return (width + rows) * value_bits // 8 + NOTE_BYTES


def fill(gain: ArrayLike, cost: ArrayLike, budget: float) -> tuple[Flags, float]:
    """(which to keep, largest gain that any choice within the budget can have).

    Directions of an orthonormal dictionary add up, so the best choice is a knapsack: by gain per byte until the budget
    is spent, later ones that still fit included. The second figure is its fractional optimum, which bounds every
    choice; with equal costs the two agree (water-filling: everything above one level of gain stays).
    """
    gains, costs = np.asarray(gain, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    if gains.shape != costs.shape or np.any(costs <= 0) or np.any(gains < 0):
        raise KvsimError("ranks: a gain of 0 or more and a cost above 0 for each direction")
    order = np.argsort(-(gains / costs), kind="stable")
    spent = np.cumsum(costs[order])
    whole = int(np.searchsorted(spent, budget, side="right"))
    kept = np.zeros(gains.shape, dtype=np.bool_)
    kept[order[:whole]] = True
    left = float(budget) - (float(spent[whole - 1]) if whole else 0.0)
    bound = float(gains[order[:whole]].sum())
    if whole < len(order):
        bound += float(gains[order[whole]] * max(0.0, left) / costs[order[whole]])
    least = float(costs.min(initial=np.inf))
    for i in order[whole:]:
        if left < least:
            break
        if costs[i] <= left and gains[i] > 0:
            kept[i] = True
            left -= float(costs[i])
    return kept, bound


def level(energies: ArrayLike, total: int) -> NDArray[np.int64]:
    """Exact ranks [groups] of `total` directions from falling energies [groups, width]: the water-filling answer."""
    table = np.asarray(energies, dtype=np.float64)
    kept, _ = fill(table.ravel(), np.ones(table.size), min(total, table.size))
    found: NDArray[np.int64] = kept.reshape(table.shape).sum(1)
    return found


def rounded_ranks(ranks: ArrayLike, total: int, width: int) -> NDArray[np.int64]:
    """Whole ranks that add up to `total`, from real ones: floors, then the largest remainders; 0 to `width` each.

    Raises KvsimError where no ranks within the width add up to the total.
    """
    real = np.clip(np.asarray(ranks, dtype=np.float64), 0, width)
    if not 0 <= total <= width * len(real):
        raise KvsimError(f"ranks: {total} directions do not fit {len(real)} heads of width {width}")
    found = np.floor(real).astype(np.int64)
    while (missing := total - int(found.sum())) != 0:
        step = 1 if missing > 0 else -1
        open_ = np.flatnonzero(found < width) if missing > 0 else np.flatnonzero(found > 0)
        best = open_[np.argsort(-step * (real - found)[open_], kind="stable")][: abs(missing)]
        found[best] += step
    return found


def lost(energies: ArrayLike, ranks: Sequence[int] | NDArray[np.int64]) -> float:
    """Share of the energy [groups, width] that ranks leave out."""
    table = np.asarray(energies, dtype=np.float64)
    left = np.arange(table.shape[1])[None] >= np.asarray(ranks)[:, None]
    return float((table * left).sum() / table.sum())
