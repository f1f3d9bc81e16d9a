"""What is known of methods, devices and models, as plain rows with sources: for `show`, the lists, the README."""

from __future__ import annotations

from dataclasses import MISSING, Field, asdict
from pathlib import Path
from typing import Any

from kvsim.catalogue import entries, find
from kvsim.configs import load_model
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.grammar import presets
from kvsim.hardware import HardwareProfile, devices, load_device
from kvsim.method import Method, parse_method, preset_name
from kvsim.model import ModelSpec
from kvsim.parts import Correction, Format, Part, TokenPolicy, parts
from kvsim.settings import written

LENGTH = 32768
"""Tokens at which lists give the size of a model's cache, or its context where that is shorter."""


def method_rows() -> list[dict[str, Any]]:
    """One row a part, formats first, each with its settings, facts and source."""
    return [_part(kind) for kind in parts().values()]


def preset_rows() -> list[dict[str, Any]]:
    """One row a preset: the method that it names, and where that comes from."""
    return [{"kind": "preset", **asdict(p)} for p in presets().values()]


def device_rows() -> list[dict[str, Any]]:
    """One row a shipped device."""
    return [{**_device(load_device(stem)), "name": stem} for stem in devices()]


def model_rows() -> list[dict[str, Any]]:
    """One row a shipped model."""
    return [{**_model(load_model(e.name)), "aliases": list(e.aliases)} for e in entries().values()]


def known(name: str) -> dict[str, Any]:
    """Everything about the part, preset, device, model or written method that `name` means.

    Raises KvsimError for a name that means none of them (nearest name) or several (all listed).
    """
    text = name.strip()
    if text in parts():
        return {**_part(parts()[text]), "runs_in": _support_of_part(text)}
    if text in presets():
        return {"kind": "preset", **asdict(presets()[text]), **_method(parse_method(text))}
    if text.endswith(".json") or (text and Path(text).is_dir() and "/" in text):
        return _model_in_full(load_model(text))
    if text.endswith(".toml"):
        return _device_in_full(load_device(text))
    entry = find(text, must=False)
    if entry is not None:
        return _model_in_full(load_model(entry.name))
    reasons = []
    for look in (_as_device, _as_model, _as_method):
        try:
            return look(text)
        except KvsimError as reason:
            reasons.append(str(reason))
    several = next((r for r in reasons if "is ambiguous" in r), "")
    if several or any(mark in text for mark in "(|:"):
        raise KvsimError(several or reasons[-1])
    every = [*parts(), *presets(), *devices(), *entries()]
    raise KvsimError(
        f"{shown(text)} names no method, device or model{did_you_mean(text, every)}; "
        "see `kvsim methods`, `kvsim devices`, `kvsim models`"
    )


def _as_device(text: str) -> dict[str, Any]:
    return _device_in_full(load_device(text))


def _as_model(text: str) -> dict[str, Any]:
    entry = find(text)
    assert entry is not None  # find raises where there is none
    return _model_in_full(load_model(entry.name))


def _as_method(text: str) -> dict[str, Any]:
    method = parse_method(text)
    return {"kind": "method", "name": preset_name(method) or str(method), "method": str(method), **_method(method)}


def _part(kind: type[Part]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": kind.role,
        "name": kind.name,
        "summary": kind.summary,
        "source": kind.source,
        "survey": kind.survey,
    }
    needs = [f.name for f in kind.settings() if f.default is MISSING]
    if not needs:  # facts that may depend on settings are told at the defaults
        part = kind()
        facts |= {"written": str(part), "caution": part.caution}
        if isinstance(part, Format | Correction):
            facts["row_addressable"] = part.row_addressable
        if isinstance(part, TokenPolicy):
            facts |= {"drops": part.drops, "positional": part.positional, "needs_weights": part.needs_weights}
    facts["settings"] = [_setting(f) for f in kind.settings()]
    return facts


def _setting(spec: Field[Any]) -> dict[str, Any]:
    low, high, choices, what = (spec.metadata.get(k) for k in ("low", "high", "choices", "what"))
    default = None if spec.default is MISSING else written(spec.default)
    return {
        "name": spec.name,
        "default": default,
        "type": str(spec.type),
        "low": low,
        "high": high,
        "choices": list(choices or ()),
        "what": what or "",
    }


def _method(method: Method) -> dict[str, Any]:
    return {
        "written": str(method),
        "parts": [
            {"part": str(p), "kind": p.role, "summary": p.summary, "source": p.source, "survey": p.survey}
            for p in method.parts()
        ],
        "runs_in": _support(str(method)),
    }


def _support(name: str) -> list[dict[str, str]]:
    from kvsim.engines.support import support

    return [asdict(row) for row in support(name)]


def _support_of_part(name: str) -> list[dict[str, str]]:
    """Rows of a part; none for one that no table names and that is no method alone (a correction, a basis)."""
    try:
        return _support(name)
    except KvsimError:
        return []


def _device(profile: HardwareProfile) -> dict[str, Any]:
    return {
        "kind": "device",
        "name": profile.name,
        "full_name": profile.name,
        "vendor": profile.vendor,
        "architecture": profile.architecture,
        "family": profile.family,
        "type": profile.kind,
        "capacity_bytes": profile.capacity_bytes,
        "bandwidth_bytes_per_s": profile.bandwidth_bytes_per_s,
        "peaks": dict(profile.peaks),
        "units": profile.units,
        "last_level_cache_bytes": profile.last_level_cache_bytes,
        "tdp_w": profile.tdp_w,
    }


def _device_in_full(profile: HardwareProfile) -> dict[str, Any]:
    return {
        **_device(profile),
        "date": profile.date,
        "edition": profile.edition,
        "notes": list(profile.notes),
        "facts": [{"what": w, "value": v, "source": s} for w, v, s in profile.facts()],
    }


def _model(spec: ModelSpec) -> dict[str, Any]:
    length = min(LENGTH, spec.max_context or LENGTH)
    return {
        "kind": "model",
        "name": spec.name,
        "architecture": spec.architecture,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "layers": spec.n_layers,
        "kinds": dict(spec.kinds()),
        "max_context": spec.max_context,
        "dtype": spec.dtype,
        "source": spec.source,
        "cache_tokens": length,
        "cache_bytes": int(spec.cache_bytes(length)),
    }


def _model_in_full(spec: ModelSpec) -> dict[str, Any]:
    groups = []
    for layer, where in spec.groups:
        a = layer.attention
        row: dict[str, Any] = {"layers": list(where), "kind": layer.kind, "parameters": layer.parameters}
        if a is not None:
            row |= {
                "n_heads": a.n_heads,
                "n_kv_heads": a.n_kv_heads,
                "k_dim": a.k_dim,
                "v_dim": a.v_dim,
                "window": a.window,
            }
        row["state_bytes"] = sum(s.bytes for s in layer.states)
        groups.append(row)
    return {
        **_model(spec),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "tied": spec.tied,
        "tower_parameters": spec.tower_parameters,
        "groups": groups,
        "warnings": list(spec.warnings),
    }
