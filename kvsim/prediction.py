"""Predict: a case's layouts, work and time put together into a record; works on arrays as on numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvsim import cost
from kvsim.errors import KvsimError
from kvsim.largest import largest
from kvsim.layout import cross_layout, layer_keys, layer_layout, smallest
from kvsim.model import ModelSpec
from kvsim.op import Op, cold_bytes, moved_bytes, op_seconds
from kvsim.ragged import running_layout
from kvsim.record import Case, HeldBuffer, Line, Numbers, Record, Timing
from kvsim.server import engine_seconds
from kvsim.stages import joined, local_work, split_mlps, stage_model, within
from kvsim.weights import default_weights, weight_format, weights_bytes
from kvsim.work import LayerGroup, activation_values, decode_ops, largest_layer, prefill_ops, products, reading
from kvsim.workload import Count, Workload

GIB = 2**30
RESERVE_BYTES = {"gpu": GIB, "unified": GIB, "accelerator": GIB, "tpu": GIB, "cpu": GIB // 2}
"""What a runtime keeps for itself: driver context, graphs, allocator slack (about 0.5 GiB each on NVIDIA)."""

CHUNK_TOKENS = 8192
"""Tokens of a prompt that servers run through the layers at once (vLLM's and SGLang's default chunk on large GPUs)."""

SCORE_ROWS = 1024
"""Query rows whose attention weights are held at once where a policy needs weights."""

MAX_TOKENS = 2**27


@dataclass(frozen=True, eq=False)
class _Question:
    """A case spread over its devices: the model of the fullest rank and the groups of its layers."""

    case: Case
    model: ModelSpec
    work: Workload
    rows: Sequence[Any] | None = None
    whole: ModelSpec | None = None
    """Of a pipeline stage: the rank's model with all stages' layers, and which of them are this stage's."""
    run: range | None = None

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers that are alike, with their layouts at N."""
        return self.layouts(self.work.new_tokens, self.rows)

    def layouts(self, new: Count, rows: Sequence[Any] | None = None) -> tuple[LayerGroup, ...]:
        """The layers' layouts after that many new tokens."""
        return within(_groups(self.whole or self.model, self.case, self.work.prompt_tokens, new, rows), self.run)

    def totals(
        self, groups: tuple[LayerGroup, ...], part: Literal["cache", "cross"], allocated: bool = False
    ) -> Numbers:
        """Bytes over all layers."""
        total: Any = 0
        for group in groups:
            layout = group.cache if part == "cache" else group.cross
            if layout is not None:
                total = total + len(group.indices) * layout.bytes(self.work.batch, allocated)
        return total

    def memory(self) -> dict[str, Numbers]:
        """The waterfall: what is held at the end, what comes on top at the prefill and decode peaks."""
        case, work, model = self.case, self.work, self.model
        weights = weights_bytes(model, case.weights or default_weights(model))
        size = case.value_bits / 8
        prompt_groups = self.layouts(0) if np.any(work.new_tokens) else self.groups
        live = activation_values(model) * size
        head = model.head.out_features * 4 if model.head else 0
        prefill_tokens = smallest(work.batch * work.prompt_tokens, CHUNK_TOKENS)
        constant = model.state_bytes(work.batch) + self.totals(self.groups, "cross", allocated=True)
        scratch = largest_layer(self.groups, work.prompt_tokens, work.batch, case.value_bits) + self._weights_scratch()
        at_prefill = (
            self.totals(prompt_groups, "cache", allocated=True) + scratch + prefill_tokens * live + work.batch * head
        )
        at_decode = self.totals(self.groups, "cache", allocated=True) + work.batch * (live + head)
        return {
            "weights": weights,
            "constant": constant,
            "scratch": scratch,
            "activations": prefill_tokens * live + work.batch * head,
            "peak": np.maximum(at_prefill, at_decode) + weights + constant,
        }

    def _weights_scratch(self) -> Numbers:
        """Attention weights that a policy reads during prefill, in blocks of query rows."""
        heads = [
            g.layer.attention.n_heads
            for g in self.groups
            if g.cache is not None and g.layer.attention is not None and g.cache.method.tokens.needs_weights
        ]
        if not heads:
            return 0
        prompt = self.work.prompt_tokens
        return 4 * max(heads) * self.work.batch * smallest(prompt, SCORE_ROWS) * prompt


