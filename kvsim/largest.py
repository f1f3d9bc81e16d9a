"""The largest context and batch that fit, by bisection over whole arrays of candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvsim.record import Numbers
from kvsim.workload import Workload


def largest(fits: Callable[[Workload], Any], work: Workload, top: int) -> tuple[Numbers, Numbers]:
    """Largest context at the workload's batch, up to `top` tokens, and largest batch at its length."""

    def context_fits(tokens: Any) -> Any:
        new = np.minimum(work.new_tokens, tokens)
        return fits(replace(work, prompt_tokens=tokens - new, new_tokens=new))

    def batch_fits(batch: Any) -> Any:
        return fits(replace(work, batch=np.maximum(batch, 1)))

    return _last(context_fits, top, work.shape), _last(batch_fits, 2**24, work.shape)


def _last(fits: Callable[[Any], Any], top: int, shape: tuple[int, ...]) -> Numbers:
    """The largest count up to `top` that fits, 0 where not even 1 does; `fits` falls from true to false once."""
    low = np.zeros(shape, np.int64)
    high = np.full(shape, top + 1, np.int64)
    fan = 64 if not shape else 1
    while np.any(high - low > 1):
        step = np.arange(1, fan + 1).reshape((fan,) + (1,) * len(shape))
        points = low + np.maximum(1, (high - low) * step // (fan + 1))
        points = np.minimum(points, np.maximum(high - 1, low))
        good = fits(points if shape else points.ravel()).reshape(points.shape) & (points > low) | (points == low)
        low = np.max(np.where(good, points, low), axis=0)
        high = np.min(np.where(good, high, np.maximum(points, low + 1)), axis=0)
    return int(low) if not shape else low
