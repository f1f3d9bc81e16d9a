"""A store's sides and the problem of one step as the C structures of csrc/common.h."""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import TYPE_CHECKING

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
                                    "parts", "groups")]


class CProblem(ctypes.Structure):
    """One step."""

    _fields_ = [(n, WORD) for n in ("k", "v", "q", "out", "type", "batch", "heads", "queries", "rows")] + [
        ("scaling", ctypes.c_float), ("softcap", ctypes.c_float)] + [
        (n, WORD) for n in ("sinks", "spans", "span_at", "chunk", "threads")]


class Reading:
    """One side as the kernels see it: described once, until chunks come or go; between that only rows are counted.

    `alike`: whether the buffers' chunks break at the same rows; they do unless rows left some in another way.
    """

    def __init__(self, side: Side, plan: Plan) -> None:
        width = side.twins.inner.place.width
        group = plan.group or width
        self.plan, self.spare = plan, max(1, _pieces(side.rest))
        self.buffers = [side.encoded[n] for n in plan.names if n in side.encoded]
        self.versions = [b.version for b in self.buffers]
        ends = [_ends(side.encoded[n], side.rows_per(n)) for n in plan.names if n in side.encoded]
        self.alike = all(e == ends[0] for e in ends)
        encoded = _encoded(side, plan) if self.alike else []
        self.held = (CPart * (len(encoded) + self.spare))(*encoded)
        parts = list(self.held)
        self.encoded, self.rest = parts[: len(encoded)], parts[len(encoded) :]
        self.first, self.room = (encoded[-1].start, ends[0][-1]) if encoded else (0, 0)
        self.side = CSide(form=plan.form, bits=plan.bits, width=width, group=group, unit=plan.unit,
                          symmetric=plan.symmetric, scale_type=plan.scale_type, row_type=TYPES[side.setting.dtype],
                          dots=plan.dots, lows=plan.lows, parts=ctypes.addressof(self.held), groups=-(-width // group))

    def stands(self, side: Side, plan: Plan) -> bool:
        """Whether the chunks are still those, and filled as far."""
        rows = side.encoded_rows
        filled = self.first < rows <= self.room if self.encoded else not (rows and self.alike)
        same = filled and plan is self.plan and _pieces(side.rest) <= self.spare
        return same and [b.version for b in self.buffers] == self.versions

    def counted(self, side: Side) -> tuple[int, Tensor | None]:
        """The structure's address, with the rows that there are now, and a table that must live while it is used.

        What was made of the store's own tensors is not kept here, where nobody would count it.
        """
        at, rest = side.encoded_rows, side.rest
        if self.encoded:
            self.encoded[-1].rows = at - self.first
        left, chunks = (rest.rows, rest.lying) if rest is not None else (0, ())
        # a tail's chunk comes and goes with each step, and must not be kept alive here
        for part, chunk in zip(self.rest, chunks, strict=False):
            rows = min(left, chunk.shape[2])
            part.start, part.rows, part.data, part.data_stride = at, rows, chunk.data_ptr(), _stride(chunk)
            at, left = at + rows, left - rows
        self.side.rows, self.side.parts_count = at, len(self.encoded) + len(chunks)
        return ctypes.addressof(self.side), self._tabled(side) if self.plan.table is not None and self.encoded else None

    def _tabled(self, side: Side) -> Tensor:
        assert self.plan.table is not None
        table = self.plan.table(side.format)
        self.side.table = table.data_ptr()
        self.side.table_head = table.shape[1] * table.shape[2] if table.shape[0] > 1 else 0
        self.side.table_channel = table.shape[2] if table.shape[1] > 1 else 0
        return table


def reading(side: Side, plan: Plan) -> Reading:
    """The side's description, made anew where it no longer stands."""
    found = side.reading
    if found is None or not found.stands(side, plan):
        found = side.reading = Reading(side, plan)
    return found


def _pieces(rest: Paged | None) -> int:
    return 0 if rest is None else len(rest.lying)


def _encoded(side: Side, plan: Plan) -> list[CPart]:
    """Parts of the encoded rows: the buffers' chunks break at the same rows, as they grow together."""
    names = plan.names
    data = side.encoded.get(names[0])
    if data is None or not side.encoded_rows:
        return []
    scale, low = side.encoded.get(names[1]), side.encoded.get(names[2])
    found, at = [], 0
    for i, chunk in enumerate(data.chunks):
        rows = min(_rows(data, chunk), side.encoded_rows - at)
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


def _ends(buffer: Paged, per: int) -> list[int]:
    """Token rows up to each chunk's end; per: token rows of a row, 0 for what a block has once."""
    return list(accumulate(_rows(buffer, c) * max(per, 1) for c in buffer.chunks))


def _rows(buffer: Paged, chunk: Tensor) -> int:
    return chunk.shape[2] * (buffer.tile if isinstance(buffer, TiledPaged) else 1)


def _stride(chunk: Tensor) -> int:
    """Bytes from one (sequence, head) to the next."""
    return chunk.stride(1) * chunk.element_size()