def _groups(
    model: ModelSpec, case: Case, prompt: Count, new: Count, rows: Sequence[Any] | None
) -> tuple[LayerGroup, ...]:
    """Layers with their layouts; those that a policy could tell apart but does not are joined again."""
    found: dict[Any, LayerGroup] = {}
    for (layer, method, place), indices in layer_keys(model, case.method).items():
        for where in [[i] for i in indices] if rows is not None else [indices]:
            shape = (prompt, new, case.value_bits, where[0], model.n_layers)
            running = _running(rows, where[0]) if rows is not None else None
            if running is None:
                cache = layer_layout(layer, method, *shape)
            else:
                cache = running_layout(layer, method, *shape, running)
            reads = cache or (layer_layout(reading(layer), method, *shape) if layer.attention is not None else None)
            cross = cross_layout(layer, method, case.value_bits, where[0], model.n_layers)
            group = LayerGroup(layer, tuple(where), cache, cross, reads)
            alike: Any = len(found)
            if place >= 0 and rows is None and cache is not None and np.ndim(cache.rows.stored) == 0:
                alike = (layer, method, cache.rows, tuple(b.bytes for b in cache.policy_buffers))
                if alike in found:
                    group = replace(found[alike], indices=(*found[alike].indices, *where))
            found[alike] = group
    return tuple(found.values())


def _running(rows: Sequence[Any], layer: int) -> Sequence[int] | None:
    """What a running cache reports for a layer: one number, or one for each sequence and KV head."""
    if layer >= len(rows):
        raise KvsimError(f"rows: {len(rows)} entries, but layer {layer} exists; give one entry a layer")
    held = rows[layer]
    return [int(held)] if isinstance(held, int | np.integer) else held


def predict(case: Case, rows: Sequence[Any] | None = None) -> Record:
    """Answer a case: exact bytes, seconds with an interval, what fits.

    Args:
        case: the question; the workload's numbers may be arrays that broadcast.
        rows: row counts of a running cache, one entry a layer (`CompressedCache.rows()`), where data decide them.

    Raises KvsimError where a part cannot stand in one of the model's layers, or the layout cannot cut the model.
    """
    found = [_record(question) for question in _questions(case, rows)]
    return found[0] if len(found) == 1 else joined(case, found)


def _questions(case: Case, rows: Sequence[Any] | None = None) -> list[_Question]:
    """The case as the fullest rank of each pipeline stage sees it."""
    model, work = rank_model(case), local_work(case)
    if case.parallel.pipeline == 1:
        return [_Question(case, model, work, rows)]
    from kvsim.engines.parallel import stages

    runs = stages(model.n_layers, case.parallel.pipeline)
    return [_Question(case, stage_model(model, run), work, rows, model, run) for run in runs]


def _record(question: _Question) -> Record:
    case, work, held = question.case, question.work, question.memory()
    cache, cross = question.totals(question.groups, "cache"), question.totals(question.groups, "cross")
    state = question.model.state_bytes(work.batch)
    hardware = case.hardware
    reserve = RESERVE_BYTES.get(hardware.kind, GIB) if case.reserve_bytes is None else case.reserve_bytes
    return Record(
        case=case,
        source="predicted",
        cache_bytes=cache,
        state_bytes=state,
        cross_bytes=cross,
        allocated_bytes=question.totals(question.groups, "cache", allocated=True),
        full_bytes=question.model.cache_bytes(work.tokens, work.batch, case.value_bits),
        weights_bytes=held["weights"],
        total_bytes=held["weights"] + cache + cross + state,
        peak_bytes=held["peak"],
        memory=tuple(_waterfall(question, held, reserve)),
        reserve_bytes=reserve,
        prefill=Timing.of(tuple(_lines(question, "prefill"))),
        decode=Timing.of(tuple(_lines(question, "decode"))),
        buffers_of=lambda: tuple(_buffers(question)),
        limits_of=lambda: _limits(question, reserve),
        generation_of=lambda: _generation(question),
        warnings=tuple(_warnings(question)),
    )


