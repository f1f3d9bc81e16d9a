"""Every s-th row and the newest ones, running."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.tokens.stride import Stride
from runtime.positional import Indices, Positional


class StrideTwin(Positional):
    """Multiples of the stride, the first and the newest rows."""

    part_name = "stride"
    part: Stride

    def stays(self, rows: Indices, seen: int) -> NDArray[np.bool_]:
        """A sink, a multiple of `every`, or younger than `recent`."""
        part = self.part
        found: NDArray[np.bool_] = (rows < part.sinks) | (rows % part.every == 0) | (rows >= seen - part.recent)
        return found
