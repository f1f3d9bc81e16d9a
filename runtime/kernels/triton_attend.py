"""Decode attention over a packed cache in Triton: split over tokens, queries of a head together, splits combined."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.triton_rows import ROWS, Layout, encoded_at, rest_at

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)
"""The largest logit of no rows: finite, so that nothing is subtracted from itself as an infinity."""
__all__ = ["Layout", "combine", "split"]


@triton.jit
def tile(data, scale, low, rest, table, encoded, first, rows, ok, pair, head, C0: tl.constexpr, COLS: tl.constexpr,
         L: tl.constexpr, PURE: tl.constexpr):  # fmt: skip
    """Values [n, COLS] of rows [n]. PURE: all are encoded (or none ever are), follow `first` and share a page."""
    if L.form == ROWS:
        values = rest_at(rest, first, rows, ok, pair, C0, COLS, L, PURE)
    elif PURE:
        values = encoded_at(data, scale, low, table, first, rows, ok, pair, head, C0, COLS, L, True)
    else:
        early, late = ok & (rows < encoded), ok & (rows >= encoded)
        coded = encoded_at(data, scale, low, table, first, rows, early, pair, head, C0, COLS, L, False)
        full = rest_at(rest, first, tl.maximum(rows - encoded, 0), late, pair, C0, COLS, L, False)
        values = tl.where(early[:, None], coded, full)
    return values


@triton.jit
def softened(scores, ok, scaling, softcap, CAPPED: tl.constexpr):
    """Logits in powers of two; those that are not ok take no weight."""
    logits = scores * scaling
    if CAPPED:
        logits = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / softcap)))
    return tl.where(ok[None, :], logits * LOG2E, float("-inf"))


@triton.jit
def product(a, b, FACTOR: tl.constexpr):
    """a @ b in fp32; fp32 factors as three products of shorter ones, which lose nothing that shows."""
    if tl.float32 == FACTOR:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def rebuilt_at(coefficients, maps, offset, C0: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    """Channels C0 to C0 + half of keys [n, T.padded] from coefficients [n, r]."""
    WIDE: tl.constexpr = K.padded
    COLS: tl.constexpr = T.padded
    KF: tl.constexpr = K.factor
    row, column = tl.arange(0, WIDE)[:, None], tl.arange(0, COLS)[None, :]
    here = maps + row * (2 * T.half) + C0 + column
    found = product(coefficients, tl.load(here, mask=(row < K.width) & (column < T.half), other=0.0).to(KF), KF)
    if T.shifted:
        found += tl.load(offset + C0 + column, mask=column < T.half, other=0.0).to(tl.float32)
    return found.to(T.rebuilt)


@triton.jit
def turned(q, q2, data, scale, low, rest, table, encoded, maps, offset, angles, shift, first, rows, ok, pair, head,
           K: tl.constexpr, T: tl.constexpr, PURE: tl.constexpr):  # fmt: skip
    """Scores of keys that are turned to their positions, the first row's being `shift`, block by block."""
    WIDE: tl.constexpr = K.padded
    COLS: tl.constexpr = T.padded
    HALF: tl.constexpr = T.half
    KF: tl.constexpr = K.factor
    if T.based:
        coefficients = tile(data, scale, low, rest, table, encoded, first, rows, ok, pair, head, 0, WIDE, K, PURE)
        ahead = rebuilt_at(coefficients, maps, offset, 0, K, T).to(tl.float32)
        behind = rebuilt_at(coefficients, maps, offset, HALF, K, T).to(tl.float32)
    else:
        ahead = tile(data, scale, low, rest, table, encoded, first, rows, ok, pair, head, 0, COLS, K, PURE)
        behind = tile(data, scale, low, rest, table, encoded, first, rows, ok, pair, head, HALF, COLS, K, PURE)
        ahead, behind = ahead.to(tl.float32), behind.to(tl.float32)
    column = tl.arange(0, COLS)[None, :]
    at = angles + (shift + rows)[:, None] * (2 * HALF) + column
    good = ok[:, None] & (column < HALF)
    cos, sin = tl.load(at, mask=good, other=0.0), tl.load(at + HALF, mask=good, other=0.0)
    scores = product(q, tl.trans((ahead * cos - behind * sin).to(T.rebuilt).to(KF)), KF)
    return scores + product(q2, tl.trans((behind * cos + ahead * sin).to(T.rebuilt).to(KF)), KF)


