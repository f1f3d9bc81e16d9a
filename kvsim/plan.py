"""Fit: which methods fit a device, which of them to choose, and why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvsim.candidates import candidates, caution
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.hardware import HardwareProfile
from kvsim.method import Method, parse_method, preset_name
from kvsim.model import ModelSpec
from kvsim.prediction import predict
from kvsim.record import Case, Record, case_json, plain
from kvsim.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

Objective = Literal["gentle", "memory", "speed", "context", "batch"]
OBJECTIVES: dict[str, str] = {
    "gentle": "of what fits, the method that keeps most bits a token; ties by speed",
    "memory": "the smallest peak memory",
    "speed": "the shortest decode step",
    "context": "the longest context at this batch",
    "batch": "the most sequences at this length",
}


@dataclass(frozen=True, eq=False)
class Limits:
    """What an answer must keep to; None: no limit. Times in milliseconds."""

    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    min_context: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_ttft_ms", "max_tpot_ms", "min_context"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and np.isfinite(value) and value > 0):
                raise KvsimError(f"{name} must be a positive number, got {shown(value)}")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A method with its predicted record, and whether it may win without being asked for by name."""

    name: str
    method: Method
    record: Record
    caution: str = ""
    engine_flags: str | None = None

    @property
    def bits_per_value(self) -> float:
        """Cache bits for each value that an uncompressed cache would hold."""
        return float(self.record.case.value_bits / max(self.record.compression, 1e-9))

    @property
    def gentleness(self) -> float:
        """Bits kept of each value; a method that stores more than the full cache keeps less than it all the same."""
        most = float(self.record.case.value_bits)
        return most if self.method.is_full else round(min(self.bits_per_value, most - 1e-6), 6)

    def to_json(self) -> dict[str, Any]:
        """The fields of predict plus method, compression, quality (none without evidence) and engine flags."""
        return {
            **self.record.to_json(),
            "method": str(self.method),
            "preset": preset_name(self.method),
            "quality": None,
            "compression": plain(self.record.compression),
            "bits_per_value": self.bits_per_value,
            "caution": self.caution,
            "engine_flags": self.engine_flags,
        }


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
            return f"nothing fits within the limits: {text}"
        mine = self.chosen.record
        if self.chosen.method.is_full:
            return f"{text}: no compression is needed"
        return (
            f"{text}; {self.chosen.name} needs {mine.cache_bytes / gib:.2f} GiB ({mine.compression:.1f}x less), "
            f"and one step takes {mine.decode.seconds * 1e3:.1f} ms instead of {full.decode.seconds * 1e3:.1f} ms"
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
    objective: Objective = "gentle",
    methods: Sequence[str | Method] | None = None,
    limits: Limits | None = None,
    weights: str = "",
    kv_dtype: str = "",
    devices: int = 1,
    reserve_bytes: int | None = None,
    kernel: str | None = None,
    engine: str = "",
) -> Plan:
    """Say which compression methods fit the device for this workload, and choose one.

    Args:
        workload: single numbers, not arrays (`sweep` takes arrays).
        objective: see OBJECTIVES. methods: consider only these (written form or Method), with no caution held against
            them; None: every preset and a grid of compositions.
        limits: what the answer must keep to. Others: as in Case.
        engine: consider only what this server can run, and say with which flags; empty: any.

    Raises KvsimError where the question is wrong; a plan whose `chosen` is None says that nothing fits.
    """
    if objective not in OBJECTIVES:
        raise KvsimError(
            f"objective {shown(objective)} is not one of {', '.join(OBJECTIVES)}{did_you_mean(objective, OBJECTIVES)}"
        )
    if workload.shape:
        raise KvsimError("fit takes one workload; for arrays of batches or prompts use sweep")
    if engine:
        from kvsim.engines import check_runs_methods

        check_runs_methods(engine)
    base = Case(model, device, Method(), workload, weights, kv_dtype, devices, reserve_bytes, kernel)
    found, rejected = _consider(base, methods, engine)
    kept, missed = _within(found, limits or Limits())
    allowed = [c for c in kept if not c.caution]
    rejected += missed + [Rejected(c.name, c.caution) for c in kept if c.caution]
    ranked = tuple(sorted(allowed, key=lambda c: _merit(c, objective), reverse=True))
    chosen = ranked[0] if ranked else None
    return Plan(base, objective, chosen, frontier(allowed), tuple(found), tuple(rejected), limits or Limits(), ranked)


