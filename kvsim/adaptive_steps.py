"""One decode step of caches that adapt, as pieces of work with times: portions, and ranks that are decided again.

What is counted is what `runtime/portioned.py` and `runtime/dynamic_rank.py` do; how long it takes is kvsim.cost's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvsim.content import counted
from kvsim.errors import KvsimError
from kvsim.latent import svd_flops
from kvsim.layout import layer_keys, layer_layout
from kvsim.method import parse_method
from kvsim.method_work import SMALL, calls_op, step_work
from kvsim.model import DTYPE_BITS, Attention, ModelSpec
from kvsim.op import EAGER, Op, cold_bytes, op_seconds
from kvsim.portions import LATER, Portions
from kvsim.prediction import line_of
from kvsim.ranks import NOTE_BYTES, HeadState
from kvsim.record import Line, Timing
from kvsim.weights import default_weights, weight_format
from kvsim.work import LayerGroup, around_layers, attend_op, head, products

if TYPE_CHECKING:
    from kvsim.hardware import HardwareProfile

STORE_CALLS, JOIN_CALLS = 8, 21
"""Torch calls to read a store of plain rows, and to join stores and attend (`PortionedLayer._step`, dispatched)."""
READ_KERNELS = 3
"""Streaming kernels to read a head's rows back beside its products: zeros, the mean added, heads put side by side."""
DECIDED_CALLS, PROPOSED_CALLS, DECIDED_PASSES = 42, 8, 12
"""Torch calls for a head at a decision besides products, and where it proposes (`_proposal`, `_chosen`, `keep`,
`extend`, dispatched); passes over its tail."""


def portioned_step(model: ModelSpec, portions: Portions, labels: Sequence[str], new: int, hardware: HardwareProfile,
                   kv_dtype: str = "") -> Timing:
    """Time of the step that writes token `new` after one labelled prompt and attends all of its portions.

    Lines are those of `predict`; the cache's own (`cache_part`): each portion is read as its own method reads it, all
    rows are put together and attended in full precision, the new row is written as `new` says. Raises KvsimError where
    a layer's rows leave by position.
    """
    bits = DTYPE_BITS[kv_dtype or model.dtype]
    _check(model, "portions")
    cache = [*_portions(model, portions, labels, new, bits)]
    return timed(hardware, [*_model_ops(model), *cache])


def ranked_step(model: ModelSpec, states: Sequence[HeadState], hardware: HardwareProfile, kv_dtype: str = "") -> Timing:
    """Time of one step of one sequence whose heads hold `states` (`cache.states()`), without a decision.

    Every head's rows are read back, one product for each birth of directions, and attended in full precision.
    """
    _check(model, "dynamic ranks")
    size, groups = DTYPE_BITS[kv_dtype or model.dtype] / 8, _groups(model)
    layer = _attention(groups[0])
    rows = states[0].rows + states[0].tail
    cache = [*_read_back(states, size, weight_format(default_weights(model)).matmul)]
    for group in groups:
        count = len(group.indices)
        cache += [_together(group, rows, size, count), _attend_all(group, rows, int(8 * size), count)]
    if len(states) != 2 * model.n_layers * layer.n_kv_heads:
        raise KvsimError(f"dynamic ranks: states of {len(states)} heads, a sequence of {model.name} has "
                         f"{2 * model.n_layers * layer.n_kv_heads}")
    return timed(hardware, [*_model_ops(model), *cache])


def decision(model: ModelSpec, states: Sequence[HeadState], hardware: HardwareProfile, proposes: bool = True,
             kv_dtype: str = "") -> Timing:
    """Time to decide the ranks of one sequence's heads once, their tails taken in: what `every` rows come to together.

    A head: the tail's coefficients, what they leave, and the coefficients once it is known what stays (three products;
    proposes: the SVD of what they leave, two to keep its directions apart, one to write them); then one choice among
    all directions.
    """
    _check(model, "dynamic ranks")
    size, dtype = DTYPE_BITS[kv_dtype or model.dtype] / 8, weight_format(default_weights(model)).matmul
    return timed(hardware, [*_decided(states, size, dtype, proposes)])


def timed(hardware: HardwareProfile, ops: Sequence[Op]) -> Timing:
    """Pieces of a decode step with their times, those of one name added up."""
    named: dict[str, list[tuple[Op, Any]]] = {}
    cold = cold_bytes(hardware, ops)
    for op in ops:
        named.setdefault(op.name, []).extend((op, t) for t in op_seconds(hardware, op, None, cold))
    return Timing.of(tuple(line_of("decode", name, found, 1.0) for name, found in named.items() if found))


def cache_part(model: ModelSpec, step: Timing) -> Timing:
    """Of a step what the cache does: attention, reading, writing, choosing; without the model's products and norms."""
    own = {m.name for layer in model.layers for m in layer.matrices} | {SMALL, "head", "engine"}
    return Timing.of(tuple(x for x in step.lines if x.name not in own))


def _check(model: ModelSpec, what: str) -> None:
    for layer in model.layers:
        a = layer.attention
        if a is None or a.kind != "full":
            raise KvsimError(f"{what}: time is predicted for models whose layers all see everything, and {model.name} "
                             f"has a layer of kind {a.kind if a else 'none'}")


