"""The commands importance, adapt and ranks: the survey's 4.2, 7.1 and 7.2, shown as measured here or run anew."""

from __future__ import annotations

import click

from kvsim.cli_options import json_option, print_json
from kvsim.cli_runtime import hand_over

_MORE = {"ignore_unknown_options": True, "allow_extra_args": True}


def _shown_or_run(name: str, ctx: click.Context, measure: bool, as_json: bool) -> None:
    """Print the shipped result, or hand everything over to `runtime`."""
    from kvsim.survey_results import lines, shipped

    if measure:
        hand_over(name, [*(["--json"] if as_json else []), *ctx.args])
        return
    if ctx.args:
        raise click.UsageError(f"{ctx.args[0]} is an option of measuring: give --measure first")
    found = shipped(name)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(lines(found)))


_measure = click.option("--measure", is_flag=True, help="Measure here (runtime extra).")


@click.command("importance", context_settings=_MORE)
@_measure
@json_option
@click.pass_context
def importance_command(ctx: click.Context, measure: bool, as_json: bool) -> None:
    """What every importance score costs and buys at equal rows (survey 4.2)."""
    _shown_or_run("importance", ctx, measure, as_json)


@click.command("adapt", context_settings=_MORE)
@_measure
@json_option
@click.pass_context
def adapt_command(ctx: click.Context, measure: bool, as_json: bool) -> None:
    """Token classes, segments, tasks and a controller against the best fixed method at equal bytes (survey 7.1)."""
    _shown_or_run("adapt", ctx, measure, as_json)


@click.command("ranks", context_settings=_MORE)
@_measure
@json_option
@click.pass_context
def ranks_command(ctx: click.Context, measure: bool, as_json: bool) -> None:
    """Ranks re-decided while decoding, and learned ones, against fixed ranks at equal bytes (survey 5.6, 7.2)."""
    _shown_or_run("ranks", ctx, measure, as_json)


COMMANDS = (importance_command, adapt_command, ranks_command)
"""What this module adds to the program."""
