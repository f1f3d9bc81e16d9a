"""Rows whose keys fall on the same side of random planes become one, running."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.tokens.lsh_merge import LshMerge
from runtime.budgets import take
from runtime.parts import Fold, Merged, PolicyTwin, Prompt, Step, Tensors
from runtime.running import pack_bits, unpack_bits
from runtime.scores import attention_window

TINY = 1e-20
"""Added to attention weights, so that rows that nobody looked at have a mean too."""


@dataclass
class Rows:
    """Rows on the way to being merged: weighted sums [B, H, n, d], their weights and counts [B, H, n], who is left."""

    keys: Tensor
    values: Tensor
    weight: Tensor
    count: Tensor
    alive: Tensor

    def join(self, leader: Tensor) -> Rows:
        """Add every row to its leader, an index [B, H, n]; rows that lead themselves stay."""
        own = torch.arange(leader.shape[2], device=leader.device)
        wide = leader[..., None]
        return Rows(
            torch.zeros_like(self.keys).scatter_add(2, wide.expand(self.keys.shape), self.keys),
            torch.zeros_like(self.values).scatter_add(2, wide.expand(self.values.shape), self.values),
            torch.zeros_like(self.weight).scatter_add(2, leader, self.weight),
            torch.zeros_like(self.count).scatter_add(2, leader, self.count),
            self.alive & (leader == own),
        )

    def means(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows that are left, float32 (others: 0)."""
        weight = self.weight.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        return self.keys / weight, self.values / weight


