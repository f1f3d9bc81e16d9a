"""The auxiliary score: a small network for each KV head that guesses a row's cumulative weight from its key."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.scores import HIDDEN
from runtime.parts import Setting

STEPS = 400
LEARNING_RATE = 0.02
FLOOR = 1e-6
"""Least cumulative weight whose logarithm is learned."""


def estimator(setting: Setting) -> Tensor:
    """The stored network, fp16 [1, H, HIDDEN, d + 2]: a row holds a hidden unit's weights, its bias, its output weight.

    Calibration holds it as `estimator` (see train_estimator). KvsimError where it is missing or of another shape.
    """
    found = setting.calibration.get("estimator")
    shape = (1, setting.place.heads, HIDDEN, setting.place.width + 2)
    if found is None:
        raise KvsimError("score=auxiliary needs a trained estimator: calibrate one for this model and give it")
    if tuple(found.shape) != shape:
        raise KvsimError(f"score=auxiliary: the estimator is {tuple(found.shape)}, this layer needs {shape}")
    return found.to(device=setting.device, dtype=torch.float16)


def estimated(keys: Tensor, setting: Setting) -> Tensor:
    """Scores float32 [B, H, n] of keys [B, H, n, d]."""
    return apply(estimator(setting).to(keys.device), keys)


def apply(stored: Tensor, keys: Tensor) -> Tensor:
    """sum_u out_u * relu(w_u . k + b_u): a constant is left out, it changes no order."""
    net, width = stored.float(), keys.shape[-1]
    hidden = keys.float() @ net[..., :width].transpose(2, 3) + net[:, :, None, :, width]
    return (torch.relu(hidden) * net[:, :, None, :, width + 1]).sum(-1)


def train_estimator(keys: Tensor, mass: Tensor, seed: int = 0) -> Tensor:
    """Fit the network of each head on keys [B, H, T, d] and their cumulative weights [B, H, T].

    Least squares on the logarithm, centred for each head, by Adam over all rows at once; the scaling of the inputs is
    folded into the first layer. Returns fp16 [1, H, HIDDEN, d + 2].
    """
    heads, width = keys.shape[1], keys.shape[3]
    x = keys.float().transpose(0, 1).reshape(heads, -1, width)
    y = mass.float().clamp_min(FLOOR).log().transpose(0, 1).reshape(heads, -1)
    y = y - y.mean(1, keepdim=True)
    centre, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True).clamp_min(FLOOR)
    x = (x - centre) / spread
    generator = torch.Generator().manual_seed(seed)
    first = (torch.randn((heads, HIDDEN, width), generator=generator) / width**0.5).to(x.device).requires_grad_()
    bias = torch.zeros((heads, HIDDEN), device=x.device, requires_grad=True)
    out = (torch.randn((heads, HIDDEN), generator=generator) / HIDDEN**0.5).to(x.device).requires_grad_()
    offset = torch.zeros((heads, 1), device=x.device, requires_grad=True)
    optimizer = torch.optim.Adam([first, bias, out, offset], lr=LEARNING_RATE)
    with torch.enable_grad():
        for _ in range(STEPS):
            hidden = torch.relu(x @ first.transpose(1, 2) + bias[:, None])
            loss = ((hidden * out[:, None]).sum(-1) + offset - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    scaled = first.detach() / spread
    shifted = bias.detach() - (scaled * centre).sum(-1)
    found = torch.cat([scaled, shifted[..., None], out.detach()[..., None]], dim=-1)[None]
    return found.to(torch.float16)
