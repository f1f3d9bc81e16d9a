"""A rectangle of the cache: the same rows for some sequences and heads of one layer, written, dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.parts import ALLOCATION_ROWS, Place, Rows
from runtime.buffers import Paged
from runtime.parts import Merged, PolicyTwin, Prompt, Setting, Step, Tensors, twins
from runtime.rope import Rotation
from runtime.side import Side


@dataclass(frozen=True)
class Geometry:
    """One layer's cache in numbers: heads of a rectangle, widths of both sides, window (0 = none), layer and depth."""

    n_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    layer: int = 0
    n_layers: int = 1

    def place(self, side: str, value_bits: int) -> Place:
        """Where a part works."""
        width = self.k_dim if side == "k" else self.v_dim
        name = "k" if side == "k" else "v"
        return Place(name, self.n_kv_heads, width, self.n_heads, value_bits, self.layer, self.n_layers)


@dataclass(frozen=True)
class Surroundings:
    """What a store needs of its model: dtype, device, rotation, calibrated tensors, shared per-model buffers, seed."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rotation: Rotation | None = None
    calibration: Mapping[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensors] = field(default_factory=dict)
    seed: int = 0

    def setting(self, place: Place, prefix: str) -> Setting:
        """The surroundings of one twin; calibration keys lose their prefix (`k.`, `v.`, `tokens.`)."""
        own = {k.removeprefix(prefix + "."): v for k, v in self.calibration.items() if k.startswith(prefix + ".")}
        return Setting(place, self.dtype, self.device, own, self.seed)


class Store:
    """Rows of B sequences and H heads that are written, kept and dropped together.

    Sequences of different lengths, or heads that keep different numbers of rows, are different stores.
    """

    def __init__(self, method: Method, geometry: Geometry, around: Surroundings) -> None:
        self.method = method
        self.geometry = geometry
        self.around = around
        bits = torch.finfo(around.dtype).bits
        self.sides: dict[str, Side] = {}
        for name, chain in (("k", method.k), ("v", method.v)):
            place = geometry.place(name, bits)
            if place.width:
                self.sides[name] = Side(chain, around.setting(place, name), around.shared.get(name))
                around.shared.setdefault(name, self.sides[name].model)
        if method.k.before_rope and around.rotation is None:
            raise KvsimError("rope=pre needs the model's rotary embedding")
        self.policy: PolicyTwin | None = None
        self.policy_model: Tensors = {}
        if method.tokens.name != "keep" and not geometry.window:
            setting = around.setting(geometry.place("k", bits), "tokens")
            self.policy = twins()[method.tokens.name](method.tokens, setting)  # type: ignore[assignment,arg-type]
            assert self.policy is not None
            self.policy_model = around.shared.setdefault("tokens", self.policy.model_buffers())
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        for side in self.sides.values():
            side.clear()
        self.state: dict[str, Paged] = {}
        self.positions: Paged | None = None
        self.seen = self.next_position = 0

    @property
    def keys(self) -> Side:
        """The key side."""
        return self.sides["k"]

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write rows [B, H, n, d] that stand at positions [B, n], or [B, H, n] where heads chose different rows."""
        if positions.numel():
            self.next_position = int(positions[0, -1] if positions.dim() == 2 else positions.max()) + 1
        if self.method.k.before_rope:
            assert self.around.rotation is not None
            k = self.around.rotation.unrotate(k, positions)
            if self.method.tokens.drops != "none" and not self.geometry.window:
                self._note(positions)
        self.keys.append(k)
        if "v" in self.sides:
            self.sides["v"].append(v)
        self.seen += k.shape[2]

    def _note(self, positions: Tensor) -> None:
        heads = self.geometry.n_kv_heads if self.method.tokens.per_head else 1
        at = positions[:, None] if positions.dim() == 2 else positions[:, :heads]
        at = at.expand(-1, heads, -1)[..., None].to(torch.int32).contiguous()
        self.positions = self.positions or Paged(at, ALLOCATION_ROWS)
        self.positions.append(at)

    def settle(self) -> None:
        """Encode what is due on both sides."""
        for side in self.sides.values():
            side.settle()

    def take_prompt(self, prompt: Prompt, positions: Tensor) -> None:
        """Take in the prompt: let the policy choose or merge rows, then write and encode them."""
        chosen: Tensor | Merged | None = None
        if self.policy is not None:
            chosen = self.policy.merge(prompt)
            chosen = self.policy.select(prompt) if chosen is None else chosen
        self.take_rows(prompt, positions, chosen)

    def take_rows(self, prompt: Prompt, positions: Tensor, chosen: Tensor | Merged | None) -> None:
        """Write the prompt's chosen rows (all where None) or merged ones, encode them, start the policy's state."""
        k, v, total = prompt.keys, prompt.values, prompt.keys.shape[2]
        if isinstance(chosen, Merged):
            k, v, positions = chosen.keys, chosen.values, positions[:, : chosen.keys.shape[2]]
        elif chosen is not None:
            k, v = (x.gather(2, chosen[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
            positions = positions[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen)
        elif self.geometry.window:
            first = max(0, total - self.geometry.window)
            k, v, positions = k[:, :, first:], v[:, :, first:], positions[:, first:]
        self.append(k, v, positions)
        self.settle()
        if isinstance(chosen, Merged):
            self._set_state(chosen.state)
        elif self.policy is not None:
            self._set_state(self.policy.start(prompt, chosen))
        self.seen = total

    def live_rows(self) -> int:
        """Rows that attention may see; rows that wait for their unit to leave do not count."""
        ranges = self.live_ranges()
        held = self.keys.rows
        return held if ranges is None else min(held, sum(high - low for low, high in ranges))

    def _set_state(self, state: Tensors) -> None:
        bits = torch.finfo(self.around.dtype).bits
        declared = self.method.tokens.buffers(Rows(1, 1, 1), 1, self.geometry.place("k", bits))
        units = {b.name: b.rows_per_unit for b in declared}
        for name, tensor in state.items():
            held = self.state.setdefault(name, Paged(tensor, units.get(name, ALLOCATION_ROWS)))
            held.assign(tensor.contiguous())

    # -- dropping ------------------------------------------------------------------------------------------------

    def after_step(self, step: Step) -> None:
        """Let the policy update its state and drop what exceeds its budget, or the window pass on; then encode."""
        ranges = self.live_ranges()
        if self.policy is not None:
            step.tail = max((s.tail_rows for s in self.sides.values() if s.encoded_rows), default=0)
            state = {n: p.read() for n, p in self.state.items()}
            folded = self.policy.fold(state, step) if self.method.tokens.merges else None
            drop = None if folded is None else folded.drop
            if folded is not None:
                self._set_state(folded.state)
                self.keys.rewrite(folded.at, folded.keys)
                self.sides["v"].rewrite(folded.at, folded.values)
            else:
                state, drop = self.policy.step(state, step)
                self._set_state(state)
            if ranges is None and drop is not None and drop.shape[-1]:
                self._drop(drop)
        if ranges is not None:
            self._expire(ranges)
        self.settle()

    def _drop(self, drop: Tensor) -> None:
        rows = self.keys.rows
        keep = complement(drop, rows)
        for side in self.sides.values():
            side.keep(keep)
        for paged in (*self.state.values(), *(p for p in (self.positions,) if p is not None)):
            if paged.rows == rows:
                paged.keep(keep)

    def live_ranges(self) -> list[tuple[int, int]] | None:
        """Live rows, counted over all rows ever appended to the store; None where nothing is dropped by position."""
        appended = self.keys.appended
        if self.geometry.window:
            return [(max(0, appended - self.geometry.window), appended)]
        ranges = getattr(self.method.tokens, "ranges", None)
        if ranges is None:
            return None
        return [(int(low), int(high)) for low, high in ranges(appended) if high > low]

    def _expire(self, ranges: list[tuple[int, int]]) -> None:
        """Positions stand for live rows only: sides may hold dead rows until their unit is dead."""
        if self.positions is not None:
            live = sum(high - low for low, high in ranges)
            held = self.positions.read()
            sinks = ranges[0][1] if len(ranges) > 1 else 0
            if live < held.shape[2]:
                newest = held[:, :, held.shape[2] - (live - sinks) :]
                self.positions.assign(torch.cat([held[:, :, :sinks], newest], dim=2))
        for side in self.sides.values():
            side.expire(ranges)

    def row_positions(self, rows: int) -> Tensor:
        """Positions of the `rows` rows that attention sees, [B or 1, H or 1, rows]."""
        if self.positions is not None:
            return self.positions.read()[..., 0].long()
        return torch.arange(self.next_position - rows, self.next_position, device=self.around.device)[None, None]

    # -- sequences, crop, accounting -----------------------------------------------------------------------------

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens; KvsimError where rows that would have to come back were dropped."""
        if self.policy is not None and self.method.tokens.drops in ("rows", "pages"):
            raise KvsimError(f"crop: {self.method.tokens.name} drops rows while generating; they cannot come back")
        if tokens > self.keys.appended:
            raise KvsimError(f"crop: {tokens} tokens are more than the {self.keys.appended} rows that were kept")
        for side in self.sides.values():
            side.crop(tokens)
        for paged in (self.positions,):
            if paged is not None:
                paged.truncate(paged.rows - tokens)
        self.seen -= tokens
        self.next_position -= tokens

    def batch(self, index: Tensor) -> None:
        """Select sequences (beam search, repeat, keep some)."""
        for side in self.sides.values():
            side.batch(index)
        for paged in (*self.state.values(), *(p for p in (self.positions,) if p is not None)):
            paged.batch(index)

    def to(self, device: torch.device) -> None:
        """Move everything."""
        for side in self.sides.values():
            side.to(device)
        for paged in (*self.state.values(), *(p for p in (self.positions,) if p is not None)):
            paged.to(device)

    def held(self) -> Iterator[tuple[str, Any, bool]]:
        """(name, Paged or tensor, per model) of everything held, named as kvsim.layout names it."""
        for name, side in self.sides.items():
            yield from ((f"{name}.{inner}", what, model) for inner, what, model in side.held())
        yield from ((name, tensor, True) for name, tensor in self.policy_model.items())
        yield from ((name, paged, False) for name, paged in self.state.items() if paged.rows)
        if self.positions is not None:
            yield "positions", self.positions, False


def complement(drop: Tensor, rows: int) -> Tensor:
    """Rows not in drop [B, H, k], ascending [B, H, rows - k]."""
    if bool((drop < 0).any()):
        raise KvsimError("heads drop different numbers of rows: each needs a store of its own")
    batch, heads, k = drop.shape
    left = torch.ones((batch, heads, rows), dtype=torch.bool, device=drop.device)
    left.scatter_(2, drop, False)
    order = torch.arange(rows, device=drop.device).expand(batch, heads, rows)
    return order[left].reshape(batch, heads, rows - k)
