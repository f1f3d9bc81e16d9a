"""A record or a sweep for people: the memory waterfall, the lines of both phases, the limits, the coefficients."""

from __future__ import annotations

from itertools import islice

from rich.console import Console
from rich.text import Text

from kvsim.grid import Sweep
from kvsim.method import parse_method, preset_name
from kvsim.record import Record, Timing
from kvsim.report import Column, duration, gib, quantity, say, size, table, tokens
from kvsim.report_plan import not_met, question

SWEEP_ROWS = 400
"""Points that a printed sweep shows; --out and --json give all."""


def print_record(out: Console, record: Record, reason: str, short: int) -> None:
    """Print the whole answer; `reason` and `short` say why it is none, if so."""
    case = record.case
    question(out, case)
    say(out, f"method:  {case.method}", indent=9)
    _waterfall(out, record)
    for name, timing in (("prefill", record.prefill), ("decode: one step of the whole batch", record.decode)):
        _phase(out, name, timing)
    out.print()
    if case.workload.new_tokens:
        say(out, f"all {tokens(case.workload.new_tokens)} new tokens: {duration(record.generation_seconds)}")
    if record.max_context is not None:  # measuring does not tell them
        context, batch = tokens(record.max_context), tokens(record.max_batch)
        say(out, f"largest context at this batch: {context}; largest batch at this length: {batch}")
    say(
        out,
        f"cache: {record.compression:.2f}x less than uncompressed; exactly {tokens(record.cache_bytes)} bytes live, "
        f"{tokens(record.allocated_bytes)} allocated",
        indent=7,
    )
    say(out, f"coefficients: {record.coefficients}", indent=14)
    for warning in record.warnings:
        say(out, f"note: {warning}", style="yellow", indent=6)
    if reason:
        say(out, not_met(case, reason, short), style="bold red", indent=2)
    else:
        say(out, f"fits, with {gib(-record.short_by_bytes)} left", style="bold green")


def _waterfall(out: Console, record: Record) -> None:
    """What is held, then the peak against the capacity."""
    capacity = record.case.hardware.capacity_bytes
    rows: list[tuple[str | Text, ...]] = [
        (name, tokens(value), size(value), _bar(value, capacity)) for name, value in record.memory if value
    ]
    needed = record.peak_bytes + record.reserve_bytes
    rows.append((Text("peak and reserve", "bold"), tokens(needed), size(needed), _bar(needed, capacity)))
    rows.append(("capacity", tokens(capacity), size(capacity), ""))
    columns = (
        Column("memory"),
        Column("bytes", right=True),
        Column("size", right=True),
        Column("of the device", optional=True),
    )
    table(out, columns, rows)
    out.print()
    say(
        out,
        "scratch and activations are not held at the same time as every byte of the finished cache: the peak is the "
        "highest moment, not the sum",
        style="dim",
    )


def _bar(value: float, capacity: int) -> str:
    share = float(value) / capacity
    return f"{'#' * min(30, round(30 * share)):30} {100 * share:.1f}%"


def _phase(out: Console, name: str, timing: Timing) -> None:
    columns = (
        Column(name, fold=True),
        Column("bytes", right=True),
        Column("flops", right=True),
        Column("flops/byte", right=True, optional=True),
        Column("time", right=True),
        Column("90% interval", right=True),
        Column("term"),
        Column("share", right=True, optional=True),
    )
    rows: list[tuple[str | Text, ...]] = []
    for line in sorted(timing.lines, key=lambda x: -float(x.seconds)):
        share = float(line.seconds) / float(timing.seconds) if timing.seconds else 0.0
        intensity = f"{float(line.flops) / float(line.bytes):.1f}" if line.bytes else ""
        rows.append(
            (
                line.name,
                size(line.bytes),
                quantity(line.flops),
                intensity,
                duration(line.seconds),
                f"{duration(line.low)} - {duration(line.high)}",
                str(line.term),
                f"{100 * share:.0f}%",
            )
        )
    flops, moved = (sum(float(getattr(x, k)) for x in timing.lines) for k in ("flops", "bytes"))
    total = (
        "total",
        size(moved),
        quantity(flops),
        f"{flops / moved:.1f}" if moved else "",
        duration(timing.seconds),
        f"{duration(timing.low)} - {duration(timing.high)}",
        timing.dominant,
        "100%",
    )
    rows.append(tuple(Text(str(cell), "bold") for cell in total))
    table(out, columns, rows)


def print_sweep(out: Console, found: Sweep) -> None:
    """One line a point, the first SWEEP_ROWS of them."""
    columns = (
        Column("method", fold=True),
        Column("batch", right=True),
        Column("prompt", right=True),
        Column("cache", right=True),
        Column("total", right=True),
        Column("fits"),
        Column("TTFT", right=True),
        Column("a step", right=True),
        Column("90% interval", right=True, optional=True),
    )
    rows = []
    for r in islice(found.rows(), SWEEP_ROWS):
        rows.append(
            (
                preset_name(parse_method(r["method"])) or r["method"],
                tokens(r["batch"]),
                tokens(r["prompt_tokens"]),
                gib(r["cache_bytes"]),
                gib(r["peak_bytes"]),
                "yes" if r["fits"] else "no",
                duration(r["ttft_s"]),
                duration(r["tpot_s"]),
                f"{duration(r['tpot_low_s'])} - {duration(r['tpot_high_s'])}",
            )
        )
    say(out, f"{found.model} on {found.device}, {tokens(found.new_tokens)} new tokens; total: at the peak")
    table(out, columns, rows)
    if len(found) > len(rows):
        out.print()
        say(out, f"{tokens(len(found) - len(rows))} more points: --out FILE.csv writes all of them")
