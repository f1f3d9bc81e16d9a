"""The shipped models: names, aliases and where each config was read; one small file a model, one index."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError, did_you_mean, shown

_FOLDER = Path(__file__).with_name("data") / "models"


@dataclass(frozen=True)
class Entry:
    """One shipped model: its short name, other names that mean it, where its config was read, its parameters."""

    name: str
    aliases: tuple[str, ...]
    source: str
    parameters: int

    def config(self) -> dict[str, Any]:
        """The fields of its config.json that matter here."""
        text = (_FOLDER / f"{self.name}.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)["config"]
        return found


@cache
def entries() -> dict[str, Entry]:
    """All shipped models by name, from the index (their configs are read one at a time, on demand)."""
    rows = json.loads((_FOLDER / "index.json").read_text(encoding="utf-8"))["models"]
    return {r["name"]: Entry(r["name"], tuple(r["aliases"]), r["source"], r["parameters"]) for r in rows}


def catalogue() -> list[str]:
    """The short names of all shipped models, sorted."""
    return sorted(entries())


@cache
def _spellings() -> dict[str, str]:
    """Folded spelling to name."""
    found: dict[str, str] = {}
    for entry in entries().values():
        for spelling in (entry.name, *entry.aliases):
            found[_fold(spelling)] = entry.name
            found.setdefault(_fold(spelling.rpartition("/")[2]), entry.name)
    return found


def _fold(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return "".join(c for c in name.lower() if c.isalnum())


def find(name: str, must: bool = True) -> Entry | None:
    """The shipped model that `name` means, case and punctuation aside.

    Where there is none: None if not `must`, else KvsimError with the choices that `name` begins or the nearest name.
    """
    folded = _fold(name)
    hit = _spellings().get(folded)
    if hit is not None:
        return entries()[hit]
    if not must:
        return None
    several = sorted({full for short, full in _spellings().items() if folded and short.startswith(folded)})
    if len(several) > 1:
        more = f" and {len(several) - 12} more" if len(several) > 12 else ""
        raise KvsimError(f"model {shown(name)} is ambiguous: {', '.join(several[:12])}{more}")
    near = f" (did you mean {several[0]!r}?)" if several else did_you_mean(name, entries())
    raise KvsimError(f"model {shown(name)} is not known{near}; see `kvsim models`, or give the path of its config.json")
