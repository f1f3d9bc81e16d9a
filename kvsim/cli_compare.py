"""`kvsim compare`: the survey's matrix, pros and cons and scenarios, each beside what is computed and measured here."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvsim.cli_options import json_option, print_json


@click.command("compare")
@click.option("--evidence", metavar="FILE", help="What `kvsim quality` measured.  [your own, then what is shipped]")
@json_option
def compare_command(evidence: str | None, as_json: bool) -> None:
    """Compare families of methods as the survey does, computed."""
    from kvsim import compare
    from kvsim.claims import claims as claims_of
    from kvsim.evidence import gathered
    from kvsim.scenarios import answers

    rows = gathered(evidence)
    members = compare.members(rows)
    matrix, claims, scenarios = compare.matrix(members), claims_of(members, rows), answers(rows)
    if as_json:
        print_json(
            {
                "matrix": [asdict(x) for x in matrix],
                "claims": [asdict(x) for x in claims],
                "scenarios": [asdict(x) for x in scenarios],
                "published": list(compare.published()),
            }
        )
        return
    from kvsim.report import Column, console, say, table

    out = console()
    name, device, batch, prompt = compare.QUESTION
    say(
        out,
        f"times: {name} on {device}, {batch} x {prompt:,} tokens, against the full cache; losses: KL in nats a token, "
        f"measured on {', '.join(sorted({r.model for r in rows})) or 'nothing yet'}",
        style="dim",
    )
    columns = [Column(""), Column("family"), Column("the survey says", fold=True), Column("here", fold=True)]
    table(out, columns, [(c.row, c.family, c.survey, c.here) for c in matrix], "6.1 matrix")
    columns = [Column("family"), Column(""), *columns[2:], Column("verdict")]
    table(out, columns, [(c.family, c.kind, c.claim, c.figure, c.verdict) for c in claims], "6.2 pros and cons")
    heads = ("scenario", "the survey advises", "chosen here", "best of the advice", "note")
    columns = [Column(h, fold=True) for h in heads]
    cells = [(f"{a.scenario}: {a.question}", a.survey, a.chosen, a.advised, a.note) for a in scenarios]
    table(out, columns, cells, "6.3 scenarios")


COMMANDS = (compare_command,)
"""What this module adds to the program."""