class LshMergeTwin(PolicyTwin):
    """Hashes are signs of products with stored planes of keys less the prompt's mean key (0 without a prompt).

    A bucket stands where its first row stood and keeps the hashes that it was found by. Rows that come later weigh 1
    each, also with merge=weighted: the attention that weighs a row is the prompt's.
    """

    part_name = "lsh_merge"
    part: LshMerge
    ragged = True

    @property
    def step_rows(self) -> Literal["none", "all"]:  # type: ignore[override]
        """Rows are compared and merged only while running."""
        return "all" if self.part.when == "running" else "none"

    @cached_property
    def planes(self) -> Tensor:
        """The stored planes [1, 1, planes * tables, d], normal, from the seed and the layer."""
        shape = (1, 1, self.part.planes * self.part.tables, self.place.width)
        found = torch.randn(shape, generator=self.setting.generator())
        return found.to(self.setting.device, self.setting.dtype)

    def model_buffers(self) -> Tensors:
        """The planes, shared by all heads and sequences."""
        return {"planes": self.planes}

    def signs(self, keys: Tensor, mean: Tensor) -> Tensor:
        """Bits [B, H, n, tables, planes] of keys [B, H, n, d]."""
        found = (keys.float() - mean) @ self.planes.float().transpose(2, 3) > 0
        return found.reshape(*keys.shape[:3], self.part.tables, self.part.planes)

    @property
    def prompt_queries(self) -> int:
        """Queries whose attention weighs rows."""
        return self.part.window if self.part.merge == "weighted" else 0

    def merge(self, prompt: Prompt) -> Merged | None:
        """Buckets of the prompt, [B, H, m] rows of the fullest head, padded behind."""
        keys, total = prompt.keys.float(), prompt.keys.shape[2]
        mean = keys.sum(2, keepdim=True) / max(total, 1)
        weight = torch.ones_like(keys[..., 0])
        if self.part.merge == "weighted" and total:
            weight = attention_window(prompt, self.part.window, self.setting) + TINY
        rows = Rows(keys * weight[..., None], prompt.values.float() * weight[..., None], weight,
                    torch.ones_like(weight), torch.ones_like(weight, dtype=torch.bool))
        free = self._free(total, keys.device)
        bits = self.signs(keys, mean)
        for table in range(self.part.tables):
            if table:  # what the tables before left: means of buckets
                bits[:, :, :, table] = self.signs(rows.means()[0], mean)[:, :, :, table]
            rows = rows.join(leaders(as_numbers(bits[:, :, :, table]), rows.alive & free))
        return self._packed(prompt, rows, bits, mean)

    def _free(self, total: int, device: torch.device) -> Tensor:
        """Rows that may be merged: neither the first nor the newest, [n]."""
        at = torch.arange(total, device=device)
        return (at >= self.part.sinks) & (at < total - self.part.recent)

    def _packed(self, prompt: Prompt, rows: Rows, bits: Tensor, mean: Tensor) -> Merged:
        """Rows that are left, in order; single ones exactly as they were."""
        counts = rows.alive.sum(2)
        most = int(counts.max()) if counts.numel() else 0
        order = torch.argsort((~rows.alive).to(torch.uint8), dim=2, stable=True)[:, :, :most]
        single = (rows.count == 1)[..., None]
        keys, values = (torch.where(single, old, new.to(old.dtype)) * rows.alive[..., None]
                        for old, new in zip((prompt.keys, prompt.values), rows.means(), strict=True))
        log_count = torch.where(rows.alive, rows.count, 1.0).log()
        state = {"log_count": take(log_count[..., None], order)}
        if self.part.when == "running":
            state |= {"hashes": take(pack_bits(bits.flatten(3)), order), "mean_key": mean}
        return Merged(take(keys, order), take(values, order), state, counts)

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """Later rows stand for one token each (when=prompt)."""
        return {"log_count": _with_new(state["log_count"], step.rows)}, None

    def fold(self, state: Tensors, step: Step) -> Fold | None:
        """Rows that leave the newest ones join the bucket of their hash."""
        if self.part.when == "prompt":
            return None
        if step.keys is None or step.values is None:
            raise KvsimError("lsh_merge needs the rows held, which were not handed to the policy")
        new = self.signs(step.keys[:, :, -step.new :], state["mean_key"])
        hashes = torch.cat([state["hashes"], pack_bits(new.flatten(3))], dim=2)
        log_count = _with_new(state["log_count"], step.rows)
        count = log_count[..., 0].exp().round()
        rows = Rows(step.keys.float() * count[..., None], step.values.float() * count[..., None], count, count,
                    torch.ones_like(count, dtype=torch.bool))
        free = self._free(step.rows, count.device)
        bits = unpack_bits(hashes, self.part.planes * self.part.tables)
        bits = bits.reshape(*new.shape[:2], step.rows, *new.shape[3:])
        target = torch.arange(step.rows, device=count.device).expand(count.shape)
        for table in range(self.part.tables):
            leader = leaders(as_numbers(bits[:, :, :, table]), rows.alive & free)
            rows, target = rows.join(leader), leader.gather(2, target)
        return self._folded(rows, target, log_count, state | {"hashes": hashes}, step)

    def _folded(self, rows: Rows, target: Tensor, log_count: Tensor, state: Tensors, step: Step) -> Fold:
        """Content of the rows that were joined, and the rows that leave, padded with -1 in front."""
        gone = ~rows.alive
        most = int(gone.sum(2).max()) if gone.numel() else 0
        at = torch.arange(step.rows, device=gone.device)
        drop = torch.where(gone, at, -1).sort(dim=2).values[:, :, step.rows - most :]
        onto = torch.where(drop >= 0, target.gather(2, drop.clamp_min(0)), -1)
        keys, values = (take(x, onto.clamp_min(0)) for x in rows.means())
        joined = rows.count[..., None].clamp_min(1).log()
        changed = torch.zeros_like(gone, dtype=torch.int32).scatter_add(2, onto.clamp_min(0), (onto >= 0).int()) > 0
        state = state | {"log_count": torch.where(changed[..., None], joined, log_count)}
        dtype = (step.keys.dtype, step.values.dtype)  # type: ignore[union-attr]
        return Fold(onto, keys.to(dtype[0]), values.to(dtype[1]), drop if most else None, state)

    def bias(self, state: Tensors, seen: int = 0, rows: int = 0) -> Tensor | None:
        """Log-counts of the rows held; rows of the step in flight have 0."""
        held = state["log_count"][..., 0]
        return torch.nn.functional.pad(held, (0, max(rows - held.shape[2], 0)))


def _with_new(log_count: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(log_count, (0, 0, 0, rows - log_count.shape[2]))


def as_numbers(bits: Tensor) -> Tensor:
    """Bits [..., p] (p at most 48) as one int64."""
    places = 2 ** torch.arange(bits.shape[-1], device=bits.device)
    return (bits * places).sum(-1)


def leaders(hashes: Tensor, free: Tensor) -> Tensor:
    """For each row the first free row of equal hash, int64 [B, H, n]; rows that are not free lead themselves."""
    size = hashes.shape[2]
    own = torch.arange(size, device=hashes.device).expand(hashes.shape)
    marked = torch.where(free, hashes, -1 - own)
    ordered, order = marked.sort(dim=2, stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, :, 1:] = ordered[:, :, 1:] != ordered[:, :, :-1]
    start = torch.where(fresh, own, 0).cummax(dim=2).values
    return torch.empty_like(order).scatter(2, order, order.gather(2, start))
