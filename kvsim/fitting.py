"""Fit a kernel's coefficients to measured rows, within physics; `python -m kvsim.fitting CSVS --out F` does all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.coefficients import Coefficient
from kvsim.cost import attention_work, kernel_time, product_time
from kvsim.kernels import kernel_family, known_format
from kvsim.measured import Table, device_of
from kvsim.seconds import Parts, memory_bound

if TYPE_CHECKING:
    from kvsim.hardware import HardwareProfile

Floats = NDArray[np.float64]
SOURCE = "measured tables of aiconfigurator-core 0.12.0 (Apache-2.0)"
DATE = "2026-11-29"
PRIOR_WEIGHT = 0.12
LOSS_SCALE = 0.08
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Knob:
    """One fitted number: where its search starts, physics' bounds, and how far (log) it may stray without evidence."""

    name: str
    start: float
    low: float
    high: float
    stray: float


T0 = Knob("t0_s", 8e-6, 1e-6, 2e-4, 1.0)
SHARE = Knob("bandwidth_share", 0.88, 0.2, 1.0, 0.15)
CACHE = (Knob("cache_multiple", 1.5, 0.2, 8.0, 1.0), Knob("cache_reach", 0.8, 0.2, 1.3, 0.5))
WAVE = Knob("wave_s", 1e-6, 1e-8, 2e-5, 1.5)
SLOTS = Knob("slots", 1.5, 1.0, 8.0, 0.7)
WINDOW = Knob("window_s", 1e-7, 1e-8, 3e-5, 2.0)
DECODE = (T0, SHARE, *CACHE, WAVE, SLOTS, WINDOW, Knob("flops_share", 0.15, 0.002, 1.2, 1.5),
          Knob("max_splits", 16.0, 1.0, 256.0, 3.0), Knob("split_s", 1e-6, 1e-8, 3e-5, 2.0))
PREFILL = (T0, replace(SHARE, start=0.6, stray=0.5), replace(WAVE, stray=2.0), SLOTS, WINDOW)
MATMUL = (replace(T0, start=5e-6), replace(SHARE, start=0.8, stray=0.25), *CACHE,
          Knob("flops_share", 0.7, 0.1, 1.1, 0.5), Knob("step_s", 3e-7, 1e-9, 3e-5, 2.0))
KNOBS = {"decode": DECODE, "prefill": PREFILL, "matmul": MATMUL}
STARTS: dict[str, tuple[dict[str, float], ...]] = {
    "decode": ({"max_splits": 64.0}, {"max_splits": 64.0, "cache_multiple": 3.0}, {"max_splits": 1.5}),
    "prefill": ({},),
    "matmul": ({}, {"cache_multiple": 3.0}),
}
GROUP_LIMITS = (1e9, 32.0, 16.0)


def _knobs(op: str, table: Table, known: dict[str, float]) -> list[Knob]:
    """The numbers to fit for these rows; `known` holds some at a value found elsewhere."""
    knobs = [replace(k, start=known[k.name], stray=0.003) if k.name in known else k for k in KNOBS[op]]
    if op != "matmul":
        field, start, high = ("element_rates", 10.0, 200.0) if op == "decode" else ("flops_shares", 0.45, 1.25)
        dims = [d for d in HEAD_DIMS if (table.sizes["head_dim"] == d).any()] or [128]
        knobs += [Knob(f"{field}.{d}", start, start / 50, high, 1.5) for d in dims]
    return knobs


def _coefficient(base: Coefficient, knobs: Sequence[Knob], values: Floats) -> Coefficient:
    plain: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for knob, value in zip(knobs, values, strict=True):
        field, _, head_dim = knob.name.partition(".")
        if head_dim:
            tables.setdefault(field, []).append((int(head_dim), float(value)))
        else:
            plain[field] = float(value)
    plain.update((field, tuple(pairs)) for field, pairs in tables.items())
    return replace(base, **plain)


def predictor(table: Table) -> Callable[[Coefficient], tuple[Floats, NDArray[np.bool_]]]:
    """A function that gives, for a set of coefficients, every row's seconds and whether memory bounds it."""
    pieces = []
    for gpu in np.unique(table.gpu):
        for format in np.unique(table.format):
            rows = np.flatnonzero((table.gpu == gpu) & (table.format == format))
            if rows.size:
                pieces.append((rows, _timer(table.op, table.where(rows), device_of(str(gpu)), str(format))))

    def timed(c: Coefficient) -> tuple[Floats, NDArray[np.bool_]]:
        out, bound = np.empty(len(table)), np.empty(len(table), bool)
        for rows, timer in pieces:
            out[rows], parts = timer(c)
            bound[rows] = memory_bound(out[rows], parts)
        return out, bound

    return timed


