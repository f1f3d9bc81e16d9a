"""Rows of largest score within a budget: the choice itself, and the twins of policies that rank rows."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvsim.budgets import Scored
from runtime.estimator import estimator
from runtime.parts import PolicyTwin, Prompt, Setting, Step, Tensors
from runtime.running import trackers
from runtime.scores import prompt_scores, queries_wanted

ALWAYS = float("inf")


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows index [B, H or 1, m] of x [B, H, n, w]."""
    return x.gather(2, index[:, : x.shape[1], :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def best(scores: Tensor, count: int) -> Tensor:
    """The `count` largest along the last dimension as ascending int64 indices; of equal scores the newer row wins.

    A stable sort, so that the choice is the same on every device.
    """
    size = scores.shape[-1]
    order = torch.argsort(scores.flip(-1), dim=-1, descending=True, stable=True)[..., :count]
    return (size - 1 - order).sort(dim=-1).values


def secured(scores: Tensor, newest: int, oldest: int) -> Tensor:
    """Scores with the newest and the oldest rows above all others."""
    found, size = scores.float().clone(), scores.shape[-1]
    found[..., size - newest :] = ALWAYS
    found[..., :oldest] = ALWAYS
    return found


def least(scores: Tensor, count: int) -> Tensor:
    """The `count` smallest as ascending indices; of equal scores the older row goes. One pass where one row leaves."""
    if count == 1:
        return scores.argmin(dim=-1, keepdim=True)
    return torch.argsort(scores, dim=-1, stable=True)[..., :count].sort(dim=-1).values


def smoothed(scores: Tensor, kernel: int) -> Tensor:
    """Means over `kernel` neighbours along the last dimension; at the ends over those that exist.

    SnapKV's code pads with zeros there; zeros would put the ends of negative scores (norms, similarities) first.
    """
    if kernel == 1 or not scores.shape[-1]:
        return scores
    pool = torch.nn.functional.avg_pool1d
    return pool(scores, kernel, stride=1, padding=kernel // 2, count_include_pad=False)


class Ranked(PolicyTwin):
    """A policy that ranks rows by a score; how many rows stay is the kvsim part's own count.

    The oldest rows held stand for the sinks: they are the prompt's first rows unless a budget was too small for them.
    """

    part: Scored

    def __init__(self, part: Scored, setting: Setting) -> None:
        super().__init__(part, setting)
        self.score = part.ranking
        self.tracker = trackers()[self.score.name](self.score, part.observed, setting) if part.running else None

    @property
    def prompt_weights(self) -> bool:  # type: ignore[override]
        """Whether the score sums the weights of all queries."""
        return self.score.needs_weights

    @property
    def prompt_queries(self) -> int:
        """Query rows that the score looks at."""
        return queries_wanted(self.score, self.part.observed)

    @property
    def step_weights(self) -> bool:  # type: ignore[override]
        """Whether a step's weights move the scores."""
        return self.tracker is not None and self.tracker.weights

    @property
    def step_queries(self) -> bool:  # type: ignore[override]
        """Whether a step's queries are compared with the keys again."""
        return self.tracker is not None and self.tracker.queries

    @property
    def step_rows(self) -> Literal["none", "new", "all"]:  # type: ignore[override]
        """The keys that the score is computed from."""
        return "none" if self.tracker is None else self.tracker.rows

    def model_buffers(self) -> Tensors:
        """The estimator of an auxiliary score."""
        return {"estimator": self._estimator} if "calibration" in self.score.needs else {}

    @cached_property
    def _estimator(self) -> Tensor:
        return estimator(self.setting)

    def kept(self, prompt: int) -> int:
        """Rows of the prompt that stay."""
        return int(self.part.rows(prompt, 0, self.place).prompt)

    def shared(self, scores: Tensor) -> Tensor:
        """One score for all heads of a layer where the policy chooses for all at once."""
        return scores if self.part.per_head else scores.mean(1, keepdim=True)

    def prompt_ranking(self, prompt: Prompt) -> Tensor:
        """Scores [B, H or 1, T] of the prompt's rows, float32."""
        return self.shared(prompt_scores(self.score, prompt, self.part.observed, self.setting))

    def select(self, prompt: Prompt) -> Tensor | None:
        """Protected rows and the best others."""
        batch, heads, total = prompt.keys.shape[:3]
        count = self.kept(total)
        if count >= total:
            return None
        newest, oldest = self.part.protected(count)  # type: ignore[attr-defined]
        ranking = self.prompt_ranking(prompt)
        return best(secured(ranking, newest, oldest), count).expand(batch, heads, count)

    def start(self, prompt: Prompt, kept: Tensor | None) -> Tensors:
        """What a running score knows about the kept rows."""
        if self.tracker is None:
            return {}
        shared = not self.part.per_head
        state = self.tracker.start(prompt, shared)
        if kept is None:
            return state
        rows = prompt.keys.shape[2]
        return {k: take(v, kept) if k in self.tracker.by_row and v.shape[2] == rows else v for k, v in state.items()}

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """Scores moved on by the step, and the least rows beyond the budget."""
        if self.tracker is None:
            return state, None
        state, scores = self.tracker.step(state, step, not self.part.per_head)
        count = int(self.part.rows(0, step.seen, self.place).stored)
        if count >= step.rows:
            return state, None
        newest, oldest = self.part.protected(count)  # type: ignore[attr-defined]
        newest = min(max(newest, step.tail), count)
        ranked = secured(scores, newest, min(oldest, count - newest))
        drop = least(ranked, step.rows - count)
        return state, drop.expand(-1, self.place.heads, -1)


class Smoothed(Ranked):
    """Scores of the rows before the observation window are averaged over neighbours; the window stays."""

    def prompt_ranking(self, prompt: Prompt) -> Tensor:
        """Scores [B, H, T], smoothed before the window."""
        scores = super().prompt_ranking(prompt)
        before = max(0, scores.shape[2] - self.part.observed)
        kernel: int = self.part.kernel  # type: ignore[attr-defined]
        return torch.cat([smoothed(scores[:, :, :before], kernel), scores[:, :, before:]], dim=2)
