"""The commands importance, adapt and ranks: the survey's 4.2, 7.1 and 7.2, shown as measured here or run anew."""

from __future__ import annotations

import click

from kvsim.cli_options import json_option, print_json
from kvsim.cli_runtime import hand_over

_MORE = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _shown_or_run(name: str, ctx: click.Context, measure: bool, as_json: bool, told: bool) -> None:
    """Print the shipped result, or hand everything over to `runtime`; the help of either."""
    from kvsim.survey_results import lines, shipped

    if told:
        hand_over(name, ["--help"]) if measure else click.echo(ctx.get_help())
        return
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


_measure = click.option("--measure", is_flag=True, help="Measure here (runtime extra); `--measure --help`: how.")
_told = click.option("--help", "told", is_flag=True, help="Show this, or what --measure takes.")


@click.command("importance", context_settings=_MORE)
@_measure
@json_option
@_told
@click.pass_context
def importance_command(ctx: click.Context, measure: bool, as_json: bool, told: bool) -> None:
    """Show what importance scores cost and buy (survey 4.2)."""
    _shown_or_run("importance", ctx, measure, as_json, told)


@click.command("adapt", context_settings=_MORE)
@_measure
@json_option
@_told
@click.pass_context
def adapt_command(ctx: click.Context, measure: bool, as_json: bool, told: bool) -> None:
    """Show what adapting buys at equal bytes (survey 7.1)."""
    _shown_or_run("adapt", ctx, measure, as_json, told)


@click.command("ranks", context_settings=_MORE)
@_measure
@json_option
@_told
@click.pass_context
def ranks_command(ctx: click.Context, measure: bool, as_json: bool, told: bool) -> None:
    """Show ranks that move, or are learned (survey 7.2)."""
    _shown_or_run("ranks", ctx, measure, as_json, told)


COMMANDS = (importance_command, adapt_command, ranks_command)
"""What this module adds to the program."""
