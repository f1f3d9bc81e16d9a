"""What token policies share: counting with budgets, kept rows into Rows, and the buffers and work of a score in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kvsim.buffers import Eager, Phase
from kvsim.errors import KvsimError
from kvsim.parts import Budget, Buffer, Place, Rows, TokenPolicy, Work, budget_rows
from kvsim.scores import SCORES, Score
from kvsim.workload import Count


def smaller(a: Any, b: Any) -> Any:
    """Element-wise minimum that keeps plain ints plain."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def larger(a: Any, b: Any) -> Any:
    """Element-wise maximum that keeps plain ints plain."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def multiples(start: Any, stop: Any, step: int) -> Any:
    """How many i in [start, stop) divide by `step`; 0 where stop <= start."""
    return larger(0, -(-stop // step) + (-start // step))


def half_even(numerator: Any, denominator: int) -> Any:
    """numerator / denominator rounded to the nearest whole number, halves to the even one, in whole numbers only."""
    twice = 2 * numerator + denominator
    nearest = twice // (2 * denominator)
    tie = twice % (2 * denominator) == 0
    return nearest - (tie & (nearest % 2 == 1))


def check_protected(name: str, budget: Budget, **protected: int | None) -> None:
    """Raise KvsimError where a budget in rows is smaller than the rows that are protected inside it."""
    total = sum(n or 0 for n in protected.values())
    if isinstance(budget, int) and total > budget:
        told = " and ".join(f"{k}={v}" for k, v in protected.items() if v)
        raise KvsimError(f"{name}: {told} do not fit budget={budget} rows, inside which they count; give {total}")


def protected_inside(kept: int, recent: int, sinks: int) -> tuple[int, int]:
    """(recent, sinks) rows that are safe when `kept` rows stay: the newest come first, then the oldest."""
    newest = min(recent, kept)
    return newest, min(sinks, kept - newest)


def running_rows(kept: Callable[[Any], Any], prompt: Count, new: Count) -> Rows:
    """Rows of a policy that evicts after every step: the step that writes row N reads min(N, kept(N - 1) + 1)."""
    total = prompt + new
    return Rows(kept(prompt), kept(total), smaller(total, kept(larger(total - 1, 0)) + 1))


def prompt_rows(kept: Any, new: Count) -> Rows:
    """Rows of a policy that compresses the prompt once: later rows are added and everything is read."""
    return Rows(kept, kept + new, kept + new)


def prompt_budget(budget: Budget, protected: int, prompt: Count) -> Any:
    """max(protected, ceil(b * T)), or the whole prompt where it is shorter (semantics: budgets)."""
    return smaller(prompt, larger(protected, budget_rows(budget, prompt)))


class Scored(TokenPolicy):
    """A policy that ranks rows by a score: its setting `score`, or `ranked_by`.

    The copy of the kept rows is not counted here: writing them is the format's work.
    """

    ranked_by: ClassVar[str] = ""

    @property
    def ranking(self) -> Score:
        """The score in use: the setting `score`, or the policy's own."""
        return SCORES[getattr(self, "score", self.ranked_by)]

    @property
    def observed(self) -> int:
        """Queries at the end of the prompt that a score looks at: the setting `window`."""
        return int(getattr(self, "window", 1))

    @property
    def running(self) -> bool:
        """Whether rows are ranked again at every step."""
        return self.drops == "rows"

    def ranked_heads(self, place: Place) -> int:
        """Selections made for one layer: one a KV head, or one for all."""
        return place.heads if self.per_head else 1

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """The score's state of a running policy; a prompt policy keeps only what the next prompt needs."""
        stored = rows.stored if self.running else None
        return self.ranking.buffers(stored, self.ranked_heads(place), place, self.observed)

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Scoring the prompt and one selection."""
        return self.ranking.prompt_work(prompt, place, self.observed) + selection_work(prompt, self.ranked_heads(place))

    def step_work(self, rows: Rows, place: Place) -> Work:
        """Scoring the attended rows and finding the least of them, where the policy runs on."""
        if not self.running:
            return Work()
        heads = self.ranked_heads(place)
        return self.ranking.step_work(rows.attended, heads, place, self.observed) + least_work(rows.attended, heads)


    def eager(self, phase: Phase, rows: Count, place: Place) -> Eager:
        """The score's calls and passes with the selection's calls; at a step what scores, chooses and drops."""
        if phase == "prefill":
            return self.ranking.prompt_eager(rows, place, self.observed, SELECT_CALLS)
        return Eager(self.ranking.step_calls) if self.running else Eager()


class AnyScore(Scored):
    """A policy that takes every score: what it needs is what the score needs."""

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        """Whether the score sums the weights of all queries."""
        return self.ranking.needs_weights

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        """Whether KV heads choose differently."""
        return self.ranking.by_head


class Windowed(AnyScore):
    """A prompt policy: window and sinks stay, a smoothed score ranks the other rows for what the budget leaves."""

    budget: Budget
    window: int
    kernel: int
    sinks: int

    def check(self) -> None:
        """Protected rows fit a budget in rows; the kernel has a middle."""
        check_protected(self.name, self.budget, window=self.window, sinks=self.sinks)
        if self.kernel % 2 == 0:
            raise KvsimError(f"{self.name}: kernel={self.kernel} has no middle; use {self.kernel + 1}")

    def protected(self, kept: int) -> tuple[int, int]:
        """(newest, first) rows that are safe among `kept`."""
        return protected_inside(kept, self.window, self.sinks)

    def even(self, prompt: Count) -> Any:
        """Rows of the prompt that the budget keeps in a head."""
        return prompt_budget(self.budget, self.window + self.sinks, prompt)

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """n_heads * w * T products of length d, `kernel` additions a score, one selection."""
        return super().prompt_work(prompt, place) + pooling_work(prompt, self.kernel, place)


SELECT_PASSES = 4
"""Passes of a radix selection over 32-bit scores, eight bits at a time (Alabi et al., Fast k-selection, JEA 2012)."""


SELECT_CALLS = 12
"""Torch calls of one selection: rows secured, sorted, the first ones sorted again (counted in runtime/budgets.py)."""


def selection_work(rows: Count, heads: int) -> Work:
    """The top k of `rows` fp32 scores for each head: four passes, one operation a score each; indices are small."""
    scores = 1.0 * rows * heads
    return Work(SELECT_PASSES * scores, SELECT_PASSES * 4 * scores, 0.0)


def least_work(rows: Count, heads: int) -> Work:
    """The least of `rows` fp32 scores for each head: one pass."""
    scores = 1.0 * rows * heads
    return Work(scores, 4 * scores, 0.0)


def pooling_work(rows: Count, kernel: int, place: Place) -> Work:
    """A mean over `kernel` neighbouring scores of each head, in place of the scores (fp32)."""
    scores = 1.0 * rows * place.heads
    return Work(kernel * scores, 4 * scores, 4 * scores) if kernel > 1 else Work()
