"""Results of the survey's experiments as files: what they were made from, written, and shown by kvsim's own tables."""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from kvsim.cli_options import print_json
from kvsim.errors import KvsimError, shown
from kvsim.survey_results import lines
from runtime.files import write_whole
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
    try:
        held = json.loads(Path(out).read_text("utf-8"))
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or not isinstance(held.get("rows"), list):
        raise KvsimError(f"{shown(out)} holds no result of {found['kind']}, or a damaged one; name another file")
    other = next((k for k, v in found.items() if k not in ("date", "machine", "versions") and held.get(k) != v), None)
    if other is not None:
        raise KvsimError(f"{shown(out)} holds a run with {other} {shown(held.get(other))} instead of "
                         f"{shown(found[other])}; name another file")
    rows: list[dict[str, Any]] = held["rows"]
    return rows


def run_alone(command: click.Command, args: list[str] | None = None) -> None:
    """Run a command that is a module's own; what is wrong with the question ends it with one line and status 2."""
    try:
        command.main(args)
    except KvsimError as problem:
        click.echo(f"kvsim: {problem}", err=True)
        sys.exit(2)


def numbers(text: str, option: str, low: float, high: float) -> list[float]:
    """A comma list of numbers above `low` and at most `high`; KvsimError with the one that is none."""
    found = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not low < value <= high:
            raise KvsimError(f"{option}: {shown(word)} is no number above {low:g} and at most {high:g}")
        found.append(value)
    return found


def check_counts(**counts: int | None) -> None:
    """KvsimError where a count of the command line is given and below 1."""
    wrong = next((name for name, n in counts.items() if n is not None and n < 1), None)
    if wrong is not None:
        raise KvsimError(f"--{wrong} is 1 or more, got {counts[wrong]}")


def check_out(out: str | None) -> None:
    """KvsimError where a result could not be kept: told before hours are spent on it."""
    if out is not None and (not out or Path(out).is_dir() or not Path(out).absolute().parent.is_dir()):
        raise KvsimError(f"--out {shown(out)}: name a file in a folder that is there")


def write(found: dict[str, Any], out: str | None) -> None:
    """Keep what there is so far."""
    if out:
        write_whole(Path(out), json.dumps(found, indent=1, allow_nan=False) + "\n")


def finish(found: dict[str, Any], out: str | None, as_json: bool) -> None:
    """Keep the result where it was asked for, and show it."""
    write(found, out)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(lines(found)))
