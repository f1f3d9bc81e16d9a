"""What the prompt's last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import (
    Scored,
    check_kernel,
    check_protected,
    pooling_work,
    prompt_budget,
    prompt_rows,
    protected_inside,
)
from kvsim.parts import Budget, Place, Rows, Work, setting
from kvsim.scores import PROMPT_SCORES
from kvsim.workload import Count


@dataclass(frozen=True)
class SnapKV(Scored):
    """Keep max(window + sinks, ceil(budget * T)) rows of the prompt per KV head; later rows are added.

    The window stays; other rows rank by the weights that its queries give them (mean over window and query heads),
    smoothed by a mean over `kernel` neighbours. A prompt shorter than the budget is kept whole.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "what the last queries of the prompt attend"
    source: ClassVar[str] = "Li et al., SnapKV, arXiv 2404.14469; kvpress SnapKVPress (mean over query heads)"
    survey: ClassVar[str] = "4.2.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "prefill"

    budget: Budget = setting(0.25, always=True, what="rows of the prompt kept: a fraction, or rows")
    window: int = setting(32, low=1, high=4096, what="last queries of the prompt, whose rows stay")
    kernel: int = setting(5, low=1, high=1023, what="neighbours over which scores are averaged, odd")
    sinks: int = setting(0, low=0, what="first rows inside the budget")
    score: str = setting("window", choices=PROMPT_SCORES, what="the importance that ranks the other rows")

    def check(self) -> None:
        """Protected rows fit a budget in rows; the kernel has a middle."""
        check_protected(self.name, self.budget, window=self.window, sinks=self.sinks)
        check_kernel(self.name, self.kernel)

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, self.window, self.sinks)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """The kept prompt and every later row."""
        return prompt_rows(prompt_budget(self.budget, self.window + self.sinks, prompt), new)

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """n_heads * w * T products of length d, `kernel` additions a score, one selection."""
        return super().prompt_work(prompt, place) + pooling_work(prompt, self.kernel, place)
