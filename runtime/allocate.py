"""Bits, ranks or tokens handed to layers and sides by what they lose, under a byte budget; tried on text held out.

Each group (a layer's keys, its values, or the layer) has options with a measured loss and a cost; `kvsim.allocation`
chooses. The answer is an ordinary method with clauses for layers, so it is predicted and run like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.allocation import Allocation, exact, within
from kvsim.errors import KvsimError
from kvsim.evidence import stored_bits
from kvsim.method import Method, parse_method
from runtime.attention import hidden
from runtime.bounds import QUERIES, eviction_bound
from runtime.cache import CompressedCache
from runtime.parts import Prompt
from runtime.quality_forced import take_prompt
from runtime.quality_reference import Reference, reference
from runtime.quality_run import PIECES, Bench, Sizes
from runtime.quality_subjects import Subject, Text
from runtime.sensitivity import KINDS, Weights, loss, weights

WIDTHS = (2, 3, 4, 5, 6, 8)
RANKS = (16, 24, 32, 40, 48, 56)
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
EXACT_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class Table:
    """Losses [groups, options] and costs [options] of what may be chosen; sides: groups are (layer, side) pairs."""

    options: tuple[str, ...]
    losses: np.ndarray
    costs: np.ndarray
    sides: bool
    uniform: int

    @property
    def budget(self) -> int:
        """What the uniform choice costs."""
        return int(self.costs[self.uniform]) * len(self.losses)

    def chosen(self) -> Allocation:
        """The allocation of least loss at the uniform choice's cost: exact where the table is small enough."""
        cells = len(self.losses) * self.budget
        return (exact if cells <= EXACT_CELLS else within)(self.losses, self.costs, self.budget)

    def method(self, choice: Sequence[int]) -> Method:
        """The written form: the commonest layer's choice first, a clause for every other run of layers."""
        per = 2 if self.sides else 1
        layers = [tuple(int(c) for c in choice[i : i + per]) for i in range(0, len(choice), per)]
        texts = [self.options[c[0]] if per == 1 else f"k:{self.options[c[0]]} v:{self.options[c[1]]}" for c in layers]
        common = max(set(texts), key=lambda t: (texts.count(t), t))
        clauses, start = [], 0
        for i in range(1, len(texts) + 1):
            if i == len(texts) or texts[i] != texts[start]:
                if texts[start] != common:
                    clauses.append(f"layers={start}-{i - 1}: {texts[start]}")
                start = i
        return parse_method("; ".join([common, *clauses]))


def bits_table(model: Any, found: Reference, weigh: Weights, uniform: int = 4, group: int = 32) -> Table:
    """Bit widths of keys and values of each layer; the cost is in bits a value, scales included."""
    options = tuple(f"int(bits={b},group={group})" for b in WIDTHS)
    return Table(
        options, _losses(model, found, weigh, options), np.array(WIDTHS) + 32 // group, True, WIDTHS.index(uniform)
    )


def rank_table(model: Any, found: Reference, weigh: Weights, uniform: int = 32) -> Table:
    """Ranks of keys and values of each layer; the cost is the rank."""
    options = tuple(f"svd(rank={r})" for r in RANKS)
    return Table(options, _losses(model, found, weigh, options), np.array(RANKS), True, RANKS.index(uniform))


def _losses(model: Any, found: Reference, weigh: Weights, options: Sequence[str]) -> np.ndarray:
    table = np.zeros((2 * len(found.prompt), len(options)))
    for column, text in enumerate(options):
        with CompressedCache(text, model) as cache:
            take_prompt(cache, found)
            for index, (layer, rows, (wk, wv)) in enumerate(zip(cache.layers, found.prompt, weigh, strict=True)):
                k, v = layer.pieces[0].store.read()
                table[2 * index, column] = loss(wk, rows.k, k)
                table[2 * index + 1, column] = loss(wv, rows.v, v)
    return table


