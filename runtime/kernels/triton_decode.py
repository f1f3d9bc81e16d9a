"""One step's attention by the Triton kernels: tables of pages, what the compiler must know, how the work is split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.buffers import Paged
from runtime.kernels import triton_attend
from runtime.kernels.plans import FLOAT8, GGUF, ROWS, Plan
from runtime.kernels.triton_rows import Layout, Pages
from runtime.kernels.triton_turn import turning

if TYPE_CHECKING:
    from runtime.attention import Rule
    from runtime.side import Runs, Side
    from runtime.store import Store

ALIGN = 16
"""Bytes that one instruction loads at most; storages start at multiples of it."""
PROGRAMS = 4
"""Programs a multiprocessor gets, where there are rows enough."""
STAGES = 3
"""Blocks on their way at once, the one that is computed included."""
TOGETHER = 16
"""Splits that are combined at once."""
TABLES_KEPT = 8
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SCALE_KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""As plans.SCALES numbers them."""


@dataclass(frozen=True)
class Rows:
    """Which rows a step reads. mode 0: the first `count`; 1: two runs; 2: those chosen, each pair's own.

    chosen [n] row numbers, int64; at [pairs + 1] where each (sequence, head)'s begin.
    """

    mode: int
    count: int
    start0: int = 0
    rows0: int = 0
    start1: int = 0
    chosen: Tensor | None = None
    at: Tensor | None = None


def rows_of(read: Runs | Tensor | str | None, held: int, pairs: int, device: torch.device) -> Rows | None:
    """The rows that `spans.read_by` names, of those held, for each (sequence, head); None where it names a reason."""
    if isinstance(read, str):
        return None
    if read is None:
        return Rows(0, held)
    if isinstance(read, list) and len(read) <= 2:
        (start0, stop0), (start1, stop1) = (*read, (0, 0))[:2]
        return Rows(1, stop0 - start0 + stop1 - start1, start0, stop0 - start0, start1)
    if isinstance(read, list):
        read = torch.cat([torch.arange(start, stop) for start, stop in read]).to(device)
    rows = read.expand(1, pairs, -1) if read.dim() == 1 else read
    count = rows.shape[2]
    return Rows(2, count, chosen=rows.contiguous(), at=torch.arange(pairs + 1, device=device) * count)


