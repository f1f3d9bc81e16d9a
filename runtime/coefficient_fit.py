"""From measured ops to coefficients: launches, bytes, values and arithmetic, each at a price that is not negative.

What runs unfused has no overlap, so its time is linear in what it does (`power = 1`); relative errors are made small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.coefficients import Coefficient
from kvsim.cost import WALKED, kernel_time
from kvsim.fitting import quantiles
from kvsim.hardware import HardwareProfile
from kvsim.kernels import unit_of
from kvsim.op import PART, Op, kernel_work

Floats = NDArray[np.float64]
ROUNDS = 6
"""Reweighted least squares towards least absolute deviations: one disturbed point must not bend the rest."""
LEAST_SHARE, MOST_SHARE = 0.011, 1.0
LEAST_FLOPS, MOST_FLOPS = 2e-4, 1.2
LEAST_AGAIN_S = 1e-6
FREE = 9e5
SLOTS = 0.25
"""Blocks of unfused kernels are cut finely: no unit waits for another."""


@dataclass(frozen=True)
class Sample:
    """One op as it was measured: seconds of one call of it, and of what method.

    paid: seconds of the same line that other coefficients pay for: errors are relative to both together.
    """

    op: Op
    seconds: float
    label: str = ""
    paid: float = 0.0


def predicted(device: HardwareProfile, c: Coefficient, samples: Sequence[Sample], own: bool, gathers: bool) -> Floats:
    """Seconds that a set of coefficients gives for the samples; own, gathers: as for `kernel_work`."""
    once = [kernel_time(device, c, kernel_work(s.op, own, gathers))[0] for s in samples]
    return np.array([float(t) * (float(s.op.pieces) if own else 1.0) for t, s in zip(once, samples, strict=True)])


class Fitted(NamedTuple):
    """A coefficient, and ln(measured / predicted) of its samples, each predicted by a fit to the others."""

    row: Coefficient
    errors: Floats


def fitted(device: HardwareProfile, base: Coefficient, samples: Sequence[Sample], own: bool = True,
           gathers: bool = False) -> Fitted:
    """The base with its times replaced by those that fit the samples; own, gathers: as for `kernel_work`."""
    whole = _fit(device, base, samples, own, gathers)
    errors = studentized(log_errors(samples, predicted(device, whole, samples, own, gathers)),
                         left_out(device, base, samples, own, gathers))
    return Fitted(replace(whole, log_error=quantiles(errors), rows=len(samples)), errors)


def log_errors(samples: Sequence[Sample], there: Floats) -> Floats:
    """ln(measured / predicted) of samples, with what others pay for on both sides."""
    seconds, paid = (np.array([getattr(s, name) for s in samples]) for name in ("seconds", "paid"))
    return np.asarray(np.log(np.maximum(seconds + paid, 1e-9) / (there + paid)))


def studentized(seen: Floats, unseen: Floats) -> Floats:
    """The errors' own size, between those of a fit that saw the points and of fits that did not.

    A fit bends towards what it saw, by 1 - leverage, and misses what lies at the end of its range by as much more:
    e and e / (1 - h) in a linear fit, whose studentized residual e / sqrt(1 - h) is their geometric mean.
    """
    if len(seen) != len(unseen):
        return unseen
    return np.asarray(np.sign(unseen) * np.sqrt(np.abs(seen * unseen)))


def left_out(device: HardwareProfile, base: Coefficient, samples: Sequence[Sample], own: bool, gathers: bool) -> Floats:
    """ln(measured / predicted) of each sample under a fit to the others."""
    if len(samples) < 3:
        return np.array([-0.5, 0.5])
    errors = []
    for index, one in enumerate(samples):
        others = [s for i, s in enumerate(samples) if i != index]
        there = predicted(device, _fit(device, base, others, own, gathers), [one], own, gathers)
        errors.append(log_errors([one], there)[0])
    return np.array(errors)


def _columns(device: HardwareProfile, base: Coefficient, samples: Sequence[Sample],
             own: bool, gathers: bool) -> dict[str, tuple[Floats, float, float]]:
    """For each price its column, and the least and the most that it may be (seconds a unit)."""
    pieces = np.array([float(s.op.pieces) if own else 1.0 for s in samples])
    works = [kernel_work(s.op, own, gathers) for s in samples]

    def all_of(name: str) -> Floats:
        return np.array([float(getattr(w, name)) for w in works]) * pieces

    stream, peak = 1.0 / device.bandwidth_bytes_per_s, 1.0 / unit_of(device, "bf16")
    found = {"t0_s": (pieces, 0.0, 9e-3), "again_s": (0.0 * pieces, 0.0, 9e-3),
             "bytes": (all_of("bytes_moved"), stream / MOST_SHARE, stream / LEAST_SHARE),
             "flops": (all_of("flops"), peak / MOST_FLOPS, peak / LEAST_FLOPS)}
    if base.op == "decode" and not base.kernel.endswith(PART):
        # the first store finds cold code, the others what it left
        found["t0_s"], found["again_s"] = (np.ones(len(pieces)), 0.0, 9e-3), (pieces - 1.0, LEAST_AGAIN_S, 9e-3)
    if base.op == "decode" and not gathers:
        # values, bytes and flops are nearly the same thing thrice: conversion is what differs, the rest has its floor
        for name in ("bytes", "flops"):
            found[name] = (found[name][0], found[name][1], found[name][1])
        dims = np.array([s.op.head_dim for s in samples])
        if base.kernel.endswith(PART):
            dims = np.full(len(dims), 128)
        else:
            found["step_s"] = (np.ceil(all_of("rows") / pieces / WALKED) * pieces, 0.0, 9e-3)
        for head_dim in sorted(set(dims.tolist())):
            found[f"elements.{head_dim}"] = (all_of("elements") * (dims == head_dim), 0.0, 1e-6)
    return {name: column for name, column in found.items() if column[0].any()}


def _fit(device: HardwareProfile, base: Coefficient, samples: Sequence[Sample], own: bool,
         gathers: bool) -> Coefficient:
    from scipy.optimize import nnls

    seconds, total = (np.array([s.seconds + extra * s.paid for s in samples]) for extra in (0.0, 1.0))
    columns = _columns(device, base, samples, own, gathers)
    matrix = np.stack([column for column, _, _ in columns.values()], axis=1)
    low, high = (np.array([bounds[i] for bounds in columns.values()]) for i in (1, 2))
    # what is beyond the least price is found; a price that cannot be anything else has nothing beyond it
    free = high > low
    left = seconds - matrix @ low
    scale = np.where(free, np.abs(matrix).max(axis=0), 1.0)
    spare = np.where(free, matrix / scale, 0.0)
    weight = 1.0 / total
    for _ in range(ROUNDS):
        found, _ = nnls(spare * weight[:, None], left * weight)
        residual = np.abs(spare @ found - left) / total
        weight = 1.0 / total / np.sqrt(np.maximum(residual, 0.02))
    prices = np.minimum(low + found / scale * free, high)
    return _priced(device, base, dict(zip(columns, prices.tolist(), strict=True)))


def _priced(device: HardwareProfile, base: Coefficient, prices: dict[str, float]) -> Coefficient:
    stream, peak = device.bandwidth_bytes_per_s, unit_of(device, "bf16")
    more: dict[str, Any] = {"power": 1.0, "slots": SLOTS, "max_splits": 256.0}
    more["t0_s"], more["again_s"] = float(prices.get("t0_s", 0.0)), float(prices.get("again_s", 0.0))
    more["bandwidth_share"] = 1.0 / max(prices.get("bytes", 0.0) * stream, 1.0 / MOST_SHARE)
    more["flops_share"] = 1.0 / max(prices.get("flops", 0.0) * peak, 1.0 / MOST_FLOPS)
    more["step_s"] = float(prices.get("step_s", 0.0))
    cycles = device.units * device.clock_hz
    values = {int(n.partition(".")[2]): float(p) for n, p in prices.items() if n.startswith("elements")}
    # a head_dim whose values cost nothing beyond their bytes says so with a rate that never limits
    rates = tuple(sorted((d, min(1.0 / (p * cycles), FREE) if p else FREE) for d, p in values.items()))
    more["element_rates"] = rates if any(values.values()) else ()
    return replace(base, **more)
