"""The rows of largest importance, by any score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import AnyScore, check_protected, prompt_budget, prompt_rows, protected_inside, running_rows
from kvsim.errors import KvsimError
from kvsim.parts import Budget, Place, Rows, budget_rows, setting
from kvsim.scores import SCORES
from kvsim.workload import Count


@dataclass(frozen=True)
class TopK(AnyScore):
    """Keep the rows of largest score, with the newest and the first inside the budget.

    when=prompt: max(recent + sinks, ceil(budget * T)) rows of the prompt, later rows are added. when=running:
    ceil(budget * n) rows after every step; protected rows give way where that is fewer (`protected`).
    """

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "largest importance by any score of the survey's section 4.2"
    source: ClassVar[str] = "survey 4.2; kvpress ScorerPress"
    survey: ClassVar[str] = "4.2"

    budget: Budget = setting(0.25, always=True, what="rows kept: a fraction of the tokens, or rows")
    score: str = setting("knorm", choices=tuple(SCORES), always=True, what="the importance, see `kvsim show`")
    recent: int = setting(32, low=0, what="newest rows inside the budget")
    sinks: int = setting(4, low=0, what="first rows inside the budget")
    window: int = setting(32, low=1, high=4096, what="queries at the prompt's end that a score looks at")
    when: str = setting("prompt", choices=("prompt", "running"), what="once after the prompt, or after every step")

    def check(self) -> None:
        """Protected rows fit a budget in rows; some scores exist for a prompt only."""
        check_protected(self.name, self.budget, recent=self.recent, sinks=self.sinks)
        if self.running and not self.ranking.running:
            able = ", ".join(name for name, s in SCORES.items() if s.running)
            raise KvsimError(f"topk: score={self.score} is computed for a prompt; with when=running use one of {able}")

    @property
    def drops(self) -> Literal["none", "prefill", "rows", "pages"]:  # type: ignore[override]
        """Rows of the prompt, or rows at every step."""
        return "rows" if self.when == "running" else "prefill"

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, self.recent, self.sinks)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Counts of a running or of a prompt policy."""
        if self.running:
            return running_rows(lambda n: budget_rows(self.budget, n), prompt, new)
        return prompt_rows(prompt_budget(self.budget, self.recent + self.sinks, prompt), new)
