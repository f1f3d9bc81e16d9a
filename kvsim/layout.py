"""What one layer holds under a method: rows, buffers and their exact bytes; not how long anything takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.method import Chain, Method
from kvsim.model import Attention, Layer, ModelSpec
from kvsim.parts import Basis, Buffer, Format, Place, Rows
from kvsim.tokens.keep import Keep
from kvsim.workload import Count

AHEAD = 20
"""Steps over which it is counted how many rows leave."""


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer: where they are, how they are written, and what is held for one sequence."""

    place: Place
    chain: Chain
    latent: Place
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Layout:
    """One layer's cache: its rows, its sides (k, and v if there is one), bookkeeping and what methods leave alone."""

    attention: Attention
    rows: Rows
    method: Method
    sides: tuple[Side, ...]
    policy_buffers: tuple[Buffer, ...] = ()
    plain_buffers: tuple[Buffer, ...] = ()
    estimate: str = ""
    dropping: Any = 1.0
    """Share of steps in which a row leaves, where rows leave while generating."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, keys first."""
        return tuple(b for side in self.sides for b in side.buffers) + self.policy_buffers + self.plain_buffers

    def bytes(self, batch: Count, allocated: bool = False) -> Any:
        """Bytes of `batch` sequences: batch * per-sequence buffers + per-model buffers."""
        total: Any = 0
        for b in self.buffers:
            total = total + self.copies(b, batch) * (b.allocated if allocated else b.bytes)
        return total

    def copies(self, buffer: Buffer, batch: Count) -> Count:
        """How often `batch` sequences hold this buffer: once where it belongs to the model."""
        return 1 if buffer.per_model else batch


def largest(a: Any, b: Any) -> Any:
    """Element-wise maximum that keeps plain ints plain."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def smallest(a: Any, b: Any) -> Any:
    """Element-wise minimum that keeps plain ints plain."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def choose(where: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; keeps plain ints plain."""
    return (yes if where else no) if isinstance(where, bool) else np.where(where, yes, no)


def layer_layout(
    layer: Layer,
    method: Method,
    prompt: Count,
    new: Count,
    value_bits: int,
    index: int = 0,
    n_layers: int = 1,
    measured: Rows | None = None,
) -> Layout | None:
    """The cache of one layer after `prompt` and `new` tokens; None where the layer caches nothing of its own.

    `measured` replaces the policy's row counts. Raises KvsimError where a part cannot stand in this layer.
    """
    attention = layer.attention
    if attention is None or attention.kind == "shared":
        return None
    places = tuple(_places(attention, value_bits, index, n_layers))
    exempt = bool(attention.window)
    if exempt and not isinstance(method.tokens, Keep):
        method = replace(method, tokens=Keep())
    rows = measured or _rows(attention, method, prompt, new, places[0])
    ranges = _live(attention, method, rows, new)
    sides = tuple(_side(place, method, attention, rows, new, ranges) for place in places)
    held = method.tokens.buffers(rows, prompt + new, places[0])
    if method.tokens.drops != "none" and any(s.chain.before_rope for s in sides):
        heads = places[0].heads if method.tokens.per_head else 1
        held = (*held, Buffer("positions", heads, rows.stored, 1, 32))
    plain = tuple(
        Buffer(s.name, s.heads, s.rows, s.width, value_bits)
        for s in attention.stores(prompt + new)
        if s.name not in ("k", "v")
    )
    dropping: Any = 1.0
    if method.tokens.drops == "rows" and measured is None:
        dropping = 1.0 - (_rows(attention, method, prompt, new + AHEAD, places[0]).stored - rows.stored) / AHEAD
    return Layout(attention, rows, method, sides, held, plain, rows.estimate, dropping)


