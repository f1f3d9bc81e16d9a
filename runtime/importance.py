"""`kvsim importance`: every score of the survey's section 4.2 on a real model: what it costs, and what it buys."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
import torch
from torch import Tensor

import kvsim
from kvsim.cli_options import Count
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from kvsim.record import Case, Record
from kvsim.scores import SCORES, Score
from kvsim.workload import Workload
from runtime.attention import observe
from runtime.cache import CompressedCache
from runtime.gradients import KINDS, gradient_scores
from runtime.parts import Prompt
from runtime.quality_forced import take_prompt
from runtime.quality_reference import Reference
from runtime.quality_run import Bench, Sizes, interval, rounded
from runtime.quality_scoring import score as quality
from runtime.running_model import run
from runtime.shipped import check_counts, check_out, earlier, finish, labelled, numbers, write

STEPS = 12
"""Decode steps that are timed of a running score."""


def methods(budget: float, names: Sequence[str] | None = None) -> list[tuple[Score, str, Method]]:
    """(score, when, method) of every score, for the prompt and, where it can be kept up, while generating."""
    unknown = sorted(set(names or ()) - set(SCORES))
    if unknown:
        raise KvsimError(f"importance: {unknown[0]!r} is no score; the scores: {', '.join(SCORES)}")
    chosen = [s for n, s in SCORES.items() if not names or n in names]
    whens = [(s, w) for w in ("prompt", "running") for s in chosen if w == "prompt" or s.running]
    return [(s, w, parse_method(f"topk(budget={budget},score={s.name},when={w})")) for s, w in whens]


def report(bench: Bench, device: HardwareProfile, budget: float = 0.25, names: Sequence[str] | None = None,
           timed: bool = True, done: Sequence[Mapping[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """One row a score and protocol, all at the same number of rows.

    Bytes: what the cache holds after the prompt beside the rows themselves, predicted and held. flops, seconds:
    ranking and choosing the rows of one prompt in all layers, predicted (`<policy> selection` of the record) and
    measured; of a running score also one step. backward_seconds: the pass that gradients presuppose. KL and top-1 on
    the bench's held-out tokens. done: rows of an earlier run, given as they are.
    """
    first, known = bench.reference.of(slice(0, 1)), {(r["score"], r["when"]): r for r in done}
    learned: dict[str, Any] = {}
    for score, when, method in methods(budget, names):
        if (score.name, when) in known:
            yield dict(known[score.name, when])
            continue
        if score.name not in learned:
            learned[score.name] = bench._calibration(method)
        tensors = learned[score.name]
        outside, backward = _outside(bench, score, first)
        record = predicted(bench.spec, device, method, first)
        held, plain = _held(bench, method, first, tensors, outside), _held(bench, _by_norm(budget), first, None, None)
        row = {
            "score": score.name, "when": when, "survey": score.survey, "needs": list(score.needs),
            "method": str(method), "cache_bytes": record.cache_bytes, "held_bytes": held,
            "own_bytes": held - plain, "rows": round(record.cache_bytes and budget * first.prompt_tokens),
        }
        row |= _costs(record, "prefill", "topk selection", "")
        if timed:
            row["measured_seconds"] = rounded(_selection_seconds(bench, method, first, tensors, outside))
            row["backward_seconds"] = rounded(backward)
        if when == "running":
            row |= _costs(record, "decode", "topk step", "step_")
            if timed:
                row["step_measured_seconds"] = rounded(_step_seconds(bench, method, first, tensors))
        yield row | _quality(bench, method, tensors)


def _quality(bench: Bench, method: Method, tensors: Any) -> dict[str, Any]:
    """KL, agreement and perplexity on all segments, with a 95% interval of the KL."""
    outside = bench._scores(method, bench.sizes.segments)
    found = quality(bench.subject.model, bench.reference, method, calibration=tensors, seed=bench.sizes.seed,
                    outside=outside)
    kl, low, high = interval(found.kl)
    return {"kl": rounded(kl), "kl_low": rounded(max(0.0, low)), "kl_high": rounded(high),
            "top1": rounded(float(found.top1.mean())),
            "ppl_ratio": rounded(float((found.nll - found.full_nll).mean().exp())),
            "segment_kl": [rounded(float(x), 3) for x in found.kl]}


def predicted(spec: ModelSpec, device: HardwareProfile, method: Method, found: Reference) -> Record:
    """The record of one of the reference's prompts."""
    return kvsim.predict(Case(replace(spec, dtype="fp32"), device, method, Workload(1, found.prompt_tokens, 0)))


def _by_norm(budget: float) -> Method:
    return parse_method(f"topk(budget={budget},score=knorm)")


