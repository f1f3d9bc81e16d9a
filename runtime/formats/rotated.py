"""Unit vectors rotated until every coordinate looks Gaussian, then coded by one fixed codebook."""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.formats.rotated import Rotated
from runtime.levels import lookup, nearest
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import check_held, finished, inverse

SWEEPS = 2000
"""Lloyd steps of the Gaussian codebook: 256 levels settle slowly."""


class RotatedTwin(FormatTwin):
    """The stored norm is that of the row over that of its codes' centroids, so that decoding gives back the row's norm.

    Centroids are conditional means and therefore too short; with the plain norm all products would shrink alike.
    """

    part_name = "rotated"
    part: Rotated

    @cached_property
    def _model(self) -> Tensors:
        width, device = self.place.width, self.setting.device
        signs = torch.randint(0, 2, (1, 1, 1, width), generator=self.setting.generator()) * 2 - 1
        levels = torch.from_numpy(gaussian_codebook(self.part.bits)) / width**0.5
        return {
            "signs": signs.to(device, torch.int8),
            "centroids": levels.view(1, 1, 1, -1).to(device, torch.float16),
        }

    def model_buffers(self) -> Tensors:
        """Signs (a byte each) and fp16 centroids of N(0, 1/width)."""
        return self._model

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes and fp16 norms."""
        model, wide = self._model | fixed, x.float()
        peak = wide.abs().amax(-1, keepdim=True)
        unit = wide * inverse(peak)  # squares of tiny or huge values would leave fp32
        length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
        turned = (unit * inverse(length) * model["signs"]) @ hadamard(self.place.width, x.device)
        levels = model["centroids"].reshape(-1).float()
        codes = nearest(turned, levels)
        norm = peak * length * inverse(torch.linalg.vector_norm(lookup(codes, levels), dim=-1, keepdim=True))
        held = norm.to(torch.float16)
        check_held(self, wide, held)
        return {"codes": pack(codes, self.part.bits), "norm": held}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Centroids, turned back, times the norm."""
        model = self._model | fixed
        turned = lookup(unpack(rows["codes"], self.part.bits, self.place.width), model["centroids"].reshape(-1))
        values = turned @ hadamard(self.place.width, turned.device)
        return finished(values.mul_(model["signs"]).mul_(rows["norm"].float()), self.setting.dtype)


@cache
def hadamard(width: int, device: torch.device) -> Tensor:
    """Hadamard blocks of the powers of two in width, largest first (80: 64, 16): orthogonal and its own inverse.

    A constant of the width, like code; it is not part of any cache. A product with it is faster here than butterflies.
    """
    blocks = []
    for power in reversed(range(width.bit_length())):
        if width >> power & 1:
            block = torch.ones(1, 1)
            for _ in range(power):
                block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), block)
            blocks.append(block / 2 ** (power / 2))
    return torch.block_diag(*blocks).to(device)


@cache
def gaussian_codebook(bits: int) -> NDArray[np.float64]:
    """Lloyd-Max centroids of N(0, 1), ascending: each the mean of the values nearest to it (Max 1960, table I)."""
    from scipy.special import ndtr, ndtri

    count = 2**bits
    # the density of centroids goes with the cube root of that of values: a Gaussian three times as wide
    centers: NDArray[np.float64] = np.sqrt(3.0) * ndtri((np.arange(count) + 0.5) / count)
    for _ in range(SWEEPS):
        cuts = np.concatenate(([-np.inf], (centers[1:] + centers[:-1]) / 2, [np.inf]))
        moved = -np.diff(np.exp(-(cuts**2) / 2)) / np.sqrt(2 * np.pi) / np.diff(ndtr(cuts))
        if np.abs(moved - centers).max() < 1e-12:
            break
        centers = moved
    return (centers - centers[::-1]) / 2
