"""The newest rows and the first ones, running."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsim.tokens.window import Window
from runtime.positional import Indices, Positional


class WindowTwin(Positional):
    """The first and the newest rows."""

    part_name = "window"
    part: Window

    def stays(self, rows: Indices, seen: int) -> NDArray[np.bool_]:
        """A sink, or younger than `recent`."""
        return (rows < self.part.sinks) | (rows >= seen - self.part.recent)
