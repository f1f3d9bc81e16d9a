"""How far methods are from what is possible, on a model's own rows: rate-distortion, Eckart-Young and attention bounds.

Limits are those of the rows as independent draws from a Gaussian of their covariance: rows that are not Gaussian, or
that resemble their neighbours, can be kept in less. Bounds on attention are proven, and checked on every case here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsim.distortion import least_error
from kvsim.evidence import stored_bits
from kvsim.method import Chain, Method, parse_method
from runtime.attention import grouped, hidden
from runtime.cache import CompressedCache
from runtime.parts import Prompt
from runtime.quality_forced import take_prompt
from runtime.quality_reference import LayerPrompt, Reference
from runtime.quality_run import Bench, Sizes
from runtime.quality_subjects import Subject, Text

METHODS = (
    "int8",
    "int4",
    "int(bits=4,group=32)",
    "int(bits=3)",
    "kivi-4",
    "kivi-2",
    "turboquant-4",
    "turboquant-3",
    "nvfp4",
    "mxfp4",
    "q8_0",
    "q4_0",
    "svd(rank=32)",
    "svd(rank=48)",
    "snapkv(budget=0.25)",
    "window(sinks=4,recent=252)",
    "window(sinks=0,recent=256)",
)
QUERIES = 32
"""Queries at the prompt's end whose attention is bounded."""


# -- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """One side of one layer: squared error relative to the centred energy, the limit at the same bits, and the room.

    gap_db: 10 log10(error / limit). gap_bits: bits a value beyond those that the limit needs for the same error.
    head_db: gap_db of each head by itself.
    """

    bits: float
    error: float
    limit: float
    gap_db: float
    gap_bits: float
    head_db: tuple[float, ...] = ()


def spectra(x: Tensor) -> Tensor:
    """Eigenvalues of the covariance of each head's rows, [B, H, d] ascending, from rows x [B, H, n, d]."""
    centred = x.double() - x.double().mean(2, keepdim=True)
    covariance = centred.mT @ centred / x.shape[2]
    return torch.linalg.eigvalsh(covariance).clamp_min(0)


def relative_error(x: Tensor, y: Tensor) -> Tensor:
    """||x - y||^2 over the energy of x about its mean, [B, H]."""
    centred = x.double() - x.double().mean(2, keepdim=True)
    return (x.double() - y.double()).square().sum((2, 3)) / centred.square().sum((2, 3))


def bits_needed(variances: Tensor, error: float) -> float:
    """Bits a value of the rate-distortion limit at a relative squared error: the inverse of `least_error`."""
    if error >= 1:
        return 0.0
    v = variances[variances > 0]
    low, high = math.log(1e-300), math.log(float(v.max()))
    wanted = error * float(v.sum())
    for _ in range(200):  # the error rises with the water level
        middle = (low + high) / 2
        low, high = (middle, high) if float(v.clamp_max(math.exp(middle)).sum()) < wanted else (low, middle)
    return float((0.5 * (v / math.exp(high)).log2()).clamp_min(0).sum()) / variances.numel()


def gap(x: Tensor, y: Tensor, bits: float) -> Gap:
    """Rows x [B, H, n, d] kept as y at `bits` a value; figures are means over sequences and heads."""
    values, errors = spectra(x).flatten(0, 1), relative_error(x, y)
    limits = torch.tensor([least_error(v.numpy(), bits) for v in values]).view(errors.shape)
    needed = [bits_needed(v, float(e)) for v, e in zip(values, errors.flatten(), strict=True)]
    error, limit = float(errors.mean()), float(limits.mean())
    heads = tuple(_db(float(e), float(r)) for e, r in zip(errors.mean(0), limits.mean(0), strict=True))
    return Gap(bits, error, limit, _db(error, limit), bits - sum(needed) / len(needed), heads)


def _db(error: float, limit: float) -> float:
    return 10 * math.log10(error / limit) if error > 0 else -math.inf


def tail_energy(x: Tensor, rank: int) -> Tensor:
    """Least squared error of a rank-r approximation of each head's rows (Eckart-Young), [B, H]; x [B, H, n, d]."""
    return torch.linalg.svdvals(x.double())[..., rank:].square().sum(-1)


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionBound:
    """Error of attention outputs ||o' - o|| [B, Hq, m] and two proven bounds.

    from_logits knows the errors of logits and the weights; from_norms only lengths of queries, key and value errors.
    """

    actual: Tensor
    from_logits: Tensor
    from_norms: Tensor


