"""Full precision: the rows themselves."""

from __future__ import annotations

from torch import Tensor

from runtime.parts import FormatTwin, Tensors


class FullTwin(FormatTwin):
    """Nothing is changed, nothing is checked."""

    part_name = "full"

    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """The rows in the setting's dtype."""
        return {"rows": x.to(self.setting.dtype)}

    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """The rows."""
        return rows["rows"]
