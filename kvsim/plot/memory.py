"""Pictures of memory: the waterfall of one record, and methods beside each other against the device's capacity."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.frames import Row, called, column, rows_of
from kvsim.plot.style import (
    BLUE,
    FAINT,
    GREEN,
    LIMIT,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    at_most,
    below,
    gib,
    narrow,
    page,
    remember,
    title,
)
from kvsim.record import Record
from kvsim.report import gib as written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 16
PARTS = (
    ("weights", FAINT, "weights"),
    ("cache_bytes", BLUE, "cache"),
    ("state_bytes", PURPLE, "state and cross-attention"),
    ("rest_bytes", SKY, "scratch, activations, slack at the peak"),
    ("reserve_bytes", ORANGE, "runtime reserve"),
)


def waterfall_rows(record: Record) -> list[Row]:
    """What adds up to the peak and the reserve: (step, start_bytes, bytes); raises KvsimError for arrays.

    Scratch and activations are not all held at once, so their step is what the peak holds beside the rest.
    """
    if np.ndim(record.peak_bytes):
        raise KvsimError("a waterfall shows one point; this record's workload is an array")
    held = [(n, int(b)) for n, b in record.memory if n in ("weights", "cache") or n.startswith("cache: ")]
    held.append(("state and cross-attention", int(record.state_bytes + record.cross_bytes)))
    held.append(("scratch, activations, slack", int(record.peak_bytes) - sum(b for _, b in held)))
    held.append(("runtime reserve", record.reserve_bytes))
    rows, start = [], 0
    for name, size in held:
        if size:
            rows.append({"step": name, "start_bytes": start, "bytes": size})
            start += size
    rows.append({"step": "peak and reserve", "start_bytes": 0, "bytes": start})
    rows.append({"step": "capacity", "start_bytes": 0, "bytes": record.case.hardware.capacity_bytes})
    return rows


def waterfall(record: Record, ax: Axes | None = None) -> Axes:
    """The memory of one record, step by step from the weights to the peak, against the device's capacity (GiB)."""
    rows = waterfall_rows(record)
    *steps, total, capacity = rows
    colours = {"weights": FAINT, "runtime reserve": ORANGE, "state and cross-attention": PURPLE}
    with page(ax, (7.2, 1.2 + 0.4 * len(rows))) as axes:
        limit = capacity["bytes"]
        thick, join = _rows_named(axes, [r["step"] for r in (*steps, total)], 0.62), not narrow(axes)
        for i, row in enumerate([*steps, total]):
            name = row["step"]
            colour = BLUE if name.startswith("cache") else colours.get(name, SKY)
            left, width = gib(row["start_bytes"]), gib(row["bytes"])
            last = row is total
            colour = (LIMIT if row["bytes"] > limit else GREEN) if last else colour
            axes.barh(i, width, left=left, color=colour, height=thick, hatch="//" if last and colour == LIMIT else None)
            _beside(axes, left + width, i, written(row["bytes"]))
            if not last and join:
                axes.plot([left + width] * 2, [i + 0.31, i + 0.69], color=FAINT, linewidth=0.8)
        axes.axvline(gib(limit), color=LIMIT, linewidth=1.5, linestyle="--")
        axes.set_xlim(0, (1.35 if narrow(axes) else 1.16) * gib(max(total["bytes"], limit)))
        axes.set_xlabel("memory of one device (GiB)")
        left_over = limit - total["bytes"]
        ends = f"{written(left_over)} left" if left_over >= 0 else f"{written(-left_over)} short"
        case = record.case
        title(axes, f"{called(case.method)}\n{ends} of {written(limit)} (dashed)")
        return remember(axes, rows)


def stack_rows(source: Any) -> list[Row]:
    """For each record: the parts that add up to its peak and reserve, and the capacity."""
    found = []
    for row in rows_of(source):
        cache, peak = (int(column([row], k)[0]) for k in ("cache_bytes", "peak_bytes"))
        weights, total = (int(column([row], k)[0]) for k in ("weights_bytes", "total_bytes"))
        parts = {"weights": weights, "cache_bytes": cache, "state_bytes": total - weights - cache}
        keys = ("reserve_bytes", "capacity_bytes")
        ends = dict(zip(keys, (int(column([row], k)[0]) for k in keys), strict=True))
        found.append({"method": row["method"], **parts, "rest_bytes": peak - total, **ends, "peak_bytes": peak})
    return found


def memory_bars(source: Any, ax: Axes | None = None) -> Axes:
    """One bar a method: weights, cache and the rest up to the peak, against the device's capacity (GiB).

    Args:
        source: records, a plan, or a DataFrame with the columns of `plan.to_frame()`; at most 16 rows.
    """
    rows = stack_rows(source)
    at_most((str(i) for i in range(len(rows))), MOST_BARS, "bars")
    limits = {row["capacity_bytes"] for row in rows}
    if len(limits) != 1:
        raise KvsimError("memory_bars compares methods on one device; these rows have several capacities")
    limit = limits.pop()
    names = [fill(str(row["method"]), 32, break_long_words=False) for row in rows]
    tall = max(0.36, *(0.2 * (name.count("\n") + 1) for name in names))
    with page(ax, (7.2, 1.6 + tall * len(rows))) as axes:
        starts, thick = np.zeros(len(rows)), _rows_named(axes, names, 0.68)
        for key, colour, words in PARTS:
            wide = np.array([gib(row[key]) for row in rows])
            if wide.any():
                axes.barh(range(len(rows)), wide, left=starts, color=colour, height=thick, label=words)
            starts += wide
        _totals(axes, rows, starts, limit)
        axes.axvline(gib(limit), color=LIMIT, linewidth=1.5, linestyle="--", label=f"capacity, {written(limit)}")
        axes.set_xlim(0, (1.35 if narrow(axes) else 1.14) * max(gib(limit), starts.max()))
        axes.set_xlabel("memory of one device at the peak (GiB)")
        below(axes)
        return remember(axes, rows)


def _rows_named(ax: Axes, names: Sequence[str], thick: float) -> float:
    """Names of horizontal bars at 0, 1, 2... from above: beside them, or above where the picture is narrow.

    Returns how thick the bars may be.
    """
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.grid(False, axis="y")
    if not narrow(ax):
        ax.set_yticks(range(len(names)), names)
        return thick
    ax.set_yticks([])
    thick = 0.36
    for i, name in enumerate(names):
        above: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "zorder": 5, "bbox": PAPER}
        ax.annotate(" ".join(name.split()), (0, i - thick / 2), (2, 4), **above)
    return thick


def _totals(ax: Axes, rows: Sequence[Row], ends: Any, limit: int) -> None:
    """The sum at the end of each bar, and whether it fits."""
    for i, row in enumerate(rows):
        over = row["peak_bytes"] + row["reserve_bytes"] > limit
        words = written(row["peak_bytes"] + row["reserve_bytes"]) + (" x" if over else "")
        _beside(ax, ends[i], i, words, LIMIT if over else "black")


def _beside(ax: Axes, x: float, y: float, words: str, colour: str = "black") -> None:
    """A figure at the end of a bar, on white so that the dashed line does not run through it."""
    place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "bbox": PAPER}
    ax.annotate(words, (x, y), (4, 0), color=colour, zorder=5, **place)
