"""What-if devices: rates of hardware that does not exist added to a profile, and what they take off a kernel's time."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown, word

if TYPE_CHECKING:
    from kvsim.hardware import HardwareProfile

WRITING = ("compress", "compress and append")
"""Lines of work that a compression pipeline takes over."""
VALUE_BYTES = 2.0
"""Bytes of a value as a decompression pipeline hands it on: 16 bit, whatever it was stored in."""


@dataclass(frozen=True)
class Added:
    """Hardware beside a device's own; 0: none.

    decompress_bytes_per_s: a pipeline beside the memory controller turns stored values into 16-bit ones at this rate of
        its output, while others are read; the units no longer convert. It may be slower than they are.
    compress_bytes_per_s: the same for writing, by its input; encoding takes no arithmetic of the units.
    mixed_flops_per_s: units that multiply 16-bit queries with stored codes of any format as they are: no conversion,
        and this rate in place of the device's 16-bit arithmetic, in attention of a decode step over converted formats.
    near_memory_bytes_per_s: attention of a decode step is done beside the memory's banks at this internal bandwidth,
        and conversion and arithmetic there keep up with it; launches and waves stay.
    """

    decompress_bytes_per_s: float = 0.0
    compress_bytes_per_s: float = 0.0
    mixed_flops_per_s: float = 0.0
    near_memory_bytes_per_s: float = 0.0

    def conversion(self, elements: Any, own: Any, converts: bool) -> Any:
        """Seconds of conversion for `elements` stored values, where the device's units would take `own`."""
        if self.near_memory_bytes_per_s:
            return 0.0 * elements
        if converts and self.mixed_flops_per_s:
            return 0.0 * elements
        if converts and self.decompress_bytes_per_s:
            return elements * (VALUE_BYTES / self.decompress_bytes_per_s)
        return own

    def terms(self, memory: Any, compute: Any, flops: Any, bytes_moved: Any, converts: bool) -> tuple[Any, Any]:
        """Seconds of memory and arithmetic of a decode step's attention."""
        if self.near_memory_bytes_per_s:
            return bytes_moved / self.near_memory_bytes_per_s, 0.0 * compute
        if self.mixed_flops_per_s and converts:
            return memory, flops / self.mixed_flops_per_s
        return memory, compute


KEYS = {
    "decompress": ("decompress_bytes_per_s", "B/s"),
    "compress": ("compress_bytes_per_s", "B/s"),
    "mixed": ("mixed_flops_per_s", "FLOP/s"),
    "near_memory": ("near_memory_bytes_per_s", "B/s"),
    "bandwidth": ("bandwidth_bytes_per_s", "B/s"),
    "link": ("interconnect_bytes_per_s", "B/s"),
    "host_link": ("host_link_bytes_per_s", "B/s"),
    "capacity": ("capacity_bytes", "B"),
}
"""What may be asked for, the field that it sets, and its unit; all but the first four replace the profile's figure."""
ADDED = tuple(f.name for f in fields(Added))
_VALUE = re.compile(r"([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kKMGTPE]?)(i?)(B/s|FLOP/s|FLOPS|B)")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
MOST = 1e24


def _value(key: str, text: str) -> float:
    """A rate or size as written, 4TB/s or 141GiB; KvsimError for another unit, zero, negative or absurd numbers."""
    unit = KEYS[key][1]
    found = _VALUE.fullmatch(text.strip()) if len(text) <= 64 else None
    example = {"B/s": "4TB/s", "FLOP/s": "2PFLOP/s", "B": "141GiB"}[unit]
    if found is None or found[4].replace("FLOPS", "FLOP/s") != unit:
        raise KvsimError(f"what-if: {key} is in {unit}, such as {key}={example}; got {shown(text)}")
    value = float(found[1]) * float((1024 if found[3] else 1000) ** _POWER[found[2]])
    if not (isfinite(value) and 0 < value <= MOST):
        raise KvsimError(f"what-if: {key} must be above zero and finite, got {shown(text)}; leave it out for none")
    return value


def parse_what_if(text: str) -> dict[str, float]:
    """Read `decompress=4TB/s,link=900GB/s` into values by key.

    Raises KvsimError in one line: an unknown key (naming the nearest), a key given twice, a wrong unit, a number that
    is not above zero, nothing at all.
    """
    found: dict[str, float] = {}
    for piece in word(text, "what-if").split(","):
        key, equals, value = (x.strip() for x in piece.partition("="))
        if key not in KEYS:
            raise KvsimError(f"what-if: unknown key {shown(key)}{did_you_mean(key, KEYS)}; one of {', '.join(KEYS)}")
        if not equals:
            raise KvsimError(f"what-if: {key} has no value; write {key}=4T{KEYS[key][1]}")
        if key in found:
            raise KvsimError(f"what-if: {key} is given twice")
        found[key] = _value(key, value)
    clash = [k for k in ("decompress", "mixed", "near_memory") if k in found]
    if len(clash) > 1:
        raise KvsimError(f"what-if: {' and '.join(clash)} each take over the conversion; ask for one of them")
    return found


def what_if(device: HardwareProfile, wanted: str | dict[str, float]) -> HardwareProfile:
    """The device with what is asked for; its name says so, and its intervals widen as those of another device do.

    Args:
        wanted: as `parse_what_if` reads it, or values by key.

    Raises KvsimError as `parse_what_if`; a key of `wanted` that is unknown; a value that is not above zero.
    """
    values = parse_what_if(wanted) if isinstance(wanted, str) else dict(wanted)
    for key, value in values.items():
        if key not in KEYS:
            raise KvsimError(f"what-if: unknown key {shown(key)}{did_you_mean(key, KEYS)}; one of {', '.join(KEYS)}")
        if not (isfinite(value) and value > 0):
            raise KvsimError(f"what-if: {key} must be above zero and finite, got {shown(value)}")
    named = {KEYS[key][0]: value for key, value in values.items()}
    changed: dict[str, Any] = {n: int(v) if n == "capacity_bytes" else v for n, v in named.items() if n not in ADDED}
    more = {n: v for n, v in named.items() if n in ADDED}
    added = replace(device.added or Added(), **more) if more else device.added
    told = wanted if isinstance(wanted, str) else ",".join(f"{k}={v:.4g}" for k, v in values.items())
    coefficients = device.own_coefficients or device.coefficients
    return replace(device, name=f"{device.name} what-if {told}", added=added, own_coefficients=coefficients, **changed)


def written_faster(added: Added, seconds: Any, size: Any) -> Any:
    """Seconds of encoding `size` bytes by the compression pipeline, where streaming them takes `seconds`."""
    return np.maximum(seconds, size / added.compress_bytes_per_s)
