"""Store everything, read the pages whose keys may matter for the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, selection_work, smaller
from kvsim.parts import Budget, Buffer, Place, Rows, TokenPolicy, Work, budget_rows, per_tokens, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Pages(TokenPolicy):
    """Pages of `size` rows with each channel's least and largest key; a step reads the pages of largest upper bound.

    Bound of page p for query q: sum over channels of max(q * least, q * largest), the largest over the query heads of
    a KV head. Of ceil(N / size) pages, min(all, max(least_pages, ceil(top(N) / size))) are read, the newest always
    among them; it alone may be partial, so the rows read are exact: (pages - 1) * size + the newest page's rows.
    Nothing is freed. The first `dense_layers` layers read everything and hold no bounds.
    """

    name: ClassVar[str] = "pages"
    summary: ClassVar[str] = "stores all, reads the pages that the query may need"
    source: ClassVar[str] = "Tang et al., Quest, arXiv 2406.10774 (3 pages, 2 layers: its evaluation code)"
    survey: ClassVar[str] = "4.2.1, 4.4"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "none"
    by_layer: ClassVar[bool] = True

    size: int = setting(16, low=1, high=65536, what="rows of a page")
    top: Budget = setting(0.25, always=True, what="rows read at a step: a fraction of those held, or rows")
    dense_layers: int = setting(2, low=0, what="first layers that read everything")
    least_pages: int = setting(3, low=1, what="fewest pages read")

    def pages(self, n: Any) -> Any:
        """Pages that n rows take, the newest one partial."""
        return -(-n // self.size)

    def selected(self, n: Any) -> Any:
        """Pages read by the step that writes row n."""
        wanted = larger(self.least_pages, self.pages(budget_rows(self.top, n)))
        return smaller(self.pages(n), wanted)

    def dense(self, place: Place) -> bool:
        """Whether this layer reads everything."""
        return place.layer < self.dense_layers

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """All rows stored; the selected pages' rows read."""
        total: Any = prompt + new
        if self.dense(place):
            return Rows(prompt, total, total)
        return Rows(prompt, total, total - (self.pages(total) - self.selected(total)) * self.size)

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """Two rows of bounds a page, in full precision: 2 / size of the keys."""
        if self.dense(place):
            return ()
        count = self.pages(rows.stored)
        return tuple(Buffer(name, place.heads, count, place.width, place.value_bits, per_tokens(self.size))
                     for name in ("page_min", "page_max"))

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Two comparisons a key value; keys read, bounds written."""
        if self.dense(place):
            return Work()
        values = 1.0 * place.heads * place.width
        size = place.value_bits / 8
        return Work(2 * values * prompt, values * size * prompt, 2 * values * size * self.pages(prompt))

    def step_work(self, rows: Rows, place: Place) -> Work:
        """The newest page's bounds; for each query head 4 d operations a page; one selection."""
        if self.dense(place):
            return Work()
        count, values, size = 1.0 * self.pages(rows.stored), 1.0 * place.heads * place.width, place.value_bits / 8
        bounds = Work(2 * values, 0.0, 2 * values * size)
        scores = Work(4.0 * place.n_heads * place.width * count, 2 * values * size * count, 4.0 * place.heads * count)
        return bounds + scores + selection_work(self.pages(rows.stored), place.heads)
