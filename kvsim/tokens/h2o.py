"""Heavy hitters: the rows that attention has looked at most, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import Scored, check_protected, protected_inside, running_rows
from kvsim.parts import Budget, Place, Rows, budget_rows, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class H2O(Scored):
    """Keep ceil(budget * n) rows after every step, per KV head: the newest, then those of largest accumulated weight.

    `recent=none` gives half of the budget, rounded down, to the newest rows (the authors' 0.1 + 0.1). Rows protected
    beyond a small budget give way: the newest stay first, then the sinks (`protected`).
    Earlier tokens collect more weight; score=normalised divides by the queries that could see a row.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "heavy hitters by accumulated attention, and the newest"
    source: ClassVar[str] = "survey 4.1.2; Zhang et al., H2O, arXiv 2306.14048"
    survey: ClassVar[str] = "4.1.2"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    needs_weights: ClassVar[bool] = True

    budget: Budget = setting(0.2, always=True, what="rows kept: a fraction of the tokens seen, or rows")
    recent: int | None = setting(None, low=0, what="newest rows inside the budget; none means half of it")
    sinks: int = setting(0, low=0, what="first rows inside the budget")
    score: str = setting("cumulative", choices=("cumulative", "normalised"), what="how weights are summed")

    def check(self) -> None:
        """Protected rows fit a budget in rows."""
        check_protected(self.name, self.budget, recent=self.recent, sinks=self.sinks)

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, kept // 2 if self.recent is None else self.recent, self.sinks)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """ceil(budget * n), or min(n, budget) rows."""
        return running_rows(lambda n: budget_rows(self.budget, n), prompt, new)
