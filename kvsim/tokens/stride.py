"""Every s-th row and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, multiples, running_rows, smaller
from kvsim.parts import Place, Rows, TokenPolicy, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Stride(TokenPolicy):
    """Keep row i where i < sinks, i divides by `every`, or i is among the newest `recent`: a uniform sample.

    With m = max(0, n - recent) older rows: min(n, recent) + min(m, sinks) + multiples of `every` in [sinks, m).
    A row is judged once, when it leaves the recent ones, so the counts hold whether the prompt comes at once or not.
    """

    name: ClassVar[str] = "stride"
    summary: ClassVar[str] = "every s-th token and the newest"
    source: ClassVar[str] = "survey 4.1.1, uniform sampling; strided pattern of Child et al., arXiv 1904.10509"
    survey: ClassVar[str] = "4.1.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    per_head: ClassVar[bool] = False

    every: int = setting(4, low=1, always=True, what="distance of the kept rows")
    recent: int = setting(256, low=0, what="newest rows that stay")
    sinks: int = setting(4, low=0, what="first rows that always stay")

    @property
    def spared(self) -> int:
        """The recent rows."""
        return self.recent

    def kept(self, n: Any) -> Any:
        """Rows held after n tokens."""
        older = larger(0, n - self.recent)
        return n - older + smaller(older, self.sinks) + multiples(self.sinks, older, self.every)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """About n / every rows; a step reads one row more, before it evicts."""
        return running_rows(self.kept, prompt, new)
