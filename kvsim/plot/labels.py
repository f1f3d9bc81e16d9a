"""Labels of points that collide with nothing: not with each other, the points, the axes' edge or other text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, radians, sin
from typing import TYPE_CHECKING, Any

from kvsim.plot.style import FAINT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

DIRECTIONS = (20, 160, -20, -160, 90, -90, 55, 125, -55, -125, 0, 180)
"""Degrees, in the order of liking: to the right and slightly up first."""
DISTANCES = (7, 14, 24, 38, 54, 72, 94, 115)
"""Points from the mark to the label."""
LED = 20
"""Distance from which on a thin line leads to the label."""


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box, gap: float = 0.0) -> bool:
        """Whether two rectangles come closer than `gap`."""
        beside = self.right + gap <= other.left or other.right + gap <= self.left
        return not (beside or self.top + gap <= other.bottom or other.top + gap <= self.bottom)

    def inside(self, other: Box) -> bool:
        """Whether this one lies in the other."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )

    def crossed(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether a segment enters the rectangle (Liang and Barsky's clipping)."""
        enter, leave = 0.0, 1.0
        for low, high, a, b in ((self.left, self.right, start[0], end[0]), (self.bottom, self.top, start[1], end[1])):
            step = b - a
            if step == 0:
                if not low <= a <= high:
                    return False
                continue
            first, last = sorted(((low - a) / step, (high - a) / step))
            enter, leave = max(enter, first), min(leave, last)
        return enter <= leave


@dataclass(frozen=True)
class _Spot:
    """A place for a label: its offset in points, its box, and the line that leads to it, in pixels."""

    dx: float
    dy: float
    box: Box
    line: tuple[tuple[float, float], tuple[float, float]] | None


def box_of(text: Any) -> Box:
    """The rectangle that a text or legend takes on the canvas."""
    found = text.get_window_extent()
    return Box(found.x0, found.y0, found.x1, found.y1)


def label(
    ax: Axes,
    points: Sequence[tuple[float, float, str]],
    marks: Sequence[tuple[float, float]] = (),
    size: float = 8.5,
    strong: Sequence[str] = (),
) -> tuple[list[Text], list[str]]:
    """Write texts beside their points; the first ones are placed first.

    Args:
        points: (x, y, text) in data units. marks: further points that no label may cover. strong: texts in bold.

    Returns the labels and the texts for which there was no room. Scales and limits of the axes must be final.
    """
    from matplotlib.patheffects import AbstractPathEffect, withStroke

    # White around the letters, so that a line behind a name does not spoil it.
    halo: list[AbstractPathEffect] = [withStroke(linewidth=2.5, foreground="white")]
    figure = ax.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    scale = figure.dpi / 72.0
    frame = ax.get_window_extent()
    page = Box(frame.x0 + 1, frame.y0 + 1, frame.x1 - 1, frame.y1 - 1)
    taken = [box_of(t) for t in ax.texts if t.get_text()]
    dots = [_around(ax, x, y, 4.5 * scale) for x, y in [*((p[0], p[1]) for p in points), *marks]]
    lines: list[tuple[tuple[float, float], tuple[float, float]]] = []
    made: list[Text] = []
    missing: list[str] = []
    for x, y, words in points:
        weight = "bold" if words in strong else "normal"
        text = ax.annotate(
            words, (x, y), (0, 0), textcoords="offset points", fontsize=size, weight=weight, va="bottom", zorder=6
        )
        text.set_path_effects(halo)
        text.set_in_layout(False)  # else the layout would move the axes under labels that are already placed
        width, height = text.get_window_extent().width, text.get_window_extent().height
        spots = list(_spots(tuple(ax.transData.transform((x, y))), width, height, scale))
        spot = next((s for s in spots if _free(s, page, taken, dots, lines)), None)
        spot = spot or next((s for s in spots if _free(s, page, taken, [], lines)), None)
        if spot is None:
            text.remove()
            missing.append(words)
            continue
        text.set_position((spot.dx, spot.dy))
        if spot.line:
            lines.append(spot.line)
            _lead(ax, (x, y), spot, scale)
        taken.append(spot.box)
        made.append(text)
    return made, missing


def _around(ax: Axes, x: float, y: float, half: float) -> Box:
    px, py = ax.transData.transform((x, y))
    return Box(px - half, py - half, px + half, py + half)


def _spots(at: tuple[float, ...], width: float, height: float, scale: float) -> Iterator[_Spot]:
    """Places near a mark, the nearest first; offsets are those of the label's lower left corner."""
    for distance in DISTANCES:
        for angle in DIRECTIONS:
            rx, ry = distance * scale * cos(radians(angle)), distance * scale * sin(radians(angle))
            dx = rx if abs(angle) < 90 else rx - width if abs(angle) > 90 else -width / 2
            dy = ry - height / 2 + (height / 2 if angle == 90 else -height / 2 if angle == -90 else 0)
            left, bottom = at[0] + dx, at[1] + dy
            box = Box(left, bottom, left + width, bottom + height)
            line = None
            if distance >= LED:
                line = ((at[0], at[1]), (min(max(at[0], box.left), box.right), min(max(at[1], bottom), box.top)))
            yield _Spot(dx / scale, dy / scale, box, line)


def _free(
    spot: _Spot,
    page: Box,
    taken: Sequence[Box],
    dots: Sequence[Box],
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]],
) -> bool:
    if not spot.box.inside(page) or any(spot.box.meets(other, 1.5) for other in taken):
        return False
    if any(spot.box.meets(dot) for dot in dots) or any(spot.box.crossed(*line) for line in lines):
        return False
    return spot.line is None or not any(other.crossed(*spot.line) for other in taken)


def _lead(ax: Axes, point: tuple[float, float], spot: _Spot, scale: float) -> None:
    assert spot.line is not None
    (ax_, ay), (bx, by) = spot.line
    end = ((bx - ax_) / scale, (by - ay) / scale)
    arrow = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    ax.annotate("", point, end, textcoords="offset points", arrowprops=arrow, zorder=3).set_in_layout(False)
