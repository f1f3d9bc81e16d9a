"""Truncated SVD: the prompt's right singular vectors, later rows projected on them."""

from __future__ import annotations

from torch import Tensor

from kvsim.bases.svd import Svd
from runtime.latent import joined, parted, right_vectors, stored, wide
from runtime.parts import BasisTwin, Tensors


class SvdTwin(BasisTwin):
    """c = x V^T with V [r, d] a head, or [r, H*d] for all of them; the error on fitted rows is the tail's energy."""

    part_name = "svd"
    part: Svd

    def _rows(self, x: Tensor) -> Tensor:
        return wide(joined(x) if self.part.joint == "heads" else x)

    def fit(self, x: Tensor) -> Tensors:
        """The first `rank` right singular vectors of rows x [B, H, n, d]."""
        vectors, _ = right_vectors(self._rows(x), self.part.rank)
        return {"basis": stored(vectors, self.setting.dtype)}

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """x V^T."""
        return (self._rows(x) @ wide(fixed["basis"]).mT).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """V, each head's columns of it."""
        basis = fixed["basis"]
        return parted(basis, self.place.heads) if self.part.joint == "heads" else basis