def token_table(model: Any, found: Reference, uniform: float = 0.25, policy: str = "snapkv") -> Table:
    """Budgets of a prompt policy for each layer; the loss is the relative squared error of attention outputs."""
    options = tuple(f"{policy}(budget={s})" for s in SHARES)
    table = np.zeros((len(found.prompt), len(options)))
    unseen = hidden(QUERIES, found.prompt_tokens, 0, torch.device("cpu"))
    for column, text in enumerate(options):
        with CompressedCache(text, model) as cache:
            for index, (layer, rows) in enumerate(zip(cache.layers, found.prompt, strict=True)):
                policy_twin = layer.twins.policy
                prompt = Prompt(rows.k, rows.v, rows.rule.scaling, queries=rows.q[:, :, -policy_twin.prompt_queries :])
                kept = policy_twin.select(prompt)
                if kept is not None:
                    bound = eviction_bound(rows.q[:, :, -QUERIES:], rows.k, rows.v, kept, rows.rule.scaling, unseen)
                    size = _output_size(rows.q[:, :, -QUERIES:], rows, unseen)
                    table[index, column] = float((bound.actual / size).square().mean())
    costs = np.array([round(100 * s) for s in SHARES])
    return Table(options, table, costs, False, SHARES.index(uniform))


def _output_size(q: Tensor, rows: Any, unseen: Tensor) -> Tensor:
    nothing = torch.zeros((*rows.k.shape[:2], 1), dtype=torch.int64)
    one = eviction_bound(q, rows.k, rows.v - rows.v[:, :, :1], nothing, rows.rule.scaling, unseen)
    return one.actual.clamp_min(1e-9)  # the output's distance from the first value: its size, whatever the offset


def report(subject: Subject, text: Text, sizes: Sizes, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """Uniform against allocated at equal bytes, on segments that the allocation has not seen; by sensitivity."""
    if methods:
        raise KvsimError("quality --allocate chooses its own methods; leave --methods out")
    bench = Bench(subject, text, sizes)
    pieces = torch.stack(text.between(sizes.segments, sizes.length, PIECES, 385)[:2])
    seen = reference(subject.model, pieces, 384 - 16)
    prompts = pieces[:, : seen.prompt_tokens]
    rows: list[dict[str, Any]] = []
    by_kind = {kind: weights(subject.model, prompts, kind) for kind in KINDS}
    for kind, weigh in by_kind.items():
        rows += _compared(bench, f"bits, {kind}", bits_table(subject.model, seen, weigh))
    rows += _compared(bench, "ranks, gradient", rank_table(subject.model, seen, by_kind["gradient"], 48))
    rows += _compared(bench, "tokens, attention", token_table(subject.model, seen))
    return {"model": subject.name, "model_hash": subject.hash, "text": text.name, "text_hash": text.hash, "rows": rows}


def _compared(bench: Bench, name: str, table: Table) -> list[dict[str, Any]]:
    found = table.chosen()
    uniform = table.method([table.uniform] * len(table.losses))
    rows = []
    for what, method in (("uniform", uniform), ("allocated", table.method(found.choice.tolist()))):
        row = bench.measure(method)
        estimate = found.loss if what == "allocated" else float(table.losses[:, table.uniform].sum())
        rows.append(
            {
                "by": name,
                "what": what,
                "method": str(method),
                "kl": row.kl,
                "kl_low": row.kl_low,
                "kl_high": row.kl_high,
                "segment_kl": list(row.segment_kl),
                "top1": row.top1,
                "ppl_ratio": row.ppl_ratio,
                "estimated_loss": estimate,
                "bits": stored_bits(method, bench.sizes.prompt, bench.sizes.scored, bench.spec),
                "optimal": found.optimal,
            }
        )
    return rows


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table."""
    out = [
        f"{found['model']} on {found['text']}: the same bytes, uniform and allocated, on held-out segments",
        f"{'by':22} {'choice':10} {'bits':>6} {'KL':>9} {'95% interval':>19} {'top-1':>7} {'ppl x':>7}",
    ]
    for r in found["rows"]:
        between = f"{r['kl_low']:.2g} - {r['kl_high']:.2g}"
        out.append(
            f"{r['by']:22} {r['what']:10} {r['bits']:6.2f} {r['kl']:9.2g} {between:>19} {r['top1']:7.3f} "
            f"{r['ppl_ratio']:7.3f}"
        )
    return out
