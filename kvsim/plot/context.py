"""Pictures of a sweep: memory and time against the context, and the best method over contexts and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.frames import Row, column, rows_of
from kvsim.plot.style import (
    DASHES,
    FAINT,
    LIMIT,
    MARKERS,
    SERIES,
    YELLOW,
    at_most,
    below,
    count,
    gib,
    page,
    powers,
    remember,
    title,
)
from kvsim.report import gib as written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Best = Literal["speed", "gentle", "memory"]
BEST: dict[str, tuple[str, Callable[[Row], float]]] = {
    "speed": ("fastest step", lambda row: float(row["tpot_s"])),
    "gentle": ("keeps most", lambda row: -float(row["cache_bytes"])),
    "memory": ("smallest", lambda row: float(row["peak_bytes"])),
}


def context_memory(source: Any, batch: int | None = None, ax: Axes | None = None) -> Axes:
    """Peak memory with reserve (GiB) against prompt tokens, one line a method, and the device's capacity.

    Args:
        source: a sweep, its DataFrame or Dataset, or records. batch: which batch, where there are several.

    Points that do not fit are hollow. Raises KvsimError for more than 7 methods or an unclear batch.
    """
    rows = _one_batch(rows_of(source), batch)
    for row in rows:
        row["needed_bytes"] = row["peak_bytes"] + row.get("reserve_bytes", 0)
    with page(ax) as axes:
        _lines(axes, rows, "needed_bytes", gib)
        limits = {row.get("capacity_bytes", 0) for row in rows} - {0}
        if len(limits) == 1:
            limit = limits.pop()
            axes.axhline(gib(limit), color=LIMIT, linewidth=1.5, linestyle="--", label=f"capacity, {written(limit)}")
        axes.set_ylabel("peak memory with reserve (GiB)")
        axes.set_ylim(bottom=0)
        _finish(axes, rows)
        return remember(axes, rows)


def context_time(
    source: Any, batch: int | None = None, ax: Axes | None = None, limit_ms: float | None = None
) -> Axes:
    """Milliseconds of one decode step with the 90% interval against prompt tokens, one line a method.

    Args:
        source, batch: as `context_memory`. limit_ms: a limit to draw, such as a promised time per token.
    """
    rows = _one_batch(rows_of(source), batch)
    with page(ax) as axes:
        _lines(axes, rows, "tpot_s", lambda s: 1e3 * float(s), ("tpot_low_s", "tpot_high_s"))
        if limit_ms is not None:
            axes.axhline(limit_ms, color=LIMIT, linewidth=1.5, linestyle="--", label=f"limit, {limit_ms:g} ms")
        axes.set_ylabel("one decode step (ms)")
        axes.set_yscale("log")
        _plain_log(axes)
        _finish(axes, rows)
        return remember(axes, rows)


def _plain_log(ax: Axes) -> None:
    """Ticks of a logarithmic axis written out: 10, 20, 50, and more of them where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    steps = (1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    ax.yaxis.set_major_locator(LogLocator(10, steps, numticks=12))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _one_batch(rows: Sequence[Row], batch: int | None) -> list[Row]:
    found = sorted(set(column(rows, "batch")))
    if batch is None and len(found) > 1:
        raise KvsimError(f"the sweep has batches {', '.join(map(str, found))}: say which one to draw, batch={found[0]}")
    kept = [dict(row) for row in rows if batch is None or row["batch"] == batch]
    if not kept:
        there = ", ".join(map(str, found)) or "no points"
        raise KvsimError(f"batch {shown(batch)} is not in the sweep; it has {there}")
    return kept


def _lines(
    ax: Axes,
    rows: Sequence[Row],
    key: str,
    unit: Callable[[Any], float],
    band: tuple[str, str] | None = None,
) -> None:
    """One line a method over prompt tokens; hollow marks where it does not fit."""
    for i, name in enumerate(at_most(column(rows, "method"), len(SERIES), "methods")):
        mine = sorted((r for r in rows if r["method"] == name), key=lambda r: r["prompt_tokens"])
        x, y = [r["prompt_tokens"] for r in mine], [unit(r[key]) for r in mine]
        colour = SERIES[i]
        ax.plot(x, y, color=colour, linestyle=DASHES[i], linewidth=1.8, label=name)
        fits = [bool(r.get("fits", True)) for r in mine]
        for inside, face in ((True, colour), (False, "white")):
            some = [j for j, ok in enumerate(fits) if ok is inside]
            if some:
                spots = [x[j] for j in some], [y[j] for j in some]
                ax.plot(*spots, MARKERS[i], color=colour, markerfacecolor=face, markersize=5, linestyle="none")
        if band is not None:
            low, high = ([unit(r[k]) for r in mine] for k in band)
            ax.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)


