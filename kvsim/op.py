"""One kernel-sized piece of work, and how long a device takes for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kvsim import cost
from kvsim.hardware import HardwareProfile
from kvsim.kernels import kernel_family


@dataclass(frozen=True)
class Op:
    """One kernel, run `count` times in a phase. Matrix products have m, n, k; the others bytes, elements, flops.

    blocks: independent pieces (sequences * KV heads). rows: what one piece walks. formats: (format, conversion) of the
    stored values, both where keys and values differ. keys: names under which a device may know this very work, tried
    before formats. kernels: families that do it, the best first, where a device has measured one with this
    format; none: the device's default. held: rows held for each row attended; a kernel that cannot gather reads all.
    """

    name: str
    kind: Literal["matmul", "decode", "prefill", "elementwise"]
    count: Any = 1
    bytes: Any = 0.0
    flops: Any = 0.0
    elements: Any = 0.0
    blocks: Any = 1.0
    rows: Any = 64.0
    head_dim: int = 128
    q_per_kv: float = 1.0
    windowed: bool = False
    formats: tuple[tuple[str, str], ...] = (("bf16", "none"),)
    m: Any = 1
    n: Any = 1
    k: int = 1
    dtype: str = "bf16"
    keys: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    held: Any = 1.0


def op_seconds(hardware: HardwareProfile, op: Op, family: str | None = None) -> list[cost.Seconds]:
    """One op's time, in parts to be added up: keys and values in different formats count half in each.

    family: the attention kernels asked for; None: those that the op can use and the device has measured.
    """
    if op.kind == "matmul":
        product = _product if np.ndim(op.m) == np.ndim(op.n) == 0 else _product.__wrapped__
        return [product(hardware, op.m, op.n, op.k, op.dtype)]
    work = cost.KernelWork(
        bytes_moved=op.bytes,
        elements=op.elements,
        flops=op.flops,
        blocks=np.maximum(op.blocks, 1.0),
        rows=op.rows,
        head_dim=op.head_dim,
        q_per_kv=max(op.q_per_kv, 1.0),
        cut=float(op.windowed),
    )
    known = _measured_kernels(hardware, op.kind)
    formats = tuple((key, "none") for key in op.keys if ("", key) in known) or op.formats
    times = []
    for form, how in formats:
        kernel = family or next((k for k in op.kernels if (k, form) in known), None)
        # no gathering in an unfused kernel: all rows are decoded, and those that are not attended masked
        held = op.held if kernel and kernel_family(kernel)[2] == "eager" else 1.0
        piece = replace(work, elements=op.elements * held, flops=op.flops * held, rows=op.rows * held)
        times.append(cost.kernel_seconds(hardware, op.kind, piece, format=form, conversion=how, kernel=kernel))
    if len(times) == 1:
        return times
    share = 1.0 / len(times)
    return [replace(t, seconds=t.seconds * share) for t in times]


@lru_cache(maxsize=512)
def _measured_kernels(hardware: HardwareProfile, op: str) -> frozenset[tuple[str, str]]:
    """(kernel family, format) of a device's coefficients for an op, and ("", format) of any family."""
    rows = [c for c in hardware.coefficients if c.op == op]
    return frozenset((kernel_family(c.kernel)[2], c.format) for c in rows) | frozenset(("", c.format) for c in rows)


@lru_cache(maxsize=8192)
def _product(hardware: HardwareProfile, m: Any, n: Any, k: int, dtype: str) -> cost.Seconds:
    """A matrix product's time; the same ones come with every method of a plan."""
    return cost.matmul_seconds(hardware, m=m, n=n, k=k, dtype=dtype)
