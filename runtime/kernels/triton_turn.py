"""Keys turned to their positions after they are decoded: what the Triton kernels need of rotation and basis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from runtime.kernels.triton_rows import Layout, Turn
from runtime.rope import Rotation

if TYPE_CHECKING:
    from runtime.store import Store

Turned = tuple[Turn, tuple[int, Tensor, int, Tensor, Tensor]]
"""What the compiler knows; the first row's position, maps, elements of a sequence's maps, offset, angles."""
LEAST = 4096
"""Positions that a table of angles has at least."""


def turning(store: Store, keys: Layout, nothing: Tensor) -> Turned:
    """How the store's keys are turned; its rows follow one another from a position on."""
    rotation, (maps, offset) = store.around.rotation, store.keys.maps()
    assert rotation is not None
    half = store.geometry.k_dim // 2
    step = 0
    if maps is not None:
        maps = maps.contiguous()
        step = maps.stride(0) if maps.shape[0] > 1 else 0
    found = Turn(half, max(16, triton.next_power_of_2(half)), maps is not None, offset is not None,
                 keys.width * 2 * half, keys.decoded)  # fmt: skip
    shift = store.next_position - store.keys.rows
    table = angles(rotation, store.next_position, nothing.device)
    first = nothing if maps is None else maps
    return found, (shift, first, step, nothing if offset is None else offset.contiguous(), table)


def angles(rotation: Rotation, positions: int, device: torch.device) -> Tensor:
    """Cosines and sines [positions or more, 2, half], fp32; one table for all layers that share the rotation."""
    kept: dict[torch.device, Tensor] = rotation.__dict__.setdefault("_kernel_angles", {})
    if device not in kept or kept[device].shape[0] < positions:
        count = max(LEAST, triton.next_power_of_2(positions))
        at = torch.arange(count, device=device)[None]
        cos, sin = (x[0, 0] for x in rotation._tables(torch.zeros((1, 1, count, 1), device=device), at))
        half = cos.shape[-1] // 2
        kept[device] = torch.stack([cos[:, :half], sin[:, :half]], 1).contiguous()
    return kept[device]


def why_not(store: Store) -> str:
    """Why keys that are turned after they are decoded are attended eagerly; empty where a kernel does it."""
    rotation, width, (maps, offset) = store.around.rotation, store.geometry.k_dim, store.keys.maps()
    if store.positions is not None or store.geometry.window:
        return "keys are rotated after they are decoded, at positions of their own"
    if rotation is None or not _in_halves(rotation, width, store.around.device):
        return "keys are rotated after they are decoded, not in halves"
    if maps is not None and maps.shape[1] != store.keys.twins.inner.place.heads:
        return "keys are rotated after they are decoded from a latent that heads share"
    if maps is not None and offset is not None and maps.shape[0] != offset.shape[0]:
        return "keys are rotated after they are decoded with an offset of each sequence"
    if width % 16:
        return f"halves of {width} keys' values do not start at whole bytes"
    whole = getattr(store.keys.format.part, "type", "") == "" or not width % 64
    return "" if whole else "blocks of the keys reach over their halves"


def _in_halves(rotation: Rotation, width: int, device: torch.device) -> bool:
    """Whether all of a head turns, its first half against its second."""
    kept: dict[int, bool] = rotation.__dict__.setdefault("_kernel_halves", {})
    if width not in kept:
        x = torch.arange(1.0, width + 1, device=device)
        table = rotation._tables(torch.zeros((1, 1, 3, 1), device=device), torch.tensor([[0, 1, 7]], device=device))
        half = width // 2
        alike = all(t.shape[-1] == width and bool((t[..., :half] == t[..., half:]).all()) for t in table)
        kept[width] = alike and torch.equal(rotation.half(x), torch.cat([-x[half:], x[:half]]))
    return kept[width]
