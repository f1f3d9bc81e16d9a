"""Signs of random projections of keys: products with queries are estimated, keys are never rebuilt."""

from __future__ import annotations

from functools import cached_property
from math import pi, sqrt

import torch
from torch import Tensor

from kvsim.formats.sketch import Sketch
from runtime.packing import pack, unpack
from runtime.parts import FormatTwin, Tensors
from runtime.scales import check_held, finished, inverse


class SketchTwin(FormatTwin):
    """`decode` gives the vector whose product with a query is the estimate: sqrt(pi/2)/m * ||k|| * S^T sign(S k)."""

    part_name = "sketch"
    part: Sketch

    @cached_property
    def _model(self) -> Tensors:
        shape = (1, 1, self.part.m, self.place.width)
        values = torch.randn(shape, generator=self.setting.generator())
        return {"projection": values.to(self.setting.device, self.setting.dtype)}

    def model_buffers(self) -> Tensors:
        """S, m x width, standard normal."""
        return self._model

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Signs (a set bit is a plus) and fp16 norms."""
        wide = x.float()
        peak = wide.abs().amax(-1, keepdim=True)
        unit = wide * inverse(peak)  # squares of tiny or huge values would leave fp32
        norm = (peak * torch.linalg.vector_norm(unit, dim=-1, keepdim=True)).to(torch.float16)
        check_held(self, wide, norm)
        projection = (self._model | fixed)["projection"][0, 0].float()
        return {"signs": pack((unit @ projection.T >= 0).to(torch.uint8), 1), "norm": norm}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """The keys that the estimate implies; not the keys."""
        projection = (self._model | fixed)["projection"][0, 0].float()
        signs = unpack(rows["signs"], 1, self.part.m).float() * 2 - 1
        implied = (signs @ projection) * (rows["norm"].float() * (sqrt(pi / 2) / self.part.m))
        return finished(implied, self.setting.dtype)