def _finish(ax: Axes, rows: Sequence[Row]) -> None:
    powers(ax.xaxis, column(rows, "prompt_tokens"))
    ax.set_xlabel("prompt (tokens; k = 1,024)")
    first = rows[0]
    where = " on ".join(str(first[k]) for k in ("model", "device") if k in first)
    several = "sequence" if first["batch"] == 1 else "sequences"
    hollow = "; hollow: does not fit" if not all(r.get("fits", True) for r in rows) else ""
    title(ax, f"{where}, {first['batch']} {several}{hollow}")
    below(ax)


def best_rows(source: Any, objective: Best = "speed") -> list[Row]:
    """For each (batch, prompt): the best method that fits, or none; raises KvsimError for an unknown objective."""
    if objective not in BEST:
        raise KvsimError(f"objective {shown(objective)} is not one of {', '.join(BEST)}{did_you_mean(objective, BEST)}")
    merit = BEST[objective][1]
    cells: dict[tuple[int, int], Row | None] = {}
    for row in rows_of(source):
        at = (int(row["batch"]), int(row["prompt_tokens"]))
        held = cells.setdefault(at, None)
        if row["fits"] and (held is None or merit(row) < merit(held)):
            cells[at] = row
    return [
        {"batch": b, "prompt_tokens": t, "method": best["method"] if best else "nothing fits"}
        | {k: best[k] if best else None for k in ("peak_bytes", "tpot_s")}
        for (b, t), best in sorted(cells.items(), key=lambda cell: cell[0])
    ]


def best_method(source: Any, objective: Best = "speed", ax: Axes | None = None) -> Axes:
    """A heat map of contexts and batches: which of the sweep's methods is best among those that fit.

    Args:
        source: a sweep or its DataFrame. objective: `speed` (fastest step), `gentle` (largest cache, which keeps most),
            `memory` (smallest peak). Each cell holds a letter, so that no colour has to be told apart; the table behind
            has it as `letter`.
    """
    from matplotlib.patches import Patch

    rows = best_rows(source, objective)
    names = at_most((r["method"] for r in rows if r["method"] != "nothing fits"), len(SERIES), "best methods")
    letters = {name: chr(ord("A") + i) for i, name in enumerate(names)}
    rows = [{**row, "letter": letters.get(row["method"], "")} for row in rows]
    batches, prompts = (sorted({r[k] for r in rows}) for k in ("batch", "prompt_tokens"))
    colours = dict(zip(names, (SERIES[1], SERIES[4], SERIES[2], SERIES[3], YELLOW, SERIES[0], SERIES[5]), strict=False))
    with page(ax, (7.2, 1.8 + 0.36 * len(batches))) as axes:
        for row in rows:
            x, y = prompts.index(row["prompt_tokens"]), batches.index(row["batch"])
            colour = colours.get(row["method"])
            look: dict[str, Any] = {"color": colour} if colour else {"facecolor": "white", "edgecolor": FAINT}
            axes.bar(x, 1, 1, bottom=y - 0.5, hatch=None if colour else "///", linewidth=0, **look)
            if colour:
                dark = colour in (SERIES[0], SERIES[5])
                axes.text(x, y, row["letter"], ha="center", va="center", color="white" if dark else "black", fontsize=9)
        axes.set_xticks(range(len(prompts)), [count(t) for t in prompts])
        axes.set_yticks(range(len(batches)), [str(b) for b in batches])
        axes.set_xlim(-0.5, len(prompts) - 0.5)
        axes.set_ylim(-0.5, len(batches) - 0.5)
        axes.grid(False)
        axes.set_xlabel("prompt (tokens; k = 1,024)")
        axes.set_ylabel("batch (sequences)")
        title(axes, f"best of what fits: {BEST[objective][0]}")
        keys = [Patch(color=colours[n], label=f"{letters[n]}: {n}") for n in names]
        if any(r["method"] == "nothing fits" for r in rows):
            keys.append(Patch(facecolor="white", edgecolor=FAINT, hatch="///", label="nothing fits"))
        below(axes, keys)
        return remember(axes, rows)


def grid_of(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Method names of `best_rows` as an array [batch, prompt]."""
    batches, prompts = (sorted({r[k] for r in rows}) for k in ("batch", "prompt_tokens"))
    made = np.full((len(batches), len(prompts)), "", dtype=object)
    for row in rows:
        made[batches.index(row["batch"]), prompts.index(row["prompt_tokens"])] = row["method"]
    return made
