"""A case over pipeline stages: each stage's share of the model, and the stages' records joined into one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim import cost
from kvsim.model import ModelSpec
from kvsim.record import Case, Line, Record, Timing
from kvsim.work import LayerGroup

if TYPE_CHECKING:
    from kvsim.workload import Workload


def local_work(case: Case) -> Workload:
    """The workload as one rank attends it: with data-parallel attention its group's share of the sequences."""
    work, groups = case.workload, case.parallel.attention_data
    return work if groups == 1 else replace(work, batch=-(-work.batch // groups))


def stage_model(model: ModelSpec, run: range) -> ModelSpec:
    """The layers of a run; embeddings and towers with the first one, the head (a copy of its own) with the last."""
    first, last = run.start == 0, run.stop == model.n_layers
    return replace(
        model,
        layers=model.layers[run.start : run.stop],
        embeddings=model.embeddings if first else (),
        towers=model.towers if first else (),
        head=model.head if last else None,
        tied=model.tied and first and last,
        other_parameters=model.other_parameters if last else 0,
    )


def within(groups: tuple[LayerGroup, ...], run: range | None) -> tuple[LayerGroup, ...]:
    """The groups' layers inside a run; None: all."""
    if run is None:
        return groups
    kept = (replace(g, indices=tuple(i for i in g.indices if i in run)) for g in groups)
    return tuple(g for g in kept if g.indices)


def split_mlps(groups: tuple[LayerGroup, ...]) -> tuple[tuple[LayerGroup, ...], tuple[LayerGroup, ...]]:
    """(groups with their mixers' matrices, with the others'): data-parallel attention gives them different tokens."""
    from kvsim.engines.sharding import is_mlp

    parts = []
    for want in (False, True):
        parts.append(tuple(
            replace(g, layer=replace(g.layer, matrices=tuple(m for m in g.layer.matrices if is_mlp(m) is want)))
            for g in groups
        ))  # fmt: skip
    return parts[0], parts[1]


def joined(case: Case, records: Sequence[Record]) -> Record:
    """One record of all stages: bytes of the fullest, times added up (no stage works ahead), activations handed on."""
    fullest = max(records, key=lambda r: float(np.max(r.peak_bytes)))
    work, hops = case.workload, len(records) - 1
    step, prompt = (hops * _hand_on(case, tokens) for tokens in (work.batch, work.batch * work.prompt_tokens))

    def limits() -> tuple[Any, Any]:
        context, batch = (reduce(np.minimum, found) for found in zip(*(r.limits for r in records), strict=True))
        return context, batch

    note = f"bytes are those of pipeline stage {records.index(fullest) + 1} of {len(records)}, the fullest"
    return replace(
        fullest,
        peak_bytes=reduce(np.maximum, [r.peak_bytes for r in records]),
        prefill=_added([r.prefill for r in records], "prefill", prompt),
        decode=_added([r.decode for r in records], "decode", step),
        limits_of=limits,
        generation_of=lambda: sum(r.generation_seconds for r in records) + work.new_tokens * step,
        warnings=(*fullest.warnings, note),
    )


def _hand_on(case: Case, tokens: Any) -> Any:
    """Seconds to pass the hidden rows of so many tokens to the next stage: what two ranks' all-reduce moves one way."""
    timed = cost.allreduce_seconds(case.hardware, tokens * case.model.hidden_size * 2.0, 2)
    return timed.seconds


def _added(phases: Sequence[Timing], phase: Any, between: Any) -> Timing:
    """Lines of one name added over the stages, and one for what goes between them."""
    named: dict[str, list[Line]] = {}
    for timing in phases:
        for line in timing.lines:
            named.setdefault(line.name, []).append(line)
    lines = [_sum(found) for found in named.values()]
    handed = Line(phase, "stage hand-over", 0.0 * between, 0.0 * between, between, 0.6 * between, 1.7 * between,
                  lambda: "link", "links between stages, as a collective of two ranks")  # fmt: skip
    return Timing.of((*lines, handed))


def _sum(lines: Sequence[Line]) -> Line:
    total: dict[str, Any] = {
        name: sum(getattr(line, name) for line in lines) for name in ("bytes", "flops", "seconds", "low", "high")
    }
    longest = max(lines, key=lambda line: float(np.max(line.seconds)))
    return replace(longest, **total)
