"""Records, plans and sweeps where people meet them: HTML tables in notebooks, rich tables in terminals, plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvsim.choice import Candidate, Limits, shortfall
from kvsim.frames import called
from kvsim.grid import Sweep
from kvsim.method import parse_method
from kvsim.plan import Plan
from kvsim.record import Case, Record, Timing
from kvsim.report import duration, gib, milliseconds, quantity, size, tokens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 120
"""Columns of text where nothing says how wide the screen is."""

MOST_ROWS = 60
MOST_PLANS = 25

Cells = Sequence[str]


def html_table(
    head: Sequence[str], rows: Iterable[Cells], left: Sequence[int] = (0,), strong: int | None = None
) -> str:
    """A table with escaped cells; `left`: columns of words, all others stand right; `strong`: the row in bold."""

    def cell(tag: str, i: int, text: str) -> str:
        style = "text-align:left" if i in left else f"text-align:right{';white-space:nowrap' * (tag == 'td')}"
        return f'<{tag} style="{style}">{escape(text)}</{tag}>'

    lines = ["<table><thead><tr>", *(cell("th", i, h) for i, h in enumerate(head)), "</tr></thead><tbody>"]
    for number, row in enumerate(rows):
        lines.append('<tr style="font-weight:bold">' if number == strong else "<tr>")
        lines += [cell("td", i, text) for i, text in enumerate(row)]
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table>"])


def paragraph(text: str) -> str:
    """Escaped words."""
    return f"<p>{escape(text)}</p>"


def question_words(case: Case) -> str:
    """The question in one line."""
    work, many = case.workload, f"{case.devices} x " if case.devices > 1 else ""

    def spread(value: object) -> str:
        held = np.asarray(value)
        return tokens(held) if held.ndim == 0 else f"{tokens(held.min())} to {tokens(held.max())}"

    return (
        f"{case.model.name} on {many}{case.hardware.name}: batch {spread(work.batch)}, {spread(work.prompt_tokens)} "
        f"tokens of prompt, {spread(work.new_tokens)} new"
    )


def record_html(record: Record) -> str:
    """What it costs at a glance: memory, then both phases line by line; a table of points where there are several."""
    head = paragraph(f"{called(record.case.method)} ({record.source}): {question_words(record.case)}")
    if np.ndim(record.peak_bytes):
        return head + _points_html(record)
    memory = [(name, size(value), f"{int(value):,}") for name, value in record.memory if value]
    needed = int(record.peak_bytes) + record.reserve_bytes
    memory.append(("peak and reserve", size(needed), f"{needed:,}"))
    capacity = record.case.hardware.capacity_bytes
    memory.append(("capacity", size(capacity), f"{capacity:,}"))
    ends = f"fits, {gib(-record.short_by_bytes)} left" if record.fits else f"{gib(record.short_by_bytes)} short"
    limits = ""
    if record.max_context is not None:  # measuring does not tell them
        limits = f"; longest context {tokens(record.max_context)}, largest batch {tokens(record.max_batch)}"
    lines = [row for phase in ("prefill", "decode") for row in _phase(phase, getattr(record, phase))]
    heads = ("phase", "line", "bytes", "flops", "time", "90% interval", "term")
    return "".join(
        [
            head,
            paragraph(ends + limits),
            html_table(("memory", "size", "bytes"), memory, strong=len(memory) - 2),
            html_table(heads, lines, (0, 1, 6)),
            *(paragraph(f"note: {w}") for w in record.warnings),
        ]
    )


def _phase(name: str, timing: Timing) -> list[Cells]:
    rows = [
        (
            name,
            line.name,
            size(line.bytes),
            quantity(line.flops),
            duration(line.seconds),
            f"{duration(line.low)} - {duration(line.high)}",
            str(line.term),
        )
        for line in sorted(timing.lines, key=lambda x: -float(x.seconds))
    ]
    interval = f"{duration(timing.low)} - {duration(timing.high)}"
    return [*rows, (name, "all", "", "", duration(timing.seconds), interval, str(timing.dominant))]


def _points_html(record: Record) -> str:
    from kvsim.frames import record_rows

    rows = record_rows(record)
    return _grid_html(
        (
            (
                row["method"], tokens(row["batch"]), tokens(row["prompt_tokens"]), gib(row["cache_bytes"]),
                gib(row["peak_bytes"]), "yes" if row["fits"] else "no", duration(row["ttft_s"]),
                duration(row["tpot_s"]), f"{duration(row['tpot_low_s'])} - {duration(row['tpot_high_s'])}",
            )
            for row in rows[:MOST_ROWS]
        ),
        len(rows),
    )  # fmt: skip


def _grid_html(rows: Iterable[Cells], total: int) -> str:
    heads = ("method", "batch", "prompt", "cache", "at the peak", "fits", "TTFT", "a step", "90% interval")
    more = paragraph(f"{total - MOST_ROWS:,} more points: to_frame() has all") if total > MOST_ROWS else ""
    return html_table(heads, rows, (0, 5)) + more


def sweep_html(sweep: Sweep) -> str:
    """The first points of a sweep."""
    rows = (
        (
            called(parse_method(row["method"])), tokens(row["batch"]), tokens(row["prompt_tokens"]),
            gib(row["cache_bytes"]), gib(row["peak_bytes"]), "yes" if row["fits"] else "no", duration(row["ttft_s"]),
            duration(row["tpot_s"]), f"{duration(row['tpot_low_s'])} - {duration(row['tpot_high_s'])}",
        )
        for row in islice(sweep.rows(), MOST_ROWS)
    )  # fmt: skip
    return paragraph(f"{sweep.model} on {sweep.device}, {len(sweep):,} points") + _grid_html(rows, len(sweep))


def plan_html(plan: Plan) -> str:
    """The choice in words, then the full cache, the choice and the frontier."""
    wanted = [plan.baseline, *([plan.chosen] if plan.chosen else []), *plan.frontier]
    rows = list(dict.fromkeys(wanted))[:MOST_PLANS]
    strong = rows.index(plan.chosen) if plan.chosen else None
    return "".join(
        [
            paragraph(question_words(plan.case)),
            paragraph(("chosen: " if plan.chosen else "no answer: ") + plan.why()),
            html_table(PLAN_HEADS, (plan_cells(c) for c in rows), PLAN_WORDS, strong),
            paragraph(
                f"{len(plan.considered)} considered, {len(plan.ranked)} may be chosen; to_frame() has all. "
                "KL: measured loss in nats a token, perhaps of another model (column evidence)"
            ),
        ]
    )


PLAN_HEADS = (
    "method", "cache", "peak and reserve", "fits", "longest context", "TTFT", "ms/token", "90%", "less", "KL",
)  # fmt: skip
PLAN_WORDS = (0, 3)
"""Columns of words."""


def plan_cells(c: Candidate) -> tuple[str, ...]:
    """One row of a plan's table, under PLAN_HEADS."""
    record = c.record
    return (
        c.name,
        gib(record.cache_bytes),
        gib(record.peak_bytes + record.reserve_bytes),
        "yes" if record.fits else f"{gib(record.short_by_bytes)} short",
        tokens(record.max_context) if record.max_context else "none",
        duration(record.prefill.seconds),
        milliseconds(record.decode.seconds),
        f"{milliseconds(record.decode.low)}-{milliseconds(record.decode.high)}",
        f"{record.compression:.1f}x",
        quality_words(c),
    )


