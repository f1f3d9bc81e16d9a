"""Eight-bit floats, cast as they are or scaled by row or by tensor."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.formats.float8 import Float8
from runtime.levels import float8_table, lookup
from runtime.parts import FormatTwin, Tensors
from runtime.scales import TINY, at_least, check_finite, check_held, finished, inverse

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HEADROOM = 2.0
"""How far above the calibration's largest value the tensor scale reaches; a float loses no precision by it."""


class Float8Twin(FormatTwin):
    """Casts saturate. With scale=tensor a value beyond the calibrated range is an error, never clipped in silence."""

    part_name = "float8"
    part: Float8

    @property
    def _kind(self) -> torch.dtype:
        return KINDS[self.part.kind]

    @cached_property
    def _scale(self) -> Tensor:
        """The calibrated scale [1, 1, 1, 1], fp32."""
        found = self.setting.calibration.get("scale")
        if found is None:
            raise KvsimError(
                "float8: scale=tensor runs with calibration only, as a scale of the first rows would clip later ones; "
                "calibrate one, or use scale=row"
            )
        if found.numel() != 1 or not float(found) >= TINY:
            raise KvsimError(f"float8: the calibrated scale of the {self.place.where} must be one positive number")
        return found.reshape(1, 1, 1, 1).to(self.setting.device, torch.float32)

    def model_buffers(self) -> Tensors:
        """The tensor's scale."""
        return {"scale": self._scale} if self.part.scale == "tensor" else {}

    def calibrate(self, x: Tensor, weights: Tensor | None = None) -> Tensors:
        """A scale that reaches HEADROOM times the largest value of x."""
        if self.part.scale != "tensor":
            return {}
        check_finite(self, x)
        top = torch.finfo(self._kind).max
        return {"scale": (x.float().abs().amax() * (HEADROOM / top)).clamp_(min=TINY).reshape(1, 1, 1, 1)}

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Bytes, and the rows' fp16 scales."""
        wide, top = x.float(), torch.finfo(self._kind).max
        found: Tensors = {}
        if self.part.scale == "row":
            scale = at_least(wide.abs().amax(-1, keepdim=True) / top, torch.float16)
            check_held(self, wide, scale)
            wide, found = wide * inverse(scale), {"scale": scale}
        else:
            check_finite(self, wide)
            if self.part.scale == "tensor":
                wide = wide / (self.model_buffers() | fixed)["scale"]
                if wide.numel() and (reach := float(wide.abs().max())) > top:
                    raise KvsimError(
                        f"float8: {self.place.where} reach {reach / top:.3g} times the calibrated range; "
                        f"calibrate on data like these, or use scale=row"
                    )
        # torch's own cast to e5m2 goes to infinity where hardware saturates
        return {"codes": wide.clamp(-top, top).to(self._kind).view(torch.uint8)} | found

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Bytes as floats, times the scale."""
        values = lookup(rows["codes"], float8_table(self._kind, rows["codes"].device))
        if self.part.scale != "none":
            values *= (self.model_buffers() | fixed | rows)["scale"].float()
        return finished(values, self.setting.dtype)
