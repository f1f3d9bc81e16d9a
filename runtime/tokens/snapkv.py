"""What the prompt's last queries look at, running."""

from __future__ import annotations

from runtime.budgets import Smoothed


class SnapKVTwin(Smoothed):
    """The window's rows and, per KV head, those that it looks at most."""

    part_name = "snapkv"
