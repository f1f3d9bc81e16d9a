"""Tiers by age, running."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.tokens.tiers import Tiers
from runtime.positional import Indices, Positional


class TiersTwin(Positional):
    """The older the tier, the wider the stride."""

    part_name = "tiers"
    part: Tiers

    def stays(self, rows: Indices, seen: int) -> NDArray[np.bool_]:
        """A sink, or a multiple of the stride of the tier that its age falls in."""
        ends = np.cumsum(self.part.sizes)
        tier = np.searchsorted(ends, seen - 1 - rows, side="right")
        strides = np.array([*self.part.strides, 1])
        found: NDArray[np.bool_] = (rows < self.part.sinks) | ((tier < len(ends)) & (rows % strides[tier] == 0))
        return found
