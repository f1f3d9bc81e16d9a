"""Attention over a store: the prompt in full precision, later steps over packed rows, latent where the basis allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime.parts import Prompt, Step
from runtime.side import Side
from runtime.store import Store

BLOCK = 512
"""Query rows whose weights are formed at once."""


@dataclass(frozen=True)
class Rule:
    """How scores become weights: scaling, soft cap of the logits (0 = none), and a sink logit a head (gpt-oss)."""

    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def logits(self, scores: Tensor) -> Tensor:
        """Scaled (and capped) logits."""
        scaled = scores * self.scaling
        return torch.tanh(scaled / self.softcap) * self.softcap if self.softcap else scaled

    def weights(self, logits: Tensor) -> Tensor:
        """Softmax over rows, [B, Hq, m, n]; a sink takes its share and is dropped."""
        if self.sinks is None:
            return torch.softmax(logits, dim=-1)
        sink = self.sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def grouped(x: Tensor, heads: int) -> Tensor:
    """[B, Hq, m, d] -> [B, heads, Hq / heads * m, d]: query heads of one stored head side by side."""
    batch, query_heads, rows, width = x.shape
    return x.reshape(batch, heads, query_heads // heads * rows, width)


def hidden(queries: int, rows: int, window: int, device: torch.device) -> Tensor:
    """True where query i (the last `queries` of `rows` rows) must not see row j: the future, or beyond the window."""
    at = torch.arange(rows - queries, rows, device=device)[:, None]
    row = torch.arange(rows, device=device)[None]
    return (row > at) | (row <= at - window) if window else row > at


def attend_prompt(q: Tensor, k: Tensor, v: Tensor, rule: Rule, window: int) -> Tensor:
    """Causal attention of a whole prompt [B, Hq, T, d] in full precision."""
    if not rule.softcap and rule.sinks is None:
        mask = None if not window or k.shape[2] <= window else ~hidden(q.shape[2], k.shape[2], window, q.device)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1,
                                                       scale=rule.scaling, enable_gqa=q.shape[1] != k.shape[1])
    return attend_later(q, k, v, rule, window)


def attend_later(q: Tensor, k: Tensor, v: Tensor, rule: Rule, window: int) -> Tensor:
    """Causal attention of the last q rows over all k rows, in full precision."""
    if not rule.softcap and rule.sinks is None:
        mask = None if q.shape[2] == 1 and not window else ~hidden(q.shape[2], k.shape[2], window, q.device)
        grouped_heads = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scaling, enable_gqa=grouped_heads)
    pieces = [(grouped(w, k.shape[1]) @ v.float()).reshape(*w.shape[:3], v.shape[3])
              for _, w in _weights_in_blocks(q, k, rule, window)]
    return torch.cat(pieces, dim=2).to(q.dtype)


def _weights_in_blocks(q: Tensor, k: Tensor, rule: Rule, window: int) -> Iterator[tuple[int, Tensor]]:
    """(first query, weights [B, Hq, block, T]) for a causal prompt, float32."""
    total = k.shape[2]
    mask = hidden(q.shape[2], total, window, q.device)
    keys = k.float().transpose(2, 3)
    for start in range(0, q.shape[2], BLOCK):
        part = q[:, :, start : start + BLOCK].float()
        scores = (grouped(part, k.shape[1]) @ keys).reshape(*part.shape[:3], total)
        logits = rule.logits(scores).masked_fill(mask[start : start + BLOCK], float("-inf"))
        yield start, rule.weights(logits)


def observe(prompt: Prompt, q: Tensor, rule: Rule) -> None:
    """Fill in what a policy asks about the prompt's attention weights: mass, last row, hits; in blocks of queries."""
    batch, heads, total = prompt.keys.shape[:3]
    mass = torch.zeros((batch, heads, total), device=q.device)
    hits = torch.zeros_like(mass)
    for start, weights in _weights_in_blocks(q, prompt.keys, rule, 0):
        mean = weights.reshape(batch, heads, -1, *weights.shape[2:]).mean(2)
        mass += mean.sum(2)
        seen = torch.arange(start + 1, start + 1 + mean.shape[2], device=q.device)
        hits += (mean > (1.0 / seen)[:, None]).sum(2)
        prompt.last = mean[:, :, -1]
    prompt.mass, prompt.hits = mass, hits
    prompt.seen_by = torch.arange(total, 0, -1, device=q.device)


def attend(store: Store, q: Tensor, rule: Rule) -> tuple[Tensor, Step]:
    """Attend the last m rows' queries [B, Hq, m, d] over everything the store holds (their own rows included).

    Returns the output [B, Hq, m, dv] and what the policy may look at.
    """
    m = q.shape[2]
    step = Step(seen=store.seen, rows=store.keys.rows, queries=q, new=m)
    if _is_plain(store):
        return attend_later(q, store.sides["k"].read(), store.sides["v"].read(), rule, 0), step
    ranges = store.live_ranges()
    live = [None, None] if ranges is None else [_visible(s, ranges, m, store.geometry.window) for s in store.sides.values()]
    rows = store.keys.rows if live[0] is None else live[0].shape[0]
    logits = rule.logits(_scores(store, q, live[0], rows))
    if store.policy is not None:
        state = {n: p.read() for n, p in store.state.items()}
        bias = store.policy.bias(state, store.seen - m, rows)
        logits = logits if bias is None else _add_bias(logits, bias)
        chosen = store.policy.attended(state, q, rows) if m == 1 else None
        logits = logits if chosen is None else _only(logits, chosen)
    if m > 1 or store.geometry.window:
        logits = logits.masked_fill(hidden(m, rows, store.geometry.window, q.device), float("-inf"))
    weights = rule.weights(logits)
    if store.policy is not None and store.policy.step_weights:
        step.weights = weights.reshape(weights.shape[0], store.geometry.n_kv_heads, -1, *weights.shape[2:]).mean(2)
    return _values(store, weights, live[-1]).to(q.dtype), step


