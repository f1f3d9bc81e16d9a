"""`kvsim report`: one page for a colleague: question, answer, pictures, evidence, sources; it needs no network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import kvsim
from kvsim.choice import OBJECTIVES, Candidate
from kvsim.display import PLAN_HEADS, PLAN_WORDS, html_table, plan_cells
from kvsim.errors import KvsimError, shown
from kvsim.knowledge import known
from kvsim.plan import Plan, break_even, recompute
from kvsim.report import duration, gib, milliseconds, parameters, quantity, size, tokens
from kvsim.report_plan import kind_of
from kvsim.webpictures import figure, need_matplotlib, pictures
from kvsim.webpictures import shown as answers
from kvsim.weights import default_weights, weights_bytes

MOST_ROWS = 24
REASONS = 12


def check_page(path: str | Path) -> Path:
    """The path if a page can be written there; KvsimError otherwise, before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise KvsimError(f"--out {shown(target.name)}: a report is a web page, write to a file that ends in .html")
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else "the folder does not exist"
        raise KvsimError(f"--out {shown(str(path))}: {what}")
    if not os.access(target.parent, os.W_OK):
        raise KvsimError(f"--out {shown(str(path))}: the folder may not be written to")
    need_matplotlib()
    return target


def write_page(plan: Plan, path: str | Path, command: str = "") -> Path:
    """Write the page whole or not at all; `command` is how to ask again. Raises KvsimError where it cannot."""
    target = check_page(path)
    text = page(plan, command)
    draft = ""
    try:
        handle, draft = tempfile.mkstemp(prefix=target.name, suffix=".part", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, target)
    except OSError as problem:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise KvsimError(f"cannot write {target.name}: {problem.strerror or problem}") from None
    return target


def page(plan: Plan, command: str = "", today: date | None = None) -> str:
    """The whole page as text; needs matplotlib."""
    template = Template((resources.files("kvsim") / "data" / "report.html").read_text("utf-8"))
    best = plan.chosen.name if plan.chosen else "nothing fits"
    title = f"{plan.case.model.name} on {plan.case.hardware.name}: {best}"
    sections = (
        _head(plan, title, today or date.today()),
        _answer(plan),
        _question(plan, command),
        _pictures(plan),
        _others(plan),
        _evidence(plan),
        _sources(plan),
    )
    return template.substitute(title=escape(title), version=escape(kvsim.__version__), body="\n".join(sections))


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _facts(items: Iterable[tuple[str, str, str]]) -> str:
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in items
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _head(plan: Plan, title: str, today: date) -> str:
    work = plan.case.workload
    many = f"{plan.case.devices} x " if plan.case.devices > 1 else ""
    asked = (
        f"Which way of compressing the KV cache fits {plan.case.model.name} on {many}{plan.case.hardware.name} for "
        f"{tokens(work.batch)} x {tokens(work.tokens)} tokens, and what does it cost?"
    )
    made = f"Predicted by kvsim {kvsim.__version__}, {today.isoformat()}."
    return f"<header><h1>{escape(title)}</h1>{_p(asked)}{_p(made, 'soft')}</header>"


def _answer(plan: Plan) -> str:
    best = plan.chosen
    text = ("" if best else "Nothing fits. ") + plan.why() + "."
    parts = [f'<p class="answer{"" if best else " none"}">{escape(text[0].upper() + text[1:])}</p>']
    if best is not None:
        parts += [_facts(_figures(best)), *map(_p, _consequences(plan, best))]
    return _section("The answer", *parts)


def _figures(best: Candidate) -> Iterator[tuple[str, str, str]]:
    record = best.record
    capacity = record.case.hardware.capacity_bytes
    yield "method", best.name, str(best.method) if str(best.method) != best.name else "as written in kvsim"
    yield "cache", gib(record.cache_bytes), f"{int(record.cache_bytes):,} bytes, {record.compression:.1f}x less"
    yield "peak and reserve", gib(record.peak_bytes + record.reserve_bytes), f"of {gib(capacity)}"
    yield "longest context", tokens(record.max_context), "tokens, at this batch"
    yield "largest batch", tokens(record.max_batch), "sequences, at this length"
    for name, timing in (("first token", record.prefill), ("a step", record.decode)):
        yield name, duration(timing.seconds), f"90%: {duration(timing.low)} to {duration(timing.high)}"
    yield "quality", *_quality(best)


def _quality(candidate: Candidate) -> tuple[str, str]:
    held = candidate.quality
    if held is None:
        return "unknown", f"{candidate.no_evidence}: measure it before you rely on it"
    if candidate.method.is_full:
        return "no loss", "the baseline itself"
    return f"KL {held['kl']:.3g}", f"perplexity x {held['ppl_ratio']:.3f}; {held['evidence']}"


def _consequences(plan: Plan, best: Candidate) -> Iterator[str]:
    case = plan.case
    options = {"weights": case.weights, "kv_dtype": case.kv_dtype, "devices": case.devices, "kernel": case.kernel}
    if not best.method.is_full:
        start = break_even(case.model, case.hardware, best.method, int(case.workload.batch), **options)
        when = "At no context up to the model's" if start is None else f"From {tokens(start)} tokens on,"
        yield f"{when} one step of {best.name} is faster than one of the full cache."
    again = recompute(case)
    yield (
        f"Without any cache a token would take {duration(again['seconds_per_token'])}, "
        f"{again['slower_than_cached']:,.0f} times a cached step."
    )
    if best.engine_flags is not None:
        yield f"Server flags: {best.engine_flags or 'none needed'}."


