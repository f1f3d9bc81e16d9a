"""The newest rows and the first ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, running_rows, smaller
from kvsim.parts import Place, Rows, TokenPolicy, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Window(TokenPolicy):
    """Keep the first `sinks` and the last `recent` rows; nothing is computed.

    min(n, sinks + recent) rows. Without sinks perplexity collapses once row 0 leaves (Xiao et al.).
    """

    name: ClassVar[str] = "window"
    summary: ClassVar[str] = "the first few and the newest tokens"
    source: ClassVar[str] = "survey 4.1.1; Xiao et al., StreamingLLM, arXiv 2309.17453"
    survey: ClassVar[str] = "4.1.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    positional: ClassVar[bool] = True
    per_head: ClassVar[bool] = False

    sinks: int = setting(4, low=0, what="first rows that always stay")
    recent: int = setting(1020, low=1, always=True, what="newest rows that stay")

    def kept(self, n: Any) -> Any:
        """Rows held after n tokens."""
        return smaller(n, self.sinks + self.recent)

    @property
    def caution(self) -> str:
        """Attention parks its surplus on the first tokens: without them quality collapses (arXiv 2309.17453)."""
        return "" if self.sinks else "a window without sinks ruins attention; keep the first tokens with sinks=4"

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Bounded counts; a step reads one row more, before it evicts."""
        return running_rows(self.kept, prompt, new)

    def ranges(self, n: Any) -> tuple[tuple[Any, Any], ...]:
        """Live rows of the n appended ones as [start, end) ranges in order; they touch while nothing has left."""
        newest = larger(0, n - self.recent)
        if not self.sinks:
            return ((newest, n),)
        first = smaller(n, self.sinks)
        return (0 * n, first), (larger(first, newest), n)
