"""How pictures look: colours that colour-blind people tell apart, units on axes, and the table behind each picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvsim.errors import KvsimError
from kvsim.frames import Row, frame

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

INSTALL = "pip install 'kvsim[plot]'"

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Okabe and Ito, Color universal design (2008)."""
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, BLACK)
"""Colours of lines and groups, in order; yellow is too faint on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = (
    "-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), "--",
)  # fmt: skip
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
"""White behind a text, so that no line runs through it."""
LIMIT = RED
FAINT = "#767676"

FAMILIES = {
    "full": (BLACK, "*", "full cache"),
    "format": (BLUE, "o", "fewer bits"),
    "tokens": (ORANGE, "^", "fewer tokens"),
    "basis": (GREEN, "s", "fewer channels"),
    "hybrid": (PURPLE, "D", "several at once"),
}
"""Colour, marker and words for each kind of method."""

RULES = {
    "figure.dpi": 100.0,
    "savefig.dpi": 100.0,
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "hatch.linewidth": 0.6,
}
SIZE = (7.2, 4.2)
"""Inches: what a notebook cell is wide."""
NARROW = 4.2
"""Inches: below this, a picture is for a phone: names stand above bars and ticks are few."""

_TABLES: WeakKeyDictionary[Axes, list[Row]] = WeakKeyDictionary()


@contextmanager
def page(ax: Axes | None, size: tuple[float, float] = SIZE) -> Iterator[Axes]:
    """The axes to draw on, new ones where None; the house's look holds inside and nowhere else."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise KvsimError(f"pictures need matplotlib: {INSTALL}") from None
    with mpl.rc_context(RULES):  # type: ignore[arg-type]
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=size, layout="constrained")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        yield ax


def remember(ax: Axes, rows: Iterable[Row]) -> Axes:
    """Keep the rows that a picture shows beside it."""
    _TABLES[ax] = list(rows)
    return ax


def rows(ax: Axes) -> list[Row]:
    """The rows that a picture of this package shows; KvsimError for axes that are none."""
    if ax not in _TABLES:
        raise KvsimError("these axes hold no picture of kvsim.plot, so there is no table behind them")
    return _TABLES[ax]


def data(ax: Axes) -> pd.DataFrame:
    """The table behind a picture, one row a mark."""
    return frame(rows(ax))


def gib(value: float) -> float:
    """Bytes in GiB."""
    return float(value) / 2**30


def count(value: float) -> str:
    """Tokens as people write them: 512, 4k, 128k, 1M."""
    for scale, unit in ((2**20, "M"), (2**10, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"


def narrow(ax: Axes | Axis) -> bool:
    """Whether a picture is made for a phone."""
    return bool(ax.figure.get_figwidth() < NARROW)  # type: ignore[union-attr]


def powers(axis: Axis, values: Iterable[float]) -> None:
    """A logarithmic axis of counts, its ticks at powers of two and written as 4k, 8k."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    held = [v for v in values if v > 0]
    axis._set_axes_scale("log", base=2)  # type: ignore[attr-defined]
    wide = max(held) / min(held) if held else 1.0
    most = 2**5 if narrow(axis) else 2**10
    axis.set_major_locator(LogLocator(base=2.0 if wide <= most else 4.0, numticks=40))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: count(v)))


def below(ax: Axes, handles: Sequence[Any] | None = None) -> None:
    """A legend under the axes, where it can hide nothing, in as many columns as the figure is wide."""
    made, labels = ax.get_legend_handles_labels()
    if handles is not None:
        made, labels = list(handles), [str(h.get_label()) for h in handles]
    if not made:
        return
    figure: Any = ax.figure
    alone = figure.axes == [ax] and figure.get_layout_engine() is not None
    for columns in range(min(6, len(labels)), 0, -1):
        if alone:
            legend = figure.legend(made, labels, loc="outside lower left", ncols=columns)
        else:
            legend = ax.legend(made, labels, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= 0.98 * figure.bbox.width:
            return
        legend.remove()


def title(ax: Axes, words: str) -> None:
    """A title, on as many lines as the room from the axes' left edge asks for; sizes must be final but for this."""
    figure: Any = ax.figure
    figure.draw_without_rendering()
    end = figure.bbox.x1 if figure.axes == [ax] else ax.get_window_extent().x1
    for wide in range(int(12 * figure.get_figwidth()), 11, -2):
        made = ax.set_title("\n".join(fill(line, wide) for line in words.split("\n")))
        if made.get_window_extent().x1 <= end:
            return


def at_most(names: Iterable[str], limit: int, what: str) -> list[str]:
    """Distinct names in order; KvsimError where more than can be told apart."""
    found = list(dict.fromkeys(names))
    if len(found) > limit:
        raise KvsimError(f"{len(found)} {what} are more than the {limit} that a reader can tell apart; choose some")
    return found
