"""Predicted beside measured, with the intervals and the worst miss named; and quality against bytes with its limit."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.frames import Row, column, rows_of
from kvsim.plot.frontier import FIGURES
from kvsim.plot.labels import label
from kvsim.plot.style import BLACK, FAINT, FAMILIES, LIMIT, MARKERS, SERIES, SIZE, at_most, below, page, remember, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LEAST = 1e-6
"""A loss that no logarithmic axis needs to show: what arithmetic alone makes of the full cache."""


def measured_rows(source: Any) -> list[Row]:
    """Rows with `error` (predicted / measured - 1) and `inside` (measured within the predicted interval)."""
    rows = [dict(row) for row in rows_of(source)]
    if not rows:
        raise KvsimError("predicted_measured needs at least one row")
    for name in ("predicted_s", "low_s", "high_s", "measured_s"):
        bad = next((v for v in column(rows, name) if not v > 0), None)
        if bad is not None:
            raise KvsimError(f"{name} must be above zero, got {bad}")
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1.0
        row["inside"] = bool(row["low_s"] <= row["measured_s"] <= row["high_s"])
    return rows


def worst(rows: Sequence[Row]) -> Row:
    """The row whose prediction is off by the largest factor, either way."""
    return max(rows, key=lambda r: abs(np.log(r["predicted_s"] / r["measured_s"])))


def predicted_measured(source: Any, group: str = "", name: str = "name", ax: Axes | None = None) -> Axes:
    """Predicted against measured seconds with 90% intervals; the diagonal is a perfect prediction.

    Args:
        source: rows with predicted_s, low_s, high_s, measured_s (seconds), and columns to group and name them by.
        group: a column whose values get a colour and marker each (at most 7). name: what the worst miss is called by.
    """
    rows = measured_rows(source)
    groups = at_most((str(r.get(group, "")) for r in rows), len(SERIES), "groups")
    with page(ax, (SIZE[0], 5.2)) as axes:
        many = len(rows) > 150
        for i, key in enumerate(groups):
            mine = [r for r in rows if str(r.get(group, "")) == key]
            x, y = ([1e3 * r[k] for r in mine] for k in ("measured_s", "predicted_s"))
            ends = [[1e3 * max(0.0, r["predicted_s"] - r["low_s"]) for r in mine],
                    [1e3 * max(0.0, r["high_s"] - r["predicted_s"]) for r in mine]]  # fmt: skip
            look: dict[str, Any] = {"color": SERIES[i], "alpha": 0.35 if many else 0.9}
            look["elinewidth"] = 0.5 if many else 1.0
            axes.errorbar(x, y, ends, fmt=MARKERS[i], markersize=3 if many else 5.5, label=key or "rows", **look)
        span = [1e3 * f(r[k] for r in rows for k in ("measured_s", "predicted_s")) for f in (min, max)]
        ends_of = [span[0] / 1.5, span[1] * 1.5]
        axes.plot(ends_of, ends_of, color=BLACK, linewidth=1.0, zorder=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*ends_of)
        axes.set_xlabel("measured (ms)")
        axes.set_ylabel("predicted (ms)")
        error, inside = np.median([abs(r["error"]) for r in rows]), np.mean([r["inside"] for r in rows])
        title(axes, f"{len(rows):,} rows: median error {error:.0%}, {inside:.0%} inside their 90% intervals")
        below(axes)
        _worst(axes, worst(rows), name)
        return remember(axes, rows)


def _worst(ax: Axes, row: Row, name: str) -> None:
    at = (1e3 * row["measured_s"], 1e3 * row["predicted_s"])
    ax.plot(*at, "o", markersize=13, markerfacecolor="none", color=LIMIT, markeredgewidth=1.4)
    factor = row["predicted_s"] / row["measured_s"]
    ratio = f"{factor:.2g}x too slow" if factor > 1 else f"{1 / factor:.2g}x too fast"
    label(ax, [(*at, fill(f"worst: {row.get(name, 'unnamed')}, {ratio}", 36))])


def quality_bytes(
    source: Any,
    y: str = "relative_error",
    limit: Any = None,
    ax: Axes | None = None,
    most_labels: int = 16,
) -> Axes:
    """What methods lose against the bits they keep, and the least that any method must lose.

    Args:
        source: rows with `method`, `family`, `bits_per_value` and y. y: relative_error, kl or ppl_ratio.
        limit: rows with `bits_per_value` and y of the rate-distortion limit, as `kvsim.distortion.limit_rows` gives.
    """
    held = [dict(row) for row in rows_of(source)]
    for key in ("method", "bits_per_value", y):
        column(held, key)
    rows = [row for row in held if row[y] > LEAST]
    bound = [] if limit is None else [{**row, "method": "limit"} for row in rows_of(limit)]
    with page(ax, (SIZE[0], 4.8)) as axes:
        for name, (colour, marker, words) in FAMILIES.items():
            mine = [r for r in rows if r.get("family", "hybrid") == name]
            if mine:
                size = 11 if marker == "*" else 6
                points = [r["bits_per_value"] for r in mine], [r[y] for r in mine]
                axes.plot(*points, marker, color=colour, markersize=size, linestyle="none", label=words)
        if bound:
            bits, loss = [r["bits_per_value"] for r in bound], [r[y] for r in bound]
            axes.plot(bits, loss, color=BLACK, label="rate-distortion limit")
            axes.fill_between(bits, loss, min(loss), color=FAINT, alpha=0.12, linewidth=0)
        axes.set_yscale("log")
        axes.set_xlabel("bits a value, everything stored counted (bits)")
        axes.set_ylabel(FIGURES[y][0] if y in FIGURES else y)
        axes.set_xlim(left=0)
        below(axes)
        order = sorted(rows, key=lambda r: r["bits_per_value"])
        some = order if len(order) <= most_labels else [
            order[round(i * (len(order) - 1) / (most_labels - 1))] for i in range(most_labels)
        ]  # fmt: skip
        marks = [(r["bits_per_value"], r[y]) for r in order]
        left = len(held) - len(rows)
        title(axes, "loss against bits" + (f"; {left} below {LEAST:g} not shown" if left else ""))
        label(axes, [(r["bits_per_value"], r[y], str(r["method"])) for r in some], marks)
        return remember(axes, [*rows, *bound])
