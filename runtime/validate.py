"""`kvsim validate`: methods x lengths x batches predicted and measured here, line by line, to be repeated by anyone."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import kvsim
from kvsim.cli_options import Counts, print_json
from kvsim.errors import KvsimError
from kvsim.grammar import split
from kvsim.hardware import HardwareProfile
from kvsim.method import parse_method
from kvsim.model import ModelSpec
from kvsim.record import Case, Record
from kvsim.workload import Workload
from runtime.calibrate import progress
from runtime.calibration_fits import PACE
from runtime.device import check_here, this_machine
from runtime.files import write_whole
from runtime.measure import load_running, measure, named_spec
from runtime.microbench import HF_DTYPES as DTYPES
from runtime.microbench import launch
from runtime.pace import CALM, Pace
from runtime.profile_file import check_place
from runtime.timing import QUIET_SPREAD, Bench, clock_name, pinned_threads
from runtime.validation_stats import figures, inside, what

METHODS = (
    "full", "int(bits=4,group=32)", "int(bits=8,symmetric=true)", "kivi-4", "kivi-2", "k:int(bits=8) v:int(bits=4)",
    "k4v2", "q4_1", "fp8(scale=row)", "rotated(bits=5)", "svd(rank=48)", "svd(rank=24) | int(bits=4)",
    "random_projection(rank=48)", "snapkv(budget=0.25)", "snapkv(budget=0.5) | int(bits=4)", "h2o(budget=0.2)",
    "h2o(budget=0.5) | int(bits=8)", "tova(budget=0.25)", "window(sinks=4,recent=300)",
    "window(sinks=4,recent=508) | int(bits=4)", "pyramid(budget=0.25) | q8_0", "topk(budget=0.25) | int(bits=2)",
    "pages(size=32,top=256) | int(bits=4)", "ada(budget=0.25)", "int(bits=4)+outliers(fraction=0.01)",
)
"""Compositions and settings that no calibration measures; `full` for comparison."""


@dataclass(frozen=True)
class Grid:
    """What is measured: every method at every length and batch."""

    methods: tuple[str, ...]
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int = 16
    repeats: int = 1
    seed: int = 0

    def __len__(self) -> int:
        return len(self.methods) * len(self.prompts) * len(self.batches)


def validate(grid: Grid, hf_model: nn.Module, spec: ModelSpec, profile: HardwareProfile,
             tell: Callable[[str], None] = lambda text: None, before: Mapping[str, Any] | None = None,
             keep: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
    """Measure the grid beside its predictions; everything as one JSON object.

    before: a record of the same question whose undisturbed cells are taken over instead of measured. keep: is handed
    the record so far after each cell, so that a run that ends early can go on. Raises KvsimError where `before` is of
    another one.

    `rows` has one entry a line and a phase (`name` is `whole` for the sum), `summary` errors, coverage and order,
    `busy` whether repeats spread so much that the errors say little. Methods that this model refuses are listed in
    `left_out` with the reason.
    """
    where = next(hf_model.parameters()).device
    check_here(profile, this_machine(where))
    about = _about(grid, spec, profile, where)
    rows, left_out = _taken_over(before, about)
    known = calibrated_pace(profile)
    pace, spare = Pace(where, known), len(grid) // 2
    looked = pace.now()
    done = {(r["method"], r["prompt_tokens"], r["batch"]) for r in rows}
    for text in grid.methods:
        for prompt in grid.prompts:
            for batch in grid.batches:
                tell(f"{text}, {batch} x {prompt}")
                if (text, prompt, batch) in done or text in left_out:
                    continue
                case = Case(spec, profile, parse_method(text), Workload(batch, prompt, grid.steps))
                try:
                    record, slower, looked, again = _undisturbed(case, hf_model, grid, pace, looked, spare)
                except KvsimError as refused:
                    left_out[text] = str(refused)
                    continue
                spare -= again
                rows += [{**row, "slower": slower} for row in _beside(text, kvsim.predict(_middle(case)), record)]
                keep({**about, "left_out": dict(left_out), "rows": list(rows)})
    if not rows:
        raise KvsimError("none of the methods runs on this model: " + "; ".join(left_out.values()))
    wholes = [r["spread"] for r in rows if r["name"] == "whole" and r["phase"] == "decode"]
    slower, load = pace.step_s / known if known else slowdown(profile, where), _load()
    calm = [r for r in rows if r.get("slower", 1.0) <= CALM]
    return {
        **about, "load": load, "spread": float(np.median(wholes)), "slower_than_when_calibrated": slower,
        "disturbed": 1.0 - len(calm) / len(rows),
        "busy": bool(np.median(wholes) > QUIET_SPREAD or slower > QUIET_SPREAD or len(calm) < len(rows) / 2
                     or crowded(load)),
        "summary": figures(rows, grid.seed), "undisturbed": figures(calm, grid.seed) if calm else None,
        "left_out": left_out, "rows": rows,
    }


TRIES = 3
"""Runs of a cell beside which the machine was not at its pace."""


def _undisturbed(case: Case, hf_model: nn.Module, grid: Grid, pace: Pace, looked: float,
                 spare: int) -> tuple[Record, float, float, int]:
    """A cell measured while the machine was at its pace, or after TRIES, and how much slower it was at either end.

    looked: how much slower it was just before. spare: runs that may be repeated at all. Gives how slow it is at last
    and how many runs were repeated, too.
    """
    found: list[tuple[Record, float]] = []
    for _ in range(min(TRIES, spare + 1)):
        record = measure(case, hf_model, steps=grid.steps, repeats=grid.repeats)
        before, looked = looked, pace.now()
        found.append((record, max(before, looked)))
        if found[-1][1] <= CALM:
            break
    best = min(found, key=lambda one: one[1])
    return *best, looked, len(found) - 1


def calibrated_pace(profile: HardwareProfile) -> float:
    """Seconds of `Pace`'s step when the profile was made; 0 where it does not say."""
    return next((c.t0_s for c in profile.own_coefficients if c.format == PACE), 0.0)


