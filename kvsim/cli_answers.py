"""The commands fit, predict and sweep: a question in, an answer out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvsim.cli_options import (
    NOTHING_FITS,
    Asked,
    AskedLimits,
    AskedQuality,
    Count,
    Counts,
    asks,
    json_option,
    judged,
    leave,
    limited,
    print_json,
)
from kvsim.errors import KvsimError

if TYPE_CHECKING:
    from kvsim.grid import Sweep

prompt_option = click.option("--prompt", type=Count(), required=True, metavar="T", help="Tokens of each prompt.")
new_option = click.option("--new", type=Count(), default=0, metavar="K", help="Tokens generated after it.  [0]")
batch_option = click.option("--batch", type=Count(), default=1, metavar="B", help="Sequences served together.  [1]")
method_option = click.option(
    "--method", "method", required=True, metavar="S", help="A method, as `kvsim methods` writes them."
)

MAX_POINTS = 10_000_000
LONG_SWEEP = 50_000
"""Points from which a progress bar is worth its line."""


@click.command("fit")
@asks
@limited
@judged
@prompt_option
@new_option
@batch_option
@click.option("--methods", metavar="S,S..", help="Consider only these.  [every preset and a grid of compositions]")
@click.option(
    "--objective",
    metavar="O",
    help="gentle, memory, speed, context or batch.  [gentle; with limits on quality memory]",
)
@click.option("--engine", default="", metavar="E", help="Only what this server runs, with its flags.")
@click.option("--all", "everything", is_flag=True, help="Name every method that was considered.")
@json_option
def fit_command(
    asked: Asked,
    limits: AskedLimits,
    quality: AskedQuality,
    prompt: int,
    new: int,
    batch: int,
    methods: str | None,
    objective: str | None,
    engine: str,
    everything: bool,
    as_json: bool,
) -> None:
    """Say which methods fit a device, and choose one."""
    from kvsim.plan import fit
    from kvsim.workload import Workload

    model, device = asked.load()
    plan = fit(
        model,
        device,
        Workload(batch, prompt, new),
        objective=objective,  # type: ignore[arg-type]
        methods=None if methods is None else split_methods(methods, "--methods"),
        limits=quality.added(limits.limits()),
        weights=asked.weights,
        kv_dtype=asked.kv_dtype,
        devices=asked.devices,
        reserve_bytes=asked.reserve,
        kernel=asked.kernel,
        engine=engine,
        evidence=quality.rows(),
    )
    if as_json:
        print_json(plan.to_json())
    else:
        from kvsim.report import console
        from kvsim.report_plan import print_plan

        print_plan(console(), plan, everything)
    leave(0 if plan.chosen else NOTHING_FITS)


@click.command("predict")
@asks
@limited
@method_option
@prompt_option
@new_option
@batch_option
@json_option
def predict_command(
    asked: Asked, limits: AskedLimits, method: str, prompt: int, new: int, batch: int, as_json: bool
) -> None:
    """Say what one method costs in memory and time, line by line."""
    from kvsim.plan import shortfall
    from kvsim.prediction import predict

    record = predict(asked.case(method, batch, prompt, new))
    reason, short = shortfall(record, limits.limits())
    if as_json:
        print_json(record.to_json())
    else:
        from kvsim.report import console
        from kvsim.report_record import print_record

        print_record(console(), record, reason, short)
    leave(NOTHING_FITS if reason else 0)


@click.command("sweep")
@asks
@click.option("--method", "--methods", "methods", required=True, metavar="S[,S..]", help="One or more methods.")
@click.option(
    "--prompt", type=Counts(), required=True, metavar="RANGE", help="Prompt lengths: 4096:131072:x2, 0:8k:1k, 1,2,3."
)
@click.option("--batch", type=Counts(), default="1", metavar="RANGE", help="Batches.  [1]")
@new_option
@click.option("--out", type=click.Path(), metavar="FILE", help="Write to FILE.csv or FILE.json instead of printing.")
@json_option
def sweep_command(
    asked: Asked,
    methods: str,
    prompt: tuple[int, ...],
    batch: tuple[int, ...],
    new: int,
    out: str | None,
    as_json: bool,
) -> None:
    """Predict every combination of methods, batches, lengths."""
    import numpy as np

    from kvsim.grid import check_target, sweep

    if out is not None:
        check_target(out)
    names = split_methods(methods, "--method")
    points = len(names) * len(prompt) * len(batch)
    if points > MAX_POINTS:
        raise KvsimError(f"sweep asks for {points:,} points; at most {MAX_POINTS:,}: take larger steps")
    model, device = asked.load()
    with _progress(points) as advance:
        found = sweep(
            model,
            device,
            names,
            np.array(prompt, np.int64),
            np.array(batch, np.int64),
            new,
            advance,
            weights=asked.weights,
            kv_dtype=asked.kv_dtype,
            devices=asked.devices,
            reserve_bytes=asked.reserve,
            kernel=asked.kernel,
        )
    _give(found, out, as_json)
    leave(0 if found["fits"].any() else NOTHING_FITS)


def _give(found: Sweep, out: str | None, as_json: bool) -> None:
    if out is not None:
        found.write(out)
    if as_json:
        print_json(list(found.rows()))
    elif out is not None:
        click.echo(f"{len(found):,} points written to {out}")
    else:
        from kvsim.report import console
        from kvsim.report_record import print_sweep

        print_sweep(console(), found)


def split_methods(text: str, option: str) -> list[str]:
    """Methods of a comma list, split outside parentheses."""
    from kvsim.grammar import split

    found = [piece.strip() for piece in split(text, ",")]
    if not all(found):
        raise KvsimError(f"{option}: a method is empty; write for example int(bits=4),kivi-4")
    return found


@contextmanager
def _progress(points: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal for long sweeps; nothing elsewhere."""
    if points < LONG_SWEEP or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    screen = Console(stderr=True)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=screen, transient=True) as bar:
        task = bar.add_task("sweep", total=points)
        yield lambda done: bar.advance(task, done)


COMMANDS = (fit_command, predict_command, sweep_command)
