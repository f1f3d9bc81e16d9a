"""The TOML form of a device, read strictly: units, types, plausibility; every mistake is named in one line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvsim.coefficients import FAMILIES
from kvsim.errors import KvsimError, did_you_mean, shown

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
KINDS = ("gpu", "tpu", "cpu", "accelerator", "unified")
TOPOLOGIES = ("switch", "mesh", "pcie", "none")
MAX_FILE_BYTES = 2**20
MAX_PROBLEMS = 40

UNITS: dict[str, dict[str, float]] = {
    "size": {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    "rate": {"B/s": 1, "MiB/s": 2**20, "GiB/s": 2**30, "TiB/s": 2**40, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    "speed": {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15, "GOPS": 1e9, "TOPS": 1e12, "POPS": 1e15},
    "clock": {"MHz": 1e6, "GHz": 1e9},
    "power": {"W": 1},
    "count": dict.fromkeys(("SM", "CU", "Xe core", "TPC", "TensorCore", "NeuronCore", "GPU core", "core"), 1.0),
}
EXAMPLE_UNIT = {"size": "MiB", "rate": "GB/s", "speed": "TFLOPS", "clock": "MHz", "power": "W", "count": "core"}


@dataclass(frozen=True)
class Quantity:
    """What a number of the file may be: its kind of unit, the profile's field, and the window it must lie in (SI)."""

    units: str
    field: str
    low: float
    high: float
    required: bool = False
    whole: bool = False


QUANTITIES = {
    "capacity": Quantity("size", "capacity_bytes", 1e8, 2e13, required=True, whole=True),
    "bandwidth": Quantity("rate", "bandwidth_bytes_per_s", 1e9, 1e14, required=True),
    "last_level_cache": Quantity("size", "last_level_cache_bytes", 2**14, 4e9, whole=True),
    "units": Quantity("count", "units", 1, 1e6, required=True, whole=True),
    "clock": Quantity("clock", "clock_hz", 1e8, 1e10, required=True),
    "host_link": Quantity("rate", "host_link_bytes_per_s", 1e8, 1e13),
    "interconnect": Quantity("rate", "interconnect_bytes_per_s", 1e8, 1e14),
    "tdp": Quantity("power", "tdp_w", 1, 1e5),
    "measured_bandwidth": Quantity("rate", "measured_bandwidth_bytes_per_s", 1e8, 1e14),
}
PEAK = Quantity("speed", "peaks", 1e10, 1e17)
DECIMAL = {"MB": 2**20 / 1e6, "GB": 2**30 / 1e9, "TB": 2**40 / 1e12}
"""How much larger the same number is in the binary unit."""
CHOICES = {"family": FAMILIES, "kind": KINDS, "topology": TOPOLOGIES}
TEXTS = ("name", "vendor", "architecture", "family", "kind", "topology", "vendor_capacity", "date", "edition")
OPTIONAL = ("date", "edition")
LISTS = ("notes", "absent")
RATIO_TO_BF16 = {
    "fp32": (0.005, 4), "tf32": (0.1, 2), "fp16": (0.2, 4), "fp8": (0.9, 4.2), "int8": (0.03, 4.2), "fp4": (0.9, 8.5),
}  # fmt: skip
"""Lowest: fp32 on B300 (0.033), int8 on B300 (0.068), fp16 on Gaudi 3 (0.27); highest: fp4 on B300 (6)."""
FLOP_PER_BYTE = (2.0, 4000.0)
"""bf16 (else fp16, fp32) peak over bandwidth: real devices lie between 9 (fp32) and 950."""
SECONDS_TO_READ_ALL = (1e-3, 200.0)
"""Capacity over bandwidth: real devices lie between 0.018 s (RTX 5090) and minutes (a server full of slow DIMMs)."""


