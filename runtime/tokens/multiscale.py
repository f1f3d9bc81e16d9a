"""Windows of several lengths at once, running."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.tokens.multiscale import Multiscale
from runtime.positional import Indices, Positional


class MultiscaleTwin(Positional):
    """A union of windows, each with its stride."""

    part_name = "multiscale"
    part: Multiscale

    def stays(self, rows: Indices, seen: int) -> NDArray[np.bool_]:
        """A sink, or a multiple of the stride of any window that still reaches it."""
        found = rows < self.part.sinks
        for window, stride in zip(self.part.windows, self.part.strides, strict=True):
            found |= (rows >= seen - window) & (rows % stride == 0)
        return found
