"""The only place where work becomes time: one formula for kernels that stream data, one for matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError, shown
from kvsim.kernels import FORMATS, chosen, known_dtype, known_format
from kvsim.workload import Count, whole

if TYPE_CHECKING:
    from kvsim.coefficients import Coefficient
    from kvsim.hardware import HardwareProfile

Real = Any
"""A float, or an array of float64 of the question's broadcast shape."""


@dataclass(frozen=True, eq=False)
class Seconds:
    """A predicted time: `seconds`, the ends of its 90% interval, what dominates it, and whose coefficients it used.

    Arrays have the broadcast shape of the question. `parts` holds the named terms from which `term` is chosen.
    """

    seconds: Real
    spread: tuple[float, float]
    coefficients: str
    parts: tuple[tuple[str, Real], ...] = ()

    @property
    def low(self) -> Real:
        """Lower end: one time in twenty is measured below it."""
        return self.seconds * self.spread[0]

    @property
    def high(self) -> Real:
        """Upper end: one time in twenty is measured above it."""
        return self.seconds * self.spread[1]

    @property
    def term(self) -> Any:
        """The largest term: `memory`, `conversion`, `compute`, `launch`, `waves` ...; a str, or an array of them."""
        names = np.array([name for name, _ in self.parts])
        values = np.broadcast_arrays(*(value for _, value in self.parts), self.seconds)[:-1]
        found = names[np.argmax(np.stack(values), axis=0)]
        return str(found) if found.ndim == 0 else found


def _hit(device: HardwareProfile, c: Coefficient, working_set: Real) -> Real:
    """Share of the bytes served by the last-level cache: all of them while they fit, none beyond twice the reach."""
    size = c.cache_reach * device.last_level_cache_bytes
    return np.clip(2.0 - working_set / size, 0.0, 1.0)


def _memory(device: HardwareProfile, c: Coefficient, bytes_moved: Real, working_set: Real) -> Real:
    """Seconds to move the bytes, from DRAM and, for what stays resident, from the last-level cache."""
    slow = 1.0 / (c.bandwidth_share * device.bandwidth_bytes_per_s)
    if c.cache_multiple <= c.bandwidth_share or not device.last_level_cache_bytes:
        return bytes_moved * slow
    fast = 1.0 / (c.cache_multiple * device.bandwidth_bytes_per_s)
    return bytes_moved * (slow + (fast - slow) * _hit(device, c, working_set))


def _norm4(*terms: Real) -> Real:
    """Smooth maximum (x^4 + y^4 + ...)^(1/4), by multiplications and two square roots."""
    total: Real = 0.0
    for term in terms:
        square = term * term
        total = total + square * square
    return np.sqrt(np.sqrt(total))


def element_rate(c: Coefficient, head_dim: Count) -> Real:
    """Stored values per unit and clock cycle, linear in log(head_dim) between the measured ones."""
    known, rates = zip(*c.element_rates, strict=True)
    if np.ndim(head_dim) == 0 or len(rates) == 1:
        return float(np.exp(np.interp(np.log(float(np.ravel(head_dim)[0])), np.log(known), np.log(rates))))
    distinct, where = np.unique(head_dim, return_inverse=True)
    found: NDArray[np.float64] = np.exp(np.interp(np.log(distinct), np.log(known), np.log(rates)))[where]
    return found


def peak(device: HardwareProfile, dtype: str) -> float:
    """Dense FLOP/s of a format's arithmetic: its own, or the next wider one that the device has (fp32 last)."""
    for name in (dtype, *FORMATS[dtype].arithmetic):
        if device.peaks.get(name):
            return float(device.peaks[name])
    raise KvsimError(f"device {device.name} states no peak for {dtype} or anything wider")


