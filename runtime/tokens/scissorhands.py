"""Persistence of importance, running."""

from __future__ import annotations

from runtime.budgets import Ranked


class ScissorhandsTwin(Ranked):
    """Bits of the newest queries are counted for each row and KV head."""

    part_name = "scissorhands"
