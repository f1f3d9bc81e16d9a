"""Importance scores of a prompt's rows, each as kvsim.scores states it, from keys, values, queries or weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.scores import FUTURE_POSITIONS, SKIPPED_QUERIES, Score
from runtime.estimator import estimated
from runtime.parts import Prompt, Setting

ALL_QUERIES = 2**31
"""Asks for every query of the prompt."""
SOLE = 1e-6
"""perturbation: the least 1 - a that is divided by; a row that takes all the weight leaves nothing to compare with."""

PromptScore = Callable[[Prompt, int, Setting], Tensor]


def queries_wanted(score: Score, window: int) -> int:
    """Query rows at the prompt's end that a score needs."""
    if "queries" not in score.needs:
        return 0
    if score.quadratics:
        return ALL_QUERIES
    return {"last": 1, "window": window}.get(score.span, 0)


def prompt_scores(score: Score, prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Scores float32 [B, H, T] of all rows of a prompt.

    window: the last queries looked at. Raises KvsimError where the prompt lacks what the score needs.
    """
    if not prompt.keys.shape[2]:
        return prompt.keys.new_zeros(prompt.keys.shape[:3], dtype=torch.float32)
    return PROMPT[score.name](prompt, window, setting).float()


def over_group(x: Tensor, heads: int) -> Tensor:
    """Means over the query heads of each KV head: [B, Hq, ...] -> [B, heads, ...]."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]).mean(2)


def to_query_heads(x: Tensor, query_heads: int) -> Tensor:
    """Each KV head once for every query head of it: [B, H, ...] -> [B, Hq, ...]."""
    return x.repeat_interleave(query_heads // x.shape[1], dim=1)


def _queries(prompt: Prompt, count: int, score: str) -> Tensor:
    if prompt.queries is None:
        raise KvsimError(f"score={score} needs the prompt's last queries, which were not handed to the policy")
    return prompt.queries[:, :, -count:].float()


def logits_of(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Scaled products [B, Hq, w, n] in float32."""
    return queries.float() @ to_query_heads(keys.float(), queries.shape[1]).transpose(2, 3) * scaling


def window_weights(prompt: Prompt, window: int, score: str) -> Tensor:
    """Causal softmax weights of the prompt's last min(w, T) queries, float32 [B, Hq, w, T]."""
    queries, total = _queries(prompt, window, score), prompt.keys.shape[2]
    logits = logits_of(queries, prompt.keys, prompt.scaling)
    return torch.softmax(logits.masked_fill(~_visible(queries.shape[2], total, logits.device), float("-inf")), dim=-1)


def _visible(queries: int, rows: int, device: torch.device) -> Tensor:
    """Whether each of the last queries sees a row, [w, T]."""
    at = torch.arange(rows - queries, rows, device=device)[:, None]
    return torch.arange(rows, device=device)[None] <= at


def query_key(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """The newest query's logits."""
    queries = _queries(prompt, 1, "query_key")
    return over_group(logits_of(queries, prompt.keys, prompt.scaling)[:, :, 0], prompt.keys.shape[1])


def cumulative(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """All weights a row received, summed over queries and query heads."""
    if prompt.mass is None:
        raise KvsimError("score=cumulative needs the weights of all queries, which were not handed to the policy")
    return prompt.mass * (setting.place.n_heads // setting.place.heads)


def normalised(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Cumulative over the queries that could see the row: T - j of them."""
    rows = prompt.keys.shape[2]
    return cumulative(prompt, window, setting) / torch.arange(rows, 0, -1, device=prompt.keys.device)


def last(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """The newest query's weights; its mean over heads is the policy's."""
    return over_group(window_weights(prompt, 1, "last")[:, :, 0], prompt.keys.shape[1])


def above_share(prompt: Prompt, window: int) -> Tensor:
    """Whether each of the last queries gave a row more than its even share, bool [B, H, w, T]."""
    weights = over_group(window_weights(prompt, window, "persistence"), prompt.keys.shape[1])
    queries, rows = weights.shape[2:]
    seen = torch.arange(rows - queries + 1, rows + 1, device=weights.device)
    return weights * seen[:, None] > 1


def persistence(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """How many of the last queries gave the row more than its even share."""
    return above_share(prompt, window).sum(2)


def attention_window(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Mean weight of the last queries."""
    return over_group(window_weights(prompt, window, "window").mean(2), prompt.keys.shape[1])


def knorm(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Minus the key's length, in float32: lengths in half precision tie."""
    lengths: Tensor = prompt.keys.float().norm(dim=-1)
    return -lengths


def directions(keys: Tensor) -> Tensor:
    """Keys of length 1, float32."""
    return torch.nn.functional.normalize(keys.float(), dim=-1)


def keydiff(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Minus the cosine between the key and the mean of all normalised keys."""
    unit = directions(prompt.keys)
    return -(unit * directions(unit.mean(2, keepdim=True))).sum(-1)


def expected(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Softmax of the expected logit under normal queries, times the value's length.

    With `prompt.rotation`: mean and covariance are those of the queries before the rotation, without the first
    SKIPPED_QUERIES, then turned by the rotation averaged over the FUTURE_POSITIONS positions behind the prompt.
    Without: those of the rotated queries as they are, that is the average is over the prompt's own positions.
    The covariance divides by the number of queries.
    """
    queries, scaling = _queries(prompt, ALL_QUERIES, "expected"), prompt.scaling
    turn = None
    if prompt.rotation is not None:
        positions = prompt_positions(prompt)
        queries = prompt.rotation.unrotate(queries, positions[:, -queries.shape[2] :])
        turn = mean_rotation(prompt)
    skipped = SKIPPED_QUERIES - (prompt.keys.shape[2] - queries.shape[2])
    queries = queries[:, :, max(0, min(skipped, queries.shape[2] - 1)) :]
    mean = queries.mean(2, keepdim=True)
    centred = queries - mean
    spread = centred.transpose(2, 3) @ centred / queries.shape[2]
    if turn is not None:
        mean, spread = mean @ turn, turn.transpose(2, 3) @ spread @ turn
    keys = to_query_heads(prompt.keys.float(), queries.shape[1])
    logits = (keys * mean).sum(-1) * scaling + ((keys @ spread) * keys).sum(-1) * scaling**2 / 2
    weights = over_group(torch.softmax(logits, dim=-1), prompt.keys.shape[1])
    lengths: Tensor = prompt.values.float().norm(dim=-1)
    return weights * lengths


def prompt_positions(prompt: Prompt) -> Tensor:
    """Where the prompt's rows stand, [B, T]."""
    if prompt.positions is not None:
        return prompt.positions
    batch, _, rows, _ = prompt.keys.shape
    return torch.arange(rows, device=prompt.keys.device).expand(batch, rows)


def mean_rotation(prompt: Prompt) -> Tensor:
    """R [B, 1, d, d] such that x @ R is x rotated, averaged over the positions behind the prompt."""
    assert prompt.rotation is not None
    ahead = torch.arange(1, FUTURE_POSITIONS + 1, device=prompt.keys.device)
    return prompt.rotation.averaged(prompt.keys.shape[3], prompt_positions(prompt)[:, -1:] + ahead)


def from_gradients(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """What runtime.gradients computed."""
    if prompt.scores is None:
        raise KvsimError("scores from gradients need a backward pass: runtime.gradients.gradient_scores before the run")
    if prompt.scores.shape != prompt.keys.shape[:3]:
        shapes = f"{tuple(prompt.scores.shape)}, the prompt's rows are {tuple(prompt.keys.shape[:3])}"
        raise KvsimError(f"scores from gradients are {shapes}: compute them on this prompt")
    return prompt.scores


def perturbation(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """How far the outputs of the last queries move when the row is taken out: a / (1 - a) ||v - o||.

    A query that sees one row only says nothing about it (v = o): 0.
    """
    weights = window_weights(prompt, window, "perturbation")
    values = to_query_heads(prompt.values.float(), weights.shape[1])
    away = torch.cdist(weights @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
    moved = weights / (1 - weights).clamp_min(SOLE) * away
    return over_group(moved.mean(2), prompt.keys.shape[1])


def mutual_information(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Plug-in estimate of the row's part of I(query; attended row), in nats, queries equally likely."""
    weights = window_weights(prompt, window, "mutual_information")
    marginal = weights.mean(2, keepdim=True)
    ratio = torch.where(weights > 0, weights / marginal.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    return over_group((weights * ratio.log()).mean(2), prompt.keys.shape[1])


def auxiliary(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """What the trained network says about the keys."""
    return estimated(prompt.keys, setting)


def online_average(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """The moving average after the prompt's last queries, from 0."""
    return moving_average(over_group(window_weights(prompt, window, "online_average"), prompt.keys.shape[1]))


def moving_average(weights: Tensor) -> Tensor:
    """Sum over queries i of m of rate * (1 - rate)^(m - 1 - i) * weights[..., i, :], [B, H, n]."""
    from kvsim.scores import EMA_RATE

    age = torch.arange(weights.shape[2] - 1, -1, -1, device=weights.device)
    return (weights * (EMA_RATE * (1 - EMA_RATE) ** age)[:, None]).sum(2)


def random(prompt: Prompt, window: int, setting: Setting) -> Tensor:
    """Uniform numbers from the seed and the layer."""
    return drawn(prompt.keys.shape[:3], setting, 0).to(prompt.keys.device)


def drawn(shape: torch.Size, setting: Setting, at: int) -> Tensor:
    """Uniform numbers that seed, layer and token `at` decide, on the CPU so that devices agree."""
    generator = torch.Generator().manual_seed(hash((setting.seed, setting.place.layer, at)) % 2**63)
    return torch.rand(shape, generator=generator)


PROMPT: Mapping[str, PromptScore] = MappingProxyType({
    "query_key": query_key,
    "cumulative": cumulative,
    "normalised": normalised,
    "last": last,
    "persistence": persistence,
    "window": attention_window,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected": expected,
    "loss_attention": from_gradients,
    "saliency": from_gradients,
    "gradient": from_gradients,
    "perturbation": perturbation,
    "mutual_information": mutual_information,
    "auxiliary": auxiliary,
    "online_average": online_average,
    "random": random,
})
"""Every score of kvsim.scores by name."""