def _question(plan: Plan, command: str) -> str:
    case, work = plan.case, plan.case.workload
    weights = case.weights or default_weights(case.model)
    kinds = ", ".join(f"{n} {kind}" for kind, n in case.model.kinds().items())
    limits, several = plan.limits, "sequence" if work.batch == 1 else "sequences"
    asked = [
        ("model", f"{case.model.name}: {case.model.n_layers} layers ({kinds}), {parameters(case.model.parameters)} "
                  f"parameters, {gib(weights_bytes(case.model, weights))} of weights in {weights}"),
        ("device", f"{case.devices} x {case.hardware.name}: {gib(case.hardware.capacity_bytes)} as the driver reports "
                   f"it, {quantity(case.hardware.bandwidth_bytes_per_s, 'B/s')}"),
        ("workload", f"{tokens(work.batch)} {several}, {tokens(work.prompt_tokens)} tokens of prompt, "
                     f"{tokens(work.new_tokens)} new; bytes are those of one device"),
        ("wanted", OBJECTIVES[plan.objective]),
        *((name, f"{value:g} {unit}") for name, value, unit in (
            ("first token within", limits.max_ttft_ms, "ms"), ("a step within", limits.max_tpot_ms, "ms"),
            ("context of at least", limits.min_context, "tokens")) if value is not None),
    ]  # fmt: skip
    again = f"<p>Ask again:</p><pre><code>{escape(command)}</code></pre>" if command else ""
    return _section("The question", _words(("what", "asked"), asked), again)


def _words(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of words, which folds on a narrow screen."""
    return html_table(heads, rows, range(len(heads))).replace("<table>", '<table class="words">', 1)


def _pictures(plan: Plan) -> str:
    made = "".join(figure(p) for p in pictures(plan))
    return _section("Pictures", f'<div class="pictures">{made}</div>')


def _others(plan: Plan) -> str:
    rows = answers(plan, MOST_ROWS)
    strong = rows.index(plan.chosen) if plan.chosen else None
    reasons = _reasons(plan)
    more = len(reasons) - REASONS
    return _section(
        "What else would do, and what would not",
        f'<div class="wide">{html_table(PLAN_HEADS, map(plan_cells, rows), PLAN_WORDS, strong)}</div>',
        _p(f"{len(plan.considered)} methods considered, {len(plan.ranked)} may be chosen; these are the full cache, "
           "the choice, and those that no other beats in memory, time and loss. KL: the measured loss in nats a token, "
           "which may be that of another model."),
        f"<ul>{''.join(reasons[:REASONS])}</ul>",
        _p(f"{more} further reasons are left out; kvsim fit --all lists them.", "soft") if more > 0 else "",
    )  # fmt: skip


def _reasons(plan: Plan) -> list[str]:
    """Why methods are no answer, each reason once with those it speaks of; what misses by least comes first."""
    short = sorted((r for r in plan.rejected if r.short_by_bytes), key=lambda r: r.short_by_bytes)
    nearest = [f"{r.method} ({gib(r.short_by_bytes)} short)" for r in short[:REASONS]]
    if len(short) > REASONS:
        nearest.append(f"{len(short) - REASONS} more, up to {gib(short[-1].short_by_bytes)} short")
    grouped = {"does not fit": nearest} if short else {}
    for r in plan.rejected:
        if not r.short_by_bytes:
            grouped.setdefault(kind_of(r.reason), []).append(r.method)
    return [f"<li><b>{escape(reason)}</b>: {escape(', '.join(names))}</li>" for reason, names in grouped.items()]


def _evidence(plan: Plan) -> str:
    record = (plan.chosen or plan.baseline).record
    lines = [
        [phase, x.name, size(x.bytes), quantity(x.flops), milliseconds(x.seconds),
         f"{milliseconds(x.low)}-{milliseconds(x.high)}", str(x.term)]
        for phase, timing in (("prefill", record.prefill), ("decode", record.decode))
        for x in sorted(timing.lines, key=lambda x: -float(x.seconds))
    ]  # fmt: skip
    heads = ("phase", "line", "bytes", "flops", "ms", "90%", "term")
    return _section(
        "How sure this is",
        _p("Bytes are exact: the sum over every stored tensor, each padded as it is packed."),
        _p("Seconds are calibrated: each time comes with the interval that should hold 90% of measurements, and with "
           "the term that dominates it. They rest on these coefficients: " + (record.coefficients or "none") + "."),
        _p("Quality is measured or unknown, never asserted; where it is unknown, bits kept of each value stand in."),
        *(_p(f"Note: {w}") for w in record.warnings),
        f'<div class="wide">{html_table(heads, lines, (0, 1, 6))}</div>',
    )  # fmt: skip


def _sources(plan: Plan) -> str:
    case = plan.case
    rows = [(f"{case.hardware.name}: {what}", value, source) for what, value, source in case.hardware.facts()]
    rows.append((case.model.name, f"{parameters(case.model.parameters)} parameters", case.model.source or "its config"))
    if plan.chosen:
        for part in known(str(plan.chosen.method)).get("parts", []):
            rows.append((part["part"], part["summary"], part["source"]))
    return _section("Sources", _words(("what", "figure", "where from"), rows))
