"""Steps that wait to be settled, joined, cut or picked; and the rows that stay where some are dropped."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsim.errors import KvsimError
from runtime.parts import Step


def together(steps: list[Step], removed: int) -> Step:
    """Steps that waited as one step, without the `removed` newest tokens."""
    if len(steps) == 1 and not removed:
        return steps[0]
    new, last = sum(s.new for s in steps) - removed, steps[-1]
    rows = last.rows - removed

    def cat(pieces: list[Tensor | None]) -> Tensor | None:
        return (
            None if any(p is None for p in pieces) else torch.cat([p for p in pieces if p is not None], 2)[:, :, :new]
        )

    weights = cat([None if s.weights is None else pad(s.weights, (0, last.rows - s.rows)) for s in steps])
    return Step(
        last.seen - removed,
        rows,
        0,
        None if weights is None else weights[..., :rows],
        cat([s.queries for s in steps]),
        cat([s.keys for s in steps]),
        cat([s.values for s in steps]),
        new,
    )


def picked_step(step: Step, index: Tensor) -> Step:
    """The sequences `index` of a step."""
    names = ("weights", "queries", "keys", "values")
    found = {n: getattr(step, n) for n in names}
    return replace(step, **{n: None if x is None else x.index_select(0, index.to(x.device)) for n, x in found.items()})


def complement(drop: Tensor, rows: int) -> Tensor:
    """Rows not in drop [B, H, k], ascending [B, H, rows - k]."""
    if bool((drop < 0).any()):
        raise KvsimError("heads drop different numbers of rows: each needs a store of its own")
    batch, heads, k = drop.shape
    left = torch.ones((batch, heads, rows), dtype=torch.bool, device=drop.device)
    left.scatter_(2, drop, False)
    order = torch.arange(rows, device=drop.device).expand(batch, heads, rows)
    return order[left].reshape(batch, heads, rows - k)
