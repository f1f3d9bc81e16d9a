"""A plan for people: the question with its figures, what fits, the choice in words, what was rejected and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kvsim.plan import OBJECTIVES, Candidate, Plan, Rejected, break_even, recompute
from kvsim.record import Case
from kvsim.report import Column, duration, gib, milliseconds, parameters, peak_dtype, quantity, say, size, table, tokens
from kvsim.weights import default_weights, weights_bytes

TABLE_ROWS = 12
"""Answers that the table holds without --all."""

NEAREST = 8
"""Rejected methods that are named without --all."""

COLUMNS = (
    Column(""),
    Column("method", fold=True),
    Column("cache", right=True),
    Column("total", right=True),
    Column("fits", optional=True),
    Column("context", right=True),
    Column("TTFT", right=True),
    Column("ms/token", right=True),
    Column("90%", optional=True),
    Column("less", right=True, optional=True),
    Column("dominates", optional=True),
    Column("quality", optional=True),
)
BATCH = Column("batch", right=True)
"""In the place of the context where batches are asked for."""


def print_plan(out: Console, plan: Plan, everything: bool = False) -> None:
    """Print the whole answer; `everything` names every method that was considered."""
    question(out, plan.case)
    say(out, f"wanted:  {OBJECTIVES[plan.objective]}{_limits(plan)}", indent=9)
    rows = _rows(plan, everything)
    many = plan.objective == "batch"
    table(out, [BATCH if many and c.head == "context" else c for c in COLUMNS], [_row(plan, c) for c in rows])
    out.print()
    rest = len(plan.ranked) - sum(c in plan.ranked for c in rows)
    notes = (
        "* chosen, o on the frontier of memory, time and loss, x does not fit; total: at the peak, with reserve"
    )
    longest = "batch: the most sequences that fit" if many else "context: the longest that fits"
    say(out, f"{notes}; {longest}; quality: KL in nats a token, ~ of another model", style="dim")
    if rest:
        say(out, f"{rest} more fit (--all lists them)", style="dim")
    out.print()
    say(out, ("chosen: " if plan.chosen else "no answer: ") + plan.why(), style="bold", indent=8)
    if plan.chosen:
        _chosen(out, plan, plan.chosen)
    _rejected(out, plan.rejected, everything)
    for warning in dict.fromkeys(w for c in rows for w in c.record.warnings):
        say(out, f"note: {warning}", style="yellow", indent=6)


def question(out: Console, case: Case) -> None:
    """The question restated with the model's and the device's own figures."""
    model, device, work = case.model, case.hardware, case.workload
    weights = case.weights or default_weights(model)
    kinds = ", ".join(f"{n} {kind}" for kind, n in model.kinds().items())
    active = f", {parameters(model.active_parameters)} active" if model.active_parameters != model.parameters else ""
    per_token = int(model.cache_bytes(2, 1, case.value_bits)) - int(model.cache_bytes(1, 1, case.value_bits))
    say(
        out,
        f"model:   {model.name}: {model.n_layers} layers ({kinds}), {parameters(model.parameters)} parameters{active}, "
        f"{gib(weights_bytes(model, weights))} of weights in {weights}, {size(per_token)} of cache a token in "
        f"{case.kv_dtype or model.dtype}",
        indent=9,
    )
    unit = peak_dtype(device.peaks)
    many = f"{case.devices} x " if case.devices > 1 else ""
    say(
        out,
        f"device:  {many}{device.name}: {gib(device.capacity_bytes)} as the driver reports it, "
        f"{quantity(device.bandwidth_bytes_per_s, 'B/s')}, {quantity(device.peaks[unit], 'FLOP/s')} in {unit}",
        indent=9,
    )
    several = "sequence" if work.batch == 1 else "sequences"
    say(
        out,
        f"work:    {tokens(work.batch)} {several}, {tokens(work.prompt_tokens)} tokens of prompt, "
        f"{tokens(work.new_tokens)} new; bytes are those of one device"
        f"{'' if case.devices == 1 else ', the fullest of ' + str(case.devices)}",
        indent=9,
    )


def _limits(plan: Plan) -> str:
    limits = plan.limits
    found = [
        f"{label} {value:g} {unit}"
        for label, value, unit in (
            ("first token within", limits.max_ttft_ms, "ms"),
            ("a step within", limits.max_tpot_ms, "ms"),
            ("context of at least", limits.min_context, "tokens"),
            ("KL of at most", limits.max_kl, "nats"),
            ("top-1 agreement of at least", limits.min_top1, ""),
            ("perplexity at most", limits.max_ppl, "times the full cache's"),
        )
        if value is not None
    ]
    return "; " + ", ".join(found) if found else ""


def _rows(plan: Plan, everything: bool) -> list[Candidate]:
    """The baseline, the chosen one, the frontier and the next best, at most TABLE_ROWS of them, best first."""
    if everything:
        return list(dict.fromkeys((plan.baseline, *plan.ranked)))
    wanted = [plan.baseline, *plan.ranked[: TABLE_ROWS // 2]]
    spread = [c for c in plan.frontier if c not in wanted]
    room = max(0, TABLE_ROWS - len(wanted))
    if len(spread) > room:  # keep both ends and an even choice between them
        spread = [spread[round(i * (len(spread) - 1) / max(1, room - 1))] for i in range(room)]
    kept = {*wanted, *spread}
    return list(dict.fromkeys((plan.baseline, *(c for c in plan.ranked if c in kept))))


def _row(plan: Plan, c: Candidate) -> list[str | Text]:
    record = c.record
    most = record.max_batch if plan.objective == "batch" else record.max_context
    mark = "*" if c is plan.chosen else "o" if c in plan.frontier else "" if record.fits else "x"
    style = "bold green" if c is plan.chosen else "" if record.fits else "dim"
    cells = (
        mark,
        c.name,
        gib(record.cache_bytes),
        gib(record.peak_bytes + record.reserve_bytes),
        "yes" if record.fits else f"-{gib(record.short_by_bytes)}",
        tokens(most) if most else "none",
        duration(record.prefill.seconds),
        milliseconds(record.decode.seconds),
        f"{milliseconds(record.decode.low)}-{milliseconds(record.decode.high)}",
        f"{record.compression:.1f}x",
        record.decode.dominant,
        _loss(c),
    )
    return [Text(str(cell), style) for cell in cells]


def _loss(c: Candidate) -> str:
    """Measured KL, with ~ where it was borrowed."""
    if c.quality is None:
        return "unknown"
    return f"KL {'~' if c.quality['borrowed'] else ''}{c.quality['kl']:.2g}"


def _chosen(out: Console, plan: Plan, chosen: Candidate) -> None:
    """The flags, the break-even and the recompute baseline of the choice."""
    case, record = plan.case, chosen.record
    written = str(chosen.method)
    if written != chosen.name:
        say(out, f"        {chosen.name} is {written}", indent=8)
    say(
        out,
        f"        most of a step goes to {record.decode.dominant}, of the first token to {record.prefill.dominant}; "
        f"coefficients: {record.coefficients}",
        indent=8,
    )
    if chosen.engine_flags is not None:
        say(out, f"        server flags: {chosen.engine_flags or '(none needed)'}", indent=8)
    out.print()
    if not chosen.method.is_full:
        options = {"weights": case.weights, "kv_dtype": case.kv_dtype, "devices": case.devices, "kernel": case.kernel}
        start = break_even(case.model, case.hardware, chosen.method, int(case.workload.batch), **options)
        when = "at no context up to the model's" if start is None else f"from {tokens(start)} tokens on"
        say(out, f"break-even: {when}, one step of {chosen.name} is faster than one of the full cache", indent=12)
    again = recompute(case)
    upto = again["worth_it_up_to_tokens"]
    within = (
        f"up to {tokens(upto)} tokens that is less than twice as slow"
        if upto
        else "it is never less than twice as slow"
    )
    say(
        out,
        f"recompute:  no cache at all would take {duration(again['seconds_per_token'])} a token, "
        f"{again['slower_than_cached']:,.0f} times a cached step, and save {gib(again['bytes_saved'])}; {within}",
        indent=12,
    )


def _rejected(out: Console, rejected: Sequence[Rejected], everything: bool) -> None:
    """By reason: too large (nearest first), cautions and limits together, refusals to compose one by one."""
    if not rejected:
        return
    out.print()
    short = sorted((r for r in rejected if r.short_by_bytes), key=lambda r: r.short_by_bytes)
    if short:
        named = short if everything else short[:NEAREST]
        text = ", ".join(f"{r.method} ({gib(r.short_by_bytes)} short)" for r in named)
        more = (
            f", and {len(short) - len(named)} more up to {gib(short[-1].short_by_bytes)} short"
            if len(short) > len(named)
            else ""
        )
        say(out, f"does not fit: {text}{more}", indent=2)
    reasons: dict[str, list[str]] = {}
    for r in rejected:
        if not r.short_by_bytes:
            reasons.setdefault(kind_of(r.reason), []).append(r.method)
    listed = list(reasons.items()) if everything else list(reasons.items())[:NEAREST]
    for reason, methods in listed:
        named_too = methods if everything else methods[:4]
        more = f" and {len(methods) - len(named_too)} more" if len(methods) > len(named_too) else ""
        say(out, f"rejected: {', '.join(named_too)}{more}: {reason}", indent=2)
    if len(listed) < len(reasons):
        left = sum(len(m) for _, m in list(reasons.items())[len(listed) :])
        say(out, f"rejected: {left} more for other reasons (--all lists them)", style="dim")


def kind_of(reason: str) -> str:
    """A reason without settings and the method's own formats, so that the same one stands once."""
    alike = re.sub(r" cannot store keys as .*; its (formats|types):", r" has no such cache; its \1:", reason)
    return re.sub(r"(?<=\w)\([^()]*=[^()]*\)", "", alike)


def not_met(case: Case, reason: str, short: int) -> str:
    """One line for a record that is no answer."""
    if short:
        return f"does not fit: {gib(short)} short of {case.hardware.name}'s {gib(case.hardware.capacity_bytes)}"
    return f"limit not met: {reason}"