def _costs(record: Record, phase: str, name: str, prefix: str) -> dict[str, float]:
    lines = [x for x in getattr(record, phase).lines if x.name == name]
    keys = ("bytes", "flops", "seconds", "low", "high")
    return {f"{prefix}predicted_{k}": rounded(sum(float(getattr(x, k)) for x in lines)) for k in keys}


def _outside(bench: Bench, score: Score, first: Reference) -> tuple[list[Tensor] | None, float]:
    """Scores from a backward pass over the first prompt, and how long that took."""
    if score.name not in KINDS:
        return None, 0.0
    prompt, start = first.tokens[:, : first.prompt_tokens], time.thread_time()
    return gradient_scores(bench.subject.model, prompt, score.name), time.thread_time() - start


def _cache(bench: Bench, method: Method, tensors: Any, outside: list[Tensor] | None) -> CompressedCache:
    cache = CompressedCache(method, bench.subject.model, calibration=tensors, seed=bench.sizes.seed)
    if outside is not None:
        cache.set_scores(outside)
    return cache


def _held(bench: Bench, method: Method, first: Reference, tensors: Any, outside: list[Tensor] | None) -> int:
    with _cache(bench, method, tensors, outside) as cache:
        take_prompt(cache, first)
        return cache.nbytes()


def _selection_seconds(bench: Bench, method: Method, first: Reference, tensors: Any,
                       outside: list[Tensor] | None) -> float:
    """Processor time to rank and choose the rows of one prompt in all layers, weights formed where they are needed.

    The better of two: the first also warms up.
    """
    best = float("inf")
    with _cache(bench, method, tensors, outside) as cache, torch.no_grad():
        for _ in range(2):
            start = time.thread_time()
            for layer, seen in zip(cache.layers, first.prompt, strict=True):
                layer.lazy_initialization(seen.k, seen.v)
                policy = layer.twins.policy
                prompt = Prompt(seen.k, seen.v, seen.rule.scaling, rotation=layer.twins.around.rotation,
                                positions=first.prompt_positions, scores=layer.scores)
                if policy.prompt_queries:
                    prompt.queries = seen.q[:, :, -policy.prompt_queries :]
                if policy.prompt_weights:
                    observe(prompt, seen.q, seen.rule)
                policy.start(prompt, policy.select(prompt))
            best = min(best, time.thread_time() - start)
    return best


def _step_seconds(bench: Bench, method: Method, first: Reference, tensors: Any) -> float:
    ran = run(bench.subject.model, method, batch=1, prompt=first.prompt_tokens, steps=STEPS, calibration=tensors)
    return sum(t.seconds for name, t in ran.decode_lines.items() if name == "topk step")


@click.command("importance")
@click.option("--model", default="smollm2-135m", metavar="M", help="A folder with weights, or a packaged model.")
@click.option("--text", "text_file", type=click.Path(), metavar="FILE", help="Text.  [Python's own reference]")
@click.option("--scores", metavar="S[,S..]", help="Some of the scores.  [all]")
@click.option("--budget", type=float, default=0.25, help="Share of the rows that stays.  [0.25]")
@click.option("--segments", type=Count(), default=4, metavar="N", help="Pieces of text.  [4]")
@click.option("--prompt", type=Count(), default=1024, metavar="T", help="Tokens that are ranked.  [1024]")
@click.option("--scored", type=Count(), default=128, metavar="K", help="Tokens after them that are scored.  [128]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the random baseline and of training.  [0]")
@click.option("--device", metavar="FILE", help="A profile that `kvsim calibrate` wrote here.  [the newest one kept]")
@click.option("--out", type=click.Path(), metavar="FILE", help="Keep the result as JSON; what it holds already stays.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(model: str, text_file: str | None, scores: str | None, budget: float, segments: int, prompt: int,
            scored: int, seed: int, device: str | None, out: str | None, as_json: bool) -> None:
    """Measure every importance score here: what it costs and what it buys at the same number of rows."""
    from runtime.measure import profile_here
    from runtime.quality_subjects import load_subject, load_text

    torch.set_num_threads(1)
    check_counts(segments=segments, prompt=prompt, scored=scored)
    check_out(out)
    numbers(str(budget), "--budget", 0, 1)
    subject = load_subject(model)
    text = load_text(subject.tokenizer, text_file)
    bench = Bench(subject, text, Sizes(segments, prompt, scored, seed=seed))
    profile = profile_here(device)
    found = labelled("importance", subject, text, seed) | {
        "budget": budget, "segments": segments, "prompt": prompt, "scored": scored, "device": profile.name
    }
    done, found["rows"] = earlier(found, out), []
    for row in report(bench, profile, budget, scores.split(",") if scores else None, done=done):
        found["rows"].append(row)
        write(found, out)
        click.echo(f"{row['when']:8} {row['score']:20} KL {row['kl']:g}", err=True)
    finish(found, out, as_json)
