"""A store's sides and the problem of one step as the C structures of csrc/common.h."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runtime.buffers import Paged
from runtime.kernels.plans import TYPES, Plan
from runtime.kernels.tiled import TiledPaged

if TYPE_CHECKING:
    from runtime.side import Side

WORD = ctypes.c_int64


class CPart(ctypes.Structure):
    """A run of rows in one storage."""

    _fields_ = [(n, WORD) for n in ("start", "rows", "encoded", "data", "data_stride", "scale", "scale_stride", "low",
                                    "low_stride")]


class CSide(ctypes.Structure):
    """One side: how its rows are encoded, and where they lie."""

    _fields_ = [(n, WORD) for n in ("form", "bits", "width", "group", "unit", "symmetric", "scale_type", "row_type",
                                    "dots", "rows", "table", "table_head", "table_channel", "lows", "parts_count",
                                    "parts")]


class CProblem(ctypes.Structure):
    """One step."""

    _fields_ = [(n, WORD) for n in ("k", "v", "q", "out", "type", "batch", "heads", "queries", "rows")] + [
        ("scaling", ctypes.c_float), ("softcap", ctypes.c_float)] + [
        (n, WORD) for n in ("sinks", "spans", "span_at", "chunk", "threads")]


def described(side: Side, plan: Plan) -> tuple[CSide, list[Any]]:
    """The side's structure, and what must stay alive while it is used."""
    parts = _encoded(side, plan) + _rest(side)
    held = (CPart * len(parts))(*parts)
    width = side.twins.inner.place.width
    found = CSide(form=plan.form, bits=plan.bits, width=width, group=plan.group or width, unit=plan.unit,
                  symmetric=plan.symmetric, scale_type=plan.scale_type, row_type=TYPES[side.setting.dtype],
                  dots=plan.dots, rows=side.rows, lows=plan.lows, parts_count=len(parts), parts=ctypes.addressof(held))
    alive: list[Any] = [held]
    if plan.table is not None and side.encoded_rows:
        table = plan.table(side.format)
        alive.append(table)
        found.table = table.data_ptr()
        found.table_head = table.shape[1] * table.shape[2] if table.shape[0] > 1 else 0
        found.table_channel = table.shape[2] if table.shape[1] > 1 else 0
    return found, alive


def _encoded(side: Side, plan: Plan) -> list[CPart]:
    """Parts of the encoded rows: the buffers' chunks break at the same rows, as they grow together."""
    names = plan.names
    data = side.encoded.get(names[0])
    if data is None or not side.encoded_rows:
        return []
    scale, low = side.encoded.get(names[1]), side.encoded.get(names[2])
    found, at = [], 0
    for i, chunk in enumerate(data.chunks):
        held = chunk.shape[2] * (data.tile if isinstance(data, TiledPaged) else 1)
        rows = min(held, side.encoded_rows - at)
        if rows <= 0:
            break
        part = CPart(start=at, rows=rows, encoded=1, data=chunk.data_ptr(), data_stride=_stride(chunk))
        if scale is not None:
            part.scale, part.scale_stride = scale.chunks[i].data_ptr(), _stride(scale.chunks[i])
        if low is not None:
            part.low, part.low_stride = low.chunks[i].data_ptr(), _stride(low.chunks[i])
        found.append(part)
        at += rows
    return found


def breaks_alike(side: Side, plan: Plan) -> bool:
    """Whether the buffers' chunks break at the same rows: they do unless rows were taken out of some in another way."""
    held = [side.encoded[n] for n in plan.names if n in side.encoded]
    if len(held) < 2:
        return True
    per = [max(side.rows_per(n), 1) for n in plan.names if n in side.encoded]
    sizes = [[_rows(b, c) * p for c in b.chunks] for b, p in zip(held, per, strict=True)]
    return all(s == sizes[0] for s in sizes[1:])


def _rows(buffer: Paged, chunk: Tensor) -> int:
    return chunk.shape[2] * (buffer.tile if isinstance(buffer, TiledPaged) else 1)


def _rest(side: Side) -> list[CPart]:
    found, at = [], side.encoded_rows
    rest = side.rest
    for view in () if rest is None else rest.views(0, rest.rows):
        found.append(CPart(start=at, rows=view.shape[2], encoded=0, data=view.data_ptr(), data_stride=_stride(view)))
        at += view.shape[2]
    return found


def _stride(chunk: Tensor) -> int:
    """Bytes from one (sequence, head) to the next."""
    return chunk.stride(1) * chunk.element_size()
