"""Rows of a packed cache as values, in Triton: where they lie, and how each format's codes become numbers.

Storages are found through tables of pages: two int64 words a page, where its rows of the first (sequence, head) start
and how far the next one's are, both in units of `align` bytes, so that the compiler knows what is aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

ROWS = tl.constexpr(0)
INT = tl.constexpr(1)
GGUF = tl.constexpr(2)
FLOAT8 = tl.constexpr(3)


@dataclass(frozen=True)
class Pages:
    """A buffer's pages as the compiler knows them: rows of a page, elements of a row, bytes that starts divide by."""

    rows: int
    row: int
    align: int


@dataclass(frozen=True)
class Layout:
    """A side as the compiler knows it. form: of encoded rows, as plans.py numbers them; ROWS: there are none.

    padded: the width up to a power of two of 16 or more. group: channels that share a scale; groups: scales of a row;
    unit: tokens that share scales (0: none). step_head, step_channel: of the table of values, whose rows have `levels`.
    held: type of rows in full precision; decoded: what decoded ones are rounded to; factor: what is multiplied.
    """

    form: int
    bits: int
    width: int
    padded: int
    group: int
    groups: int
    unit: int
    symmetric: bool
    scaled: bool
    lows: bool
    levels: int
    step_head: int
    step_channel: int
    scale_type: Any
    held: Any
    decoded: Any
    factor: Any
    data: Pages
    scale: Pages
    rest: Pages


@dataclass(frozen=True)
class Turn:
    """How keys are turned to their positions after they are decoded, as the compiler knows it.

    half: half a head's width, which turns against the other; padded: up to a power of two of 16 or more. based: rows
    are coefficients and are rebuilt first, in the type `rebuilt`; shifted: with a constant row added. maps: from one
    head's to the next's elements.
    """

    half: int
    padded: int
    based: bool
    shifted: bool
    maps: int
    rebuilt: Any


