"""The rows of largest importance by any score, running."""

from __future__ import annotations

from runtime.budgets import Ranked


class TopKTwin(Ranked):
    """Once for the prompt, or after every step."""

    part_name = "topk"
