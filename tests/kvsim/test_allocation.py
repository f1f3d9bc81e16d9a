"""Allocators against brute force and an integer programme; the hull walk's gap and its path of prices."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.allocation import at_price, exact, within
from kvsim.errors import KvsimError

loss_tables = st.integers(1, 5).flatmap(
    lambda groups: st.integers(1, 4).flatmap(
        lambda options: st.lists(
            st.lists(st.floats(0, 100, allow_nan=False, width=32), min_size=options, max_size=options),
            min_size=groups,
            max_size=groups,
        )
    )
)


@st.composite
def problems(draw):
    loss = np.array(draw(loss_tables))
    cost = np.array(draw(st.lists(st.integers(0, 12), min_size=loss.size, max_size=loss.size))).reshape(loss.shape)
    floor = int(cost.min(axis=1).sum())
    return loss, cost, floor + draw(st.integers(0, 30))


def brute(loss, cost, budget):
    best = np.inf
    for choice in itertools.product(range(loss.shape[1]), repeat=len(loss)):
        at = (np.arange(len(loss)), np.array(choice))
        if cost[at].sum() <= budget:
            best = min(best, float(loss[at].sum()))
    return best


def checked(found, loss, cost, budget):
    at = (np.arange(len(loss)), found.choice)
    assert found.cost == cost[at].sum() <= budget
    assert found.loss == pytest.approx(loss[at].sum())
    return found


@given(problems())
def test_exact_is_brute_force(problem):
    loss, cost, budget = problem
    found = checked(exact(loss, cost, budget), loss, cost, budget)
    assert found.loss == pytest.approx(brute(loss, cost, budget), abs=1e-9)


@given(problems())
def test_walk_is_bracketed(problem):
    loss, cost, budget = problem
    best = brute(loss, cost, budget)
    found = checked(within(loss, cost, budget), loss, cost, budget)
    assert found.bound - 1e-9 <= best <= found.loss + 1e-9
    if found.optimal:
        assert found.loss == pytest.approx(best, abs=1e-6)


@given(problems(), st.floats(0, 50))
def test_price_beats_every_allocation_of_its_own_cost(problem, price):
    loss, cost, _ = problem
    found = at_price(loss, cost, price)
    assert found.loss == pytest.approx(brute(loss, cost, found.cost), abs=1e-6)
    # separable: the Lagrangian is the sum of each group's least
    assert found.loss + price * found.cost == pytest.approx((loss + price * cost).min(axis=1).sum(), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_exact_is_the_integer_programme(seed):
    from scipy.optimize import Bounds, LinearConstraint, milp

    random = np.random.default_rng(seed)
    loss, cost = np.sort(random.random((6, 3)))[:, ::-1], np.array([2, 4, 8])
    budget = int(random.integers(12, 49))
    each = LinearConstraint(np.kron(np.eye(6), np.ones(3)), 1, 1)
    money = LinearConstraint(np.tile(cost, 6)[None, :], ub=budget)
    best = milp(loss.ravel(), integrality=np.ones(18), bounds=Bounds(0, 1), constraints=[each, money])
    assert exact(loss, cost, budget).loss == pytest.approx(best.fun, abs=1e-7)


def test_by_hand():
    # two groups, widths 2/4/8 bits. Group 0 saves 9 for 2 bits then 0.5 for 4; group 1 saves 3 for 2, then 1 for 4.
    loss = [[10, 1, 0.5], [4, 1, 0]]
    found = within(loss, [2, 4, 8], 8)
    # 4 bits are the floor, 2 more buy 9 (slope 4.5), 2 more buy 3 (slope 1.5): both at 4 bits, all 8 spent
    assert found.choice.tolist() == [1, 1]
    assert (found.cost, found.loss, found.optimal) == (8, 2.0, True)
    assert within(loss, [2, 4, 8], 4).choice.tolist() == [0, 0]
    # 9 bits: the next step costs 4, so one bit is left over; the fraction of it would save 1/4 * 1
    short = within(loss, [2, 4, 8], 9)
    assert (short.cost, short.loss, short.bound) == (8, 2.0, 1.75)
    # 12 bits: group 1's step to 8 saves 1, group 0's saves 0.5
    assert within(loss, [2, 4, 8], 12).choice.tolist() == [1, 2] == exact(loss, [2, 4, 8], 12).choice.tolist()


def test_walk_misses_what_the_table_finds():
    # hull of group 0 jumps straight from 0 to 4 (slope 1); with 3 the table takes the middle option off the hull
    loss, cost = [[4, 1.5, 0]], [0, 3, 4]
    assert within(loss, cost, 3).loss == 4
    assert not within(loss, cost, 3).optimal
    assert exact(loss, cost, 3).loss == 1.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: within([[1, 2]], [2, 4], 1),
        lambda: exact([[1, 2]], [2, 4], 1),
        lambda: within([[np.nan, 2]], [2, 4], 9),
        lambda: within([1, 2], [2, 4], 9),
        lambda: within([[1, 2]], [2.5, 4], 9),
        lambda: within([[1, 2]], [-1, 4], 9),
        lambda: within([[1, 2]], [1, 2, 3], 9),
        lambda: at_price([[1, 2]], [2, 4], -1),
        lambda: at_price([[1, 2]], [2, 4], float("inf")),
        lambda: exact(np.ones((5000, 2)), np.array([[0, 2**20 + i] for i in range(5000)]), 2**33),
    ],
)
def test_refused(call):
    with pytest.raises(KvsimError):
        call()
