"""The least error with which values can be kept in so many bits: rate and distortion of a Gaussian source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError


def least_error(variances: Any, bits: float) -> float:
    """The least relative squared error at `bits` a value, for channels of these variances (any unit squared).

    Reverse water-filling (Shannon 1959; Cover and Thomas, Elements of Information Theory, theorem 10.3.3): channel i
    keeps an error min(level, variance_i) and costs max(0, log2(variance_i / level) / 2) bits. The variances are those
    of independent channels: eigenvalues of the covariance. No method beats it on Gaussian data; data that are not
    Gaussian can only be easier at the same covariance.

    Raises KvsimError for variances that are negative, not finite or all zero, and for negative bits.
    """
    held = _checked(variances)
    if not (np.isfinite(bits) and bits >= 0):
        raise KvsimError(f"bits a value must be 0 or more and finite, got {bits}")
    return float(np.minimum(_level(held, bits * held.size), held).sum() / held.sum())


def _checked(variances: Any) -> NDArray[np.float64]:
    held = np.asarray(variances, np.float64).ravel()
    if not held.size or not np.isfinite(held).all() or held.min() < 0 or not held.max() > 0:
        raise KvsimError("variances must be finite, not negative, and not all zero")
    return held


def _level(variances: NDArray[np.float64], total_bits: float) -> float:
    """The water level at which all channels together cost `total_bits`: exact, from the channels that stay above it."""
    falling = np.sort(variances[variances > 0])[::-1]
    logs = np.cumsum(np.log2(falling))
    counts = np.arange(1, falling.size + 1)
    # With the n largest channels above the level: total = (sum of log2 variances - n log2 level) / 2.
    levels = (logs - 2.0 * total_bits) / counts
    inside = np.log2(falling) >= levels - 1e-12
    return float(2.0 ** levels[np.nonzero(inside)[0][-1]])


def limit_rows(variances: Any, bits: Sequence[float] | None = None) -> list[dict[str, float]]:
    """The limit as rows (bits_per_value, relative_error) from 0 to 10 bits, or at the given ones."""
    at = np.linspace(0.0, 10.0, 81).tolist() if bits is None else list(bits)
    return [{"bits_per_value": float(b), "relative_error": least_error(variances, b)} for b in at]
