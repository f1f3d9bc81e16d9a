"""How good predictions are: errors, interval coverage with a bootstrap over methods, and whether the order holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
ROUNDS = 2000
APART = 0.1
"""Difference of measured times, relative, below which repeats of one method differ as much as two methods."""
MAIN = ("decode attention", "decode step", "prefill")
"""The figures that validation is judged by: attention of one step, whole steps, whole prompts."""


def what(row: Row) -> str:
    """A row's figure: `decode attention`, `decode step`, `prefill`, or phase and line."""
    if row["name"] == "whole":
        return "decode step" if row["phase"] == "decode" else "prefill"
    return f"{row['phase']} {row['name']}"


def inside(row: Row) -> bool:
    """Whether the measured time lies in the predicted interval."""
    return bool(row["low_s"] <= row["measured_s"] <= row["high_s"])


def figures(rows: Sequence[Row], seed: int = 0) -> dict[str, Any]:
    """Errors and coverage of each figure, and the order of methods by whole steps."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[what(row)].append(row)
    names = [n for n in MAIN if n in groups] + sorted(n for n in groups if n not in MAIN)
    return {"lines": {name: _line(groups[name], seed) for name in names}, "order": order(groups["decode step"]),
            "attention_order": order(groups["decode attention"])}


def _line(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    error = np.array([r["predicted_s"] / r["measured_s"] - 1.0 for r in rows])
    half = np.array([(r["high_s"] - r["low_s"]) / (2.0 * r["predicted_s"]) for r in rows])
    low, high = coverage_range(rows, seed)
    size = np.abs(error)
    return {"rows": len(rows), "median_error": float(np.median(size)), "mean_error": float(np.mean(size)),
            "bias": float(np.median(error)),
            "coverage": float(np.mean([inside(r) for r in rows])),
            "coverage_low": low, "coverage_high": high, "consistent_with_90": low <= 0.9 <= high,
            "median_half_width": float(np.median(half))}


def coverage_range(rows: Sequence[Row], seed: int = 0) -> tuple[float, float]:
    """2.5 and 97.5% quantiles of coverage when whole methods are drawn again: rows of one method hang together."""
    by_method: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        by_method[str(row["method"])].append(inside(row))
    hits, counts = (np.array([f(v) for v in by_method.values()], float) for f in (sum, len))
    drawn = np.random.default_rng(seed).integers(len(hits), size=(ROUNDS, len(hits)))
    low, high = np.quantile(hits[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def order(rows: Sequence[Row]) -> dict[str, Any]:
    """Kendall's tau between predicted and measured order of methods for each length and batch, and their medians.

    `tau` takes every pair of methods, `tau_apart` those that measurably differ.
    """
    from scipy.stats import kendalltau

    groups: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_tokens"], row["batch"]].append(row)
    found = []
    for (prompt, batch), some in sorted(groups.items()):
        if len(some) < 3:
            continue
        tau = float(kendalltau([r["predicted_s"] for r in some], [r["measured_s"] for r in some]).statistic)
        found.append({"prompt_tokens": prompt, "batch": batch, "methods": len(some), "tau": tau} | _apart(some))
    clear = [f["tau_apart"] for f in found if f["tau_apart"] is not None]
    return {"tau": float(np.median([f["tau"] for f in found])) if found else None,
            "tau_apart": float(np.median(clear)) if clear else None, "groups": found}


def _apart(rows: Sequence[Row]) -> dict[str, Any]:
    """Tau over pairs whose measured times differ by more than APART: nearer ones have no order to predict."""
    measured, predicted = (np.log([r[k] for r in rows]) for k in ("measured_s", "predicted_s"))
    first, second = np.triu_indices(len(rows), 1)
    gap = measured[first] - measured[second]
    far = np.abs(gap) > np.log1p(APART)
    agree = np.sign(gap[far]) * np.sign((predicted[first] - predicted[second])[far])
    return {"pairs_apart": int(far.sum()), "tau_apart": float(agree.mean()) if far.any() else None}
