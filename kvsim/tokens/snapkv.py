"""What the prompt's last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import Windowed, prompt_rows
from kvsim.parts import Budget, Place, Rows, setting
from kvsim.scores import SCORES
from kvsim.workload import Count


@dataclass(frozen=True)
class SnapKV(Windowed):
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
    score: str = setting("window", choices=tuple(SCORES), what="the importance that ranks the other rows")

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """The kept prompt and every later row."""
        return prompt_rows(self.even(prompt), new)
