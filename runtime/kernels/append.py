"""Rows of uniform integers encoded straight into the store's buffers: one call for a step instead of twenty tensors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from torch import Tensor

from runtime.buffers import Paged
from runtime.kernels.load import Library, library
from runtime.kernels.pages import planned
from runtime.kernels.plans import INT, TYPES, Plan
from runtime.kernels.tiled import TiledPaged

if TYPE_CHECKING:
    from runtime.side import Side

WORD = ctypes.c_int64
WIDEST = 4096
"""Channels of a row at most."""


class CTarget(ctypes.Structure):
    """A buffer to write: where its rows start, bytes from one (sequence, head) to the next, and how rows interleave."""

    _fields_ = [(n, WORD) for n in ("data", "stride", "tile", "element")]


class CEncoding(ctypes.Structure):
    """Rows to encode, and where to."""

    _fields_ = [(n, WORD) for n in ("x", "type", "batch_stride", "head_stride", "row_stride", "batch", "heads", "rows",
                                    "width", "bits", "group", "symmetric", "scale_type", "first")] + [
        (n, CTarget) for n in ("codes", "scale", "low")]


class Writer:
    """Where the next rows go: the last chunks of a side's buffers, described once, until chunks come or go."""

    def __init__(self, plan: Plan, buffers: list[Paged]) -> None:
        self.plan, self.buffers, self.versions = plan, buffers, [b.version for b in buffers]
        batch, heads = buffers[0].shape[:2]
        self.stop = min(b.capacity for b in buffers)
        self.before = buffers[0].capacity - _rows(buffers[0])
        targets = [_target(buffer) for buffer in buffers]
        self.problem = CEncoding(batch=batch, heads=heads, bits=plan.bits, group=plan.group, symmetric=plan.symmetric,
                                 scale_type=plan.scale_type, codes=targets[0], scale=targets[1])
        if not plan.symmetric:
            self.problem.low = targets[2]

    def stands(self, plan: Plan) -> bool:
        """Whether the chunks are still those."""
        return plan is self.plan and [b.version for b in self.buffers] == self.versions

    def write(self, x: Tensor) -> bool:
        """Encode rows x that there is room for; False: one does not fit its scale, and nothing counts as written."""
        problem, size = self.problem, x.element_size()
        batch, head, row, _ = x.stride()
        problem.x, problem.type, problem.width = x.data_ptr(), TYPES[x.dtype], x.shape[3]
        problem.batch_stride, problem.head_stride, problem.row_stride = batch * size, head * size, row * size
        problem.rows, problem.first = x.shape[2], self.buffers[0].rows - self.before
        found = library()
        assert isinstance(found, Library)
        return bool(found.encode(ctypes.addressof(problem)))


def append(side: Side, x: Tensor) -> bool:
    """Encode rows x [B, H, n, d] behind those that the side holds; False where this is left to the format's twin.

    What does not fit its scale is left to the twin too, which says so.
    """
    plan = planned(side.format, x.device)
    if isinstance(plan, str) or not (_goes_on(side, plan) or _writes(side, plan, x)):
        return False
    done, count = 0, x.shape[2]
    while done < count:
        writer = _writer(side, plan, count - done)
        rows = min(writer.stop - writer.buffers[0].rows, count - done)
        part = x if rows == count else x[:, :, done : done + rows]
        if not (_by_triton(plan, part, writer.buffers) if plan.triton else writer.write(part)):
            if not done:
                return False
            side.packed(x)  # says which value is too large
        for buffer in writer.buffers:
            buffer.rows += rows
        done += rows
    return True


def _goes_on(side: Side, plan: Plan) -> bool:
    """Whether the side's last rows were written here, to where these go too."""
    writer = side.writer
    return writer is not None and writer.stands(plan)


def _writes(side: Side, plan: Plan, x: Tensor) -> bool:
    """Whether kernels write these rows."""
    if plan.form != INT or plan.unit or side.fixes or side.by_block or not side.started:
        return False
    held = [side.encoded[name] for name in plan.names if name in side.encoded]
    if len(held) != (2 if plan.symmetric else 3) or x.shape[:2] != held[0].shape[:2]:
        return False
    if x.dtype not in TYPES or x.stride(3) != 1 or x.shape[3] > WIDEST:
        return False
    return not plan.triton or _triton_writes(plan, x.shape[3])


def _writer(side: Side, plan: Plan, wanted: int) -> Writer:
    """The side's writer, with room for a row at least: buffers that are full get another chunk."""
    writer = side.writer
    if writer is None or writer.buffers[0].rows >= writer.stop or not writer.stands(plan):
        buffers = [side.encoded[name] for name in plan.names if name in side.encoded]
        for buffer in buffers:
            buffer.provide(wanted)
        writer = side.writer = Writer(plan, buffers)
    return writer


def _triton_writes(plan: Plan, width: int) -> bool:
    from runtime.kernels import triton_write  # imports Triton, which need not be there

    return triton_write.writes(plan, width)


def _by_triton(plan: Plan, x: Tensor, buffers: list[Paged]) -> bool:
    from runtime.kernels import triton_write

    return triton_write.encoded(plan, x, buffers)


def _rows(buffer: Paged) -> int:
    """Rows of the last chunk."""
    return buffer.chunks[-1].shape[2] * (buffer.tile if isinstance(buffer, TiledPaged) else 1)


def _target(buffer: Paged) -> CTarget:
    chunk, size = buffer.chunks[-1], buffer.chunks[-1].element_size()
    tile, element = (buffer.tile, buffer.element) if isinstance(buffer, TiledPaged) else (1, 1)
    return CTarget(data=chunk.data_ptr(), stride=chunk.stride(1) * size, tile=tile, element=element * size)