def parse_toml(raw: bytes, where: str) -> dict[str, Any]:
    """Decode one file's bytes; raise KvsimError when it is too large, not UTF-8, not TOML or nested too deep."""
    if len(raw) > MAX_FILE_BYTES:
        raise KvsimError(f"{where} is larger than {MAX_FILE_BYTES} bytes: a device profile is a few kB of TOML")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise KvsimError(f"{where} is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise KvsimError(f"{where} is nested too deep for a device profile") from None
    except ValueError as error:
        raise KvsimError(f"{where} is not valid TOML: {shown(str(error), 160)[1:-1]}") from None


def read_fields(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turn a parsed file into the fields of HardwareProfile (SI, absent numbers left out).

    Returns the fields plus `sources` (field or `peaks.<dtype>` -> text). Raises KvsimError naming every mistake.
    """
    problems: list[str] = []
    fields = _texts(table, problems)
    sources: dict[str, str] = {}
    for key, quantity in QUANTITIES.items():
        if key in table:
            value = _number(table[key], key, quantity, problems)
            sources.update(_source(table[key], key, quantity.field, problems))
            if value is not None:
                fields[quantity.field] = value
        elif quantity.required:
            unit = EXAMPLE_UNIT[quantity.units]
            problems.append(f"missing field {key!r}: write {key} = {{ value = ..., unit = '{unit}', source = '...' }}")
    if "units" in fields:
        fields["unit_name"] = table["units"]["unit"]
    fields["peaks"] = _peaks(table, sources, problems)
    fields["sources"] = sources
    _plausible(fields, _unit_of(table.get("capacity")), problems)
    _links(fields, problems)
    if problems:
        more = len(problems) - MAX_PROBLEMS
        tail = f"; and {more} more" if more > 0 else ""
        raise KvsimError(f"{where}: " + "; ".join(problems[:MAX_PROBLEMS]) + tail)
    return fields


def _unknown(keys: Iterable[str], known: Iterable[str], what: str, problems: list[str]) -> None:
    known = tuple(known)
    for key in keys:
        if key not in known:  # the nearest name is worth its time only where it will be printed
            near = did_you_mean(key, known) if len(problems) < MAX_PROBLEMS else ""
            problems.append(f"unknown {what} {shown(key)}{near}")


def _texts(table: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The words of the file: names, choices from fixed lists, notes."""
    _unknown(table, (*TEXTS, *LISTS, *QUANTITIES, "peaks", "coefficients"), "field", problems)
    fields: dict[str, Any] = {}
    for key in TEXTS:
        value = table.get(key)
        if value is None and key not in table:
            if key not in OPTIONAL:
                problems.append(f"missing field {key!r}")
        elif not isinstance(value, str) or not value.strip():
            problems.append(f"{key} must be a text in quotes, got {shown(value)}")
        elif len(value) > 200 or not value.isprintable():
            problems.append(f"{key} must be one printable line of at most 200 characters")
        elif key in CHOICES and value not in CHOICES[key]:
            choices = CHOICES[key]
            problems.append(f"{key} {shown(value)} is not one of {', '.join(choices)}{did_you_mean(value, choices)}")
        else:
            fields[key] = value
    for key in LISTS:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            problems.append(f"{key} must be a list of texts, got {shown(value)}")
        else:
            fields[key] = tuple(value)
    _unknown(fields.get("absent", ()), DTYPES, "dtype in absent", problems)
    return fields


def _source(entry: Any, key: str, field: str, problems: list[str]) -> dict[str, str]:
    """{field: source} of one number; a number without a source is a mistake."""
    source = entry.get("source") if isinstance(entry, dict) else None
    if isinstance(source, str) and source.strip():
        return {field: source}
    if isinstance(entry, dict):
        problems.append(f"{key} has no source: say in words where the number comes from")
    return {}


def _number(entry: Any, key: str, quantity: Quantity, problems: list[str]) -> float | int | None:
    """One `{ value, unit, source }` in SI, or None after naming what is wrong with it."""
    if not isinstance(entry, dict):
        problems.append(f"{key} must be a table {{ value, unit, source }}, got {shown(entry)}")
        return None
    _unknown(entry, ("value", "unit", "source"), f"key of {key}", problems)
    units = UNITS[quantity.units]
    unit, value = entry.get("unit"), entry.get("value")
    known = isinstance(unit, str) and unit in units
    if not known:
        problems.append(f"unit {shown(unit)} of {key} is not one of {', '.join(units)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        problems.append(f"value of {key} must be a number, got {shown(value)}")
        return None
    if (isinstance(value, float) and not isfinite(value)) or value <= 0:
        problems.append(f"value of {key} must be finite and above zero, got {shown(value)}")
        return None
    if not known:
        return None
    si = float(value) * units[str(unit)] if value < 1e30 else float("inf")
    if not quantity.low <= si <= quantity.high:
        low, high = (f"{x / units[str(unit)]:.4g}" for x in (quantity.low, quantity.high))
        got = f"{key} = {shown(value, 24)} {unit} is outside {low} to {high} {unit}"
        problems.append(f"{got}: is the unit or a factor of 1000 wrong?")
        return None
    return round(si) if quantity.whole else float(round(si))  # 65.13 T as a float product is 65129999999999.99


def _peaks(table: Mapping[str, Any], sources: dict[str, str], problems: list[str]) -> dict[str, float]:
    """Dense FLOP/s by dtype with FP32 accumulate."""
    entry = table.get("peaks")
    if not isinstance(entry, dict) or not entry:
        problems.append("missing table [peaks] with at least one of " + ", ".join(DTYPES))
        return {}
    _unknown(entry, DTYPES, "dtype in [peaks]", problems)
    peaks: dict[str, float] = {}
    for dtype in DTYPES:
        if dtype in entry:
            value = _number(entry[dtype], f"peaks.{dtype}", PEAK, problems)
            sources.update(_source(entry[dtype], f"peaks.{dtype}", f"peaks.{dtype}", problems))
            if value is not None:
                peaks[dtype] = value
    absent = table.get("absent")
    if isinstance(absent, list):
        problems += [f"{d} is both in [peaks] and in absent" for d in DTYPES if d in absent and d in entry]
    return peaks


def _outside(value: float, window: tuple[float, float]) -> bool:
    return not window[0] <= value <= window[1]


def _plausible(fields: Mapping[str, Any], unit: str, problems: list[str]) -> None:
    """Relations between the numbers that no real device breaks: they catch units that are off by 1000 or by GB/GiB."""
    peaks, bandwidth = fields["peaks"], fields.get("bandwidth_bytes_per_s")
    capacity, cache = fields.get("capacity_bytes"), fields.get("last_level_cache_bytes")
    base = peaks.get("bf16")
    for dtype, window in RATIO_TO_BF16.items():
        if base and dtype in peaks and _outside(peaks[dtype] / base, window):
            problems.append(
                f"peaks.{dtype} is {peaks[dtype] / base:.3g} x peaks.bf16, outside {window[0]:g} to {window[1]:g}: "
                "a unit, sparsity or accumulate mode is mixed up"
            )
    main = next((d for d in ("bf16", "fp16", "fp32") if d in peaks), None)
    if main and bandwidth and _outside(peaks[main] / bandwidth, FLOP_PER_BYTE):
        low, high = FLOP_PER_BYTE
        problems.append(
            f"peaks.{main} is {peaks[main] / bandwidth:.3g} FLOP per byte of bandwidth, outside {low:g} to {high:g}: "
            "one of the two has a wrong unit"
        )
    if capacity and bandwidth and _outside(capacity / bandwidth, SECONDS_TO_READ_ALL):
        low, high = SECONDS_TO_READ_ALL
        problems.append(
            f"reading the whole capacity would take {capacity / bandwidth:.3g} s, outside {low:g} to {high:g}: "
            "capacity or bandwidth has a wrong unit"
        )
    if capacity and cache and cache >= capacity:
        problems.append("last_level_cache is not smaller than capacity")
    measured = fields.get("measured_bandwidth_bytes_per_s")
    if measured and bandwidth and _outside(measured / bandwidth, (0.1, 1.05)):
        problems.append(f"measured_bandwidth is {measured / bandwidth:.3g} x bandwidth: above 1.05 it measured a cache")
    _vendor(fields.get("vendor_capacity"), capacity, unit, problems)


def _unit_of(entry: Any) -> str:
    return str(entry.get("unit")) if isinstance(entry, dict) else ""


def _vendor(text: str | None, capacity: float | None, unit: str, problems: list[str]) -> None:
    """The vendor's figure, read as GiB, is the most that a driver reports: above it GB was written as GiB.

    A decimal unit whose number would be right with the binary one (81559 MB where the driver said MiB, or the vendor's
    own 80 GB) is a mix-up too: no driver keeps 2 to 7% of a device for itself and the same number in the other unit.
    """
    if text is None:
        return
    found = re.match(r"(\d+(?:\.\d+)?)\s*(TB|GB|MB|TiB|GiB|MiB)\b", text)
    if found is None:
        problems.append(f"vendor_capacity {shown(text)} must start with a size such as '80 GB'")
    elif capacity:
        binary = {"M": 2**20, "G": 2**30, "T": 2**40}[found[2][0]]
        share = capacity / (float(found[1]) * binary)
        if _outside(share, (0.5, 1.0005)):
            problems.append(
                f"capacity is {share:.4g} x vendor_capacity {found[0]} read as GiB, outside 0.5 to 1: "
                "are GB and GiB mixed up?"
            )
        elif unit in DECIMAL and not _outside(share * DECIMAL[unit], (0.985, 1.0005)):
            problems.append(
                f"capacity in {unit} is {share:.3g} x vendor_capacity {found[0]} read as GiB, in {unit[0]}iB it would "
                f"be {share * DECIMAL[unit]:.4g}: are GB and GiB mixed up? write what the driver reports, mostly MiB"
            )


def _links(fields: dict[str, Any], problems: list[str]) -> None:
    """A link needs a rate; without a direct link peers talk over the host link."""
    topology, rate = fields.get("topology"), fields.get("interconnect_bytes_per_s")
    if topology in ("switch", "mesh") and rate is None and not any("interconnect" in p for p in problems):
        problems.append(f"topology {topology!r} needs an interconnect rate (one direction, all links together)")
    if topology == "none" and rate is not None:
        problems.append("topology is 'none' but an interconnect is given")
    if topology == "pcie" and rate is None and "host_link_bytes_per_s" in fields:
        fields["interconnect_bytes_per_s"] = fields["host_link_bytes_per_s"]
        fields["sources"]["interconnect_bytes_per_s"] = "no direct link: peers use the host link"