def cross_layout(layer: Layer, method: Method, value_bits: int, index: int = 0, n_layers: int = 1) -> Layout | None:
    """The cross-attention cache of a layer: constant rows, formats only (semantics: what composes)."""
    if layer.cross is None:
        return None
    chains = tuple(Chain(format=c.format, corrections=c.corrections) for c in (method.k, method.v))
    plain = Method(k=replace(chains[0], format=_after_rotation(chains[0].format)), v=chains[1])
    rows = Rows(layer.cross.cross_tokens, layer.cross.cross_tokens, layer.cross.cross_tokens)
    places = _places(layer.cross, value_bits, index, n_layers)
    sides = tuple(_side(place, plain, layer.cross, rows, 0, None) for place in places)
    return Layout(layer.cross, rows, plain, sides)


def _after_rotation(part: Format) -> Format:
    """Cross-attention keys are not rotated."""
    return part.with_settings(rope="post") if part.before_rope else part


def _places(attention: Attention, value_bits: int, index: int, n_layers: int) -> Iterator[Place]:
    for side, width in (("k", attention.k_dim), ("v", attention.v_dim)):
        if width:
            yield Place(
                "k" if side == "k" else "v",
                attention.n_kv_heads,
                width,
                attention.n_heads,
                value_bits,
                index,
                n_layers,
                attention.kind == "mla",
            )


def _rows(attention: Attention, method: Method, prompt: Count, new: Count, place: Place) -> Rows:
    if attention.window:
        total = prompt + new
        return Rows(attention.rows(prompt), attention.rows(total), attention.rows(total))
    return method.tokens.rows(prompt, new, place)


def _live(attention: Attention, method: Method, rows: Rows, new: Count) -> tuple[tuple[Count, Count], ...] | None:
    """Live ranges of rows, counted over all rows ever appended, where only position decides; None where all live."""
    appended = rows.prompt + new
    if attention.window:
        return ((largest(0, appended - attention.window), appended),)
    ranges = getattr(method.tokens, "ranges", None)
    if method.tokens.drops == "rows" and ranges is not None:
        found: tuple[tuple[Count, Count], ...] = ranges(appended)
        return found
    return None


def _side(
    place: Place,
    method: Method,
    attention: Attention,
    rows: Rows,
    new: Count,
    ranges: tuple[tuple[Count, Count], ...] | None,
) -> Side:
    chain = method.k if place.side == "k" else method.v
    if attention.kind == "mla" and chain.basis.name != "identity":
        raise KvsimError(
            f"{chain.basis.name}: layer {place.layer} is MLA, whose cache is a latent already; "
            "use a format without a basis"
        )
    width = chain.basis.latent(place)
    latent = replace(place, heads=width.heads, width=width.width)
    chain.format.check_place(latent)
    return Side(place, chain, latent, tuple(_buffers(place, latent, chain, rows, new, ranges)))


def _buffers(
    place: Place, latent: Place, chain: Chain, rows: Rows, new: Count, ranges: tuple[tuple[Count, Count], ...] | None
) -> Iterator[Buffer]:
    """Basis, codes, corrections and the full-precision tails of one side."""
    enough = chain.basis.minimum_rows
    appended = rows.prompt + new
    stored: Any = rows.stored
    if enough:
        ready = stored >= enough
        yield Buffer(
            f"{place.side}.full", place.heads, choose(ready, 0 * stored, stored), place.width, place.value_bits
        )
        stored, appended = choose(ready, stored, 0 * stored), choose(ready, appended, 0 * appended)
        ranges = ranges and tuple((choose(ready, a, 0 * a), choose(ready, b, 0 * b)) for a, b in ranges)
    held = _encoded(chain.format, smallest(rows.prompt, appended), appended, stored, ranges)
    quantizes = chain.format.residual_rows or chain.format.name != "full"
    blocks = held.blocks if quantizes else 0 * stored
    yield from _named(place.side, _basis_buffers(chain.basis, stored, blocks, place, enough))
    if not latent.width:
        return
    yield from _named(place.side, chain.format.buffers(held.rows, held.blocks, latent))
    for fix in chain.corrections:
        found = held.corrected(fix.least_block_rows, chain.format.block_rows)
        yield from _named(f"{place.side}.{fix.name}", fix.buffers(*found, latent))
    if np.any(np.asarray(held.tail) > 0):
        yield Buffer(f"{place.side}.tail", latent.heads, held.tail, latent.width, place.value_bits)


