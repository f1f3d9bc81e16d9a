"""Ranks by numbers: bytes by hand, water-filling against the exact table, rounding that keeps the total."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.allocation import exact
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec
from kvsim.ranks import HeadState, cache_bytes, direction_bytes, fill, level, limit_bytes, lost, rounded_ranks


def test_bytes_by_hand():
    # 2 directions of 8 values, coefficients for 10 and for 10 - 6 rows, 3 full rows, fp16: (16 + 14 + 24) * 2 + 2 * 8
    state = HeadState(8, (0, 6), 10, 3)
    assert (state.rank, state.bytes(16)) == (2, 124)
    assert HeadState(8, (0, 6), 10, 3, centred=True).bytes(16) == 124 + 16
    assert cache_bytes([state, HeadState(8, (), 10, 3)], 16) == 124 + 48
    assert direction_bytes(8, 10, 16) == 18 * 2 + 8
    model = ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=2, head_dim=8)
    assert limit_bytes(model, 0.25, 100, 16) == 2 * 2 * 2 * 8 * 2 * 100 // 4
    with pytest.raises(KvsimError, match="share"):
        limit_bytes(model, 0, 100, 16)


@given(st.lists(st.lists(st.integers(0, 50), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 25))
def test_water_filling_is_the_exact_optimum(rows, total):
    energies = -np.sort(-np.array(rows, dtype=float), axis=1)
    groups, width = energies.shape
    total = min(total, groups * width)
    ranks = level(energies, total)
    options = np.concatenate([np.zeros((groups, 1)), np.cumsum(energies, 1)], axis=1)
    best = exact(energies.sum() - options, np.arange(width + 1), total)
    assert ranks.sum() == total
    left = sum(energies[g, r:].sum() for g, r in enumerate(ranks))
    assert left == pytest.approx(best.loss - (groups - 1) * energies.sum())
    if energies.sum():
        assert lost(energies, ranks) == pytest.approx(left / energies.sum())


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=12), st.integers(0, 40))
def test_what_is_kept_fits_and_is_within_its_bound(pairs, budget):
    gain, cost = (np.array(x) for x in zip(*pairs, strict=True))
    kept, bound = fill(gain, cost, budget)
    assert cost[kept].sum() <= budget
    best = exact(np.stack([gain, 0 * gain], 1), np.stack([0 * cost, cost], 1), budget)
    optimum = gain.sum() - best.loss
    assert gain[kept].sum() <= optimum + 1e-9 <= bound + 2e-9
    assert optimum - gain[kept].sum() <= gain.max() + 1e-9  # greedy misses at most one


@given(st.lists(st.floats(-2, 12), min_size=1, max_size=9), st.integers(0, 90))
def test_rounding_keeps_the_total_and_moves_little(ranks, total):
    total = min(total, 10 * len(ranks))
    found = rounded_ranks(ranks, total, 10)
    assert found.sum() == total
    assert found.min() >= 0
    assert found.max() <= 10
    if abs(sum(np.clip(ranks, 0, 10)) - total) < 1e-9:
        assert np.abs(found - np.clip(ranks, 0, 10)).max() < 1 + 1e-9


def test_rounding_by_hand():
    # floors 2, 0, 4 make 6; one more goes to the largest remainder
    assert rounded_ranks([2.2, 0.7, 4.1], 7, 8).tolist() == [2, 1, 4]
    with pytest.raises(KvsimError, match="do not fit"):
        rounded_ranks([1, 1], 17, 8)
