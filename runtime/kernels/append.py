"""Rows of uniform integers encoded straight into the store's buffers: one call for a step instead of twenty tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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


def append(side: Side, x: Tensor) -> bool:
    """Encode rows x [B, H, n, d] behind those that the side holds; False where this is left to the format's twin.

    What does not fit its scale is left to the twin too, which says so.
    """
    plan = planned(side.format, x.device)
    if not isinstance(plan, Plan) or plan.form != INT or plan.unit or side.fixes:
        return False
    buffers = [side.encoded[name] for name in plan.names if name in side.encoded]
    if len(buffers) != (2 if plan.symmetric else 3) or x.dtype not in TYPES or x.stride(3) != 1:
        return False
    if not side.started or side.by_block or x.shape[3] > WIDEST or x.shape[:2] != buffers[0].shape[:2]:
        return False
    written = _by_triton(plan, x.shape[3]) if plan.triton else _by_cpu
    if written is None:
        return False
    done = 0
    while done < x.shape[2]:
        rows = min(_room(buffers, x.shape[2] - done), x.shape[2] - done)
        if not written(plan, x[:, :, done : done + rows], buffers):
            if not done:
                return False
            side.packed(x)  # says which value is too large
        for buffer in buffers:
            buffer.rows += rows
        done += rows
    return True


Writes = Callable[[Plan, Tensor, list[Paged]], bool]


def _by_triton(plan: Plan, width: int) -> Writes | None:
    from runtime.kernels import triton_write  # imports Triton, which need not be there

    return triton_write.encoded if triton_write.writes(plan, width) else None


def _by_cpu(plan: Plan, x: Tensor, buffers: list[Paged]) -> bool:
    found = library()
    assert isinstance(found, Library)
    problem = _encoding(plan, x, buffers)  # alive until the call returns
    return bool(found.encode(ctypes.addressof(problem)))


def _room(buffers: list[Paged], wanted: int) -> int:
    """Free rows of the last chunks, which get another one where they are full."""
    for buffer in buffers:
        if buffer.capacity == buffer.rows:
            buffer.chunks.append(buffer._chunk(wanted))
    return min(buffer.capacity - buffer.rows for buffer in buffers)


def _encoding(plan: Plan, x: Tensor, buffers: list[Paged]) -> CEncoding:
    size = x.element_size()
    targets = [_target(buffer) for buffer in buffers]
    last = buffers[0].chunks[-1].shape[2] * getattr(buffers[0], "tile", 1)
    first = last - (buffers[0].capacity - buffers[0].rows)
    found = CEncoding(x=x.data_ptr(), type=TYPES[x.dtype], batch_stride=x.stride(0) * size,
                      head_stride=x.stride(1) * size, row_stride=x.stride(2) * size, batch=x.shape[0],
                      heads=x.shape[1], rows=x.shape[2], width=x.shape[3], bits=plan.bits, group=plan.group,
                      symmetric=plan.symmetric, scale_type=plan.scale_type, first=first, codes=targets[0],
                      scale=targets[1])
    if not plan.symmetric:
        found.low = targets[2]
    return found


def _target(buffer: Paged) -> CTarget:
    chunk, size = buffer.chunks[-1], buffer.chunks[-1].element_size()
    tile, element = (buffer.tile, buffer.element) if isinstance(buffer, TiledPaged) else (1, 1)
    return CTarget(data=chunk.data_ptr(), stride=chunk.stride(1) * size, tile=tile, element=element * size)