def kernel_seconds(device: HardwareProfile, op: str, *, bytes_moved: Any, elements: Any = 0.0, flops: Any = 0.0,
                   blocks: Any = 1.0, working_set: Any = None, head_dim: Count = 128, format: str = "bf16",
                   kernel: str | None = None) -> Seconds:
    """Time one kernel that streams data: attention of any method, or elementwise work; arrays broadcast.

        t0 + (memory^4 + conversion^4 + compute^4)^(1/4) + wave_s * ceil(blocks / units)

    Args:
        op: `decode`, `prefill` or `elementwise`.
        bytes_moved: read and written. elements: stored values converted. flops: arithmetic.
        blocks: independent thread blocks (sequences * KV heads for attention).
        working_set: bytes that a repeated call would find in cache; default bytes_moved.
        format: what the stored values are (`bf16`, `fp8`, `int4` ...) or a conversion class
            (`none`, `cast`, `scale`, `unpack`, `lookup`). kernel: a kernel family; None = the device's default.

    Raises:
        KvsimError: unknown op, format, or device family.
    """
    known_format(format)
    c, factor, widen, said = chosen(device, op, kernel, format)
    bytes_moved = np.asarray(bytes_moved, np.float64)
    held = bytes_moved if working_set is None else np.asarray(working_set, np.float64)
    memory = _memory(device, c, bytes_moved, held)
    compute = np.asarray(flops, np.float64) * (1.0 / (c.flops_share * peak(device, "bf16")))
    parts: list[tuple[str, Real]] = [("launch", c.t0_s), ("memory", memory), ("compute", compute)]
    busy = [memory, compute]
    if c.element_rates:
        rate = element_rate(c, head_dim) * factor * device.units * device.clock_hz
        parts.append(("conversion", np.asarray(elements, np.float64) / rate))
        busy.append(parts[-1][1])
    waves = c.wave_s * np.ceil(np.asarray(blocks, np.float64) * (1.0 / device.units))
    parts.append(("waves", waves))
    return _answer(_norm4(*busy) + c.t0_s + waves, c, widen, said, parts)


def _answer(seconds: Real, c: Coefficient, widen: float, said: str, parts: list[tuple[str, Real]]) -> Seconds:
    spread = (exp(c.log_error[0] - widen), exp(c.log_error[2] + widen))
    return Seconds(float(seconds) if np.ndim(seconds) == 0 else seconds, spread, said, tuple(parts))


def attention_seconds(device: HardwareProfile, *, phase: str, batch: Count, tokens: Count, n_heads: Count,
                      n_kv_heads: Count, head_dim: Count, format: str = "bf16", window: Count = 0,
                      kernel: str | None = None) -> Seconds:
    """Time one layer's attention kernel; arrays broadcast.

    Args:
        phase: `decode` (one new token attends `tokens` cached ones) or `prefill` (causal over `tokens`).
        batch: sequences. tokens: rows in the cache, or prompt tokens. window: sliding window, 0 = none.
        format: of the cache. kernel: `vllm`, `fa3`, `trtllm` ...; None = the device's default.

    Raises:
        KvsimError: unknown phase or format; a size that is not a whole number >= 1.
    """
    if phase not in ("decode", "prefill"):
        raise KvsimError(f"phase must be decode or prefill, got {shown(phase)}")
    named = {"batch": batch, "tokens": tokens, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    b, t, h, kv, d = (whole(value, name, low=1) for name, value in named.items())
    w = whole(window, "window")
    bytes_per_value = known_format(format).bits / 8.0
    seen = np.where(w == 0, t, np.minimum(t, w)) if np.any(w) else t
    heads = 1.0 * b * kv * d
    elements = 2.0 * heads * (seen if phase == "decode" else t)
    rows = 1 if phase == "decode" else t
    pairs = seen if phase == "decode" else t * 1.0 * seen - 0.5 * seen * (seen - 1.0)
    return kernel_seconds(
        device, phase, bytes_moved=elements * bytes_per_value + 4.0 * b * h * d * rows, elements=elements,
        flops=4.0 * b * h * d * pairs, blocks=1.0 * b * (kv if phase == "decode" else h * -(-rows // 128)),
        head_dim=d, format=format, kernel=kernel)


def matmul_seconds(device: HardwareProfile, *, m: Count, n: Count, k: Count, dtype: str = "bf16") -> Seconds:
    """Time y[m, n] = x[m, k] w[n, k]^T; arrays broadcast.

        t0 + (bytes_time^2 + flops_time^2)^(1/2)

    Args:
        dtype: bf16, fp16, fp32, fp8 and fp8_block (activations quantized inside), nvfp4, or weights only:
            int8_wo, int4_wo (weight bytes fall, arithmetic stays bf16).

    Raises:
        KvsimError: unknown dtype; a size that is not a whole number >= 1.
    """
    m, n, k = (whole(value, name, low=1) for name, value in (("m", m), ("n", n), ("k", k)))
    facts = known_dtype(dtype)
    c, _, widen, said = chosen(device, "matmul", None, dtype)
    wide = 1.0 * n * k
    moved = wide * (facts.bits / 8.0) + (2.0 * m) * (1.0 * k + n)
    memory = _memory(device, c, moved, moved)
    compute = wide * m * (2.0 / (c.flops_share * peak(device, dtype)))
    seconds = np.sqrt(memory * memory + compute * compute) + c.t0_s
    return _answer(seconds, c, widen, said, [("launch", c.t0_s), ("memory", memory), ("compute", compute)])
