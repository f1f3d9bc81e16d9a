"""Three levels by age: rows, means of blocks, means of block means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, running_rows, smaller
from kvsim.parts import Place, Rows, TokenPolicy, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Hierarchy(TokenPolicy):
    """The newest rows as they are, older ones as means of `block` rows, the oldest as means of `summaries` means.

    With n' = n - min(n, sinks) rows behind the sinks:
        m = floor(max(0, n' - recent) / block) blocks are closed, each the mean of `block` consecutive rows;
        s = floor(max(0, m - summaries) / summaries) summaries, each the mean of `summaries` consecutive block means.
    Held: sinks, s summaries, m - s * summaries block means, n' - m * block rows. So there are recent to
    recent + block - 1 rows and, once there are enough, summaries to 2 * summaries - 1 block means. Keys and values are
    averaged alike; log(block) and log(block * summaries) are added to the logits (`weights`), which levels alone
    determine, so nothing is stored for them. Rows fall when a block closes.
    """

    name: ClassVar[str] = "hierarchy"
    summary: ClassVar[str] = "tokens, block means, summaries of block means"
    source: ClassVar[str] = "survey 4.4; mean pooling as in Rae et al., Compressive Transformers, arXiv 1911.05507"
    survey: ClassVar[str] = "4.4"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    per_head: ClassVar[bool] = False
    merges: ClassVar[bool] = True

    recent: int = setting(256, low=0, always=True, what="newest rows that stay as they are")
    block: int = setting(8, low=2, always=True, what="rows in a block mean")
    summaries: int = setting(16, low=2, what="block means in a summary")
    sinks: int = setting(4, low=0, what="first rows that stay as they are")

    @property
    def spared(self) -> int:
        """The rows that are no block yet."""
        return self.recent

    def levels(self, n: Any) -> tuple[Any, Any, Any, Any]:
        """(sinks, summaries, block means, rows) held after n tokens, in the order in which they are held."""
        first = smaller(n, self.sinks)
        behind = n - first
        closed = larger(0, behind - self.recent) // self.block
        top = larger(0, closed - self.summaries) // self.summaries
        return first, top, closed - top * self.summaries, behind - closed * self.block

    def kept(self, n: Any) -> Any:
        """Rows held after n tokens."""
        first, top, means, rows = self.levels(n)
        return first + top + means + rows

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """About recent + n / (block * summaries); a step reads one row more, before it merges."""
        return running_rows(self.kept, prompt, new)

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Every row that is merged is read once and added (keys and values, taken as equally wide), means written."""
        _, top, means, rows = self.levels(prompt)
        merged = prompt - smaller(prompt, self.sinks) - rows
        return self._merging(1.0 * merged, means + top * self.summaries, place)

    def step_work(self, rows: Rows, place: Place) -> Work:
        """The average over steps: each row enters one block mean, each block mean one summary."""
        return self._merging(1.0, 1.0 / self.block, place)

    def _merging(self, merged: Any, closed: Any, place: Place) -> Work:
        both = 2.0 * place.heads * place.width
        size = place.value_bits / 8
        written = closed * (1 + 1 / self.summaries)
        return Work(both * (merged + closed), both * size * (merged + closed), both * size * written)
