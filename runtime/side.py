"""Keys or values of one store: basis, packed rows, corrections and full-precision tails."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.parts import ALLOCATION_ROWS, Buffer, per_tokens
from runtime.buffers import Paged, Tail
from runtime.kernels.append import Writer, append
from runtime.kernels.describe import Reading
from runtime.kernels.pages import pages
from runtime.latent import rebuild
from runtime.parts import Tensors
from runtime.sharing import SideTwins

TILE = 1024
"""Rows decoded at once when attention walks over encoded rows."""

Runs = list[tuple[int, int]]
"""Rows [start, stop), ascending and apart, counted over all rows ever written to the side."""


class Side:
    """Rows of one side, oldest first: encoded rows, then the tail; before a basis has rows enough, full rows alone.

    `appended` counts all rows ever written. `runs` says which of them are held where position decides what leaves;
    None where nothing left by position. `reading`, `writer`: what the kernels know of the buffers, kept by them.
    """

    def __init__(self, twins: SideTwins) -> None:
        self.twins, self.chain, self.setting = twins, twins.chain, twins.setting
        self.basis, self.format, self.fixes = twins.basis, twins.format, twins.fixes
        form = self.chain.format
        self.plain = form.name == "full"
        self.unit: int = getattr(form, "unit", 1)
        self.step = form.block_rows
        self.turns = not self.plain and bool(getattr(self.basis, "block_maps", False))
        declared = list(self._declared())
        self.by_block = self.turns or any(
            not b.per_model and b.rows_per_unit and not self.rows_per(b.name) for b in declared
        )
        self._units = {b.name: b.rows_per_unit for b in declared}
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self.fixed: Tensors = {}
        self.basis_fixed: Tensors = {}
        self.encoded: dict[str, Paged] = {}
        self.full: Paged | None = None
        self.tail: Paged | None = None
        self.appended = self.encoded_rows = self.coded = 0
        self.prompt_rows: int | None = None
        self.fitted = self.started = False
        self.blocks: list[int] = []
        self.maps_held: Paged | None = None
        self.runs: Runs | None = None
        self.reading: Reading | None = None
        self.writer: Writer | None = None
        self.ready = self.basis is None or not self.chain.basis.minimum_rows

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, x: Tensor, share: Tensor | None = None) -> None:
        """Write rows x [B, H, n, d] into the tail; `settle` encodes what is due. share: coefficients to be added."""
        # a sum that is finite has finite terms, and is one pass; one that is not may merely have grown too large
        if not isfinite(x.sum()) and not torch.isfinite(x).all():
            raise KvsimError(f"NaN or infinity in the {self.setting.place.where}: the model's activations overflowed")
        if self.runs is not None:
            self.runs = joined([*self.runs, (self.appended, self.appended + x.shape[2])])
        self.appended += x.shape[2]
        if not self.ready:
            self.full = self.full or Paged(x, ALLOCATION_ROWS)
            self.full.append(x)
            return
        if self.basis is not None:
            x = self.project(x) if share is None else self.project(x) + share
        self.tail = self.tail or (Paged if self.plain else Tail)(x, ALLOCATION_ROWS)
        self.tail.append(x)

    def settle(self) -> None:
        """Fit the basis once there are rows enough, and encode what the format says is due.

        The first call ends the prompt, whose rows are one block; later rows are encoded step by step, each once.
        """
        if self.prompt_rows is None:
            self.prompt_rows = self.appended
        if not self.ready and self.full is not None and self.full.rows >= self.chain.basis.minimum_rows:
            rows = self.project(self.full.read())
            self.full, self.ready = None, True
            self.tail = (Paged if self.plain else Tail)(rows, ALLOCATION_ROWS)
            self.tail.append(rows)
        if not self.plain and self.tail is not None:
            self._flush()

    def project(self, x: Tensor) -> Tensor:
        """Coefficients [B, Hl, n, r] of rows x [B, H, n, d]; fits the basis at first, turns one that is online."""
        assert self.basis is not None
        held = self.basis.model_buffers() | self.basis_fixed
        if not self.fitted:
            self.basis_fixed, self.fitted = self.basis.fit(x), True
            held = held | self.basis_fixed
        elif self.chain.basis.rewrites_rows and self.tail is not None and x.shape[2]:
            if self.maps_held is not None:
                held["maps"] = self.maps_held.read()
            updated = self.basis.extend(x, self.tail.read(), held)
            if updated is not None:
                return self._turned_to(updated, self.tail)
        return self.basis.project(x, held)

    def _turned_to(self, updated: tuple[Tensor, Tensors], tail: Paged) -> Tensor:
        """Take over the tail's coefficients, the blocks' maps and the basis after a turn; returns the new rows'."""
        rows, fixed = updated
        if "maps" in fixed and self.maps_held is not None:
            self.maps_held.assign(fixed["maps"])
        self.basis_fixed = {k: v for k, v in fixed.items() if k != "maps"}
        old = tail.rows
        tail.assign(rows[:, :, :old].contiguous())
        return rows[:, :, old:]

    def _flush(self) -> None:
        assert self.tail is not None
        quantized, done = int(self.chain.format.quantized(self.appended)), 0
        for size in self._block_sizes(quantized):
            self._encode(self.tail.read(done, done + size))
            done += size
        self.tail.drop_front(done)
        self.coded = max(self.coded, quantized)

    def _block_sizes(self, quantized: int) -> list[int]:
        """Held rows to encode now, of the first `quantized` ever written, block by block.

        The prompt's rows are one block, later blocks have the format's size; all are one where blocks leave no mark.
        """
        assert self.tail is not None
        due = max(0, self.tail.rows - (self.appended - quantized))
        if self.runs is None and not self.by_block:
            return [due] if due else []
        ends = [self.coded + due if self.runs is None else quantized]
        if self.by_block and ends[0] > self.coded:
            first = int(self.chain.format.quantized(self.prompt_rows or 0))
            starts = range(max(first, self.coded), ends[0], self.step)
            block = [min(first, ends[0])] if self.coded < first else []
            ends = [*block, *(min(at + self.step, ends[0]) for at in starts)]
        bounds = list(zip([self.coded, *ends], ends, strict=False))
        runs = [(0, self.appended)] if self.runs is None else self.runs
        sizes = [sum(max(0, min(b, stop) - max(a, start)) for start, stop in runs) for a, b in bounds]
        return [size for size in sizes if size]

    def _encode(self, x: Tensor) -> None:
        for name, buffer in () if append(self, x) else self.packed(x).items():
            if name not in self.encoded:
                self.encoded[name] = pages(self.format, name, buffer, self._rows_unit(name))
            self.encoded[name].append(buffer)
        if self.turns:
            block = self.basis.block_map(self.basis_fixed)  # type: ignore[union-attr]
            self.maps_held = self.maps_held or Paged(block, per_tokens(64) * block.shape[2])
            self.maps_held.append(block)
        self.encoded_rows += x.shape[2]
        self.blocks = [*self.blocks, x.shape[2]] if self.by_block else [self.encoded_rows]

    def packed(self, x: Tensor) -> Tensors:
        """One block of coefficients x [B, Hl, n, r] as buffers, corrections' by `part.name`."""
        taken: Tensors = {}
        inner = x
        for fix in self.fixes:
            inner, found = fix.before(inner)
            taken |= {f"{fix.part_name}.{k}": v for k, v in found.items()}
        if not self.started:
            self.fixed, self.started = self.format.start(inner), True
        rows = self.format.encode(inner, self._format_fixed()) | taken
        large = [fix for fix in self.fixes if x.shape[2] >= fix.part.least_block_rows]
        if large:
            back = self.decode(rows, torch.zeros(x.shape[2], dtype=torch.int64, device=x.device))
            for fix in large:
                rows = rows | {f"{fix.part_name}.{k}": v for k, v in fix.after(inner, back).items()}
        return rows

    def _format_fixed(self) -> Tensors:
        return self.format.model_buffers() | self.fixed

    def rows_per(self, name: str) -> int:
        """Token rows for one row of a buffer, 0 for those of blocks."""
        for fix in self.fixes:
            if name.startswith(fix.part_name + "."):
                return fix.rows_per(name.split(".", 1)[1])
        return self.format.rows_per(name)

    def _rows_unit(self, name: str) -> int:
        """Allocation unit of a buffer, as the analytic part declares it."""
        return self._units.get(name, per_tokens(max(self.rows_per(name), 1)))

    def _declared(self) -> Iterator[Buffer]:
        """The analytic part's buffers for one encoded row, corrections included."""
        place = self.twins.inner.place
        yield from self.chain.format.buffers(1, 1, place)
        for fix in self.chain.corrections:
            yield from (replace(b, name=f"{fix.name}.{b.name}") for b in fix.buffers(1, 1, place))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def rest(self) -> Paged | None:
        """Rows behind the encoded ones: the tail, or full rows while the basis waits."""
        return self.full if self.full is not None else self.tail

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.encoded_rows + (self.rest.rows if self.rest is not None else 0)

    @property
    def tail_rows(self) -> int:
        """Newest rows in full precision."""
        return self.rows - self.encoded_rows

    def tiles(self, size: int = TILE) -> Iterator[tuple[int, Tensor]]:
        """(first row, coefficients [B, Hl, m, r]) in order; full rows where the basis has not been fitted yet."""
        size = -(-size // self.unit) * self.unit
        blocks = self.block_of()
        for start in range(0, self.encoded_rows, size):
            stop = min(start + size, self.encoded_rows)
            here = blocks[start:stop]
            tile = self.decode(self.slice(start, stop), here)
            if self.maps_held is not None:
                tile = self.basis.turned(tile, self.maps_held.read(), here)  # type: ignore[union-attr]
            yield start, tile
        at = self.encoded_rows
        for view in () if self.rest is None else self.rest.views(0, self.rest.rows):
            yield at, view
            at += view.shape[2]

    def slice(self, start: int, stop: int) -> Tensors:
        """Buffers of the encoded rows start..stop, block buffers whole."""
        found = {}
        for name, buffer in self.encoded.items():
            per = self.rows_per(name)
            found[name] = buffer.read(start // per, -(-stop // per)) if per else buffer.read()
        return found

    def block_of(self) -> Tensor:
        """For each encoded row the index of its block among those held, [n]; one for all where blocks leave no mark."""
        if not self.by_block:
            return torch.zeros(self.encoded_rows, dtype=torch.int64, device=self.setting.device)
        sizes = torch.tensor(self.blocks, dtype=torch.int64, device=self.setting.device)
        return torch.repeat_interleave(torch.arange(len(self.blocks), device=sizes.device), sizes)

    def decode(self, rows: Tensors, blocks: Tensor) -> Tensor:
        """Coefficients [B, Hl, n, r] of packed rows, corrections applied; blocks: [n], each row's block."""
        own = {k: v for k, v in rows.items() if "." not in k}
        decoded = self.format.decode(own, self._format_fixed(), blocks)
        for fix in reversed(self.fixes):
            mine = {k.split(".", 1)[1]: v for k, v in rows.items() if k.startswith(fix.part_name + ".")}
            decoded = fix.restore(decoded, mine, blocks)
        return decoded

    def maps(self) -> tuple[Tensor | None, Tensor | None]:
        """(maps [B, H, r, d], offset) of the basis; (None, None) where coefficients are the rows themselves."""
        if self.basis is None or not self.ready:
            return None, None
        fixed = self.basis.model_buffers() | self.basis_fixed
        if not self.fitted:
            return None, None
        return self.basis.maps(fixed), self.basis.offset(fixed)

    def read(self) -> Tensor:
        """All rows [B, H, n, d], decoded and reconstructed: for policies and tests, not for attention."""
        pieces = [piece for _, piece in self.tiles()]
        if not pieces:
            place = self.setting.place
            return torch.empty((1, place.heads, 0, place.width), dtype=self.setting.dtype, device=self.setting.device)
        rows = torch.cat(pieces, dim=2)
        maps, offset = self.maps()
        return rows if maps is None else rebuild(rows, maps, offset)

    # -- accounting ----------------------------------------------------------------------------------------------

    def pages(self) -> Iterator[tuple[str, Paged]]:
        """(name, rows) of everything that grows, named as kvsim.layout names it."""
        yield from self.encoded.items()
        if self.maps_held is not None:
            yield "maps", self.maps_held
        if self.full is not None:
            yield "full", self.full
        if self.tail is not None:
            yield ("rows" if self.plain else "tail"), self.tail

    def fixed_buffers(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of what a sequence holds from its first rows on."""
        return [*self.basis_fixed.items(), *self.fixed.items()]

    def picked(self, index: Tensor) -> Side:
        """The same rows of the sequences index [m], in storages of their own."""
        found = copy(self)
        found.reading = found.writer = None
        found.encoded = {k: v.picked(index) for k, v in self.encoded.items()}
        found.full, found.tail, found.maps_held = (
            None if p is None else p.picked(index) for p in (self.full, self.tail, self.maps_held)
        )
        found.fixed, found.basis_fixed = (
            {k: v.index_select(0, index.to(v.device)) for k, v in held.items()}
            for held in (self.fixed, self.basis_fixed)
        )
        return found

    def to(self, device: torch.device) -> None:
        """Move everything this side holds."""
        for _, paged in self.pages():
            paged.to(device)
        self.fixed = {k: v.to(device) for k, v in self.fixed.items()}
        self.basis_fixed = {k: v.to(device) for k, v in self.basis_fixed.items()}


def joined(runs: Runs) -> Runs:
    """Runs that touch made one, empty ones left out."""
    found: Runs = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return found
