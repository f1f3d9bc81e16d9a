"""CP: alternating least squares over tokens, heads and channels, all sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.cp import Cp
from runtime.latent import joined, right_vectors, solve_normal, stored, wide
from runtime.parts import BasisTwin, Tensors


class CpTwin(BasisTwin):
    """K[t, h, d] = sum_r A[t, r] B[h, r] C[d, r]; columns of B and C have length 1, A carries the scale."""

    part_name = "cp"
    part: Cp

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """B [B, H, r] and C [B, d, r] to start from: leading singular vectors of their mode, drawn at random beyond."""
        rank, generator = self.part.rank, self.setting.generator()
        found = []
        for unfolded in (x.flatten(2), x.permute(0, 3, 1, 2).flatten(2)):
            size = min(rank, unfolded.shape[1], unfolded.shape[2])
            more = torch.randn((1, unfolded.shape[1], rank - size), generator=generator).to(unfolded)
            vectors = right_vectors(unfolded.mT, size)[0].mT
            found.append(torch.cat([vectors, more.expand(len(x), -1, -1)], dim=2))
        return found[0], found[1]

    def fit(self, x: Tensor) -> Tensors:
        """`iterations` sweeps over rows x [B, H, n, d], in float32 at least."""
        rows = wide(x)
        heads, channels = self.begin(rows)
        for _ in range(self.part.iterations):
            inner = rows @ channels[:, None]
            tokens = _solved((inner * heads[:, :, None]).sum(1), heads, channels)
            heads = _unit(_solved((inner * tokens[:, None]).sum(2), tokens, channels))
            outer = tokens[:, None] * heads[:, :, None]
            channels = _unit(_solved((rows.mT @ outer).sum(1), tokens, heads))
        held = {"head_factor": heads, "channel_factor": channels}
        return {name: stored(factor[:, None], self.setting.dtype) for name, factor in held.items()}

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """Rows of A by least squares on the Khatri-Rao product of B and C as they are held, [B, 1, n, r]."""
        matrix = joined(self.maps({name: factor.double() for name, factor in fixed.items()}))
        products, normal = joined(x).double() @ matrix.mT, matrix @ matrix.mT
        # a direction weaker than the strongest by more than the rounding of coefficients would return mostly rounding
        return solve_normal(products, normal, torch.finfo(self.setting.dtype).eps ** 2).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """diag(B[h]) C^T of each head."""
        return fixed["head_factor"].transpose(1, 2).mT * fixed["channel_factor"].mT


def _solved(products: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The third factor [B, m, r] from the rows' products with the Khatri-Rao product of a [B, n, r] and b [B, k, r]."""
    normal = (a.mT @ a) * (b.mT @ b)
    return solve_normal(products, normal, torch.finfo(a.dtype).eps)


def _unit(x: Tensor) -> Tensor:
    """Columns [B, m, r] of length 1; columns of zeros stay."""
    return x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
