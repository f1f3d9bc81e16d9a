"""Unit vectors rotated until every coordinate looks Gaussian, then coded by one fixed codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Rotated(Quantizer):
    """y = H diag(signs) x / ||x||, each coordinate to the nearest Lloyd-Max centroid of N(0, 1/width).

    H is block-diagonal Hadamard of power-of-two factors (80 = 64 + 16). Queries and outputs turn once a step instead
    of every stored row; but keys written before the rotary embedding (rope=pre) are turned back at each read.
    """

    name: ClassVar[str] = "rotated"
    summary: ClassVar[str] = "Hadamard rotation, norm, Gaussian codebook"
    source: ClassVar[str] = "Zandieh et al., TurboQuant (mse variant), arXiv 2504.19874; QuaRot, arXiv 2404.00456"
    survey: ClassVar[str] = "3.1.2"

    bits: int = setting(4, low=1, high=8, always=True, what="bits a code")

    @property
    def conversion(self) -> Conversion:
        """A table look-up and the row's norm."""
        return "lookup"

    @property
    def kernel_format(self) -> str:
        """rotated3, rotated4 ..."""
        return f"rotated{self.bits}"

    @staticmethod
    def turn_flops(width: int) -> float:
        """Signs and fast Hadamard transforms of one row: f log2(f) for each power of two f in width."""
        factors = [1 << i for i in range(width.bit_length()) if width >> i & 1]
        return float(width + sum(f * (f.bit_length() - 1) for f in factors))

    def encode_row_flops(self, place: Place) -> float:
        """Norm (3 a value), the turn, and a binary search of `bits` comparisons with packing."""
        return self.turn_flops(place.width) + (self.bits + 5.0) * place.width

    def read_flops(self, place: Place) -> float:
        """Rows need turning back only where the rotary embedding still has to be applied."""
        return super().read_flops(place) + (self.turn_flops(place.width) if self.before_rope else 0.0)

    def step_flops(self, place: Place) -> float:
        """One turn for each query head: its query (keys) or its output (values)."""
        return 0.0 if self.before_rope else place.n_heads * self.turn_flops(place.width)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Codes and norms; the model's signs (a byte each) and fp16 centroids, shared by all heads of the side."""
        return (
            Buffer("codes", place.heads, rows, place.width, self.bits),
            Buffer("norm", place.heads, rows, 1, 16),
            Buffer("signs", 1, 1, place.width, 8, rows_per_unit=0, per_model=True),
            Buffer("centroids", 1, 1, 2**self.bits, 16, rows_per_unit=0, per_model=True),
        )
