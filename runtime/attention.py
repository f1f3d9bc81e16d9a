"""Attention over a store: the prompt in full precision, later steps over packed rows, latent where the basis allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runtime import kernels, leaving
from runtime.latent import rebuild
from runtime.parts import Prompt, Step
from runtime.store import Store

BLOCK = 512
"""Query rows whose weights are formed at once."""


@dataclass(frozen=True)
class Rule:
    """How scores become weights: scaling, soft cap of the logits (0 = none), and a sink logit a head (gpt-oss)."""

    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention computes it."""
        return not self.softcap and self.sinks is None

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


def mean_group(weights: Tensor, heads: int) -> Tensor:
    """[B, Hq, m, n] -> [B, heads, m, n], the mean over the query heads of a KV head."""
    return weights.reshape(weights.shape[0], heads, -1, *weights.shape[2:]).mean(2)


def hidden(
    queries: int, rows: int, window: int, device: torch.device, first: int = 0, count: int | None = None
) -> Tensor:
    """True where a query must not see a row: the future, or beyond the window; [count, rows].

    Query i is row rows - queries + i; those from `first` on are asked for.
    """
    stop = queries if count is None else min(first + count, queries)
    at = torch.arange(rows - queries + first, rows - queries + stop, device=device)[:, None]
    row = torch.arange(rows, device=device)[None]
    return (row > at) | (row <= at - window) if window else row > at


# -- full precision ------------------------------------------------------------------------------------------------


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule, window: int) -> Tensor:
    """Causal attention of the last rows' queries q [B, Hq, m, d] over all rows k, v [B, H, n, d] in full precision."""
    m, n = q.shape[2], k.shape[2]
    if not rule.plain:
        pieces = [
            (grouped(w, v.shape[1]) @ v.float()).reshape(*w.shape[:3], v.shape[3])
            for _, w in _weights_in_blocks(q, k, rule, window)
        ]
        return torch.cat(pieces, dim=2).to(q.dtype)
    causal, past_window = m == n > 1, bool(window) and n > window
    mask = None if (m == 1 or causal) and not past_window else ~hidden(m, n, window, q.device)
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=rule.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _weights_in_blocks(q: Tensor, k: Tensor, rule: Rule, window: int) -> Iterator[tuple[int, Tensor]]:
    """(first query, weights [B, Hq, block, n]) of the last rows' queries, float32."""
    queries, total = q.shape[2], k.shape[2]
    keys = k.float().transpose(2, 3)
    for start in range(0, queries, BLOCK):
        part = q[:, :, start : start + BLOCK].float()
        scores = (grouped(part, k.shape[1]) @ keys).reshape(*part.shape[:3], total)
        unseen = hidden(queries, total, window, q.device, start, BLOCK)
        yield start, rule.weights(rule.logits(scores).masked_fill(unseen, float("-inf")))


def observe(prompt: Prompt, q: Tensor, rule: Rule) -> None:
    """Fill in what a policy asks about the prompt's attention weights: mass, last row, hits; in blocks of queries."""
    batch, heads, total = prompt.keys.shape[:3]
    mass = torch.zeros((batch, heads, total), device=q.device)
    hits = torch.zeros_like(mass)
    for start, weights in _weights_in_blocks(q, prompt.keys, rule, 0):
        mean = mean_group(weights, heads)
        mass += mean.sum(2)
        seen = torch.arange(start + 1, start + 1 + mean.shape[2], device=q.device)
        hits += (mean > (1.0 / seen)[:, None]).sum(2)
        prompt.last = mean[:, :, -1]
    prompt.mass, prompt.hits = mass, hits
    prompt.seen_by = torch.arange(total, 0, -1, device=q.device)


# -- over a store ----------------------------------------------------------------------------------------------------


def attend(store: Store, q: Tensor, rule: Rule) -> tuple[Tensor, Step]:
    """Attend the last m rows' queries [B, Hq, m, d] over everything the store holds (their own rows included).

    Returns the output [B, Hq, m, dv] and what the policy may look at.
    """
    step = Step(seen=store.seen, rows=store.keys.rows, queries=q, new=q.shape[2])
    if (fused := kernels.decode(store, q, rule)) is not None:
        return fused, step
    if _is_plain(store):
        return attend_rows(q, store.keys.rest.read(), store.values.rest.read(), rule, 0), step  # type: ignore[union-attr]
    if store.joint:
        q = store.mixed_queries(q)
        step.queries = q
    pieces = [_attend_block(store, q, rule, start) for start in range(0, q.shape[2], BLOCK)]
    if store.policy is not None and store.policy.step_weights:
        step.weights = torch.cat([mean_group(w, store.geometry.n_kv_heads) for _, w in pieces], dim=2)
    return torch.cat([out for out, _ in pieces], dim=2).to(q.dtype), step


def _is_plain(store: Store) -> bool:
    untouched = all(s.plain and s.basis is None and s.rest is not None for s in store.sides.values())
    return untouched and store.policy is None and not store.geometry.window and not store.method.k.before_rope


