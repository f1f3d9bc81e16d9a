"""A predicted time: its interval, what dominates it, and how large questions are computed; not what takes the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, prod
from typing import Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.kernels import Choice

Real = Any
"""A float, or an array of float64 of the question's broadcast shape."""
Parts = tuple[tuple[str, Real], ...]
Timed = Callable[..., tuple[Real, Parts]]
"""Gives seconds and named terms for sizes passed by keyword."""
PIECE = 16_384
"""Points computed at once: their temporaries stay in a core's cache."""
Spread = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Seconds:
    """A predicted time, its 90% interval, what dominates it, and whose coefficients it used.

    Arrays have the broadcast shape of the question. `spread` and `memory_spread` are the factors to the ends of the
    interval; the second holds where `memory_bound`: reading takes at least half of the time, which is steadier than
    launches and waves. `parts` gives the named terms from which `term` is chosen.
    """

    seconds: Real
    spread: Spread
    coefficients: str
    parts: Callable[[], Parts]
    memory_bound: Real = False
    memory_spread: Spread = (1.0, 1.0)

    def _end(self, which: int) -> Real:
        factors = self.memory_spread[which], self.spread[which]
        if np.ndim(self.memory_bound) == 0:
            return self.seconds * (factors[0] if self.memory_bound else factors[1])
        return self.seconds * np.where(self.memory_bound, *factors)

    @property
    def low(self) -> Real:
        """Lower end: one time in twenty is measured below it."""
        return self._end(0)

    @property
    def high(self) -> Real:
        """Upper end: one time in twenty is measured above it."""
        return self._end(1)

    @property
    def term(self) -> Any:
        """The largest term: `memory`, `conversion`, `compute`, `launch`, `waves` ...; a str, or an array of them."""
        parts = self.parts()
        names = np.array([name for name, _ in parts])
        values = np.broadcast_arrays(*(value for _, value in parts), self.seconds)[:-1]
        found = names[np.argmax(np.stack(values), axis=0)]
        return str(found) if found.ndim == 0 else found


def memory_bound(seconds: Real, parts: Parts) -> Real:
    """Where moving bytes takes at least half of the time."""
    return 2.0 * dict(parts)["memory"] >= seconds


def answer(timed: Timed, sizes: dict[str, Any], choice: Choice) -> Seconds:
    """Seconds of `timed(**sizes)` with the interval of the chosen coefficients."""
    seconds, bound = _in_pieces(timed, sizes)
    c = choice.coefficient
    spread, steady = _spread(c.log_error, choice.widen), _spread(c.memory_log_error or c.log_error, choice.widen)
    return Seconds(seconds, spread, choice.said, lambda: timed(**sizes)[1], bound, steady)


def _spread(log_error: tuple[float, ...], widen: float) -> Spread:
    low, _, high = log_error
    return exp(-((low * low + widen * widen) ** 0.5)), exp((high * high + widen * widen) ** 0.5)


def common_shape(sizes: dict[str, Any]) -> tuple[int, ...]:
    """The broadcast shape of the sizes; KvsimError naming those that are arrays where there is none."""
    try:
        return np.broadcast_shapes(*(np.shape(size) for size in sizes.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {np.shape(size)}" for name, size in sizes.items() if np.ndim(size))
        raise KvsimError(f"shapes do not broadcast: {shapes}") from None


def _in_pieces(timed: Timed, sizes: dict[str, Any]) -> tuple[Real, Real]:
    """Seconds of `timed(**sizes)` and where memory bounds them, over pieces of the first axis that fit the cache."""
    shape = common_shape(sizes)
    total = prod(shape)
    if not shape:
        seconds, parts = timed(**sizes)
        return float(seconds), bool(memory_bound(seconds, parts))
    aligned = {k: np.reshape(v, (1,) * (len(shape) - np.ndim(v)) + np.shape(v)) if np.ndim(v) else v
               for k, v in sizes.items()}
    out, bound = np.empty(shape), np.empty(shape, bool)
    step = max(1, PIECE * shape[0] // max(1, total))
    for at in range(0, shape[0], step):
        piece = {k: v[at:at + step] if np.ndim(v) and v.shape[0] > 1 else v for k, v in aligned.items()}
        out[at:at + step], parts = timed(**piece)
        bound[at:at + step] = memory_bound(out[at:at + step], parts)
    return out, bound
