"""Bits, ranks or tokens handed out by what they lose, under a byte budget; tried on text held out.

Each group (a layer, its keys or values, one of their heads, or a channel group of a head) has options with a measured
loss and a cost; `kvsim.allocation` chooses. The answer is an ordinary method with clauses for layers, so it is
predicted and run like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.allocation import Allocation, exact, within
from kvsim.errors import KvsimError
from kvsim.evidence import stored_bits
from kvsim.formats.int import Int
from kvsim.formats.widths import Widths
from kvsim.layout import layer_keys, layer_layout
from kvsim.method import Method, parse_method
from kvsim.parts import Place
from runtime.attention import hidden
from runtime.bounds import QUERIES, eviction_bound
from runtime.cache import CompressedCache
from runtime.parts import Prompt
from runtime.quality_forced import take_prompt
from runtime.quality_reference import Reference, reference
from runtime.quality_run import PIECES, Bench, Sizes
from runtime.quality_subjects import Subject, Text
from runtime.sensitivity import KINDS, Weights, losses, weights

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUP = 32
"""Channels that share a scale: the groups that bits are handed to."""
RANKS = (16, 24, 32, 40, 48, 56)
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
EXACT_CELLS = 2**22
GRAINS = {"layer": "allocated", "head": "by head", "group": "by group"}
"""What bits are handed to within a layer's keys or values: all heads together, each head, each channel group."""


