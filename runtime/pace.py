"""How fast this machine is from moment to moment, as a product, a read and a small model's step tell."""

from __future__ import annotations

import numpy as np
import torch

from runtime.layer_runs import carrier
from runtime.timing import Bench

CALM = 1.12
"""How many times longer than at its best a piece of work may take beside a measurement that counts as undisturbed."""
BEST = 0.25
"""Quantile of the looks at the pace that counts as its best."""
BETWEEN = 1 << 24
"""Bytes read before each step, as much of a model's weights as passes by between two visits to the same code."""


class Pace:
    """A read of memory, a product and a small model's step, against their best quarter so far.

    On a processor that shares its core or memory with busy neighbours all of a model takes longer, by 1.5 times where
    two of them share a core, and its repeats agree all the same. Neighbours who use up the last cache slow down code
    alone: products and reads go on as before, while Python and small kernels take 1.3 times as long.

    known: seconds of the step when the machine was calibrated, 0 where nobody knows. The very best is luck, which no
    measurement can count on.
    """

    def __init__(self, where: torch.device, known: float = 0.0, seconds: float = 0.02) -> None:
        self.bench = Bench(where, BETWEEN, seconds)
        x, w, rows = (torch.ones(*shape, device=where) for shape in ((1 << 22,), (1024, 1024), (64, 1024)))
        model, ids = carrier(3, 3, 64, "fp32", 1, where), torch.zeros(1, 1, dtype=torch.long, device=where)
        self.works = ((x.sum, False), (lambda: rows @ w, False), (lambda: model(input_ids=ids, use_cache=False), True))
        self.known = known
        self.looks: list[tuple[float, ...]] = []

    def now(self) -> float:
        """How many times as long as at its best the slowest of them takes."""
        return self.ratio(self.look())

    def look(self) -> tuple[float, ...]:
        """Seconds of each of them."""
        self.looks.append(tuple(self.bench.time(work, cold=cold).seconds for work, cold in self.works))
        return self.looks[-1]

    def ratio(self, took: tuple[float, ...]) -> float:
        """How many times as long as at their best so far the slowest took."""
        least = self._least()
        least[-1] = min(least[-1], self.known or least[-1])
        return max(one / best for one, best in zip(took, least, strict=True))

    def _least(self) -> list[float]:
        return [float(x) for x in np.quantile(np.array(self.looks), BEST, axis=0)]

    @property
    def step_s(self) -> float:
        """Seconds of the small model's step at its best so far."""
        return self._least()[-1]
