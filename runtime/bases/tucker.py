"""Tucker: higher-order orthogonal iteration over tokens, heads and channels, all sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.tucker import Tucker
from runtime.latent import joined, right_vectors, stored, wide
from runtime.parts import BasisTwin, Tensors


class TuckerTwin(BasisTwin):
    """K[t, h, d] = sum c[t, i] G[i, a, b] U2[h, a] U3[d, b].

    The core is held with orthonormal rows and the tokens' coefficients carry its scale (U1 times singular values): the
    same tensor, but least squares on the core unfolding is a projection, and a quantizer errs alike in every column.
    """

    part_name = "tucker"
    part: Tucker

    def fit(self, x: Tensor) -> Tensors:
        """Start from the truncated HOSVD of rows x [B, H, n, d], then sweep over the modes."""
        rt, rh, rd = self.part.sizes(self.place)
        rows = wide(x)
        heads = _leading(rows.flatten(2), rh)
        channels = _leading(rows.permute(0, 3, 1, 2).flatten(2), rd)
        for _ in range(self.part.iterations):
            tokens = _leading(_inner(rows, heads, channels), rt)
            small = tokens.mT[:, None] @ rows
            heads = _leading((small @ channels[:, None]).flatten(2), rh)
            channels = _leading(torch.einsum("bhtd,bha->bdat", small, heads).flatten(2), rd)
        core, _ = right_vectors(_inner(rows, heads, channels), rt)
        held = {"core": core, "head_factor": heads, "channel_factor": channels}
        return {name: stored(factor[:, None], self.setting.dtype) for name, factor in held.items()}

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """Rows x [B, H, n, d] on the core's rows as U2 and U3 spread them, [B, 1, n, rt]."""
        maps = self.maps({name: wide(factor) for name, factor in fixed.items()})
        return (wide(joined(x)) @ joined(maps).mT).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """The core with U2 and U3 multiplied in, each head's share."""
        _, rh, rd = self.part.sizes(self.place)
        core = fixed["core"][:, 0].unflatten(2, (rh, rd))
        spread = torch.einsum("btac,bdc->btad", core, fixed["channel_factor"][:, 0])
        return torch.einsum("btad,bha->bhtd", spread, fixed["head_factor"][:, 0])


def _leading(x: Tensor, rank: int) -> Tensor:
    """The first left singular vectors [B, m, r] of x [B, m, n], completed where n < r."""
    if x.shape[2] < rank:
        return torch.linalg.svd(x, full_matrices=True).U[..., :rank]
    return right_vectors(x.mT, rank)[0].mT


def _inner(x: Tensor, heads: Tensor, channels: Tensor) -> Tensor:
    """Rows in the subspaces of heads [B, H, rh] and channels [B, d, rd]: [B, n, rh * rd]."""
    small = torch.einsum("bhnd,bdc->bhnc", x, channels)
    return torch.einsum("bhnc,bha->bnac", small, heads).flatten(2)
