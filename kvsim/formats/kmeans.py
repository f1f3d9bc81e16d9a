"""Codes into a codebook that one-dimensional k-means found on calibration data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class KMeans(Quantizer):
    """Every value becomes the index of the nearest of 2^b centroids.

    One fp16 codebook (per model) for each unit of `per`: channel is each channel of each head; tensor each head's
    whole matrix; layer all heads of this side of the layer. scale=row centres each row of each head on the middle of
    its range and divides by half of it before the look-up (two fp16 a row and head): KVQuant's values, whose range
    is only known online. Methods with per=channel usually need none.
    """

    name: ClassVar[str] = "kmeans"
    summary: ClassVar[str] = "nearest of 2^b calibrated centroids"
    source: ClassVar[str] = "survey 3.1.2; Hooper et al., KVQuant, arXiv 2401.18079"
    survey: ClassVar[str] = "3.1.2"

    bits: int = setting(4, low=1, high=8, always=True, what="bits a code")
    per: str = setting("channel", choices=("channel", "tensor", "layer"), what="what shares a codebook")
    scale: str = setting("none", choices=("none", "row"), what="row: each row is normalised by its own range")
    weighting: str = setting("none", choices=("none", "fisher", "attention"), what="what weighs calibration samples")
    calibration: str | None = setting(None, what="file with the calibrated codebooks; needed to run, not to predict")

    @property
    def conversion(self) -> Conversion:
        """A table look-up."""
        return "lookup"

    @property
    def kernel_format(self) -> str:
        """kmeans2, kmeans3 ..."""
        return f"kmeans{self.bits}"

    def encode_row_flops(self, place: Place) -> float:
        """A binary search over sorted centroids, `bits` comparisons a value, and packing; 4 more to normalise."""
        return (self.bits + 2.0 + (4.0 if self.scale == "row" else 0.0)) * place.width

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes, the rows' ranges where they are kept, and the model's codebooks of 2^b fp16 values."""
        found = [Buffer("codes", place.heads, rows, place.width, self.bits)]
        if self.scale == "row":
            found += [Buffer(name, place.heads, rows, 1, 16) for name in ("scale", "middle")]
        books = {"channel": (place.heads, place.width), "tensor": (place.heads, 1), "layer": (1, 1)}
        heads, count = books[self.per]
        found.append(Buffer("codebook", heads, count, 2**self.bits, 16, rows_per_unit=0, per_model=True))
        return tuple(found)
