"""The uncompressed model on a text, run once: its prompt's rows, its logits and attention outputs, for all methods."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.attention import Rule, observe
from runtime.cache import CompressedCache
from runtime.layers import CompressedLayer
from runtime.parts import Prompt


@dataclass
class LayerPrompt:
    """One layer's rows of the prompt as its cache gets them: queries [B, Hq, T, d], keys and values [B, H, T, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    observed: Prompt | None = None

    def weighed(self, prompt: Prompt) -> None:
        """Fill in what policies ask about attention weights; computed once, whatever the method."""
        if self.observed is None:
            self.observed = Prompt(self.k, self.v, self.rule.scaling)
            observe(self.observed, self.q, self.rule)
        seen = self.observed
        prompt.mass, prompt.hits, prompt.last, prompt.seen_by = seen.mass, seen.hits, seen.last, seen.seen_by

    def of(self, rows: slice) -> LayerPrompt:
        """Some of the sequences."""
        return LayerPrompt(self.q[rows], self.k[rows], self.v[rows], self.rule)


@dataclass
class Reference:
    """What the uncompressed model made of B segments of T + m tokens.

    tokens: [B, T + m + 1]. logits: [B, m, vocabulary], at tokens T to T + m - 1. outputs: attention outputs of the
    scored tokens, one [B, Hq, m, dv] a layer. prompt: one a layer.
    """

    tokens: Tensor
    prompt_tokens: int
    logits: Tensor
    outputs: list[Tensor]
    prompt: list[LayerPrompt]

    @property
    def scored(self) -> Tensor:
        """Tokens that are fed after the prompt, [B, m]."""
        return self.tokens[:, self.prompt_tokens : -1]

    @property
    def targets(self) -> Tensor:
        """The tokens that the logits should name, [B, m]."""
        return self.tokens[:, self.prompt_tokens + 1 :]

    @property
    def scored_positions(self) -> Tensor:
        """Positions of the scored tokens, [B, m]."""
        return torch.arange(self.prompt_tokens, self.tokens.shape[1] - 1).expand(self.tokens.shape[0], -1)

    @property
    def prompt_positions(self) -> Tensor:
        """Positions of the prompt, [B, T]."""
        return torch.arange(self.prompt_tokens).expand(self.tokens.shape[0], -1)

    def of(self, rows: slice) -> Reference:
        """Some of the segments."""
        return Reference(
            self.tokens[rows],
            self.prompt_tokens,
            self.logits[rows],
            [x[rows] for x in self.outputs],
            [p.of(rows) for p in self.prompt],
        )


class Watched:
    """Stands in for a layer's `attend` and notes what passes."""

    def __init__(self, layer: CompressedLayer) -> None:
        self.layer = layer
        self.prompt: LayerPrompt | None = None
        self.output: Tensor | None = None

    def attend(self, query: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """The layer's own attention."""
        assert self.layer.pending is not None
        k, v, _ = self.layer.pending
        out = CompressedLayer.attend(self.layer, query, padding, rule)
        if self.prompt is None:
            self.prompt = LayerPrompt(query.clone(), k.clone(), v.clone(), rule)
        else:
            self.output = out
        return out


def watch(cache: CompressedCache, kind: Any, **settings: Any) -> list[Any]:
    """Put an instance of `kind` in place of every layer's `attend`."""
    found = []
    for layer in cache.layers:
        watcher = kind(layer, **settings)
        layer.attend = watcher.attend
        found.append(watcher)
    return found


def handed(model: nn.Module, cache: CompressedCache) -> dict[str, Any]:
    """The cache under the name that this transformers' models know it by."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def reference(model: nn.Module, tokens: Tensor, prompt_tokens: int) -> Reference:
    """Run segments [B, T + m + 1] through the uncompressed model: T tokens of prompt, then m that are scored."""
    with CompressedCache("full", model) as cache, torch.no_grad():
        watchers = watch(cache, Watched)
        model(tokens[:, :prompt_tokens], **handed(model, cache), logits_to_keep=1)
        logits = model(tokens[:, prompt_tokens:-1], **handed(model, cache)).logits
    return Reference(tokens, prompt_tokens, logits, [w.output for w in watchers], [w.prompt for w in watchers])
