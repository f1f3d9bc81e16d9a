"""Scores that are kept up while generating: what each holds for the rows, and how a step moves it on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.scores import EMA_RATE, Score
from runtime.estimator import estimated
from runtime.parts import Prompt, Setting, Step, Tensors
from runtime.scores import (
    above_share,
    directions,
    drawn,
    logits_of,
    moving_average,
    over_group,
    prompt_scores,
)


def wanted(value: Tensor | None, what: str, score: str) -> Tensor:
    """The tensor, or KvsimError where the step came without it."""
    if value is None:
        raise KvsimError(f"score={score} needs the step's {what}, which were not handed to the policy")
    return value


def grown(old: Tensor, rows: int) -> Tensor:
    """State [B, H, n, w] with zeros for the newer of `rows` rows."""
    return torch.cat([old, old.new_zeros((*old.shape[:2], rows - old.shape[2], old.shape[3]))], dim=2)


def pooled(x: Tensor, shared: bool) -> Tensor:
    """The mean over KV heads [B, 1, ...] where a layer has one selection."""
    return x.mean(1, keepdim=True) if shared else x


class Tracker:
    """A score that moves with every step. Default: it stands once computed, and only new rows are scored.

    weights, queries: what it needs of a step; rows: which keys. by_row: state tensors with one row a cached row.
    """

    weights: ClassVar[bool] = False
    queries: ClassVar[bool] = False
    rows: ClassVar[Literal["none", "new", "all"]] = "none"
    by_row: ClassVar[frozenset[str]] = frozenset({"scores"})

    def __init__(self, score: Score, window: int, setting: Setting) -> None:
        self.score = score
        self.window = window
        self.setting = setting

    def start(self, prompt: Prompt, shared: bool) -> Tensors:
        """State for all rows of the prompt."""
        scores = pooled(prompt_scores(self.score, prompt, self.window, self.setting), shared)
        return {"scores": scores[..., None]}

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """State and scores [B, H or 1, n] for all rows held."""
        fresh = pooled(self.fresh(step), shared)[..., None]
        scores = torch.cat([state["scores"], fresh.to(state["scores"].device)], dim=2)
        return {"scores": scores}, scores[..., 0]

    def fresh(self, step: Step) -> Tensor:
        """Scores [B, H, m] of the step's own rows."""
        raise KvsimError(f"score={self.score.name} does not score rows alone")


class Norm(Tracker):
    """The key's length."""

    rows = "new"

    def fresh(self, step: Step) -> Tensor:
        """Minus the length."""
        lengths: Tensor = wanted(step.keys, "keys", self.score.name)[:, :, -step.new :].float().norm(dim=-1)
        return -lengths


class Auxiliary(Tracker):
    """The network's answer to each new key."""

    rows = "new"

    def fresh(self, step: Step) -> Tensor:
        """The network on the new keys."""
        return estimated(wanted(step.keys, "keys", self.score.name)[:, :, -step.new :], self.setting)


class Random(Tracker):
    """One draw a row."""

    rows = "new"

    def fresh(self, step: Step) -> Tensor:
        """Draws that the seed, the layer and the token count decide."""
        keys = wanted(step.keys, "keys", self.score.name)
        return drawn(torch.Size((*keys.shape[:2], step.new)), self.setting, step.seen)


class Cumulative(Tracker):
    """Weights summed over all queries and the query heads of a KV head."""

    weights = True

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """Add the step's weights."""
        group = self.setting.place.n_heads // self.setting.place.heads
        mass = wanted(step.weights, "weights", self.score.name).float().sum(2) * group
        scores = grown(state["scores"], step.rows) + pooled(mass, shared)[..., None]
        return {"scores": scores}, scores[..., 0]


class Normalised(Cumulative):
    """Cumulative, and when each row came: the queries that could see it are those since."""

    by_row = frozenset({"scores", "arrived"})

    def start(self, prompt: Prompt, shared: bool) -> Tensors:
        """Row j came as token j and was seen by T - j queries."""
        rows = prompt.keys.shape[2]
        at = torch.arange(rows, dtype=torch.int32, device=prompt.keys.device)
        scores = pooled(prompt_scores(self.score, prompt, self.window, self.setting), shared) * (rows - at)
        return {"scores": scores[..., None], "arrived": at.expand(scores.shape)[..., None].contiguous()}

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """The sum, divided by the queries that could see each row."""
        moved, mass = super().step({"scores": state["scores"]}, step, shared)
        at = grown(state["arrived"], step.rows)
        new = torch.arange(step.seen - step.new, step.seen, dtype=torch.int32, device=at.device)
        at[:, :, step.rows - step.new :, 0] = new
        return moved | {"arrived": at}, mass / (step.seen - at[..., 0])