def _consider(
    base: Case, methods: Sequence[str | Method] | None, engine: str
) -> tuple[list[Candidate], list[Rejected]]:
    named: Iterable[tuple[str, Method | None, str]]
    if methods is None:
        dims = [layer.attention.k_dim for layer, _ in base.model.groups if layer.attention]
        named = candidates(max(dims, default=128))
    else:
        asked = [parse_method(m) for m in methods]
        named = [("full", Method(), ""), *((preset_name(m) or str(m), m, "") for m in asked if not m.is_full)]
    found, rejected = [], []
    for name, method, problem in named:
        if method is None:
            rejected.append(Rejected(name, problem))
            continue
        flags, refusal = _engine_flags(engine, method, base)
        if refusal and not method.is_full:  # the baseline is compared with even where the engine cannot run it
            rejected.append(Rejected(name, refusal))
            continue
        try:
            record = predict(replace(base, method=method))
        except KvsimError as error:
            if methods is not None:
                raise
            rejected.append(Rejected(name, str(error)))
            continue
        found.append(
            Candidate(name, method, record, refusal or ("" if methods is not None else caution(method)), flags)
        )
    return found, rejected


def _engine_flags(engine: str, method: Method, base: Case) -> tuple[str | None, str]:
    """(flags with which the engine runs the method for this workload, its reason where it cannot)."""
    if not engine:
        return None, ""
    from kvsim.engines import flags

    work = base.workload
    sizes = {"max_model_len": int(work.tokens), "max_num_seqs": int(work.batch)}
    try:
        return flags(engine, method, **sizes, tensor_parallel_size=base.devices), ""
    except KvsimError as reason:
        return None, str(reason)


def _within(found: list[Candidate], limits: Limits) -> tuple[list[Candidate], list[Rejected]]:
    kept, missed = [], []
    for c in found:
        reason, short = shortfall(c.record, limits)
        if reason:
            missed.append(Rejected(c.name, reason, short))
        else:
            kept.append(c)
    return kept, missed


def shortfall(record: Record, limits: Limits) -> tuple[str, int]:
    """(why a record is no answer, bytes short where that is why); an empty reason: it fits and keeps to the limits."""
    ttft, tpot = record.prefill.seconds * 1e3, record.decode.seconds * 1e3
    if not record.fits:
        return "does not fit", int(record.short_by_bytes)
    if limits.max_ttft_ms is not None and ttft > limits.max_ttft_ms:
        return f"first token after {ttft:.0f} ms, limit {limits.max_ttft_ms:g} ms", 0
    if limits.max_tpot_ms is not None and tpot > limits.max_tpot_ms:
        return f"{tpot:.1f} ms a token, limit {limits.max_tpot_ms:g} ms", 0
    if limits.min_context is not None and record.max_context < limits.min_context:
        return f"longest context {record.max_context}, asked {limits.min_context}", 0
    return "", 0


def _merit(c: Candidate, objective: Objective) -> tuple[float, float]:
    """What is maximised; ties by speed."""
    record = c.record
    speed = -float(record.decode.seconds)
    first = {
        "gentle": lambda: c.gentleness,
        "memory": lambda: -float(record.peak_bytes),
        "speed": lambda: speed,
        "context": lambda: float(record.max_context),
        "batch": lambda: float(record.max_batch),
    }[objective]()
    return first, speed


def frontier(kept: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in peak memory, step time and compression at once.

    Less compression is better here: until quality is measured, what a method keeps is the only stand-in for it.
    """
    points = [(float(c.record.peak_bytes), float(c.record.decode.seconds), float(c.record.compression)) for c in kept]
    best = []
    for i, mine in enumerate(points):
        beaten = any(all(o <= m for o, m in zip(other, mine, strict=True)) and other != mine for other in points)
        if not beaten and mine not in points[:i]:
            best.append(kept[i])
    return tuple(sorted(best, key=lambda c: -float(c.record.peak_bytes)))


def break_even(model: ModelSpec, device: HardwareProfile, method: Method, batch: int = 1, **options: Any) -> int | None:
    """Tokens from which on one decode step with the method is faster than with the full cache; None: never.

    `options` are those of Case (weights, kv_dtype, devices, kernel). The answer is the first of about 200 lengths up to
    the model's context from which on the method stays faster.
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
