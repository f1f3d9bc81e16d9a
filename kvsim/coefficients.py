"""Calibrated numbers that turn work into time: one row per (op, kernel, format), how well it fits, and its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import Any

from kvsim.errors import KvsimError, did_you_mean, shown

OPS = ("decode", "prefill", "matmul", "elementwise", "engine")
FAMILIES = ("ampere-dc", "hopper", "blackwell-dc", "blackwell-gddr", "ada", "ampere-gddr", "turing", "volta", "cdna",
            "rdna", "xe", "gaudi", "trainium", "tpu", "apple", "unified-nvidia", "cpu")

BOUNDS: dict[str, tuple[float, float]] = {
    "t0_s": (0.0, 1e-2),
    "again_s": (0.0, 1e-2),
    "bandwidth_share": (0.01, 1.1),
    "cache_multiple": (0.0, 16.0),
    "cache_rate": (0.0, 1e4),
    "cache_reach": (0.05, 4.0),
    "flops_share": (1e-4, 1.3),
    "wave_s": (0.0, 1e-3),
    "step_s": (0.0, 1e-2),
    "split_s": (0.0, 1e-2),
    "window_s": (0.0, 1e-2),
    "max_splits": (1.0, 1e4),
    "slots": (0.25, 64.0),
    "group_limit": (1.0, 1e9),
    "power": (0.0, 8.0),
    "single_t0_s": (0.0, 1e-2),
    "single_share": (0.0, 1.1),
    "single_s": (0.0, 1e-2),
    "layer_s": (0.0, 1e-2),
    "experts_s": (0.0, 1e-2),
    "prefill_share": (0.0, 10.0),
}
"""What physics allows for each number; a value outside is a slip of the pen or of a unit."""


@dataclass(frozen=True)
class Coefficient:
    """The numbers of one kernel: `op` is one of OPS, `kernel` is engine/kernel, `format` a number format.

    t0_s: launch and fixed cost; again_s: the same of each further store that is walked after another, whose code is
    warm by then (0: as t0_s). bandwidth_share: achieved share of the datasheet's DRAM bandwidth.
    cache_multiple: bandwidth, as a multiple of the datasheet's, while the working set lies inside the last-level
    cache, or cache_rate: bytes that each unit gets from it in a clock cycle (it takes the place of the multiple: a
    cache belongs to the units, and siblings differ in memory); cache_reach: share of that cache in which it holds.
    element_rates: (head_dim, stored values that one unit takes in per clock cycle); empty where that never limits.
    flops_share: achieved share of the dense peak; flops_shares: the same by head_dim, where it differs.
    wave_s: seconds for each wave of thread blocks. slots: blocks that share a unit. max_splits: parts into which a
    sequence may be split when blocks are few; split_s: what recombining long ones costs. window_s: extra of a sliding
    window. step_s: seconds for each 1,024 of a matrix product's k, or of decode's rows, walked one after another.
    power: how memory, conversion and compute overlap: (a^p + b^p + c^p)^(1/p) with p = 1 (one after another), 2 or 8
    (the longest alone counts); 0: 8, and 2 in prefill.
    single_t0_s, single_share, single_s: fixed cost, bandwidth share and seconds for each 1,024 outputs of a product
    of one row (m = 1), where a kernel of its own does it (share 0: no such kernel).
    layer_s, experts_s, prefill_share (op engine): seconds that a server adds to each layer of a step and to each with
    routed experts; share of prompts' time, met by chance, by which running requests wait for new ones.
    group_limit: query heads per KV head beyond which each query head reads alone.
    log_error: 5%, 50% and 95% quantiles of ln(measured / predicted); memory_log_error: the same where moving bytes
    takes at least half of the time (None: no difference). rows: measurements behind it, devices: on what.
    borrowed: family it was taken from, "" where measured on this one. source, date: where the rows came from.
    """

    op: str
    kernel: str
    format: str
    t0_s: float
    bandwidth_share: float
    flops_share: float
    cache_multiple: float = 0.0
    cache_rate: float = 0.0
    cache_reach: float = 1.0
    element_rates: tuple[tuple[int, float], ...] = ()
    flops_shares: tuple[tuple[int, float], ...] = ()
    wave_s: float = 0.0
    slots: float = 1.0
    max_splits: float = 64.0
    split_s: float = 0.0
    window_s: float = 0.0
    step_s: float = 0.0
    group_limit: float = 1e9
    again_s: float = 0.0
    power: float = 0.0
    single_t0_s: float = 0.0
    single_share: float = 0.0
    single_s: float = 0.0
    layer_s: float = 0.0
    experts_s: float = 0.0
    prefill_share: float = 0.0
    log_error: tuple[float, float, float] = (-0.7, 0.0, 0.7)
    memory_log_error: tuple[float, float, float] | None = None
    rows: int = 0
    devices: tuple[str, ...] = ()
    borrowed: str = ""
    source: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """(op, kernel, format), unique in a family."""
        return (self.op, self.kernel, self.format)


_NAMES = tuple(f.name for f in fields(Coefficient))
_NEEDED = ("op", "kernel", "format", "t0_s", "bandwidth_share", "flops_share", "log_error", "source", "date")


def _number(value: Any, low: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise KvsimError(f"{where} must be a number, got {shown(value)}")
    if not low <= value <= high:
        raise KvsimError(f"{where} must lie between {low:g} and {high:g}, got {shown(value)}")
    return float(value)


def _rates(value: Any, where: str, most: float) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise KvsimError(f"{where} must be a table of head_dim = number, got {shown(value)}")
    found = []
    for head_dim, rate in value.items():
        if not str(head_dim).isdecimal() or not 1 <= int(head_dim) <= 2**16:
            raise KvsimError(f"{where}: {shown(head_dim)} is not a head_dim")
        found.append((int(head_dim), _number(rate, 1e-6, most, f"{where}.{head_dim}")))
    return tuple(sorted(found))


def _error_quantiles(value: Any, where: str) -> tuple[float, float, float]:
    if not isinstance(value, list) or len(value) != 3:
        raise KvsimError(f"{where} must be the 5, 50 and 95% quantiles of ln(measured / predicted), got {shown(value)}")
    low, mid, high = (_number(v, -5.0, 5.0, where) for v in value)
    if not low <= mid <= high or low > 0 or high < 0:
        raise KvsimError(f"{where} must rise and hold 0 between its ends, got {shown(value)}")
    return (low, mid, high)


def _parse_one(row: Any, where: str) -> Coefficient:
    """One table; KvsimError with every mistake of it."""
    if not isinstance(row, Mapping):
        raise KvsimError(f"{where} must be a table, got {shown(row)}")
    mistakes = [f"{where} has an unknown field {shown(n)}{did_you_mean(n, _NAMES)}" for n in row if n not in _NAMES]
    mistakes += [f"{where} lacks {name}" for name in _NEEDED if name not in row]
    values: dict[str, Any] = {}
    for name in _NAMES:
        if name in row:
            try:
                values[name] = _value(name, row[name], f"{where}.{name}")
            except KvsimError as error:
                mistakes.append(str(error))
    if mistakes:
        raise KvsimError("; ".join(mistakes))
    return Coefficient(**values)


def _value(name: str, value: Any, where: str) -> Any:
    """A field's value, checked; KvsimError otherwise."""
    if name in BOUNDS or name == "rows":
        found = _number(value, *BOUNDS.get(name, (0, 1e9)), where)
        return int(found) if name == "rows" else found
    if name in ("element_rates", "flops_shares"):
        return _rates(value, where, 1e6 if name == "element_rates" else 1.3)
    if name in ("log_error", "memory_log_error"):
        return _error_quantiles(value, where)
    if name == "devices":
        if not isinstance(value, list) or not all(isinstance(d, str) for d in value):
            raise KvsimError(f"{where} must be a list of names, got {shown(value)}")
        return tuple(value)
    if not isinstance(value, str) or (name in ("kernel", "format", "source") and not value):
        raise KvsimError(f"{where} must be a text, got {shown(value)}")
    if name == "op" and value not in OPS:
        raise KvsimError(f"{where} must be one of {', '.join(OPS)}, got {shown(value)}")
    if name == "borrowed" and value and value not in FAMILIES:
        raise KvsimError(f"{where} is not a family: {shown(value)}{did_you_mean(value, FAMILIES)}")
    return value


