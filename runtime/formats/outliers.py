"""A correction: the values of each row that lie farthest out, kept exactly beside the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.formats.outliers import Outliers
from runtime.parts import CorrectionTwin, Tensors


class OutliersTwin(CorrectionTwin):
    """Farthest from the row's mean; the format sees the mean of the other values in their place.

    (The middle of the range would be as far from its smallest as from its largest value, however far out one of them.)
    """

    part_name = "outliers"
    part: Outliers

    def before(self, x: Tensor) -> tuple[Tensor, Tensors]:
        """Rows without their outliers; the outliers and where they belong."""
        wide, kept = x.float(), self.part.count(x.shape[-1])
        far = (wide - wide.mean(-1, keepdim=True)).abs()
        index = far.topk(kept, dim=-1).indices.sort(-1).values
        rest = wide.scatter(-1, index, 0.0)
        # zeros stand for the outliers in this sum; a row of nothing but outliers leaves zeros
        mean = rest.sum(-1, keepdim=True) / max(1, x.shape[-1] - kept)
        inner = x.scatter(-1, index, mean.to(x.dtype).expand(index.shape))
        small = torch.uint8 if x.shape[-1] <= 256 else torch.int16
        return inner, {"values": x.gather(-1, index).to(self.setting.dtype), "index": index.to(small)}

    def restore(self, decoded: Tensor, rows: Tensors, blocks: Tensor) -> Tensor:
        """Each kept value over its decoded one."""
        if not rows:
            return decoded
        return decoded.scatter(-1, _places(rows["index"]), rows["values"].to(decoded.dtype))


def _places(index: Tensor) -> Tensor:
    """Stored positions as int64; int16 wraps above 32767."""
    wide = index.to(torch.int64)
    return wide & 0xFFFF if index.dtype == torch.int16 else wide
