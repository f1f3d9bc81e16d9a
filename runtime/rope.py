"""Undo and redo a model's rotary embedding at known positions, with the model's own rotation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.errors import KvsimError


class Rotation:
    """The rotation of one attention layer: `rotate(x, positions)` and its inverse `unrotate`.

    Raises KvsimError where the architecture has no rotary embedding that can be undone.
    """

    def __init__(self, model: nn.Module, attention: nn.Module, layer_type: str | None = None) -> None:
        base = getattr(model, "base_model", model)
        self.embedding: Any = getattr(attention, "rotary_emb", None) or getattr(base, "rotary_emb", None)
        half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
        if self.embedding is None or half is None:
            raise KvsimError(f"rope=pre: {type(attention).__name__} has no rotary embedding to undo; leave rope=post")
        self.half: Callable[[Tensor], Tensor] = half
        wanted = "layer_type" in inspect.signature(self.embedding.forward).parameters
        self.layer_type = layer_type if wanted else None

    def _tables(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        extra = () if self.layer_type is None else (self.layer_type,)
        cos, sin = self.embedding(x.float(), positions, *extra)
        return cos[:, None].float(), sin[:, None].float()

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows x [B, H, n, d] standing at positions [B, n] (or [B, H, n] where heads differ)."""
        return self._apply(x, positions, inverse=False)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse; an embedding that scales (YaRN) is divided out."""
        return self._apply(x, positions, inverse=True)

    def _apply(self, x: Tensor, positions: Tensor, inverse: bool) -> Tensor:
        if positions.dim() == 3:
            batch, heads, rows = positions.shape
            flat = x.reshape(batch * heads, 1, rows, x.shape[-1])
            return self._apply(flat, positions.reshape(batch * heads, rows), inverse).reshape(x.shape)
        cos, sin = self._tables(x, positions)
        width = cos.shape[-1]
        part = x[..., :width].float()
        if inverse:
            scale = cos.square() + sin.square()
            turned = (part * cos - self.half(part) * sin) / scale
        else:
            turned = part * cos + self.half(part) * sin
        return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)
