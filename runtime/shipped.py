"""Results of the survey's experiments as files: what they were made from, written, and shown by kvsim's own tables."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import click

from kvsim.cli_options import print_json
from kvsim.errors import KvsimError, shown
from kvsim.survey_results import lines
from runtime.quality_run import machine, versions
from runtime.quality_subjects import Subject, Text


def labelled(kind: str, subject: Subject, text: Text | None, seed: int) -> dict[str, Any]:
    """What every result says of itself: kind, model and text with hashes, seed, machine, date, versions."""
    found = {"kind": kind, "model": subject.name, "model_hash": subject.hash}
    if text is not None:
        found |= {"text": text.name, "text_hash": text.hash}
    return found | {
        "seed": seed, "machine": machine(), "date": datetime.date.today().isoformat(), "versions": versions()
    }


def earlier(found: dict[str, Any], out: str | None) -> list[dict[str, Any]]:
    """Rows that a run of the same model, text and settings left in `out`; none where there is no such file.

    Raises KvsimError where the file holds another run.
    """
    if out is None or not Path(out).is_file():
        return []
    held = json.loads(Path(out).read_text("utf-8"))
    other = next((k for k, v in found.items() if k not in ("date", "machine", "versions") and held.get(k) != v), None)
    if other is not None:
        raise KvsimError(f"{shown(out)} holds a run with {other} {held.get(other)!r} instead of {found[other]!r}; name "
                         "another file")
    rows: list[dict[str, Any]] = held["rows"]
    return rows


def write(found: dict[str, Any], out: str | None) -> None:
    """Keep what there is so far."""
    if out:
        Path(out).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")


def finish(found: dict[str, Any], out: str | None, as_json: bool) -> None:
    """Keep the result where it was asked for, and show it."""
    write(found, out)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(lines(found)))
