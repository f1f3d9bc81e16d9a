"""Scores of cached rows from gradients of a language model's own loss on the prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.errors import KvsimError

KINDS = ("gradient", "loss_attention", "saliency")
TAPPED = "kvsim_tapped"
"""Name under which the tapped eager attention is registered with transformers."""


@dataclass
class Taps:
    """What the attention layers did, by layer: zeros added to keys and values (to differentiate by), and weights."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)
    visible: dict[int, Tensor] = field(default_factory=dict)
    offsets: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Added to keys and values of a layer in place of zeros, [B, H, T, d] each."""

    def wrap(self, eager: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
             mask: Tensor | None, **settings: Any) -> tuple[Tensor, Tensor]:
        """The model's own eager attention on keys and values that can be differentiated by."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        given = self.offsets.get(layer, (torch.zeros_like(key), torch.zeros_like(value)))
        self.keys[layer], self.values[layer] = (x.detach().clone().requires_grad_() for x in given)
        out, weights = eager(module, query, key + self.keys[layer], value + self.values[layer], mask, **settings)
        self.weights[layer], self.visible[layer] = weights, weights.detach() > 0
        return out, weights


@contextmanager
def tapped(model: Any) -> Iterator[Taps]:
    """Within the block, `model` runs eager attention through the taps; what it used before comes back afterwards."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    taps = Taps()

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                  **settings: Any) -> tuple[Tensor, Tensor]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise KvsimError(f"gradient scores: {type(module).__name__} has no eager attention to differentiate")
        return taps.wrap(eager, module, query, key, value, mask, **settings)

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(TAPPED, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TAPPED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation(TAPPED)
    try:
        yield taps
    finally:
        model.set_attn_implementation(before)


def next_token_loss(model: Any, input_ids: Tensor) -> Tensor:
    """Mean cross-entropy of tokens 1 to T - 1 given those before, for each sequence, summed over sequences."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
    return losses.reshape(input_ids.shape[0], -1).mean(1).sum()


def gradient_scores(model: Any, input_ids: Tensor, kind: str) -> list[Tensor]:
    """Scores float32 [B, H, T] of each attention layer, in order, for a prompt [B, T] without padding.

    gradient: ||dL/dK_j|| + ||dL/dV_j||, keys after the rotation. loss_attention: sum over the queries i that see row j
    and over the query heads of a KV head of |dL/dA_ij|. saliency: the same sum of |A_ij (dL/dA_ij - sum_k A_ik
    dL/dA_ik)|, which is |dL/dS_ij| of the logits S. L: next_token_loss. Raises KvsimError for another kind.
    """
    if kind not in KINDS:
        raise KvsimError(f"gradient scores are {' or '.join((', '.join(KINDS[:-1]), KINDS[-1]))}, got {kind}")
    if input_ids.shape[1] < 2:
        raise KvsimError("gradient scores need a prompt of two tokens or more: the loss is that of the next token")
    training = model.training
    model.eval()
    try:
        with tapped(model) as taps, torch.enable_grad():
            loss = next_token_loss(model, input_ids)
    finally:
        model.train(training)
    layers = sorted(taps.keys)
    if kind == "gradient":
        found = torch.autograd.grad(loss, [x for n in layers for x in (taps.keys[n], taps.values[n])])
        lengths = [x.float().norm(dim=-1) for x in found]
        return [k + v for k, v in zip(lengths[::2], lengths[1::2], strict=True)]
    found = torch.autograd.grad(loss, [taps.weights[n] for n in layers])
    if kind == "saliency":
        weights = [taps.weights[n].detach() for n in layers]
        found = tuple(w * (g - (w * g).sum(3, keepdim=True)) for w, g in zip(weights, found, strict=True))
    return [_received(grad, taps.visible[n], taps.keys[n].shape[1]) for n, grad in zip(layers, found, strict=True)]


def _received(grad: Tensor, visible: Tensor, heads: int) -> Tensor:
    """|dL/dA| [B, Hq, T, T] summed over the queries that see a row and the query heads of its KV head."""
    seen = (grad.float().abs() * visible).sum(2)
    return seen.reshape(seen.shape[0], heads, -1, seen.shape[2]).sum(2)
