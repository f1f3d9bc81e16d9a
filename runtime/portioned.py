"""PortionedCache: a compressed cache in which each class or segment of a prompt's tokens has a method of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.content import counted
from kvsim.errors import KvsimError
from kvsim.method import Method, parse_method
from kvsim.portions import LATER, Portions, parse_portions
from runtime.attention import Rule, attend_rows, observe
from runtime.budgets import Ranked, best, secured
from runtime.cache import CompressedCache
from runtime.layers import CompressedLayer
from runtime.parts import Prompt, Step
from runtime.prompt import Piece
from runtime.quality_reference import Reference
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.store import Store

Labels = Sequence[Sequence[str]]


class PortionedLayer(CompressedLayer):
    """One store for each sequence and portion, and one for its later tokens; attention reads all of them together.

    Rows are ranked inside a portion by scores that the whole prompt gave them: a portion has its own budget, not its
    own attention.
    """

    def __init__(self, portions: Portions, labels: Labels, geometry: Geometry, around: Surroundings) -> None:
        if geometry.window:
            raise KvsimError(f"portions: layer {geometry.layer} sees a window, whose rows leave by position alone")
        self.portions, self.labels = portions, labels
        self.queries: list[Tensor] = []
        self.kinds: dict[Method, LayerTwins] = {}
        super().__init__(parse_method("full"), geometry, around, len(labels[0]))

    is_croppable = False

    def twins_of(self, method: Method) -> LayerTwins:
        """Twins of a portion's method in this layer, made once."""
        own = method.at(self.geometry.layer, self.geometry.n_layers)
        if own not in self.kinds:
            self.kinds[own] = LayerTwins(own, self.geometry, self.around)
        return self.kinds[own]

    def reset(self) -> None:
        """Forget everything but what belongs to the model."""
        super().reset()
        self.queries = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn batch, device and dtype from the first rows."""
        before = self.around
        super().lazy_initialization(key_states, value_states)
        if self.around != before:
            self.kinds = {}
        if self.batch_size != len(self.labels):
            raise KvsimError(f"portions: labels of {len(self.labels)} sequences, the prompt has {self.batch_size}")

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        if padding is not None and not bool(padding.all()):
            raise KvsimError("portions: left padding has no labels; give prompts of one length, or one at a time")
        self.queries = [torch.cat([*self.queries, q], dim=2)]
        return super()._prompt(q, k, v, positions, padding, rule)

    def _take_if_complete(self) -> None:
        assert self.incoming is not None
        if self.seen > len(self.labels[0]):
            raise KvsimError(f"portions: the prompt has {self.seen} tokens and {len(self.labels[0])} labels")
        if self.seen == len(self.labels[0]):
            prompt = Prompt(self.incoming.keys[0], self.incoming.values[0], self.incoming.rule.scaling,
                            rotation=self.around.rotation, positions=self.incoming.positions[0], scores=self.scores)
            self.take(prompt, self.queries[0], self.incoming.rule)
            self.incoming, self.queries = None, []

    def take(self, prompt: Prompt, queries: Tensor, rule: Rule) -> None:
        """Write the prompt's rows into their portions' stores; queries [B, Hq, T, d] rank them."""
        self.pieces, self.seen = [], prompt.keys.shape[2]
        policies = [self.twins_of(self.portions.at(n)).policy for names in self.labels for n in counted(names)]
        ranked = [p for p in policies if p is not None]
        prompt.queries = queries if any(p.prompt_queries for p in ranked) else None
        if any(p.prompt_weights for p in ranked):
            observe(prompt, queries, rule)
        for b, names in enumerate(self.labels):
            whole = _sequence(prompt, b)
            for name in counted(names):
                rows = torch.tensor([i for i, n in enumerate(names) if n == name], device=prompt.keys.device)
                self._portion(whole, b, name, rows)
            later = Store(self.twins_of(self.portions.at(LATER)))
            later.settle()
            self.pieces.append(Piece(torch.tensor([b]), slice(0, self.geometry.n_kv_heads), later))

    def _portion(self, whole: Prompt, b: int, name: str, rows: Tensor) -> None:
        twins = self.twins_of(self.portions.at(name))
        assert whole.positions is not None
        own = Prompt(whole.keys[:, :, rows], whole.values[:, :, rows], whole.scaling, rotation=whole.rotation)
        store = Store(twins)
        store.take_rows(own, whole.positions[:, rows], chosen(twins, whole, rows))
        self.pieces.append(Piece(torch.tensor([b]), slice(0, self.geometry.n_kv_heads), store))

    def _step(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        """Token by token: append to the later tokens' store, attend over all of the sequence's stores, encode."""
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        for b in range(self.batch_size):
            *fixed, later = [p.store for p in self.pieces if int(p.sequences[0]) == b]
            old = [store.read() for store in fixed if store.keys.rows]
            for i in range(q.shape[2]):
                at = (slice(b, b + 1), slice(None), slice(i, i + 1))
                later.append(k[at], v[at], positions[b : b + 1, i : i + 1])
                keys, values = (torch.cat([x.to(q.dtype) for x in side], dim=2)
                                for side in zip(*old, later.read(), strict=True))
                out[at] = attend_rows(q[at], keys, values, rule, 0)
                later.after_step(Step(seen=later.seen, rows=later.keys.rows))
        return out

    def batch_select_indices(self, indices: Tensor) -> None:
        """Portions belong to their requests."""
        raise KvsimError("portions: sequences cannot be reordered or repeated (beams); use greedy or sampled decoding")

    def activate_past_recording(self) -> None:
        """Drafts are settled as they come."""
        raise KvsimError("portions: assisted generation needs a cache that can be cropped")

    def held(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, live bytes, bytes of the storage) of every tensor; per-model buffers once a method."""
        yield from super().held()
        used = {id(p.store.twins) for p in self.pieces}
        for twins in self.kinds.values():
            if id(twins) in used:
                for name, tensor in twins.held():
                    yield name, tuple(tensor.shape), tensor.nbytes, tensor.untyped_storage().nbytes()


