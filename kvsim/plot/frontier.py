"""The Pareto picture: methods by two figures, those that no other beats joined and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.frames import Row, column, rows_of
from kvsim.plot.labels import label
from kvsim.plot.style import BLACK, FAINT, FAMILIES, LIMIT, SIZE, below, gib, page, remember, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figure = tuple[str, Callable[[Any], float]]
FIGURES: dict[str, Figure] = {
    "needed_bytes": ("peak memory with reserve (GiB)", gib),
    "cache_bytes": ("cache (GiB)", gib),
    "peak_bytes": ("peak memory (GiB)", gib),
    "tpot_s": ("one decode step (ms)", lambda v: 1e3 * float(v)),
    "ttft_s": ("first token after (s)", float),
    "bits_per_value": ("cache bits a value (bits)", float),
    "kl": ("loss of quality, KL (nats a token)", float),
    "ppl_ratio": ("perplexity over that of the full cache (ratio)", float),
    "relative_error": ("relative squared error (ratio)", float),
}
"""What an axis can show: all are better when smaller."""


QUALITY = ("kl", "ppl_ratio", "relative_error", "bits_per_value")
"""Figures that say themselves how much of the cache is kept."""


def best_of(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of points that no other beats in all figures at once (smaller is better); each place once."""
    held = np.asarray(points, float).reshape(len(points), len(points[0]) if points else 1)
    found: list[int] = []
    for i in np.lexsort(held.T[::-1]).tolist():  # who beats a point comes before it
        if not any((held[j] <= held[i]).all() for j in found):
            found.append(i)
    return found


def pareto_rows(source: Any, x: str, y: str) -> list[Row]:
    """Rows with both figures, and whether each is on the frontier among what fits and is allowed.

    Rows of a plan keep its frontier where neither figure says how much is kept. For others, bits kept of each value
    are then the third figure: a method that keeps more is not beaten by one that keeps less, however fast that is.
    """
    for name in (x, y):
        if name not in FIGURES:
            near = did_you_mean(name, FIGURES)
            raise KvsimError(f"{shown(name)} is no figure of this picture{near}; it shows {', '.join(FIGURES)}")
    rows = [dict(row) for row in rows_of(source)]
    for row in rows:
        if "peak_bytes" in row:
            row["needed_bytes"] = row["peak_bytes"] + row.get("reserve_bytes", 0)
    column(rows, x), column(rows, y)
    rows = [r for r in rows if r[x] == r[x] and r[y] == r[y] and r[x] is not None and r[y] is not None]
    if not rows:
        raise KvsimError(f"no row has both {x} and {y}")
    # A method that fits but is not allowed carries a caution or misses a limit: it may be shown, not recommended.
    able = [i for i, r in enumerate(rows) if r.get("fits", True) and r.get("allowed", True)]
    if {x, y}.isdisjoint(QUALITY) and all("frontier" in r for r in rows):
        return [{**row, "on_frontier": bool(row["frontier"])} for row in rows]  # the plan's own: it knows the losses
    third = {x, y}.isdisjoint(QUALITY) and all("bits_per_value" in r for r in rows)
    best = {able[i] for i in best_of([(r[x], r[y], -r["bits_per_value"] * third if third else 0.0) for r in
                                      (rows[i] for i in able)])}  # fmt: skip
    return [{**row, "on_frontier": i in best} for i, row in enumerate(rows)]


def pareto(
    source: Any,
    x: str = "needed_bytes",
    y: str = "tpot_s",
    ax: Axes | None = None,
    most_labels: int = 12,
    log: str = "",
) -> Axes:
    """Methods by two figures; the frontier, the chosen method and the full cache named.

    Args:
        source: a plan, its DataFrame, or rows with `method`, `family`, `fits` and both figures.
        x, y: names of FIGURES. most_labels: at most so many names, spread evenly. log: which axes are logarithmic
            (`x`, `y` or `xy`); rows without a positive figure there are left out, and counted in the title.

    Large: on the frontier. Hollow: does not fit, or is not recommended. `data(ax)` holds every point.
    """
    rows = pareto_rows(source, x, y)
    whole = len(rows)
    rows = [r for r in rows if ("x" not in log or r[x] > 0) and ("y" not in log or r[y] > 0)]
    (x_words, to_x), (y_words, to_y) = FIGURES[x], FIGURES[y]
    with page(ax, (SIZE[0], 5.0)) as axes:
        _marks(axes, [{**r, "at": (to_x(r[x]), to_y(r[y]))} for r in rows])
        front = sorted((r for r in rows if r["on_frontier"]), key=lambda r: (r[x], r[y]))
        if not {x, y}.isdisjoint(QUALITY) and front:
            steps = [(to_x(r[x]), to_y(r[y])) for r in front]
            axes.step(*zip(*steps, strict=True), where="post", color=FAINT, linewidth=1.0, zorder=1)
        limits = {r.get("capacity_bytes", 0) for r in rows} - {0}
        if x == "needed_bytes" and len(limits) == 1:
            limit = gib(limits.pop())
            axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.5, label=f"capacity, {limit:.2f} GiB")
        for axis in log:
            axes.set(**{f"{axis}scale": "log"})
        axes.set_xlabel(x_words)
        axes.set_ylabel(y_words)
        axes.margins(0.08, 0.1)
        below(axes)
        shown_rows = _named(rows, front, most_labels)
        points = [(to_x(r[x]), to_y(r[y]), str(r["method"])) for r in shown_rows]
        marks = [(to_x(r[x]), to_y(r[y])) for r in rows]
        strong = [str(r["method"]) for r in rows if r.get("chosen")]
        left = f"; {whole - len(rows)} at zero not shown" if whole > len(rows) else ""
        title(axes, f"{len(rows)} methods, {len(front)} of them on the frontier (large marks)" + left)
        label(axes, points, marks, strong=strong)  # last: what changes the layout would move names onto each other
        return remember(axes, rows)


def _named(rows: Sequence[Row], front: Sequence[Row], most: int) -> list[Row]:
    """Rows to name, the most wanted first: the choice, the full cache, then the frontier's ends and an even spread."""
    first = [r for r in rows if r.get("chosen")] + [r for r in rows if r.get("family") == "full"]
    room = max(0, most - len(first))
    rest = [r for r in front if r not in first]
    if len(rest) > room:
        rest = [rest[round(i * (len(rest) - 1) / max(1, room - 1))] for i in range(room)]
    return first + rest


def _marks(ax: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    for name, (colour, marker, words) in FAMILIES.items():
        mine = [r for r in rows if r.get("family", "hybrid") == name]
        for r in mine:
            good = bool(r.get("fits", True) and r.get("allowed", True))
            size = 11.0 if marker == "*" else 7.5 if r["on_frontier"] else 4.0 if good else 5.0
            look: dict[str, Any] = {"markerfacecolor": colour if good else "white", "alpha": 0.9 if good else 0.5}
            ax.plot(*r["at"], marker, color=colour, markersize=size, zorder=3 if r["on_frontier"] else 2, **look)
        if mine:
            ax.add_line(Line2D([], [], color=colour, marker=marker, linestyle="none", label=words))
    for r in rows:
        if r.get("chosen"):
            ring: dict[str, Any] = {"markersize": 14, "markerfacecolor": "none", "markeredgewidth": 1.4}
            ax.plot(*r["at"], "o", color=BLACK, label="chosen", **ring)