class Last(Tracker):
    """The newest query's weights; nothing is held."""

    weights = True
    by_row = frozenset()

    def start(self, prompt: Prompt, shared: bool) -> Tensors:
        """Nothing."""
        return {}

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """The newest query's row of weights."""
        return {}, pooled(wanted(step.weights, "weights", self.score.name)[:, :, -1].float(), shared)


class QueryKey(Last):
    """The newest query's logits; nothing is held. The scaling is 1 / sqrt(d), which does not change an order."""

    weights = False
    queries = True
    rows = "all"

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """Products of the newest query with all keys held."""
        keys, queries = wanted(step.keys, "keys", "query_key"), wanted(step.queries, "queries", "query_key")
        logits = logits_of(queries[:, :, -1:], keys, keys.shape[3] ** -0.5)[:, :, 0]
        return {}, pooled(over_group(logits, keys.shape[1]), shared)


class Persistence(Tracker):
    """A bit for each of the newest w queries and row: bit i mod w is query i's."""

    weights = True
    by_row = frozenset({"history"})

    def start(self, prompt: Prompt, shared: bool) -> Tensors:
        """Bits of the prompt's last queries."""
        batch, heads, rows, _ = prompt.keys.shape
        bits = torch.zeros((batch, heads, rows, self.window), dtype=torch.bool, device=prompt.keys.device)
        if rows:
            found = above_share(prompt, self.window)
            bits[..., self._slots(rows, found.shape[2], bits.device)] = found.transpose(2, 3)
        return {"history": pack_bits(bits)}

    def _slots(self, seen: int, queries: int, device: torch.device) -> Tensor:
        return torch.arange(seen - queries, seen, device=device) % self.window

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """The step's queries take the oldest queries' bits."""
        weights = wanted(step.weights, "weights", self.score.name)[:, :, -self.window :].float()
        queries = weights.shape[2]
        visible = torch.arange(step.rows - queries + 1, step.rows + 1, device=weights.device)
        bits = unpack_bits(grown(state["history"], step.rows), self.window)
        slots = self._slots(step.seen, queries, weights.device)
        bits[..., slots] = (weights * visible[:, None] > 1).transpose(2, 3)
        return {"history": pack_bits(bits)}, bits.sum(-1).float()


class Average(Tracker):
    """s <- (1 - rate) s + rate a for each newest query."""

    weights = True

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """Move on by the step's queries."""
        weights = pooled(wanted(step.weights, "weights", self.score.name).float(), shared)
        old = grown(state["scores"], step.rows) * (1 - EMA_RATE) ** step.new
        scores = old + moving_average(weights)[..., None]
        return {"scores": scores}, scores[..., 0]


class Difference(Tracker):
    """The mean of all normalised keys seen so far, dropped ones too; scores are formed anew from the keys held."""

    rows = "all"
    by_row = frozenset()

    def start(self, prompt: Prompt, shared: bool) -> Tensors:
        """The mean over the prompt, 0 where it is empty."""
        total = directions(prompt.keys).sum(2, keepdim=True)
        return {"anchor": pooled(total / max(prompt.keys.shape[2], 1), shared)}

    def step(self, state: Tensors, step: Step, shared: bool) -> tuple[Tensors, Tensor]:
        """Move the mean to the new keys, compare every key with it."""
        unit = directions(wanted(step.keys, "keys", self.score.name))
        old = state["anchor"]
        anchor = old + pooled((unit[:, :, -step.new :] - old).sum(2, keepdim=True), shared) / step.seen
        return {"anchor": anchor}, pooled(-(unit * directions(anchor)).sum(-1), shared)


def pack_bits(bits: Tensor) -> Tensor:
    """Bits [..., w] into bytes [..., ceil(w / 8)], the first bit lowest."""
    width = bits.shape[-1]
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -width % 8))
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded.reshape(*bits.shape[:-1], -(-width // 8), 8) * places).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, width: int) -> Tensor:
    """The inverse of pack_bits, bool [..., width]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., None] >> shifts) & 1
    return bits.reshape(*packed.shape[:-1], packed.shape[-1] * 8)[..., :width].bool()


@cache
def trackers() -> Mapping[str, type[Tracker]]:
    """The tracker of every score that can run on; those of the prompt alone hold nothing."""
    return {
        "query_key": QueryKey,
        "cumulative": Cumulative,
        "normalised": Normalised,
        "last": Last,
        "persistence": Persistence,
        "knorm": Norm,
        "keydiff": Difference,
        "auxiliary": Auxiliary,
        "online_average": Average,
        "random": Random,
    }
