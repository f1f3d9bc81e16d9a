"""NMF: multiplicative updates on rows made non-negative, later rows by non-negative least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.bases.nmf import SWEEPS, Nmf
from runtime.latent import wide
from runtime.parts import BasisTwin, Tensors


class NmfTwin(BasisTwin):
    """sign=split: x = W+ H+ - W- H-, the two parts one behind the other; sign=shift: x + offset = W H."""

    part_name = "nmf"
    part: Nmf

    def fit(self, x: Tensor) -> Tensors:
        """Factors of rows x [B, H, n, d], and how far a shift must lift each channel."""
        rows, dtype = wide(x), self.setting.dtype
        if self.part.sign == "split":
            parts = torch.stack([rows.clamp(min=0), (-rows).clamp(min=0)])
            return {"factors": torch.cat([*factorise(parts, self.part.rank, self.part.iterations)], dim=2).to(dtype)}
        lift = (-rows.amin(2, keepdim=True)).clamp(min=0)
        factors = factorise((rows + lift)[None], self.part.rank, self.part.iterations)[0]
        return {"factors": factors.to(dtype), "offset": lift.to(dtype)}

    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """Non-negative coefficients [B, H, n, r or 2r]."""
        rows, factors = wide(x), wide(fixed["factors"])
        if self.part.sign == "shift":
            return non_negative(rows + wide(fixed["offset"]), factors).to(self.setting.dtype)
        halves = torch.stack([factors[:, :, : self.part.rank], factors[:, :, self.part.rank :]])
        return torch.cat([*non_negative(torch.stack([rows, -rows]), halves)], dim=3).to(self.setting.dtype)

    def maps(self, fixed: Tensors) -> Tensor:
        """H, the negative part's with its sign."""
        factors = fixed["factors"]
        if self.part.sign == "shift":
            return factors
        return torch.cat([factors[:, :, : self.part.rank], -factors[:, :, self.part.rank :]], dim=2)

    def offset(self, fixed: Tensors) -> Tensor | None:
        """What a shift lifted, taken off again."""
        return -fixed["offset"] if self.part.sign == "shift" else None


def factorise(x: Tensor, rank: int, iterations: int) -> Tensor:
    """H [..., r, d] of x ~ W H, all non-negative: Lee and Seung's updates from a start that singular vectors give."""
    weights, factors = start(x, rank)
    tiny = torch.finfo(x.dtype).eps
    for _ in range(iterations):
        weights = weights * (x @ factors.mT) / (weights @ (factors @ factors.mT)).clamp(min=tiny)
        factors = factors * (weights.mT @ x) / ((weights.mT @ weights) @ factors).clamp(min=tiny)
    # rows of H of length 1, W carries the scale: coefficients then compare with rows, as in the other bases
    return factors / factors.norm(dim=-1, keepdim=True).clamp(min=tiny)


def start(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """NNDSVDa (Boutsidis and Gallopoulos, 2008): the larger signed half of each singular pair, the mean for zeros."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank, :].mT
    halves = []
    for sign in (1.0, -1.0):
        left, right = (sign * u).clamp(min=0), (sign * v).clamp(min=0)
        halves.append((left, right, left.norm(dim=-2), right.norm(dim=-2)))
    (lp, rp, lpn, rpn), (ln, rn, lnn, rnn) = halves
    take = (lpn * rpn >= lnn * rnn)[..., None, :]
    tiny = torch.finfo(x.dtype).eps
    left, right = torch.where(take, lp, ln), torch.where(take, rp, rn)
    size = torch.where(take[..., 0, :], lpn * rpn, lnn * rnn)
    scale = (s * size).sqrt()[..., None, :]
    left = left / left.norm(dim=-2, keepdim=True).clamp(min=tiny) * scale
    right = right / right.norm(dim=-2, keepdim=True).clamp(min=tiny) * scale
    mean = x.mean((-2, -1), keepdim=True)
    return torch.where(left > 0, left, mean), torch.where(right > 0, right, mean).mT


def non_negative(x: Tensor, factors: Tensor) -> Tensor:
    """c >= 0 [..., n, r] with c @ factors near x [..., n, d]: up to SWEEPS of coordinate descent, each step exact.

    Coordinates stand first and are updated in place; with few rows the calls cost more than the arithmetic.
    """
    normal = factors @ factors.mT
    scale = normal.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    wanted, normal = (factors @ x.mT) / scale, normal / scale
    normal.diagonal(dim1=-2, dim2=-1).zero_()
    found = torch.zeros_like(wanted)
    rows, targets, columns = (t.unsqueeze(-2).unbind(-3) for t in (normal, wanted, found))
    for _ in range(SWEEPS):
        before = found.clone()
        for row, target, column in zip(rows, targets, columns, strict=True):
            column.copy_((target - row @ found).clamp_(min=0))
        if torch.allclose(found, before, rtol=1e-5, atol=1e-7):
            break
    return found.mT
