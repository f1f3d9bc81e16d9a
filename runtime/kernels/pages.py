"""Where a format's rows are held: interleaved where a kernel of this machine reads them so."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.buffers import Paged
from runtime.kernels import triton_plans
from runtime.kernels.load import library, switch
from runtime.kernels.plans import Plan, plan
from runtime.kernels.tiled import TiledPaged
from runtime.parts import FormatTwin


def pages(twin: FormatTwin, name: str, like: Tensor, unit: int) -> Paged:
    """Where a format's buffer is held: interleaved as the kernels read it, or row after row."""
    found = planned(twin, like.device)
    layout = found.layout(name) if isinstance(found, Plan) else None
    if layout is None or not unit or unit % layout[0] or like.shape[3] % layout[1]:
        return Paged(like, unit)
    return TiledPaged(like, unit, *layout)


def planned(twin: FormatTwin, device: torch.device) -> Plan | str:
    """The twin's plan, made once for a switch and kept with it."""
    mode = switch()
    kept: dict[tuple[str, str], Plan | str] = twin.__dict__.setdefault("_kernel_plans", {})
    key = (mode, device.type)
    if key not in kept:
        kept[key] = _plan_now(twin, mode, device)
    return kept[key]


def _plan_now(twin: FormatTwin, mode: str, device: torch.device) -> Plan | str:
    if mode == "eager":
        return "KVSIM_KERNELS=eager"
    if device.type != "cpu" or mode == "triton":
        return triton_plans.why_not(device.type) or triton_plans.plan(twin)
    found = library()
    return found if isinstance(found, str) else plan(twin, found.dots)
