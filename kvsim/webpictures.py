"""The pictures of a web report as inline SVG, each with its caption and the table behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.choice import Candidate
from kvsim.display import html_table
from kvsim.errors import KvsimError
from kvsim.frames import Row, called, rows_of
from kvsim.grid import Sweep, sweep
from kvsim.plan import Plan
from kvsim.plot import context_memory, context_time, memory_bars, pareto, roofline, waterfall
from kvsim.plot.style import INSTALL, narrow, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTHS = {"desk": 4.8, "phone": 3.5}
"""Inches, by who looks: letters of 10 points are then 14 pixels high on a desk and 13 on a phone of 360 pixels."""
TALLER = 0.5
"""Inches that a phone's picture needs more, for the legend's lines and the names above bars."""
LINES = 5
BARS = 8
DIGITS = 6


@dataclass(frozen=True)
class Picture:
    """What is drawn, in words for those who do not see it, and how."""

    name: str
    caption: str
    height: float
    draw: Callable[[Axes], Axes]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many items: both ends and an even choice between them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def shown(plan: Plan, most: int) -> list[Candidate]:
    """The full cache, the choice, and an even choice of the frontier."""
    first = [plan.baseline, *([plan.chosen] if plan.chosen else [])]
    rest = [c for c in plan.frontier if c not in first]
    return list(dict.fromkeys([*first, *spread(rest, most - len(first))]))


def pictures(plan: Plan) -> list[Picture]:
    """Those that answer the question, in the order in which it is asked."""
    subject = plan.chosen or plan.baseline
    answers, many = shown(plan, BARS), shown(plan, LINES)
    work = plan.case.workload
    names = {called(c.method): c.name for c in many}  # one method, one name on the whole page
    grid = [{**row, "method": names.get(row["method"], row["method"])} for row in rows_of(context_sweep(plan, many))]
    found = [
        Picture("waterfall", f"Where the memory of {subject.name} goes, step by step to its peak.", 3.4,
                lambda ax: waterfall(subject.record, ax)),
        Picture("bars", "Each method at its peak: what is over the dashed line does not fit (x).", 1.6 + 0.36 * BARS,
                lambda ax: memory_bars([{**_row(c), "method": c.name} for c in answers], ax)),
        Picture("memory", "Memory as the context grows, everything else as asked.", 4.2,
                lambda ax: context_memory(grid, int(work.batch), ax)),
        Picture("time", "One decode step of the whole batch as the context grows; bands are 90% intervals.", 4.2,
                lambda ax: context_time(grid, int(work.batch), ax, plan.limits.max_tpot_ms)),
        Picture("pareto", "All methods that were considered; the frontier keeps more, is smaller or is faster than any "
                "other. Hollow: does not fit or carries a caution.", 5.2,
                lambda ax: pareto(plan, ax=ax, most_labels=5 if narrow(ax) else 8)),
        Picture("roofline", "Attention of one step under the device's roof; above the slope the last-level cache "
                "helps. Bars are 90% intervals.", 4.6,
                lambda ax: roofline([c.record for c in many], ax=ax, names={} if narrow(ax) else names)),
    ]  # fmt: skip
    has_attention = all(any(x.name == "attention" and x.flops for x in c.record.decode.lines) for c in many)
    return found if has_attention else found[:-1]


def _row(c: Candidate) -> Row:
    from kvsim.frames import record_rows

    return record_rows(c.record)[0]


def context_sweep(plan: Plan, methods: Sequence[Candidate]) -> Sweep:
    """The methods over contexts: powers of two around the question's, up to the model's limit."""
    case = plan.case
    asked, new = int(case.workload.prompt_tokens), int(case.workload.new_tokens)
    top = (case.model.max_context or max(2**17, 4 * asked)) - new
    high = min(top, max(16 * asked, 2**14))
    steps = [2**k for k in range(30) if high // 512 <= 2**k <= high and 2**k >= 16]
    lengths = np.unique([*steps, max(1, min(asked, high)), max(1, high)])
    options: dict[str, Any] = {"weights": case.weights, "kv_dtype": case.kv_dtype, "devices": case.devices}
    options["kernel"] = case.kernel
    reserve = plan.baseline.record.reserve_bytes
    batch = int(case.workload.batch)
    written = [c.method for c in methods]
    return sweep(case.model, case.hardware, written, lengths, batch, new, reserve_bytes=reserve, **options)


def need_matplotlib() -> None:
    """KvsimError with what to install where no picture can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise KvsimError(f"a report draws its pictures with matplotlib: {INSTALL}") from None


def figure(picture: Picture) -> str:
    """One picture as HTML: SVG for a desk and for a phone, of which a page shows one, its caption, its table folded."""
    need_matplotlib()
    made, held = "", list[Row]()
    for screen in WIDTHS:
        svg, held = _drawn(picture, screen)
        made += svg
    return (
        f'<figure id="{picture.name}">{made}'
        f"<figcaption>{escape(picture.caption)}</figcaption>"
        f'<details><summary>the figures</summary><div class="wide">{table(held)}</div></details></figure>'
    )


def _drawn(picture: Picture, screen: str) -> tuple[str, list[Row]]:
    """The SVG for one of WIDTHS, and the rows behind it."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tall = picture.height + (TALLER if screen == "phone" else 0.0)
    held = Figure(figsize=(WIDTHS[screen], tall), layout="constrained")
    FigureCanvasAgg(held)
    axes = picture.draw(held.add_subplot())
    name = f"{picture.name}-{screen}"
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        text = StringIO()
        held.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), name, f'class="{screen}" role="img"', picture.caption), rows(axes)


def _inline(svg: str, name: str, words: str, caption: str) -> str:
    """An SVG file as an element of a page: no prologue, a name for screen readers, ids of its own, few digits."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    for side in ("height", "width"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg {words} aria-label="{escape(caption, quote=True)}"', 1)


def table(held: Sequence[Row]) -> str:
    """Rows as an HTML table: their columns that hold plain figures or words."""
    heads = [k for k, v in held[0].items() if isinstance(v, bool | int | float | str) and k not in ("model", "device")]
    words = [i for i, head in enumerate(heads) if isinstance(held[0][head], str)]
    return html_table(heads, ([_cell(row.get(h, "")) for h in heads] for row in held), words)


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.{DIGITS}g}"
    return f"{int(value):,}" if isinstance(value, int | float) else str(value)