@triton.jit
def block(q, first, rows, ok, k_data, k_scale, k_low, k_rest, k_table, v_data, v_scale, v_low, v_rest, v_table,
          k_encoded, v_encoded, q2, maps, offset, angles, shift, pair, head, scaling, softcap, most, total, sums,
          CAPPED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, PURE: tl.constexpr):  # fmt: skip
    """The running softmax moved on by a block of rows."""
    WIDE: tl.constexpr = K.padded
    DEEP: tl.constexpr = V.padded
    KF: tl.constexpr = K.factor
    VF: tl.constexpr = V.factor
    if T is None:
        keys = tile(k_data, k_scale, k_low, k_rest, k_table, k_encoded, first, rows, ok, pair, head, 0, WIDE, K, PURE)
        scores = product(q, tl.trans(keys), KF)
    else:
        scores = turned(q, q2, k_data, k_scale, k_low, k_rest, k_table, k_encoded, maps, offset, angles, shift, first,
                        rows, ok, pair, head, K, T, PURE)  # fmt: skip
    logits = softened(scores, ok, scaling, softcap, CAPPED)
    higher = tl.maximum(most, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    shrink = tl.exp2(most - higher)
    values = tile(v_data, v_scale, v_low, v_rest, v_table, v_encoded, first, rows, ok, pair, head, 0, DEEP, V, PURE)
    sums = sums * shrink[:, None] + product(weights.to(VF), values, VF)
    return higher, total * shrink + tl.sum(weights, 1), sums


@triton.jit(do_not_specialize=["k_encoded", "v_encoded", "pure", "each", "count", "start0", "rows0", "start1", "shift"])
def split(q, sums_out, ends_out, chosen, chosen_at, k_data, k_scale, k_low, k_rest, k_table, v_data, v_scale, v_low,
          v_rest, v_table, k_encoded, v_encoded, pure, each, count, start0, rows0, start1, shift, maps, maps_step,
          offset, angles, scaling, softcap, HEADS: tl.constexpr, QUERIES: tl.constexpr, MODE: tl.constexpr,
          CAPPED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, QB: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """One split of the rows of one (sequence, head): sums of values, largest logit and sum of weights.

    q [pairs, QUERIES, K.width], sums_out [splits, pairs, QUERIES, V.width], ends_out [splits, pairs, QUERIES, 2].
    MODE 0: rows 0 to count; 1: rows0 rows from start0 on, the others from start1 on; 2: rows chosen[chosen_at[pair]]
    to chosen[chosen_at[pair + 1]]. `pure`: rows before it are encoded on both sides, where a side encodes at all.
    With T keys are turned after they are decoded: q is [pairs, QUERIES, 2 * T.half], maps [B or 1, H, K.width, same],
    `maps_step` elements from a sequence to the next (offset alike, one row a head), angles [positions, 2, T.half].
    """
    WIDE: tl.constexpr = K.padded if T is None else T.padded
    WIDTH: tl.constexpr = K.width if T is None else 2 * T.half
    PART: tl.constexpr = K.width if T is None else T.half
    DEEP: tl.constexpr = V.padded
    pair = tl.program_id(0).to(tl.int64)
    part, which = tl.program_id(1), tl.program_id(2) * QB + tl.arange(0, QB)
    head = pair % HEADS
    channel = tl.arange(0, WIDE)[None, :]
    mine = (which < QUERIES)[:, None]
    asked = q + (pair * QUERIES + which)[:, None] * WIDTH + channel
    queries = tl.load(asked, mask=mine & (channel < PART), other=0.0).to(K.factor)
    behind = queries
    if T is not None:
        behind = tl.load(asked + PART, mask=mine & (channel < PART), other=0.0).to(K.factor)
        maps += pair // HEADS * maps_step + head * T.maps
        offset += pair // HEADS * (maps_step // K.width) + head * WIDTH
    low = part * each
    base = chosen
    if MODE == 2:
        begin = tl.load(chosen_at + pair)
        count = (tl.load(chosen_at + pair + 1) - begin).to(tl.int32)
        base = chosen + begin
    high = tl.minimum(low + each, count)
    most = tl.full([QB], NOTHING, tl.float32)
    total = tl.zeros([QB], tl.float32)
    sums = tl.zeros([QB, DEEP], tl.float32)
    lane = tl.arange(0, BLOCK)
    edge = low
    if MODE == 0:
        edge = tl.maximum(low, tl.minimum(high, pure) // BLOCK * BLOCK)
        every = tl.full([BLOCK], 1, tl.int1)
        for first in range(low, edge, BLOCK):
            most, total, sums = block(
                queries, first, first + lane, every, k_data, k_scale, k_low, k_rest, k_table, v_data, v_scale, v_low,
                v_rest, v_table, k_encoded, v_encoded, behind, maps, offset, angles, shift, pair, head, scaling,
                softcap, most, total, sums, CAPPED, K, V, T, True)  # fmt: skip
    for first in tl.range(edge, high, BLOCK, num_stages=1):
        at = first + lane
        ok = at < high
        if MODE == 2:
            rows = tl.load(base + at, mask=ok, other=0).to(tl.int32)
        elif MODE == 1:
            rows = tl.where(at < rows0, start0 + at, start1 + at - rows0)
        else:
            rows = at
        most, total, sums = block(
            queries, first, rows, ok, k_data, k_scale, k_low, k_rest, k_table, v_data, v_scale, v_low, v_rest, v_table,
            k_encoded, v_encoded, behind, maps, offset, angles, shift, pair, head, scaling, softcap, most, total, sums,
            CAPPED, K, V, T, False)  # fmt: skip
    pairs = tl.num_programs(0)
    to = (part.to(tl.int64) * pairs + pair) * QUERIES + which
    column = tl.arange(0, DEEP)[None, :]
    tl.store(sums_out + to[:, None] * V.width + column, sums, mask=mine & (column < V.width))
    tl.store(ends_out + to * 2, most, mask=which < QUERIES)
    tl.store(ends_out + to * 2 + 1, total, mask=which < QUERIES)


@triton.jit(do_not_specialize=["splits"])
def combine(sums_in, ends_in, sinks, out, splits, QUERY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
            SINKS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Output row [WIDTH] of one query from what its splits found, TOGETHER splits at a time."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    lane = tl.arange(0, TOGETHER)
    most = tl.full([], NOTHING, tl.float32)
    total = tl.zeros([], tl.float32)
    if SINKS:
        most = tl.load(sinks + row % QUERY_HEADS) * LOG2E
        total += 1.0
    sums = tl.zeros([PADDED], tl.float32)
    for first in range(0, splits, TOGETHER):
        part = first + lane
        at = part.to(tl.int64) * rows + row
        here = tl.load(ends_in + at * 2, mask=part < splits, other=NOTHING)
        weight = tl.load(ends_in + at * 2 + 1, mask=part < splits, other=0.0)
        higher = tl.maximum(most, tl.max(here, 0))
        times, shrink = tl.exp2(here - higher), tl.exp2(most - higher)
        good = (part < splits)[:, None] & (column < WIDTH)[None, :]
        found = tl.load(sums_in + at[:, None] * WIDTH + column[None, :], mask=good, other=0.0)
        sums = sums * shrink + tl.sum(found * times[:, None], 0)
        total = total * shrink + tl.sum(times * weight, 0)
        most = higher
    tl.store(out + row * WIDTH + column, (sums / total).to(out.dtype.element_ty), mask=column < WIDTH)
