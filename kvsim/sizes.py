"""Sizes as people type them: `128k`, ranges `4k:128k:x2` and `0:8k:1k`, byte counts with a unit; numbers only."""

from __future__ import annotations

import re
from fractions import Fraction
from math import floor, log, log1p

from kvsim.errors import KvsimError, shown
from kvsim.workload import MAX_COUNT

MAX_POINTS = 2_000_000
"""Values that one range or list may name."""

_COUNT = re.compile(r"([0-9][0-9_]*)(\.[0-9]+)?\s*([kmg]?)", re.IGNORECASE)
_BYTES = re.compile(r"([0-9][0-9_]*)(\.[0-9]+)?\s*(b|[kmgt]|[kmgt]i?b)?", re.IGNORECASE)
_SCALE = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_count(text: str, what: str = "a size") -> int:
    """A whole number as written: `4096`, `4_096`, `128k` (131072), `1.5k` (1536), `1m` (1048576).

    Raises KvsimError naming `what` for anything else, and for counts beyond MAX_COUNT.
    """
    found = _COUNT.fullmatch(text.strip()) if len(text) <= 64 else None
    if not found:
        raise KvsimError(f"{what}: cannot read {shown(text)}; write a whole number such as 4096 or 128k")
    value = _number(found[1], found[2]) * _SCALE[found[3].lower()]
    return _whole(value, text, what)


def parse_bytes(text: str, what: str = "bytes") -> int:
    """Bytes as written: `536870912`, `512MiB`, `1.5GiB`; `GB` is 10^9, `GiB` and a bare `g` are 2^30.

    Raises KvsimError naming `what` for anything else.
    """
    found = _BYTES.fullmatch(text.strip()) if len(text) <= 64 else None
    if not found:
        raise KvsimError(f"{what}: cannot read {shown(text)}; write bytes such as 536870912, 512MiB or 1.5GB")
    unit = (found[3] or "b").lower()
    power = _POWER.get(unit[0], 0)
    base = 1000 if len(unit) == 2 else 1024
    return _whole(_number(found[1], found[2]) * base**power, text, what)


def parse_counts(text: str, what: str = "a size") -> tuple[int, ...]:
    """Counts as a comma list whose entries are counts or ranges, in the order written, each once.

    `a:b:x2` multiplies (any factor above 1), `a:b:1024` adds; b belongs to the range where a step meets it.
    Raises KvsimError naming `what`.
    """
    found: dict[int, None] = {}
    for piece in text.split(","):
        if ":" in piece:
            found.update(dict.fromkeys(_range(piece.strip(), what)))
        else:
            found[parse_count(piece, what)] = None
        if len(found) > MAX_POINTS:
            raise KvsimError(f"{what}: more than {MAX_POINTS:,} values in {shown(text)}; take a larger step")
    return tuple(found)


def _range(text: str, what: str) -> tuple[int, ...]:
    ends = text.split(":")
    if len(ends) != 3:
        raise KvsimError(f"{what}: cannot read the range {shown(text)}; write first:last:x2 or first:last:1024")
    first, last = parse_count(ends[0], what), parse_count(ends[1], what)
    if first > last:
        raise KvsimError(f"{what}: the range {shown(text)} runs backwards; write the smaller size first")
    step = ends[2].strip()
    return _geometric(first, last, step[1:], text, what) if step[:1] in ("x", "X") else _linear(first, last, step, what)


def _linear(first: int, last: int, step: str, what: str) -> tuple[int, ...]:
    width = parse_count(step, f"{what}: step")
    if width < 1:
        raise KvsimError(f"{what}: a step must be 1 or more, got {shown(step)}")
    if (last - first) // width >= MAX_POINTS:
        raise KvsimError(f"{what}: more than {MAX_POINTS:,} values; take a larger step than {shown(step)}")
    return tuple(range(first, last + 1, width))


def _geometric(first: int, last: int, factor: str, text: str, what: str) -> tuple[int, ...]:
    """Values first * factor^i up to last, rounded down to whole numbers, each once."""
    found = re.fullmatch(r"([0-9]+)(\.[0-9]+)?", factor.strip()) if len(factor) <= 16 else None
    ratio = _number(found[1], found[2]) if found else Fraction(0)
    if ratio <= 1:
        raise KvsimError(f"{what}: the factor in {shown(text)} must be a number above 1, such as x2")
    if first < 1:
        raise KvsimError(f"{what}: a range with a factor starts at 1 or more, got {shown(text)}")
    count = log(last / first) / log1p(float(ratio) - 1) if last > first else 0.0
    if count >= MAX_POINTS:
        raise KvsimError(f"{what}: more than {MAX_POINTS:,} values in {shown(text)}; take a larger factor")
    # Whole factors multiply exactly; others are rounded down, where a hair below a whole number means that number.
    whole = int(ratio) if ratio.denominator == 1 else None
    steps = range(floor(count + 1e-9) + 1)
    values = (first * whole**i if whole else floor(first * float(ratio) ** i * (1 + 1e-12)) for i in steps)
    return tuple(dict.fromkeys(v for v in values if v <= last))


def _number(digits: str, decimals: str | None) -> Fraction:
    if len(digits) > 24:
        return Fraction(MAX_COUNT + 1)  # refused by the caller; not worth reading
    return Fraction(digits.replace("_", "") + (decimals or ""))


def _whole(value: Fraction, text: str, what: str) -> int:
    if value.denominator != 1:
        raise KvsimError(f"{what}: {shown(text)} is not a whole number")
    if value > MAX_COUNT:
        raise KvsimError(f"{what}: {shown(text)} is more than {MAX_COUNT}")
    return int(value)
