"""A measured device profile as TOML: written as `kvsim.load_device` reads it, checked by it, put in place at once."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvsim.coefficients import BOUNDS, Coefficient
from kvsim.errors import KvsimError, shown
from kvsim.hardware import HardwareProfile, load_device
from runtime.device import Machine, identify
from runtime.files import write_whole

HEAD = ("name", "vendor", "architecture", "family", "kind", "topology", "vendor_capacity", "date", "edition")
GENERATIONS = {"7.0": "volta", "7.5": "turing", "8.0": "ampere-dc", "8.6": "ampere-gddr", "8.7": "ampere-gddr",
               "8.9": "ada", "9.0": "hopper", "10.0": "blackwell-dc", "10.3": "blackwell-dc", "12.0": "blackwell-gddr",
               "12.1": "unified-nvidia"}
"""Families by CUDA compute capability."""


def text_of(facts: dict[str, str], notes: list[str], numbers: dict[str, tuple[float, str, str]],
            peaks: dict[str, tuple[float, str]], rows: list[Coefficient]) -> str:
    """The file. numbers: field -> (value, unit, source); peaks: dtype -> (TFLOPS, source)."""
    lines = ["# Written by `kvsim calibrate`: measured here, not a datasheet."]
    lines += [f"{key} = {_quoted(facts[key])}" for key in HEAD if facts.get(key)]
    lines.append(f"notes = [{', '.join(_quoted(n) for n in notes)}]")
    lines += [f"{key} = {{ value = {value:.6g}, unit = {_quoted(unit)}, source = {_quoted(source)} }}"
              if isinstance(value, float) else
              f"{key} = {{ value = {value}, unit = {_quoted(unit)}, source = {_quoted(source)} }}"
              for key, (value, unit, source) in numbers.items()]
    lines += ["", "[peaks]"]
    lines += [f'{d} = {{ value = {v:.5g}, unit = "TFLOPS", source = {_quoted(s)} }}' for d, (v, s) in peaks.items()]
    blank = {f.name: f.default for f in fields(Coefficient)}
    for c in rows:
        lines += ["", "[[coefficients]]"]
        for name, default in blank.items():
            value = getattr(c, name)
            if value != default or name == "log_error":
                lines.append(f"{name} = {_value(name, value)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def _value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if name in ("log_error", "memory_log_error"):
        return f"[{', '.join(f'{v:.4f}' for v in value)}]"
    if name == "devices":
        return f"[{', '.join(_quoted(v) for v in value)}]"
    if isinstance(value, tuple):
        return f"{{ {', '.join(f'{d} = {v:.5g}' for d, v in value)} }}"
    if isinstance(value, float) and name in BOUNDS:
        low, high = BOUNDS[name]
        return f"{min(max(value, low), high):.5g}"
    return str(value)


def checked(text: str) -> HardwareProfile:
    """The profile that a text gives; KvsimError, naming every mistake, where it is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.toml"
        file.write_text(text, encoding="utf-8")
        return load_device(file)


def write(text: str, path: Path) -> HardwareProfile:
    """Check the text and put it in its place."""
    profile = checked(text)
    write_whole(path, text)
    return profile


def check_place(path: Path, option: str = "--out", suffixes: tuple[str, ...] = ()) -> None:
    """KvsimError where a file cannot be written, or not of its kind: told before minutes of measuring, not after."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise KvsimError(f"{option} {shown(str(path), 200)}: give a file that ends in {' or '.join(suffixes)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise KvsimError(f"{option} {shown(str(path), 200)} cannot be written: {error.strerror}") from None


def facts_of(machine: Machine, name: str, date: str) -> dict[str, str]:
    """The words of a profile of this machine."""
    gib, own = -(-machine.capacity_bytes // 2**30), identify(machine)
    family = load_device(own).family if own else "cpu" if machine.kind == "cpu" else GENERATIONS[machine.architecture]
    return {"name": name, "vendor": machine.vendor, "architecture": machine.architecture, "family": family,
            "kind": machine.kind, "topology": "none", "date": date, "edition": "calibrated",
            "vendor_capacity": f"{gib} GB (as the system reports it, rounded up)"}