def _attend_block(store: Store, q: Tensor, rule: Rule, start: int) -> tuple[Tensor, Tensor]:
    """Output and weights [B, Hq, block, rows] of the queries from `start` on."""
    m, part = q.shape[2], q[:, :, start : start + BLOCK]
    live = _live(store, m)
    rows = store.keys.rows if live[0] is None else live[0].shape[0]
    logits = rule.logits(_scores(store, part, live[0], rows))
    if store.policy is not None:
        logits = _guided(store, logits, q)
    if m > 1 or store.geometry.window:
        unseen = hidden(m, rows, store.geometry.window, q.device, start, BLOCK)
        logits = logits.masked_fill(unseen, float("-inf"))
    weights = rule.weights(logits)
    return _values(store, weights, live[-1]), weights


def _live(store: Store, queries: int) -> list[Tensor | None]:
    """For each side the rows that some of the queries may see, None where all: dead rows may wait for their unit."""
    appended = store.keys.appended
    if store.geometry.window:
        ranges = [(max(0, appended - store.geometry.window - queries + 1), appended)]
    else:
        # nothing is dropped before the step, and any steps that wait, are over
        settled = appended - queries - sum(step.new for step in store.waiting)
        before = store.ranges_after(settled)
        if before is None:
            return [None]
        ranges = [*before, (settled, appended)]
    sides = [store.keys] if store.values is store.keys else [store.keys, store.values]
    return [leaving.visible(side, ranges) for side in sides]


def _guided(store: Store, logits: Tensor, q: Tensor) -> Tensor:
    """Logits with the policy's bias, and only those of the rows that it reads."""
    assert store.policy is not None
    state, rows, m = store.state_tensors(), logits.shape[3], q.shape[2]
    bias = store.policy.bias(state, store.settled_seen - m, rows)
    if bias is not None:
        logits = logits + bias.repeat_interleave(logits.shape[1] // bias.shape[1], dim=1)[:, :, None]
    chosen = store.policy.attended(state, q, rows) if m == 1 and not store.waiting else None
    if chosen is None:
        return logits
    index = chosen.repeat_interleave(logits.shape[1] // chosen.shape[1], dim=1)[:, :, None]
    return torch.full_like(logits, float("-inf")).scatter(3, index, logits.gather(3, index))


def _scores(store: Store, q: Tensor, live: Tensor | None, rows: int) -> Tensor:
    """q k^T over the held keys, tile by tile, float32 [B, Hq, m, rows]; keys are never all reconstructed at once."""
    side, before = store.keys, store.method.k.before_rope
    maps, offset = side.maps()
    latent_q = None if maps is None or before else _into(q, maps)
    constant = None if offset is None or before else _against(q.float(), offset.float())
    at = store.row_positions(rows) if before else None
    pieces: list[Tensor] = []
    done = 0
    for start, tile in side.tiles():
        shown = tile if live is None else tile.index_select(2, _inside(live, start, tile.shape[2]))
        if at is not None:
            full = shown if maps is None else rebuild(shown, maps, offset)
            here = at[:, :, done : done + full.shape[2]].expand(*full.shape[:2], -1)
            turned = store.around.rotation.rotate(full, here if at.shape[1] > 1 else here[:, 0])  # type: ignore[union-attr]
            pieces.append(_against(q.float(), turned.float()))
        elif latent_q is None:
            pieces.append(_against(q.float(), shown.float()))
        else:
            scores = _against(latent_q, shown.float())
            pieces.append(scores if constant is None else scores + constant)
        done += shown.shape[2]
    return torch.cat(pieces, dim=3)


def _inside(live: Tensor, start: int, count: int) -> Tensor:
    """Which rows of a tile are live."""
    return (live - start)[(live >= start) & (live < start + count)]


def _against(q: Tensor, rows: Tensor) -> Tensor:
    """q [B, Hq, m, r] against rows [B, Hl, n, r] -> [B, Hq, m, n]."""
    found = grouped(q, rows.shape[1]) @ rows.transpose(2, 3)
    return found.reshape(*q.shape[:3], rows.shape[2])


def _into(q: Tensor, maps: Tensor) -> Tensor:
    """Queries in the latent: q @ map^T of their KV head, [B, Hq, m, r]."""
    found = grouped(q, maps.shape[1]).float() @ maps.float().transpose(2, 3)
    return found.reshape(*q.shape[:3], maps.shape[2])


def _values(store: Store, weights: Tensor, live: Tensor | None) -> Tensor:
    """Weights times values, in the latent where there is a basis, mapped out once at the end."""
    side = store.values
    if live is not None:
        spread = weights.new_zeros((*weights.shape[:3], side.rows))
        weights = spread.index_copy(3, live, weights)
    total: Tensor | None = None
    for start, tile in side.tiles():
        part = weights[..., start : start + tile.shape[2]]
        found = (grouped(part, tile.shape[1]) @ tile.float()).reshape(*part.shape[:3], tile.shape[3])
        total = found if total is None else total + found
    assert total is not None
    maps, offset = store.value_maps()
    if maps is None:
        return total
    out = (grouped(total, maps.shape[1]) @ maps.float()).reshape(*total.shape[:3], maps.shape[3])
    if offset is not None:
        shared = grouped(weights.sum(-1, keepdim=True), maps.shape[1]) @ offset.float()
        out = out + shared.reshape(out.shape)
    return out