def attended(store: Store, q: Tensor, rule: Rule, rows: Rows, plans: tuple[Plan, Plan]) -> Tensor:
    """Output [B, Hq, 1, dv] of queries q [B, Hq, 1, dk], contiguous, in q's dtype."""
    keys, values = store.keys, store.values
    k, v = layout(keys, plans[0], q.dtype), layout(values, plans[1], q.dtype)
    batch, query_heads = q.shape[:2]
    heads = keys.twins.inner.place.heads
    queries, pairs = query_heads // heads, batch * heads
    block, wide = block_of(k, v), queries_of(queries)
    blocks = -(-queries // wide)
    each = _each(rows.count, block, pairs * blocks, q.device)
    splits = -(-rows.count // each)
    sums = torch.empty((splits, pairs, queries, v.width), dtype=torch.float32, device=q.device)
    ends = torch.empty((splits, pairs, queries, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, query_heads, 1, v.width), dtype=q.dtype, device=q.device)
    nothing = _nothing(q.device)
    pure = min(s.rows if f.form == ROWS else s.encoded_rows for s, f in ((keys, k), (values, v)))
    sinks = nothing if rule.sinks is None else rule.sinks.float().contiguous()
    turn = turning(store, k, nothing) if store.method.k.before_rope else None
    turned = (0, nothing, 0, nothing, nothing) if turn is None else turn[1]
    with _on(q.device):
        triton_attend.split[(pairs, splits, blocks)](
            q, sums, ends, nothing if rows.chosen is None else rows.chosen, nothing if rows.at is None else rows.at,
            *_tables(keys, k, plans[0]), *_tables(values, v, plans[1]), keys.encoded_rows, values.encoded_rows, pure,
            each, rows.count, rows.start0, rows.rows0, rows.start1, *turned, rule.scaling, rule.softcap, HEADS=heads,
            QUERIES=queries, MODE=rows.mode, CAPPED=bool(rule.softcap), K=k, V=v, T=turn and turn[0], QB=wide,
            BLOCK=block,
            num_warps=warps_of(k, v), num_stages=STAGES)  # fmt: skip
        triton_attend.combine[(batch * query_heads,)](
            sums, ends, sinks, out, splits, QUERY_HEADS=query_heads, WIDTH=v.width, PADDED=v.padded,
            SINKS=rule.sinks is not None, TOGETHER=TOGETHER, num_warps=4)  # fmt: skip
    return out


def layout(side: Side, plan: Plan, queries: torch.dtype) -> Layout:
    """What the compiler must know of a side, made once for each dtype of queries and kept with the format's twin."""
    kept: dict[torch.dtype, Layout] = side.format.__dict__.setdefault("_triton_layouts", {})
    if queries not in kept:
        kept[queries] = _layout(side, plan, queries)
    return kept[queries]


def _layout(side: Side, plan: Plan, queries: torch.dtype) -> Layout:
    width, dtype = side.twins.inner.place.width, side.setting.dtype
    bits = {FLOAT8: 8, GGUF: 0}.get(plan.form, plan.bits)
    row_bytes = -(-width * bits // 8) if plan.form != GGUF else width // 32 * (2 + 2 * plan.lows + 4 * plan.bits)
    group = plan.group or width
    table = plan.table(side.format) if plan.table is not None else None
    scale_type = KINDS[SCALE_KINDS[plan.scale_type]]
    unit = side._rows_unit(plan.names[0]) if plan.form != ROWS else 1
    if plan.form == GGUF:
        scale_rows, scale_row, scale_size = unit, row_bytes // 2, 2
    else:
        scale_rows = side._rows_unit(plan.names[1]) if plan.form != ROWS else 1
        scale_row = width if plan.unit else -(-width // group)
        scale_size = scale_type.primitive_bitwidth // 8
    # Triton's interpreter cuts off what it rounds to bf16, which it holds as bits and multiplies as such
    cut = triton.knobs.runtime.interpret and dtype == torch.bfloat16
    return Layout(
        form=plan.form, bits=plan.bits, width=width, padded=max(16, triton.next_power_of_2(width)), group=group,
        groups=-(-width // group), unit=plan.unit, symmetric=plan.symmetric,
        scaled=getattr(side.format.part, "scale", "none") == "row", lows=plan.lows,
        levels=0 if table is None else table.shape[2],
        step_head=table.shape[1] * table.shape[2] if table is not None and table.shape[0] > 1 else 0,
        step_channel=table.shape[2] if table is not None and table.shape[1] > 1 else 0, scale_type=scale_type,
        held=KINDS[dtype], decoded=tl.float32 if cut else KINDS[dtype],
        factor=tl.float32 if cut or queries != dtype else KINDS[dtype],
        data=_pages(unit, row_bytes, 1), scale=_pages(scale_rows, scale_row, scale_size),
        rest=_pages(_REST, width, dtype.itemsize))  # fmt: skip


_REST = 256
"""Rows of a page of the tail."""


def _pages(rows: int, row: int, size: int) -> Pages:
    return Pages(rows, row, math.gcd(ALIGN, rows * row * size))


def _tables(side: Side, layout: Layout, plan: Plan) -> Iterator[Tensor]:
    """Tables of codes, scales, minima and the tail, and the table of values."""
    device = side.setting.device
    nothing = _nothing(device)
    for name, pages in zip(plan.names, (layout.data, layout.scale, layout.scale), strict=True):
        buffer = side.encoded.get(name) if side.encoded_rows else None
        yield nothing if buffer is None else table(buffer, pages)
    yield nothing if side.rest is None or not side.rest.rows else table(side.rest, layout.rest)
    yield nothing if plan.table is None or not layout.levels else plan.table(side.format)


def table(buffer: Paged, pages: Pages) -> Tensor:
    """A buffer's table of pages [pages, 2], made anew when it has other chunks and kept with it."""
    key = tuple((chunk.data_ptr(), chunk.shape[2]) for chunk in buffer.chunks)
    kept: dict[Any, Tensor] = buffer.__dict__.setdefault("_page_tables", {})
    if key not in kept:
        if len(kept) >= TABLES_KEPT:
            kept.clear()
        kept[key] = _table(buffer, pages)
    return kept[key]


def _table(buffer: Paged, pages: Pages) -> Tensor:
    found = []
    for chunk in buffer.chunks:
        size = chunk.element_size()
        start, step = chunk.data_ptr(), chunk.stride(1) * size
        page = pages.rows * chunk.stride(2) * size
        assert chunk.shape[2] % pages.rows == 0, "a chunk is whole pages"
        assert not (start | step | page) % pages.align, "storages are aligned"
        found += [(at // pages.align, step // pages.align)
                  for at in range(start, start + page * (chunk.shape[2] // pages.rows), page)]  # fmt: skip
    return torch.tensor(found, dtype=torch.int64, device=buffer.chunks[0].device)


def block_of(k: Layout, v: Layout) -> int:
    """Tokens of a block: as many as registers hold, and not more than share scales where tokens do."""
    size = 4 if tl.float32 in (k.factor, v.factor) else 2
    found = max(16, min(64, 16_384 // (size * max(k.padded, v.padded))))
    return min([found, *(s.unit for s in (k, v) if s.unit >= 32)])


def queries_of(group: int) -> int:
    """Query heads of a program: a product on tensor cores has 16 rows at least."""
    return max(16, min(64, triton.next_power_of_2(group)))


def warps_of(k: Layout, v: Layout) -> int:
    """Warps of a program."""
    return 8 if max(k.padded, v.padded) > 128 else 4


def _each(rows: int, block: int, programs: int, device: torch.device) -> int:
    """Rows of a split, whole blocks."""
    wanted = max(1, min(-(-rows // (2 * block)), PROGRAMS * _multiprocessors(device) // programs))
    return -(-rows // (wanted * block)) * block


@cache
def _multiprocessors(device: torch.device) -> int:
    """How many there are; interpreted, as many as make splits of a few blocks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def _nothing(device: torch.device) -> Tensor:
    """What is passed where nothing is read."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


