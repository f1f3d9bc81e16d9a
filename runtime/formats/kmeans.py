"""Codes into a codebook that one-dimensional k-means found on calibration data."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.formats.kmeans import KMeans
from runtime.levels import lookup, nearest
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import at_least, check_finite, check_held, finished, inverse

SWEEPS = 100
"""Lloyd steps; in one dimension they settle long before."""
SAMPLES = 2**17
"""Samples of a codebook beyond which as many are drawn at random."""


class KMeansTwin(FormatTwin):
    """The codebook is calibrated, or, where nothing is weighted, learned once from the first rows that are encoded."""

    part_name = "kmeans"
    part: KMeans

    def model_buffers(self) -> Tensors:
        """The codebooks, ascending; zeros until something is learned."""
        if not self._known and self.part.weighting != "none":
            raise KvsimError(
                f"kmeans: weighting={self.part.weighting} needs calibration, and there is none for the "
                f"{self.place.where}; calibrate, or use weighting=none"
            )
        return {"codebook": self._book}

    def start(self, x: Tensor) -> Tensors:
        """Learn the codebooks from the first rows of the first sequences, unless they were calibrated."""
        if not self._known:
            self.model_buffers()["codebook"].copy_(self.calibrate(x)["codebook"])
            self._known = True
        return {}

    def calibrate(self, x: Tensor, weights: Tensor | None = None) -> Tensors:
        """Codebooks of rows x [B, H, n, d], weights alike or None (the part's `weighting` says which to pass)."""
        wide = x.float()
        check_finite(self, wide)
        if self.part.scale == "row":
            middle, half = _range(wide)
            wide = (wide - middle.float()) * inverse(half)
        samples = self._by_book(wide)
        count = self._by_book(weights.to(wide).expand_as(wide)) if weights is not None else torch.ones_like(samples)
        if samples.shape[1] > SAMPLES:
            drawn = torch.randint(samples.shape[1], (SAMPLES,), generator=self.setting.generator()).to(x.device)
            samples, count = samples[:, drawn], count[:, drawn]
        book = kmeans_1d(samples, count, 2**self.part.bits).reshape(self._book.shape)
        held = book.to(torch.float16)
        check_held(self, wide, held)
        return {"codebook": held}

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes, and each row's middle and half range with scale=row."""
        wide = x.float()
        found: Tensors = {}
        if self.part.scale == "row":
            middle, half = _range(wide)
            check_held(self, wide, middle, half)
            wide, found = (wide - middle.float()) * inverse(half), {"scale": half, "middle": middle}
        else:
            check_finite(self, wide)
        book = (self.model_buffers() | fixed)["codebook"]
        return {"codes": pack(nearest(wide, book[0].float()), self.part.bits)} | found

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Centroids, stretched to the row's range."""
        codes = unpack(rows["codes"], self.part.bits, self.place.width)
        values = lookup(codes, (self.model_buffers() | fixed)["codebook"][0])
        if self.part.scale == "row":
            values = values * rows["scale"].float() + rows["middle"].float()
        return finished(values, self.setting.dtype)

    @cached_property
    def _book(self) -> Tensor:
        place = self.place
        shape = {"channel": (place.heads, place.width), "tensor": (place.heads, 1), "layer": (1, 1)}[self.part.per]
        book = torch.zeros(1, *shape, 2**self.part.bits, dtype=torch.float16, device=self.setting.device)
        given = self.setting.calibration.get("codebook")
        if given is not None:
            if given.numel() != book.numel() or given.shape[-1] != book.shape[-1]:
                raise KvsimError(
                    f"kmeans: the calibrated codebook of the {place.where} has shape {tuple(given.shape)}, "
                    f"and {self.part} needs {tuple(book.shape)}; calibrate with these settings"
                )
            book.copy_(given.reshape(book.shape).sort(-1).values)
        return book

    @cached_property
    def _known(self) -> bool:
        return "codebook" in self.setting.calibration

    def _by_book(self, x: Tensor) -> Tensor:
        """[B, H, n, d] as [codebooks, samples]."""
        if self.part.per == "channel":
            return x.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
        return x.transpose(0, 1).flatten(1) if self.part.per == "tensor" else x.reshape(1, -1)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half range of each row in fp16, [B, H, n, 1]; the half reaches both ends from the rounded middle."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    middle = (low / 2 + high / 2).to(torch.float16)
    reach = torch.maximum(high - middle.float(), middle.float() - low)
    return middle, at_least(torch.where(high > low, reach, 0.0), torch.float16)


def kmeans_1d(samples: Tensor, weights: Tensor, count: int) -> Tensor:
    """Ascending centroids [units, count] of samples and weights [units, n]: Lloyd's algorithm on sorted data.

    It starts where centroids of many levels lie, their density going with the cube root of that of the samples
    (Panter and Dite 1951). A cluster of sorted samples is a slice and its mean a difference of running sums, so that
    a step costs count * log n look-ups a unit, and all channels of a layer take about a second.
    """
    if not bool((weights >= 0).all()):
        raise KvsimError("kmeans: weights must be 0 or more")
    # a channel that the loss does not depend on (Gemma 3 has some) has no gradients: its samples count alike
    weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, 1.0)
    order = samples.argsort(-1)
    values, mass = samples.gather(-1, order).double(), weights.gather(-1, order).double()
    none = values.new_zeros(len(values), 1)
    total, moment = torch.cat((none, mass.cumsum(-1)), -1), torch.cat((none, (mass * values).cumsum(-1)), -1)
    gaps = torch.cat((none, values.diff(dim=-1)), -1)
    reach = ((mass + mass.roll(1, -1)).pow(1 / 3) * gaps.pow(2 / 3)).cumsum(-1)
    shares = (torch.arange(count, device=samples.device, dtype=values.dtype) + 0.5) / count
    at = torch.searchsorted(reach, reach[:, -1:] * shares)
    centers = values.gather(-1, at.clamp(max=values.shape[1] - 1))
    for _ in range(SWEEPS):
        cuts = torch.searchsorted(values, ((centers[:, 1:] + centers[:, :-1]) / 2).contiguous())
        cuts = torch.cat((torch.zeros_like(cuts[:, :1]), cuts, torch.full_like(cuts[:, :1], values.shape[1])), -1)
        held = total.gather(-1, cuts).diff(dim=-1)
        moved = torch.where(held > 0, moment.gather(-1, cuts).diff(dim=-1) / held, centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.sort(-1).values.float()
