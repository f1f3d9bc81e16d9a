"""The answer (Record) to a question (Case), the same type whether predicted or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvsim.case import Case, case_json, plain
from kvsim.kernels import tidy
from kvsim.workload import Count

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Case", "HeldBuffer", "Line", "Numbers", "Record", "Timing", "as_count", "case_json", "plain"]

SHARED_ERROR = 0.3
"""Correlation of the errors of a phase's lines. 0 left 74% of 96 measured decode steps and 66% of prompts in their 90%
intervals (validation on two CPU cores, 24 methods x 4 lengths), 0.3 93 and 96%, 0.2 85 and 90%."""
Numbers = Any
"""An int or float, or an array of the workload's shape."""


@dataclass(frozen=True, eq=False)
class Line:
    """One piece of work: all its bytes, flops and seconds in one phase, and the term that dominates."""

    phase: Literal["prefill", "decode"]
    name: str
    bytes: Numbers
    flops: Numbers
    seconds: Numbers
    low: Numbers
    high: Numbers
    find_term: Callable[[], Any] = field(repr=False)
    coefficients: str = ""

    @property
    def term(self) -> Any:
        """What dominates: memory, conversion, compute, launch, waves."""
        return self.find_term()

    def row(self) -> dict[str, Any]:
        """The line as JSON has it."""
        return {
            "phase": self.phase,
            "name": self.name,
            "bytes": plain(self.bytes, whole_numbers=True),
            "flops": plain(self.flops),
            "seconds": plain(self.seconds),
            "low": plain(self.low),
            "high": plain(self.high),
            "term": plain(self.term),
        }


@dataclass(frozen=True, eq=False)
class Timing:
    """Seconds of a phase: the sum of its lines, the ends of a 90% interval, and `line: term` of the largest line."""

    lines: tuple[Line, ...]
    seconds: Numbers
    low: Numbers
    high: Numbers

    @classmethod
    def of(cls, lines: tuple[Line, ...]) -> Timing:
        """Sum lines, whose errors hang together by SHARED_ERROR: one machine in one state made them all."""
        total = sum(line.seconds for line in lines)
        below, above = (
            np.sqrt((1.0 - SHARED_ERROR) * sum(h * h for h in half) + SHARED_ERROR * sum(half) ** 2)
            for half in (
                [line.seconds - line.low for line in lines],
                [line.high - line.seconds for line in lines],
            )
        )
        return cls(lines, total, total - below, total + above)

    @property
    def dominant(self) -> Any:
        """`name (term)` of the line that takes most of the time."""
        if not self.lines:
            return "nothing"
        stacked = np.stack(np.broadcast_arrays(*(np.asarray(line.seconds, float) for line in self.lines)))
        which = np.argmax(stacked, axis=0)
        names = np.array(
            [
                np.broadcast_to(
                    np.char.add(np.char.add(f"{line.name} (", np.asarray(line.term, str)), ")"), which.shape
                )
                for line in self.lines
            ]
        )
        found = np.take_along_axis(names, which[None], axis=0)[0] if which.ndim else names[int(which)]
        return str(found) if np.ndim(found) == 0 else found

    def to_json(self) -> dict[str, Any]:
        """The four fields of a phase."""
        return {
            "seconds": plain(self.seconds),
            "low": plain(self.low),
            "high": plain(self.high),
            "dominant": plain(self.dominant),
        }


@dataclass(frozen=True)
class HeldBuffer:
    """A stored tensor of one layer: its full shape [batch or 1, heads, rows, width] and bytes."""

    name: str
    layer: int
    shape: tuple[Numbers, ...]
    bits: int
    bytes: Numbers


