"""What the newest query attends, running."""

from __future__ import annotations

from runtime.budgets import Ranked


class TovaTwin(Ranked):
    """The newest query's weights, averaged over all heads: one set of rows for the layer."""

    part_name = "tova"
