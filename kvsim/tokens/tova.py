"""Drop what the newest query looks at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import Scored, check_protected, protected_inside, running_rows
from kvsim.parts import Budget, Place, Rows, budget_rows, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Tova(Scored):
    """Keep ceil(budget * n) rows after every step, the same for all heads of a layer, by the newest query's weights.

    The weights are averaged over the layer's heads; only one query's are needed, so fused attention may stay and the
    products of that query are computed again. No bookkeeping with score=last.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = "what the newest query attends, one choice for all heads"
    source: ClassVar[str] = "Oren et al., Transformers are multi-state RNNs, arXiv 2401.06104"
    survey: ClassVar[str] = "4.1.2"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    per_head: ClassVar[bool] = False

    budget: Budget = setting(0.25, always=True, what="rows kept: a fraction of the tokens seen, or rows")
    recent: int = setting(0, low=0, what="newest rows inside the budget")
    sinks: int = setting(0, low=0, what="first rows inside the budget")
    score: str = setting("last", choices=("last", "online_average"), what="the newest query alone, or a moving average")

    def check(self) -> None:
        """Protected rows fit a budget in rows."""
        check_protected(self.name, self.budget, recent=self.recent, sinks=self.sinks)

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, self.recent, self.sinks)

    @property
    def observed(self) -> int:
        """A moving average starts on 32 queries of the prompt."""
        return 1 if self.score == "last" else 32

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """ceil(budget * n), or min(n, budget) rows."""
        return running_rows(lambda n: budget_rows(self.budget, n), prompt, new)
