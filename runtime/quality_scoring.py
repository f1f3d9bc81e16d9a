"""One method on one reference: divergence, agreement, perplexity and attention error of every segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.method import Method
from runtime.cache import CompressedCache
from runtime.quality_forced import Forced, take_prompt
from runtime.quality_reference import Reference, handed, watch


@dataclass(frozen=True)
class Scores:
    """Figures of each segment, [B] each; attention_error [B, layers].

    kl: mean over tokens of KL(full || method) in nats. top1: share of tokens whose likeliest successor is the same.
    nll, full_nll: mean negative log likelihood of the text. attention_error: ||o' - o|| / ||o|| of a layer's attention
    outputs, errors of the layers below included.
    """

    kl: Tensor
    top1: Tensor
    nll: Tensor
    full_nll: Tensor
    attention_error: Tensor


def score(
    model: nn.Module,
    found: Reference,
    method: Method,
    *,
    calibration: Any = None,
    seed: int = 0,
    outside: list[Tensor] | None = None,
    stepwise: bool = False,
) -> Scores:
    """Run a method over the reference's segments, teacher-forced.

    after_prefill takes the reference's own prompt rows; on_write runs the prompt again through the stored rows.
    outside: scores of the prompt's rows from gradients, [B, H, T] a layer, for policies that ask for them.
    stepwise: one step a token in every layer, which is what is done at once otherwise; for tests.
    """
    with CompressedCache(method, model, calibration=calibration, seed=seed) as cache, torch.no_grad():
        if outside is not None:
            cache.set_scores(outside)
        if method.protocol == "on_write" and not method.is_full:
            model(found.tokens[:, : found.prompt_tokens], **handed(model, cache), logits_to_keep=1)
        else:
            take_prompt(cache, found)
        watchers = watch(cache, Forced, stepwise=stepwise)
        logits = model(found.scored, **handed(model, cache)).logits
    errors = [
        (w.outputs - o).flatten(1).norm(dim=1) / o.flatten(1).norm(dim=1)
        for w, o in zip(watchers, found.outputs, strict=True)
    ]
    return Scores(*compared(found.logits, logits, found.targets), torch.stack(errors, dim=1))


def compared(full: Tensor, other: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(KL, top-1 agreement, nll, nll of full) of each sequence [B], from logits [B, m, vocabulary]."""
    kl, top1, nll, full_nll = [], [], [], []
    for p, q, t in zip(full, other, targets, strict=True):  # one sequence at a time: logits are large
        log_p, log_q = torch.log_softmax(p.float(), -1), torch.log_softmax(q.float(), -1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp_min(0))
        top1.append((p.argmax(-1) == q.argmax(-1)).float().mean())
        nll.append(-log_q.gather(1, t[:, None]).mean())
        full_nll.append(-log_p.gather(1, t[:, None]).mean())
    return torch.stack(kl), torch.stack(top1), torch.stack(nll), torch.stack(full_nll)
