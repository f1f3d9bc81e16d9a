"""Which added hardware would make a decode step faster, from which rate on, and where none beside it would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kvsim.cost import attention_seconds
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.kernels import FORMATS, chosen
from kvsim.model import Attention
from kvsim.prediction import predict
from kvsim.record import Case
from kvsim.whatif import KEYS, VALUE_BYTES, what_if

RATES = ("decompress", "mixed", "near_memory", "bandwidth", "compress", "link")
"""What can be added, in the order in which it is reported; `link` counts between devices only."""
GAINED = 0.9
"""A rate is enough where it brings this share of what an infinite rate saves of the step."""
NEAR_LIMIT = 0.05
"""A format's rate is enough where its attention is within this share of the time that its bytes alone take."""
WORTH = 0.01
"""A rate whose infinite value shortens the step by less than this share removes no bottleneck."""
LOW, HIGH = 1e9, 1e18
"""Rates among which the least enough one is sought, B/s or FLOP/s; the upper end stands for infinite."""
COMPARED = ("fp8", "int8", "int4", "int3", "int2", "nvfp4", "mxfp4", "q8_0", "q4_0")
"""Formats whose break-even rates are told."""


@dataclass(frozen=True)
class Added:
    """One thing that could be added, alone. least: the rate that brings most of what an infinite one does, in `unit`;
    None where nothing is gained. step_s: with that rate; limit_s: with an infinite one; share: of the step that an
    infinite rate would save."""

    name: str
    unit: str
    least: float | None
    step_s: float
    limit_s: float
    share: float


@dataclass(frozen=True)
class BreakEven:
    """One format's attention in one layer against full precision, in stored values a second and device.

    now: what the device's kernels take in (inf: never a limit). even: below it the format is slower than full
    precision; enough: from it on the time is near what reading its bytes alone takes. even is None where no rate makes
    it faster.
    """

    format: str
    bits: float
    now: float
    even: float | None
    enough: float | None
    verdict: str