def chosen(twins: LayerTwins, whole: Prompt, rows: Tensor) -> Tensor | None:
    """Which of a portion's rows stay, as places among them, ascending [1, H, m]; None for all.

    As many as the policy keeps of a prompt of so many tokens, ranked by the scores of the whole prompt.
    """
    policy, heads = twins.policy, whole.keys.shape[1]
    if policy is None:
        return None
    if not isinstance(policy, Ranked):
        raise KvsimError(f"portions: {policy.part.name} does not rank rows")
    count = policy.kept(len(rows))
    if count >= len(rows):
        return None
    newest, oldest = policy.part.protected(count)  # type: ignore[attr-defined]
    ranking = policy.prompt_ranking(whole)[:, :, rows]
    return best(secured(ranking, newest, oldest), count).expand(1, heads, count)


def _sequence(prompt: Prompt, b: int) -> Prompt:
    """One sequence of a prompt."""
    at = slice(b, b + 1)

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[at]

    return Prompt(prompt.keys[at], prompt.values[at], prompt.scaling, own(prompt.queries), own(prompt.mass),
                  prompt.seen_by, own(prompt.last), own(prompt.hits), own(prompt.scores), prompt.rotation,
                  own(prompt.positions))


class PortionedCache(CompressedCache):
    """A cache whose prompt's tokens are told apart by labels, each label held as its portion says.

    Args:
        portions: methods by label (`kvsim.portions`). labels: for each sequence the label of every prompt token.

    `nbytes()` equals `Portions.cache_bytes` for the same labels and tokens. As CompressedCache otherwise; no beams, no
    assisted generation, no left padding. Raises KvsimError for labels that do not match the portions or the prompt.
    """

    def __init__(self, portions: str | Portions, hf_model: nn.Module, labels: Labels, *, calibration: Any = None,
                 seed: int = 0) -> None:
        self.portions = parse_portions(portions)
        if not labels or not labels[0] or any(len(x) != len(labels[0]) for x in labels):
            raise KvsimError("portions: give a label for every token of every prompt; prompts have one length")
        self.portions.check_labels([n for names in labels for n in names])
        super().__init__("full", hf_model, calibration=calibration, seed=seed)
        self.layers = [PortionedLayer(self.portions, labels, x.geometry, x.around) for x in self.layers]

    def take(self, found: Reference) -> None:
        """Fill with a prompt that a full-precision forward left behind, as the cache's own prefill would have."""
        with torch.no_grad():
            for layer, seen in zip(self.layers, found.prompt, strict=True):
                layer.lazy_initialization(seen.k, seen.v)
                prompt = Prompt(seen.k, seen.v, seen.rule.scaling, rotation=layer.around.rotation,
                                positions=found.prompt_positions, scores=layer.scores)
                layer.take(prompt, seen.q, seen.rule)
