"""Policies that position alone decides: which rows stay after n tokens, the same for all heads and sequences."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.errors import KvsimError
from runtime.parts import PolicyTwin, Prompt, Step, Tensors

Indices = NDArray[np.int64]


class Positional(PolicyTwin):
    """A twin states `stays`; the sets must only ever lose rows that age, so nothing is held for them."""

    @abstractmethod
    def stays(self, rows: Indices, seen: int) -> NDArray[np.bool_]:
        """Whether each of `rows` (absolute) is held once `seen` tokens have come."""

    def held(self, seen: int) -> Indices:
        """Absolute rows held after `seen` tokens, ascending."""
        rows = np.arange(seen)
        return rows[self.stays(rows, seen)]

    def select(self, prompt: Prompt) -> Tensor | None:
        """The rows that position keeps."""
        batch, heads, total = prompt.keys.shape[:3]
        kept = self.held(total)
        if len(kept) == total:
            return None
        return torch.from_numpy(kept).to(prompt.keys.device).expand(batch, heads, -1)

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """Rows whose time is up."""
        before = step.seen - step.new
        rows = np.concatenate([self.held(before), np.arange(before, step.seen)])
        if len(rows) != step.rows:
            if self.part.positional:  # the store drops by `part.ranges`, and holds dead rows until their group is dead
                return state, None
            raise KvsimError(f"{self.part.name}: {step.rows} rows are held where position allows {len(rows)}")
        drop = np.flatnonzero(~self.stays(rows, step.seen))
        if not len(drop):
            return state, None
        found = torch.from_numpy(drop).to(self.setting.device)
        return state, found.expand(self.batch_of(step), self.place.heads, -1)

    @staticmethod
    def batch_of(step: Step) -> int:
        """Sequences of a step; 1 where it carries no tensor (it broadcasts)."""
        return next((x.shape[0] for x in (step.queries, step.keys, step.weights) if x is not None), 1)
