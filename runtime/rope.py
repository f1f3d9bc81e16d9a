"""Undo and redo a model's rotary embedding at known positions, with the model's own rotation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.errors import KvsimError

CHANGES = ("dynamic", "longrope")
"""Kinds of scaling whose angles depend on how long the text has become: what was rotated cannot be undone later."""


class Rotation:
    """The rotation of one attention layer: `rotate(x, positions)` and its inverse `unrotate`.

    wanted_by, instead: what asks for it, and what to do without, for the error. Raises KvsimError where the
    architecture has no rotary embedding that can be undone, or rotates in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: nn.Module,
        layer_type: str | None = None,
        *,
        wanted_by: str = "rope=pre",
        instead: str = "leave rope=post",
    ) -> None:
        self.wanted_by, self.instead = wanted_by, instead
        self.embedding: Any = getattr(attention, "rotary_emb", None) or _embedding(model)
        source = sys.modules[type(attention).__module__]
        half, apply = getattr(source, "rotate_half", None), getattr(source, "apply_rotary_pos_emb", None)
        self.name = type(attention).__name__
        if self.embedding is None or half is None or apply is None:
            raise KvsimError(f"{wanted_by}: {self.name} has no rotary embedding to undo; {instead}")
        kinds = getattr(self.embedding, "rope_type", "default")
        kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds
        if kind in CHANGES:
            raise KvsimError(f"{wanted_by}: {kind} angles change as the text grows and cannot be undone; {instead}")
        self.half: Callable[[Tensor], Tensor] = half
        wanted = "layer_type" in inspect.signature(self.embedding.forward).parameters
        self.layer_type = layer_type if wanted else None
        self._check(apply)

    def _check(self, apply: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """The model's own function must agree on a few rows."""
        device = next((b.device for b in self.embedding.buffers()), torch.device("cpu"))
        at = torch.tensor([[0, 1, 7]], device=device)
        probe = torch.zeros((1, 1, 3, 1), device=device)
        cos, sin = (t[:, 0] for t in self._tables(probe, at))
        x = torch.sin(torch.arange(3 * cos.shape[-1], device=device).float()).reshape(1, 1, 3, -1)
        wanted, _ = apply(x, x, cos, sin)
        turned = self.rotate(x, at)
        close = wanted.shape == turned.shape and torch.allclose(wanted.float(), turned, atol=1e-5)
        if not close or not torch.allclose(self.unrotate(turned, at), x, atol=1e-5):
            raise KvsimError(f"{self.wanted_by}: {self.name} rotates in a way that is not known here; {self.instead}")

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

    def averaged(self, width: int, positions: Tensor) -> Tensor:
        """R [B, 1, width, width] such that x @ R is x rotated, averaged over positions [B, n]; float32."""
        unit = torch.eye(width, device=positions.device)[None, None]
        cos, sin = (t.mean(2, keepdim=True) for t in self._tables(unit, positions))
        part = unit[..., : cos.shape[-1]]
        turned = part * cos + self.half(part) * sin
        return torch.cat([turned, unit[..., cos.shape[-1] :].expand(len(positions), -1, -1, -1)], dim=-1)

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


def rotates(model: nn.Module, attention: nn.Module) -> bool:
    """Whether this architecture rotates keys at all, in whatever way."""
    source = sys.modules[type(attention).__module__]
    return hasattr(source, "apply_rotary_pos_emb") or _embedding(model) is not None


def _embedding(model: nn.Module) -> Any:
    """The rotary embedding that the model's layers share."""
    return next((found for m in model.modules() if (found := getattr(m, "rotary_emb", None)) is not None), None)
