"""Keys or values of one rectangle of sequences and heads: basis, packed rows, corrections and full-precision tails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.method import Chain
from kvsim.parts import ALLOCATION_ROWS, Buffer, per_tokens
from runtime.buffers import Paged
from runtime.parts import BasisTwin, CorrectionTwin, FormatTwin, Setting, Tensors, twins

TILE = 1024
"""Rows decoded at once when attention walks over encoded rows."""


class Side:
    """Rows of one side, oldest first: encoded rows, then the tail; before a basis has rows enough, full rows alone.

    `appended` counts all rows ever written (in the store's own order), `dead` those dropped from the front by position.
    """

    def __init__(self, chain: Chain, setting: Setting, model: Tensors | None = None) -> None:
        self.chain = chain
        self.setting = setting
        place = setting.place
        latent = chain.basis.latent(place)
        inner = replace(setting, place=replace(place, heads=latent.heads, width=latent.width))
        known = twins()
        self.basis: BasisTwin | None = None
        if chain.basis.name != "identity":
            self.basis = known[chain.basis.name](chain.basis, setting)  # type: ignore[assignment,arg-type]
        self.format: FormatTwin = known[chain.format.name](chain.format, inner)  # type: ignore[assignment,arg-type]
        self.fixes: list[CorrectionTwin] = [known[c.name](c, inner) for c in chain.corrections]  # type: ignore[misc,arg-type]
        self.plain = chain.format.name == "full"
        self.unit = getattr(chain.format, "unit", 1)
        self.step = chain.format.residual_rows if getattr(chain.format, "flush", "") == "all" else self.unit
        self.clear()
        self.model = model if model is not None else self._model_buffers()

    def clear(self) -> None:
        """Hold nothing."""
        self.fixed: Tensors = {}
        self.basis_fixed: Tensors = {}
        self.encoded: dict[str, Paged] = {}
        self.full: Paged | None = None
        self.tail: Paged | None = None
        self.appended = self.encoded_rows = 0
        self.settled = False
        self.blocks: list[int] = []
        self.numbers: list[int] | None = None
        self.ready = self.basis is None or not self.chain.basis.minimum_rows

    def _model_buffers(self) -> Tensors:
        found = {f"format.{k}": v for k, v in self.format.model_buffers().items()}
        return found | ({f"basis.{k}": v for k, v in self.basis.model_buffers().items()} if self.basis else {})

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, x: Tensor) -> None:
        """Write rows x [B, H, n, d] into the tail; `settle` encodes what is due."""
        if not torch.isfinite(x).all():
            raise KvsimError(f"NaN or infinity in the {self.setting.place.where}: the model's activations overflowed")
        if self.numbers is not None:
            self.numbers += range(self.appended, self.appended + x.shape[2])
        self.appended += x.shape[2]
        if not self.ready:
            self.full = self.full or Paged(x, ALLOCATION_ROWS)
            self.full.append(x)
            return
        if self.basis is not None:
            x = self._project(x)
        self.tail = self.tail or Paged(x, ALLOCATION_ROWS)
        self.tail.append(x)

    def settle(self) -> None:
        """Fit the basis once there are rows enough, and encode what the format says is due.

        The first call takes the prompt's rows as one block; later rows are encoded step by step, each once.
        """
        if not self.ready and self.full is not None and self.full.rows >= self.chain.basis.minimum_rows:
            rows = self._project(self.full.read())
            self.full, self.ready = None, True
            self.tail = Paged(rows, ALLOCATION_ROWS)
            self.tail.append(rows)
        if not self.plain and self.tail is not None:
            self._flush(first=not self.settled)
        self.settled = True

    def _project(self, x: Tensor) -> Tensor:
        assert self.basis is not None
        if not self.basis_fixed:
            self.basis_fixed = self.basis.fit(x)
        elif self.plain and self.tail is not None:
            updated = self.basis.extend(x, self.tail.read(), self.basis_fixed)
            if updated is not None:
                rows, self.basis_fixed = updated
                old = self.tail.rows
                self.tail.assign(rows[:, :, :old].contiguous())
                return rows[:, :, old:]
        return self.basis.project(x, self.basis_fixed)

    def _flush(self, first: bool) -> None:
        assert self.tail is not None
        form = self.chain.format
        due = max(0, self.tail.rows - (self.appended - int(form.quantized(self.appended))))
        if not due:
            return
        pieces = [due] if first or not self.by_block or due < self.step else [self.step] * (due // self.step)
        done = 0
        for size in pieces:
            self._encode(self.tail.read(done, done + size))
            done += size
        self.tail.drop_front(done)

    @property
    def by_block(self) -> bool:
        """Whether a flush leaves a mark of its own (a scale or factor for the block)."""
        return any(not self._rows_per(b.name) for b in self.declared(1, 1) if b.rows_per_unit and not b.per_model)

    def _encode(self, x: Tensor) -> None:
        taken: dict[str, Tensor] = {}
        inner = x
        for fix in self.fixes:
            inner, found = fix.before(inner)
            taken |= {f"{fix.part_name}.{k}": v for k, v in found.items()}
        if not self.encoded and not self.fixed:
            self.fixed = self.format.start(inner)
        rows = self.format.encode(inner, self.fixed)
        large = [fix for fix in self.fixes if x.shape[2] >= fix.part.least_block_rows]
        if large:
            back = self._decode(rows | taken, torch.zeros(x.shape[2], dtype=torch.int64, device=x.device))
            for fix in large:
                rows = rows | {f"{fix.part_name}.{k}": v for k, v in fix.after(inner, back).items()}
        for name, buffer in (rows | taken).items():
            if name not in self.encoded:
                self.encoded[name] = Paged(buffer, self._rows_unit(name))
            self.encoded[name].append(buffer)
        self.encoded_rows += x.shape[2]
        self.blocks.append(x.shape[2])

    def _rows_per(self, name: str) -> int:
        for fix in self.fixes:
            if name.startswith(fix.part_name + "."):
                return fix.rows_per(name.split(".", 1)[1])
        return self.format.rows_per(name)

    def _rows_unit(self, name: str) -> int:
        """Allocation unit of a buffer, as the analytic part declares it."""
        for buffer in self.declared(1, 1):
            if buffer.name == name:
                return buffer.rows_per_unit
        return per_tokens(max(self._rows_per(name), 1))

    def declared(self, rows: int, blocks: int) -> Iterator[Buffer]:
        """The analytic part's buffers for the encoded rows, corrections included."""
        latent = self.format.place
        yield from self.chain.format.buffers(rows, blocks, latent)
        for fix in self.chain.corrections:
            yield from (replace(b, name=f"{fix.name}.{b.name}") for b in fix.buffers(rows, blocks, latent))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.encoded_rows + (self.tail.rows if self.tail else 0) + (self.full.rows if self.full else 0)

    @property
    def tail_rows(self) -> int:
        """Newest rows in full precision."""
        return self.rows - self.encoded_rows

    def tiles(self, size: int = TILE) -> Iterator[tuple[int, Tensor]]:
        """(first row, coefficients [B, Hl, m, r]) in order; full rows where the basis has not been fitted yet."""
        size = -(-size // self.unit) * self.unit
        block_of = self._block_of() if self.encoded_rows else None
        for start in range(0, self.encoded_rows, size):
            stop = min(start + size, self.encoded_rows)
            assert block_of is not None
            yield start, self._decode(self._slice(start, stop), block_of[start:stop])
        rest = self.full if self.full is not None else self.tail
        if rest is not None and rest.rows:
            yield self.encoded_rows, rest.read()

    def _slice(self, start: int, stop: int) -> Tensors:
        found = {}
        for name, buffer in self.encoded.items():
            per = self._rows_per(name)
            found[name] = buffer.read(start // per, -(-stop // per)) if per else buffer.read()
        return found

    def _block_of(self) -> Tensor:
        sizes = torch.tensor(self.blocks)
        return torch.repeat_interleave(torch.arange(len(self.blocks)), sizes)

    def _decode(self, rows: Tensors, blocks: Tensor) -> Tensor:
        own = {k: v for k, v in rows.items() if "." not in k}
        decoded = self.format.decode(own, self.fixed, blocks)
        for fix in reversed(self.fixes):
            mine = {k.split(".", 1)[1]: v for k, v in rows.items() if k.startswith(fix.part_name + ".")}
            decoded = fix.restore(decoded, mine, blocks)
        return decoded

    def maps(self) -> tuple[Tensor | None, Tensor | None]:
        """(maps [B, H, r, d], offset) of the basis; (None, None) where coefficients are the rows themselves."""
        if self.basis is None or not self.ready:
            return None, None
        return self.basis.maps(self.basis_fixed), self.basis.offset(self.basis_fixed)

    def read(self) -> Tensor:
        """All rows [B, H, n, d], decoded and reconstructed: for policies and tests, not for attention."""
        pieces = [piece for _, piece in self.tiles()]
        if not pieces:
            place = self.setting.place
            return torch.empty((1, place.heads, 0, place.width), dtype=self.setting.dtype)
        rows = torch.cat(pieces, dim=2)
        maps, offset = self.maps()
        if maps is not None:
            rows = rows.to(maps.dtype) @ maps
            rows = rows if offset is None else rows + offset
        return rows

    # -- rewriting and dropping ------------------------------------------------------------------------------------------------

    def rewrite(self, at: Tensor, x: Tensor) -> None:
        """Row at[b, h, i] becomes x[b, h, i]; -1 writes nothing. Each new row is encoded once, where it stands."""
        if self.basis is not None:
            x = self._project(x) if self.ready else x
        rest = self.full if self.full is not None else self.tail
        if rest is not None and rest.rows:
            _put(rest, at - self.encoded_rows, x)
        if self.encoded_rows:
            for name, buffer in self.format.encode(x, self.fixed).items():
                _put(self.encoded[name], torch.where(at < self.encoded_rows, at, -1), buffer)

    def keep(self, index: Tensor) -> None:
        """Keep rows index [B, H, m] (ascending); the tail's rows must be among them while encoded rows are left."""
        encoded = int((index[0, 0] < self.encoded_rows).sum())
        if self.encoded_rows:
            for name, buffer in self.encoded.items():
                if self._rows_per(name) == 1:
                    buffer.keep(index[:, :, :encoded])
        rest = self.full if self.full is not None else self.tail
        if rest is not None:
            later = index[:, :, encoded:] - self.encoded_rows
            if later.shape[2] < rest.rows or encoded < self.encoded_rows == 0:
                rest.keep(later)
        self.encoded_rows = encoded
        self.blocks = [encoded] if encoded else []

    def expire(self, ranges: list[tuple[int, int]]) -> None:
        """Drop by position: keep rows of `ranges` (counted over all rows appended), whole units among the encoded ones."""
        numbers = list(range(self.appended)) if self.numbers is None else self.numbers
        edge = self.appended - (self.appended - int(self.chain.format.quantized(self.appended)) if self.ready else self.appended)
        edge = edge if self.encoded_rows else 0
        wanted, done = set[int](), 0
        for low, high in ranges:
            first = max(min(low, edge) // self.unit * self.unit, done)
            done = max(-(-min(high, edge) // self.unit) * self.unit, first)
            wanted |= set(range(first, done)) | set(range(max(low, edge), high))
        kept = [i for i, number in enumerate(numbers) if number in wanted]
        if len(kept) < len(numbers):
            self._keep_encoded([i for i in kept if i < self.encoded_rows])
            rest = self.full if self.full is not None else self.tail
            if rest is not None:
                first_tail = len(numbers) - rest.rows
                at = torch.tensor([i - first_tail for i in kept if i >= first_tail], dtype=torch.int64)
                rest.assign(rest.read().index_select(2, at.to(self.setting.device)))
        self.numbers = [numbers[i] for i in kept]

    def _keep_encoded(self, rows: list[int]) -> None:
        if len(rows) == self.encoded_rows:
            return
        at = torch.tensor(rows, dtype=torch.int64)
        block_of = self._block_of()
        for name, buffer in self.encoded.items():
            per = self._rows_per(name)
            held = buffer.read()
            wanted = at if per == 1 else torch.unique(at // per) if per else self._block_rows(name, held.shape[2], block_of[at])
            wanted = wanted[wanted < held.shape[2]]  # a correction of the prompt's block alone has fewer rows
            buffer.assign(held.index_select(2, wanted.to(held.device)))
        _, sizes = torch.unique(block_of[at], return_counts=True)
        self.blocks, self.encoded_rows = sizes.tolist(), len(rows)

    def _block_rows(self, name: str, held: int, blocks: Tensor) -> Tensor:
        """Rows of a block buffer that belong to the given blocks: each covered block has as many."""
        fix = next((f for f in self.fixes if name.startswith(f.part_name + ".")), None)
        covered = len(self.blocks) if fix is None or self.step >= fix.part.least_block_rows else 1
        each = held // max(covered, 1)
        return (torch.unique(blocks)[:, None] * each + torch.arange(each)).flatten()

    def visible(self, ranges: list[tuple[int, int]]) -> Tensor | None:
        """Which held rows lie in `ranges`, int64 [m]; None where all do. Dead rows wait for the rest of their unit."""
        if self.numbers is None:
            return None
        live = [i for i, n in enumerate(self.numbers) if any(low <= n < high for low, high in ranges)]
        return None if len(live) == len(self.numbers) else torch.tensor(live, device=self.setting.device)

    def crop(self, rows: int) -> None:
        """Forget the newest rows: from the tail first, then from encoded rows, a cut unit going back to the tail."""
        if self.numbers is not None:
            raise KvsimError("crop: rows were dropped by position; a cache cannot be cropped back across dropped rows")
        for held in (self.full, self.tail):
            if held is not None and rows and held.rows:
                gone = min(rows, held.rows)
                held.truncate(held.rows - gone)
                rows -= gone
                self.appended -= gone
        if rows:
            self._crop_encoded(rows)

    def _crop_encoded(self, rows: int) -> None:
        left = self.encoded_rows - rows
        whole = left // self.unit * self.unit
        rest = None
        if left > whole:
            rest = self._decode(self._slice(whole, whole + self.unit), self._block_of()[whole : whole + self.unit])
        self._keep_encoded(list(range(whole)))
        if rest is not None:
            assert self.tail is not None
            self.tail.append(rest[:, :, : left - whole].to(self.setting.dtype))
        self.appended -= rows

    # -- accounting ----------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[str, Any, bool]]:
        """(name, Paged or tensor, per model) of everything this side holds."""
        for name, tensor in self.model.items():
            yield name.split(".", 1)[1], tensor, True
        for name, tensor in (self.basis_fixed | self.fixed).items():
            yield name, tensor, False
        yield from ((name, buffer, False) for name, buffer in self.encoded.items())
        if self.full is not None and self.full.rows:
            yield "full", self.full, False
        if self.tail is not None and self.tail.rows:
            yield ("rows" if self.plain else "tail"), self.tail, False

    def batch(self, index: Tensor) -> None:
        """Select sequences."""
        for paged in [*self.encoded.values(), *(p for p in (self.full, self.tail) if p is not None)]:
            paged.batch(index)
        self.fixed = {k: v.index_select(0, index) for k, v in self.fixed.items()}
        self.basis_fixed = {k: v.index_select(0, index) for k, v in self.basis_fixed.items()}

    def to(self, device: torch.device) -> None:
        """Move everything this side holds."""
        for paged in [*self.encoded.values(), *(p for p in (self.full, self.tail) if p is not None)]:
            paged.to(device)
        self.fixed = {k: v.to(device) for k, v in self.fixed.items()}
        self.basis_fixed = {k: v.to(device) for k, v in self.basis_fixed.items()}


def _put(rows: Paged, at: Tensor, x: Tensor) -> None:
    """Write x[b, h, i] into row at[b, h, i] where that is one of the rows."""
    held = rows.read().clone()
    inside = (at >= 0) & (at < held.shape[2])
    index = at.clamp(0, held.shape[2] - 1)[..., None].expand(-1, -1, -1, held.shape[3])
    held.scatter_(2, index, torch.where(inside[..., None], x.to(held.dtype), held.gather(2, index)))
    rows.assign(held)
