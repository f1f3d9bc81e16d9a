"""Who lends coefficients to a device family that nobody measured, and what is published about such a family."""

from __future__ import annotations

from dataclasses import replace

from kvsim.coefficients import Coefficient

LENDERS = {
    "ada": "blackwell-gddr", "ampere-gddr": "blackwell-gddr", "turing": "ampere-dc", "volta": "ampere-dc",
    "cdna": "hopper", "rdna": "blackwell-gddr", "gaudi": "hopper", "trainium": "hopper", "tpu": "hopper",
    "apple": "blackwell-gddr", "unified-nvidia": "blackwell-gddr", "cpu": "ampere-dc",
}  # fmt: skip
"""The nearest measured family: same memory kind and kernels where possible."""
MEMORY_SHARES = {
    "ada": 0.90, "ampere-gddr": 0.90, "turing": 0.85, "volta": 0.83, "cdna": 0.83, "rdna": 0.84, "gaudi": 0.85,
    "trainium": 0.80, "tpu": 0.85, "apple": 0.80, "unified-nvidia": 0.85, "cpu": 0.82,
}  # fmt: skip
"""Achieved share of datasheet bandwidth. V100 .83 (ginkgo #164), RTX 3090 .90, RTX 4090 .914, MI210 .85, MI300X .79,
MI350X .86-.90, Strix Halo .84, M1 Max .78-.83, GB10 .85, Orin .75, Thor .94, EPYC 9654 .82 (STREAM); .85 elsewhere."""
GEMM_SHARES = {"cdna": 0.58, "gaudi": 0.80, "trainium": 0.60, "tpu": 0.70, "apple": 0.70, "rdna": 0.60, "turing": 0.60,
               "volta": 0.70, "cpu": 0.50}
"""Best found share of dense bf16 peak in large products: MI300X .51, MI325X .60, MI355X .62-.68, Gaudi3 .74, Gaudi2 .97
(ml-engineering's MAMF tables), T4 .65, V100S .71; the others are the middle of that range, not measured."""

CACHE_GAIN = {"ada": 0.82}
"""Cache bandwidth of a unit and clock relative to the lender's: about 4x DRAM's on an L40S (142 units at 2,520 MHz over
864 GB/s) where the RTX PRO 6000 (188 at 2,430 over 1,792) has 3x."""
OTHER_UNITS = ("gaudi", "trainium", "tpu")
"""Families whose units are few large matrix engines."""

FOREIGN = ("cdna", "rdna", "gaudi", "trainium", "tpu", "apple")
"""Families of other makers than their lenders'. Carried to the one that was measured, an Arc Pro B60, attention is off
by 60% (26% for shapes of language models), so that their intervals take its errors in."""

_CLOCK = 2.6e9
_VALUES = 2 * 8 * 128 * 16_384
"""Stored values of the measured case: 8 KV heads of 128, keys and values, 16,384 tokens."""


def _rate(milliseconds: float) -> tuple[tuple[int, float], ...]:
    """Values per core and clock, from two cores of about 2.6 GHz."""
    return ((128, _VALUES / (milliseconds * 1e-3) / (2 * _CLOCK)),)


def CPU(rows: list[Coefficient]) -> list[Coefficient]:
    """A CPU's coefficients: attention from measured kernels on two AVX-512 cores, products from published shares.

    Medians at 4 queries a head: SDPA bf16 4.5 ms, fp32 7.2; fused int8 1.8, int4 3.4; dequantize-then-attend int8 48.
    """
    base = Coefficient("decode", "*/sdpa", "bf16", 20e-6, 0.74, 0.3, slots=1.0, max_splits=256.0, rows=1,
                       log_error=(-0.6, 0.0, 0.6), date="2026-11-29",
                       source="two AVX-512 cores, 16,384 tokens, 8 x 4 x 128, medians; bandwidth: STREAM on EPYC 9654")
    measured = [("*/sdpa", "bf16", 4.5), ("*/sdpa", "fp32", 6.6), ("*/fused", "int8", 1.8),
                ("*/fused", "int4", 3.4), ("*/eager", "int8", 48.0), ("*/eager", "bf16", 4.5)]
    decode = [replace(base, kernel=k, format=f, element_rates=_rate(ms)) for k, f, ms in measured]
    prefill = replace(base, op="prefill", format="*", flops_share=0.3, flops_shares=(), element_rates=(), rows=0,
                      log_error=(-0.9, 0.0, 0.9), source="no measurement: 0.3 of peak assumed, wide interval")
    other = [replace(c, t0_s=max(c.t0_s, 5e-6), step_s=0.0, cache_multiple=0.0, cache_rate=0.0,
                     log_error=(-0.9, 0.0, 0.9), memory_log_error=(-0.6, 0.0, 0.6))
             for c in rows if c.op in ("matmul", "elementwise")]
    return [*decode, prefill, *other]
