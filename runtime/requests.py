"""Requests to adapt to: real text of several lengths and retrieval tasks, each run uncompressed, with its signals."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsim.content import classify
from kvsim.method import Method
from kvsim.portions import Portions
from runtime.cache import CompressedCache
from runtime.parts import Prompt
from runtime.portioned import PortionedCache
from runtime.quality_forced import Forced, take_prompt
from runtime.quality_reference import Reference, handed, reference, watch
from runtime.quality_scoring import compared
from runtime.quality_subjects import Subject, Text
from runtime.scores import window_weights
from runtime.sensitivity import weights
from runtime.tasks import DEPTHS, TASKS, right, sentences

WINDOW = 32
"""Last queries whose attention says how spread it is."""


@dataclass
class Request:
    """One request: what the uncompressed model did with it, its tokens' texts, and what is right (retrieval)."""

    kind: str
    found: Reference
    tokens: list[str]
    answer: int = 0
    depth: float = 0.0
    entropy: float = field(init=False)
    use: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.entropy, self.use = attention_signals(self.found)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.found.prompt_tokens

    @property
    def new(self) -> int:
        """Tokens after it that are fed."""
        return int(self.found.scored.shape[1])


@dataclass(frozen=True)
class Outcome:
    """What a method did to a request: KL (nats a token), nll above the full model's, right or wrong, bytes held."""

    kl: float
    nll: float
    right: bool | None
    held: int


def attention_signals(found: Reference) -> tuple[float, Tensor]:
    """(mean entropy of the last queries' weights over log n, mean weight of each row [T]) over all layers and heads."""
    total, use = 0.0, torch.zeros(found.prompt_tokens)
    for seen in found.prompt:
        w = window_weights(Prompt(seen.k, seen.v, seen.rule.scaling, queries=seen.q), WINDOW, "window")
        visible = torch.arange(found.prompt_tokens - w.shape[2] + 1, found.prompt_tokens + 1).clamp_min(2)
        entropy = -torch.xlogy(w, w).sum(-1) / visible.log()
        total += float(entropy.mean())
        use += w.mean((0, 1, 2))
    return min(1.0, total / len(found.prompt)), use / len(found.prompt)


def texts(subject: Subject, text: Text, lengths: Sequence[int], each: int, scored: int) -> list[Request]:
    """`each` pieces of every length; other places of the text for each."""
    found = []
    pieces = text.segments(each * len(lengths), max(lengths) + scored + 1)
    for i, length in enumerate(sorted(lengths) * each):
        ids = pieces[i][-(length + scored + 1) :]
        found.append(Request("text", reference(subject.model, ids[None], length), spelled(subject, ids[:length])))
    return found


def retrievals(subject: Subject, text: Text, tokens: int, each: int, seed: int) -> list[Request]:
    """`each` cases of every task and depth that the uncompressed model solves; the question comes after the prompt."""
    filler, draw = sentences(text, subject.tokenizer, tokens), random.Random(seed)
    found = []
    for name, make in TASKS.items():
        for depth in DEPTHS:
            for _ in range(each):
                item = make(draw, filler, depth)
                ids = [subject.tokenizer(t, add_special_tokens=False)["input_ids"]
                       for t in (item.context, item.question, item.answer)]
                known = reference(subject.model, torch.tensor([[*ids[0], *ids[1], *ids[2]]]), len(ids[0]))
                if right(known.logits, known.targets, len(ids[2])):
                    found.append(Request(name, known, spelled(subject, torch.tensor(ids[0])), len(ids[2]), depth))
    return found


def spelled(subject: Subject, ids: Tensor) -> list[str]:
    """The text of each token."""
    return [subject.tokenizer.decode([i]) for i in ids.tolist()]


@contextmanager
def filled(subject: Subject, request: Request, method: Method | Portions,
           labels: list[str] | None = None) -> Iterator[CompressedCache]:
    """A cache that holds the request's prompt, compressed; labels: of the prompt's tokens, for portions."""
    if isinstance(method, Portions):
        assert labels is not None
        with PortionedCache(method, subject.model, [labels]) as portioned:
            portioned.take(request.found)
            yield portioned
    else:
        with CompressedCache(method, subject.model) as cache:
            take_prompt(cache, request.found)
            yield cache


def outcome(subject: Subject, request: Request, method: Method | Portions, labels: list[str] | None = None) -> Outcome:
    """Run a request with its prompt compressed; labels: of the prompt's tokens, for portions."""
    found, model = request.found, subject.model
    with filled(subject, request, method, labels) as cache, torch.no_grad():
        if not isinstance(method, Portions):
            watch(cache, Forced)
        logits, held = model(found.scored, **handed(model, cache)).logits, cache.nbytes()
    kl, _, nll, full = (float(x[0]) for x in compared(found.logits, logits, found.targets))
    solved = right(logits, found.targets, request.answer) if request.answer else None
    return Outcome(kl, nll - full, solved, held)


def class_weights(subject: Subject, pieces: Sequence[Tensor]) -> dict[str, float]:
    """What a squared error in a token's rows costs by its class: squared gradients of the loss, mean over its tokens.

    The first four tokens are left out: they are sinks, whatever their class.
    """
    total: dict[str, list[float]] = {}
    for ids in pieces:
        by_token = torch.zeros(len(ids))
        for k, v in weights(subject.model, ids[None], "gradient"):
            by_token += (k.sum((0, 1, 3)) + v.sum((0, 1, 3))) / len(ids)
        for label, w in list(zip(classify(spelled(subject, ids)), by_token.tolist(), strict=True))[4:]:
            total.setdefault(label, []).append(w)
    return {label: sum(found) / len(found) for label, found in total.items()}


def told(row: Outcome) -> dict[str, Any]:
    """The figures that a result keeps."""
    return {"kl": round(row.kl, 6), "nll": round(row.nll, 6), "right": row.right, "bytes": row.held}
