"""The command report: the answer of fit as one self-contained web page."""

from __future__ import annotations

import shlex

import click

from kvsim.cli_answers import batch_option, new_option, prompt_option, split_methods
from kvsim.cli_options import NOTHING_FITS, Asked, AskedLimits, asks, leave, limited


@click.command("report")
@asks
@limited
@prompt_option
@new_option
@batch_option
@click.option("--methods", metavar="S,S..", help="Consider only these.  [every preset and a grid of compositions]")
@click.option("--objective", default="gentle", metavar="O", help="gentle, memory, speed, context or batch.  [gentle]")
@click.option("--engine", default="", metavar="E", help="Only what this server runs, with its flags.")
@click.option("--out", required=True, type=click.Path(), metavar="FILE.html", help="Write the page here.")
def report_command(
    asked: Asked,
    limits: AskedLimits,
    prompt: int,
    new: int,
    batch: int,
    methods: str | None,
    objective: str,
    engine: str,
    out: str,
) -> None:
    """Write the answer as one web page to send to a colleague."""
    from kvsim.plan import fit
    from kvsim.webreport import check_page, write_page
    from kvsim.workload import Workload

    check_page(out)
    model, device = asked.load()
    plan = fit(
        model,
        device,
        Workload(batch, prompt, new),
        objective=objective,  # type: ignore[arg-type]
        methods=None if methods is None else split_methods(methods, "--methods"),
        limits=limits.limits(),
        weights=asked.weights,
        kv_dtype=asked.kv_dtype,
        devices=asked.devices,
        reserve_bytes=asked.reserve,
        kernel=asked.kernel,
        engine=engine,
    )
    write_page(plan, out, _again(click.get_current_context()))
    click.echo(f"{plan.why()}\nwritten to {out}")
    leave(0 if plan.chosen else NOTHING_FITS)


def _again(ctx: click.Context) -> str:
    """The command line that asks the same question, from the options that were given."""
    words = ["kvsim", "report"]
    for option in ctx.command.params:
        given = ctx.get_parameter_source(option.name or "") == click.core.ParameterSource.COMMANDLINE
        if given:
            words += [option.opts[0], str(ctx.params[option.name or ""])]
    return shlex.join(words)


COMMANDS = (report_command,)
"""What this module adds to the program."""
