"""What a method does beyond attention: choosing rows, encoding them, keeping its books; and its parts' names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.buffers import Eager
from kvsim.layout import Layout, Side, largest, smallest
from kvsim.op import Named, Op
from kvsim.parts import Work

SMALL = "norms, rotation, activation"
"""The line of all that only streams activations."""
KERNEL_CALLS = 9
"""Torch calls behind each of a layer's small kernels: 44 in five of an eager Llama layer, views included, besides its
products and attention (counted by dispatching them, transformers 5.24)."""
BLOCK_BYTES = 32768.0
"""Bytes that one thread block of a streaming kernel takes on: large arrays fill every unit."""


def stores_of(layout: Layout, batch: Any) -> Any:
    """Pieces that an unfused runtime walks one by one: one for each sequence and head that has a length of its own."""
    return batch * layout.attention.n_kv_heads if layout.method.tokens.ragged else 1


def step_work(layout: Layout, batch: Any, count: int) -> Iterator[Op]:
    """Writing one compressed row, and what the policy does at each step."""
    work = Work()
    for side in layout.sides:
        if side.chain.is_full:
            continue
        moved = side.latent.heads * side.latent.width * side.latent.value_bits / 8
        work = work + _encode(side, 1) + side.chain.basis.write_work(side.place) + Work(0.0, moved, moved)
        if side.chain.format.name == "full":
            work = work + side.chain.basis.rewrite_work(layout.rows.stored, side.place)
    pieces = stores_of(layout, batch)
    if all(side.chain.is_full for side in layout.sides):
        yield _plain(layout, "full append", batch, count, pieces, 1)
    yield from _work_op("compress and append", work, batch, count, _written(layout, "append"), pieces)
    policy = layout.method.tokens
    name = f"{policy.name} step"
    # rows are packed: where one leaves, those behind it move up
    moving = 2.0 * batch * sum(b.bytes for s in layout.sides for b in s.buffers if b.rows_per_unit and not b.per_model)
    copied = moving * layout.dropping if policy.drops == "rows" else 0.0
    work = policy.step_work(layout.rows, _keys(layout))
    keys = ((name, 1.0), *(_leaving(layout) if policy.drops == "rows" else ()))
    yield from _work_op(name, work, batch, count, keys, pieces, copied)
    besides = policy.eager("decode", layout.rows.attended, _keys(layout))
    yield from _eager_ops(name, besides, batch, count, pieces, copied)


def prompt_work(layout: Layout, batch: Any, prompt: Any, count: int, value_bits: int) -> Iterator[Op]:
    """Choosing rows, fitting a basis and encoding when the prompt ends."""
    policy, kept = layout.method.tokens, layout.rows.prompt
    name = f"{policy.name} selection"
    pieces = stores_of(layout, batch)
    gathered = 2.0 * batch * kept * sum(s.place.heads * s.place.width * value_bits / 8 for s in layout.sides)
    copied = gathered if policy.drops in ("rows", "prefill") else 0.0
    yield from _work_op(name, policy.prompt_work(prompt, _keys(layout)), batch, count, ((name, 1.0),), pieces, copied)
    yield from _eager_ops(name, policy.eager("prefill", prompt, _keys(layout)), batch, count, pieces, 0.0)
    if layout.method.is_full:
        yield _plain(layout, "full compress", batch, count, pieces, kept)
    work = Work()
    for side in layout.sides:
        if side.chain.is_full:
            continue
        read = 1.0 * kept * side.place.heads * side.place.width * value_bits / 8
        fit = side.chain.basis.fit_work(kept, side.place)
        written = smallest(sum((1.0 * b.bytes for b in side.buffers if not b.per_model), start=0.0), read)
        work = (
            work
            + _encode(side, kept)
            + fit
            + Work(0.0, np.where(np.asarray(fit.read_bytes) > 0, 0.0, read)[()], written)
        )
    yield from _work_op("compress", work, batch, count, _written(layout, "compress"), pieces)


def _plain(layout: Layout, key: str, batch: Any, count: int, pieces: Any, rows: Any) -> Op:
    """Writing rows as they are: elsewhere a part of the small kernels of a layer, and counted there."""
    size = sum(s.place.heads * s.place.width * s.place.value_bits / 8 for s in layout.sides)
    return Op(SMALL, "elementwise", count, bytes=2.0 * batch * rows * size, keys=((key, 1.0),), pieces=pieces,
              only_known=True)


def _work_op(
    name: str, work: Work, batch: Any, count: int, keys: Named, pieces: Any, copied: Any = 0.0
) -> Iterator[Op]:
    """A method's own work: streamed arithmetic as one kernel, matrix products as another; both fill the device."""
    if not work and not np.any(copied):
        return
    moved = 1.0 * batch * (work.read_bytes + work.write_bytes)
    blocks = largest(moved / BLOCK_BYTES, 1.0)
    some, products = (1 * (np.asarray(x) > 0)[()] for x in (moved + work.flops, work.products))
    if work:
        flops = 1.0 * batch * work.flops
        yield Op(name, "elementwise", count * some, bytes=moved, flops=flops, blocks=blocks, keys=keys, copied=copied,
                 pieces=pieces)
    else:
        yield Op(name, "elementwise", count, keys=keys, copied=copied, pieces=pieces, only_known=True)
    if np.any(products):
        yield Op(name, "prefill", count * products, flops=1.0 * batch * work.products, blocks=blocks, keys=keys)


