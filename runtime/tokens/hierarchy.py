"""Three levels by age, running: rows, means of blocks, means of block means."""

from __future__ import annotations

from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.tokens.hierarchy import Hierarchy
from runtime.parts import Fold, Merged, PolicyTwin, Prompt, Step, Tensors


class HierarchyTwin(PolicyTwin):
    """Every row held stands for a run of tokens, which `levels` alone determines; a mean weighs its tokens alike."""

    part_name = "hierarchy"
    part: Hierarchy
    step_rows = "all"

    def sizes(self, seen: int) -> NDArray[np.int64]:
        """Tokens behind each row held after `seen` tokens, in order."""
        first, top, means, rows = self.part.levels(seen)
        block = self.part.block
        runs = np.array([1, block * self.part.summaries, block, 1])
        return np.repeat(runs, [first, top, means, rows])

    def merge(self, prompt: Prompt) -> Merged | None:
        """The prompt's rows as levels; None while nothing is merged."""
        total = prompt.keys.shape[2]
        old, new = np.ones(total, np.int64), self.sizes(total)
        if len(new) == total:
            return None
        keys, values = (mean_runs(x, old, new) for x in (prompt.keys, prompt.values))
        return Merged(keys, values, {})

    def fold(self, state: Tensors, step: Step) -> Fold | None:
        """Blocks that close, and summaries of block means: the run's first row becomes the mean, the others leave."""
        old = np.concatenate([self.sizes(step.seen - step.new), np.ones(step.new, np.int64)])
        new = self.sizes(step.seen)
        if len(old) != step.rows:
            raise KvsimError(f"hierarchy: {step.rows} rows are held where position allows {len(old)}")
        if len(old) == len(new):
            return None
        if step.keys is None or step.values is None:
            raise KvsimError("hierarchy needs the rows held, which were not handed to the policy")
        owner = owners(old, new)
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        merged = np.flatnonzero(np.bincount(owner) > 1)
        drop = np.setdiff1d(np.arange(len(old)), first)
        shape = (*step.keys.shape[:2], -1)
        index = torch.from_numpy(merged).to(step.keys.device)
        keys, values = (mean_runs(x, old, new).index_select(2, index) for x in (step.keys, step.values))
        at, gone = (torch.from_numpy(x).to(step.keys.device).expand(shape) for x in (first[merged], drop))
        return Fold(at, keys, values, gone, state)

    def bias(self, state: Tensors, seen: int = 0, rows: int = 0) -> Tensor | None:
        """log of the tokens behind each row; rows of the step in flight stand for one each."""
        sizes = self.sizes(seen)
        if not len(sizes) or sizes.max() == 1:
            return None
        found = torch.zeros(max(rows, len(sizes)), device=self.setting.device)
        _, top, means, _ = self.part.levels(seen)
        start = int(min(seen, self.part.sinks))
        found[start : start + top] = log(self.part.block * self.part.summaries)
        found[start + top : start + top + means] = log(self.part.block)
        return found.expand(1, self.place.heads, -1)


def owners(old: NDArray[np.int64], new: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each old run of tokens, the index of the new run that it is a part of."""
    found: NDArray[np.int64] = np.searchsorted(np.cumsum(new), np.cumsum(old) - old, side="right")
    return found


def mean_runs(x: Tensor, old: NDArray[np.int64], new: NDArray[np.int64]) -> Tensor:
    """Rows x [B, H, len(old), d] that stand for `old` tokens each, as means over the runs `new`; sums in float32."""
    owner = torch.from_numpy(owners(old, new)).to(x.device)
    weights = torch.from_numpy(old / new[owners(old, new)]).to(x.device, torch.float32)
    total = x.new_zeros((*x.shape[:2], len(new), x.shape[3]), dtype=torch.float32)
    return total.index_add(2, owner, x.float() * weights[:, None]).to(x.dtype)