def rank_model(case: Case) -> ModelSpec:
    """The model as the fullest of the devices holds it."""
    if case.devices == 1:
        return case.model
    from kvsim.engines.sharding import rank_model as shard

    case.parallel.check(case.model)
    return shard(case.model, replace(case.parallel, pipeline=1))


def _waterfall(question: _Question, held: dict[str, Numbers], reserve: int) -> Iterator[tuple[str, Numbers]]:
    yield "weights", held["weights"]
    parts: dict[str, Any] = {}
    for group in question.groups:
        layout = group.cache
        for b in layout.buffers if layout else ():
            name = "keys" if b.name.startswith("k.") else "values" if b.name.startswith("v.") else "bookkeeping"
            name = b.name if b.name in ("index", "compressed") else name
            held_bytes = layout.copies(b, question.work.batch) * b.bytes if layout else 0
            parts[name] = parts.get(name, 0) + len(group.indices) * held_bytes
    yield from ((f"cache: {name}", value) for name, value in parts.items())
    yield "state and cross-attention", held["constant"]
    yield "prefill scratch", held["scratch"]
    yield "activations", held["activations"]
    yield "runtime reserve", reserve


def phase_ops(case: Case, phase: Literal["prefill", "decode"]) -> list[Op]:
    """The kernel-sized pieces of one phase, each with its count, before any time."""
    return [op for question in _questions(case) for op in _ops(question, phase)]


def _ops(question: _Question, phase: Literal["prefill", "decode"]) -> Iterator[Op]:
    case, work, model = question.case, question.work, question.model
    fmt = weight_format(case.weights or default_weights(model))
    table = "bf16" if fmt.embedding_bits == 16 else fmt.matmul
    prompt = np.maximum(work.prompt_tokens, 1) if np.ndim(work.prompt_tokens) else max(work.prompt_tokens, 1)
    groups: tuple[LayerGroup, ...] = question.groups
    shared: tuple[LayerGroup, ...] = ()
    if case.parallel.attention_data > 1:
        groups, shared = split_mlps(groups)
    if phase == "decode":
        yield from decode_ops(model, groups, work.batch, fmt.matmul, case.value_bits)
    else:
        yield from prefill_ops(model, groups, work.batch, prompt, fmt.matmul, case.value_bits, table)
    tokens = case.workload.batch * (1 if phase == "decode" else prompt)
    yield from (op for op in products(model, shared, tokens, fmt.matmul) if op.kind == "matmul")


def _lines(question: _Question, phase: Literal["prefill", "decode"]) -> Iterator[Line]:
    """The phase's ops timed, those of one name added up."""
    case, work = question.case, question.work
    scale: Any = 1.0 if phase == "decode" else (np.asarray(work.prompt_tokens) > 0) * 1.0
    named: dict[str, list[tuple[Op, cost.Seconds]]] = {}
    ops = list(_ops(question, phase))
    cold = cold_bytes(case.hardware, ops)
    for op in ops:
        for timed in op_seconds(case.hardware, op, case.kernel, cold):
            named.setdefault(op.name, []).append((op, timed))
    if case.parallel.tensor > 1:
        named["all-reduce"] = _allreduce(question, work.batch * (1 if phase == "decode" else work.prompt_tokens))
    added = engine_seconds(case.hardware, question.model, case.kernel)
    if added is not None:
        named["engine"] = [(Op("engine", "elementwise"), added)]
    for name, pieces in named.items():
        yield line_of(phase, name, pieces, scale)


def _allreduce(question: _Question, tokens: Any) -> list[tuple[Op, cost.Seconds]]:
    """An all-reduce after each mixer and each MLP that is cut, of one activation row a token of the whole batch."""
    from kvsim.engines.parallel import reductions

    layout = question.case.parallel
    count = sum(len(g.indices) * reductions(g.layer, layout) for g in question.groups)
    size = tokens * layout.attention_data * question.model.hidden_size * 2.0
    timed = cost.allreduce_seconds(question.case.hardware, size, layout.tensor)
    return [(Op("all-reduce", "elementwise", count, bytes=size), timed)]


