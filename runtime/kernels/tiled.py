"""Rows that lie interleaved, so that one load brings the same values of many tokens; bytes are those of plain rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from runtime.buffers import Paged


class TiledPaged(Paged):
    """As Paged; a chunk is [B, H, rows / tile, w / element, tile, element]. Reading copies: kernels read the chunks.

    A tile of 16 rows and elements of 4 bytes puts word j of 16 rows side by side; 4 rows and single bytes put byte j
    of 4 rows into one word.
    """

    def __init__(self, like: Tensor, unit: int, tile: int, element: int) -> None:
        self.tile, self.element = tile, element
        super().__init__(like, unit)

    @property
    def capacity(self) -> int:
        """Rows that the chunks have room for."""
        return sum(c.shape[2] for c in self.chunks) * self.tile

    def _chunk(self, rows: int) -> Tensor:
        batch, heads, _, width = self._empty.shape
        # rows that are read beside the last ones must not be numbers that trap or poison: zeros
        shape = (batch, heads, self._room(rows) // self.tile, width // self.element, self.tile, self.element)
        return self._empty.new_zeros(shape)

    def append(self, x: Tensor) -> None:
        """Add rows x [B, H, n, w] behind those that are there."""
        free, new = self.capacity - self.rows, x.shape[2]
        fits = min(free, new)
        if fits:
            last = self.chunks[-1]
            self._write(last, last.shape[2] * self.tile - free, x[:, :, :fits])
        if new > fits:
            chunk = self._chunk(new - fits)
            self._write(chunk, 0, x[:, :, fits:])
            self.chunks = (*self.chunks, chunk)
        self.rows += new

    def _write(self, chunk: Tensor, at: int, x: Tensor) -> None:
        """Rows x into rows at, at + 1, ... of a chunk: the rest of a tile, whole tiles, the start of one."""
        rows = chunk.permute(0, 1, 2, 4, 3, 5)
        x = x.unflatten(3, (-1, self.element))
        done, count = 0, x.shape[2]
        while done < count:
            tile, inside = divmod(at + done, self.tile)
            whole = (count - done) // self.tile if not inside else 0
            if whole:
                size = whole * self.tile
                rows[:, :, tile : tile + whole] = x[:, :, done : done + size].unflatten(2, (whole, self.tile))
            else:
                size = min(self.tile - inside, count - done)
                rows[:, :, tile, inside : inside + size] = x[:, :, done : done + size]
            done += size

    def views(self, start: int, stop: int) -> Iterable[Tensor]:
        """Rows start..stop as copies, chunk by chunk."""
        stop, at = min(stop, self.rows), 0
        for chunk in self.chunks:
            held = chunk.shape[2] * self.tile
            low, high = max(start - at, 0), min(stop - at, held)
            if low < high:
                first = low // self.tile
                tiles = chunk[:, :, first : -(-high // self.tile)].permute(0, 1, 2, 4, 3, 5)
                yield tiles.flatten(4).flatten(2, 3)[:, :, low - first * self.tile : high - first * self.tile]
            at += held

    def assign(self, x: Tensor) -> None:
        """Hold exactly the rows x."""
        self._empty = x.new_empty((x.shape[0], x.shape[1], 0, x.shape[3]))
        self._hold([x], x.shape[2])

    def _hold(self, pieces: Iterable[Tensor], rows: int) -> None:
        held = list(pieces)
        self.chunks, self.rows = (), 0
        if not rows:
            return
        chunk, at = self._chunk(rows), 0
        for piece in held:
            self._write(chunk, at, piece)
            at += piece.shape[2]
        self.chunks, self.rows = (chunk,), rows

    def truncate(self, rows: int) -> None:
        """Drop rows from the end."""
        self.rows = rows
        spare = (self.capacity - self._room(rows)) // self.tile
        while spare:
            *held, last = self.chunks
            if last.shape[2] > spare:
                held.append(last[:, :, : last.shape[2] - spare].clone(memory_format=torch.contiguous_format))
            self.chunks = tuple(held)
            spare -= min(spare, last.shape[2])