def _named(prefix: str, buffers: tuple[Buffer, ...]) -> Iterator[Buffer]:
    for b in buffers:
        if b.width:
            yield Buffer(f"{prefix}.{b.name}", b.heads, b.rows, b.width, b.bits, b.rows_per_unit, b.per_model)


def _basis_buffers(basis: Basis, stored: Any, blocks: Any, place: Place, enough: int) -> tuple[Buffer, ...]:
    """The basis's own buffers; those fitted on a sequence exist only once it has rows enough."""
    found = basis.buffers(stored, blocks, place)
    if not enough:
        return found
    return tuple(
        b if b.per_model or b.rows_per_unit else replace(b, rows=b.rows * (np.asarray(stored) > 0).astype(np.int64)[()])
        for b in found
    )


@dataclass(frozen=True)
class Encoded:
    """Rows of one side that are encoded and in the tail, flushed blocks that are live.

    prompt_block: rows that the prompt's block had; prompt_rows: those of them that are left.
    """

    rows: Any
    tail: Any
    blocks: Any
    prompt_block: Any
    prompt_rows: Any

    def corrected(self, least: int, block_rows: int) -> tuple[Any, Any]:
        """(rows, blocks) that a correction covers: all, or the prompt's block alone where later ones are too small."""
        if block_rows >= least:
            return self.rows, self.blocks
        large = (np.asarray(self.prompt_block) >= max(least, 1)) & (np.asarray(self.prompt_rows) > 0)
        covered = 1 * large[()]
        return self.prompt_rows * covered, covered


def _encoded(
    form: Format, prompt: Any, appended: Any, stored: Any, ranges: tuple[tuple[Count, Count], ...] | None
) -> Encoded:
    """Split the rows of a side.

    Rows are encoded in the order in which they were appended: the first `q` of all `appended` rows are encoded, and
    nothing in the tail is dropped while encoded rows are left. Where position decides what lives and groups span rows,
    a group stays until its last row leaves, in the tail too, where it waits to be encoded whole.
    """
    q, first = form.quantized(appended), form.quantized(prompt)
    blocks = form.flushes(prompt, appended)
    if ranges is None:
        tail = smallest(stored, appended - q)
        return Encoded(stored - tail, tail, blocks, first, smallest(first, stored - tail))
    unit = getattr(form, "unit", 1)
    rows: Any = 0
    tail = 0
    mine: Any = 0
    done: Any = 0
    for start, end in ranges:
        low = largest(start // unit * unit, done)
        done = largest(smallest(-(-end // unit) * unit, appended), low)
        inside = smallest(done, q) - smallest(low, q)
        rows, tail = rows + inside, tail + done - low - inside
        mine = mine + smallest(done, first) - smallest(low, first)
    return Encoded(rows, tail, _live_blocks(form, first, q, blocks, ranges), first, mine)


def _live_blocks(form: Format, first: Any, q: Any, blocks: Any, ranges: tuple[tuple[Count, Count], ...]) -> Any:
    """Blocks with a live row: the prompt's, of `first` rows, then those of the steps, each counted once."""
    if not np.any(np.asarray(blocks) > 0):
        return blocks
    step, prompts, found, done = form.block_rows, 0 * first, 0 * first, 0 * first
    for start, end in ranges:
        prompts = largest(prompts, smallest(1, largest(0, smallest(end, first) - start)))
        low = largest((largest(start, first) - first) // step, done)
        done = largest(-(-(largest(smallest(end, q), first) - first) // step), low)
        found = found + done - low
    return prompts + found


def layer_keys(model: ModelSpec, method: Method) -> dict[tuple[Layer, Method, int], list[int]]:
    """Layers that share one layout: the same facts, the same method, and the same place if a policy depends on it."""
    found: dict[tuple[Layer, Method, int], list[int]] = {}
    resolved: dict[int, Method] = {}
    for index, layer in enumerate(model.layers):
        own = method.at(index, model.n_layers) if method.clauses else method
        at = resolved.setdefault(index, own)
        key = (layer, at, index if getattr(at.tokens, "by_layer", False) else -1)
        found.setdefault(key, []).append(index)
    return found