@dataclass(frozen=True, eq=False)
class Table:
    """Losses and costs [groups, options] of what may be chosen.

    where: the layer and side ("" for both) of each group; those of one layer and side follow one another, head by head.
    """

    options: tuple[str, ...]
    losses: np.ndarray
    costs: np.ndarray
    where: tuple[tuple[int, str], ...]
    uniform: int

    @property
    def budget(self) -> int:
        """What the uniform choice costs."""
        return int(self.costs[:, self.uniform].sum())

    def chosen(self) -> Allocation:
        """The allocation of least loss at the uniform choice's cost: exact where the table is small enough."""
        unit = max(1, int(np.gcd.reduce(self.costs, axis=None)))
        cells = len(self.losses) * (self.budget // unit)
        return (exact if cells <= EXACT_CELLS else within)(self.losses, self.costs // unit, self.budget // unit)

    def method(self, choice: Sequence[int]) -> Method:
        """The written form: the commonest layer's choice first, a clause for every other run of layers."""
        taken: dict[tuple[int, str], list[str]] = {}
        for at, option in zip(self.where, choice, strict=True):
            taken.setdefault(at, []).append(self.options[int(option)])
        texts = []
        for layer in range(1 + max(layer for layer, _ in taken)):
            sides = [f"{side}:{_joined(held)}" if side else held[0] for (n, side), held in taken.items() if n == layer]
            texts.append(" ".join(sides))
        common = max(set(texts), key=lambda t: (texts.count(t), t))
        clauses, start = [], 0
        for i in range(1, len(texts) + 1):
            if i == len(texts) or texts[i] != texts[start]:
                if texts[start] != common:
                    clauses.append(f"layers={start}-{i - 1}: {texts[start]}")
                start = i
        return parse_method("; ".join([common, *clauses]))


def _joined(options: Sequence[str]) -> str:
    """One side's format from those of its heads or groups."""
    if len(set(options)) == 1:
        return options[0]
    forms = [parse_method(text).k.format for text in options]
    assert all(isinstance(f, Int) for f in forms)
    return str(Widths(bits=tuple(f.bits for f in forms), group=forms[0].group))  # type: ignore[attr-defined]


def bits_table(model: Any, found: Reference, weigh: Weights, uniform: int = 4, grain: str = "layer") -> Table:
    """Bit widths of keys and values of each layer, head or channel group; the cost is in bits of a sequence's rows."""
    options = tuple(f"int(bits={b},group={GROUP})" for b in WIDTHS)
    rows, costs, where = [], [], []
    for (layer, side), (each, sizes, held) in _losses(model, found, weigh, options).items():
        lost, size = each, np.tile(sizes, (len(each), 1))  # [heads, groups, options], [heads, groups]
        if grain != "group":
            lost, size = lost.sum(1, keepdims=True), size.sum(1, keepdims=True)
        if grain == "layer":
            lost, size = lost.sum(0, keepdims=True), size.sum(0, keepdims=True)
        rows.append(lost.reshape(-1, len(options)))
        costs.append(held * size.reshape(-1, 1) * np.array(WIDTHS))
        where += [(layer, side)] * len(rows[-1])
    return Table(options, np.concatenate(rows), np.concatenate(costs), tuple(where), WIDTHS.index(uniform))


def rank_table(model: Any, found: Reference, weigh: Weights, uniform: int = 32) -> Table:
    """Ranks of keys and values of each layer; the cost is the rank."""
    options = tuple(f"svd(rank={r})" for r in RANKS)
    by_side = _losses(model, found, weigh, options)
    table = np.stack([each.sum((0, 1)) for each, _, _ in by_side.values()])
    costs = np.tile(np.array(RANKS), (len(table), 1))
    return Table(options, table, costs, tuple(by_side), RANKS.index(uniform))


def _losses(
    model: Any, found: Reference, weigh: Weights, options: Sequence[str]
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray, int]]:
    """For each layer and side: losses [heads, channel groups, options], channels of each group, rows held."""
    table: dict[tuple[int, str], list[np.ndarray]] = {}
    facts = {}
    for text in options:
        with CompressedCache(text, model) as cache:
            take_prompt(cache, found)
            for index, (layer, rows, pair) in enumerate(zip(cache.layers, found.prompt, weigh, strict=True)):
                read = layer.pieces[0].store.read()
                for side, x, y, weight in zip("kv", (rows.k, rows.v), read, pair, strict=True):
                    at = (index, side)
                    table.setdefault(at, []).append(losses(weight, x, y, GROUP).numpy())
                    sizes = [len(c) for c in torch.arange(x.shape[3]).split(GROUP)]
                    facts[at] = np.array(sizes), y.shape[2]
    return {at: (np.stack(each, axis=-1), *facts[at]) for at, each in table.items()}


def token_table(model: Any, found: Reference, tokens: int, uniform: float = 0.25, policy: str = "snapkv") -> Table:
    """Budgets of a prompt policy for each layer; the loss is the relative squared error of attention outputs.

    The cost is in rows kept of a prompt of `tokens`.
    """
    options = tuple(f"{policy}(budget={s})" for s in SHARES)
    table = np.zeros((len(found.prompt), len(options)))
    kept_rows = [int(parse_method(text).tokens.rows(tokens, 0, Place("k", 1, 1, 1)).stored) for text in options]
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
    costs = np.tile(np.array(kept_rows), (len(table), 1))
    return Table(options, table, costs, tuple((i, "") for i in range(len(table))), SHARES.index(uniform))


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
    by_kind = {kind: weights(subject.model, prompts, kind) for kind in KINDS}
    rows: list[dict[str, Any]] = []
    for name, kind, bits in [*((f"bits, {k}", k, 4) for k in by_kind), ("3 bits, gradient", "gradient", 3)]:
        tables = {what: bits_table(subject.model, seen, by_kind[kind], bits, g) for g, what in GRAINS.items()}
        rows += _compared(bench, name, tables, rows)
    rows += _compared(bench, "ranks, gradient", {"allocated": rank_table(subject.model, seen, by_kind["gradient"], 48)})
    rows += _compared(bench, "tokens, attention", {"allocated": token_table(subject.model, seen, sizes.prompt)})
    rows.append(_row(bench, "tokens, attention", "by head", parse_method("ada(budget=0.25)")))
    return {"model": subject.name, "model_hash": subject.hash, "text": text.name, "text_hash": text.hash, "rows": rows}


def _compared(
    bench: Bench, name: str, tables: Mapping[str, Table], done: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Rows of the uniform choice (measured once for all sensitivities) and of what each table hands out."""
    first = next(iter(tables.values()))
    uniform = first.method([first.uniform] * len(first.losses))
    known = next((r for r in done if r["method"] == str(uniform)), None)
    rows = [{**(known or _row(bench, name, "uniform", uniform)), "by": name}]
    rows[0]["estimated_loss"] = float(first.losses[:, first.uniform].sum())
    for what, table in tables.items():
        found = table.chosen()
        row = _row(bench, name, what, table.method(found.choice.tolist()))
        rows.append(row | {"estimated_loss": found.loss, "optimal": found.optimal, "groups": len(table.losses)})
    return rows


def _row(bench: Bench, name: str, what: str, method: Method) -> dict[str, Any]:
    row, sizes = bench.measure(method), bench.sizes
    held, predicted = _bytes(bench, method)
    return {
        "by": name,
        "what": what,
        "method": str(method),
        "kl": row.kl,
        "kl_low": row.kl_low,
        "kl_high": row.kl_high,
        "segment_kl": list(row.segment_kl),
        "top1": row.top1,
        "ppl_ratio": row.ppl_ratio,
        "bits": stored_bits(method, sizes.prompt, sizes.scored, bench.spec),
        "bytes": held,
        "predicted_bytes": predicted,
    }


def _bytes(bench: Bench, method: Method) -> tuple[int, int]:
    """(held, predicted) bytes of all segments' prompts."""
    found, spec = bench.reference, bench.spec
    with CompressedCache(method, bench.subject.model, seed=bench.sizes.seed) as cache:
        take_prompt(cache, found)
        held, bits = cache.nbytes(), cache.layers[0].around.bits
    predicted = 0
    for (layer, own, _), indices in layer_keys(spec, method).items():
        layout = layer_layout(layer, own, found.prompt_tokens, 0, bits, indices[0], spec.n_layers)
        predicted += len(indices) * int(layout.bytes(len(found.tokens))) if layout else 0
    return held, predicted


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table."""
    out = [
        f"{found['model']} on {found['text']}: the same bytes, uniform and allocated, on held-out segments",
        f"{'by':22} {'choice':10} {'bits':>6} {'bytes':>11} {'KL':>9} {'95% interval':>19} {'top-1':>7} {'ppl x':>7}",
    ]
    for r in found["rows"]:
        between = f"{r['kl_low']:.2g} - {r['kl_high']:.2g}"
        out.append(
            f"{r['by']:22} {r['what']:10} {r['bits']:6.2f} {r['bytes']:11,} {r['kl']:9.2g} {between:>19} "
            f"{r['top1']:7.3f} {r['ppl_ratio']:7.3f}"
        )
    return out