def _timer(op: str, rows: Table, device: HardwareProfile, format: str) -> Callable[[Coefficient], tuple[Any, Parts]]:
    if op == "matmul":
        return lambda c: product_time(device, c, **rows.sizes, dtype=format)
    sizes: dict[str, Any] = dict(rows.sizes)
    sizes["tokens"] = sizes.pop("seq")
    work = attention_work(op, bits=known_format(format).bits, **sizes)
    return lambda c: kernel_time(device, c, work)


def fit(table: Table, kernel: str, format: str, known: dict[str, float] | None = None) -> Coefficient:
    """Coefficients of one kernel and format that make the log error of its rows small; outliers count little.

    Args:
        table: rows of one op, kernel family and format, of one or more devices of a family.
        known: values of single fields that other formats of the same kernel have settled (the bandwidth share).
    """
    from scipy.optimize import least_squares

    op = table.op
    knobs = _knobs(op, table, known or {})
    base = Coefficient(op, kernel, format, 0.0, 1.0, 1.0, rows=len(table), source=SOURCE, date=DATE,
                       devices=tuple(sorted({device_of(str(g)).name for g in np.unique(table.gpu)})))
    timed, truth = predictor(table), np.log(table.seconds)
    starts = np.log([k.start for k in knobs])
    stray = np.array([k.stray for k in knobs])
    bounds = (np.log([k.low for k in knobs]), np.log([k.high for k in knobs]))
    wide = int(np.max(table.sizes["n_heads"] // table.sizes["n_kv_heads"])) if op == "decode" else 0
    best: tuple[float, Coefficient] | None = None
    for limit in (g for g in GROUP_LIMITS if g > 1e8 or wide > g):
        here = replace(base, group_limit=limit)

        def misfit(x: Floats, here: Coefficient = here) -> Floats:
            error = np.log(timed(_coefficient(here, knobs, np.exp(x)))[0]) - truth
            return np.concatenate([error, (x - starts) * (PRIOR_WEIGHT / stray)])

        for changed in STARTS[op]:
            x0 = np.log([changed.get(k.name, k.start) for k in knobs])
            found = least_squares(misfit, np.clip(x0, *bounds), bounds=bounds, loss="soft_l1", f_scale=LOSS_SCALE,
                                  max_nfev=120)
            if best is None or found.cost < best[0]:
                best = (found.cost, _coefficient(here, knobs, np.exp(found.x)))
    assert best is not None
    seconds, bound = timed(best[1])
    return with_spread(best[1], truth - np.log(seconds), bound)


FEW = 40
"""Rows below which a regime shares the interval of all rows."""


def with_spread(c: Coefficient, log_error: Floats, bound: NDArray[np.bool_]) -> Coefficient:
    """The coefficients with quantiles of ln(measured / predicted), apart for rows that memory bounds."""
    apart = min(int(bound.sum()), int((~bound).sum())) >= FEW
    return replace(c, log_error=quantiles(log_error[~bound] if apart else log_error),
                   memory_log_error=quantiles(log_error[bound]) if apart else None)


def quantiles(log_error: Floats) -> tuple[float, float, float]:
    """5, 50 and 95% quantiles; the ends at least 2% away from the prediction."""
    low, mid, high = (float(q) for q in np.quantile(log_error, (0.05, 0.5, 0.95)))
    return min(low, -0.02, mid), mid, max(high, 0.02, mid)


def trusted(table: Table) -> NDArray[np.bool_]:
    """False for rows that no model should learn from: decode of A100 trtllm, or implying over 1.05x DRAM bandwidth.

    The second rule looks only at rows that move more than four times the last-level cache.
    """
    keep = np.ones(len(table), bool)
    if table.op != "decode":
        return keep
    for (gpu, kernel, format), _ in table.groups():
        rows = np.flatnonzero((table.gpu == gpu) & (table.kernel == kernel) & (table.format == format))
        device = device_of(gpu)
        sizes: dict[str, Any] = {name: column[rows] for name, column in table.sizes.items()}
        sizes["tokens"] = sizes.pop("seq")
        moved = attention_work("decode", bits=known_format(format).bits, **sizes).bytes_moved
        rate = moved / table.seconds[rows]
        far = moved > 4.0 * (device.last_level_cache_bytes or 0)
        keep[rows] = ~(far & (rate > 1.05 * device.bandwidth_bytes_per_s))
        if device.name.lower().startswith("a100") and kernel_family(kernel)[0] == "trtllm":
            keep[rows] = False
    return keep


if __name__ == "__main__":
    from kvsim.families import main

    main()
