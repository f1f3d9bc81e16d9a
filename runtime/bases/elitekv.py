"""EliteKV: a few rotated frequencies a head, all else of keys and values in one latent beside the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.elitekv import EliteKv
from kvsim.errors import KvsimError
from kvsim.parts import Place
from runtime.latent import ModelBasis, parted, right_vectors, stored, wide
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
        return split_channels(elite, int(self.setting.calibration[f"{self.frame}.rotary"]), self.place.width)

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


def split_channels(elite: Tensor, rotary: int, width: int) -> tuple[Tensor, Tensor]:
    """Channels [H, 2f] of frequencies elite [H, f] of which channel i turns with i + rotary / 2, and the others."""
    pairs = torch.cat([elite, elite + rotary // 2], dim=1)
    is_plain = torch.ones((len(elite), width), dtype=torch.bool, device=elite.device).scatter(1, pairs, False)
    return pairs, is_plain.nonzero()[:, 1].reshape(len(elite), -1)


def choose_frequencies(
    queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], visible: Tensor, rotary: int, count: int
) -> Tensor:
    """The frequencies of each head that must stay rotated, int64 [H, count], ascending.

    queries, keys: (rotated, unrotated) rows [Hq, m, d], [H, n, d]; visible: [m, n]. Greedy, as the authors search: the
    frequency comes next whose rotation brings scores nearest to the model's. Differences are measured in squares, after
    the mean over a query's keys, which the softmax forgets, is taken off.
    """
    half, heads = rotary // 2, keys[0].shape[0]
    seen = visible.sum(1, keepdim=True).clamp(min=1)
    chosen = []
    for h in range(heads):
        gram = torch.zeros((half, half), dtype=torch.float64)
        for g in range(queries[0].shape[0] // heads):
            parts = []
            for q, k in zip(queries, keys, strict=True):
                a, b = (t[..., :rotary].unflatten(-1, (2, half)) for t in (q[h * (len(q) // heads) + g], k[h]))
                parts.append(torch.einsum("mcf,ncf->fmn", a.float(), b.float()))
            lost = (parts[0] - parts[1]) * visible
            lost = ((lost - lost.sum(-1, keepdim=True) / seen) * visible).flatten(1).double()
            gram += lost @ lost.mT
        left = list(range(half))
        for _ in range(count):
            total = gram[left][:, left]
            saved = 2 * total.sum(1) - total.diagonal()
            left.pop(int(saved.argmax()))
        chosen.append([f for f in range(half) if f not in left])
    return torch.tensor(chosen, dtype=torch.int64).reshape(heads, count)


def joint_factors(part: EliteKv, place: Place, elite: Tensor, rotary: int, keys: Tensor, values: Tensor) -> Tensors:
    """Calibrated tensors of both sides: joint singular vectors of unrotated keys [H, N, dk] and values [H, N, dv]."""
    _, plain = split_channels(elite, rotary, place.width)
    rest = keys.gather(2, plain[:, None].expand(-1, keys.shape[1], -1))
    both = [t.transpose(0, 1).flatten(1) for t in (rest, values)]
    vectors, _ = right_vectors(torch.cat(both, dim=1), part.rank)
    if len(vectors) < part.rank:
        raise KvsimError(f"elitekv: rank={part.rank} needs as many rows to calibrate, and there are {keys.shape[1]}")
    k_basis, v_basis = vectors.split([b.shape[1] for b in both], dim=1)
    name = f"elitekv.{part.frequencies}"
    return {
        f"k.{name}.basis": stored(k_basis, torch.float32),
        f"k.{name}.elite": elite,
        f"k.{name}.rotary": torch.tensor(rotary),
        f"v.{name}.basis": stored(v_basis, torch.float32),
    }