def calls_op(name: str, calls: Any, count: Any, beside: str = "") -> Op:
    """Torch calls between a model's own, at the pace at which those of its small kernels come."""
    return Op(name, "elementwise", count * calls, keys=(("activations", 1.0 / KERNEL_CALLS),), only_known=True,
              beside=beside)


def _eager_ops(name: str, eager: Eager, batch: Any, count: int, pieces: Any, copied: Any) -> Iterator[Op]:
    """What torch does beside a policy's counted work, where the policy has no measured part of its own."""
    if not np.any(eager.calls):
        return
    yield calls_op(name, eager.calls * pieces, count, name)
    work = eager.work
    moved = 1.0 * batch * (work.read_bytes + work.write_bytes) + copied
    if np.any(moved) or np.any(work.flops):
        yield Op(name, "elementwise", count, bytes=moved, flops=1.0 * batch * work.flops, beside=name)
    if np.any(work.products):
        yield Op(name, "prefill", count, flops=1.0 * batch * work.products, beside=name)


def _encode(side: Side, rows: Any) -> Work:
    """Arithmetic to encode `rows` rows of one side."""
    row = side.chain.format.encode_row_flops(side.latent)
    row += sum(c.encode_row_flops(side.latent) for c in side.chain.corrections)
    return Work(1.0 * side.latent.heads * rows * row)


def _leaving(layout: Layout) -> Named:
    """What it is called to take rows out of packed ones (`int4 leave`; by position, `int4 expire`): more than copying
    them, where the policy's own work copies plain ones.
    """
    how = "expire" if layout.method.tokens.positional else "leave"
    forms = [s.chain.format.kernel_format for s in layout.sides if s.chain.format.name != "full"]
    share = layout.dropping / len(layout.sides)
    return tuple((f"{form} {how}", share * forms.count(form)) for form in dict.fromkeys(forms))


PROBE = 10_007
"""Rows, a prime: a format that holds rows back until a unit is whole, or the newest ones, has not encoded them all."""


def _written(layout: Layout, how: str) -> Named:
    """What writing is called (`svd compress`, `int4 append`), and each name's share of the sides.

    Rows that wait in a tail are written another way (`int4 tail append`), and behind rows that have just moved more has
    to be done (`int4 moved append`). The time of a basis and that of a format hold the plain writing each; where both
    are, it is done once.
    """
    names: dict[str, float] = {}
    moved = layout.dropping if how == "append" and layout.method.tokens.drops == "rows" else 0.0
    for side in layout.sides:
        chain, form = side.chain, side.chain.format
        parts = [] if chain.basis.name == "identity" else [chain.basis.name]
        waits = how == "append" and form.quantized(PROBE) < PROBE
        parts += [] if form.name == "full" else [f"{form.kernel_format} tail" if waits else form.kernel_format]
        shares = dict.fromkeys((*parts, *(c.name for c in chain.corrections)), 1.0)
        if form.name != "full" and not waits and np.any(moved):
            shares[f"{form.kernel_format} moved"] = moved
        for name, share in shares.items():
            names[f"{name} {how}"] = names.get(f"{name} {how}", 0.0) + share / len(layout.sides)
    twice = sum(c.basis.name != "identity" and c.format.name != "full" for c in (side.chain for side in layout.sides))
    return ((f"full {how}", -twice / len(layout.sides)), *names.items()) if twice else tuple(names.items())


def attention_adds(layout: Layout) -> Named:
    """What attention does on top of reading rows of a format: bases, corrections, policies, by their names."""
    names: dict[str, float] = {}
    for side in layout.sides:
        chain = side.chain
        parts = [] if chain.basis.name == "identity" else [chain.basis.name]
        parts += [c.name for c in chain.corrections] + (["rotation"] if chain.before_rope else [])
        for name in parts:
            names[name] = names.get(name, 0.0) + 1.0 / len(layout.sides)
    policy = layout.method.tokens.name
    return (*names.items(), *([] if policy == "keep" else [(policy, 1.0)]))


def _keys(layout: Layout) -> Any:
    return layout.sides[0].place
