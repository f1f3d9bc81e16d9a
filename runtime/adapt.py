"""`kvsim adapt`: classes, tasks and a controller against fixed methods at equal bytes, on text and retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import torch

import kvsim
from kvsim.adaptive_steps import cache_part, portioned_step
from kvsim.allocation import within
from kvsim.cli_options import Count
from kvsim.content import classify
from kvsim.controller import Controller, Seen, Signals, fitted
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from kvsim.portions import LATER, Portions, parse_portions
from kvsim.record import Case
from kvsim.sizes import parse_counts
from kvsim.tasks import TASKS, labels_for, portions_for
from kvsim.workload import Workload
from runtime.cache import spec_of
from runtime.quality_run import rounded
from runtime.quality_subjects import Subject
from runtime.requests import Request, class_weights, filled, outcome, retrievals, texts, told
from runtime.shipped import check_counts, check_out, earlier, finish, labelled, numbers, write
from runtime.step_time import STEPS, WARM, beside, timed_steps

FIXED_ROWS = ("snapkv(budget=0.25)", "topk(budget=0.25,score=perturbation)", "topk(budget=0.25,score=random)")
"""Fixed methods at a quarter of the rows; the first one's bytes are the limit of those that adapt."""
FIXED_BITS = ("rotated(bits=4)", "int(bits=3,group=32)", "snapkv(budget=0.5) | rotated(bits=8)")
"""Fixed methods at about 4 bits a value; the first one's bytes are the limit."""
WIDTHS = (2, 3, 4, 5, 6, 8)
FORMAT = "rotated(bits={bits})"
"""What classes are written in: the best of the fixed formats at these bytes."""
SINKS = 4
"""First tokens, which are a portion of their own and stay in full precision where classes have bits."""
HOT = 0.25
"""Share of the tokens that count as used most."""
POOL = ("rotated(bits=6)", "rotated(bits=5)", "rotated(bits=4)", "rotated(bits=3)",
        "snapkv(budget=0.5) | rotated(bits=5)", "snapkv(budget=0.25) | rotated(bits=6)")
"""What the controller chooses from."""

TIMED = 4
"""Requests whose steps are timed: time follows from sizes, not from what is said."""


@dataclass(frozen=True)
class Adapted:
    """A way to adapt: its name, the bytes it may take (a fixed method's), and portions and labels of a request."""

    name: str
    portions: Portions
    labels: list[str]


def fixed_bytes(spec: ModelSpec, method: str, request: Request) -> int:
    """Bytes that a fixed method holds at the request's end, as predicted: one portion of everything."""
    parsed = parse_method(method)
    rest = Method(k=parsed.k, v=parsed.v)
    return Portions((("*", parsed), (LATER, rest))).cache_bytes(spec, [["all"] * request.prompt], request.new, "fp32")


def by_task(spec: ModelSpec, request: Request, name: str, limit: int) -> Adapted:
    """A preset's budgets at a limit, rows in full precision."""
    labels = labels_for(TASKS[name], request.tokens)
    portions, apart = portions_for(TASKS[name], labels, spec, limit, new=request.new, kv_dtype="fp32")
    return Adapted(f"task {name}", portions, apart)


