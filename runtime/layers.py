"""One attention layer of a compressed cache: a transformers cache layer whose rows live in stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.tokens.keep import Keep
from runtime.attention import Rule, attend, attend_later, attend_prompt, observe
from runtime.buffers import Paged
from runtime.parts import Merged, PolicyTwin, Prompt, Step
from runtime.store import Geometry, Store, Surroundings

HANDLE = "_kvsim_layer"
"""Attribute by which the tensors that `update` returns lead attention back to their layer."""


@dataclass
class Piece:
    """A store and what it holds: sequences [first, last) of the batch and KV heads [low, high) of the layer."""

    sequences: slice
    heads: slice
    store: Store


class CompressedLayer(CacheLayerMixin):
    """Holds one layer. `update` only notes the new rows; `attend`, called by the attention hook, does the work."""

    is_croppable = True

    def __init__(self, method: Method, geometry: Geometry, around: Surroundings, prompt_tokens: int | None = None) -> None:
        super().__init__()
        self.method, self.geometry, self.around = method, geometry, around
        self.prompt_tokens = prompt_tokens
        self.is_sliding = bool(geometry.window)
        self.pieces: list[Piece] = []
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.pending: tuple[Tensor, Tensor, Tensor] | None = None
        self.seen = self.batch_size = 0
        self.scores: Tensor | None = None
        self.padding: Tensor | None = None

    # -- what transformers calls ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn batch, device and dtype from the first rows."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note rows [B, H, q, d]; they are written when attention asks for them. Returns handles to be attended."""
        if self.pending is not None:
            raise KvsimError("attention did not pass through kvsim: this architecture does not use the attention interface")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise KvsimError(f"the cache holds {self.batch_size} sequences, got {key_states.shape[0]}; reset it first")
        inner = kwargs.get("kwargs") or {}
        positions = inner.get("position_ids")
        count = key_states.shape[2]
        if positions is None or positions.shape[-1] != count:
            positions = torch.arange(self.seen, self.seen + count, device=key_states.device)[None]
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(keys, HANDLE, self)
        self.pending = (key_states, value_states, positions.expand(self.batch_size, -1))
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen: positions depend on it, whatever was dropped."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows stored + new, first row's offset); the compressed attention builds its own masks."""
        held = max((p.store.keys.rows for p in self.pieces), default=0) + sum(k.shape[2] for k, _, _ in self.waiting)
        return held + query_length, self.seen - held

    def get_max_length(self) -> int:
        """No maximum: full layers grow, and sliding layers report their window."""
        return self.geometry.window or -1

    def reset(self) -> None:
        """Forget everything."""
        self.pieces, self.waiting, self.pending, self.scores = [], [], None, None
        self.seen, self.is_initialized, self.padding = 0, False, None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative count, as transformers passes it (0 changes nothing)."""
        if tokens_to_remove > 0:
            raise KvsimError("crop takes a negative count of tokens to remove")
        for piece in self.pieces if tokens_to_remove else ():
            piece.store.crop(-tokens_to_remove)
        self.seen += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder sequences for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, reorder or repeat sequences."""
        if not self.is_initialized:
            return
        if any(p.sequences != slice(0, self.batch_size) for p in self.pieces):
            raise KvsimError("sequences of different lengths cannot be reordered: generate without left padding or without beams")
        for piece in self.pieces:
            piece.store.batch(indices.to(self.device))
            piece.sequences = slice(0, len(indices))
        self.waiting = [(k[indices], v[indices], p[indices]) for k, v, p in self.waiting]
        self.batch_size = len(indices)

    def offload(self) -> None:
        """Move everything to the CPU."""
        for piece in self.pieces:
            piece.store.to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring everything back."""
        for piece in self.pieces:
            piece.store.to(self.device)

    # -- what the attention hook calls ---------------------------------------------------------------------------

    def attend(self, query: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Attention of the pending rows' queries [B, Hq, q, d]; writes the rows and lets the method do its work."""
        assert self.pending is not None
        (k, v, positions), self.pending = self.pending, None
        count = k.shape[2]
        before, self.seen = self.seen, self.seen + count
        padding = self._checked(padding, count, first=not self.pieces and not self.waiting)
        if self.pieces:
            return self._step(query, k, v, positions, rule)
        self.waiting.append((k, v, positions))
        k, v, positions = (torch.cat([w[i] for w in self.waiting], dim=2 if i < 2 else 1) for i in range(3))
        out = self._prompt_attention(query, k, v, padding, rule)
        if before + count >= (self.prompt_tokens or 0):
            self.waiting = []
            self._take_prompt(query, k, v, positions, padding, rule)
        return out

    def _checked(self, padding: Tensor | None, count: int, first: bool) -> Tensor | None:
        """[B] padded tokens at the left of each prompt, or None; other masks are refused."""
        if padding is None:
            return None if first else self.padding
        if padding.dim() == 4:
            raise KvsimError("a 4-D attention mask cannot be combined with a compressed cache; pass a 2-D padding mask")
        new = padding[:, -count:].bool()
        if first and not new.all():
            pads = (~new).sum(-1)
            if not bool((new == (torch.arange(count, device=new.device) >= pads[:, None])).all()):
                raise KvsimError("the attention mask has holes or padding on the right; pad prompts on the left")
            self.padding = pads
        elif not new.all():
            raise KvsimError("new tokens are masked out; a compressed cache takes left padding in the prompt only")
        return self.padding

    def _prompt_attention(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Full precision over the prompt so far (the last q rows are the queries)."""
        if self.method.protocol == "on_write" and not self.method.is_full:
            k, v = self._as_stored(k, v, padding)
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        pads = [0] * q.shape[0] if padding is None else padding.tolist()
        if not any(pads):
            return _prompt_rows(q, k, v, rule, self.geometry.window)
        for b, pad in enumerate(pads):
            first = max(0, pad - (k.shape[2] - q.shape[2]))
            if first < q.shape[2]:
                out[b : b + 1, :, first:] = _prompt_rows(q[b : b + 1, :, first:], k[b : b + 1, :, pad:], v[b : b + 1, :, pad:],
                                                         rule, self.geometry.window)
        return out

    def _as_stored(self, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows as the formats would give them back (protocol on_write): no token policy has acted yet."""
        plain = replace(self.method, tokens=Keep())
        pieces = []
        for b, pad in enumerate([0] * k.shape[0] if padding is None else padding.tolist()):
            store = Store(plain, replace(self.geometry, window=0), self.around)
            at = torch.arange(k.shape[2] - pad, device=k.device)[None]
            store.append(k[b : b + 1, :, pad:], v[b : b + 1, :, pad:], at)
            store.settle()
            rows = [side.read() for side in store.sides.values()]
            if self.method.k.before_rope:
                assert self.around.rotation is not None
                rows[0] = self.around.rotation.rotate(rows[0], at)
            pieces.append([torch.cat([x[b : b + 1, :, :pad], r.to(x.dtype)], dim=2) for x, r in zip((k, v), rows, strict=True)])
        return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])

    def _take_prompt(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, padding: Tensor | None, rule: Rule) -> None:
        pads = [0] * k.shape[0] if padding is None else padding.tolist()
        groups = [(slice(0, len(pads)), pads[0])] if len(set(pads)) == 1 else [(slice(b, b + 1), p) for b, p in enumerate(pads)]
        for rows, pad in groups:
            prompt = Prompt(k[rows, :, pad:], v[rows, :, pad:], rule.scaling)
            prompt.rotation, prompt.positions = self.around.rotation, positions[rows, pad:]
            prompt.scores = None if self.scores is None else self.scores[rows, :, pad:]
            queries = q[rows, :, max(0, pad - (k.shape[2] - q.shape[2])) :]
            self.pieces += self._stores(rows, prompt, queries, positions[rows, pad:], rule)

    def _stores(self, rows: slice, prompt: Prompt, q: Tensor, positions: Tensor, rule: Rule) -> list[Piece]:
        store = Store(self.method, self.geometry, self.around)
        policy = store.policy
        if policy is not None:
            wanted = policy.prompt_queries
            prompt.queries = q[:, :, -wanted:] if wanted else None
            if policy.prompt_weights and prompt.keys.shape[2]:
                if q.shape[2] < prompt.keys.shape[2]:
                    raise KvsimError(f"{policy.part.name} needs the weights of the whole prompt: pass it in one forward call")
                observe(prompt, q, rule)
            if policy.ragged:
                return ragged(self, rows, policy, prompt, positions)
        store.take_prompt(prompt, positions)
        return [Piece(rows, slice(0, self.geometry.n_kv_heads), store)]

    def _step(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        """Append, attend, let the policy drop, encode."""
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        group = self.geometry.n_heads // self.geometry.n_kv_heads
        for piece in self.pieces:
            at = (piece.sequences, piece.heads)
            queries = slice(piece.heads.start * group, piece.heads.stop * group)
            store = piece.store
            store.append(k[at], v[at], positions[piece.sequences])
            if self.method.protocol == "on_write":
                store.settle()
            mine = replace(rule, sinks=None if rule.sinks is None else rule.sinks[queries])
            out[piece.sequences, queries], step = attend(store, q[piece.sequences, queries], mine)
            _hand_rows(store, step, k[at], v[at])
            store.after_step(step)
        return out

    # -- accounting ----------------------------------------------------------------------------------------------

    def rows(self) -> list[int] | None:
        """Rows that each sequence and KV head holds, [B * H] numbers; None before the prompt."""
        if not self.pieces:
            return None
        found = []
        for piece in self.pieces:
            many = (piece.sequences.stop - piece.sequences.start) * (piece.heads.stop - piece.heads.start)
            found += [piece.store.live_rows()] * many
        return found

    def held(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, live bytes, allocated bytes) of every tensor; per-model buffers once."""
        shared: set[str] = set()
        for piece in self.pieces:
            for name, what, per_model in piece.store.held():
                if per_model and name in shared:
                    continue
                if per_model:
                    shared.add(name)
                if isinstance(what, Paged):
                    yield name, tuple(what.read(0, 0).shape[:2]) + (what.rows,), what.nbytes, what.allocated
                else:
                    size = what.numel() * what.element_size()
                    yield name, tuple(what.shape), size, size
        for k, v, _ in self.waiting:
            yield "k.waiting", tuple(k.shape), k.numel() * k.element_size(), k.numel() * k.element_size()
            yield "v.waiting", tuple(v.shape), v.numel() * v.element_size(), v.numel() * v.element_size()


def _prompt_rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule, window: int) -> Tensor:
    """Attention of the last rows of a prompt; earlier chunks are keys already."""
    if q.shape[2] == k.shape[2]:
        return attend_prompt(q, k, v, rule, window)
    return attend_later(q, k, v, rule, window)


def ragged(layer: CompressedLayer, rows: slice, policy: PolicyTwin, prompt: Prompt, positions: Tensor) -> list[Piece]:
    """One store for each sequence and KV head: a policy whose heads keep different numbers of rows chose them together."""
    merged = policy.merge(prompt)
    kept = None if merged is not None else policy.select(prompt)
    group = layer.geometry.n_heads // layer.geometry.n_kv_heads
    alone = replace(layer.geometry, n_heads=group, n_kv_heads=1)
    found = []
    for b in range(rows.stop - rows.start):
        for h in range(layer.geometry.n_kv_heads):
            store = Store(layer.method, alone, layer.around)
            at = (slice(b, b + 1), slice(h, h + 1))
            own = Prompt(prompt.keys[at], prompt.values[at], prompt.scaling)
            store.take_rows(own, positions[b : b + 1], _own_rows(kept, merged, at))
            found.append(Piece(slice(rows.start + b, rows.start + b + 1), slice(h, h + 1), store))
    return found


def _hand_rows(store: Store, step: Step, k: Tensor, v: Tensor) -> None:
    """Give a policy the rows it asks for: those just written, or all as they read back."""
    wanted = store.policy.step_rows if store.policy is not None else "none"
    if wanted == "new":
        step.keys, step.values = k, v
    elif wanted == "all":
        step.keys, step.values = store.keys.read(), store.sides["v"].read()


def _own_rows(kept: Tensor | None, merged: Merged | None, at: tuple[slice, slice]) -> Tensor | Merged | None:
    if merged is None:
        if kept is None:
            return None
        index = kept[at]
        return index[index >= 0].reshape(1, 1, -1)
    count = merged.keys.shape[2] if merged.rows is None else int(merged.rows[at])
    state = {n: s[at][:, :, :count] if s.shape[2] == merged.keys.shape[2] else s[at] for n, s in merged.state.items()}
    return Merged(merged.keys[at][:, :, :count], merged.values[at][:, :, :count], state)

