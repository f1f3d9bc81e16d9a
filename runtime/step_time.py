"""Decode steps after a prompt, timed: the whole, the cache's part and its decisions, beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsim.record import Timing
from runtime.cache import CompressedCache
from runtime.quality_reference import handed
from runtime.quality_run import rounded
from runtime.timing import steady, switches
from runtime.watch import Watch

CACHE, DECISION = "cache", "decision"
STEPS, WARM = 8, 2
"""Steps that are timed, and steps before them: the first ones find nothing in place."""


@dataclass(frozen=True)
class Stepped:
    """Seconds of a step, of that in the cache, and of each decision that fell into a step (in neither of the two)."""

    step: float
    cache: float
    decisions: tuple[float, ...] = ()


def timed_steps(model: Any, cache: CompressedCache, tokens: Tensor, warm: int = WARM,
                before: Callable[[int], None] | None = None) -> Stepped:
    """Feed tokens [B, n] one by one to a cache that holds a prompt. before: called with each step's number.

    Steps count as steady ones do in `kvsim measure`; a cache whose last layer decides is watched while it does.
    """
    watch, laps = Watch(tokens.device), []
    for layer in cache.layers:
        layer.attend = watch.wrap(layer.attend, CACHE)
    if decided := getattr(cache.layers[-1], "decided", None):
        cache.layers[-1].decided = watch.wrap(decided, DECISION)
    with torch.no_grad():
        for i in range(tokens.shape[1]):
            if before is not None:
                before(i)
            known = _decisions(cache)
            watch.clear()
            lost, start = switches(), watch.now()
            model(tokens[:, i : i + 1], **handed(model, cache))
            took, aside = watch.now() - start, watch.seconds[DECISION]
            laps.append((took - aside, watch.seconds[CACHE], aside, switches() - lost, _decisions(cache) > known))
    kept = [x for x in laps[min(warm, len(laps) - 1) :] if not x[4]] or laps
    lost_in = [x[3] for x in kept]
    return Stepped(steady([x[0] for x in kept], lost_in).seconds, steady([x[1] for x in kept], lost_in).seconds,
                   tuple(x[2] for x in laps if x[4]))


def _decisions(cache: CompressedCache) -> int:
    return len(getattr(cache, "decisions", ()))


def beside(name: str, predicted: Timing, measured: float) -> dict[str, float]:
    """Predicted seconds with their interval and measured ones, as results keep them."""
    said = {"predicted_seconds": predicted.seconds, "low": predicted.low, "high": predicted.high}
    return {f"{name}_{k}": rounded(float(x)) for k, x in (*said.items(), ("measured_seconds", measured))}
