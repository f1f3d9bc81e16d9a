"""The layout of a running layer whose sequences and heads hold different numbers of rows: each counted by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from kvsim.layout import Layout, layer_layout, smallest
from kvsim.method import Method
from kvsim.model import Layer
from kvsim.parts import Buffer, Rows
from kvsim.record import as_count
from kvsim.workload import Count


class LayerRows(list[int]):
    """Rows held, one number for each sequence and KV head; `prompt`: how many were left when the prompt ended."""

    def __init__(self, held: Sequence[int], prompt: Sequence[int]) -> None:
        super().__init__(held)
        self.prompt = list(prompt)


@dataclass(frozen=True)
class RaggedLayout(Layout):
    """A layout with the buffers of all sequences and heads; its rows and sides are those of the mean head."""

    each: tuple[Buffer, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Every head's buffers."""
        return self.each

    def copies(self, buffer: Buffer, batch: Count) -> Count:
        """Each stands for itself."""
        return 1


def running_layout(
    layer: Layer, method: Method, prompt: Count, new: Count, value_bits: int, index: int, n_layers: int,
    held: Sequence[int],
) -> Layout | None:  # fmt: skip
    """The layout of a layer that holds `held` rows, a number for each sequence and KV head (or one for all).

    Where all are alike it is that of one sequence; else every head is laid out by itself and the buffers stand side by
    side, those of the model once.
    """
    kept = getattr(held, "prompt", [smallest(prompt, n) for n in held])
    pairs = list(zip(kept, held, strict=True))
    shape = (prompt, new, value_bits, index, n_layers)
    if len(set(pairs)) == 1:
        before, now = pairs[0]
        return layer_layout(layer, method, *shape, Rows(before, now, now))
    attention = layer.attention
    average = [as_count(np.mean(n)) for n in (kept, held)]
    mean = Rows(average[0], average[1], average[1])
    whole = layer_layout(layer, method, *shape, mean)
    if whole is None or attention is None:
        return None
    group = attention.n_heads // attention.n_kv_heads
    alone = replace(layer, attention=replace(attention, n_heads=group, n_kv_heads=1))
    found: list[Buffer] = [b for b in whole.buffers if b.per_model]
    by_rows: dict[tuple[int, int], list[Buffer]] = {}
    for before, now in pairs:
        if (before, now) not in by_rows:
            one = layer_layout(alone, method, *shape, Rows(before, now, now))
            by_rows[before, now] = [b for b in one.buffers if not b.per_model] if one else []
        found += by_rows[before, now]
    return RaggedLayout(**{f.name: getattr(whole, f.name) for f in fields(Layout)}, each=tuple(found))
