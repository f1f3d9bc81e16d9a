"""Results of the survey's experiments as files: what they were made from, written, and shown by kvsim's own tables."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import click

from kvsim.cli_options import print_json
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


def finish(found: dict[str, Any], out: str | None, as_json: bool) -> None:
    """Keep the result where it was asked for, and show it."""
    if out:
        Path(out).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(lines(found)))
