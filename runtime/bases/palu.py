"""Palu: one latent for a group of heads, factors calibrated."""

from __future__ import annotations

from torch import Tensor

from kvsim.bases.palu import Palu
from runtime.latent import ModelBasis, check_rows, joined, parted, right_vectors, wide
from runtime.parts import Tensors


class PaluTwin(ModelBasis):
    """c = sum over the heads of a group of x_h E_h^T, x_h ~ c D_h."""

    part_name = "palu"
    part: Palu

    @property
    def frame(self) -> str:
        """Groups of other sizes have other factors."""
        return f"{super().frame}.group{self.part.heads_together(self.place)}"

    def make(self) -> Tensors:
        """Encoder and decoder [1, H, r, d], each head's slice of its group's."""
        shape = (self.place.heads, self.part.latent(self.place).width, self.place.width)
        return {name: self.given(name, *shape)[None] for name in ("encoder", "decoder")}

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, H, n, d] -> [B, G, n, g*d]."""
        batch, heads, rows, width = x.shape
        together = self.part.heads_together(self.place)
        return joined(x.reshape(-1, together, rows, width)).reshape(batch, heads // together, rows, together * width)

    def calibrate(self, x: Tensor) -> Tensors:
        """Factors from cached rows x [B, H, n, d].

        Palu whitens a group's weight W with the Cholesky factor S of its inputs' second moments and truncates the SVD
        of S W. Since ||S (W - W')|| = ||X W - X W'||, that is the truncated SVD of the outputs X W, the rows cached.
        """
        rows = self._grouped(wide(x)).transpose(0, 1).flatten(1, 2)[None]
        rank = self.part.latent(self.place).width
        check_rows(self, rank, rows.shape[2])
        vectors, _ = right_vectors(rows, rank)
        found = parted(vectors, self.place.heads)[0].float().contiguous()
        return {f"{self.frame}.encoder": found, f"{self.frame}.decoder": found.clone()}

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """Each group's heads through their slices of the encoder, added up."""
        each = wide(x) @ wide(self.held("encoder", fixed)).mT
        return each.unflatten(1, (-1, self.part.heads_together(self.place))).sum(2).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """D."""
        return self.held("decoder", fixed)
