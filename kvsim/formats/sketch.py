"""Signs of random projections of keys: products with queries are estimated, keys are never rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Sketch(Quantizer):
    """<q, k> is estimated by sqrt(pi/2) / m * ||k|| * <S q, sign(S k)> with an m x width Gaussian S: unbiased.

    S is one for all heads of the side and stored with the model in full precision. The authors' separate sketch of
    outlier channels is not part of this.
    """

    name: ClassVar[str] = "sketch"
    summary: ClassVar[str] = "sign bits of random projections (keys only)"
    source: ClassVar[str] = "Zandieh et al., QJL, arXiv 2406.03482"
    survey: ClassVar[str] = "3.1.2, 5.3.1"
    keys_only: ClassVar[bool] = True
    reconstructs: ClassVar[bool] = False

    m: int = setting(256, low=1, high=65536, always=True, what="sign bits a row and head")

    def check(self) -> None:
        """Keys that are never rebuilt cannot be rotated at the read."""
        if self.rope == "pre":
            raise KvsimError("sketch: keys are never rebuilt, so they cannot be rotated when read; leave rope=post")
        super().check()

    @property
    def conversion(self) -> Conversion:
        """Bits become signs."""
        return "unpack"

    def encode_row_flops(self, place: Place) -> float:
        """S k and the norm."""
        return 2.0 * (self.m + 1) * place.width

    def step_flops(self, place: Place) -> float:
        """S q for each query head."""
        return 2.0 * place.n_heads * self.m * place.width

    def check_place(self, place: Place) -> None:
        """Only rows that nothing but query products read."""
        super().check_place(place)
        if place.side == "v":
            raise KvsimError(f"sketch estimates query-key products, not {place.where}; write k:sketch(...) v:...")
        if place.mla:
            raise KvsimError(f"sketch cannot hold an MLA latent, which is the values too, at {place.where}; use int")

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Sign bits, fp16 norms, the model's projection."""
        return (
            Buffer("signs", place.heads, rows, self.m, 1),
            Buffer("norm", place.heads, rows, 1, 16),
            Buffer("projection", 1, self.m, place.width, place.value_bits, rows_per_unit=0, per_model=True),
        )
