"""EliteKV: a few rotated frequencies a head, all else of keys and values in one latent beside the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.elitekv import EliteKv
from runtime.latent import ModelBasis, parted, wide
from runtime.parts import Tensors


class EliteKvTwin(ModelBasis):
    """One twin a side. A row's coefficients are the sum of what both sides project, and both sides' maps read them.

    The first 2 * frequencies * H coefficients are the elite values of keys, rotated; the last `rank` are joint. Keys
    and queries come mixed (`mix`): elite frequencies rotated, all others not, as the method leaves the model.
    """

    part_name = "elitekv"
    part: EliteKv

    @property
    def frame(self) -> str:
        """Bases of other frequencies are other bases."""
        return f"{self.part.name}.{self.part.frequencies}"

    @property
    def elite_width(self) -> int:
        """Coefficients that are elite values, all heads together."""
        return 2 * self.part.frequencies * self.place.heads

    def make(self) -> Tensors:
        """This side's part of the joint basis [1, 1, rank, H * plain]; for keys the frequencies kept [1, H, 1, f]."""
        basis = self.given("basis", self.part.rank, self.place.heads * self.part.plain(self.place))
        found = {"basis": basis[None, None]}
        if self.place.side == "k":
            index = torch.uint8 if self.place.width <= 512 else torch.int16
            kept = self.setting.calibration[f"{self.frame}.elite"].to(self.setting.device, index)
            found["elite"] = kept.reshape(1, self.place.heads, 1, self.part.frequencies)
        return found

    def channels(self, fixed: Tensors) -> tuple[Tensor, Tensor]:
        """Channels of each head that are elite [H, 2f] (cosine halves, then sine halves) and all others [H, d - 2f]."""
        elite = self.held("elite", fixed)[0, :, 0].to(torch.int64)
        pairs = torch.cat([elite, elite + int(self.setting.calibration[f"{self.frame}.rotary"]) // 2], dim=1)
        is_plain = torch.ones((self.place.heads, self.place.width), dtype=torch.bool, device=pairs.device)
        is_plain.scatter_(1, pairs, False)
        return pairs, is_plain.nonzero()[:, 1].reshape(self.place.heads, -1)

    def mix(self, rotated: Tensor, unrotated: Tensor, fixed: Tensors) -> Tensor:
        """Keys or queries [B, H or Hq, n, d]: elite frequencies from `rotated`, all others from `unrotated`."""
        pairs, _ = self.channels(fixed)
        chosen = torch.zeros((self.place.heads, self.place.width), dtype=torch.bool, device=rotated.device)
        chosen = chosen.scatter(1, pairs, True).repeat_interleave(rotated.shape[1] // self.place.heads, dim=0)
        return torch.where(chosen[:, None], rotated, unrotated)

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """This side's share of the coefficients [B, 1, n, elite + rank], of mixed keys or of values [B, H, n, d]."""
        batch, _, rows, _ = x.shape
        elite = x.new_zeros((batch, 1, rows, self.elite_width), dtype=wide(x).dtype)
        if self.place.side == "k":
            pairs, plain = (c[None, :, None].expand(batch, -1, rows, -1) for c in self.channels(fixed))
            elite = wide(x.gather(3, pairs)).transpose(1, 2).reshape(batch, 1, rows, -1)
            x = x.gather(3, plain)
        joint = wide(x).transpose(1, 2).reshape(batch, 1, rows, -1) @ wide(self.held("basis", fixed)).mT
        return torch.cat([elite, joint], dim=3).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """[1, H, elite + rank, d]: keys in mixed coordinates (queries must be mixed too); values take nothing elite."""
        basis = self.held("basis", fixed)
        own = parted(basis, self.place.heads)[0]
        found = own.new_zeros((self.place.heads, self.elite_width + self.part.rank, self.place.width))
        if self.place.side == "v":
            found[:, self.elite_width :] = own
            return found[None]
        pairs, plain = self.channels(fixed)
        found[:, self.elite_width :].scatter_(2, plain[:, None].expand(-1, self.part.rank, -1), own)
        at = torch.arange(self.elite_width, device=found.device).reshape(self.place.heads, -1)
        found[torch.arange(self.place.heads, device=found.device)[:, None], at, pairs] = 1
        return found[None]
