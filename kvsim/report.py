"""How answers look to a person: units, tables that fold but never cut, plain text when piped; no figure of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 240
"""Columns of a table that is not printed on a terminal and has no COLUMNS to keep to."""
NARROWEST = 40
"""Columns below which lines are left to the terminal to break: no table can be laid out there."""


class _Screen(Console):
    """A console whose reader may leave (`| head`): the program decides what that means, not the library."""

    def on_broken_pipe(self) -> None:
        """Pass the error on instead of ending with a status that would say that nothing fits."""
        raise  # noqa: PLE0704 - called while the error is handled


def console() -> Console:
    """Standard output: colours on a terminal, plain text elsewhere; user text is never read as markup."""
    width = _asked_width()
    if width is None and not sys.stdout.isatty():
        width = PIPED_WIDTH
    # the library takes any digits in COLUMNS for a width, even 0
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    out = _Screen(markup=False, highlight=False, emoji=False, width=width, _environ=plain)
    out.width = max(NARROWEST, out.width)
    return out


def _asked_width() -> int | None:
    """COLUMNS where it is a number of columns."""
    asked = os.environ.get("COLUMNS", "")
    return int(asked) or None if asked.isascii() and asked.isdigit() and len(asked) < 7 else None


@dataclass(frozen=True)
class Column:
    """A column's head; numbers stand right. `optional` ones are left out, last first, where the table is too wide."""

    head: str
    right: bool = False
    fold: bool = False
    optional: bool = False


def table(out: Console, columns: Sequence[Column], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows under their heads; text folds where it must, nothing is cut off. A Text cell keeps its style."""
    shown = [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows]
    kept = _that_fit(out.width, columns, shown)
    made = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title or None,
        title_justify="left",
        title_style="bold",
    )
    for i in kept.indices:
        c = columns[i]
        fixed = not (c.fold or kept.squeezed)
        made.add_column(c.head, justify="right" if c.right else "left", overflow="fold", no_wrap=fixed)
    for row in shown:
        made.add_row(*(row[i] for i in kept.indices))
    out.print()
    out.print(made)


@dataclass(frozen=True)
class _Kept:
    """Columns to print, and whether even they are too wide to keep each on one line."""

    indices: tuple[int, ...]
    squeezed: bool


def _that_fit(width: int, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> _Kept:
    """Optional columns go, last first, until the rest is not wider than the console."""
    widths = [max([len(c.head), *(row[i].cell_len for row in rows)]) + 2 for i, c in enumerate(columns)]
    # A folding column may shrink to about a third of a narrow console before others have to go.
    needed = [min(w, max(24, width // 4)) if c.fold else w for w, c in zip(widths, columns, strict=True)]
    kept = list(range(len(columns)))
    for i in reversed(range(len(columns))):
        if columns[i].optional and sum(needed[k] for k in kept) > width:
            kept.remove(i)
    return _Kept(tuple(kept), sum(needed[k] for k in kept) > width)


def say(out: Console, text: str, style: str = "", indent: int = 0) -> None:
    """A paragraph, wrapped on a terminal and left whole in a pipe; further lines hang by `indent`."""
    if not out.is_terminal and _asked_width() is None:
        out.print(Text(text, style), soft_wrap=True)
        return
    first, *rest = Text(text, style).wrap(out, out.width) or [Text("")]
    if rest and indent:
        rest = list(Text(text[len(first.plain) :].lstrip(), style).wrap(out, max(20, out.width - indent)))
    out.print(first)
    for line in rest:
        out.print(Text(" " * indent) + line)


def size(value: Any) -> str:
    """Bytes in the largest binary unit that keeps a whole part: `16.0 GiB`, `512 MiB`, `80.0 KiB`."""
    number = float(value)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= scale:
            return f"{_three(number / scale)} {unit}"
    return f"{number:.0f} B"


def gib(value: Any) -> str:
    """Bytes in GiB with two decimals; smaller amounts in their own unit, so that no cache reads 0.00."""
    return f"{float(value) / 2**30:.2f} GiB" if float(value) >= 2**30 / 10 else size(value)


def duration(seconds: Any) -> str:
    """Seconds in the unit people read: us, ms, s, min, h, d."""
    s = float(seconds)
    if s >= 172800:
        return f"{s / 86400:.1f} d"
    if s >= 7200:
        return f"{s / 3600:.1f} h"
    if s >= 120:
        return f"{s / 60:.1f} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if s >= scale:
            return f"{_three(s / scale)} {unit}"
    return f"{_three(s * 1e6)} us"


def milliseconds(seconds: Any) -> str:
    """Seconds in ms, without the unit: `26.8`."""
    return _three(float(seconds) * 1e3)


def quantity(value: Any, unit: str = "") -> str:
    """A large number with a decimal prefix: `165 T`, `8.03 G`."""
    number = float(value)
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{_three(number / scale)} {prefix}{unit}"
    return f"{_three(number)} {unit}".strip()


def parameters(value: Any) -> str:
    """A number of parameters as people say it: `8.03 B`."""
    return quantity(value).replace("G", "B")


def peak_dtype(peaks: Mapping[str, float]) -> str:
    """The dtype whose peak people compare: a 16-bit one where there is one."""
    return next((d for d in ("bf16", "fp16") if d in peaks), next(iter(peaks)))


def tokens(value: Any) -> str:
    """A count with thousands apart."""
    return f"{int(value):,}"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    v = float(value)
    return (
        "0" if v == 0 else f"{v:.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}" if v >= 1 else f"{v:.3f}"
    )
