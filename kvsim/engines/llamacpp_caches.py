"""The caches that llama.cpp makes from a plan of layers and settled flags: cells, bytes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsim.engines.llamacpp_layers import Plan, Rows
from kvsim.engines.llamacpp_types import check_head, quantized, row_bytes
from kvsim.engines.llamacpp_version import Rules
from kvsim.engines.result import Cache
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

CUDA_HEADS = (40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576)
"""Head widths with a flash-attention kernel in llama.cpp's CUDA backend (fattn.cu); the CPU has one for all."""


@dataclass(frozen=True)
class Setup:
    """Flags after llama.cpp's own adjustments.

    cells: rows of one stream; streams: caches side by side; margin: rows of a sliding cache beyond its window;
    copies: recurrent states kept; where: device of each layer, None without a split.
    """

    types: tuple[str, str]
    draft_types: tuple[str, str]
    cells: int
    streams: int
    slots: int
    pad: int
    margin: int
    copies: int
    flash: bool
    swa_full: bool
    where: tuple[str, ...] | None
    now: Rules


def padded(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


def attention_caches(found: Plan, setup: Setup) -> tuple[Cache, ...]:
    """The cache of the full layers, and that of the sliding ones where they have their own."""
    v_pad = 0 if setup.flash else max((r.v for r in (*found.full, *found.windowed)), default=0)
    shape = (setup.cells, setup.streams)
    if not found.windowed:
        return _split("kv", found.full, shape, setup.types, setup.where, v_pad=v_pad)
    compressed = bool(found.compressed)  # DeepSeek-V4 keeps a stream a slot even when unified
    streams = setup.slots if compressed else setup.streams
    sequences = setup.slots if streams == 1 else 1
    wanted = found.window * sequences + setup.margin
    if setup.now.pad_always:
        cells = padded(min(setup.cells, wanted), 256)
    else:
        cells = min(setup.cells, padded(wanted, setup.pad))
    types = ("f16", "f16") if setup.now.swa_f16 else setup.types
    shape = (setup.cells if setup.swa_full else cells, streams)
    base = _split("non-SWA", found.full, (setup.cells, streams), setup.types, setup.where, v_pad=v_pad)
    return base + _split("SWA", found.windowed, shape, types, setup.where, v_pad=v_pad)


def other_caches(found: Plan, setup: Setup) -> tuple[Cache, ...]:
    """Indexer keys (one row a token) and DeepSeek-V4's compressed rows (one row a block of tokens, a stream a slot)."""
    result: tuple[Cache, ...] = ()
    if found.indexer:
        result = _split("indexer", found.indexer, (setup.cells, setup.streams), setup.types, setup.where)
    for kind, ratio, rows in found.compressed:
        cells = padded(max(1, -(-setup.cells // ratio)), 256)
        result += _split(f"{kind} 1/{ratio}", rows, (cells, setup.slots), setup.types, setup.where)
    return result


def draft_caches(model: ModelSpec, found: Plan, setup: Setup) -> tuple[Cache, ...]:
    """The draft context of multi-token prediction: its own cache for the extra layers, shaped as the last one."""
    if found.last is None:
        raise KvsimError("mtp: this model has no attention layer that a draft layer could resemble")
    last, first, count = found.last, model.n_layers, max(1, model.next_n_layers)
    rows = [Rows(first + i, last.k, last.v, last.k_head, last.v_head) for i in range(count)]
    where = setup.where + (setup.where[-1],) * count if setup.where else None
    return _split("mtp", rows, (setup.cells, setup.streams), setup.draft_types, where)


def _split(name: str, rows: Sequence[Rows], shape: tuple[int, int], types: tuple[str, str],
           where: tuple[str, ...] | None, *, v_pad: int = 0) -> tuple[Cache, ...]:
    """One cache of (cells, streams), or its part on each device; without flash attention all V rows are as wide.

    An empty cache is kept, as llama.cpp prints it.
    """
    parts: dict[str | None, list[Rows]] = {} if rows else {None: []}
    for row in rows:
        parts.setdefault(where[row.layer] if where else None, []).append(row)
    cells, streams = shape
    found = []
    for device, mine in parts.items():
        k = sum(row_bytes(types[0], r.k, "type_k") for r in mine) * cells * streams
        v = sum(row_bytes(types[1], max(r.v, v_pad) if r.v else 0, "type_v") for r in mine) * cells * streams
        found.append(Cache(name, k + v, cells, len(mine), k, v, device))
    return tuple(found)


def state_caches(found: Plan, setup: Setup) -> tuple[Cache, ...]:
    """What does not grow, in f32: recurrent R (convolution columns) and S, DeepSeek-V4's running blocks.

    Every slot has 1 + n_rs_seq of each. A running block holds values and scores: two overlapping blocks for csa and
    its indexer, one for hca.
    """
    where, copies = setup.where, setup.copies
    r = ((layer, 4 * copies * values) for layer, values, _ in found.recurrent)
    s = ((layer, 4 * copies * values) for layer, _, values in found.recurrent)
    result = _by_device("recurrent R", copies, r, where) + _by_device("recurrent S", copies, s, where)
    for kind, ratio, rows in found.compressed:
        blocks = 1 if kind == "hca" else 2
        sizes = ((row.layer, 2 * 4 * copies * (blocks * ratio) * (blocks * row.k)) for row in rows)
        result += _by_device(f"{kind} compressor", copies, sizes, where)
    return result


def _by_device(name: str, copies: int, sizes: Iterable[tuple[int, int]],
               where: tuple[str, ...] | None) -> tuple[Cache, ...]:
    parts: dict[str | None, list[int]] = {}
    for layer, size in sizes:
        parts.setdefault(where[layer] if where else None, []).append(size)
    return tuple(Cache(name, sum(p), copies, len(p), None, None, device) for device, p in parts.items())


def refusals(found: Plan, setup: Setup) -> list[str]:
    """Raise what llama.cpp would answer with an error at start-up; return what it would only do on some devices."""
    type_k, type_v = setup.types
    rows = (*found.full, *found.windowed)
    if quantized(type_v) and not setup.now.flash_exists:
        return ["a quantized V before flash attention (2024-04-30): the cache is made, the first batch fails"]
    if quantized(type_v) and any(r.v for r in rows):
        if setup.flash and not setup.now.mixed_heads and any(r.k_head != r.v_head for r in rows):
            raise KvsimError(f"type_v={type_v}: this version forces flash attention off where K and V heads differ in "
                             "width, and a quantized V needs it; use type_v=f16")  # fmt: skip
        if not setup.flash:
            raise KvsimError(f"type_v={type_v}: a quantized V needs flash attention; set flash_attn=on or type_v=f16")
    if setup.flash:
        for k_head, v_head in sorted({(r.k_head, r.v_head if r.v else 0) for r in (*rows, *found.indexer)}):
            check_head(type_k, k_head, "type_k")
            check_head(type_v, v_head, "type_v")
    notes = []
    if type_k != type_v and rows and not any(r.v for r in rows):
        notes.append(f"a K-only cache: llama.cpp wants the same type named for both sides, -ctk {type_k} -ctv {type_k}")
    odd = sorted({r.k_head for r in rows} - set(CUDA_HEADS))
    if setup.flash and odd and quantized(type_v):
        notes.append(f"heads of {odd[0]} have no flash attention on CUDA: there a quantized V is refused at start-up")
    return notes