def bits_by(spec: ModelSpec, request: Request, labels: list[str], weigh: Mapping[str, float], limit: int,
            name: str) -> Adapted:
    """Widths of each label at a limit: least sum of tokens * weight * 4^-bits, exact but for one step.

    The first tokens stay in full precision; the rest of the limit is shared out.
    """
    labels = ["sink"] * min(SINKS, len(labels)) + labels[SINKS:]
    groups = [n for n in dict.fromkeys(labels) if n != "sink"]

    def made(widths: Sequence[int], later: int) -> Portions:
        own = [f"{n} = {FORMAT.format(bits=b)}" for n, b in zip(groups, widths, strict=True)]
        return parse_portions(" // ".join(["sink = full", *own, f"{LATER} = {FORMAT.format(bits=later)}"]))

    def held(portions: Portions) -> int:
        return portions.cache_bytes(spec, [labels], request.new, "fp32")

    counts = np.array([labels.count(n) for n in groups])
    alone = [parse_portions(f"* = {FORMAT.format(bits=b)}") for b in WIDTHS]
    each = [p.cache_bytes(spec, [["x", "x"]], 0, "fp32") - p.cache_bytes(spec, [["x"]], 0, "fp32") for p in alone]
    losses = np.array([[c * weigh.get(n, 1.0) * 4.0**-b for b in WIDTHS] for n, c in zip(groups, counts, strict=True)])
    costs = counts[:, None] * np.array(each)
    room = limit - (held(made([4] * len(groups), 4)) - int(counts.sum()) * each[WIDTHS.index(4)])
    while True:
        portions = made([WIDTHS[i] for i in within(losses, costs, room).choice], 4)
        over = held(portions) - limit  # codebooks of the widths that were chosen
        if over <= 0:
            return Adapted(name, portions, labels)
        room -= over


def hot_or_cold(request: Request) -> list[str]:
    """Tokens that the last queries use most, over all layers and heads, and the others: measured, not read."""
    count = max(1, round(HOT * request.prompt))
    best = set(torch.argsort(request.use, descending=True, stable=True)[:count].tolist())
    return ["hot" if i in best else "cold" for i in range(request.prompt)]


def adaptations(spec: ModelSpec, request: Request, weigh: Mapping[str, float], rows: int, bits: int) -> list[Adapted]:
    """Every way at its limit: `rows` for those that drop rows, `bits` for those that drop bits."""
    share = float(request.use[SINKS:].sort(descending=True).values[: round(HOT * request.prompt)].sum())
    mean_hot = share / HOT
    mean_cold = (float(request.use[SINKS:].sum()) - share) / (1 - HOT)
    return [
        *(by_task(spec, request, name, rows) for name in TASKS),
        bits_by(spec, request, classify(request.tokens), weigh, bits, "bits by class"),
        bits_by(spec, request, hot_or_cold(request), {"hot": mean_hot, "cold": mean_cold}, bits, "bits by use"),
    ]


def step_times(subject: Subject, device: HardwareProfile, request: Request, method: str | Portions,
               labels: list[str] | None = None) -> dict[str, float]:
    """A decode step after the request's prompt, the whole and the cache's part: predicted on `device`, measured here.

    The prediction is of the last step that is timed.
    """
    spec = replace(spec_of(subject.model), dtype="fp32")
    count = min(STEPS + WARM, request.new)
    if isinstance(method, Portions):
        predicted = portioned_step(spec, method, labels or [], count, device)
    else:
        predicted = kvsim.predict(Case(spec, device, parse_method(method), Workload(1, request.prompt, count))).decode
    with filled(subject, request, method if isinstance(method, Portions) else parse_method(method), labels) as cache:
        took = timed_steps(subject.model, cache, request.found.scored[:, :count])
    return beside("step", predicted, took.step) | beside("cache", cache_part(spec, predicted), took.cache)


