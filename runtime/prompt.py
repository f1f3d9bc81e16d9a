"""A prompt while it comes, in full precision, and the stores that take it in once it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from runtime.attention import Rule, attend_rows, observe
from runtime.parts import Merged, Prompt
from runtime.sharing import LayerTwins
from runtime.store import Store


@dataclass
class Piece:
    """A store and what it holds: sequences [m] of the batch (ascending) and KV heads [low, high) of the layer."""

    sequences: Tensor
    heads: slice
    store: Store

    def covers(self, batch: int, heads: int) -> bool:
        """Whether it is all of the layer."""
        return len(self.sequences) == batch and self.heads.stop - self.heads.start == heads

    def picked(self, index: Tensor) -> Piece | None:
        """What is left of it when the batch becomes the sequences `index`."""
        where = (index[:, None] == self.sequences[None]).nonzero()
        if not len(where):
            return None
        own = torch.arange(len(where), device=where.device)
        whole = len(where) == len(self.sequences) and torch.equal(where[:, 1], own)
        return Piece(where[:, 0], self.heads, self.store if whole else self.store.picked(where[:, 1]))


class Incoming:
    """Chunks of a prompt: rows [B, H, n, d], queries where the policy wants them, positions; padding at the left."""

    def __init__(self, twins: LayerTwins, batch: int) -> None:
        self.twins, self.batch = twins, batch
        self.padding: Tensor | None = None
        self.rule = Rule(1.0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.positions: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Rows so far, padding included."""
        return sum(k.shape[2] for k in self.keys)

    def add(self, k: Tensor, v: Tensor, q: Tensor, positions: Tensor) -> None:
        """One more chunk; chunks are joined, so that attention finds whole tensors."""
        policy = self.twins.policy
        if policy is not None and (policy.prompt_weights or policy.prompt_queries):
            self.queries = _joined([*self.queries, q], 2)
        self.keys, self.values = _joined([*self.keys, k], 2), _joined([*self.values, v], 2)
        self.positions = _joined([*self.positions, positions], 1)

    def note_padding(self, mask: Tensor) -> None:
        """[B] padded tokens at the left of the prompt so far, from a mask [B, n]; other masks are refused."""
        shown = mask.bool()[:, -self.rows :]
        if bool(shown.all()):
            self.padding = None
            return
        if shown.shape[1] < self.rows:
            raise KvsimError(f"the attention mask covers {shown.shape[1]} of {self.rows} tokens")
        pads = (~shown).sum(-1)
        if not torch.equal(shown, torch.arange(self.rows, device=shown.device) >= pads[:, None]):
            raise KvsimError("the attention mask has holes or padding on the right; pad prompts on the left")
        self.padding = pads

    def groups(self) -> list[tuple[Tensor, int]]:
        """(sequences, padding) of those that have the same padding."""
        if self.padding is None:
            return [(torch.arange(self.batch, device=self.keys[0].device), 0)]
        return [((self.padding == pad).nonzero()[:, 0], int(pad)) for pad in self.padding.unique()]

    def attend(self, q: Tensor, rule: Rule) -> Tensor:
        """Attention of the last chunk's queries over the prompt so far, in full precision; 0 for padding."""
        self.rule = rule
        k, v = self.keys[0], self.values[0]
        stored = self.twins.method.protocol == "on_write" and not self.twins.method.is_full
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        for rows, pad in self.groups():
            first = max(0, pad - (k.shape[2] - q.shape[2]))
            if first >= q.shape[2]:
                continue
            queries, keys, values = q[rows, :, first:], k[rows, :, pad:], v[rows, :, pad:]
            if stored:
                queries, keys, values = self._as_stored(queries, keys, values)
            out[rows, :, first:] = attend_rows(queries, keys, values, rule, self.twins.geometry.window)
        return out

    def _as_stored(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as the formats would give them back (protocol on_write): no token policy has acted yet.

        Queries come back too: those of a joint latent are turned as its keys are.
        """
        store, at = Store(self.twins.formats_alone()), torch.arange(k.shape[2], device=k.device)
        store.append(k, v, at.expand(k.shape[0], -1))
        store.settle()
        keys, values = store.read()
        if store.joint:
            q = store.mixed(q, at[-q.shape[2] :].expand(k.shape[0], -1))
        return q, keys.to(k.dtype), values.to(v.dtype)

    def taken(self, scores: Tensor | None) -> list[Piece]:
        """Stores that hold the prompt as the method says; scores [B, H, n] from outside."""
        found = []
        for rows, pad in self.groups():
            k, v, at = self.keys[0][rows, :, pad:], self.values[0][rows, :, pad:], self.positions[0][rows, pad:]
            prompt = Prompt(k, v, self.rule.scaling, rotation=self.twins.around.rotation, positions=at)
            prompt.scores = None if scores is None else scores[rows, :, pad:]
            policy = self.twins.policy
            if policy is not None and self.queries:
                q = self.queries[0][rows, :, pad:]
                prompt.queries = q[:, :, -policy.prompt_queries :] if policy.prompt_queries else None
                if policy.prompt_weights and k.shape[2]:
                    observe(prompt, q, self.rule)
            found += stores(self.twins, rows, prompt, at)
        return found

    def crop(self, count: int) -> None:
        """Forget the newest rows."""
        left = self.rows - count
        self.keys, self.values, self.queries = (
            [x[:, :, :left] for x in held] for held in (self.keys, self.values, self.queries)
        )
        self.positions = [x[:, :left] for x in self.positions]

    def picked(self, index: Tensor) -> Incoming:
        """The sequences `index`."""
        found = Incoming(self.twins, len(index))
        found.rule = self.rule
        found.padding = None if self.padding is None else self.padding[index]
        found.keys, found.values, found.queries, found.positions = (
            [x[index] for x in held] for held in (self.keys, self.values, self.queries, self.positions)
        )
        return found

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what waits."""
        for side, held in (("k", self.keys), ("v", self.values), ("q", self.queries)):
            yield from ((f"{side}.waiting", x) for x in held)


def _joined(pieces: list[Tensor], dim: int) -> list[Tensor]:
    return pieces if len(pieces) == 1 else [torch.cat(pieces, dim=dim)]


def stores(twins: LayerTwins, rows: Tensor, prompt: Prompt, positions: Tensor) -> list[Piece]:
    """The prompt of sequences `rows` in one store, or in one a sequence and head where heads keep different numbers."""
    if not twins.ragged:
        store = Store(twins)
        store.take_prompt(prompt, positions)
        return [Piece(rows, slice(0, twins.geometry.n_kv_heads), store)]
    policy = twins.policy
    assert policy is not None
    merged = policy.merge(prompt)
    kept = None if merged is not None else policy.select(prompt)
    found = []
    for b, sequence in enumerate(rows):
        for h in range(twins.geometry.n_kv_heads):
            store = Store(twins, h)
            at = (slice(b, b + 1), slice(h, h + 1))
            own = Prompt(prompt.keys[at], prompt.values[at], prompt.scaling)
            store.take_rows(own, positions[b : b + 1], _own_rows(kept, merged, at))
            found.append(Piece(sequence[None], slice(h, h + 1), store))
    return found


def _own_rows(kept: Tensor | None, merged: Merged | None, at: tuple[slice, slice]) -> Tensor | Merged | None:
    if merged is None:
        return None if kept is None else kept[at][kept[at] >= 0].reshape(1, 1, -1)
    count = merged.keys.shape[2] if merged.rows is None else int(merged.rows[at])
    state = {n: s[at][:, :, :count] if s.shape[2] == merged.keys.shape[2] else s[at] for n, s in merged.state.items()}
    return Merged(merged.keys[at][:, :, :count], merged.values[at][:, :, :count], state)
