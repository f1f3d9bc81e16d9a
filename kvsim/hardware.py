"""A device as numbers: capacity, bandwidth, peaks, links, each with its source; not how fast kernels run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.hardware_file import DTYPES, MAX_FILE_BYTES, parse_toml, read_fields
from kvsim.hardware_names import resolve

if TYPE_CHECKING:
    from kvsim.coefficients import Coefficient
    from kvsim.whatif import Added

PACKAGE = "hardware_profiles"
FALLBACK: dict[str, tuple[str, ...]] = {
    "fp32": ("tf32", "bf16", "fp16"),
    "tf32": ("fp32", "bf16", "fp16"),
    "fp16": ("bf16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "fp4": ("bf16", "fp16", "fp32"),
}
"""Which unit does the work of a dtype that the device has no unit for: narrow formats are converted to 16 bit first."""


@dataclass(frozen=True)
class HardwareProfile:
    """One device (one GPU, chip or socket; never a node or a two-GPU superchip).

    Args:
        family: whose calibrated coefficients apply (hopper, ada, cdna, cpu, ...).
        kind: gpu, tpu, cpu, accelerator or unified (memory shared with the CPU).
        capacity_bytes: what the driver reports, not the vendor's GB; `vendor_capacity` is the vendor's own text.
        bandwidth_bytes_per_s: datasheet memory bandwidth; `measured_bandwidth_bytes_per_s` is a published measurement.
        peaks: dense FLOP/s (OP/s for int8) by dtype with FP32 accumulate; a dtype without hardware is not there.
        absent: dtypes for which the device is known to have no matrix unit; what is in neither is unknown.
        last_level_cache_bytes: 0 where there is none or it is not published.
        units: how many SMs, CUs or cores (`unit_name` says which). clock_hz: the clock of the peaks (CPU: base clock).
        host_link_bytes_per_s, interconnect_bytes_per_s: one direction, all links together.
        topology: switch (any pair gets the full rate), mesh (a pair gets its own links only), pcie (peers use the
            host link), none.
        sources: where each number comes from, keyed by field name or `peaks.<dtype>`.
        own_coefficients: calibrated coefficients that the file itself carries; see `coefficients`.
        path: the file it was read from.
        added: hardware that does not exist, asked for by a what-if (kvsim.whatif); None: none.
    """

    name: str
    vendor: str
    architecture: str
    family: str
    kind: str
    capacity_bytes: int
    vendor_capacity: str
    bandwidth_bytes_per_s: float
    peaks: Mapping[str, float] = field(hash=False)
    topology: str
    units: int
    clock_hz: float
    unit_name: str = ""
    last_level_cache_bytes: int = 0
    host_link_bytes_per_s: float | None = None
    interconnect_bytes_per_s: float | None = None
    tdp_w: float | None = None
    measured_bandwidth_bytes_per_s: float | None = None
    absent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    date: str = ""
    edition: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    own_coefficients: tuple[Coefficient, ...] = field(default=(), hash=False)
    path: str = field(default="", compare=False)
    added: Added | None = None

    def __post_init__(self) -> None:
        needed = {"capacity_bytes": self.capacity_bytes, "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
                  "units": self.units, "clock_hz": self.clock_hz, **{f"peaks.{d}": p for d, p in self.peaks.items()}}
        for what, value in needed.items():
            if not (isinstance(value, int | float) and isfinite(value) and value > 0):
                got = f"must be finite and above zero, got {shown(value)}"
                raise KvsimError(f"{what} of device {shown(self.name)} {got}")
        if not self.peaks:
            raise KvsimError(f"device {shown(self.name)} has no peak for any dtype")

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of `dtype` with FP32 accumulate; KvsimError with the alternatives where there is no figure."""
        if dtype in self.peaks:
            return self.peaks[dtype]
        if dtype not in DTYPES:
            raise KvsimError(f"dtype {shown(dtype)} is not one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
        why = "has no matrix unit for" if dtype in self.absent else "lists no peak for"
        raise KvsimError(f"{self.name} {why} {dtype}: it has {', '.join(self.peaks)}")

    def best_peak(self, dtype: str) -> tuple[float, str]:
        """FLOP/s and the dtype that does the work: `dtype` itself, else the first of FALLBACK that the device has.

        Example: bf16 on a T4 gives its fp16 rate and "fp16"; fp8 on an A100 gives bf16. Raises KvsimError if none fits.
        """
        for used in (dtype, *FALLBACK.get(dtype, ())):
            if used in self.peaks:
                return self.peaks[used], used
        return self.peak(dtype), dtype

    @cached_property
    def coefficients(self) -> tuple[Coefficient, ...]:
        """The file's own calibrated coefficients, else those of the family."""
        if self.own_coefficients:
            return self.own_coefficients
        from kvsim.coefficients import family_coefficients

        return family_coefficients(self.family)

    def facts(self) -> list[tuple[str, str, str]]:
        """Rows (what, value with unit, source) for people: capacity in MiB, rates in GB/s, peaks in TFLOPS."""
        rows = [(label, text, self.sources.get(key, "")) for key, label, text in _readable(self)]
        rows += [(f"peak {d}", f"{p / 1e12:g} T{'OPS' if d == 'int8' else 'FLOPS'}", self.sources.get(f"peaks.{d}", ""))
                 for d, p in self.peaks.items()]
        return rows


def _readable(profile: HardwareProfile) -> list[tuple[str, str, str]]:
    """(field, label, value in the unit people use) of every number that the profile has, peaks aside."""
    scales = (
        ("capacity_bytes", "capacity", 2**20, "MiB"),
        ("bandwidth_bytes_per_s", "bandwidth", 1e9, "GB/s"),
        ("measured_bandwidth_bytes_per_s", "measured bandwidth", 1e9, "GB/s"),
        ("last_level_cache_bytes", "last-level cache", 2**20, "MiB"),
        ("units", "units", 1, profile.unit_name),
        ("clock_hz", "clock", 1e6, "MHz"),
        ("host_link_bytes_per_s", "host link", 1e9, "GB/s one way"),
        ("interconnect_bytes_per_s", "interconnect", 1e9, "GB/s one way"),
        ("tdp_w", "power", 1, "W"),
    )
    found = [(key, label, getattr(profile, key), scale, unit) for key, label, scale, unit in scales]
    return [(k, label, f"{v / scale:.10g} {unit}".strip()) for k, label, v, scale, unit in found if v]


def devices() -> list[str]:
    """Names of the shipped devices, sorted."""
    return sorted(_shipped())


def load_device(device: str | Path | HardwareProfile) -> HardwareProfile:
    """Read a shipped device by name or a user's TOML by path; a profile is returned as it is.

    Names resolve across `h100-sxm`, `H100-SXM5-80GB`, `NVIDIA GeForce RTX 4090`. Raises KvsimError when the name is
    unknown or ambiguous, when the file cannot be read, or with every mistake of the file in one line.
    """
    if isinstance(device, HardwareProfile):
        return device
    if isinstance(device, Path):
        return _read_path(device)
    if not isinstance(device, str) or not device.strip():
        raise KvsimError(f"a device is a name or a path to a .toml profile, got {shown(device)}")
    if device.lower().endswith(".toml") or "/" in device or "\\" in device:
        return _read_path(Path(device))
    shipped = _shipped()
    stem, memory = resolve(device.strip(), shipped)
    entry = resources.files(PACKAGE).joinpath(stem + ".toml")
    profile = _build(entry.read_bytes(), f"device profile {stem}.toml", str(entry))
    if memory and not profile.vendor_capacity.startswith(f"{memory} "):
        raise KvsimError(f"device {shown(device)}: {stem} has {profile.vendor_capacity}, not {memory} GB; "
                         "write a profile of your own for another memory size")
    return profile


def _shipped() -> list[str]:
    """Stems of the package's TOML files; only names are read, so that loading one device stays fast."""
    return [e.name[:-5] for e in resources.files(PACKAGE).iterdir() if e.name.endswith(".toml")]


def _read_path(path: Path) -> HardwareProfile:
    where = f"device profile {shown(str(path), 200)[1:-1]}"
    try:
        if not path.is_file():
            raise KvsimError(f"{where} does not exist or is not a file; `kvsim devices` lists the shipped names")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, KvsimError):
            raise
        raise KvsimError(f"{where} cannot be read: {shown(str(error))[1:-1]}") from None
    return _build(raw, where, str(path))


def _build(raw: bytes, where: str, path: str) -> HardwareProfile:
    """Parse and check one file's bytes; coefficients are parsed by the module that owns them, only if present."""
    table: dict[str, Any] = parse_toml(raw, where)
    fields = read_fields(table, where)
    if "coefficients" in table:
        from kvsim.coefficients import parse_coefficients

        fields["own_coefficients"] = parse_coefficients(table, where)
    return HardwareProfile(**fields, path=path)
