"""Fit: which methods fit a device, which of them to choose, and why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.candidates import candidates, caution
from kvsim.choice import (
    OBJECTIVES,
    Candidate,
    Limits,
    Objective,
    cautioned,
    frontier,
    merit,
    shortfall,
    too_lossy,
)
from kvsim.errors import KvsimError, did_you_mean, shown, word
from kvsim.evidence import Evidence, Table, gathered
from kvsim.hardware import HardwareProfile
from kvsim.method import Method, parse_methods, preset_name
from kvsim.model import ModelSpec
from kvsim.prediction import predict
from kvsim.record import Case, case_json, plain
from kvsim.serving import check_layout, refusal, serve
from kvsim.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

    from kvsim.engines.parallel import ParallelLayout

__all__ = [
    "OBJECTIVES",
    "Candidate",
    "Limits",
    "Objective",
    "Plan",
    "Rejected",
    "break_even",
    "fit",
    "frontier",
    "recompute",
    "shortfall",
]


@dataclass(frozen=True)
class Rejected:
    """A method that is no answer, why, and by how many bytes it misses (0 where bytes are not the reason)."""

    method: str
    reason: str
    short_by_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer of `fit`: everything that was considered, what fits, what to choose and the Pareto frontier."""

    case: Case
    objective: Objective
    chosen: Candidate | None
    frontier: tuple[Candidate, ...]
    considered: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    limits: Limits = field(default_factory=Limits)
    ranked: tuple[Candidate, ...] = ()
    """What may be chosen, best first."""

    @property
    def baseline(self) -> Candidate:
        """The uncompressed cache."""
        return next(c for c in self.considered if c.method.is_full)

    def why(self) -> str:
        """The choice in words: how far the baseline misses, and what the chosen method costs instead."""
        full = self.baseline.record
        gib = 2**30
        text = f"the full cache needs {full.cache_bytes / gib:.1f} GiB"
        if full.short_by_bytes > 0:
            text += f" and is {full.short_by_bytes / gib:.1f} GiB short"
        else:
            text += f" and leaves {-full.short_by_bytes / gib:.1f} GiB free"
        if self.chosen is None:
            capacity = self.case.hardware.capacity_bytes
            if full.weights_bytes + full.reserve_bytes >= capacity:
                return (
                    f"nothing fits: the weights take {full.weights_bytes / gib:.1f} GiB and the runtime "
                    f"{full.reserve_bytes / gib:.1f} GiB of {capacity / gib:.1f} GiB, whatever the cache; "
                    "take fewer bits of weights, or more devices"
                )
            longest = self.case.model.max_context
            if longest and (self.limits.min_context or 0) > longest:
                asked = self.limits.min_context
                return f"nothing reaches {asked:,} tokens: the model's own context ends at {longest:,}"
            return f"nothing fits within the limits: {text}"
        mine = self.chosen.record
        if self.chosen.method.is_full:
            return f"{text}: no compression is needed"
        found = self.chosen.evidence
        cost = f"; its loss: KL {found.kl:.2g} nats a token, {found.where}" if found else ""
        return (
            f"{text}; {self.chosen.name} needs {mine.cache_bytes / gib:.2f} GiB ({mine.compression:.1f}x less), "
            f"and one step takes {mine.decode.seconds * 1e3:.1f} ms instead of {full.decode.seconds * 1e3:.1f} ms{cost}"
        )

    def to_frame(self) -> pd.DataFrame:
        """Every considered method as a DataFrame, one row each, with `chosen`, `frontier` and the reason against it."""
        from kvsim.frames import frame, plan_rows

        return frame(plan_rows(self))

    def _repr_html_(self) -> str:
        from kvsim.display import plan_html

        return plan_html(self)

    def __str__(self) -> str:
        from kvsim.display import as_text

        return as_text(self)

    def __repr__(self) -> str:
        best = self.chosen.name if self.chosen else "nothing"
        what = f"{self.case.model.name} on {self.case.hardware.name}"
        return f"<Plan: {best} of {len(self.considered)} methods for {what}>"

    def __rich__(self) -> object:
        from kvsim.display import as_rich

        return as_rich(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as `kvsim fit --json` prints it."""
        device = self.case.hardware
        question = {k: v for k, v in case_json(self.case).items() if k != "method"}
        return {
            "question": {**question, "capacity_bytes": device.capacity_bytes, "objective": self.objective},
            "chosen": self.chosen.to_json() if self.chosen else None,
            "why": self.why(),
            "frontier": [c.to_json() for c in self.frontier],
            "rejected": [
                {"method": r.method, "reason": r.reason, "short_by_bytes": r.short_by_bytes} for r in self.rejected
            ],
        }


def fit(
    model: ModelSpec,
    device: HardwareProfile,
    workload: Workload,
    *,
    objective: Objective | None = None,
    methods: Sequence[str | Method] | None = None,
    limits: Limits | None = None,
    weights: str = "",
    kv_dtype: str = "",
    devices: int = 1,
    reserve_bytes: int | None = None,
    kernel: str | None = None,
    engine: str = "",
    evidence: Sequence[Evidence] | None = None,
    layout: ParallelLayout | None = None,
) -> Plan:
    """Say which compression methods fit the device for this workload, and choose one.

    Args:
        workload: single numbers, not arrays (`sweep` takes arrays).
        objective: see OBJECTIVES; None: memory where the limits speak of quality (the least that keeps to them), gentle
            otherwise. methods: consider only these (written form or Method), with no caution held against
            them; None: every preset and a grid of compositions.
        limits: what the answer must keep to. Others: as in Case.
        engine: consider only what this server can run, and say with which flags; empty: any.
        evidence: measured quality (kvsim.evidence.read); None: the user's own file, then what comes with kvsim.

    Raises KvsimError where the question is wrong; a plan whose `chosen` is None says that nothing fits.
    """
    if limits is not None and not isinstance(limits, Limits):
        raise KvsimError(f"limits are a kvsim.plan.Limits, got {shown(limits)}")
    limits = limits or Limits()
    if objective is None:
        objective = "memory" if limits.on_quality else "gentle"
    if word(objective, "objective") not in OBJECTIVES:
        raise KvsimError(
            f"objective {shown(objective)} is not one of {', '.join(OBJECTIVES)}{did_you_mean(objective, OBJECTIVES)}"
        )
    base = Case(model, device, Method(), workload, weights, kv_dtype, devices, reserve_bytes, kernel, layout)
    if workload.shape:
        raise KvsimError("fit takes one workload; for arrays of batches or prompts use sweep")
    if word(engine, "engine"):
        from kvsim.engines import check_runs_methods

        check_runs_methods(engine)
        check_layout(engine, layout)
    table = Table(gathered() if evidence is None else evidence, model)
    found, rejected = _consider(base, methods, engine, table)
    found = [_judged(c, table) for c in found]
    kept, missed = _within(found, limits)
    allowed = [c for c in kept if not cautioned(c, limits)]
    rejected += missed + [Rejected(c.name, c.caution) for c in kept if cautioned(c, limits)]
    ranked = tuple(sorted(allowed, key=lambda c: merit(c, objective), reverse=True))
    chosen = ranked[0] if ranked else None
    return Plan(base, objective, chosen, frontier(allowed), tuple(found), tuple(rejected), limits, ranked)


def _judged(c: Candidate, table: Table) -> Candidate:
    found, why_not = table.of(c.method, c.record.case.workload, c.record.case.model)
    return replace(c, evidence=found, no_evidence=why_not)


def _consider(
    base: Case, methods: Sequence[str | Method] | None, engine: str, table: Table
) -> tuple[list[Candidate], list[Rejected]]:
    named: Iterable[tuple[str, Method | None, str]]
    if methods is None:
        dims = [layer.attention.k_dim for layer, _ in base.model.groups if layer.attention]
        named = candidates(max(dims, default=128))
        known = {m for _, m, _ in named}
        named = (*named, *((str(m), m, "") for m in table.own if m not in known and m.protocol == "after_prefill"))
    else:
        asked = parse_methods(methods)
        named = [("full", Method(), ""), *((preset_name(m) or str(m), m, "") for m in asked if not m.is_full)]
    found, rejected = [], []
    for name, method, problem in named:
        if method is None:
            rejected.append(Rejected(name, problem))
            continue
        refused = refusal(engine, method, base)
        if refused and not method.is_full:  # the baseline is compared with even where the engine cannot run it
            rejected.append(Rejected(name, refused))
            continue
        try:
            record = predict(replace(base, method=method))
        except KvsimError as error:
            if methods is not None or method.is_full:
                raise
            rejected.append(Rejected(name, str(error)))
            continue
        served = serve(engine, record)
        if served.refusal and not method.is_full:
            rejected.append(Rejected(name, served.refusal, served.short_by_bytes))
            continue
        against = refused or served.refusal or ("" if methods is not None else caution(method))
        found.append(Candidate(name, method, record, against, served.flags, served.bytes))
    return found, rejected


def _within(found: list[Candidate], limits: Limits) -> tuple[list[Candidate], list[Rejected]]:
    kept, missed = [], []
    for c in found:
        reason, short = shortfall(c.record, limits)
        reason = reason or too_lossy(c, limits)
        if reason:
            missed.append(Rejected(c.name, reason, short))
        else:
            kept.append(c)
    return kept, missed


def break_even(model: ModelSpec, device: HardwareProfile, method: Method, batch: int = 1, **options: Any) -> int | None:
    """Tokens from which on one decode step with the method is faster than with the full cache; None: never.

    `options` are those of Case (weights, kv_dtype, devices, kernel, layout). The answer is the first of about 200
    lengths up to the model's context from which on the method stays faster.
    """
    top = model.max_context or 2**20
    tokens = np.unique(np.geomspace(1, top, 200).astype(np.int64))
    work = Workload(batch=batch, prompt_tokens=tokens)
    mine, full = (predict(Case(model, device, m, work, **options)).decode.seconds for m in (method, Method()))
    slower = np.nonzero(mine >= full)[0]
    if not slower.size:
        return int(tokens[0])
    return None if slower[-1] == len(tokens) - 1 else int(tokens[slower[-1] + 1])


def recompute(case: Case) -> dict[str, Any]:
    """Survey 1.3: keep no cache and run the whole prompt again for every token.

    Returns seconds a token, the factor over a step with the full cache, and the tokens up to which recomputing is
    less than twice as slow (its break-even against memory: below it the cache buys little).
    """
    full = replace(case, method=Method())
    record = predict(full)
    tokens = np.unique(np.geomspace(1, max(2, int(np.max(case.workload.tokens))), 100).astype(np.int64))
    many = predict(replace(full, workload=Workload(case.workload.batch, tokens)))
    cheap = tokens[many.prefill.seconds <= 2 * many.decode.seconds]
    work = replace(case.workload, prompt_tokens=case.workload.tokens, new_tokens=0)
    seconds = predict(replace(full, workload=work)).prefill.seconds
    return {
        "seconds_per_token": plain(seconds),
        "slower_than_cached": plain(seconds / record.decode.seconds),
        "bytes_saved": plain(record.cache_bytes, whole_numbers=True),
        "worth_it_up_to_tokens": int(cheap.max()) if cheap.size else 0,
    }
