"""Which held rows a step reads, as spans that the kernels walk over: no row is gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from runtime.side import Runs
    from runtime.store import Store

Spans = tuple[Tensor, Tensor]
"""[spans, 2] first row and the one behind the last; [pairs + 1] the first span of each (sequence, head)."""


def spans_of(store: Store, q: Tensor) -> Spans | str | None:
    """The spans of a step with queries [B, Hq, 1, d]; None: all rows; a reason where the sides' rows do not match."""
    found, pairs = read_by(store, q), _pairs(store, q)
    if isinstance(found, list):
        return shared(found, pairs)
    return apart(found.reshape(pairs, -1)) if isinstance(found, Tensor) else found


def read_by(store: Store, q: Tensor) -> Runs | Tensor | str | None:
    """What a step reads: the same runs for every (sequence, head), or rows [B, H, m] of each; as `spans_of` says."""
    runs = _live(store)
    if isinstance(runs, str):
        return runs
    policy = store.policy
    chosen = None
    if policy is not None and not store.waiting:
        chosen = policy.attended(store.state_tensors(), q, store.keys.rows)
    if chosen is None:
        return runs
    if runs is not None:
        return "rows that are read and rows that leave are chosen separately"
    if chosen.shape[0] * chosen.shape[1] != _pairs(store, q):
        return "heads of a latent read rows of several heads"
    return chosen


def _pairs(store: Store, q: Tensor) -> int:
    return q.shape[0] * store.keys.twins.inner.place.heads


def rows_apart(store: Store) -> str:
    """Why the sides' rows cannot be walked over together; empty where they can."""
    found = _live(store)
    return found if isinstance(found, str) else ""


def _live(store: Store) -> Runs | str | None:
    """Runs of held rows that the step may see; None: all."""
    from runtime import leaving  # it imports the sides, which import these kernels

    appended = store.keys.appended
    if store.geometry.window:
        ranges = [(max(0, appended - store.geometry.window), appended)]
    else:
        # nothing is dropped before the step, and any steps that wait, are over
        settled = appended - 1 - sum(step.new for step in store.waiting)
        before = store.ranges_after(settled)
        if before is None:
            return None
        ranges = leaving.joined([*before, (settled, appended)])
    found = []
    for side in (store.keys, store.values):
        held = [(0, side.appended)] if side.runs is None else side.runs
        found.append(leaving.places(held, leaving.overlap(held, ranges)))
    return found[0] if found[0] == found[1] else "sides hold rows that wait for the rest of their unit"


def shared(runs: Runs, pairs: int) -> Spans:
    """The same runs for every pair."""
    return torch.tensor(runs).repeat(pairs, 1), torch.arange(pairs + 1) * len(runs)


def apart(rows: Tensor) -> Spans:
    """Spans of ascending rows [pairs, m], each pair's own."""
    breaks = rows[:, 1:] != rows[:, :-1] + 1
    edge = breaks.new_ones((rows.shape[0], 1))
    first, last = torch.cat([edge, breaks], 1), torch.cat([breaks, edge], 1)
    counts = first.sum(1).cumsum(0)
    return torch.stack([rows[first], rows[last] + 1], 1).contiguous(), torch.cat([counts.new_zeros(1), counts])