def _attention(group: LayerGroup) -> Attention:
    assert group.layer.attention is not None
    return group.layer.attention


def _groups(model: ModelSpec) -> tuple[LayerGroup, ...]:
    found = layer_keys(model, parse_method("full"))
    return tuple(LayerGroup(layer, tuple(at), None, None, None) for (layer, _, _), at in found.items())


def _model_ops(model: ModelSpec) -> Iterator[Op]:
    """What a step takes without any cache."""
    dtype = weight_format(default_weights(model)).matmul
    yield from products(model, _groups(model), 1, dtype)
    yield around_layers(model, 1)
    yield from head(model, 1, dtype)


def _portions(model: ModelSpec, portions: Portions, labels: Sequence[str], new: int, bits: int) -> Iterator[Op]:
    rows = [0] * model.n_layers
    for name, prompt, later in [*((n, c, 0) for n, c in counted(labels).items()), (LATER, 0, new)]:
        for (layer, method, _), indices in layer_keys(model, portions.at(name)).items():
            layout = layer_layout(layer, method, prompt, later, bits, indices[0], model.n_layers)
            if layout is None or not layout.rows.attended:
                continue
            for i in indices:
                rows[i] += int(layout.rows.attended)
            if all(side.chain.is_full for side in layout.sides):
                copied = 2.0 * sum(float(b.bytes) for side in layout.sides for b in side.buffers)
                yield Op("attention", "elementwise", 2 * len(indices), bytes=copied / 2)
                yield Op("attention", "elementwise", STORE_CALLS * len(indices))  # a loop's calls run warm
            else:
                # read by the kernel that decodes whole rows: no fused one gives them to another attention
                yield replace(attend_op(layout, 1, len(indices), "attention", bits), kernels=(EAGER,), adds=())
            if name == LATER:
                yield from step_work(layout, 1, len(indices))
    for group in _groups(model):
        for n in dict.fromkeys(rows[i] for i in group.indices):
            count = sum(rows[i] == n for i in group.indices)
            yield from (_together(group, n, bits / 8, count), _attend_all(group, n, bits, count))
            yield calls_op("rows put together", JOIN_CALLS, count)


def _together(group: LayerGroup, rows: int, size: float, count: int) -> Op:
    """Keys and values of all parts copied into one tensor each."""
    a = _attention(group)
    return Op("rows put together", "elementwise", 2 * count, bytes=rows * a.n_kv_heads * (a.k_dim + a.v_dim) * size)


def _attend_all(group: LayerGroup, rows: int, bits: int, count: int) -> Op:
    """Attention over rows in full precision."""
    layout = layer_layout(group.layer, parse_method("full"), rows, 0, bits)
    assert layout is not None
    return replace(attend_op(layout, 1, count, "attention", bits), kernels=())


def _births(states: Iterable[HeadState]) -> dict[tuple[int, int, int], int]:
    """How often a birth of so many directions stands under so many rows: {(rows, directions, width): count}."""
    found: dict[tuple[int, int, int], int] = {}
    for s in states:
        for birth in (b for b in dict.fromkeys(s.births) if b < s.rows):
            key = (s.rows - birth, s.births.count(birth), s.width)
            found[key] = found.get(key, 0) + 1
    return found


def _read_back(states: Sequence[HeadState], size: float, dtype: str) -> Iterator[Op]:
    """Coefficients times directions, birth by birth, added into the head's rows."""
    for (rows, directions, width), count in _births(states).items():
        yield Op("rows read back", "matmul", count, m=rows, n=width, k=directions, dtype=dtype)
        yield Op("rows read back", "elementwise", count, bytes=3.0 * rows * width * size)
    values = sum(s.rows * s.width for s in states) / len(states)
    yield Op("rows read back", "elementwise", READ_KERNELS * len(states), bytes=2.0 * values * size)


def _decided(states: Sequence[HeadState], size: float, dtype: str, proposes: bool) -> Iterator[Op]:
    name, heads = "ranks decided", len(states)
    tail, width = states[0].tail, states[0].width
    rank = max(1, round(sum(s.rank for s in states) / heads))
    there = [(rank, width), (width, rank)]
    for k, n in [*there, (width, rank), *([*there, (width, rank)] if proposes else ())]:
        yield Op(name, "matmul", heads, m=tail, n=n, k=k, dtype=dtype)
    if proposes:
        small, blocked = svd_flops(tail, width)
        yield Op(name, "elementwise", heads, bytes=2.0 * tail * width * size, flops=small)
        yield Op(name, "prefill", heads, flops=blocked)
    calls = DECIDED_CALLS + (PROPOSED_CALLS if proposes else 0)
    yield Op(name, "elementwise", calls * heads, bytes=2.0 * DECIDED_PASSES / calls * tail * width * size)
    # coefficients move: those that stay are copied behind each other with the tail's
    moved = sum(2.0 * (s.rows - b) * size for s in states for b in s.births)
    births = max(1, sum(_births(states).values()))
    yield Op(name, "elementwise", births, bytes=moved / births)
    if proposes:
        considered = float(sum(s.rank + tail for s in states))
        yield Op(name, "elementwise", bytes=considered * (8 + 8 + NOTE_BYTES), flops=considered)


__all__ = ["Line", "cache_part", "decision", "portioned_step", "ranked_step", "timed"]
