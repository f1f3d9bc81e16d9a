"""Heavy hitters, running."""

from __future__ import annotations

from runtime.budgets import Ranked


class H2OTwin(Ranked):
    """Accumulated weights rank each KV head; its newest rows are safe."""

    part_name = "h2o"
