"""Known tokens through a compressed cache: every query sees what it would see were the tokens to come one by one.

Text is known beforehand, so a layer can take all its tokens at once as long as query i is shown the rows as they stood
at step i. Where rows are encoded once and leave by position, that is a matter of masks; otherwise the layer's own steps
are run one after another, which is exact for every method and slower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.attention import Rule, grouped
from runtime.cache import CompressedCache
from runtime.latent import rebuild
from runtime.layers import CompressedLayer
from runtime.parts import Prompt
from runtime.positional import Positional
from runtime.prompt import stores
from runtime.quality_reference import Reference
from runtime.side import Side
from runtime.store import Store

NEVER = 2**62


class Forced:
    """Stands in for a layer's `attend` while text is scored; keeps the attention outputs of the scored tokens."""

    def __init__(self, layer: CompressedLayer, stepwise: bool = False) -> None:
        self.layer, self.stepwise = layer, stepwise
        self.outputs: Tensor | None = None

    def attend(self, query: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Attention [B, Hq, m, dv] of the pending rows' queries."""
        layer = self.layer
        if not layer.pieces:
            return CompressedLayer.attend(layer, query, padding, rule)
        assert layer.pending is not None
        (k, v, positions), layer.pending = layer.pending, None
        with torch.inference_mode(False), torch.no_grad():
            at_once = not self.stepwise and all(static(p.store) for p in layer.pieces)
            self.outputs = (self._at_once if at_once else self._one_by_one)(query, k, v, positions, rule)
        return self.outputs

    def _one_by_one(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        found = []
        for i in range(q.shape[2]):
            at = slice(i, i + 1)
            found.append(self.layer._step(q[:, :, at], k[:, :, at], v[:, :, at], positions[:, at], rule))
            self.layer.seen += 1
        return torch.cat(found, dim=2)

    def _at_once(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule) -> Tensor:
        layer, out = self.layer, q.new_empty((*q.shape[:3], v.shape[3]))
        group = layer.geometry.group
        for piece in layer.pieces:
            rows: Any = slice(None) if len(piece.sequences) == layer.batch_size else piece.sequences
            heads = slice(piece.heads.start * group, piece.heads.stop * group)
            own = replace(rule, sinks=None if rule.sinks is None else rule.sinks[heads])
            new = (k[rows, piece.heads], v[rows, piece.heads], positions[rows])
            out[rows, heads] = over_time(piece.store, q[rows, heads], *new, own, layer.method.protocol == "on_write")
        layer.seen += q.shape[2]
        return out


def static(store: Store) -> bool:
    """Whether what a query sees of a store follows from counts alone."""
    tokens = store.method.tokens
    if store.joint or any(not s.ready or s.chain.basis.rewrites_rows for s in store.sides.values()):
        return False
    if store.policy is None:
        return True
    if isinstance(store.policy, Positional):
        return True
    return tokens.drops == "prefill" and not tokens.merges and not store.state


def over_time(
    store: Store, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: Rule, written_first: bool
) -> Tensor:
    """Append rows [B, H, m, d] to a store and attend their queries, each over the rows as they stood at its step.

    written_first: what a step attends to is encoded before (protocol on_write), not after.
    """
    m, before, seen = q.shape[2], store.keys.appended, store.seen
    starts = {name: side.encoded_rows for name, side in store.sides.items()}
    store.append(k, v, positions)
    late = {name: _rest(side) for name, side in store.sides.items()}
    store.settle()
    rows = store.keys.rows  # nothing leaves: what position hides is hidden by the mask
    visible = _visible(store, rows, m, seen, q.device)
    views = {}
    for name, side in store.sides.items():
        early = _full_width(side, _encoded(side))
        counts = [_encoded_at(side, before + i + written_first, starts[name]) for i in range(m)]
        views[name] = (early, _full_width(side, late[name]), starts[name], torch.tensor(counts, device=q.device))
    if store.method.k.before_rope:
        views["k"] = _turned(store, views["k"], rows)
    out = _attended(views["k"], views.get("v", views["k"]), visible, q, rule)
    return out.to(q.dtype)


View = tuple[Tensor, Tensor, int, Tensor]
"""Encoded rows from row 0 on; full-precision rows from `start` on; start; how many rows each query sees encoded."""


def _rest(side: Side) -> Tensor:
    assert side.rest is not None
    return side.rest.read().clone()


def _encoded(side: Side) -> Tensor:
    tiles = [tile for start, tile in side.tiles() if start < side.encoded_rows]
    if tiles:
        return torch.cat(tiles, dim=2)
    assert side.rest is not None
    return side.rest.read()[:, :, :0]


def _full_width(side: Side, coefficients: Tensor) -> Tensor:
    maps, offset = side.maps()
    return coefficients.float() if maps is None else rebuild(coefficients, maps, offset).float()


def _encoded_at(side: Side, appended: int, least: int) -> int:
    """Rows encoded once so many were appended."""
    return least if side.plain else max(least, int(side.chain.format.quantized(appended)))


def _turned(store: Store, view: View, rows: int) -> View:
    early, late, start, counts = view
    assert store.around.rotation is not None
    at = store.row_positions(rows).expand(early.shape[0], early.shape[1], -1)
    turn = store.around.rotation.rotate
    return turn(early, at[:, :, : early.shape[2]]), turn(late, at[:, :, start:]), start, counts


def _visible(store: Store, rows: int, m: int, seen: int, device: torch.device) -> Tensor:
    """[m, rows], True where query i may see row j."""
    row = torch.arange(rows, device=device)[None]
    own = torch.arange(rows - m, rows, device=device)[:, None]
    found = row <= own
    if store.geometry.window:
        return found & (row > own - store.geometry.window)
    if not isinstance(store.policy, Positional):
        return found
    held = store.policy.held(seen)
    absolute = torch.cat([torch.from_numpy(held), torch.arange(seen, seen + m)])
    for i in range(m):
        stays = torch.from_numpy(store.policy.stays(absolute.numpy(), seen + i)).to(device)
        found[i] &= stays | (row[0] == own[i, 0])
    return found


def _attended(keys: View, values: View, visible: Tensor, q: Tensor, rule: Rule) -> Tensor:
    batch, query_heads, m, _ = q.shape
    rows = visible.shape[1]

    def products(x: Tensor) -> Tensor:
        return (grouped(q.float(), x.shape[1]) @ x.transpose(2, 3)).reshape(batch, query_heads, m, x.shape[2])

    early, late, start, counts = keys
    older, newer = products(early), products(late)
    both = older.shape[3] - start  # rows that some queries see encoded and others not
    stored = torch.arange(start, start + both, device=q.device)[None] < counts[:, None]
    middle = torch.where(stored, older[..., start:], newer[..., :both])
    scores = torch.cat([older[..., :start], middle, newer[..., both:]], dim=3)
    weights = rule.weights(rule.logits(scores).masked_fill_(~visible, float("-inf")))
    early, late, start, counts = values
    stored = torch.arange(rows, device=q.device)[None] < counts[:, None]
    total = _weighted(weights[..., start:] * ~stored[:, start:], late)
    if early.shape[2]:
        total = total + _weighted(weights[..., : early.shape[2]].mul_(stored[:, : early.shape[2]]), early)
    return total


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    batch, query_heads, m, _ = weights.shape
    return (grouped(weights, values.shape[1]) @ values).reshape(batch, query_heads, m, values.shape[3])


def take_prompt(cache: CompressedCache, found: Reference) -> None:
    """Fill a new cache with a prompt that a full-precision forward left behind, as its own prefill would have."""
    positions = found.prompt_positions
    everyone = torch.arange(len(positions))
    with torch.no_grad():
        for layer, seen in zip(cache.layers, found.prompt, strict=True):
            layer.lazy_initialization(seen.k, seen.v)
            twins, policy = layer.twins, layer.twins.policy
            prompt = Prompt(seen.k, seen.v, seen.rule.scaling, rotation=twins.around.rotation, positions=positions)
            prompt.scores = layer.scores
            if policy is not None:
                prompt.queries = seen.q[:, :, -policy.prompt_queries :] if policy.prompt_queries else None
                if policy.prompt_weights:
                    seen.weighed(prompt)
            layer.pieces = stores(twins, everyone, prompt, positions)
            layer.seen = found.prompt_tokens