def _visible(side: Side, ranges: list[tuple[int, int]], queries: int, window: int) -> Tensor | None:
    """Rows of a side that some of the queries may see: with several queries, those that only the first still sees too."""
    if window:
        low, high = ranges[0]
        ranges = [(max(0, low - queries + 1), high)]
    return side.visible(ranges)


def _is_plain(store: Store) -> bool:
    sides = store.sides.values()
    return store.policy is None and not store.geometry.window and all(s.plain and s.basis is None for s in sides) and not store.method.k.before_rope


def _add_bias(logits: Tensor, bias: Tensor) -> Tensor:
    groups = logits.shape[1] // bias.shape[1]
    return logits + bias.repeat_interleave(groups, dim=1)[:, :, None]


def _only(logits: Tensor, chosen: Tensor) -> Tensor:
    open_rows = torch.full_like(logits, float("-inf"))
    index = chosen.repeat_interleave(logits.shape[1] // chosen.shape[1], dim=1)[:, :, None]
    return open_rows.scatter(3, index, logits.gather(3, index))


def _scores(store: Store, q: Tensor, live: Tensor | None, rows: int) -> Tensor:
    """q k^T over the held keys, tile by tile, float32 [B, Hq, m, rows]; keys are never all reconstructed at once."""
    side, before = store.keys, store.method.k.before_rope
    maps, offset = side.maps()
    latent_q = None if maps is None or before else _into(q, maps)
    constant = None if offset is None or before else _against(q.float(), offset.float())
    at = store.row_positions(rows)
    pieces = []
    for start, tile in side.tiles():
        index = None if live is None else (live - start)[(live >= start) & (live < start + tile.shape[2])]
        tile = tile if index is None else tile.index_select(2, index)
        if before:
            here = sum(p.shape[3] for p in pieces)
            full = tile if maps is None else _out(tile, maps, offset)
            turned = store.around.rotation.rotate(full, _positions(at, here, full))  # type: ignore[union-attr]
            pieces.append(_against(q.float(), turned.float()))
        elif latent_q is None:
            pieces.append(_against(q.float(), tile.float()))
        else:
            scores = _against(latent_q, tile.float())
            pieces.append(scores if constant is None else scores + constant)
    return torch.cat(pieces, dim=3)


def _positions(at: Tensor, start: int, rows: Tensor) -> Tensor:
    batch, heads, count = rows.shape[:3]
    here = at[:, :, start : start + count]
    return here.expand(batch, heads, count) if here.shape[1] > 1 else here[:, 0].expand(batch, count)


def _against(q: Tensor, rows: Tensor) -> Tensor:
    """q [B, Hq, m, r] against rows [B, Hl, n, r] -> [B, Hq, m, n]."""
    found = grouped(q, rows.shape[1]) @ rows.transpose(2, 3)
    return found.reshape(*q.shape[:3], rows.shape[2])


def _into(q: Tensor, maps: Tensor) -> Tensor:
    """Queries in the latent: q @ map^T of their KV head, [B, Hq, m, r]."""
    found = grouped(q, maps.shape[1]).float() @ maps.float().transpose(2, 3)
    return found.reshape(*q.shape[:3], maps.shape[2])


def _out(coefficients: Tensor, maps: Tensor, offset: Tensor | None) -> Tensor:
    rows = coefficients.to(maps.dtype) @ maps
    return rows if offset is None else rows + offset


def _values(store: Store, weights: Tensor, live: Tensor | None) -> Tensor:
    """Weights times values, in the latent where there is a basis, mapped out once at the end."""
    side = store.sides["v"] if "v" in store.sides else store.keys
    if live is not None:
        spread = weights.new_zeros((*weights.shape[:3], side.rows))
        weights = spread.index_copy(3, live, weights)
    total: Tensor | None = None
    for start, tile in side.tiles():
        part = weights[..., start : start + tile.shape[2]]
        found = (grouped(part, tile.shape[1]) @ tile.float()).reshape(*part.shape[:3], tile.shape[3])
        total = found if total is None else total + found
    assert total is not None
    maps, offset = side.maps()
    if maps is None:
        return total
    out = (grouped(total, maps.shape[1]) @ maps.float()).reshape(*total.shape[:3], maps.shape[3])
    if offset is not None:
        shared = (grouped(weights.sum(-1, keepdim=True), maps.shape[1]) @ offset.float()).reshape(out.shape)
        out = out + shared
    return out