def parse_coefficients(table: Any, where: str) -> tuple[Coefficient, ...]:
    """Read the coefficients of a TOML file; the first of an op is the default kernel.

    Args:
        table: the file, with an array of tables `[[coefficients]]`.
        where: what an error calls it (a file name).

    Raises:
        KvsimError: a field is unknown, missing, of a wrong type or outside physics; two rows share a key.
    """
    entries = table.get("coefficients") if isinstance(table, Mapping) else None
    if not isinstance(entries, list):
        raise KvsimError(f"{where}: coefficients must be an array of tables [[coefficients]], got {shown(entries)}")
    found: dict[tuple[str, str, str], Coefficient] = {}
    mistakes: list[str] = []
    for index, row in enumerate(entries):
        here = f"{where}: coefficients[{index}]"
        try:
            one = _parse_one(row, here)
        except KvsimError as error:
            mistakes.append(str(error))
            continue
        if one.key in found:
            mistakes.append(f"{here} repeats {' / '.join(one.key)}")
        found[one.key] = one
    if mistakes:
        raise KvsimError("; ".join(mistakes))
    return tuple(found.values())


@cache
def family_coefficients(family: str) -> tuple[Coefficient, ...]:
    """The coefficients shipped for a device family, from hardware_profiles/families/<family>.toml.

    Raises KvsimError for a family without a file, naming the nearest one.
    """
    if family not in FAMILIES:
        raise KvsimError(f"unknown device family {shown(family)}{did_you_mean(family, FAMILIES)}; "
                         f"one of {', '.join(FAMILIES)}")
    name = f"families/{family}.toml"
    try:
        table = tomllib.loads((files("hardware_profiles") / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KvsimError(f"no coefficients are shipped for family {family!r} (hardware_profiles/{name})") from None
    except tomllib.TOMLDecodeError as error:
        raise KvsimError(f"hardware_profiles/{name} is not TOML: {error}") from None
    if table.get("family") != family:
        raise KvsimError(f"hardware_profiles/{name} says family = {shown(table.get('family'))}")
    return parse_coefficients(table, f"hardware_profiles/{name}")
