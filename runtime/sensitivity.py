"""What an error in cached rows costs: weights for squared errors of keys and values, by four measures of importance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError, shown
from runtime.gradients import Taps, next_token_loss, tapped

KINDS = {
    "variance": "every value counts alike: the squared error itself",
    "attention": "a row counts as the attention weight that it receives",
    "gradient": "a value counts as the squared gradient of the text's loss (diagonal Fisher information)",
    "hessian": "a channel counts as the second derivative of the loss (Hutchinson's estimate of the diagonal)",
}
STEP = 1e-2
"""Size of the differences by which gradients are differentiated, in the unit of the rows (of size 1 to 20)."""

Weights = list[tuple[Tensor, Tensor]]
"""For each layer the weights of squared errors of keys and values, broadcasting with [B, H, T, d]."""


def weights(model: Any, tokens: Tensor, kind: str, probes: int = 4, seed: int = 0) -> Weights:
    """Weights of squared errors in the rows of a text [B, T] of which the model reads every token.

    Sum(weight * error^2) / 2 approximates what the errors add to the mean loss for `hessian`; for the others it is a
    ranking in their own unit. Raises KvsimError for a kind that is none of KINDS.
    """
    if kind not in KINDS:
        raise KvsimError(f"sensitivity {shown(kind)} is not one of {', '.join(KINDS)}")
    if kind == "hessian":
        return [(k.clamp_min(0), v.clamp_min(0)) for k, v in curvature(model, tokens, probes, seed)]
    taps, gradients = _passed(model, tokens)
    layers = sorted(taps.keys)
    if kind == "gradient":
        return [(k.square(), v.square()) for k, v in gradients]
    if kind == "variance":
        return [(torch.ones(()), torch.ones(())) for _ in layers]
    found = []
    for n in layers:
        use = taps.weights[n].detach().float().sum(2)  # [B, Hq, T]
        use = use.unflatten(1, (taps.keys[n].shape[1], -1)).mean(2)[..., None]
        found.append((use, use))
    return found


def _passed(
    model: Any, tokens: Tensor, offsets: dict[int, tuple[Tensor, Tensor]] | None = None
) -> tuple[Taps, Weights]:
    """A forward and a backward pass: the taps, and the loss's gradients for keys and values of each layer."""
    model.eval()
    with tapped(model) as taps, torch.enable_grad():
        taps.offsets = offsets or {}
        loss = next_token_loss(model, tokens)
        layers = sorted(taps.keys)
        flat = torch.autograd.grad(loss, [x for n in layers for x in (taps.keys[n], taps.values[n])])
    return taps, list(zip(flat[::2], flat[1::2], strict=True))


def curvature(model: Any, tokens: Tensor, probes: int = 4, seed: int = 0) -> Weights:
    """The Hessian's diagonal, mean over rows: of probe * (H probe), by central differences of gradients; [1, H, 1, d].

    All layers are probed at once: what other layers add has mean 0 (Hutchinson 1989; Bekas et al. 2007).
    """
    generator = torch.Generator().manual_seed(seed)
    taps, _ = _passed(model, tokens)
    shapes = {n: (taps.keys[n].shape, taps.values[n].shape) for n in taps.keys}
    total: dict[int, list[Tensor]] = {n: [torch.zeros(()), torch.zeros(())] for n in shapes}
    for _ in range(probes):
        signs = {
            n: tuple(torch.randint(0, 2, s, generator=generator) * 2.0 - 1.0 for s in pair)
            for n, pair in shapes.items()
        }
        ends = []
        for direction in (STEP, -STEP):
            moved = {n: (k * direction, v * direction) for n, (k, v) in signs.items()}
            ends.append(_passed(model, tokens, moved)[1])
        for n, up, down in zip(sorted(shapes), *ends, strict=True):
            for side in (0, 1):
                curve = signs[n][side] * (up[side] - down[side]) / (2 * STEP)
                total[n][side] = total[n][side] + curve.mean((0, 2), keepdim=True) / probes
    return [(k, v) for k, v in (total[n] for n in sorted(total))]


def loss(weight: Tensor, x: Tensor, y: Tensor) -> float:
    """Weighted squared error of rows x kept as y, both [B, H, T, d]."""
    return float(((x.double() - y.double()).square() * weight.double()).sum())


def losses(weight: Tensor, x: Tensor, y: Tensor, group: int) -> Tensor:
    """The same by head and group of `group` channels, [H, groups]; of y's rows, the newest, where it holds fewer."""
    if y.shape[2] < x.shape[2]:
        x, weight = (t[:, :, -y.shape[2] :] if t.dim() == 4 and t.shape[2] > 1 else t for t in (x, weight))
    each = ((x.double() - y.double()).square() * weight.double()).sum((0, 2))
    return torch.stack([part.sum(-1) for part in each.split(group, -1)], dim=-1)


def by_layer(found: Weights) -> list[tuple[float, float]]:
    """Mean weight of keys and of values for each layer: which layers are sensitive."""
    return [(float(k.float().mean()), float(v.float().mean())) for k, v in found]


def names() -> Sequence[str]:
    """The measures, in the order of reports."""
    return tuple(KINDS)
