"""Keep every token, running."""

from __future__ import annotations

from runtime.parts import PolicyTwin


class KeepTwin(PolicyTwin):
    """Nothing is chosen and nothing is held."""

    part_name = "keep"
