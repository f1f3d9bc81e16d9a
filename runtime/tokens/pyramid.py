"""A prompt budget that falls from layer to layer, running."""

from __future__ import annotations

from runtime.budgets import Smoothed


class PyramidTwin(Smoothed):
    """SnapKV's selection; the layer's count is the part's rule in whole numbers, from the place's layer."""

    part_name = "pyramid"
