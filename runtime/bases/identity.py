"""The channels as they are: what a cache without a basis does, for those who ask every part for its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.identity import Identity
from runtime.parts import BasisTwin, Tensors


class IdentityTwin(BasisTwin):
    """Coefficients are the rows."""

    part_name = "identity"
    part: Identity

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """The rows."""
        return x

    def maps(self, fixed: Tensors) -> Tensor:
        """The identity of each head, [1, H, d, d]."""
        eye = torch.eye(self.place.width, dtype=self.setting.dtype, device=self.setting.device)
        return eye.expand(1, self.place.heads, -1, -1)
