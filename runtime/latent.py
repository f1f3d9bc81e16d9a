"""What bases share: wide arithmetic, singular vectors, heads side by side, matrices that stay with the model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from runtime.parts import BasisTwin, Tensors


def wide(x: Tensor) -> Tensor:
    """At least float32: half precision is for holding, not for decomposing."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy to be held: in a storage of its own, so that nothing else stays alive behind a slice."""
    return x.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def joined(x: Tensor) -> Tensor:
    """[B, H, n, d] -> [B, 1, n, H*d]: the heads of a row side by side."""
    batch, heads, rows, width = x.shape
    return x.transpose(1, 2).reshape(batch, 1, rows, heads * width)


def parted(basis: Tensor, heads: int) -> Tensor:
    """[B, G, r, g*d] -> [B, G*g = heads, r, d]: each head's columns of a basis that groups of heads share."""
    batch, groups, rank, _ = basis.shape
    return basis.unflatten(3, (heads // groups, -1)).transpose(2, 3).reshape(batch, heads, rank, -1)


def right_vectors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The first right singular vectors [..., r, d] and values [..., r] of rows x [..., n, d], n and d >= r.

    Long matrices are reduced by a QR first, which keeps what a Gram matrix would square away.
    """
    if x.shape[-2] > x.shape[-1]:
        x = torch.linalg.qr(x, mode="r").R
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    return vectors[..., :rank, :], values[..., :rank]


def solve_normal(products: Tensor, normal: Tensor, tolerance: float) -> Tensor:
    """Least squares c [..., n, r] from products x M^T [..., n, r] and the normal matrix M M^T [..., r, r].

    Directions below `tolerance` of the largest are left out: what they would carry cancels, and rounding does not.
    """
    inverse = torch.linalg.pinv(normal.double(), rtol=tolerance, hermitian=True)
    return (products.double() @ inverse).to(products.dtype)


def rebuild(coefficients: Tensor, maps: Tensor, offset: Tensor | None = None) -> Tensor:
    """Rows [B, H, n, d] of coefficients [B, Hl, n, r], in the dtype of the maps [B, H, r, d]; Hl divides H."""
    heads, latent = maps.shape[1], coefficients.shape[1]
    if 1 < latent < heads:
        coefficients = coefficients.repeat_interleave(heads // latent, dim=1)
    rows = coefficients.to(maps.dtype) @ maps
    return rows if offset is None else rows + offset


def check_rows(basis: BasisTwin, rank: int, rows: int) -> None:
    """Raise KvsimError where a basis is to be calibrated from fewer rows than its rank."""
    if rows < rank:
        name = basis.part.name
        raise KvsimError(f"{name}: rank={rank} needs as many rows to calibrate, and the texts gave {rows}; "
                         f"give more text")


class ModelBasis(BasisTwin):
    """A basis whose matrices stay with the model: made once, held once, replaced by `fixed` where it has their name."""

    calibrated: ClassVar[tuple[str, ...]] = ()
    _made: Tensors | None = None

    @abstractmethod
    def make(self) -> Tensors:
        """The per-model buffers."""

    def model_buffers(self) -> Tensors:
        """The same tensors at every call."""
        if self._made is None:
            self._made = self.make()
        return self._made

    def held(self, name: str, fixed: Tensors) -> Tensor:
        """One buffer, the shared one where the cache hands it over."""
        return fixed[name] if name in fixed else self.model_buffers()[name]

    def given(self, name: str, *shape: int) -> Tensor:
        """A calibrated tensor cut to `shape` (rows of a basis come in order of what they carry), in this place's dtype.

        Raises KvsimError, naming calibration=FILE, where there is none or it was made for other settings.
        """
        part, key = self.part, f"{self.frame}.{name}"
        found = self.setting.calibration.get(key)
        what = f"{part.name} at the {self.place.where}"
        if found is None:
            held = sorted(k for k in self.setting.calibration if k.startswith(f"{part.name}."))
            why = "runs only with calibrated matrices" if not held else f"calibrated are {', '.join(held)}, not {key}"
            raise KvsimError(f"{what}: {why}; calibrate for this method and give the file, calibration=FILE")
        same = (*found.shape[:-2], found.shape[-1]) == (*shape[:-2], shape[-1])
        if not same or found.shape[-2] < shape[-2]:
            raise KvsimError(f"{what} needs {key} of shape {shape}, and calibration=FILE holds {tuple(found.shape)}; "
                             f"calibrate for this method")
        cut = found[..., : shape[-2], :]
        return stored(cut.to(self.setting.device), self.setting.dtype)

    @property
    def frame(self) -> str:
        """What calibrated tensors are filed under: the part, and the side of the rotation it was calibrated on."""
        rope = getattr(self.part, "rope", "") if self.place.side == "k" else ""
        return f"{self.part.name}.{rope}" if rope else self.part.name