@dataclass(frozen=True)
class Design:
    """The answer: the step as it is, what dominates it, each addition, the formats, and bounds that no addition passes.

    bounds: (name, seconds): every byte of the step once at the datasheet's bandwidth; weights alone (what remains when
    attention takes no time); attention free, everything else as it is.
    """

    step_s: float
    dominant: str
    attention_s: float
    attention_term: str
    added: tuple[Added, ...]
    formats: tuple[BreakEven, ...]
    bounds: tuple[tuple[str, float], ...]

    @property
    def best(self) -> Added | None:
        """The addition that saves most; of equal ones the first; None where none is worth it."""
        worth = [a for a in self.added if a.least is not None]
        return max(worth, key=lambda a: round(a.share, 3), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinite rates become null."""
        formats = [asdict(f) | {"now": f.now if np.isfinite(f.now) else None} for f in self.formats]
        return asdict(self) | {"formats": formats, "bounds": dict(self.bounds), "best": self.best and self.best.name}


def _least(enough: Callable[[float], bool], low: float = LOW, high: float = HIGH) -> float | None:
    """The least rate, to 1%, for which `enough` holds, which must be monotone; None where it never does."""
    if not enough(high):
        return None
    if enough(low):
        return low
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _step(case: Case, device: HardwareProfile) -> float:
    return float(predict(replace(case, hardware=device)).decode.seconds)


def additions(case: Case, names: tuple[str, ...] = RATES) -> tuple[Added, ...]:
    """Each thing added alone to the case's device."""
    now, found = _step(case, case.hardware), []
    for name in names:
        if name == "link" and case.devices == 1:
            continue

        def step(rate: float, name: str = name) -> float:
            return _step(case, what_if(case.hardware, {name: rate}))

        limit = step(HIGH)
        share = 1.0 - limit / now
        wanted = now - GAINED * (now - limit)
        least = _least(lambda r, s=step, w=wanted: s(r) <= w) if share > WORTH else None  # type: ignore[misc]
        found.append(Added(name, KEYS[name][1], least, now if least is None else step(least), limit, share))
    return tuple(found)


def own_rate(device: HardwareProfile, format: str, head_dim: int, kernel: str | None = None) -> float:
    """Stored values a second that the device's decode kernel takes in, all units busy; inf where that never limits."""
    choice = chosen(device, "decode", kernel, format)
    rates = choice.coefficient.element_rates
    if not rates or not device.units or not device.clock_hz:
        return float("inf")
    known, values = (np.log(column) for column in zip(*rates, strict=True))
    rate = float(np.exp(np.interp(np.log(head_dim), known, values)))
    return rate * choice.rate_factor * device.units * device.clock_hz


def attention_at(device: HardwareProfile, format: str, values: float | None, *, batch: Any, tokens: Any, n_heads: int,
                 n_kv_heads: int, head_dim: int, kernel: str | None = None) -> float:  # fmt: skip
    """Seconds of one layer's attention in a step where a converter takes in `values` a second; None: the device's."""
    there = device if values is None else what_if(device, {"decompress": values * VALUE_BYTES})
    found = attention_seconds(there, phase="decode", batch=batch, tokens=tokens, n_heads=n_heads, format=format,
                              n_kv_heads=n_kv_heads, head_dim=head_dim, kernel=kernel)  # fmt: skip
    return float(found.seconds)


def _plain(case: Case) -> Attention | None:
    return next((x.attention for x in case.model.layers if x.attention and x.attention.kind == "full"), None)


def break_even(case: Case, format: str) -> BreakEven:
    """Rates of `format` for one full-attention layer: where it overtakes full precision, where it is done."""
    attention = _plain(case)
    if attention is None:
        raise KvsimError(f"codesign: {case.model.name} has no layer of plain attention to compare formats on")

    def at(values: float | None, form: str = format) -> float:
        return attention_at(case.hardware, form, values, batch=case.workload.batch, tokens=case.workload.tokens,
                            n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads, head_dim=attention.qk_dim,
                            kernel=case.kernel)  # fmt: skip

    full, limit = at(None, "bf16"), at(HIGH)
    even = _least(lambda r: at(r) <= full, LOW / 1e3) if limit < full else None
    enough = _least(lambda r: at(r) <= limit * (1 + NEAR_LIMIT), LOW / 1e3)
    now = own_rate(case.hardware, format, attention.qk_dim, case.kernel)
    if even is None:
        verdict = "no rate makes it faster here"
    elif now < even:
        verdict = f"slower than full precision: {even / now:.1f}x the rate breaks even"
    elif enough is not None and now < enough:
        verdict = f"faster; {enough / now:.1f}x the rate would bring all of it"
    else:
        verdict = "bytes are the limit already"
    return BreakEven(format, FORMATS[format].bits, now, even, enough, verdict)


def bounds(case: Case) -> tuple[tuple[str, float], ...]:
    """Seconds below which no addition of its kind takes the step, whatever area it is given."""
    record = predict(case)
    lines = record.decode.lines
    free = sum(float(x.seconds) for x in lines if x.name not in ("attention", "cross-attention"))
    moved = sum(float(x.bytes) for x in lines)
    weights = sum(float(x.bytes) for x in lines if x.term and x.name not in ("attention", "cross-attention"))
    bandwidth = case.hardware.bandwidth_bytes_per_s
    return (
        ("every byte of the step once at the datasheet's bandwidth", moved / bandwidth),
        ("the same without attention's bytes", weights / bandwidth),
        ("attention in no time, all else as it is", free),
    )


def codesign(case: Case, formats: tuple[str, ...] = COMPARED) -> Design:
    """What hardware would remove the bottleneck of a method's decode step.

    Raises KvsimError for a workload of more than one point, and as `predict`.
    """
    if case.workload.shape:
        raise KvsimError("codesign: give one batch and one length, not arrays")
    record = predict(case)
    attention = next((x for x in record.decode.lines if x.name == "attention"), None)
    if attention is None:
        raise KvsimError(f"codesign: a step of {case.model.name} has no attention to speed up")
    rows = tuple(break_even(case, f) for f in formats) if _plain(case) is not None else ()
    return Design(float(record.decode.seconds), str(record.decode.dominant), float(attention.seconds),
                  str(attention.term), additions(case), rows, bounds(case))  # fmt: skip
