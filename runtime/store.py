"""A rectangle of the cache: the same rows for some sequences and heads of one layer, written, dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.parts import ALLOCATION_ROWS, Rows
from runtime import leaving
from runtime.buffers import Paged
from runtime.latent import rebuild
from runtime.parts import Merged, Prompt, Step, Tensors
from runtime.sharing import LayerTwins
from runtime.side import Runs, Side
from runtime.steps import complement, picked_step, together


class Store:
    """Rows of B sequences and H heads that are written, kept and dropped together.

    Sequences of different lengths, or heads that keep different numbers of rows, are different stores: those of one
    head say which. `recording`: what a step would drop or encode waits until `crop` says how much of it stays.
    """

    def __init__(self, twins: LayerTwins, head: int | None = None) -> None:
        self.twins, self.method, self.around = twins, twins.method, twins.around
        self.geometry = twins.geometry if head is None else twins.geometry.alone()
        self.sides = {name: Side(side) for name, side in twins.sides(head).items()}
        self.policy = twins.policy
        self.joint = self.method.k.basis.both_sides
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        for side in self.sides.values():
            side.clear()
        self.state: dict[str, Paged] = {}
        self.positions: Paged | None = None
        self.seen = self.next_position = self.prompt_tokens = 0
        self.reduced = False
        self.waiting: list[Step] = []
        self.new_positions: Tensor | None = None

    @property
    def keys(self) -> Side:
        """The key side."""
        return self.sides["k"]

    @property
    def values(self) -> Side:
        """The side that holds values: the keys', where keys are values too or both share one latent."""
        return self.keys if self.joint else self.sides.get("v", self.keys)

    def value_maps(self) -> tuple[Tensor | None, Tensor | None]:
        """(maps, offset) from what `values` holds to values."""
        if not self.joint:
            return self.values.maps()
        basis = self.sides["v"].basis
        return basis.maps(basis.model_buffers()), None  # type: ignore[union-attr]

    # -- writing -------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write rows [B, H, n, d] that stand at positions [B, n], or [B, H, n] where heads chose different rows."""
        if not k.shape[2]:
            return
        if self.method.k.before_rope:
            assert self.around.rotation is not None
            noted = self.method.tokens.drops != "none" and not self.geometry.window
            if noted:
                self._note(positions)
            else:
                self._check_consecutive(positions)
            k = self.around.rotation.unrotate(k, positions)
        if self.joint:
            share = self.sides["v"].basis.project(v, {})  # type: ignore[union-attr]
            self.keys.append(self.mixed(k, positions), share)
            self.new_positions = positions
        else:
            self.keys.append(k)
            if "v" in self.sides:
                self.sides["v"].append(v)
        self.seen += k.shape[2]

    def mixed_queries(self, q: Tensor) -> Tensor:
        """Queries of the rows just written."""
        positions, self.new_positions = self.new_positions, None
        assert positions is not None
        return self.mixed(q, positions)

    def mixed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Keys or queries as a joint latent wants them: elite frequencies rotated, all others not."""
        assert self.around.rotation is not None
        plain = self.around.rotation.unrotate(x, positions)
        mixed: Tensor = self.keys.basis.mix(x, plain, self.keys.basis.model_buffers())  # type: ignore[union-attr]
        return mixed

    def _note(self, positions: Tensor) -> None:
        heads = self.geometry.n_kv_heads if self.method.tokens.per_head else 1
        at = positions[:, None] if positions.dim() == 2 else positions[:, :heads]
        at = at.expand(-1, heads, -1)[..., None].to(torch.int32).contiguous()
        self.positions = self.positions or Paged(at, ALLOCATION_ROWS)
        self.positions.append(at)

    def _check_consecutive(self, positions: Tensor) -> None:
        """Positions that are not stored must follow from the count of rows."""
        first = int(positions[0, 0]) if not self.keys.appended else self.next_position
        wanted = torch.arange(first, first + positions.shape[1], device=positions.device)
        if not bool((positions == wanted).all()):
            raise KvsimError("rope=pre: position_ids of the new tokens do not follow those before; leave rope=post")
        self.next_position = first + positions.shape[1]

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
            # a mean of rotated keys has no position of its own: any will do that is undone and redone alike
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
        self.seen = self.prompt_tokens = total
        self.reduced = k.shape[2] < total

    def _set_state(self, state: Tensors) -> None:
        declared = self.method.tokens.buffers(Rows(1, 1, 1), 1, self.geometry.place("k", self.around.bits))
        units = {b.name: b.rows_per_unit for b in declared}
        for name, tensor in state.items():
            held = self.state.setdefault(name, Paged(tensor, units.get(name, ALLOCATION_ROWS)))
            held.assign(tensor)

    # -- reading -------------------------------------------------------------------------------------------------

    def state_tensors(self) -> Tensors:
        """The policy's state as the last step left it."""
        return {name: paged.read() for name, paged in self.state.items()}

    @property
    def settled_seen(self) -> int:
        """Tokens seen when the policy's state was last moved."""
        return self.seen - sum(step.new for step in self.waiting)

    def live_rows(self) -> int:
        """Rows that attention may see; rows that wait for their unit to leave do not count."""
        ranges = self.live_ranges()
        held = self.keys.rows
        return held if ranges is None else min(held, sum(high - low for low, high in ranges))

    def live_ranges(self) -> Runs | None:
        """Live rows, counted over all rows ever appended to the store; None where nothing is dropped by position."""
        return self.ranges_after(self.keys.appended)

    def ranges_after(self, appended: int) -> Runs | None:
        """Live rows once so many were appended."""
        if self.geometry.window:
            return [(max(0, appended - self.geometry.window), appended)]
        ranges = getattr(self.method.tokens, "ranges", None)
        if ranges is None:
            return None
        return [(int(low), int(high)) for low, high in ranges(appended) if high > low]

    def row_positions(self, rows: int) -> Tensor:
        """Positions of the `rows` rows that attention sees, [B or 1, H or 1, rows]."""
        if self.positions is not None:
            return self.positions.read()[..., 0].long()
        return torch.arange(self.next_position - rows, self.next_position, device=self.around.device)[None, None]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys as attention sees them, after the rotation, and values, [B, H, n, d]: for policies and tests."""
        k = self.keys.read()
        if self.method.k.before_rope and k.shape[2]:
            assert self.around.rotation is not None
            at = self.row_positions(k.shape[2])
            k = self.around.rotation.rotate(k, at.expand(k.shape[0], k.shape[1], -1))
        if not self.joint:
            return k, self.values.read()
        maps, _ = self.value_maps()
        assert maps is not None
        return k, rebuild(torch.cat([tile for _, tile in self.keys.tiles()], dim=2), maps)

    # -- after a step ----------------------------------------------------------------------------------------------

    def after_step(self, step: Step, wait: bool = False) -> None:
        """Let the policy move its state and drop what exceeds its budget, or the window pass on; then encode.

        wait: nothing of that until `crop` says how much of the step stays.
        """
        self.waiting.append(step)
        if not wait:
            step, self.waiting = together(self.waiting, 0), []
            self._finish(step)

    def _finish(self, step: Step) -> None:
        ranges = self.live_ranges()
        if self.policy is not None:
            self._ask(self._with_rows(step), drops=ranges is None)
        if ranges is not None:
            self._expire(ranges)
        self.settle()

    def _with_rows(self, step: Step) -> Step:
        """The step with the rows that the policy asks for: none, those just written, or all as they read back."""
        assert self.policy is not None
        tail = max((s.tail_rows for s in self.sides.values() if s.encoded_rows), default=0)
        wanted = self.policy.step_rows
        if wanted == "new":
            return replace(step, tail=tail)
        keys, values = self.read() if wanted == "all" else (None, None)
        return replace(step, tail=tail, keys=keys, values=values)

    def _ask(self, step: Step, drops: bool) -> None:
        assert self.policy is not None
        state = self.state_tensors()
        if self.method.tokens.merges and self.method.tokens.drops == "rows":
            folded = self.policy.fold(state, step)
            if folded is None:
                return
            state, drop = folded.state, folded.drop
            self._rewrite(folded.at, folded.keys, folded.values)
        else:
            state, drop = self.policy.step(state, step)
        self._set_state(state)
        if drops and drop is not None and drop.shape[-1]:
            self._drop(drop)

    def _rewrite(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        if self.method.k.before_rope and at.shape[2]:
            assert self.around.rotation is not None
            where = self.row_positions(self.keys.rows).expand(at.shape[0], at.shape[1], -1)
            keys = self.around.rotation.unrotate(keys, where.gather(2, at.clamp_min(0)))
        leaving.rewrite(self.keys, at, keys)
        leaving.rewrite(self.sides["v"], at, values)

    def _drop(self, drop: Tensor) -> None:
        rows = self.keys.rows
        kept = complement(drop, rows)
        for side in self.sides.values():
            leaving.keep(side, kept)
        for paged in self._bookkeeping():
            if paged.rows == rows:
                paged.keep(kept)

    def _expire(self, ranges: Runs) -> None:
        """Positions stand for live rows only: sides may hold dead rows until their unit is dead."""
        if self.positions is not None:
            live, held = sum(high - low for low, high in ranges), self.positions.rows
            sinks = ranges[0][1] if len(ranges) > 1 else 0
            if live < held:
                self.positions.keep_runs([(0, sinks), (held - (live - sinks), held)])
        for side in self.sides.values():
            leaving.expire(side, ranges)

    # -- sequences, crop, accounting -----------------------------------------------------------------------------

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens; KvsimError where rows that would have to come back were dropped."""
        if self.waiting:
            undone = min(tokens, sum(step.new for step in self.waiting))
            self._forget(undone, undone=True)
            step, self.waiting, tokens = together(self.waiting, undone), [], tokens - undone
            if step.new:
                self._finish(step)
        if not tokens:
            return
        if self.policy is not None and self.method.tokens.drops in ("rows", "pages"):
            raise KvsimError(f"crop: {self.method.tokens.name} drops rows while generating; they cannot come back")
        if self.reduced and tokens > self.seen - self.prompt_tokens and not self.geometry.window:
            raise KvsimError(f"crop: {tokens} tokens reach into the prompt, of which rows were dropped")
        if self.policy is not None and self.state:
            raise KvsimError(f"crop: {self.method.tokens.name} has moved its state on; it cannot be cropped back")
        self._forget(tokens, undone=False)

    def _forget(self, tokens: int, undone: bool) -> None:
        for side in self.sides.values():
            leaving.crop(side, tokens, undone)
        if self.positions is not None:
            self.positions.truncate(self.positions.rows - tokens)
        self.seen -= tokens
        self.next_position -= tokens

    def picked(self, index: Tensor) -> Store:
        """A store of the sequences index [m] (beam search, repeat, keep some)."""
        found = copy(self)
        found.sides = {name: side.picked(index) for name, side in self.sides.items()}
        found.state = {name: paged.picked(index) for name, paged in self.state.items()}
        found.positions = None if self.positions is None else self.positions.picked(index)
        found.waiting = [picked_step(step, index) for step in self.waiting]
        return found

    def _bookkeeping(self) -> Iterator[Paged]:
        yield from self.state.values()
        if self.positions is not None:
            yield self.positions

    def to(self, device: torch.device) -> None:
        """Move everything that belongs to sequences."""
        for side in self.sides.values():
            side.to(device)
        for paged in self._bookkeeping():
            paged.to(device)

    def fixed_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what sequences hold from their first rows on."""
        for name, side in self.sides.items():
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in side.fixed_buffers())

    def pages(self) -> Iterator[tuple[str, Paged]]:
        """(name, rows) of everything that grows, named as kvsim.layout names it."""
        for name, side in self.sides.items():
            yield from ((f"{name}.{inner}", paged) for inner, paged in side.pages())
        yield from self.state.items()
        if self.positions is not None:
            yield "positions", self.positions
