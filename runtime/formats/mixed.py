"""Integers whose width differs by channel group, decided once per sequence under a mean."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from kvsim.allocation import exact
from kvsim.errors import KvsimError
from kvsim.formats.mixed import Mixed
from runtime.packing import pack_uneven, unpack_uneven
from runtime.parts import FormatTwin, Tensors
from runtime.scales import at_least, check_finite, check_held, finished, grouped, inverse


class MixedTwin(FormatTwin):
    """Codes of a row follow one another without gaps, each in its group's width, lowest bits first."""

    part_name = "mixed"
    part: Mixed

    def start(self, x: Tensor) -> Tensors:
        """Widths [B, H, 1, groups]: for each head exactly the least sum of spread / (2^b - 1)^2 within the mean."""
        if self.part.by == "variance":
            spread = self._spread(x.float(), None)
        else:
            found = self.setting.calibration.get("sensitivity")
            if found is None or found.numel() != self.place.heads * len(self._sizes):
                raise KvsimError(
                    f"mixed: by={self.part.by} needs the calibrated sensitivity of the {self.place.where}, a number a "
                    f"head and group; calibrate, or use by=variance"
                )
            spread = found.reshape(1, self.place.heads, -1).expand(x.shape[0], -1, -1)
        loss = spread.double().cpu().unsqueeze(-1) / torch.tensor([(2.0**b - 1) ** 2 for b in self.part.bits])
        cost = torch.tensor(self._sizes).unsqueeze(-1) * torch.tensor(self.part.bits)
        budget = int(Fraction(str(self.part.mean)) * self.place.width)
        options = torch.tensor(self.part.bits, dtype=torch.uint8)
        # scaled by the head's largest, so that tiny spreads still differ by more than the allocator's tolerance
        rows = (loss / loss.amax((2, 3), keepdim=True).clamp(min=1e-300)).flatten(0, 1).numpy()
        chosen = [options[torch.from_numpy(exact(row, cost.numpy(), budget).choice)] for row in rows]
        return {"widths": torch.stack(chosen).view(*spread.shape[:2], 1, -1).to(x.device)}

    def calibrate(self, x: Tensor, weights: Tensor | None = None) -> Tensors:
        """Sensitivity [H, groups]: the spread of each group, values weighted (attention, squared gradients)."""
        if self.part.by == "variance":
            return {}
        return {"sensitivity": self._spread(x.float(), weights).mean(0)}

    def _spread(self, x: Tensor, weights: Tensor | None) -> Tensor:
        """Sum over a group's channels of the mean square distance from the row's mean in the group, [B, H, groups]."""
        check_finite(self, x)
        rows = []
        weights = torch.ones_like(x) if weights is None else weights.to(x).expand_as(x)
        for piece, weight in zip(x.split(self._group, -1), weights.split(self._group, -1), strict=True):
            far = (piece - piece.mean(-1, keepdim=True)).square()
            rows.append((far * weight).sum((2, 3)) / x.shape[2])
        return torch.stack(rows, dim=-1)

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Codes, fp16 scales and minima a row and group."""
        wide = x.float()
        groups = grouped(wide, self._group)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        levels = (2.0 ** fixed["widths"].float() - 1).unsqueeze(-1)
        least = low.to(torch.float16)
        scale = at_least((high - least.float()).clamp_(min=0) / levels, torch.float16)
        check_held(self, wide, scale, least)
        codes = torch.minimum(((groups - least.float()) * inverse(scale)).round_().clamp_(min=0), levels)
        codes = codes.flatten(3)[..., : x.shape[3]].to(torch.int32)
        packed = pack_uneven(codes, self._bits_of_values(fixed["widths"]), self.part.row_bytes(x.shape[3]))
        return {"codes": packed, "scale": scale.squeeze(-1), "min": least.squeeze(-1)}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """code * scale + min."""
        codes = unpack_uneven(rows["codes"], self._bits_of_values(fixed["widths"]))
        values = grouped(codes.float(), self._group) * rows["scale"].float().unsqueeze(-1)
        values = values + rows["min"].float().unsqueeze(-1)
        return finished(values.flatten(3)[..., : self.place.width], self.setting.dtype)

    def _bits_of_values(self, widths: Tensor) -> Tensor:
        """The width of each channel's code, [B, H, 1, d]."""
        return widths.to(torch.int64).repeat_interleave(torch.tensor(self._sizes, device=widths.device), dim=-1)

    @property
    def _group(self) -> int:
        return self.part.group or min(64, self.place.width)

    @property
    def _sizes(self) -> list[int]:
        """Channels of each group."""
        width, group = self.place.width, self._group
        return [min(group, width - first) for first in range(0, width, group)]
