"""What an answer must keep to, what speaks for a candidate and which candidates nothing else beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsim.errors import KvsimError, shown
from kvsim.evidence import Evidence
from kvsim.method import Method, preset_name
from kvsim.record import Record, plain

Objective = Literal["gentle", "memory", "speed", "context", "batch"]
OBJECTIVES: dict[str, str] = {
    "gentle": "of what fits, the least measured loss; without evidence, the most bits kept a token; ties by speed",
    "memory": "the smallest peak memory",
    "speed": "the shortest decode step",
    "context": "the longest context at this batch",
    "batch": "the most sequences at this length",
}
LEAST_KL = 1e-4
"""Losses below this many nats a token are told apart by nothing that anybody measures."""


LARGEST = 1e300
"""Beyond this a limit is none."""


@dataclass(frozen=True, eq=False)
class Limits:
    """What an answer must keep to; None: no limit. Times in milliseconds.

    max_kl: nats a token. min_top1: share of tokens. max_ppl: perplexity over the uncompressed model's. Borrowed
    evidence must keep to them at the far end of its widened interval. require_evidence: it must be of this very model.
    """

    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    min_context: int | None = None
    max_kl: float | None = None
    min_top1: float | None = None
    max_ppl: float | None = None
    require_evidence: bool = False

    def __post_init__(self) -> None:
        for name in ("max_ttft_ms", "max_tpot_ms", "min_context", "max_kl", "min_top1", "max_ppl"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < LARGEST):
                raise KvsimError(f"{name} must be a positive number, got {shown(value)}")
        if self.min_top1 is not None and self.min_top1 > 1:
            raise KvsimError(f"min_top1 is a share of tokens, at most 1, got {shown(self.min_top1)}")
        if self.max_ppl is not None and self.max_ppl < 1:
            raise KvsimError(f"max_ppl is a ratio of perplexities, at least 1, got {shown(self.max_ppl)}")

    @property
    def on_quality(self) -> bool:
        """Whether loss is limited."""
        return any(x is not None for x in (self.max_kl, self.min_top1, self.max_ppl))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A method with its predicted record and evidence, and whether it may win without being asked for by name."""

    name: str
    method: Method
    record: Record
    caution: str = ""
    engine_flags: str | None = None
    engine_bytes: int | None = None
    evidence: Evidence | None = None
    no_evidence: str = "not measured"

    @property
    def bits_per_value(self) -> float:
        """Cache bits for each value that an uncompressed cache would hold."""
        return float(self.record.case.value_bits / max(self.record.compression, 1e-9))

    @property
    def gentleness(self) -> float:
        """Bits kept of each value; a method that stores more than the full cache keeps less than it all the same."""
        most = float(self.record.case.value_bits)
        return most if self.method.is_full else round(min(self.bits_per_value, most - 1e-6), 6)

    @property
    def loss(self) -> float | None:
        """Measured KL in nats a token, to two digits; None without evidence."""
        if self.method.is_full:
            return 0.0
        return None if self.evidence is None else float(f"{max(LEAST_KL, self.evidence.kl):.2g}")

    @property
    def quality(self) -> dict[str, Any] | None:
        """Loss and where it was measured; None without evidence."""
        if self.method.is_full:
            return {"kl": 0.0, "top1": 1.0, "ppl_ratio": 1.0, "borrowed": False, "evidence": "the baseline itself"}
        return None if self.evidence is None else self.evidence.quality()

    def to_json(self) -> dict[str, Any]:
        """The fields of predict plus method, compression, quality (none without evidence) and engine flags."""
        return {
            **self.record.to_json(),
            "method": str(self.method),
            "preset": preset_name(self.method),
            "quality": self.quality,
            "no_evidence": "" if self.quality else self.no_evidence,
            "compression": plain(self.record.compression),
            "bits_per_value": self.bits_per_value,
            "caution": self.caution,
            "engine_flags": self.engine_flags,
            "engine_bytes": self.engine_bytes,
        }


