"""Random projections: one matrix for all heads of a side, drawn from the seed and stored."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.random_projection import RandomProjection
from runtime.latent import ModelBasis, wide
from runtime.parts import Tensors


class RandomProjectionTwin(ModelBasis):
    """c = P x and x ~ P^T c; E[P^T P] = 1, but the error of one row is about d / r of its energy."""

    part_name = "random_projection"
    part: RandomProjection

    def make(self) -> Tensors:
        """P [1, 1, r, d], or a count sketch's buckets (uint16) and signs (int8), [1, 1, 1, d]."""
        rank, width, device = self.part.rank, self.place.width, self.setting.device
        generator = self.setting.generator()
        if self.part.kind == "embedding":
            buckets = torch.randint(rank, (1, 1, 1, width), generator=generator)
            signs = torch.randint(2, (1, 1, 1, width), generator=generator) * 2 - 1
            return {"buckets": buckets.to(torch.uint16).to(device), "signs": signs.to(torch.int8).to(device)}
        if self.part.kind == "sparse":
            die = torch.randint(6, (1, 1, rank, width), generator=generator)
            matrix = ((die == 0).double() - (die == 1).double()) * (3.0 / rank) ** 0.5
        else:
            matrix = torch.randn((1, 1, rank, width), generator=generator, dtype=torch.float64) / rank**0.5
        return {"matrix": matrix.to(device, self.setting.dtype)}

    def matrix(self, fixed: Tensors) -> Tensor:
        """P [1, 1, r, d]; a count sketch's is unpacked."""
        if self.part.kind != "embedding":
            return self.held("matrix", fixed)
        buckets, signs = self.held("buckets", fixed), self.held("signs", fixed)
        dense = torch.zeros((1, 1, self.part.rank, self.place.width), dtype=self.setting.dtype, device=signs.device)
        return dense.scatter_(2, buckets.to(torch.int64), signs.to(self.setting.dtype))

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """x P^T."""
        return (wide(x) @ wide(self.matrix(fixed)).mT).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """P for every head."""
        return self.matrix(fixed).expand(-1, self.place.heads, -1, -1)
