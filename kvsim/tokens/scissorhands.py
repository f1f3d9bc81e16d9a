"""Keep the rows that stay important from query to query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import Scored, check_protected, protected_inside, running_rows
from kvsim.parts import Budget, Place, Rows, budget_rows, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Scissorhands(Scored):
    """Keep ceil(budget * n) rows after every step, per KV head: the newest, then those most often above 1/n.

    The history holds one bit for each of the last `window` queries and row: whether the row got more than its even
    share 1/n; the score is the number of ones, ties go to the newer row. Protected rows give way as in `protected`.
    """

    name: ClassVar[str] = "scissorhands"
    summary: ClassVar[str] = "persistence of importance over a window of queries"
    source: ClassVar[str] = "Liu et al., Scissorhands, arXiv 2305.17118"
    survey: ClassVar[str] = "4.1.2"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    ranked_by: ClassVar[str] = "persistence"

    budget: Budget = setting(0.25, always=True, what="rows kept: a fraction of the tokens seen, or rows")
    window: int = setting(32, low=1, high=4096, what="queries of the history")
    recent: int = setting(10, low=0, what="newest rows inside the budget")
    sinks: int = setting(0, low=0, what="first rows inside the budget")

    def check(self) -> None:
        """Protected rows fit a budget in rows."""
        check_protected(self.name, self.budget, recent=self.recent, sinks=self.sinks)

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, self.recent, self.sinks)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """ceil(budget * n), or min(n, budget) rows."""
        return running_rows(lambda n: budget_rows(self.budget, n), prompt, new)