SAME = ("kind", "machine", "profile", "threads", "clock", "versions", "model", "layers", "dtype")
"""What two records have in common where the cells of one may stand in the other."""


def _about(grid: Grid, spec: ModelSpec, profile: HardwareProfile, where: torch.device) -> dict[str, Any]:
    """The question, and all that is needed to repeat it."""
    return {
        "kind": "validation", "date": datetime.date.today().isoformat(), "machine": this_machine(where).to_json(),
        "profile": {"name": profile.name, "path": profile.path, "sha256": _hash(profile.path), "date": profile.date},
        "threads": torch.get_num_threads(), "clock": clock_name(where), "versions": _versions(),
        "model": spec.name, "layers": spec.n_layers, "dtype": spec.dtype, "grid": vars(grid) | {"cells": len(grid)},
    }


def _taken_over(before: Mapping[str, Any] | None, about: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Undisturbed rows and refusals of an earlier part of the same validation; its sizes join the grid."""
    if before is None:
        return [], {}
    plain = json.loads(json.dumps(about))
    other = [name for name in SAME if before.get(name) != plain[name]]
    if other:
        raise KvsimError(f"the record to go on with differs in {', '.join(other)}: give --out another file")
    grid = about["grid"]
    for name in ("methods", "prompts", "batches"):
        grid[name] = list(dict.fromkeys([*before["grid"][name], *grid[name]]))
    grid["cells"] = len(grid["methods"]) * len(grid["prompts"]) * len(grid["batches"])
    return [row for row in before["rows"] if row.get("slower", 1.0) <= CALM], dict(before["left_out"])


def slowdown(profile: HardwareProfile, where: torch.device) -> float:
    """How many times longer the least operation takes now than when the profile was made; 1.0 where it does not say."""
    then = next((c.t0_s for c in profile.own_coefficients if c.key == ("elementwise", "*", "*")), 0.0)
    return launch(Bench(where, 0)).seconds / then if then else 1.0


def _middle(case: Case) -> Case:
    """The case at the step in the middle of those that are timed: the median of steps belongs there."""
    work = case.workload
    return replace(case, workload=Workload(work.batch, work.prompt_tokens, work.new_tokens // 2 + 1))


def _beside(text: str, predicted: Record, measured: Record) -> Iterator[dict[str, Any]]:
    """Rows of one cell: lines that both sides have, and the whole of each phase."""
    work = measured.case.workload
    for phase in ("prefill", "decode"):
        mine, theirs = getattr(measured, phase), getattr(predicted, phase)
        twins = {line.name: line for line in theirs.lines}
        pairs = [(line.name, line, twins[line.name]) for line in mine.lines if line.name in twins]
        for name, one, twin in [*pairs, ("whole", mine, theirs)]:
            if not one.seconds or not twin.seconds:
                continue
            yield {"method": text, "batch": int(work.batch), "prompt_tokens": int(work.prompt_tokens), "phase": phase,
                   "name": name, "predicted_s": float(twin.seconds), "low_s": float(twin.low),
                   "high_s": float(twin.high), "measured_s": float(one.seconds),
                   "spread": float(one.high / max(one.low, 1e-12)) ** 0.5,
                   "coefficients": getattr(twin, "coefficients", "")}


def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""


def crowded(load: Sequence[float]) -> bool:
    """Whether more others want to run than there are processors: what they do to caches and memory, no clock shows."""
    return bool(load) and load[0] - torch.get_num_threads() > (os.cpu_count() or 1)


def _load() -> list[float]:
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else []


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("kvsim", "torch", "transformers", "numpy")}


# -- the command -------------------------------------------------------------------------------------------------


@click.command("validate")
@click.option("--device", required=True, metavar="FILE", help="A profile that `kvsim calibrate` wrote here.")
@click.option("--model", default="smollm2-135m", metavar="M", help="What runs.  [smollm2-135m]")
@click.option("--layers", type=click.IntRange(1), default=6, metavar="N", help="Layers of it; weights are random.  [6]")
@click.option("--methods", metavar="S,S..", help="Methods.  [25 that calibration does not measure]")
@click.option("--prompt", "prompts", type=Counts(), default="384,768,1536,2560", help="Lengths.  [384,768,1536,2560]")
@click.option("--batch", "batches", type=Counts(), default="1", help="Batches.  [1]")
@click.option("--on", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to run.  [cpu]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32", help="Of weights and full rows.  [fp32]")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of torch.  [as torch has them]")
@click.option("--steps", type=click.IntRange(4, 1000), default=16, help="Decode steps a cell.  [16]")
@click.option("--repeats", type=click.IntRange(1, 100), default=1, help="Prompts a cell.  [1]")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Save the record as JSON, cell by cell.")
@click.option("--resume", is_flag=True, help="Keep the undisturbed cells of --out, measure the others.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw predicted against measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the record.")
def command(device: str, model: str, layers: int, methods: str | None, prompts: tuple[int, ...],
            batches: tuple[int, ...], on: str, dtype: str, threads: int | None, steps: int, repeats: int,
            out: Path | None, resume: bool, plot: Path | None, as_json: bool) -> None:
    """Say how far predictions are from what this machine does: errors, coverage of intervals, order of methods.

    `--against CSV` compares with measured tables from elsewhere instead.
    """
    chosen = tuple(part.strip() for part in split(methods, ",")) if methods else METHODS
    for text in chosen:
        parse_method(text)
    grid = Grid(chosen, prompts, batches, steps, repeats)
    if out is not None:
        check_place(out)
    if plot is not None:
        check_place(plot, "--plot", (".png", ".svg"))
    before = _record_of(out) if resume else None
    with pinned_threads(threads):
        profile = kvsim.load_device(device)
        hf_model = load_running(model, True, dtype, layers, on)
        with progress(len(grid), "validating") as tell:
            found = validate(grid, hf_model, named_spec(model, hf_model, dtype), profile, tell, before,
                             lambda so_far: _save(so_far, out))
    _save(found, out)
    if plot is not None:
        draw(found, plot)
    if as_json:
        print_json(found)
    else:
        print_validation(found)


def _save(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_whole(out, json.dumps(found, indent=1))


def _record_of(out: Path | None) -> dict[str, Any] | None:
    """The record of an earlier run; None where there is none yet."""
    if out is None:
        raise KvsimError("--resume goes on with the file of --out: name it")
    if not out.exists():
        return None
    try:
        found = json.loads(out.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise KvsimError(f"{out} cannot be gone on with: {error}") from None
    if not isinstance(found, dict) or not {"rows", "grid", "left_out"} <= found.keys():
        raise KvsimError(f"{out} is no record of a validation: give --out another file")
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Predicted against measured times of the main figures, as PNG or SVG by the file's name."""
    try:
        from kvsim.plot.measured import predicted_measured
    except ImportError:
        raise KvsimError("--plot needs matplotlib: pip install 'kvsim[notebooks]'") from None
    rows = [{**r, "what": what(r)} for r in found["rows"] if r["name"] in ("whole", "attention")]
    axes = predicted_measured(rows, group="what", name="method")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path)


