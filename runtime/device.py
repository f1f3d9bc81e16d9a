"""Which machine this is: processor, caches, memory, accelerator; and which shipped profile it is, if any."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvsim.errors import KvsimError, shown
from kvsim.hardware import HardwareProfile, devices, load_device
from kvsim.hardware_names import resolve

CPUINFO, MEMINFO, CACHES = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/devices/system/cpu/cpu0/cache")
CAPACITY_TOLERANCE = 0.12
"""How far a GPU's reported memory may lie from the profile's: ECC and partitions take a few per cent."""


@dataclass(frozen=True)
class Machine:
    """The device that runs the models here. kind: cpu or gpu; name: as the system or driver says it.

    units: cores that this process may use, or multiprocessors. last_level_cache_bytes: 0 where it cannot be learned.
    """

    kind: str
    name: str
    vendor: str
    architecture: str
    units: int
    clock_hz: float
    capacity_bytes: int
    last_level_cache_bytes: int
    threads: int
    torch_version: str
    torch_build: str

    def to_json(self) -> dict[str, Any]:
        """Everything, for a record."""
        return asdict(self)


def this_machine(device: str | torch.device = "cpu") -> Machine:
    """Ask system and driver; KvsimError where there is no such device or it tells nothing."""
    where = torch.device(device)
    if where.type == "cuda":
        return _gpu(where)
    if where.type != "cpu":
        raise KvsimError(f"device {shown(str(device))} cannot be measured: give cpu or cuda")
    return _cpu()


def _gpu(where: torch.device) -> Machine:
    if not torch.cuda.is_available():
        raise KvsimError("no CUDA device is visible to torch here; calibrate the CPU with --on cpu")
    facts = torch.cuda.get_device_properties(where)
    vendor = "AMD" if torch.version.hip else "NVIDIA"
    clock = float(getattr(facts, "clock_rate", 0) or 0) * 1e3 or 1.5e9
    return Machine("gpu", facts.name, vendor, f"{facts.major}.{facts.minor}", facts.multi_processor_count, clock,
                   int(facts.total_memory), int(getattr(facts, "L2_cache_size", 0)), torch.get_num_threads(),
                   torch.__version__, _build())


def _cpu() -> Machine:
    info = _fields(_text(CPUINFO))
    name = info.get("model name") or platform.processor() or platform.machine()
    vendors = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
    vendor = vendors.get(info.get("vendor_id", ""), info.get("vendor_id") or platform.system())
    model = f"family {info['cpu family']} model {info['model']}" if "cpu family" in info else platform.machine()
    clock = float(info.get("cpu MHz", 0) or 0) * 1e6
    return Machine("cpu", " ".join(name.split()), vendor, f"{platform.machine()} {model}", _cores(), clock or 2e9,
                   _memory(), _last_level_cache(), torch.get_num_threads(), torch.__version__, _build())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    """The first `key : value` of each key."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    found = re.match(r"(\d+) kB", _fields(_text(MEMINFO)).get("MemTotal", ""))
    if found:
        return int(found[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise KvsimError("this system does not say how much memory it has; write the profile's capacity yourself")


def _last_level_cache() -> int:
    sizes = [re.match(r"(\d+)([KMG])", _text(index / "size")) for index in sorted(CACHES.glob("index*"))]
    return max((int(m[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[m[2]] for m in sizes if m), default=0)


def _build() -> str:
    """What of torch's build decides speed: vector units and the libraries that multiply matrices."""
    on = [name for name, there in (("mkl", torch.backends.mkl.is_available()),
                                   ("mkldnn", torch.backends.mkldnn.is_available())) if there]
    cuda = f"cuda {torch.version.cuda}" if torch.version.cuda else ""
    return ", ".join(x for x in (torch.backends.cpu.get_cpu_capability(), *on, cuda) if x)


def identify(machine: Machine, names: Iterable[str] | None = None) -> str | None:
    """The shipped profile that this machine is, or None: name, units and memory must all agree.

    A virtual machine with two cores of a large processor is not that processor.
    """
    try:
        stem, _ = resolve(machine.name, devices() if names is None else names)
    except KvsimError as unknown:
        # several sizes of one GPU share a name: the memory decides
        stems = re.findall(r"choose one of (.+)$", str(unknown))
        return next((s for s in (stems[0].split(", ") if stems else []) if _is(machine, load_device(s))), None)
    return stem if _is(machine, load_device(stem)) else None


def _is(machine: Machine, profile: HardwareProfile) -> bool:
    if machine.kind == "cpu":
        return profile.kind == "cpu" and profile.units == machine.units
    same_units = profile.units == machine.units
    near = abs(machine.capacity_bytes / profile.capacity_bytes - 1.0) <= CAPACITY_TOLERANCE
    return profile.kind in ("gpu", "unified") and same_units and near


def edition_name(machine: Machine, asked: str | None = None) -> str:
    """The name of a profile measured here: that of the shipped device it is, or one that claims no such device.

    asked: a name that the user wants. KvsimError where it means a shipped device that this machine is not.
    """
    own = identify(machine)
    if asked is not None and not (asked.strip() and asked.isprintable() and "/" not in asked and len(asked) <= 100):
        raise KvsimError(f"name {shown(asked)} must be words without slashes, of at most 100 characters")
    if asked is None:
        return load_device(own).name if own else _plain_name(machine)
    try:
        meant: str | None = resolve(asked, devices())[0]
    except KvsimError as unknown:
        if "ambiguous" in str(unknown):
            raise KvsimError(f"name {shown(asked)} means shipped devices, and this is {_described(machine)}") from None
        meant = None
    if meant is not None and meant != own:
        raise KvsimError(f"name {shown(asked)} means the shipped {meant}, and this is {_described(machine)}; "
                         "choose another name, or leave --name away")
    return asked


def _described(machine: Machine) -> str:
    what = "cores" if machine.kind == "cpu" else "multiprocessors"
    return f"{machine.name} with {machine.units} {what} and {machine.capacity_bytes / 2**30:.1f} GiB"


def _plain_name(machine: Machine) -> str:
    words = re.sub(r"\(R\)|\(TM\)|@.*|\b(CPU|Processor)\b|\d+-Core", " ", machine.name)
    unit = "core" if machine.kind == "cpu" else "sm"
    return f"{'-'.join(words.split())}-{machine.units}{unit}-{machine.capacity_bytes / 2**30:.0f}gib"


def check_here(profile: HardwareProfile, machine: Machine) -> None:
    """Raise KvsimError unless the profile can be of this machine: kind, units and memory; its cores may be fewer."""
    kinds = ("cpu",) if machine.kind == "cpu" else ("gpu", "unified")
    units = profile.units <= machine.units if machine.kind == "cpu" else profile.units == machine.units
    near = abs(machine.capacity_bytes / profile.capacity_bytes - 1.0) <= CAPACITY_TOLERANCE
    if not (profile.kind in kinds and units and near):
        raise KvsimError(f"{profile.name} is not this machine, which is {_described(machine)}: what runs here cannot "
                         "pass for another device; leave --device away, or give what `kvsim calibrate` wrote here")
