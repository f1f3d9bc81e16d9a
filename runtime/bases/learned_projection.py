"""A calibrated encoder and decoder for each head, the best of its rank under a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.learned_projection import LearnedProjection
from runtime.latent import ModelBasis, check_rows, right_vectors, wide
from runtime.parts import Tensors

RIDGE = 1e-6
"""Least eigenvalue of a weight, as a share of the largest, so that it has an inverse."""


class LearnedProjectionTwin(ModelBasis):
    """c = x E^T, x ~ c D."""

    part_name = "learned_projection"
    part: LearnedProjection

    def make(self) -> Tensors:
        """Encoder and decoder [1, H, r, d] from calibration."""
        shape = (self.place.heads, self.part.rank, self.place.width)
        return {name: self.given(name, *shape)[None] for name in ("encoder", "decoder")}

    def calibrate(self, x: Tensor, metric: Tensor | None = None) -> Tensors:
        """Matrices of least ||(x - x E^T D) A|| over rows x [B, H, n, d] with A A^T = metric [H, d, d] (None: A = 1).

        With A the queries' second moments (keys) or the output projection's (values), what is least is the error of
        the logits or of what reaches the residual stream. Whitened SVD: the first right singular vectors V of x A give
        E = V^T A^T and D = V^T A^-1 (Eckart and Young).
        """
        rows = wide(x).double().transpose(0, 1).flatten(1, 2)
        check_rows(self, self.part.rank, rows.shape[1])
        factor = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device).expand(len(rows), -1, -1)
        inverse = factor
        if metric is not None:
            values, vectors = torch.linalg.eigh(metric.to(rows))
            root = values.clamp(min=0).maximum(values[:, -1:] * RIDGE).sqrt()[:, None]
            factor, inverse = (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
        found, _ = right_vectors(rows @ factor, self.part.rank)
        return {
            f"{self.frame}.encoder": (found @ factor).float().contiguous(),
            f"{self.frame}.decoder": (found @ inverse).float().contiguous(),
        }

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """x E^T."""
        return (wide(x) @ wide(self.held("encoder", fixed)).mT).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """D."""
        return self.held("decoder", fixed)