@dataclass(frozen=True, eq=False)
class Record:
    """The answer. Bytes are per device; arrays have the workload's broadcast shape."""

    case: Case
    source: Literal["predicted", "measured"]
    cache_bytes: Numbers
    allocated_bytes: Numbers
    state_bytes: Numbers
    cross_bytes: Numbers
    full_bytes: Numbers
    weights_bytes: int
    total_bytes: Numbers
    peak_bytes: Numbers
    memory: tuple[tuple[str, Numbers], ...]
    prefill: Timing
    decode: Timing
    buffers_of: Callable[[], tuple[HeldBuffer, ...]] = field(repr=False)
    limits_of: Callable[[], tuple[Numbers, Numbers]] = field(repr=False)
    generation_of: Callable[[], Numbers] = field(repr=False)
    reserve_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every line of both phases."""
        return self.prefill.lines + self.decode.lines

    @property
    def fits(self) -> Any:
        """Whether the peak and the reserve stay within the device's capacity."""
        found = self.short_by_bytes <= 0
        return bool(found) if np.ndim(found) == 0 else found

    @property
    def short_by_bytes(self) -> Numbers:
        """Bytes by which peak and reserve exceed the capacity; negative: bytes left."""
        return self.peak_bytes + self.reserve_bytes - self.case.hardware.capacity_bytes

    @cached_property
    def limits(self) -> tuple[Numbers, Numbers]:
        """(largest context, largest batch) that fit with everything else as asked; 0 where none does."""
        return self.limits_of()

    @property
    def max_context(self) -> Numbers:
        """Most tokens (prompt and new) a sequence may have at this batch, at most the model's context."""
        return self.limits[0]

    @property
    def max_batch(self) -> Numbers:
        """Most sequences that fit at this length."""
        return self.limits[1]

    @cached_property
    def generation_seconds(self) -> Numbers:
        """Seconds of all K decode steps, T+1 to N; 0 where no new tokens are asked."""
        return self.generation_of()

    @cached_property
    def buffers(self) -> tuple[HeldBuffer, ...]:
        """Every stored tensor, layer by layer."""
        return self.buffers_of()

    @property
    def coefficients(self) -> str:
        """Which calibrated coefficients the times rest on."""
        return tidy(line.coefficients for line in self.lines)

    @property
    def compression(self) -> Numbers:
        """Uncompressed cache bytes over this method's."""
        return np.where(np.asarray(self.cache_bytes) > 0, self.full_bytes / np.maximum(self.cache_bytes, 1), 1.0)[()]

    def rows(self) -> list[dict[str, Any]]:
        """The lines as plain dicts, for a DataFrame."""
        return [line.row() for line in self.lines]

    def to_frame(self) -> pd.DataFrame:
        """The workload's points as a DataFrame, one row each, with the sweep's columns (pandas must be installed)."""
        from kvsim.frames import frame, record_rows

        return frame(record_rows(self))

    def _repr_html_(self) -> str:
        from kvsim.display import record_html

        return record_html(self)

    def __str__(self) -> str:
        from kvsim.display import as_text

        return as_text(self)

    def __repr__(self) -> str:
        case, points = self.case, int(np.size(self.peak_bytes))
        what = f"{case.method} for {case.model.name} on {case.hardware.name}"
        return f"<Record, {self.source}: {what}{f', {points:,} points' if points > 1 else ''}>"

    def __rich__(self) -> object:
        from kvsim.display import as_rich

        return as_rich(self)

    def to_json(self) -> dict[str, Any]:
        """The record as `kvsim predict --json` prints it."""
        return {
            "case": case_json(self.case),
            "source": self.source,
            **{
                k: plain(getattr(self, k), whole_numbers=True)
                for k in (
                    "cache_bytes",
                    "peak_bytes",
                    "weights_bytes",
                    "total_bytes",
                    "allocated_bytes",
                    "state_bytes",
                    "cross_bytes",
                    "max_context",
                    "max_batch",
                    "reserve_bytes",
                )
            },
            "fits": plain(self.fits),
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "generation_seconds": plain(self.generation_seconds),
            "lines": self.rows(),
            "memory": [{"name": name, "bytes": plain(value, whole_numbers=True)} for name, value in self.memory],
            "buffers": [
                {
                    "name": b.name,
                    "layer": b.layer,
                    "shape": [plain(x) for x in b.shape],
                    "bits": b.bits,
                    "bytes": plain(b.bytes, whole_numbers=True),
                }
                for b in self.buffers
            ],
            "coefficients": self.coefficients,
            "warnings": list(self.warnings),
        }


def as_count(value: Any) -> Count:
    """A numpy scalar as int, an array as it is."""
    return int(value) if np.ndim(value) == 0 else value
