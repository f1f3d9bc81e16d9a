"""What attention layers show on calibration texts: sampled queries, keys and values, their use and gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from kvsim.errors import KvsimError

NAME = "kvsim_recording"


@dataclass
class Sample:
    """Rows of one layer, rotated as the cache gets them; N rows drawn evenly from all texts, in rising order.

    queries: [Hq, N, dk]. keys: [H, N, dk]. values: [H, N, dv]. positions: [N]. use: [H, N], the weight that a row gets
    from a query that can see it, mean over those and over the query heads of its KV head. key_slopes, value_slopes:
    gradients of the text's loss, or empty.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    use: Tensor
    key_slopes: Tensor
    value_slopes: Tensor


@dataclass
class Recorder:
    """Collects while a model runs one text after another."""

    rows: int
    slopes: bool
    generator: torch.Generator
    passing: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    found: dict[int, list[Sample]] = field(default_factory=dict)

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> None:
        """Note a layer's rows [1, H, T, d] and its attention weights [1, Hq, T, T]."""
        heads, tokens = k.shape[1], k.shape[2]
        seen_by = torch.arange(tokens, 0, -1, device=k.device)
        use = weights.detach()[0].float().sum(1).unflatten(0, (heads, -1)).mean(1) / seen_by
        self.passing[layer] = (q, k, v, use)

    def digest(self, loss: Tensor | None) -> None:
        """Keep a sample of the rows of the text that has passed."""
        layers = sorted(self.passing)
        sides = [self.passing[i][side] for i in layers for side in (1, 2)]
        slopes = torch.autograd.grad(loss, sides) if loss is not None else [t[:, :, :0] for t in sides]
        for index, layer in enumerate(layers):
            q, k, v, use = (t.detach() for t in self.passing[layer])
            tokens = k.shape[2]
            at = torch.randperm(tokens, generator=self.generator)[: self.rows].sort().values
            queries, keys, values = (t[0][:, at].float().cpu() for t in (q, k, v))
            kept = at if loss is not None else at[:0]
            k_slopes, v_slopes = (s[0][:, kept].float().cpu() for s in slopes[2 * index : 2 * index + 2])
            sample = Sample(queries, keys, values, at, use[:, at].cpu(), k_slopes, v_slopes)
            self.found.setdefault(layer, []).append(sample)
        self.passing = {}


CURRENT: ContextVar[Recorder] = ContextVar("kvsim_recorder")


def record(
    model: PreTrainedModel, texts: Iterable[Tensor], rows: int, slopes: bool = False, seed: int = 0
) -> dict[int, Sample]:
    """Run token ids [T] through a Hugging Face causal language model; a sample of each attention layer's rows.

    At most `rows` rows a text. slopes: also the loss's gradients for keys and values, which costs a backward pass.
    Attention runs eagerly, and the model is left as it was. Raises KvsimError where a model cannot be recorded.
    """
    recorder = Recorder(rows, slopes, torch.Generator().manual_seed(seed))
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(NAME)
    model.eval()
    # a gradient must reach keys whose layer comes after frozen weights too
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: out.detach().requires_grad_() if slopes else None
    )
    token = CURRENT.set(recorder)
    try:
        for ids in texts:
            with torch.set_grad_enabled(slopes):
                batch = ids.reshape(1, -1).to(model.device)
                out = model(batch, labels=batch, use_cache=False) if slopes else model(batch, use_cache=False)
            recorder.digest(out.loss if slopes else None)
    finally:
        CURRENT.reset(token)
        hook.remove()
        model.set_attn_implementation(before)
        model.train(training)
    if not recorder.found:
        raise KvsimError(f"{type(model).__name__} does not use transformers' attention interface: nothing was recorded")
    return {layer: _joined(samples) for layer, samples in recorder.found.items()}


def _joined(samples: list[Sample]) -> Sample:
    return Sample(*(torch.cat([getattr(s, f.name) for s in samples], dim=0 if f.name == "positions" else 1)
                    for f in fields(Sample)))


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               **settings: Any) -> tuple[Tensor, Tensor]:
    """The architecture's own eager attention, watched."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise KvsimError(f"{type(module).__name__} has no eager attention to watch")
    out, weights = eager(module, query, key, value, attention_mask, **settings)
    CURRENT.get().see(module.layer_idx, query, key, value, weights)
    return out, weights
