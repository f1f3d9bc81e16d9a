"""The commands that need torch: calibrate, measure, quality, train, validate; `validate --against` a file does not."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

import click

from kvsim.cli_options import print_json, refuse_repeats
from kvsim.errors import KvsimError

INSTALL = "pip install 'kvsim[runtime]'"
_ANY = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def hand_over(name: str, args: list[str]) -> None:
    """Run the command of this name that `runtime` brings; KvsimError in one line where it is not there."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise KvsimError(f"{name} runs models and needs the runtime extra: {INSTALL}")
    if find_spec(f"runtime.{name}") is None:
        raise KvsimError(f"{name} is not part of this release of kvsim; it comes with a later one")
    command = import_module(f"runtime.{name}").command
    refuse_repeats(command, args)
    command.main(args, prog_name=f"kvsim {name}", standalone_mode=False)


def _rest(ctx: click.Context) -> list[str]:
    """What stands on the line after the command's own options."""
    return list(ctx.args)


@click.command("calibrate", context_settings=_ANY, help="Measure this device and write its profile (runtime extra).")
@click.pass_context
def calibrate_command(ctx: click.Context) -> None:
    """Hand over to `runtime`."""
    hand_over("calibrate", _rest(ctx))


@click.command("measure", context_settings=_ANY, help="Run a method on a model and measure it (runtime extra).")
@click.pass_context
def measure_command(ctx: click.Context) -> None:
    """Hand over to `runtime`."""
    hand_over("measure", _rest(ctx))


@click.command("quality", context_settings=_ANY, help="Measure what a method costs a model (runtime extra).")
@click.pass_context
def quality_command(ctx: click.Context) -> None:
    """Hand over to `runtime`."""
    hand_over("quality", _rest(ctx))


@click.command("train", context_settings=_ANY, help="Train a method's projections on a model (runtime extra).")
@click.pass_context
def train_command(ctx: click.Context) -> None:
    """Hand over to `runtime`."""
    hand_over("train", _rest(ctx))


@click.command("validate", context_settings={"ignore_unknown_options": True})
@click.option(
    "--against",
    multiple=True,
    type=click.Path(),
    metavar="CSV",
    help="Measured kernel times, or whole servers' (tpot_ms), to compare with; needs no torch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[CSV]...")
def validate_command(against: tuple[str, ...], as_json: bool, more: tuple[str, ...]) -> None:
    """Say how far predictions are from measurements.

    From files of measured kernel or server times, or by measuring here, which needs the runtime extra and takes
    --device FILE (a profile that `kvsim calibrate` wrote), --model, --layers, --methods, --prompt, --batch, --threads,
    --out and --plot.
    """
    if not against:
        hand_over("validate", [*(["--json"] if as_json else []), *more])
        return
    wrong = next((word for word in more if word.startswith("-")), None)
    if wrong is not None:
        raise KvsimError(f"validate: no option {wrong!r}; `kvsim validate --help` lists them")
    from kvsim.accuracy import compared, table_lines

    files = (*against, *more)
    found = []
    for path in files:
        if len(files) > 1 and sys.stderr.isatty():
            click.echo(f"reading {path}", err=True)
        found.append(compared(path))
    if as_json:
        print_json({"files": [{"file": p, "summary": c.summary, "rows": [asdict(x) for x in c.rows],
                               "left_out": c.left_out} for p, c in zip(files, found, strict=True)]})  # fmt: skip
        return
    for path, one in zip(files, found, strict=True):
        click.echo(path)
        click.echo("\n".join(table_lines(one.rows, one.summary)))
        for why, count in one.left_out.items():
            click.echo(f"left out: {count} rows of {why}")
        click.echo()


COMMANDS = (validate_command, calibrate_command, measure_command, quality_command, train_command)
