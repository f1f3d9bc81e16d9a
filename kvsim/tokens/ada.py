"""One prompt budget for all heads of a layer, shared out by score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import Windowed, larger, prompt_rows, smaller
from kvsim.parts import Budget, Buffer, Place, Rows, Work, budget_rows, setting
from kvsim.scores import SCORES
from kvsim.workload import Count


@dataclass(frozen=True)
class Ada(Windowed):
    """Keep heads * B rows of the prompt in a layer, B = max(window + sinks, ceil(budget * T)), of largest score.

    Every head first keeps its window, sinks and best rows up to max(window + sinks, ceil(floor * B)); one selection
    over all heads of the layer gives out the rest. The layer's total is exact; how it falls on heads depends on the
    text: `stored` is the mean over heads, `head_range` what a single head may have.
    """

    name: ClassVar[str] = "ada"
    summary: ClassVar[str] = "SnapKV with one budget for all heads of a layer"
    source: ClassVar[str] = "Feng et al., Ada-KV, arXiv 2407.11550; kvpress AdaKVPress"
    survey: ClassVar[str] = "4.2.1, 7.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "prefill"
    ragged: ClassVar[bool] = True
    per_head: ClassVar[bool] = True

    budget: Budget = setting(0.25, always=True, what="rows of the prompt kept on average over heads")
    floor: float = setting(0.2, low=0.0, high=1.0, what="share of the even budget that every head keeps")
    window: int = setting(32, low=1, high=4096, what="last queries of the prompt, whose rows stay")
    kernel: int = setting(5, low=1, high=1023, what="neighbours over which scores are averaged, odd")
    sinks: int = setting(0, low=0, what="first rows inside the budget")
    score: str = setting("window", choices=tuple(SCORES), what="the importance that ranks the other rows")

    def kept(self, prompt: Count) -> Any:
        """Mean rows a head: the layer keeps heads times as many."""
        return self.even(prompt)

    def head_range(self, prompt: Count, heads: int) -> tuple[Any, Any]:
        """Fewest and most rows of the prompt that one of `heads` heads may keep."""
        even = self.kept(prompt)
        share = budget_rows(float(self.floor), even) if self.floor else 0 * even
        low = smaller(even, larger(share, self.window + self.sinks))
        return (even, even) if heads == 1 else (larger(low, heads * even - (heads - 1) * prompt),
                                                smaller(prompt, heads * even - (heads - 1) * low))

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Means over heads; exact for the layer."""
        found = prompt_rows(self.kept(prompt), new)
        text = "" if place.heads == 1 else (
            f"the layer keeps {place.heads} x this many rows exactly; how they fall on its heads depends on the text")
        return Rows(found.prompt, found.stored, found.attended, text)

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """Heads of different lengths lie one after the other: an int32 count for each; and what the score holds."""
        return (Buffer("head_rows", place.heads, 1, 1, 32, 0), *super().buffers(rows, seen, place))

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """As SnapKV, and a second selection over all heads."""
        return super().prompt_work(prompt, place) + Work(4.0 * prompt * place.heads, 16.0 * prompt * place.heads)
