"""Ranks from a trained network, as the survey's AdaptiveRankCache meant them: relaxed, trained, then rounded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvsim.ranks import rounded_ranks
from runtime.latent import right_vectors
from runtime.quality_reference import Reference

HIDDEN, STEPS, RATE = 32, 300, 0.03
SINKS = 4
"""First rows, which are kept apart and do not count."""
COOLING = (4.0, 0.5)
"""Width of a gate in ranks, at the first and the last step."""


class RankNetwork(nn.Module):
    """A real rank for each head: width * sigmoid(base + adapter(spectrum) + shift), the shift such that they add up.

    The survey's module has the same two parts, but clamps and truncates their sum, which passes no gradient, reads one
    number a head, and has no budget. Groups [G] are (layer, side, head); spectra [G, d] are falling energies.
    """

    def __init__(self, groups: int, width: int, seed: int = 0) -> None:
        super().__init__()
        self.width = width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.adapter = nn.Sequential(nn.Linear(width + 1, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))
        self.base = nn.Parameter(torch.zeros(groups))

    def forward(self, energies: Tensor, total: int) -> Tensor:
        """Real ranks [G] that add up to `total`."""
        size = energies.sum(1, keepdim=True)
        shape = (energies / size.clamp_min(1e-30)).clamp_min(1e-8).log()
        loud = (size / size.mean()).clamp_min(1e-8).log()
        z = self.base + self.adapter(torch.cat([shape, loud], dim=1))[:, 0]
        return self.width * torch.sigmoid(z + budget_shift(z, total / self.width))


def budget_shift(z: Tensor, total: float) -> Tensor:
    """The number s with sum(sigmoid(z + s)) = total; differentiable in z (implicit function)."""
    with torch.no_grad():
        low, high = -z.max() - 30, -z.min() + 30
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if float(torch.sigmoid(z + middle).sum()) < total else (low, middle)
        s = (low + high) / 2
        slope = torch.sigmoid(z + s) * (1 - torch.sigmoid(z + s))
    return s - (torch.sigmoid(z + s).sum() - total) / slope.sum().clamp_min(1e-12)


def relaxed_loss(energies: Tensor, ranks: Tensor, softness: float) -> Tensor:
    """Share of the energy [G, d] behind soft gates: direction i is open by sigmoid((rank - i - 1/2) / softness)."""
    at = torch.arange(energies.shape[1]) + 0.5
    gates = torch.sigmoid((ranks[:, None] - at) / softness)
    return (energies * (1 - gates)).sum() / energies.sum()


def train(spectra: Tensor, total: int, seed: int = 0, steps: int = STEPS) -> tuple[RankNetwork, list[float]]:
    """Train on spectra [texts, G, d] for a budget of `total` directions; the network and its losses.

    The gates cool while it trains, so that what is minimised ends near what rounding will give. Deterministic.
    """
    network = RankNetwork(spectra.shape[1], spectra.shape[2], seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    found = []
    with torch.enable_grad():
        for step in range(steps):
            softness = COOLING[0] * (COOLING[1] / COOLING[0]) ** (step / max(1, steps - 1))
            losses = [relaxed_loss(e, network(e, total), softness) for e in spectra]
            loss = torch.stack(losses).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return network, found


@dataclass(frozen=True)
class Learned:
    """What a network says of a text: whole ranks [G]."""

    network: RankNetwork

    def ranks(self, energies: Tensor, total: int) -> NDArray[np.int64]:
        """Real ranks, rounded."""
        with torch.no_grad():
            real = self.network(energies, total).double().numpy()
        return rounded_ranks(real, total, energies.shape[1])


def spectra_of(found: Reference, weights: Tensor) -> Tensor:
    """Weighted energies about the mean [segments, layers * 2 * heads, d] of prompts, falling in each head.

    Of a prompt with fewer rows than channels the directions that it does not span have none.
    """
    sides = []
    for seen, own in zip(found.prompt, weights, strict=True):
        for x, weight in ((seen.k, own[0]), (seen.v, own[1])):
            rows = x.float()[:, :, SINKS:]
            values = right_vectors(rows - rows.mean(2, keepdim=True), x.shape[3])[1]
            energies = nn.functional.pad(values.square(), (0, x.shape[3] - values.shape[-1]))
            sides.append(energies * weight[None, :, None])
    return torch.cat(sides, dim=1)