def compare(subject: Subject, requests: Sequence[Request], weigh: Mapping[str, float], device: HardwareProfile,
            done: Sequence[Mapping[str, Any]] = (), timed: int = TIMED) -> Iterator[list[dict[str, Any]]]:
    """Every fixed and every adapting method on every request: one row a method; rows that are done are given again.

    timed: how many of the requests are also asked what a step takes.
    """
    spec = spec_of(subject.model)
    for i, request in enumerate(requests):
        found = [dict(r) for r in done if r["request"] == i]
        if found:
            yield found
            continue
        limits = {"rows": fixed_bytes(spec, FIXED_ROWS[0], request), "bits": fixed_bytes(spec, FIXED_BITS[0], request)}
        base = {"request": i, "kind": request.kind, "prompt": request.prompt, "depth": request.depth,
                "entropy": round(request.entropy, 4)}
        by_method = {
            m: told(outcome(subject, request, parse_method(m)))
            | (step_times(subject, device, request, m) if i < timed else {})
            for m in {*FIXED_ROWS, *FIXED_BITS, *POOL}
        }
        for level, fixed in (("rows", FIXED_ROWS), ("bits", FIXED_BITS), ("pool", POOL)):
            for method in fixed:
                row = by_method[method]
                own_level = {"level": level, "way": "fixed", "method": method, "limit": limits.get(level)}
                found.append(base | own_level | row)
        for own in adaptations(spec, request, weigh, limits["rows"], limits["bits"]):
            level = "rows" if own.name.startswith("task") else "bits"
            ran = outcome(subject, request, own.portions, own.labels)
            predicted = own.portions.cache_bytes(spec, [own.labels], request.new, "fp32")
            if ran.held != predicted or predicted > limits[level]:
                raise KvsimError(f"adapt: {own.name} holds {ran.held} bytes, predicted {predicted} of {limits[level]}")
            found.append(base | {"level": level, "way": "adapted", "method": own.name, "limit": limits[level],
                                 "portions": str(own.portions)} | told(ran)
                         | (step_times(subject, device, request, own.portions, own.labels) if i < timed else {}))
        yield found


def controlled(rows: Sequence[Mapping[str, Any]], spec: ModelSpec, share: float) -> dict[str, Any]:
    """A controller fitted on every other request and run on the rest, against each fixed method at the same bytes.

    Memory: each request may take `share` of what the longest one takes uncompressed. Bytes: the price is the least at
    which the controller spends no more, over the requests that it runs on, than the fixed method does there.
    """
    pool = [r for r in rows if r["level"] == "pool"]
    numbers = sorted({r["request"] for r in pool})
    table = {(r["request"], r["method"]): r for r in pool}
    known, fresh = numbers[::2], numbers[1::2]
    candidates = [
        fitted(m, [Seen(table[i, m]["prompt"], table[i, m]["entropy"], table[i, m]["kl"]) for i in known]) for m in POOL
    ]
    longest = max(r["prompt"] for r in pool)
    free = int(share * spec.cache_bytes(longest, 1, 32))
    sizes = {(table[i, m]["prompt"], m): int(table[i, m]["bytes"]) for i in numbers for m in POOL}

    def signal(i: int) -> Signals:
        return Signals(table[i, POOL[0]]["prompt"], table[i, POOL[0]]["entropy"], free)

    def run(price: float, over: Sequence[int], patience: float) -> tuple[list[str], int]:
        controller = Controller(candidates, lambda m, t: sizes[t, m], price, patience)
        decisions = controller.decide_all([signal(i) for i in over])
        return [d.method for d in decisions], sum(d.changed for d in decisions) - 1

    def figures(chosen: Sequence[str]) -> dict[str, Any]:
        own = [table[i, m] for i, m in zip(fresh, chosen, strict=True)]
        asked = [r["right"] for r in own if r["right"] is not None]
        return {"kl": rounded(float(np.mean([r["kl"] for r in own]))), "bytes": sum(r["bytes"] for r in own),
                "right": sum(asked), "asked": len(asked)}

    found = []
    for m in POOL:
        fits = all(sizes[table[i, m]["prompt"], m] <= free for i in numbers)
        spent = sum(table[i, m]["bytes"] for i in fresh)
        price = _price(lambda p: figures(run(p, fresh, 0.0)[0])["bytes"], spent)
        chosen, switches = run(price, fresh, 0.0)
        found.append({"method": m, "fits": fits, "fixed": figures([m] * len(fresh)), "controlled": figures(chosen),
                      "price": price, "switches": switches, "used": sorted(set(chosen))})
    free_run, calm_run = run(0.0, fresh, 0.0), run(0.0, fresh, 0.15)
    return {"free_bytes": free, "share": share, "fitted_on": len(known), "run_on": len(fresh), "equal_bytes": found,
            "equal_memory": figures(calm_run[0]) | {"switches": calm_run[1], "switches_without_patience": free_run[1],
                                                    "used": sorted(set(calm_run[0]))}}


