"""Rows that grow without being copied: chunks of whole allocation units, live bytes and held bytes both exact."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor


class Paged:
    """Rows [B, H, n, w] held in chunks; capacity is always n rounded up to `unit` rows (0: exactly n).

    Appending fills free rows and then adds a chunk; rows that are there are never moved by it. `version` counts how
    often chunks came or went: who has described those of a version need not look at them again.
    """

    def __init__(self, like: Tensor, unit: int) -> None:
        batch, heads, _, width = like.shape
        self.unit = unit
        self.rows = 0
        self.version = 0
        self.chunks = ()
        self._empty = like.new_empty((batch, heads, 0, width))

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """Storages of the rows, in order."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: tuple[Tensor, ...]) -> None:
        self._chunks = chunks
        self.version += 1

    @property
    def lying(self) -> tuple[Tensor, ...]:
        """Tensors [B, H, rows or more, w] in which the rows lie."""
        return self.chunks

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, heads, live rows and width."""
        batch, heads, _, width = self._empty.shape
        return batch, heads, self.rows, width

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._empty.dtype

    @property
    def capacity(self) -> int:
        """Rows that the chunks have room for."""
        return sum(c.shape[2] for c in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of live rows."""
        batch, heads, rows, width = self.shape
        return batch * heads * rows * width * self._empty.element_size()

    @property
    def allocated(self) -> int:
        """Bytes of the chunks' storages."""
        return sum(c.untyped_storage().nbytes() for c in self.chunks)

    def _room(self, rows: int) -> int:
        return -(-rows // self.unit) * self.unit if self.unit else rows

    def _chunk(self, rows: int) -> Tensor:
        batch, heads, _, width = self._empty.shape
        return self._empty.new_empty((batch, heads, self._room(rows), width))

    def append(self, x: Tensor) -> None:
        """Add rows x [B, H, n, w] behind those that are there."""
        free, new = self.capacity - self.rows, x.shape[2]
        fits = min(free, new)
        if fits:
            last = self.chunks[-1]
            last.narrow(2, last.shape[2] - free, fits).copy_(x if fits == new else x[:, :, :fits])
        if new > fits:
            chunk = self._chunk(new - fits)
            chunk.narrow(2, 0, new - fits).copy_(x[:, :, fits:] if fits else x)
            self.chunks = (*self.chunks, chunk)
        self.rows += new

    def provide(self, rows: int) -> None:
        """Another chunk, for up to so many rows to come, where there is no room for one."""
        if self.rows == self.capacity:
            self.chunks = (*self.chunks, self._chunk(rows))

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop: a view where they lie in one chunk, a copy otherwise."""
        pieces = list(self.views(start, self.rows if stop is None else stop))
        if not pieces:
            return self._empty
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def views(self, start: int, stop: int) -> Iterable[Tensor]:
        """Rows start..stop as views, chunk by chunk."""
        stop, at = min(stop, self.rows), 0
        for chunk in self.chunks:
            low, high = max(start - at, 0), min(stop - at, chunk.shape[2])
            if low < high:
                yield chunk[:, :, low:high]
            at += chunk.shape[2]

    def assign(self, x: Tensor) -> None:
        """Hold exactly the rows x, which may be a view of those held; in place where the capacity stays."""
        same = x.shape[:2] == self._empty.shape[:2] and x.shape[3] == self._empty.shape[3]
        if same and len(self.chunks) == 1 and self.capacity == self._room(x.shape[2]) and self.rows:
            chunk = self.chunks[0]
            if x.untyped_storage().data_ptr() == chunk.untyped_storage().data_ptr():
                if x.data_ptr() == chunk.data_ptr() and x.shape[2] == self.rows:
                    return
                x = x.clone()
            chunk[:, :, : x.shape[2]] = x
            self.rows = x.shape[2]
            return
        self._empty = x.new_empty((x.shape[0], x.shape[1], 0, x.shape[3]))
        self._hold([x], x.shape[2])

    def _hold(self, pieces: Iterable[Tensor], rows: int) -> None:
        """Exactly these rows, copied once into one chunk."""
        if not rows:
            self.chunks, self.rows = (), 0
            return
        chunk, at = self._chunk(rows), 0
        for piece in pieces:
            chunk[:, :, at : at + piece.shape[2]] = piece
            at += piece.shape[2]
        self.chunks, self.rows = (chunk,), rows

    def keep(self, index: Tensor) -> None:
        """Keep rows index [B, H or more, m] of each head, in that order."""
        rows = self.read()
        wide = index[:, : rows.shape[1], :, None].expand(-1, -1, -1, rows.shape[3])
        self._hold([rows.gather(2, wide)], index.shape[2])

    def keep_runs(self, runs: list[tuple[int, int]]) -> None:
        """Keep the rows of runs [start, stop), in order."""
        count = sum(stop - start for start, stop in runs)
        if count == self.rows:
            return
        if runs and runs[0][0] == 0 and len(runs) == 1:
            self.truncate(runs[0][1])
            return
        self._hold([view for start, stop in runs for view in self.views(start, stop)], count)

    def truncate(self, rows: int) -> None:
        """Drop rows from the end; at most the last chunk that stays is copied, where it must become smaller."""
        self.rows = rows
        spare = self.capacity - self._room(rows)
        while spare:
            *held, last = self.chunks
            if last.shape[2] > spare:
                held.append(last[:, :, : last.shape[2] - spare].clone(memory_format=torch.contiguous_format))
            self.chunks = tuple(held)
            spare -= min(spare, last.shape[2])

    def drop_front(self, rows: int) -> None:
        """Drop rows from the front."""
        if rows >= self.rows:
            self._hold((), 0)
        elif rows:
            self.keep_runs([(rows, self.rows)])

    def put(self, at: Tensor, x: Tensor) -> None:
        """Write x[b, h, i] into row at[b, h, i] where that is one of the rows."""
        if not self.rows or not at.shape[2]:
            return
        held = self.read()
        inside = (at >= 0) & (at < self.rows)
        # what is not written goes to a row behind the last one, which is cut off again
        index = torch.where(inside, at, self.rows)[..., None].expand(-1, -1, -1, held.shape[3])
        moved = torch.cat([held, held[:, :, :1]], dim=2).scatter_(2, index, x.to(held.dtype))
        self.assign(moved[:, :, : self.rows])

    def picked(self, index: Tensor) -> Paged:
        """The same rows of the sequences index [m], in storages of their own."""
        found = copy(self)
        found.chunks = tuple(c.index_select(0, index.to(c.device)) for c in self.chunks)
        _, heads, _, width = self._empty.shape
        found._empty = self._empty.new_empty((len(index), heads, 0, width))
        return found

    def to(self, device: torch.device) -> None:
        """Move every chunk."""
        self.chunks = tuple(c.to(device) for c in self.chunks)
        self._empty = self._empty.to(device)


class Tail(Paged):
    """Rows of which most leave as soon as they came: a row alone stays where it was made, and is not copied.

    It is as soon as anybody asks for `chunks`, so that bytes and rows are those of Paged whenever they are looked at.
    """

    def __init__(self, like: Tensor, unit: int) -> None:
        self.lent: Tensor | None = None
        super().__init__(like, unit)

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """Storages of the rows, in order."""
        if self.lent is not None:
            (x, self.lent), (rows, self.rows) = (self.lent, None), (self.rows, 0)
            super().append(x)
            self.rows = rows
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: tuple[Tensor, ...]) -> None:
        self._chunks, self.lent = chunks, None
        self.version += 1

    @property
    def lying(self) -> tuple[Tensor, ...]:
        """The chunks, or the row that is lent."""
        return self._chunks if self.lent is None else (self.lent,)

    def append(self, x: Tensor) -> None:
        """Add rows x [B, H, n, w] behind those that are there; x must not be written to from now on."""
        if self.rows or x.shape[2] != 1 or x.dtype != self.dtype or x.device != self._empty.device or not _even(x):
            super().append(x)
        else:
            self.lent, self.rows = x, 1

    def views(self, start: int, stop: int) -> Iterable[Tensor]:
        """Rows start..stop as views."""
        if self.lent is None:
            return super().views(start, stop)
        return [self.lent] if start <= 0 < min(stop, self.rows) else []


def _even(x: Tensor) -> bool:
    """Whether the one row of each sequence and head is as far from the next, as it is in a chunk."""
    batch, head, _, value = x.stride()
    return value == 1 and (x.shape[0] == 1 or batch == head * x.shape[1])
