"""Online SVD: Brand's update, a basis that turns with every block of rows that arrives."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvsim.bases.online_svd import OnlineSvd
from runtime.latent import right_vectors, stored, wide
from runtime.parts import BasisTwin, Tensors


class OnlineSvdTwin(BasisTwin):
    """Rows so far are C V with C^T C = S^2.

    In the basis [V; residual's Q] they stand as [S, 0] and new rows as [x V^T, residual's R]; the SVD of that turns V.
    Brand, Fast low-rank modifications of the thin singular value decomposition, 2006. One QR of [V; x] gives both the
    residual's directions and V made orthonormal again after its rounding to half precision.
    """

    part_name = "online_svd"
    part: OnlineSvd
    block_maps: ClassVar[bool] = True

    def fit(self, x: Tensor) -> Tensors:
        """The first rows in one batch."""
        vectors, values = right_vectors(wide(x), self.part.rank)
        return {
            "basis": stored(vectors, self.setting.dtype),
            "spectrum": stored(values[:, :, None], torch.float32),
        }

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """x V^T in the present basis."""
        return (wide(x) @ wide(fixed["basis"]).mT).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """V."""
        return fixed["basis"]

    def extend(self, x: Tensor, coefficients: Tensor, fixed: Tensors) -> tuple[Tensor, Tensors]:
        """Turn the basis to rows x [B, H, m, d]: coefficients of the old rows [B, H, n, r] and the new, new buffers.

        Where `fixed` holds `maps` [B, H, blocks * r, r], from coefficients frozen in flushed blocks to the old basis,
        they are led on to the new one.
        """
        rank, rows = self.part.rank, wide(x)
        directions, along = torch.linalg.qr(torch.cat([wide(fixed["basis"]).to(rows), rows], dim=2).mT)
        old, new = along[..., :rank].mT, along[..., rank:].mT
        _, values, vectors = torch.linalg.svd(torch.cat([fixed["spectrum"].to(rows).mT * old, new], dim=2),
                                              full_matrices=False)
        chosen = vectors[:, :, :rank].mT
        turn = old @ chosen
        # a singular vector's sign is free: with a positive diagonal a basis that need not turn stays as it is
        signs = torch.where(turn.diagonal(dim1=2, dim2=3) < 0, -1.0, 1.0).to(rows)[:, :, None]
        chosen, turn = chosen * signs, turn * signs
        dtype = self.setting.dtype
        moved = torch.cat([wide(coefficients).to(rows) @ turn, new @ chosen], dim=2).to(dtype)
        found = {
            "basis": stored(chosen.mT @ directions.mT, dtype),
            "spectrum": stored(values[:, :, None, :rank], torch.float32),
        }
        if "maps" in fixed:
            found["maps"] = (wide(fixed["maps"]).to(rows) @ turn).to(dtype)
        return moved, found

    def block_map(self, fixed: Tensors) -> Tensor:
        """The map of a block flushed now, [B, H, r, r]: its coefficients are in the present basis."""
        basis = fixed["basis"]
        eye = torch.eye(self.part.rank, dtype=basis.dtype, device=basis.device)
        return eye.expand(*basis.shape[:2], -1, -1).contiguous()

    def turned(self, coefficients: Tensor, maps: Tensor, blocks: Tensor) -> Tensor:
        """Coefficients [B, H, n, r] of flushed rows in the present basis; blocks: [n], each row's block, rising."""
        pieces, start = [], 0
        which, counts = torch.unique_consecutive(blocks, return_counts=True)
        for block, count in zip(which.tolist(), counts.tolist(), strict=True):
            here = maps[:, :, block * self.part.rank : (block + 1) * self.part.rank]
            pieces.append(coefficients[:, :, start : start + count].to(here.dtype) @ here)
            start += count
        return torch.cat(pieces, dim=2) if pieces else coefficients