def quality_words(c: Candidate) -> str:
    """What a method is known to lose: KL in nats a token; nothing; or unknown."""
    if c.quality is None:
        return "unknown"
    return "none" if c.method.is_full else f"{c.quality['kl']:.3g}"


def _draw(thing: Record | Plan | Sweep, out: Console) -> None:
    if isinstance(thing, Plan):
        from kvsim.report_plan import print_plan

        print_plan(out, thing)
        return
    from kvsim.report_record import print_record, print_sweep

    if isinstance(thing, Sweep):
        print_sweep(out, thing)
    elif np.ndim(thing.peak_bytes):
        out.print(repr(thing) + ": to_frame() has the points")
    else:
        print_record(out, thing, *shortfall(thing, Limits()))


def as_text(thing: Record | Plan | Sweep) -> str:
    """What the command line prints for it, as plain text: for pipes, logs and `print`."""
    from rich.console import Console

    held = StringIO()
    _draw(thing, Console(file=held, width=WIDTH, markup=False, highlight=False, emoji=False, color_system=None))
    return "\n".join(line.rstrip() for line in held.getvalue().splitlines()).strip("\n")


def as_rich(thing: Record | Plan | Sweep) -> Text:
    """The same with colours, for `rich.print`."""
    from rich.console import Console
    from rich.text import Text

    width = Console().width
    out = Console(file=StringIO(), width=width, markup=False, highlight=False, emoji=False, force_terminal=True)
    with out.capture() as held:
        _draw(thing, out)
    return Text.from_ansi(held.get())