def line_of(phase: Literal["prefill", "decode"], name: str, pieces: list[tuple[Op, cost.Seconds]], scale: Any) -> Line:
    """Timed pieces of one name as a line of a record."""
    total: dict[str, Any] = dict.fromkeys(("bytes", "flops", "seconds", "low", "high"), 0.0)
    for op, timed in pieces:
        size, flops = _bytes_flops(op)
        found = {"bytes": size, "flops": flops, "seconds": timed.seconds, "low": timed.low, "high": timed.high}
        for key, value in found.items():
            total[key] = total[key] + op.count * value
    biggest = max(pieces, key=lambda p: float(np.max(p[0].count * np.asarray(p[1].seconds))))[1]
    return Line(
        phase,
        name,
        total["bytes"] * scale,
        total["flops"] * scale,
        total["seconds"] * scale,
        total["low"] * scale,
        total["high"] * scale,
        lambda: biggest.term,
        "; ".join(dict.fromkeys(t.coefficients for _, t in pieces)),
    )


def _bytes_flops(op: Op) -> tuple[Any, Any]:
    return moved_bytes(op), 2.0 * op.m * op.n * op.k if op.kind == "matmul" else op.flops


def _buffers(question: _Question) -> Iterator[HeldBuffer]:
    batch = question.work.batch
    found = []
    for group in question.groups:
        for prefix, layout in (("", group.cache), ("cross.", group.cross)):
            for b in layout.buffers if layout else ():
                many = layout.copies(b, batch) if layout else 0
                found += [
                    HeldBuffer(prefix + b.name, i, (many, b.heads, b.rows, b.width), b.bits, many * b.bytes)
                    for i in group.indices
                ]
    yield from sorted(found, key=lambda b: b.layer)


def _warnings(question: _Question) -> Iterator[str]:
    yield from question.model.warnings
    yield from dict.fromkeys(g.cache.estimate for g in question.groups if g.cache and g.cache.estimate)
    if any(p.calibrated for m in (question.case.method,) for p in (m.k.basis, m.v.basis)):
        yield "a calibrated basis runs only with calibration=FILE; its bytes and time do not depend on the file"
    if question.model.towers:
        towers = f"{question.model.tower_parameters:,} parameters of vision or audio towers"
        yield f"weights include {towers}, whose own work is not timed"


def _generation(question: _Question) -> Numbers:
    """All K decode steps: exact up to 16 of them, else Gauss-Legendre over the steps (smooth but for tails)."""
    work = question.work
    if not np.any(work.new_tokens):
        return 0.0 * np.asarray(work.tokens)[()]
    steps: list[tuple[Any, Any]]
    if np.ndim(work.new_tokens) == 0 and int(work.new_tokens) <= 16:
        steps = [(k, 1.0) for k in range(1, int(work.new_tokens) + 1)]
    else:
        nodes, shares = np.polynomial.legendre.leggauss(8)
        steps = [
            (np.maximum(1, np.rint((x + 1) / 2 * work.new_tokens + 0.5)).astype(np.int64), s / 2 * work.new_tokens)
            for x, s in zip(nodes, shares, strict=True)
        ]
    total: Any = 0.0
    for k, share in steps:
        at = replace(work, new_tokens=np.minimum(k, work.new_tokens))
        total = total + share * Timing.of(tuple(_lines(replace(question, work=at, rows=None), "decode"))).seconds
    return total


def _limits(question: _Question, reserve: int) -> tuple[Numbers, Numbers]:
    room = question.case.hardware.capacity_bytes - reserve

    def fits(work: Workload) -> Any:
        return replace(question, work=work, rows=None).memory()["peak"] <= room

    top = smallest(question.case.model.max_context or MAX_TOKENS, MAX_TOKENS)
    context, batch = largest(fits, question.work, top)
    return context, batch * question.case.parallel.attention_data
