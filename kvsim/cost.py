"""The only place where work becomes time: one formula for kernels that stream data, one for matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError, shown, word
from kvsim.kernels import chosen, known_dtype, known_format, unit_of
from kvsim.seconds import Parts, Real, Seconds, answer, common_shape
from kvsim.workload import Count, whole

if TYPE_CHECKING:
    from kvsim.coefficients import Coefficient
    from kvsim.hardware import HardwareProfile

__all__ = ["KernelWork", "Seconds", "allreduce_seconds", "attention_seconds", "attention_work", "kernel_seconds",
           "kernel_time", "matmul_seconds", "product_time"]
TILE = 128
"""Query rows of one thread block in prefill."""
SPLIT_ROWS = 64
"""Fewest rows that a kernel gives to one part of a split sequence."""
WALKED = 1024.0
"""Rows of a tile that an unfused kernel decodes at once, each with launches of its own."""
COMBINED_ROWS = 256.0
"""Rows beyond which the parts of a sequence have to be put together again."""


@dataclass(frozen=True, eq=False)
class KernelWork:
    """What a kernel that streams data has to do; every field a number or an array.

    bytes_moved: read and written. elements: stored values taken in. flops: arithmetic. blocks: independent pieces
    (sequences * KV heads in decode). rows: what one piece walks, and so into how many parts it can be split.
    working_set: bytes that a repeated call would find in cache. cut: 1 where a sliding window hides rows, else 0.
    pieces: stores that are walked one after another, of which this is one.
    """

    bytes_moved: Real
    elements: Real = 0.0
    flops: Real = 0.0
    blocks: Real = 1.0
    rows: Real = float(SPLIT_ROWS)
    working_set: Real | None = None
    head_dim: Real = 128
    q_per_kv: Real = 1
    cut: Real = 0.0
    pieces: Real = 1.0


def _memory(device: HardwareProfile, c: Coefficient, bytes_moved: Real, working_set: Real | None) -> Real:
    """Seconds to move the bytes: from the last-level cache while they fit, from DRAM beyond twice that."""
    bandwidth = device.bandwidth_bytes_per_s
    slow = 1.0 / (c.bandwidth_share * bandwidth)
    near = c.cache_rate * device.units * device.clock_hz if c.cache_rate else c.cache_multiple * bandwidth
    if near * slow <= 1.0 or not device.last_level_cache_bytes:
        return bytes_moved * slow
    fast = 1.0 / near
    held = bytes_moved if working_set is None else working_set
    miss = np.clip(held * (1.0 / (c.cache_reach * device.last_level_cache_bytes)) - 1.0, 0.0, 1.0)
    return bytes_moved * (fast + (slow - fast) * miss)


def _by_head_dim(table: tuple[tuple[int, float], ...], head_dim: Real) -> Real:
    """A value between the measured head_dims, linear in log-log; the nearest one outside them."""
    known, values = (np.log(column) for column in zip(*table, strict=True))
    if np.ndim(head_dim) == 0 or len(values) == 1:
        return exp(float(np.interp(np.log(float(np.ravel(head_dim)[0])), known, values)))
    distinct, where = np.unique(head_dim, return_inverse=True)
    return np.exp(np.interp(np.log(distinct), known, values))[where].reshape(np.shape(head_dim))


def _joined(terms: Sequence[Real], power: float) -> Real:
    """(x^p + y^p + ...)^(1/p) for p = 1, 2, 4 or 8."""
    if power <= 1.0:
        return sum(terms[1:], start=terms[0])
    return _smooth_max(terms, 1 if power < 4.0 else 2 if power < 8.0 else 3)


def _smooth_max(terms: Sequence[Real], squarings: int) -> Real:
    """(x^p + y^p + ...)^(1/p) for p = 2^squarings, by multiplications and square roots."""
    total: Real = 0.0
    for term in terms:
        power = term * term
        for _ in range(squarings - 1):
            power *= power
        total = total + power
    for _ in range(squarings):
        total = np.sqrt(total, out=total) if isinstance(total, np.ndarray) else sqrt(total)
    return total


def kernel_time(device: HardwareProfile, c: Coefficient, work: KernelWork, rate_factor: float = 1.0,
                converts: bool = True) -> tuple[Real, Parts]:
    """Seconds and named terms of one kernel with one set of coefficients.

        splits = min(units / blocks, rows / 64, max_splits), 1 or more
        idle   = waves rounded up / waves (prefill: sqrt(1 + 1 / waves^2)), waves = blocks * splits / (units * slots)
        t0 + (memory^p + (idle * conversion)^p + (idle * compute)^p)^(1/p), p = 8 (prefill: 2)
           + wave_s * ceil(blocks / units) + split_s * (1 - 256 / rows, 0 or more) + window_s * cut
           + step_s * ceil(rows / 1024) (decode)

    and for t0, where a store is one of several that are walked, their mean: (t0 + (pieces - 1) * again_s) / pieces.
    A coefficient's `power` replaces p. converts: whether stored values are of another format than the arithmetic's,
    which is what added hardware of a what-if takes over.
    """
    units = float(device.units or 1)
    per_unit = work.blocks * (1.0 / units)
    splits = np.maximum(np.minimum(np.minimum(1.0 / per_unit, c.max_splits), work.rows * (1.0 / SPLIT_ROWS)), 1.0)
    waves = per_unit * splits * (1.0 / c.slots)
    # Decode's blocks are alike and finish together; prefill's causal tiles differ in length and fill each other's gaps.
    causal = c.op == "prefill"
    idle = np.sqrt(1.0 + 1.0 / (waves * waves)) if causal else np.ceil(waves) / waves
    memory = _memory(device, c, work.bytes_moved, work.working_set)
    share = _by_head_dim(c.flops_shares, work.head_dim) if c.flops_shares else c.flops_share
    compute = work.flops * idle * (1.0 / (share * unit_of(device, "bf16")))
    added = device.added if c.op == "decode" else None
    if added is not None:
        memory, compute = added.terms(memory, compute, work.flops * idle, work.bytes_moved, converts)
    launch: Real = (c.t0_s + (work.pieces - 1.0) * c.again_s) / work.pieces if c.again_s else c.t0_s
    parts: list[tuple[str, Real]] = [("launch", launch), ("memory", memory), ("compute", compute)]
    busy = [memory, compute]
    if c.element_rates and device.units and device.clock_hz:
        elements = work.elements
        if np.any(work.q_per_kv > c.group_limit):
            elements = elements * np.where(work.q_per_kv > c.group_limit, work.q_per_kv, 1)
        rate = _by_head_dim(c.element_rates, work.head_dim) * (rate_factor * units * device.clock_hz)
        conversion = elements * idle * (1.0 / rate)
        if added is not None:
            conversion = added.conversion(elements, conversion, converts)
        parts.append(("conversion", conversion))
        busy.append(conversion)
    parts.append(("waves", c.wave_s * np.ceil(per_unit)))
    parts.append(("combine", c.split_s - c.split_s * COMBINED_ROWS / np.maximum(work.rows, COMBINED_ROWS)))
    seconds = _joined(busy, c.power or (2 if causal else 8)) + (parts[-2][1] + launch) + parts[-1][1]
    if c.step_s and c.op == "decode":
        parts.append(("launches", c.step_s * np.ceil(work.rows * (1.0 / WALKED))))
        seconds = seconds + parts[-1][1]
    if c.window_s and np.any(work.cut):
        seconds = seconds + c.window_s * work.cut
    return seconds, tuple(parts)


def product_time(device: HardwareProfile, c: Coefficient, *, m: Real, n: Real, k: Real, dtype: str,
                 working_set: Real | None = None) -> tuple[Real, Parts]:
    """Seconds and named terms of y[m, n] = x[m, k] w[n, k]^T with one set of coefficients.

        t0 + step_s * k / 1024 + sqrt(memory^2 + compute^2)

    and for m = 1, where a kernel of its own does it: single_t0 + memory at its share + single_s * n / 1024.
    """
    facts = known_dtype(dtype)
    weights = 1.0 * n * k
    # Activations are 16 bit; a kernel that quantizes them writes and reads them once more as bytes.
    quantized = 2.0 if facts.quantizes else 0.0
    moved = weights * (facts.bits / 8.0) + m * ((2.0 + quantized) * k + 2.0 * n)
    memory = _memory(device, c, moved, working_set)
    compute = weights * m * (2.0 / (c.flops_share * unit_of(device, dtype)))
    walk: Real = k * (c.step_s / 1024.0)
    launch: Real = c.t0_s
    seconds = np.sqrt(memory * memory + compute * compute) + walk + launch
    if c.single_share and np.any(one := np.equal(m, 1)):
        alone = moved * (1.0 / (c.single_share * device.bandwidth_bytes_per_s))
        each = n * (c.single_s / 1024.0)
        memory, walk = np.where(one, alone, memory), np.where(one, each, walk)
        seconds = np.where(one, c.single_t0_s + alone + each, seconds)
        launch = np.where(one, c.single_t0_s, launch)
    return seconds, (("launch", launch), ("memory", memory), ("compute", compute), ("walk", walk))


def kernel_seconds(device: HardwareProfile, op: str, work: KernelWork, *, format: str = "bf16",
                   conversion: str | None = None, kernel: str | None = None) -> Seconds:
    """Time one kernel that streams data: attention of any method, or elementwise work; arrays broadcast.

    Args:
        op: `decode`, `prefill` or `elementwise`.
        format: what the stored values are (`bf16`, `fp8`, `int4` ...).
        conversion: what reading one takes (`none`, `cast`, `scale`, `unpack`, `lookup`): answers for a format that no
            measured kernel knows, which then borrows the rate of its class with a wider interval.
        kernel: a kernel family; None = the device's default, an unknown one falls back to it and says so.

    Raises:
        KvsimError: unknown op, format or conversion; a quantity that is negative or not finite.
    """
    choice = chosen(device, op, kernel, format, conversion)
    converts = (conversion or known_format(format).conversion) != "none"
    given = {one.name: getattr(work, one.name) for one in fields(KernelWork)}
    sizes = {name: _quantity(value, name) for name, value in given.items() if value is not None}

    def timed(**piece: Any) -> tuple[Real, Parts]:
        return kernel_time(device, choice.coefficient, KernelWork(**piece), choice.rate_factor, converts)

    return answer(timed, sizes, choice)


def _quantity(value: Any, what: str) -> Real:
    array = np.asarray(value, np.float64)
    least = 1.0 if what in ("blocks", "rows", "head_dim", "q_per_kv", "pieces") else 0.0
    if array.size and not (array.min() >= least and array.max() < np.inf):
        raise KvsimError(f"{what} must be {least:g} or more and finite, got {shown(value)}")
    return array if array.ndim else float(array)


def attention_work(phase: str, *, batch: Count, tokens: Count, n_heads: Count, n_kv_heads: Count, head_dim: Count,
                   bits: float, window: Count = 0) -> KernelWork:
    """Bytes, values, arithmetic and blocks of one layer's attention; `bits` a stored value, other sizes as they are."""
    b, h = np.asarray(batch, np.float64), np.asarray(n_heads, np.float64)
    stored = b * n_kv_heads * head_dim * 2.0
    seen = np.where(np.greater(window, 0), np.minimum(tokens, window), tokens) if np.any(window) else tokens
    cut = np.less(seen, tokens) * 1.0 if np.any(window) else 0.0
    group = np.asarray(n_heads) // np.asarray(n_kv_heads)
    if phase == "decode":
        heads = b * h * head_dim
        values = stored * seen
        return KernelWork(values * (bits / 8.0) + 4.0 * heads, values, 4.0 * heads * seen, b * n_kv_heads,
                          seen, None, head_dim, group, cut)
    heads = b * h * head_dim
    tiles = -(-np.asarray(tokens) // TILE)
    seen = np.asarray(seen, np.float64)
    # Tiles on the diagonal and at the window's edge are computed whole.
    pairs = seen * tokens - 0.5 * seen * (seen - 1.0) + (0.25 * TILE) * tokens
    values = stored * tokens
    return KernelWork(values * (bits / 8.0) + 4.0 * heads * tokens, values, 4.0 * heads * pairs, b * h * tiles,
                      float(SPLIT_ROWS), None, head_dim, group, cut)


def attention_seconds(device: HardwareProfile, *, phase: str, batch: Count, tokens: Count, n_heads: Count,
                      n_kv_heads: Count, head_dim: Count, format: str = "bf16", window: Count = 0,
                      kernel: str | None = None) -> Seconds:
    """Time one layer's attention kernel; arrays broadcast.

    Args:
        phase: `decode` (one new token attends `tokens` cached ones) or `prefill` (causal over `tokens`).
        batch: sequences. tokens: rows in the cache, or prompt tokens. window: sliding window, 0 = none.
        format: of the cache. kernel: `vllm`, `fa3`, `trtllm` ...; None = the device's default.

    Raises:
        KvsimError: unknown phase or format; a size that is not a whole number >= 1; shapes that do not broadcast.
    """
    if word(phase, "phase") not in ("decode", "prefill"):
        raise KvsimError(f"phase must be decode or prefill, got {shown(phase)}")
    named = {"batch": batch, "tokens": tokens, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    sizes = {name: whole(value, name, low=1) for name, value in named.items()}
    sizes["window"] = whole(window, "window")
    common_shape(sizes)
    if np.any(np.less(sizes["n_heads"], sizes["n_kv_heads"])):
        raise KvsimError(f"n_heads must be n_kv_heads or more, got {shown(n_heads)} and {shown(n_kv_heads)}")
    facts = known_format(word(format, "format"))
    bits = facts.bits
    choice = chosen(device, phase, kernel, format)

    def timed(**piece: Any) -> tuple[Real, Parts]:
        work = attention_work(phase, bits=bits, **piece)
        return kernel_time(device, choice.coefficient, work, choice.rate_factor, facts.conversion != "none")

    return answer(timed, sizes, choice)


def matmul_seconds(device: HardwareProfile, *, m: Count, n: Count, k: Count, dtype: str = "bf16",
                   kernel: str | None = None, working_set: Real | None = None) -> Seconds:
    """Time y[m, n] = x[m, k] w[n, k]^T; arrays broadcast.

    Args:
        dtype: bf16, fp16, fp32, fp8, fp8_block, int8 and nvfp4 (activations quantized inside), or weights only:
            int8_wo, int4_wo (weight bytes fall, arithmetic stays bf16).
        working_set: bytes that pass by before the same weights are read again; None: the product is repeated.

    Raises:
        KvsimError: unknown dtype; a size that is not a whole number >= 1; shapes that do not broadcast.
    """
    known_dtype(word(dtype, "dtype"))
    sizes: dict[str, Any] = {name: whole(value, name, low=1) for name, value in (("m", m), ("n", n), ("k", k))}
    if working_set is not None:
        sizes["working_set"] = _quantity(working_set, "working_set")
    choice = chosen(device, "matmul", kernel, dtype)

    def timed(**piece: Any) -> tuple[Real, Parts]:
        return product_time(device, choice.coefficient, dtype=dtype, **piece)

    return answer(timed, sizes, choice)


LINK_SHARE = {"switch": 0.83, "mesh": 0.75, "pcie": 0.45}
"""Achieved share of the nominal link: NVLink4 peer to peer 371-377 of 450 GB/s, one MI300X link 48 of 64. Over PCIe
every byte crosses the root twice, 57 of 64 GB/s each time."""
HOP_SECONDS = {"switch": 1.5e-6, "mesh": 2.5e-6, "pcie": 6e-6}
"""Latency of one step of a ring; assumed, hence the wide interval."""
START_SECONDS = 5e-6
DIRECT_SECONDS, DIRECT_SHARE = 8e-6, 0.35
"""Small sums are read from all peers at once. H100, 2, 4 and 8 ranks: 4.5-12 us for 32 KB, 8-24 us for 256 KB with
vLLM's and SGLang's own kernels (sgl-project/sglang PR #2904); a ring wins from about 0.5 MB on."""
MESH_PEERS = 7
"""A mesh's links lead to this many peers (eight accelerators, fully connected)."""


def allreduce_seconds(device: HardwareProfile, bytes: Any, ranks: int) -> Seconds:
    """Time to sum `bytes` (per rank, an array or a number) over `ranks` equal devices: alpha-beta of a ring.

        start + 2 (ranks - 1) hop + 2 (ranks - 1) / ranks * bytes / (share * link)

    or, where ranks reach each other directly and that is less, the time in which each reads all others' bytes.
    A mesh offers only the links to the ranks that take part. Raises KvsimError: a device without links to peers.
    """
    size, n = _quantity(bytes, "bytes"), whole(ranks, "ranks", low=1, high=4096)
    if not isinstance(n, int):
        raise KvsimError("ranks must be one number")
    if n == 1:
        return Seconds(size * 0.0, (1.0, 1.0), "one rank", lambda: (("launch", 0.0),))
    topology = device.topology
    link = device.host_link_bytes_per_s if topology == "pcie" else device.interconnect_bytes_per_s
    if topology not in LINK_SHARE or not link:
        raise KvsimError(f"{device.name} has no known links between devices ({topology}): {n} ranks cannot be timed")
    reach = min(n - 1, MESH_PEERS) / MESH_PEERS if topology == "mesh" else 1.0
    latency = START_SECONDS + 2.0 * (n - 1) * HOP_SECONDS[topology]
    transfer = size * (2.0 * (n - 1) / n / (LINK_SHARE[topology] * reach * link))
    seconds: Real = latency + transfer
    launch: Real = latency
    if topology != "pcie":
        direct = DIRECT_SECONDS + size * ((n - 1) / (DIRECT_SHARE * reach * link))
        launch = np.where(direct < seconds, DIRECT_SECONDS, latency)[()]
        seconds = np.minimum(seconds, direct)
    return Seconds(seconds, (0.6, 1.7), f"{topology}, {n} ranks, published link shares",
                   lambda: (("launch", launch), ("link", seconds - launch)))
