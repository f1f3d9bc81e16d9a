"""A controller that chooses a method a request: from its length, how spread its attention is, and free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsim.errors import KvsimError

FLOOR = 1e-6
"""Least loss whose logarithm is fitted."""


@dataclass(frozen=True)
class Signals:
    """What is known of a request before its prompt is compressed.

    entropy: mean entropy of the last queries' attention weights over log(rows), 0 (one row) to 1 (all alike).
    free_bytes: what the cache of this request may take.
    """

    prompt_tokens: int
    entropy: float
    free_bytes: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 0 <= self.entropy <= 1 or self.free_bytes < 0:
            raise KvsimError(f"signals: tokens from 1, entropy from 0 to 1, bytes from 0; got {self}")


@dataclass(frozen=True)
class Seen:
    """One calibration request: what was known of it, and what a method then lost (KL, nats a token)."""

    prompt_tokens: int
    entropy: float
    loss: float


@dataclass(frozen=True)
class Candidate:
    """A method by its written form, and its expected loss exp(a + b log T + c entropy)."""

    method: str
    a: float
    b: float = 0.0
    c: float = 0.0

    def expected(self, now: Signals) -> float:
        """Expected loss of a request."""
        return math.exp(self.a + self.b * math.log(now.prompt_tokens) + self.c * now.entropy)


def fitted(method: str, rows: Sequence[Seen], ridge: float = 1e-2) -> Candidate:
    """Least squares of log loss on log length and entropy, slopes held back by a ridge (requests are few).

    Raises KvsimError without rows.
    """
    if not rows:
        raise KvsimError(f"controller: {method} was seen on no request")
    x = np.array([[math.log(r.prompt_tokens), r.entropy] for r in rows])
    y = np.log([max(r.loss, FLOOR) for r in rows])
    centre, middle = x.mean(0), float(y.mean())
    spread = np.where(x.std(0) > 0, x.std(0), 1.0)
    z = (x - centre) / spread
    slopes = np.linalg.solve(z.T @ z + ridge * len(rows) * np.eye(2), z.T @ (y - middle)) / spread
    return Candidate(method, middle - float(slopes @ centre), float(slopes[0]), float(slopes[1]))


@dataclass(frozen=True)
class Decision:
    """What was chosen, whether that is a change, and why."""

    method: str
    changed: bool
    reason: str


@dataclass
class Controller:
    """Chooses the least expected loss + price * bytes of what fits; stays with what it has unless that pays.

    bytes_of: (method, prompt tokens) -> cache bytes. price: loss a byte is worth: it spends bytes where they help most;
    0: only the free memory counts. patience: share by which another method must be better, or by which free memory must
    exceed what a larger method needs, before the controller moves to it (hysteresis). A method that no longer fits is
    left at once. Raises KvsimError where nothing fits.
    """

    candidates: Sequence[Candidate]
    bytes_of: Callable[[str, int], int]
    price: float = 0.0
    patience: float = 0.15
    current: str | None = field(default=None)

    def __post_init__(self) -> None:
        if not self.candidates or self.price < 0 or not 0 <= self.patience < 1:
            raise KvsimError("controller: give candidates, a price from 0 and a patience from 0 to below 1")

    def decide(self, now: Signals) -> Decision:
        """The method of the next request."""
        sizes = {c.method: self.bytes_of(c.method, now.prompt_tokens) for c in self.candidates}
        fits = [c for c in self.candidates if sizes[c.method] <= now.free_bytes]
        if not fits:
            least = min(sizes, key=lambda m: sizes[m])
            raise KvsimError(f"controller: {now.prompt_tokens} tokens need {sizes[least]} bytes even as {least}, "
                             f"{now.free_bytes} are free")
        cost = {c.method: c.expected(now) + self.price * sizes[c.method] for c in fits}
        held = next((c for c in fits if c.method == self.current), None)
        if held is None:
            return self._take(min(cost, key=lambda m: cost[m]), "the first request" if self.current is None else
                              f"{self.current} no longer fits")
        roomy = [c.method for c in fits if sizes[c.method] <= sizes[held.method]
                 or sizes[c.method] * (1 + self.patience) <= now.free_bytes]
        best = min(roomy, key=lambda m: cost[m])
        if cost[best] < (1 - self.patience) * cost[held.method]:
            return self._take(best, f"expected cost {cost[best]:.3g} instead of {cost[held.method]:.3g}")
        return Decision(held.method, False, "nothing is better by enough")

    def _take(self, method: str, reason: str) -> Decision:
        changed, self.current = method != self.current, method
        return Decision(method, changed, reason)

    def decide_all(self, requests: Iterable[Signals]) -> list[Decision]:
        """One decision after another."""
        return [self.decide(now) for now in requests]