def shortfall(record: Record, limits: Limits) -> tuple[str, int]:
    """(why a record is no answer, bytes short where that is why); an empty reason: it fits and keeps to the limits."""
    ttft, tpot = record.prefill.seconds * 1e3, record.decode.seconds * 1e3
    if not record.fits:
        return "does not fit", int(record.short_by_bytes)
    if limits.max_ttft_ms is not None and ttft > limits.max_ttft_ms:
        return f"first token after {_three(ttft)} ms, limit {limits.max_ttft_ms:g} ms", 0
    if limits.max_tpot_ms is not None and tpot > limits.max_tpot_ms:
        return f"{_three(tpot)} ms a token, limit {limits.max_tpot_ms:g} ms", 0
    if limits.min_context is not None and record.max_context < limits.min_context:
        return f"longest context {record.max_context}, asked {limits.min_context}", 0
    return "", 0


def _three(value: float) -> str:
    """Three digits that count, so that methods which miss a limit alike are told together."""
    return f"{float(f'{value:.3g}'):.15g}"


def too_lossy(c: Candidate, limits: Limits) -> str:
    """Why a candidate's evidence is no answer to the limits on quality; empty where it is, or nothing is asked."""
    if c.method.is_full or not (limits.on_quality or limits.require_evidence):
        return ""
    found = c.evidence
    if found is None:
        return f"no evidence of its quality: {c.no_evidence}"
    if limits.require_evidence and found.borrowed_from:
        return f"no evidence of its quality on this model, only on {found.model}"
    far = bool(found.borrowed_from)
    name = f" (borrowed from {found.model}, widened)" if far else ""
    kl, top1, ppl = (found.kl_high, found.top1_low, found.ppl_high) if far else (found.kl, found.top1, found.ppl_ratio)
    missed = [
        f"{what}{name}, limit {limit:g}"
        for what, loss, limit in (
            (f"KL {kl:.2g}", kl, limits.max_kl),
            (f"perplexity x {ppl:.3f}", ppl, limits.max_ppl),
        )
        if limit is not None and loss > limit
    ]
    if limits.min_top1 is not None and top1 < limits.min_top1:
        missed.append(f"top-1 agreement {top1:.3f}{name}, limit {limits.min_top1:g}")
    return "; ".join(missed)


def cautioned(c: Candidate, limits: Limits) -> bool:
    """Whether a caution stands: evidence of this very model within limits on its quality speaks louder."""
    proven = limits.on_quality and c.evidence is not None and not c.evidence.borrowed_from
    return bool(c.caution) and not proven


def merit(c: Candidate, objective: Objective) -> tuple[float, ...]:
    """What is maximised; ties by speed as far as it is known, then by what was measured to be lost."""
    record = c.record
    speed = -float(record.decode.seconds)
    measured = float(c.loss is not None), -(c.loss or 0.0)
    if objective == "gentle":
        return *measured, c.gentleness, speed
    first = {
        "memory": lambda: -float(record.peak_bytes),
        "speed": lambda: speed,
        "context": lambda: float(record.max_context),
        "batch": lambda: float(record.max_batch),
    }[objective]()
    # no prediction of a time is good to a thousandth
    return first, float(f"{speed:.3g}"), *measured, speed


def frontier(kept: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in peak memory, step time and loss at once.

    Where one of two has no evidence, less compression stands for less loss.
    """
    best: list[Candidate] = []
    seen: list[tuple[float, ...]] = []
    for mine in kept:
        point = _point(mine)
        if point not in seen and not any(beats(other, mine) for other in kept):
            best.append(mine)
            seen.append(point)
    return tuple(sorted(best, key=lambda c: -float(c.record.peak_bytes)))


def _point(c: Candidate) -> tuple[float, ...]:
    loss = float(c.record.compression) if c.loss is None else c.loss
    return float(c.record.peak_bytes), float(c.record.decode.seconds), loss


def beats(other: Candidate, mine: Candidate) -> bool:
    """Whether `other` is as good in all three and better in one."""
    if other.loss is None or mine.loss is None:
        third = (float(other.record.compression), float(mine.record.compression))
    else:
        third = (other.loss, mine.loss)
    pairs = [*zip(_point(other)[:2], _point(mine)[:2], strict=True), third]
    return all(o <= m for o, m in pairs) and any(o < m for o, m in pairs)
