"""Bits, ranks or bytes handed out to groups so that loss is least under a budget; it knows numbers only, no method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.errors import KvsimError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
MAX_CELLS = 2**27
"""Groups x budget above which the exact table would not fit in memory (128 MiB of one byte)."""


@dataclass(frozen=True, eq=False)
class Allocation:
    """One option for each group.

    choice: (groups,) option indices. bound: no allocation within the budget has less loss. price: loss per unit of
    cost at which every choice is the best of its group (nan where the exact table chose).
    """

    choice: Whole
    loss: float
    cost: int
    bound: float
    price: float

    @property
    def optimal(self) -> bool:
        """Whether nothing better exists within the budget, to rounding."""
        return self.loss <= self.bound + 1e-12 * max(1.0, abs(self.bound))


def at_price(loss: ArrayLike, cost: ArrayLike, price: float) -> Allocation:
    """Minimise sum(loss) + price * sum(cost): separable, so the best option of each group, the cheapest of equals.

    Args:
        loss: (groups, options) loss of each option, any finite unit.
        cost: (options,) or (groups, options) whole numbers of 0 or more.
        price: loss per unit of cost, 0 or more (lambda of the survey, section 3.3.2).
    """
    losses, costs = _tables(loss, cost)
    if not (np.isfinite(price) and price >= 0):
        raise KvsimError(f"a price is a finite number of 0 or more, got {price}")
    total = losses + price * costs
    best = total.min(axis=1, keepdims=True)
    choice = np.where(total <= best, costs, np.iinfo(np.int64).max).argmin(axis=1)
    spent = int(_taken(costs, choice).sum())
    value = float(_taken(losses, choice).sum())
    return Allocation(choice, value, spent, value, float(price))


def within(loss: ArrayLike, cost: ArrayLike, budget: int) -> Allocation:
    """Walk the convex hulls of all groups, steepest saving first, until the budget is spent.

    This is the path of `at_price` as the price falls: every allocation on it is exact for its own cost. A step that
    no longer fits is left out and later, smaller ones are still taken; `bound` is the fractional optimum, so the gap
    is known and at most one step. Raises KvsimError where even the cheapest options exceed the budget.
    """
    losses, costs = _tables(loss, cost)
    choice = _cheapest(losses, costs)
    left = int(budget) - int(_taken(costs, choice).sum())
    if left < 0:
        raise KvsimError(f"a budget of {budget} is below the cheapest allocation, {int(budget) - left}")
    steps = sorted((s for g in range(len(losses)) for s in _hull(g, losses[g], costs[g])), key=lambda s: -s[0])
    bound = float(_taken(losses, choice).sum())
    price, full, stopped = np.inf, False, set()
    for slope, group, option, extra in steps:
        if not full:
            bound -= slope * min(extra, left)
            price, full = slope, extra > left
        if group in stopped or extra > left:
            stopped.add(group)
            continue
        choice[group] = option
        left -= extra
    value = float(_taken(losses, choice).sum())
    return Allocation(choice, value, int(budget) - left, min(bound, value), float(price if full else 0.0))


def exact(loss: ArrayLike, cost: ArrayLike, budget: int) -> Allocation:
    """The least loss within the budget, by a table over groups and spent cost: O(groups * options * budget).

    Costs are divided by their greatest common divisor first. Raises KvsimError where the table would exceed
    128 MiB (use `within`, whose gap is known) or the cheapest options exceed the budget.
    """
    losses, costs = _tables(loss, cost)
    floor = costs.min(axis=1)
    spare = int(budget) - int(floor.sum())
    if spare < 0:
        raise KvsimError(f"a budget of {budget} is below the cheapest allocation, {int(budget) - spare}")
    extra = costs - floor[:, None]
    unit = max(1, int(np.gcd.reduce(extra, axis=None)))
    extra = extra // unit
    room = min(spare // unit, int(extra.max(axis=1).sum()))
    if len(losses) * (room + 1) > MAX_CELLS or losses.shape[1] > 256:
        raise KvsimError(f"an exact table of {len(losses)} groups x {room + 1} costs is too large; use within()")
    best = np.zeros(room + 1)
    taken = np.zeros((len(losses), room + 1), dtype=np.uint8)
    for g in range(len(losses)):
        best, taken[g] = _best_of(best, losses[g], extra[g])
    choice, at = np.zeros(len(losses), dtype=np.int64), room
    for g in reversed(range(len(losses))):
        choice[g] = taken[g, at]
        at -= int(extra[g, choice[g]])
    value = float(_taken(losses, choice).sum())
    return Allocation(choice, value, int(_taken(costs, choice).sum()), value, float("nan"))


def _best_of(before: Floats, losses: Floats, extra: Whole) -> tuple[Floats, NDArray[np.uint8]]:
    """Least loss at each spent cost once this group is added, and the option that gives it."""
    after = np.full_like(before, np.inf)
    taken = np.zeros(len(before), dtype=np.uint8)
    for option in np.argsort(extra, kind="stable"):
        step = int(extra[option])
        if step >= len(before):
            break
        tried = before[: len(before) - step] + losses[option]
        better = tried < after[step:]
        after[step:][better] = tried[better]
        taken[step:][better] = option
    return after, taken


def _tables(loss: ArrayLike, cost: ArrayLike) -> tuple[Floats, Whole]:
    losses = np.asarray(loss, dtype=np.float64)
    costs = np.asarray(cost)
    if losses.ndim != 2 or losses.size == 0 or not np.all(np.isfinite(losses)):
        raise KvsimError("loss is a table of finite numbers, a row for each group and a column for each option")
    if costs.shape not in (losses.shape, losses.shape[1:]) or costs.dtype.kind not in "iu" or costs.min() < 0:
        raise KvsimError("cost is a whole number of 0 or more for each option, or for each group and option")
    return losses, np.broadcast_to(costs.astype(np.int64), losses.shape)


def _taken(table: NDArray[np.generic], choice: Whole) -> NDArray[np.generic]:
    return np.take_along_axis(table, choice[:, None], axis=1)[:, 0]


def _cheapest(losses: Floats, costs: Whole) -> Whole:
    """The cheapest option of each group, the least loss among equals."""
    least = costs.min(axis=1, keepdims=True)
    choice: Whole = np.where(costs == least, losses, np.inf).argmin(axis=1)
    return choice


def _hull(group: int, losses: Floats, costs: Whole) -> list[tuple[float, int, int, int]]:
    """Steps (loss saved per cost, group, option, extra cost) along the lower convex hull, slopes falling."""
    at = int(_cheapest(losses[None], costs[None])[0])
    steps: list[tuple[float, int, int, int]] = []
    flattest = np.inf
    while True:
        extra, saved = costs - costs[at], losses[at] - losses
        better = np.flatnonzero((extra > 0) & (saved > 0))
        if not better.size:
            return steps
        slopes = saved[better] / extra[better]
        steepest = better[slopes >= slopes.max() * (1 - 1e-12)]
        option = int(steepest[costs[steepest].argmin()])
        # rounding must not put a later step of a group before an earlier one
        flattest = min(flattest, float(saved[option] / extra[option]))
        steps.append((flattest, group, option, int(extra[option])))
        at = option