@triton.jit
def pointer(table, row, pair, P: tl.constexpr, TYPE: tl.constexpr):
    """Pointer to the start of a row."""
    ALIGN: tl.constexpr = P.align
    entry = table + 2 * (row // P.rows)
    start = (tl.load(entry) + pair * tl.load(entry + 1)) * ALIGN
    return tl.multiple_of(start.to(tl.pointer_type(TYPE)), ALIGN) + row % P.rows * P.row


@triton.jit
def pointers(table, first, rows, ok, pair, P: tl.constexpr, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    """Pointers [n] to the starts of rows [n], the first of which is `first`. WHOLE: they lie in one page."""
    ALIGN: tl.constexpr = P.align
    if WHOLE:
        found = pointer(table, first, pair, P, TYPE) + (rows - first) * P.row
    else:
        entry = table + 2 * (rows // P.rows)
        start = (tl.load(entry, mask=ok, other=0) + pair * tl.load(entry + 1, mask=ok, other=0)) * ALIGN
        base = tl.multiple_of(start.to(tl.pointer_type(TYPE)), ALIGN)
        found = base + rows % P.rows * P.row
    return found


@triton.jit
def codes_at(at, ok, C0: tl.constexpr, COLS: tl.constexpr, L: tl.constexpr):
    """Codes [n, COLS] uint8 of channels C0, C0 + 1, ... of packed rows that start at `at` [n, 1]."""
    if 8 % L.bits == 0:
        byte = C0 * L.bits // 8 + tl.arange(0, COLS * L.bits // 8)[None, :]
        raw = tl.load(at + byte, mask=ok[:, None] & (byte < L.data.row), other=0)
        if L.bits == 8:
            codes = raw
        elif L.bits == 4:
            codes = tl.interleave(raw & 15, raw >> 4)
        elif L.bits == 2:
            even = tl.interleave(raw & 3, (raw >> 4) & 3)
            codes = tl.interleave(even, tl.interleave((raw >> 2) & 3, raw >> 6))
        else:
            # of eight planes those whose numbers differ in the lowest bit only become neighbours last
            even = tl.interleave(tl.interleave(raw & 1, (raw >> 4) & 1), tl.interleave((raw >> 2) & 1, (raw >> 6) & 1))
            odd = tl.interleave(
                tl.interleave((raw >> 1) & 1, (raw >> 5) & 1), tl.interleave((raw >> 3) & 1, (raw >> 7) & 1)
            )
            codes = tl.interleave(even, odd)
    else:
        bit = (C0 + tl.arange(0, COLS)[None, :]) * L.bits
        byte = bit // 8
        low = tl.load(at + byte, mask=ok[:, None] & (byte < L.data.row), other=0).to(tl.int32)
        high = tl.load(at + byte + 1, mask=ok[:, None] & (byte + 1 < L.data.row), other=0).to(tl.int32)
        codes = (((low | (high << 8)) >> (bit % 8)) & ((1 << L.bits) - 1)).to(tl.uint8)
    return codes


@triton.jit
def following(at, COUNT: tl.constexpr, TYPE: tl.constexpr):
    """COUNT values that lie one after another; 16-bit ones come in pairs, as less than a word is not fetched ahead."""
    if tl.float32 == TYPE:
        found = tl.load(at + tl.arange(0, COUNT))
    else:
        words = tl.load(at.to(tl.pointer_type(tl.uint32)) + tl.arange(0, COUNT // 2))
        low = (words & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
        found = tl.interleave(low, (words >> 16).to(tl.uint16).to(TYPE, bitcast=True))
    return found


@triton.jit
def scales_at(table, first, rows, ok, pair, C0: tl.constexpr, COLS: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):
    """Scales or minima as they broadcast over [n, COLS], fp32."""
    P: tl.constexpr = L.scale
    TYPE: tl.constexpr = L.scale_type
    GROUP: tl.constexpr = L.group
    GROUPS: tl.constexpr = L.groups
    channel = C0 + tl.arange(0, COLS)[None, :]
    if L.unit > 0:
        if WHOLE and rows.shape[0] <= L.unit:  # powers of two: all rows share them
            at = pointer(table, first // L.unit, pair, P, TYPE)
            if L.width >= C0 + COLS and L.width % 2 == 0 and C0 % 2 == 0:
                found = following(at + C0, COLS, TYPE)[None, :]
            else:
                found = tl.load(at + channel, mask=channel < L.width, other=0.0)
        else:
            at = pointers(table, first // L.unit, rows // L.unit, ok, pair, P, TYPE, WHOLE)
            found = tl.load(at[:, None] + channel, mask=ok[:, None] & (channel < L.width), other=0.0)
    elif WHOLE and C0 == 0 and (GROUPS == 1 or GROUPS * GROUP == COLS):
        flat = following(pointer(table, first, pair, P, TYPE), rows.shape[0] * GROUPS, TYPE)
        few = tl.reshape(flat, [rows.shape[0], GROUPS])
        found = few if GROUPS == 1 else spread(few, GROUP)
    else:
        at = pointers(table, first, rows, ok, pair, P, TYPE, WHOLE)
        if GROUPS == 1 or C0 // GROUP == (C0 + COLS - 1) // GROUP:
            found = tl.load(at + C0 // GROUP * (GROUPS > 1), mask=ok, other=0.0)[:, None]
        elif COLS % GROUP == 0 and C0 % GROUP == 0:
            of = C0 // GROUP + tl.arange(0, COLS // GROUP)[None, :]
            found = spread(tl.load(at[:, None] + of, mask=ok[:, None] & (of < GROUPS), other=0.0), GROUP)
        else:
            found = tl.load(at[:, None] + channel // GROUP, mask=ok[:, None] & (channel < L.width), other=0.0)
    return found.to(tl.float32)


@triton.jit
def spread(few, GROUP: tl.constexpr):
    """[n, groups] -> [n, groups * GROUP], each GROUP times."""
    wide = tl.broadcast_to(few[:, :, None], [few.shape[0], few.shape[1], GROUP])
    return tl.reshape(wide, [few.shape[0], few.shape[1] * GROUP])


@triton.jit
def gguf_at(table, first, rows, ok, pair, C0: tl.constexpr, COLS: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):
    """Values [n, COLS] of llama.cpp's blocks: 32 values, scale (and minimum) before the codes.

    Blocks are whole 16-bit words, and no more than that is aligned.
    """
    P: tl.constexpr = L.scale
    N: tl.constexpr = rows.shape[0]
    HEAD: tl.constexpr = 2 if L.lows else 1
    SIZE: tl.constexpr = HEAD + 2 * L.bits
    at = pointers(table, first, rows, ok, pair, P, tl.float16, WHOLE)
    block = C0 // 32 + tl.arange(0, COLS // 32)
    good = ok[:, None] & (block * 32 < L.width)[None, :]
    start = at[:, None] + (block * SIZE)[None, :]
    scale = spread(tl.load(start, mask=good, other=0.0), 32).to(tl.float32)
    word = HEAD + tl.arange(0, 2 * L.bits)
    words = (start[:, :, None] + word[None, None, :]).to(tl.pointer_type(tl.uint16))
    raw = tl.load(words, mask=good[:, :, None], other=0)
    raw = tl.interleave(raw & 255, raw >> 8)
    if L.bits == 8:
        values = tl.reshape(raw, [N, COLS]).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32) * scale
    else:
        # byte j of a block holds value j and value j + 16
        codes = tl.permute(tl.join(raw & 15, raw >> 4), [0, 1, 3, 2])
        values = tl.reshape(codes, [N, COLS]).to(tl.float32)
        if L.lows:
            values = values * scale + spread(tl.load(start + 1, mask=good, other=0.0), 32).to(tl.float32)
        else:
            values = (values - 8.0) * scale
    return values


@triton.jit
def float8_at(codes, L: tl.constexpr):
    """Values of 8-bit floats through fp16, whose bits they share but for the exponent's bias: on every device."""
    wide = codes.to(tl.uint16)
    if L.bits == 4:  # e5m2
        values = (wide << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # e4m3: fp16's exponent counts from 15, this one's from 7
        halves = ((wide & 128) << 8) | ((wide & 127) << 7)
        values = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return values


@triton.jit
def rounded(values, L: tl.constexpr):
    """As the formats' twins finish rows: rounded to the cache's dtype, without making infinities."""
    if L.decoded == tl.float16:
        values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    return values.to(L.decoded).to(L.factor)


@triton.jit
def encoded_at(data, scale, low, table, first, rows, ok, pair, head, C0: tl.constexpr, COLS: tl.constexpr,
               L: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Values [n, COLS] of channels C0 ... of encoded rows [n]; those that are not ok are finite numbers."""
    P: tl.constexpr = L.data
    at = pointers(data, first, rows, ok, pair, P, tl.uint8, WHOLE)[:, None]
    if L.form == GGUF:
        values = gguf_at(data, first, rows, ok, pair, C0, COLS, L, WHOLE)
    elif L.form == INT:
        values = codes_at(at, ok, C0, COLS, L).to(tl.float32)
        if L.symmetric:
            values -= (1 << (L.bits - 1)) - 1
        values = values * scales_at(scale, first, rows, ok, pair, C0, COLS, L, WHOLE)
        if not L.symmetric:
            values += scales_at(low, first, rows, ok, pair, C0, COLS, L, WHOLE)
    elif L.form == FLOAT8:
        byte = C0 + tl.arange(0, COLS)[None, :]
        values = float8_at(tl.load(at + byte, mask=ok[:, None] & (byte < L.data.row), other=0), L)
        if L.levels > 0:
            values = values * tl.load(table)
        elif L.scaled:
            values = values * scales_at(scale, first, rows, ok, pair, C0, COLS, L, WHOLE)
    else:
        channel = C0 + tl.arange(0, COLS)[None, :]
        book = table + head * L.step_head + tl.minimum(channel, L.width - 1) * L.step_channel
        values = tl.load(book + codes_at(at, ok, C0, COLS, L).to(tl.int32)).to(tl.float32)
        if L.scaled:
            values = values * scales_at(scale, first, rows, ok, pair, C0, COLS, L, WHOLE)
            values += scales_at(low, first, rows, ok, pair, C0, COLS, L, WHOLE)
    return rounded(values, L)


@triton.jit
def rest_at(rest, first, rows, ok, pair, C0: tl.constexpr, COLS: tl.constexpr, L: tl.constexpr, WHOLE: tl.constexpr):
    """Values [n, COLS] of channels C0 ... of rows in full precision."""
    P: tl.constexpr = L.rest
    TYPE: tl.constexpr = L.held
    channel = C0 + tl.arange(0, COLS)[None, :]
    at = pointers(rest, first, rows, ok, pair, P, TYPE, WHOLE)[:, None]
    return tl.load(at + channel, mask=ok[:, None] & (channel < L.width), other=0.0).to(L.factor)
