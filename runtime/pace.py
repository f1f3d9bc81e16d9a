"""How fast this machine is from moment to moment, as one product and one read of memory tell; knows no model."""

from __future__ import annotations

import torch

from runtime.timing import Bench

CALM = 1.12
"""How many times longer than at its best a piece of work may take beside a measurement that counts as undisturbed."""


class Pace:
    """One product and one read of memory, against their best so far.

    On a processor that shares its core or memory with busy neighbours all of a model takes longer, by 1.5 times where
    two of them share a core, and its repeats agree all the same.
    """

    def __init__(self, where: torch.device) -> None:
        self.bench = Bench(where, 0, 0.02)
        x, w, rows = (torch.ones(*shape, device=where) for shape in ((1 << 22,), (1024, 1024), (64, 1024)))
        self.works = x.sum, lambda: rows @ w
        self.best = [float("inf")] * len(self.works)

    def now(self) -> float:
        """How many times as long as at its best the slower of them takes."""
        took = [self.bench.time(work, cold=False).seconds for work in self.works]
        self.best = [min(pair) for pair in zip(self.best, took, strict=True)]
        return max(one / least for one, least in zip(took, self.best, strict=True))
