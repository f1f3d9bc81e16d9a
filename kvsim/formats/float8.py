"""Eight-bit floats, cast as they are or scaled by row or by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.parts import Buffer, Conversion, Place, Quantizer, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Float8(Quantizer):
    """x / s rounded to e4m3 (largest 448) or e5m2 (largest 57344).

    scale=row: s = max |x| / largest in fp16 for each row of each head; none: s = 1, the plain cast of servers without
    calibration, which saturates; tensor: one calibrated fp32 scale for this side of the layer, stored with the model
    (never frozen at the first rows of a sequence, where later values would be clipped).
    """

    name: ClassVar[str] = "float8"
    summary: ClassVar[str] = "8-bit floats (e4m3, e5m2)"
    source: ClassVar[str] = "Micikevicius et al., FP8 formats, arXiv 2209.05433; vLLM kv_cache_dtype=fp8"
    survey: ClassVar[str] = "3.1.2"

    kind: str = setting("e4m3", choices=("e4m3", "e5m2"), what="exponent and mantissa bits")
    scale: str = setting("row", choices=("row", "none", "tensor"), what="what shares a scale")
    calibration: str | None = setting(None, what="file with the scale of scale=tensor; needed to run, not to predict")

    def check(self) -> None:
        """Only the tensor scale is calibrated."""
        if self.calibration is not None and self.scale != "tensor":
            raise KvsimError(f"float8: calibration is for scale=tensor, and scale is {self.scale}")
        super().check()

    @property
    def conversion(self) -> Conversion:
        """A cast, and a product where there is a scale."""
        return "cast" if self.scale == "none" else "scale"

    @property
    def kernel_format(self) -> str:
        """Measured kernels do not tell the two kinds apart."""
        return "fp8"

    def encode_row_flops(self, place: Place) -> float:
        """The cast; a product with the tensor's scale; or two passes to find and apply the row's."""
        return {"none": 1.0, "tensor": 2.0, "row": 4.0}[self.scale] * place.width

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """One byte a value and the scales."""
        codes = Buffer("codes", place.heads, rows, place.width, 8)
        if self.scale == "row":
            return (codes, Buffer("scale", place.heads, rows, 1, 16))
        if self.scale == "tensor":
            return (codes, Buffer("scale", 1, 1, 1, 32, rows_per_unit=0, per_model=True))
        return (codes,)
