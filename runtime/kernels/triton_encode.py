"""Uniform integers written straight to where they stay, in Triton: range, scale, codes and packing of rows in one pass.

Step by step what runtime/formats/int.py does with tensors, in the same arithmetic, so that the bytes are the same; it
is compiled without fused multiply-adds, which would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLACK = tl.constexpr(1.0 + 2.0**-20)
TINY = tl.constexpr(2.0**-126)
WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a number below 2^22, the sum has no places behind the point, rounded to even."""


@triton.jit
def nearest(x, TYPE: tl.constexpr):
    """x in a type, ties to even; bf16 by its bits, as Triton's interpreter cuts them off."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def narrowed(x, TYPE: tl.constexpr):
    """Scales in their type, rounded up but for what a grid's own steps lose."""
    found = nearest(x, TYPE)
    if tl.float32 != TYPE:
        low = found.to(tl.float32) * SLACK < x
        # of positive floats the next larger one is the next integer
        found = (found.to(tl.int16, bitcast=True) + low.to(tl.int16)).to(TYPE, bitcast=True)
    return found


@triton.jit
def inverse(scale):
    """1 / scale, 0 where the scale is 0 or too small for it."""
    wide = scale.to(tl.float32)
    fine = wide >= TINY
    return tl.where(fine, tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), tl.where(fine, wide, 1.0)), 0.0)


@triton.jit
def rounded(x):
    """The nearest integer, ties to even, as a float."""
    return (x + WHOLE) - WHOLE


@triton.jit(do_not_specialize=["rows", "first"])
def encode(x, codes, scale, low, bad, rows, first, batch_step, head_step, row_step, codes_step, scale_step,
           HEADS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
           PADDED: tl.constexpr, SYMMETRIC: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Rows x [B, H, rows, WIDTH] into rows first, first + 1, ... of the buffers' chunks; bad: set where a scale is not
    finite. Steps are in elements: of x from one sequence, head and row to the next, of buffers from one head."""
    TYPE: tl.constexpr = scale.dtype.element_ty
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    channel = tl.arange(0, PADDED)
    inside = (row < rows)[:, None] & (channel < WIDTH)[None, :]
    start = x + pair // HEADS * batch_step + pair % HEADS * head_step
    values = tl.load(start + row.to(tl.int64)[:, None] * row_step + channel[None, :], mask=inside, other=0.0)
    values = tl.reshape(values.to(tl.float32), [TOGETHER, PADDED // GROUP, GROUP])
    real = tl.broadcast_to((channel < WIDTH)[None, :], [TOGETHER, PADDED])
    real = tl.reshape(real, [TOGETHER, PADDED // GROUP, GROUP])
    group = tl.arange(0, PADDED // GROUP)
    there = (group < GROUPS)[None, :]
    least = tl.where(there, tl.min(tl.where(real, values, float("inf")), 2), 0.0)
    most = tl.where(there, tl.max(tl.where(real, values, float("-inf")), 2), 0.0)
    to = first + row
    kept = (row < rows)[:, None] & there
    places = pair * scale_step + to.to(tl.int64)[:, None] * GROUPS + group[None, :]
    if SYMMETRIC:
        LEVELS: tl.constexpr = 2 ** (BITS - 1) - 1
        peak = tl.maximum(most, -least)
        step = narrowed(tl.where(most == least, peak, tl.div_rn(peak, tl.full(peak.shape, LEVELS, tl.float32))), TYPE)
        wide = rounded(values * inverse(step)[:, :, None])
        wide = tl.minimum(tl.maximum(wide, -LEVELS), LEVELS) + LEVELS
        fine = tl.abs(step.to(tl.float32)) < float("inf")
    else:
        LEVELS: tl.constexpr = 2**BITS - 1
        base = nearest(least, TYPE)
        span = tl.maximum(most - base.to(tl.float32), 0.0)
        step = narrowed(tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)), TYPE)
        wide = rounded((values - base.to(tl.float32)[:, :, None]) * inverse(step)[:, :, None])
        wide = tl.minimum(tl.maximum(wide, 0.0), LEVELS)
        fine = (tl.abs(step.to(tl.float32)) < float("inf")) & (tl.abs(base.to(tl.float32)) < float("inf"))
        tl.store(low + places, base, mask=kept)
    tl.store(scale + places, step, mask=kept)
    wrong = tl.max(tl.max((kept & (fine == 0)).to(tl.int32), 1), 0)
    tl.store(bad, wrong, mask=wrong > 0)
    PER: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = PADDED // PER
    shift = (tl.arange(0, PER) * BITS)[None, None, :]
    found = tl.where(real, wide, 0.0).to(tl.int32)
    packed = tl.sum(tl.reshape(found, [TOGETHER, BYTES, PER]) << shift, 2).to(tl.uint8)
    byte = tl.arange(0, BYTES)
    held = (WIDTH * BITS + 7) // 8
    at = pair * codes_step + to.to(tl.int64)[:, None] * held + byte[None, :]
    tl.store(codes + at, packed, mask=(row < rows)[:, None] & (byte < held)[None, :])
