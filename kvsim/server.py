"""What a serving engine adds to the kernels of a step, and how requests wait for each other's prompts; no kernel."""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import numpy as np

from kvsim.errors import KvsimError
from kvsim.kernels import engine_choice
from kvsim.seconds import Real, Seconds

if TYPE_CHECKING:
    from kvsim.coefficients import Coefficient
    from kvsim.hardware import HardwareProfile
    from kvsim.model import ModelSpec

SPREAD = (0.25, 4.0)
"""What a server adds is what its measured steps leave unexplained, and as uncertain as that."""


def routed_layers(model: ModelSpec) -> int:
    """Layers with routed experts."""
    return sum(len(where) for layer, where in model.groups if any(m.routed for m in layer.matrices))


def added_seconds(c: Coefficient, layers: int, routed: int) -> float:
    """Seconds that a server adds to one step: layer_s * layers + experts_s * routed."""
    return c.layer_s * layers + c.experts_s * routed


def engine_seconds(device: HardwareProfile, model: ModelSpec, engine: str | None = None) -> Seconds | None:
    """What a server adds to one pass over the model beyond its kernels: scheduling, sampling, sorting by experts.

    engine: `vllm`, `sglang`, `trtllm`, or a kernel's name that begins so; else all engines answer together. None on a
    device whose coefficients know of no server, as one that `kvsim calibrate` measured without any.
    """
    choice = engine_choice(device, engine)
    if choice is None:
        return None
    c, routed = choice.coefficient, routed_layers(model)
    seconds = added_seconds(c, model.n_layers, routed)
    parts = ("layers", c.layer_s * model.n_layers), ("experts", c.experts_s * routed)
    return Seconds(seconds, SPREAD, choice.said, lambda: parts)


def token_seconds(device: HardwareProfile, step: Real, prompt: Real, *, concurrency: Real, new_tokens: Real,
                  engine: str | None = None) -> Seconds:
    """Seconds between two tokens of a request in a busy server (TPOT): its step, and the prompts of others.

        step + prefill_share * (concurrency - 1) / new_tokens * prompt

    Each of the other requests is replaced once in `new_tokens` steps, and the new one's prompt runs between them.

    Args:
        step: seconds of a decode step of `concurrency` sequences, `engine_seconds` included. prompt: of one prompt.

    Raises:
        KvsimError: a device whose coefficients know of no server.
    """
    choice = engine_choice(device, engine)
    if choice is None:
        raise KvsimError(f"no engine coefficients for device {device.name} (family {device.family})")
    c = choice.coefficient
    waiting = c.prefill_share * (np.maximum(concurrency, 1.0) - 1.0) / new_tokens * prompt
    low, _, high = c.log_error
    return Seconds(step + waiting, (exp(low), exp(high)), choice.said, lambda: (("step", step), ("prompts", waiting)))
