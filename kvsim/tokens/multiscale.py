"""Windows of several lengths at once, each sampled at its own distance."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from math import lcm
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, multiples, running_rows, smaller
from kvsim.errors import KvsimError
from kvsim.parts import Place, Rows, TokenPolicy, setting
from kvsim.workload import Count

MAX_WINDOWS = 8


@dataclass(frozen=True)
class Multiscale(TokenPolicy):
    """The union of {rows i of the last windows[k] with i divisible by strides[k]} over k, and the sinks.

    The union shrinks for a row that ages, so it never asks for a row that has left. Between two window ends the rows
    divisible by any of the strides still in reach are counted by inclusion and exclusion over their least common
    multiples: exact for every n and any strides.
    """

    name: ClassVar[str] = "multiscale"
    summary: ClassVar[str] = "union of windows at several scales"
    source: ClassVar[str] = "survey 4.1.1, multi-scale windows"
    survey: ClassVar[str] = "4.1.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    per_head: ClassVar[bool] = False

    windows: tuple[int, ...] = setting((256, 1024, 4096), low=1, always=True, what="lengths of the windows, rising")
    strides: tuple[int, ...] = setting((1, 4, 16), low=1, always=True, what="distance of kept rows in each window")
    sinks: int = setting(4, low=0, what="first rows that always stay")

    @property
    def spared(self) -> int:
        """The longest window that skips nothing."""
        return max((w for w, stride in zip(self.windows, self.strides, strict=True) if stride == 1), default=0)

    def check(self) -> None:
        """One stride a window, windows rising."""
        if len(self.windows) != len(self.strides):
            raise KvsimError(f"multiscale: {len(self.windows)} windows but {len(self.strides)} strides; give as many")
        if len(self.windows) > MAX_WINDOWS:
            raise KvsimError(f"multiscale: at most {MAX_WINDOWS} windows, got {len(self.windows)}")
        if any(b <= a for a, b in pairwise(self.windows)):
            raise KvsimError(f"multiscale: windows must rise, got {self.windows}")

    def kept(self, n: Any) -> Any:
        """Rows held after n tokens."""
        total, end = smaller(n, self.sinks), n
        for k, window in enumerate(self.windows):
            start = larger(0, n - window)
            total = total + _any_multiple(larger(start, self.sinks), end, self.strides[k:])
            end = start
        return total

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Bounded by sinks + sum of windows / strides; a step reads one row more, before it evicts."""
        return running_rows(self.kept, prompt, new)


def _any_multiple(start: Any, stop: Any, strides: tuple[int, ...]) -> Any:
    """How many i in [start, stop) divide by at least one of the strides."""
    total: Any = 0 * stop
    distinct = sorted(set(strides))
    for size in range(1, len(distinct) + 1):
        for some in combinations(distinct, size):
            total = total + (-1) ** (size + 1) * multiples(start, stop, lcm(*some))
    return total
