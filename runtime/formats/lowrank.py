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
        """Each row's share of its block's A B, added one rank at a time: a row's own B would be r times the row."""
        if not rows:
            return decoded
        values, left = decoded.float(), rows["row_factors"].float()
        factors = rows["block_factors"].float().unflatten(2, (-1, self.part.rank))
        missing = values.shape[2] - left.shape[2]  # rows of blocks too small to be corrected, behind the others
        left, blocks = pad(left, (0, 0, 0, missing)), blocks.to(decoded.device).clamp(max=factors.shape[2] - 1)
        for rank in range(self.part.rank):
            values = values + left[..., rank : rank + 1] * factors[:, :, :, rank].index_select(2, blocks)
        return finished(values, self.setting.dtype)

    def rows_per(self, name: str) -> int:
        """B has `rank` rows a flush."""
        return 0 if name == "block_factors" else 1
