"""One attention layer of a compressed cache: a transformers cache layer whose rows live in stores."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.ragged import LayerRows
from runtime.attention import Rule, attend
from runtime.prompt import Incoming, Piece
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.store import Store

HANDLE = "_kvsim_layer"
"""Attribute by which the tensors that `update` returns lead attention back to their layer."""

MOST_WAITING = 256
"""Tokens after which a recorded past is settled: no draft is as long, so nobody is going to crop it."""


class CompressedLayer(CacheLayerMixin):
    """Holds one layer. `update` only notes the new rows; `attend`, called by the attention hook, does the work."""

    def __init__(
        self, method: Method, geometry: Geometry, around: Surroundings, prompt_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.method, self.geometry = method, geometry
        self.prompt_tokens = prompt_tokens
        self.is_sliding = bool(geometry.window)
        self.twins = LayerTwins(method, geometry, around)
        list(self.twins.held())  # what the model lacks, a calibration say, is missed before any row comes
        self.reset()

    @property
    def around(self) -> Surroundings:
        """Dtype, device, rotation and calibration."""
        return self.twins.around

    # -- what transformers calls ---------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` after recording leaves no trace: what is attended must not be encoded, nor turn a basis."""
        turns = any(c.basis.rewrites_rows for c in (self.method.k, self.method.v))
        return not turns and (self.method.protocol == "after_prefill" or self.method.is_full)

    def activate_past_recording(self) -> None:
        """Drop and encode nothing until `crop` says how many of the newest tokens stay (assisted generation).

        A past of more than MOST_WAITING tokens without a crop is settled, and recording ends.
        """
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn batch, device and dtype from the first rows."""
        self.device, self.batch_size = key_states.device, key_states.shape[0]
        around = self.around
        if (key_states.dtype, key_states.device) != (around.dtype, around.device):
            around = replace(around, dtype=key_states.dtype, device=key_states.device)
            self.twins = LayerTwins(self.method, self.geometry, around)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note rows [B, H, q, d]; they are written when attention asks for them. Returns handles to be attended."""
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise KvsimError("a compressed cache is for inference: call the model under torch.no_grad()")
        if key_states.dim() != 4 or key_states.shape[:3] != value_states.shape[:3]:
            shapes = f"{tuple(key_states.shape)} and {tuple(value_states.shape)}"
            raise KvsimError(f"keys and values are [B, H, n, d] of as many rows each, got {shapes}")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise KvsimError(f"the cache holds {self.batch_size} sequences, got {key_states.shape[0]}; reset it first")
        expected = (self.geometry.n_kv_heads, self.geometry.k_dim, self.geometry.v_dim)
        given = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        if given != expected:
            raise KvsimError(
                f"layer {self.geometry.layer} caches {given[0]} heads of widths {given[1:]}, where its config "
                f"says {expected[0]} of {expected[1:]}: this architecture is not supported"
            )
        positions = self._positions((kwargs.get("kwargs") or {}).get("position_ids"), key_states.shape[2])
        keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
        setattr(keys, HANDLE, self)
        self.pending = (key_states, value_states, positions)
        return keys, values

    def _positions(self, given: Tensor | None, count: int) -> Tensor:
        """[B, n] positions of the new rows; counted on where the model does not say and it does not matter."""
        if given is not None and given.dim() == 2 and given.shape[-1] == count:
            return given.expand(self.batch_size, -1)
        if self.method.k.before_rope:
            why = "does not tell the cache where rows stand" if given is None else "has positions of several axes"
            raise KvsimError(f"rope=pre: this architecture {why}; leave rope=post")
        return torch.arange(self.seen, self.seen + count, device=self.device).expand(self.batch_size, -1)

    def get_seq_length(self) -> int:
        """Tokens seen: positions depend on it, whatever was dropped."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows stored + new, first row's offset); the compressed attention builds its own masks."""
        held = max((p.store.keys.rows for p in self.pieces), default=self.incoming.rows if self.incoming else 0)
        return held + query_length, self.seen - held

    def get_max_length(self) -> int:
        """No maximum: full layers grow, and sliding layers report their window."""
        return self.geometry.window or -1

    def reset(self) -> None:
        """Forget everything but what belongs to the model."""
        self.pieces: list[Piece] = []
        self.incoming: Incoming | None = None
        self.pending: tuple[Tensor, Tensor, Tensor] | None = None
        self.scores: Tensor | None = None
        self.seen = self.batch_size = 0
        self.is_initialized = self.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative count, as transformers passes it. Settles what recording let wait."""
        if tokens_to_remove > 0:
            raise KvsimError("crop takes a negative count of tokens to remove")
        if not self.is_initialized:
            return
        count = -tokens_to_remove
        if count > self.seen:
            raise KvsimError(f"crop: {count} tokens are more than the {self.seen} that were seen")
        for piece in self.pieces:
            piece.store.crop(count)
        self.seen -= count
        if not self.seen:
            self.pieces = []
        if self.incoming is not None:
            self.incoming.crop(count)
            if self.incoming.rows:
                self._take_if_complete()
            else:
                self.incoming = None

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
        index = indices.to(self.device)
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.batch_size:
            raise KvsimError(f"the cache holds {self.batch_size} sequences, there is no sequence {int(index.max())}")
        self.pieces = [new for piece in self.pieces if (new := piece.picked(index)) is not None]
        self.incoming = None if self.incoming is None else self.incoming.picked(index)
        self.scores = None if self.scores is None else self.scores[index]
        self.batch_size = len(index)

    def copied(self) -> CompressedLayer:
        """A layer of its own with the same rows; what belongs to the model is shared."""
        found, everyone = copy(self), torch.arange(self.batch_size)
        if self.is_initialized:
            everyone = everyone.to(self.device)
            own = [torch.arange(len(piece.sequences), device=piece.sequences.device) for piece in self.pieces]
            found.pieces = [replace(p, store=p.store.picked(at)) for p, at in zip(self.pieces, own, strict=True)]
            found.incoming = None if self.incoming is None else self.incoming.picked(everyone)
        return found

    def offload(self) -> None:
        """Move everything to the CPU; the next step brings it back."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring everything back."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for piece in self.pieces:
            piece.store.to(device)

    # -- what the attention hook calls ---------------------------------------------------------------------------

    def attend(self, query: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Attention of the pending rows' queries [B, Hq, q, d]; writes the rows and lets the method do its work."""
        if self.pending is None:
            raise KvsimError("attention was asked for twice, or for rows that no update brought: this architecture is "
                             "not supported")
        (k, v, positions), self.pending = self.pending, None
        if self.device.type != "cpu":
            self.prefetch()
        # tensors made under inference_mode could not be appended to outside of it
        with torch.inference_mode(False), torch.no_grad():
            if padding is not None and padding.dim() != 2:
                raise KvsimError(
                    "a 4-D attention mask cannot be combined with a compressed cache; pass a 2-D padding mask"
                )
            if self.pieces:
                if padding is not None and not bool(padding[:, -k.shape[2] :].all()):
                    raise KvsimError(
                        "new tokens are masked out; a compressed cache takes left padding in the prompt only"
                    )
                out = self._step(query, k, v, positions, rule)
                self.seen += k.shape[2]
                return out
            return self._prompt(query, k, v, positions, padding, rule)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Attend the prompt so far in full precision; take it in once it is complete."""
        self.incoming = self.incoming or Incoming(self.twins, self.batch_size)
        self.incoming.add(k, v, q, positions)
        if padding is not None:
            self.incoming.note_padding(padding)
        self.seen += k.shape[2]
        out = self.incoming.attend(q, rule)
        if not self.record_past:
            self._take_if_complete()
        return out

    def _take_if_complete(self) -> None:
        assert self.incoming is not None
        if self.seen >= (self.prompt_tokens or 0):
            self.pieces, self.incoming = self.incoming.taken(self.scores), None

    def _step(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        """Append, attend, let the policy drop, encode."""
        group = self.geometry.group
        if len(self.pieces) == 1 and self.pieces[0].covers(self.batch_size, self.geometry.n_kv_heads):
            out = self._stepped(self.pieces[0].store, q, k, v, positions, rule)
        else:
            out = q.new_empty((*q.shape[:3], v.shape[3]))
            for piece in self.pieces:
                whole = len(piece.sequences) == self.batch_size
                rows: Any = slice(None) if whole else piece.sequences  # views, not copies
                queries = slice(piece.heads.start * group, piece.heads.stop * group)
                own = replace(rule, sinks=None if rule.sinks is None else rule.sinks[queries])
                mine, keys, values = q[rows, queries], k[rows, piece.heads], v[rows, piece.heads]
                out[rows, queries] = self._stepped(piece.store, mine, keys, values, positions[rows], own)
        if self.record_past and max(sum(s.new for s in p.store.waiting) for p in self.pieces) > MOST_WAITING:
            self.crop(0)
            self.record_past = False
        return out

    def _stepped(self, store: Store, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        """The same for one store's rows."""
        store.append(k, v, positions)
        if self.method.protocol == "on_write":
            store.settle()
        out, step = attend(store, q, rule)
        step.keys, step.values = k, v
        store.after_step(step, wait=self.record_past)
        return out

    # -- accounting ----------------------------------------------------------------------------------------------

    def rows(self) -> LayerRows | None:
        """Rows that each sequence and KV head holds, and held when the prompt ended, over all pieces; None before."""
        if not self.pieces:
            return None
        heads = self.geometry.n_kv_heads
        held, prompt = [0] * (self.batch_size * heads), [0] * (self.batch_size * heads)
        for piece in self.pieces:
            for b in piece.sequences.tolist():
                for h in range(piece.heads.start, piece.heads.stop):
                    held[b * heads + h] += piece.store.live_rows()
                    prompt[b * heads + h] += piece.store.keys.prompt_rows or 0
        return LayerRows(held, prompt)

    def held(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, live bytes, bytes of the storage) of every tensor; per-model buffers once."""
        tensors = [*self.twins.held(), *(self.incoming.held() if self.incoming else ())]
        tensors += [(name, x) for p in self.pieces for name, x in p.store.fixed_buffers()]
        for name, tensor in tensors:
            yield name, tuple(tensor.shape), tensor.nbytes, tensor.untyped_storage().nbytes()
        for piece in self.pieces:
            yield from ((name, x.shape, x.nbytes, x.allocated) for name, x in piece.store.pages() if x.rows)
