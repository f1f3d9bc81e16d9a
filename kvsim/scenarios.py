"""The survey's scenarios (6.3) as questions with computed answers, its advice beside them, and where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.allocation import exact
from kvsim.choice import Candidate, Limits, Objective
from kvsim.evidence import Evidence, most_measured
from kvsim.hardware import load_device
from kvsim.method import Method
from kvsim.plan import fit
from kvsim.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """A question: what is served where, what is asked of the answer, and what the survey advises."""

    name: str
    model: str
    device: str
    batch: int
    prompt: int
    new: int
    objective: Objective
    limits: Limits
    survey: str
    advice: Callable[[Method], bool]


def _has(method: Method, tokens: bool | None = None, basis: bool | None = None, form: bool | None = None) -> bool:
    found = (
        method.tokens.name != "keep",
        any(c.basis.name != "identity" for c in (method.k, method.v)),
        any(c.format.name != "full" for c in (method.k, method.v)),
    )
    return all(want is None or want == have for want, have in zip((tokens, basis, form), found, strict=True))


SCENARIOS = (
    Scenario("very long sequence", "llama-3.1-8b", "rtx-4090", 1, 131072, 0, "gentle", Limits(),
             "sparsification with quantization", lambda m: _has(m, tokens=True, form=True)),
    Scenario("constrained device", "llama-3.2-3b", "rtx-3060-12gb", 4, 32768, 0, "gentle", Limits(),
             "mixed-precision quantization", lambda m: _has(m, False, False, True) and m.k != m.v),
    Scenario("high quality", "llama-3.1-8b", "a100-sxm-40gb", 4, 32768, 0, "memory", Limits(max_kl=0.05),
             "low rank", lambda m: _has(m, basis=True)),
    Scenario("streaming", "llama-3.1-8b", "rtx-4090", 1, 4096, 122880, "memory", Limits(),
             "online low-rank updates", lambda m: any(c.basis.name == "online_svd" for c in (m.k, m.v))),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A scenario's computed answer, the best of what the survey advises, and whether they agree."""

    scenario: str
    question: str
    survey: str
    chosen: str
    advised: str
    note: str


def answers(rows: Sequence[Evidence]) -> tuple[Answer, ...]:
    """Every scenario, the multimodal one by segments."""
    return (*(answer(s, rows) for s in SCENARIOS), multimodal(rows))


def answer(s: Scenario, rows: Sequence[Evidence]) -> Answer:
    """Ask `fit`, and again with the methods alone that the survey advises."""
    from kvsim.configs import load_model

    plan = fit(load_model(s.model), load_device(s.device), Workload(s.batch, s.prompt, s.new), objective=s.objective,
               limits=s.limits, evidence=rows)  # fmt: skip
    advised = [c for c in plan.ranked if s.advice(c.method)]
    named = next(iter(advised), None)
    question = f"{s.model} on {s.device}, {s.batch} x {s.prompt:,}+{s.new:,} tokens, {s.objective}" + (
        f", KL <= {s.limits.max_kl:g}" if s.limits.max_kl else ""
    )
    return Answer(
        s.name, question, s.survey, _said(plan.chosen), _said(named), _note(plan.chosen, named, plan.considered, s)
    )


def _said(c: Candidate | None) -> str:
    if c is None:
        return "nothing"
    loss = "loss unknown" if c.loss is None else f"KL {'~' if c.evidence else ''}{c.loss:.2g}"
    step = float(c.record.decode.seconds) * 1e3
    return f"{c.name}: {c.record.cache_bytes / 2**30:.2f} GiB, {step:.1f} ms a step, {loss}"


def _note(chosen: Candidate | None, named: Candidate | None, considered: Sequence[Candidate], s: Scenario) -> str:
    if chosen is None:
        return "nothing keeps to the limits"
    if s.advice(chosen.method):
        return "agrees with the survey"
    if named is None:
        some = sum(s.advice(c.method) for c in considered)
        return (
            f"disagrees: none of the {some} methods that it advises is an answer (they miss a limit, or caution stands)"
        )
    a, b = chosen, named
    why = []
    if a.loss is not None and b.loss is not None and a.loss < b.loss:
        why.append(f"loses {a.loss:.2g} instead of {b.loss:.2g} nats a token")
    if a.record.peak_bytes < b.record.peak_bytes:
        why.append(f"needs {(b.record.peak_bytes - a.record.peak_bytes) / 2**30:.2f} GiB less")
    if a.record.decode.seconds < b.record.decode.seconds:
        why.append("is faster")
    if b.loss is None and a.loss is not None:
        why.append("was measured, which the advice was not")
    return "disagrees: the choice " + (" and ".join(why) or "ranks higher by the objective")


IMAGE_TOKENS, TEXT_TOKENS, IMAGE_WEIGHT = 2304, 512, 0.25
"""An image and its question in a vision-language model; how much a lost image row is taken to count."""


def multimodal(rows: Sequence[Evidence]) -> Answer:
    """Budgets by segment: image rows and text rows get formats of their own under one byte budget, by measured loss.

    No model with images was measured: text's own losses stand for both segments, an image row counting IMAGE_WEIGHT of
    a text row. That is an assumption, and the answer says so.
    """
    plain = {
        r.method: r
        for r in reversed(most_measured(rows))
        if r.kept == 1.0 and "@" not in r.method and "svd" not in r.method and "residual" not in r.method
    }
    options = sorted(plain.values(), key=lambda r: r.bits)
    survey = "layered compression, each modality in its own way"
    question = f"{IMAGE_TOKENS:,} image and {TEXT_TOKENS:,} text tokens, 4.5 bits a value on average"
    if len(options) < 2:
        return Answer("multimodal", question, survey, "not measured", "not measured", "needs evidence: kvsim quality")
    counts, total = (IMAGE_TOKENS, TEXT_TOKENS), IMAGE_TOKENS + TEXT_TOKENS
    weights = (IMAGE_TOKENS * IMAGE_WEIGHT / total, TEXT_TOKENS / total)
    loss = [[w * r.kl for r in options] for w in weights]
    cost = [[round(n * r.bits / 16) for r in options] for n in counts]  # in units of 16 bits a value
    budget = round(total * 4.5 / 16)
    one = min(
        ((loss[0][i] + loss[1][i], i) for i in range(len(options)) if cost[0][i] + cost[1][i] <= budget), default=None
    )
    if one is None or budget < min(cost[0]) + min(cost[1]):
        return Answer("multimodal", question, survey, "nothing", "nothing", "no measured format is small enough")
    found = exact(loss, cost, budget)
    image, text = (options[i] for i in found.choice)
    same = options[one[1]]
    note = (
        f"agrees where an image row counts {IMAGE_WEIGHT:g} of a text row (assumed, not measured): weighted "
        f"loss {found.loss:.2g} "
        f"against {one[0]:.2g} with {same.method} for all"
    )
    return Answer(
        "multimodal",
        question,
        survey,
        f"image rows {image.method}, text rows {text.method}",
        f"{same.method} for all",
        note,
    )
