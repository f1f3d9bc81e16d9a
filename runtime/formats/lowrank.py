"""A correction: the best rank-r approximation of each block's quantization error."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsim.formats.lowrank import SWEEPS, LowRank
from runtime.parts import CorrectionTwin, Tensors
from runtime.scales import check_held, finished


class LowRankTwin(CorrectionTwin):
    """Subspace iteration from a fixed random start; A = error @ Q and B = Q^T with orthonormal Q."""

    part_name = "lowrank"
    part: LowRank

    def after(self, x: Tensor, decoded: Tensor) -> Tensors:
        """Factors of the error of one block: [B, H, n, r] and [B, H, r, d], zeros where the block has no such rank."""
        error = x.float() - decoded.float()
        start = torch.randn(x.shape[-1], self.part.rank, generator=self.setting.generator()).to(x.device)
        right = start.expand(*x.shape[:2], -1, -1)
        for _ in range(SWEEPS):
            left = torch.linalg.qr(error @ right).Q
            right = torch.linalg.qr(error.mT @ left).Q
        spare = (0, self.part.rank - right.shape[-1])
        rows, block = pad(error @ right, spare), pad(right, spare).mT.contiguous()
        found = {"row_factors": rows.to(self.setting.dtype), "block_factors": block.to(self.setting.dtype)}
        check_held(self, x.float(), *found.values())
        return found

    def restore(self, decoded: Tensor, rows: Tensors, blocks: Tensor) -> Tensor:
        """Each row's share of its block's A B, added one rank at a time: a row's own B would be r times the row.

        Where only the prompt's block is corrected, later rows have no factors and stay as they are.
        """
        left = rows["row_factors"].float() if rows else decoded[:, :, :0]
        covered = left.shape[2]
        if not covered:
            return decoded
        values = decoded.float() if decoded.dtype != torch.float32 else decoded.clone()
        factors = rows["block_factors"].float().unflatten(2, (-1, self.part.rank))
        blocks = blocks[:covered].to(decoded.device)
        for rank in range(self.part.rank):
            right = factors[:, :, :, rank].index_select(2, blocks)
            values[:, :, :covered] += left[..., rank : rank + 1] * right
        return finished(values, self.setting.dtype)

    def rows_per(self, name: str) -> int:
        """B has `rank` rows a flush."""
        return 0 if name == "block_factors" else 1
