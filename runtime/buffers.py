"""Rows that grow without being copied: chunks of whole allocation units, live bytes and held bytes both exact."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Paged:
    """Rows [B, H, n, w] held in chunks; capacity is always n rounded up to `unit` rows (0: exactly n).

    Appending fills free rows and then adds a chunk; rows that are there are never moved by it.
    """

    def __init__(self, like: Tensor, unit: int) -> None:
        batch, heads, _, width = like.shape
        self.unit = unit
        self.rows = 0
        self.chunks: list[Tensor] = []
        self._empty = like.new_empty((batch, heads, 0, width))

    @property
    def capacity(self) -> int:
        """Rows that the chunks have room for."""
        return sum(c.shape[2] for c in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of live rows."""
        batch, heads, _, width = self._empty.shape
        return batch * heads * self.rows * width * self._empty.element_size()

    @property
    def allocated(self) -> int:
        """Bytes of the chunks' storages."""
        return sum(c.untyped_storage().nbytes() for c in self.chunks)

    def _room(self, rows: int) -> int:
        return -(-rows // self.unit) * self.unit if self.unit else rows

    def append(self, x: Tensor) -> None:
        """Add rows x [B, H, n, w] behind those that are there."""
        free, new = self.capacity - self.rows, x.shape[2]
        fits = min(free, new)
        if fits:
            last = self.chunks[-1]
            at = last.shape[2] - free
            last[:, :, at : at + fits] = x[:, :, :fits]
        if new > fits:
            batch, heads, _, width = self._empty.shape
            chunk = self._empty.new_empty((batch, heads, self._room(new - fits), width))
            chunk[:, :, : new - fits] = x[:, :, fits:]
            self.chunks.append(chunk)
        self.rows += new

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop: a view where they lie in one chunk, a copy otherwise."""
        stop = self.rows if stop is None else min(stop, self.rows)
        pieces, at = [], 0
        for chunk in self.chunks:
            low, high = max(start - at, 0), min(stop - at, chunk.shape[2])
            if low < high:
                pieces.append(chunk[:, :, low:high])
            at += chunk.shape[2]
        if not pieces:
            return self._empty
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def assign(self, x: Tensor) -> None:
        """Hold exactly the rows x, in one chunk of the right capacity."""
        self._empty = x.new_empty((x.shape[0], x.shape[1], 0, x.shape[3]))
        self.chunks, self.rows = [], 0
        if x.shape[2]:
            self.append(x)

    def keep(self, index: Tensor) -> None:
        """Keep rows index [B, H, m] of each head, in that order."""
        rows = self.read()
        heads = index[:, : rows.shape[1]] if rows.shape[1] < index.shape[1] else index
        self.assign(rows.gather(2, heads[..., None].expand(-1, -1, -1, rows.shape[3])))

    def truncate(self, rows: int) -> None:
        """Drop rows from the end."""
        self.cut(lambda x: x[:, :, :rows], rows)

    def drop_front(self, rows: int) -> None:
        """Drop rows from the front."""
        if rows:
            self.cut(lambda x: x[:, :, rows:], self.rows - rows)

    def cut(self, choose: Callable[[Tensor], Tensor], rows: int) -> None:
        """Keep a slice; the chunks are rebuilt only where the capacity must change or rows move."""
        if rows == self.rows:
            return
        self.assign(choose(self.read()).clone())

    def batch(self, index: Tensor) -> None:
        """Select sequences (reorder, repeat or drop them)."""
        self.chunks = [c.index_select(0, index.to(c.device)) for c in self.chunks]
        self._empty = self._empty.index_select(0, index.to(self._empty.device))

    def to(self, device: torch.device) -> None:
        """Move every chunk."""
        self.chunks = [c.to(device) for c in self.chunks]
        self._empty = self._empty.to(device)