def _price(spend: Any, limit: int) -> float:
    """The least price on a fine grid at which no more than `limit` bytes are spent; the highest where none is."""
    prices = [0.0, *np.geomspace(1e-12, 1e-5, 141)]
    return float(next((p for p in prices if spend(p) <= limit), prices[-1]))


@click.command("adapt")
@click.option("--model", default="smollm2-135m", metavar="M", help="A folder with weights, or a packaged model.")
@click.option("--text", "text_file", type=click.Path(), metavar="FILE", help="Text.  [Python's own reference]")
@click.option("--lengths", default="256,512,768", metavar="T[,T..]", help="Prompts of real text.  [256,512,768]")
@click.option("--each", type=Count(), default=2, metavar="N", help="Pieces of each length.  [2]")
@click.option("--scored", type=Count(), default=48, metavar="K", help="Tokens after them that are scored.  [48]")
@click.option("--context", type=Count(), default=384, metavar="T", help="Tokens of a retrieval task's context.  [384]")
@click.option("--cases", type=Count(), default=1, metavar="N", help="Cases of every task and depth.  [1]")
@click.option("--most", type=Count(), default=None, metavar="N", help="Requests at most.  [all]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the tasks.  [0]")
@click.option("--share", type=float, default=0.15, help="Memory of a request, of the longest one in full.  [0.15]")
@click.option("--device", metavar="FILE", help="A profile that `kvsim calibrate` wrote here.  [the newest one kept]")
@click.option("--out", type=click.Path(), metavar="FILE", help="Keep the result as JSON; what it holds already stays.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(model: str, text_file: str | None, lengths: str, each: int, scored: int, context: int, cases: int,
            most: int | None, seed: int, share: float, device: str | None, out: str | None, as_json: bool) -> None:
    """Measure here what adapting to content, task and request buys at equal bytes, and what a step takes."""
    from runtime.measure import profile_here
    from runtime.quality_subjects import load_subject, load_text

    torch.set_num_threads(1)
    check_counts(each=each, scored=scored, context=context, cases=cases, most=most)
    check_out(out)
    numbers(str(share), "--share", 0, 1)
    sizes = list(parse_counts(lengths, "--lengths"))
    check_counts(lengths=min(sizes))
    profile = profile_here(device)
    subject = load_subject(model)
    text = load_text(subject.tokenizer, text_file)
    pieces = text.between(each * len(sizes), max(sizes) + scored + 1, 3, 256)
    asked = retrievals(subject, text, context, cases, seed)
    requests = interleaved(texts(subject, text, sizes, each, scored), asked)[:most]

    weigh = class_weights(subject, pieces)
    result = labelled("adapt", subject, text, seed) | {
        "lengths": sizes, "each": each, "scored": scored, "context": context, "cases": cases, "requests": len(requests),
        "device": profile.name,
        "class_weights": {k: rounded(v / max(weigh.values())) for k, v in weigh.items()},
    }
    done, result["rows"] = earlier(result, out), []
    for request, rows in zip(requests, compare(subject, requests, weigh, profile, done), strict=True):
        result["rows"] += rows
        write(result, out)
        click.echo(f"{rows[0]['request'] + 1} of {len(requests)}: {request.kind}, {request.prompt} tokens", err=True)
    result["controller"] = controlled(result["rows"], spec_of(subject.model), share)
    finish(result, out, as_json)


def interleaved(first: list[Request], second: list[Request]) -> list[Request]:
    """Both lists spread evenly among each other, in their orders: so do requests come."""
    placed = [((i + 0.5) / len(x), r) for x in (first, second) for i, r in enumerate(x)]
    return [r for _, r in sorted(placed, key=lambda p: p[0])]
