"""The roofline: what a device could do at each intensity, and where the work of methods stands under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.frames import Row, called, family
from kvsim.hardware import HardwareProfile
from kvsim.plot.labels import label
from kvsim.plot.style import BLACK, FAINT, FAMILIES, PAPER, SIZE, below, page, remember, title
from kvsim.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

TERA = 1e12


def roofline_rows(
    records: Record | Sequence[Record],
    phase: Literal["prefill", "decode"] = "decode",
    line: str = "attention",
) -> list[Row]:
    """For each record: intensity (flops a byte) and achieved FLOP/s with the interval's ends, of one line of work.

    Args:
        line: the name of a line of the records, or `all` for the whole phase.
    """
    found = []
    for record in [records] if isinstance(records, Record) else records:
        if np.ndim(record.peak_bytes):
            raise KvsimError("a roofline shows single points; this record's workload is an array")
        lines = record.prefill.lines if phase == "prefill" else record.decode.lines
        names = [x.name for x in lines]
        if line != "all" and line not in names:
            raise KvsimError(f"{phase} has no line {shown(line)}{did_you_mean(line, names)}; it has {', '.join(names)}")
        timing = record.prefill if phase == "prefill" else record.decode
        whole: Any = timing if line == "all" else next(x for x in lines if x.name == line)
        flops, moved = (sum(float(getattr(x, k)) for x in lines if line in ("all", x.name)) for k in ("flops", "bytes"))
        if not (flops and moved and whole.seconds):
            raise KvsimError(f"{line} of {phase} does no work in {record.case.method}: nothing to draw")
        rates = {k: flops / float(getattr(whole, k)) for k in ("seconds", "low", "high")}
        found.append(
            {
                "method": called(record.case.method),
                "family": family(record.case.method),
                "phase": phase,
                "line": line,
                "flops": flops,
                "bytes": moved,
                "intensity": flops / moved,
                "seconds": float(whole.seconds),
                "flops_per_s": rates["seconds"],
                "flops_per_s_low": rates["high"],
                "flops_per_s_high": rates["low"],
                "bytes_per_s": moved / float(whole.seconds),
            }
        )
    return found


def roofline(
    records: Record | Sequence[Record],
    phase: Literal["prefill", "decode"] = "decode",
    line: str = "attention",
    ax: Axes | None = None,
    names: Mapping[str, str] | None = None,
) -> Axes:
    """Methods under their device's roof: achieved TFLOP/s against intensity (flops a byte), both logarithmic.

    Args:
        records: one or several, all on one device. phase, line: which work; `all` for the whole phase.
        names: other names for methods.

    The roof is the datasheet's; vertical bars are 90% intervals.
    """
    held = [records] if isinstance(records, Record) else list(records)
    devices = {r.case.hardware.name: r.case.hardware for r in held}
    if len(devices) != 1:
        raise KvsimError(f"a roofline has one device; the records have {', '.join(devices) or 'none'}")
    device = next(iter(devices.values()))
    rows = roofline_rows(held, phase, line)
    rows = [{**row, "method": (names or {}).get(row["method"], row["method"])} for row in rows]
    with page(ax, (SIZE[0], 4.8)) as axes:
        _roof(axes, device, [r["intensity"] for r in rows])
        for name, (colour, marker, words) in FAMILIES.items():
            mine = [r for r in rows if r["family"] == name]
            if not mine:
                continue
            x, y = [r["intensity"] for r in mine], [r["flops_per_s"] / TERA for r in mine]
            ends = [[(r["flops_per_s"] - r["flops_per_s_low"]) / TERA for r in mine],
                    [(r["flops_per_s_high"] - r["flops_per_s"]) / TERA for r in mine]]  # fmt: skip
            size = 11 if marker == "*" else 6
            axes.errorbar(x, y, ends, fmt=marker, color=colour, markersize=size, elinewidth=0.9, label=words, alpha=0.9)
        axes.set_xlabel("intensity (FLOP a byte)")
        axes.set_ylabel("achieved (TFLOP/s)")
        what = "whole step" if line == "all" else line
        title(axes, f"{what} of {phase} on {device.name}; the roof is the datasheet's")
        below(axes)
        points = [(r["intensity"], r["flops_per_s"] / TERA, r["method"]) for r in rows]
        label(axes, points)
        return remember(axes, rows)


def _roof(ax: Axes, device: HardwareProfile, intensities: Sequence[float]) -> None:
    """The slope of the bandwidth up to the peaks of the device's number formats."""
    bandwidth = device.bandwidth_bytes_per_s
    ridge = max(device.peaks.values()) / bandwidth
    low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.plot([low, ridge], [low * bandwidth / TERA, ridge * bandwidth / TERA], color=BLACK, linewidth=1.6)
    peaks: dict[float, list[str]] = {}
    for dtype, peak in sorted(device.peaks.items(), key=lambda item: item[1]):
        peaks.setdefault(peak, []).append(dtype)
    for peak, dtypes in peaks.items():
        ax.plot([peak / bandwidth, high], [peak / TERA] * 2, color=FAINT, linewidth=1.2)
        _note(ax, (high, peak / TERA), f"{', '.join(dtypes)} {peak / TERA:g}", "right")
    ax.set_ylim(low * bandwidth / TERA, max(device.peaks.values()) / TERA * 2.5)
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    (x0, y0), (x1, y1) = ax.transData.transform([(low, low * bandwidth / TERA), (ridge, ridge * bandwidth / TERA)])
    slope = float(np.degrees(np.arctan2(y1 - y0, x1 - x0)))
    _note(ax, (ridge / 12, ridge / 12 * bandwidth / TERA), f"{bandwidth / 1e9:g} GB/s", "left", slope)


def _note(ax: Axes, at: tuple[float, float], words: str, side: str, slope: float = 0.0) -> None:
    """What a line of the roof stands for, written along it."""
    place: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": 8, "color": FAINT}
    if not slope:
        place["bbox"] = PAPER
    offset = (-2 if side == "right" else 0, 2 if slope else 4)
    ax.annotate(words, at, offset, rotation=slope, rotation_mode="anchor", **place)