def print_validation(found: dict[str, Any]) -> None:
    """Figures by line, the worst misses, the order, and whether the machine let itself be measured."""
    from rich.console import Console

    from kvsim.report import Column, duration, say, table

    out = Console()
    say(out, f"{found['profile']['name']}: {found['model']}, {found['layers']} layers, {found['dtype']}, "
             f"{found['threads']} threads ({found['clock']}), {found['date']}")

    def percent(value: float) -> str:
        return f"{100 * value:.1f}%"

    lines = [(name, str(f["rows"]), percent(f["median_error"]), percent(f["mean_error"]), f"{100 * f['bias']:+.0f}%",
              percent(f["coverage"]), f"{100 * f['coverage_low']:.0f}-{100 * f['coverage_high']:.0f}%",
              percent(f["median_half_width"])) for name, f in found["summary"]["lines"].items()]
    heads = ("line", "rows", "median error", "mean", "bias", "in 90%", "bootstrap", "half-width")
    table(out, [Column(h, right=h != "line") for h in heads], lines)
    worst = sorted((r for r in found["rows"] if r["name"] in ("whole", "attention")), key=_miss, reverse=True)[:5]
    table(out, [Column(h) for h in ("worst", "length", "line", "predicted", "measured", "")],
          [(r["method"], f"{r['batch']} x {r['prompt_tokens']}", what(r), duration(r["predicted_s"]),
            duration(r["measured_s"]), "" if inside(r) else "outside its interval") for r in worst])
    for name, key in (("whole steps", "order"), ("attention", "attention_order")):
        tau, apart = (found["summary"][key][k] for k in ("tau", "tau_apart"))
        said = f"Kendall tau {tau:.2f}" if tau is not None else "too few methods"
        said += f", {apart:.2f} over pairs that differ by more than 10%" if apart is not None else ""
        say(out, f"order of methods by {name}: {said}")
    for method, why in found["left_out"].items():
        say(out, f"left out: {method}: {why}", style="yellow")
    if found["busy"]:
        slower, load = found["slower_than_when_calibrated"], ", ".join(f"{x:.1f}" for x in found["load"])
        say(out, f"note: the machine is busy (repeats of a step spread by {found['spread']:.2f}, small operations take "
                 f"{slower:.2f} times as long as when it was calibrated, load {load}, {percent(found['disturbed'])} of "
                 "cells disturbed): these errors are unreliable; validate again when it is quiet", style="bold yellow")


def _miss(row: dict[str, Any]) -> float:
    return abs(float(np.log(row["predicted_s"] / row["measured_s"])))


def rows_of(found: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
    """The rows of one figure, as `figures` names it."""
    return [r for r in found["rows"] if what(r) == name]