def attention_bound(
    q: Tensor, rows: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], scaling: float, unseen: Tensor | None = None
) -> AttentionBound:
    """Bound what errors in rows do to attention: q [B, Hq, m, d], (keys, values) [B, H, n, d] and the same as kept.

    o' - o = sum p'_j (v'_j - v_j) + sum (p'_j - p_j)(v_j - c) for any c, as both weights sum to one. With r the range
    of the logits' errors, weights change by at most 2 tanh(r / 4) in all: softmax is 1/4-Lipschitz from the logits'
    range to total variation, and contracts Hilbert's metric (Birkhoff 1957). |q e_j| <= ||q|| ||e_j|| gives the second.
    unseen: [m, n] True where a query does not see a row.
    """
    (k, v), (k2, v2) = rows, other
    heads, scores = k.shape[1], q.double()

    def logits(keys: Tensor) -> Tensor:
        found = (grouped(scores, heads) @ keys.double().mT).reshape(*q.shape[:3], keys.shape[2]) * scaling
        return found if unseen is None else found.masked_fill(unseen, -math.inf)

    def spread(x: Tensor) -> Tensor:  # a KV head's figures for each of its query heads
        return x.repeat_interleave(q.shape[1] // heads, dim=1)

    s, s2 = logits(k), logits(k2)
    p, p2 = torch.softmax(s, -1), torch.softmax(s2, -1)
    values, kept = spread(v.double()), spread(v2.double())
    actual = (p2 @ kept - p @ values).norm(dim=-1)
    value_error, key_error = (kept - values).norm(dim=-1), spread((k2 - k).double().norm(dim=-1))
    radius = (values - values.mean(2, keepdim=True)).norm(dim=-1)
    blind = torch.zeros(s.shape[2:], dtype=torch.bool) if unseen is None else unseen
    change = (s2 - s).masked_fill(blind, 0.0)
    top, bottom = (
        change.masked_fill(blind, f).amax(-1) if f < 0 else change.masked_fill(blind, f).amin(-1)
        for f in (-math.inf, math.inf)
    )

    def largest(x: Tensor) -> Tensor:  # of the rows that a query sees, [B, Hq, m]
        return x[:, :, None].expand_as(s).masked_fill(blind, 0.0).amax(-1)

    moved = 2 * torch.tanh((top - bottom) / 4) * largest(radius)
    from_logits = (p2 * value_error[:, :, None]).sum(-1) + moved
    reach = 2 * scaling * scores.norm(dim=-1) * largest(key_error)
    from_norms = largest(value_error) + 2 * torch.tanh(reach / 4) * largest(radius)
    return AttentionBound(actual, from_logits, from_norms)


def eviction_bound(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scaling: float, unseen: Tensor | None = None
) -> AttentionBound:
    """Bound what dropping rows does: kept [B, H, m'] (-1: none) of rows k, v [B, H, n, d], queries q [B, Hq, m, d].

    With D the weight that the dropped rows had, o - o' = D (mean of dropped values - mean of kept ones), each a
    weighted mean: at most D times the values' diameter, and at most 2 D times their radius (from_norms).
    """
    heads, n = k.shape[1], k.shape[2]
    stays = torch.zeros((*k.shape[:2], n + 1), dtype=torch.bool).scatter(
        2, kept.where(kept >= 0, torch.tensor(n)), True
    )[..., :n]
    stays = stays.repeat_interleave(q.shape[1] // heads, dim=1)[:, :, None]
    s = (grouped(q.double(), heads) @ k.double().mT).reshape(*q.shape[:3], n) * scaling
    if unseen is not None:
        s = s.masked_fill(unseen, -math.inf)
    p, p2 = torch.softmax(s, -1), torch.softmax(s.masked_fill(~stays, -math.inf), -1)
    values = v.double().repeat_interleave(q.shape[1] // heads, dim=1)
    dropped = (p * ~stays).sum(-1)
    centre = p2 @ values  # the kept rows' weighted mean: what is left of attention
    outside = p * ~stays / dropped.clamp_min(1e-300)[..., None]
    distance = torch.cdist(centre, values)
    radius = (values - values.mean(2, keepdim=True)).norm(dim=-1).amax(-1)[..., None]
    return AttentionBound(
        (centre - p @ values).norm(dim=-1), dropped * (outside * distance).sum(-1), 2 * dropped * radius
    )


# -- a report over methods ---------------------------------------------------------------------------------------------


def report(subject: Subject, text: Text, sizes: Sizes, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """Gaps and bounds of methods on a model's own rows, one entry a method: means over layers, and the worst layer."""
    bench = Bench(subject, text, Sizes(min(sizes.segments, 2), sizes.prompt, sizes.scored, 1, sizes.seed))
    rows = [measure(bench, bench.reference, parse_method(m)) for m in methods or METHODS]
    return {
        "model": subject.name,
        "model_hash": subject.hash,
        "text": text.name,
        "text_hash": text.hash,
        "methods": rows,
    }


def measure(bench: Bench, found: Reference, method: Method) -> dict[str, Any]:
    """One method: how its rows compare with the limits, and its attention with the bounds."""
    out: dict[str, Any] = {"method": str(method)}
    gaps: dict[str, list[Gap]] = {"k": [], "v": []}
    bounds: list[AttentionBound] = []
    tails: list[float] = []
    with CompressedCache(method, bench.subject.model, seed=bench.sizes.seed) as cache:
        take_prompt(cache, found)
        for layer, rows in zip(cache.layers, found.prompt, strict=True):
            q = rows.q[:, :, -QUERIES:]
            if method.tokens.drops != "none":
                # a layer that sees a window drops by position alone
                kept = None if layer.twins.policy is None else _kept(layer.twins.policy, rows)
                if kept is not None:
                    unseen = hidden(q.shape[2], rows.k.shape[2], 0, q.device)
                    bounds.append(eviction_bound(q, rows.k, rows.v, kept, rows.rule.scaling, unseen))
                continue
            k, v = layer.pieces[0].store.read()
            held = k.shape[2]
            q, before = q[:, :, -held:], (rows.k[:, :, -held:], rows.v[:, :, -held:])
            unseen = hidden(q.shape[2], held, 0, q.device)
            for side, x, y in zip("kv", before, (k, v), strict=True):
                gaps[side].append(gap(x, y, _side_bits(method, side, bench)))
                rank = getattr(getattr(method, side).basis, "rank", 0)
                if rank and method.k.format.name == "full" and not method.k.basis.joins_heads:
                    squares = (x.double() - y.double()).square().sum((2, 3))
                    tails.append(float((squares / tail_energy(x, rank)).mean()))
            bounds.append(attention_bound(q, before, (k, v), rows.rule.scaling, unseen))
    for side, each in gaps.items():
        if each:
            names = ("bits", "error", "limit", "gap_db", "gap_bits")
            out[side] = {n: sum(getattr(g, n) for g in each) / len(each) for n in names}
            out[side]["worst_db"] = max(g.gap_db for g in each)
            out[side]["layer_head_db"] = [list(g.head_db) for g in each]
    if tails:
        out["error_over_eckart_young"] = sum(tails) / len(tails)
    if bounds:
        out["attention"] = _tightness(bounds)
    return out


def _side_bits(method: Method, side: str, bench: Bench) -> float:
    """Stored bits a value of one side: those of the method with the other side full count that side at 16."""
    chain = method.k if side == "k" else method.v
    alone = Method(k=chain) if side == "k" else Method(v=chain.for_values() if isinstance(chain, Chain) else chain)
    return 2 * stored_bits(alone, bench.sizes.prompt, 0, bench.spec) - 16.0


def _kept(policy: Any, rows: LayerPrompt) -> Tensor | None:
    prompt = Prompt(rows.k, rows.v, rows.rule.scaling)
    prompt.queries = rows.q[:, :, -policy.prompt_queries :] if policy.prompt_queries else None
    if policy.prompt_weights:
        rows.weighed(prompt)
    kept: Tensor | None = policy.select(prompt)
    return kept


def _tightness(bounds: list[AttentionBound]) -> dict[str, Any]:
    """How many cases break a bound (none may), and by what factor bounds exceed what happened."""
    actual, logits, norms = (
        torch.cat([getattr(b, n).flatten() for b in bounds]) for n in ("actual", "from_logits", "from_norms")
    )
    slack = 1e-6 * norms.max()
    seen = actual > slack
    return {
        "cases": actual.numel(),
        "broken": int((actual > logits + slack).sum() + (actual > norms + slack).sum()),
        "mean_error": float(actual.mean()),
        "bound_over_actual": float((logits[seen] / actual[seen]).median()) if bool(seen.any()) else 1.0,
        "norm_bound_over_actual": float((norms[seen] / actual[seen]).median()) if bool(seen.any()) else 1.0,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table."""
    side = "bits    error  gap dB  bits"
    head = f"{'method':33} keys: {side} | values: {side} | bound / actual (broken)"
    out = [
        f"{found['model']} on {found['text']}: distance to the Gaussian rate-distortion limit of each head's rows",
        head,
    ]
    for row in found["methods"]:
        cells = []
        for side in ("k", "v"):
            g = row.get(side)
            cells.append(
                f"{g['bits']:10.2f} {g['error']:8.2g} {g['gap_db']:7.1f} {g['gap_bits']:5.2f}" if g else " " * 33
            )
        a = row.get("attention")
        tight = (
            f"{a['bound_over_actual']:.1f}, by norms {a['norm_bound_over_actual']:.0f} ({a['broken']} of {a['cases']})"
            if a
            else ""
        )
        extra = (
            f"  error / Eckart-Young {row['error_over_eckart_young']:.4f}" if "error_over_eckart_young" in row else ""
        )
        out.append(f"{row['method'][:33]:33} {cells[0]} | {cells[1]} | {tight}{extra}")
    return out
