"""The survey's comparison of three families (6.1, 6.2): its claims beside declarations, predictions and evidence."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from kvsim.choice import Candidate
from kvsim.engines import engines, flags
from kvsim.errors import KvsimError
from kvsim.evidence import Evidence, most_measured
from kvsim.hardware import HardwareProfile, load_device
from kvsim.method import Method
from kvsim.model import ModelSpec
from kvsim.plan import fit
from kvsim.workload import Workload

FAMILIES = ("quantization", "sparsification", "low rank")
QUESTION = ("llama-3.1-8b", "h100-sxm", 8, 32768)
"""Where time is compared: model, device, batch and prompt."""
USABLE_KL = 0.1
"""Loss in nats a token up to which a ratio counts as usable."""
SMALLER = 15.0
"""Bits of 16 from which a method has hardly compressed what was measured: a window longer than the text, say."""
SURVEY = {
    "principle": ("lower precision", "selective dropping", "fewer dimensions"),
    "ratio": ("2x - 8x", "2x - 10x", "2x - 4x"),
    "loss": ("quantization error", "lost information", "reconstruction error"),
    "compute": ("low", "medium", "medium"),
    "complexity": ("low", "medium", "medium"),
    "compatibility": ("general", "needs a dropping policy", "needs projections"),
    "typical": ("INT8/FP16 quantization", "H2O, SnapKV", "KVMem, LearnLM"),
}


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix: the survey's claim and what is computed here."""

    row: str
    family: str
    survey: str
    here: str


def published() -> tuple[dict[str, object], ...]:
    """Figures of papers and threads, each with its source, model, benchmark, and whether others found the same."""
    text = files("kvsim.data").joinpath("published.toml").read_text("utf-8")
    return tuple(tomllib.loads(text)["figure"])


def family(method: Method) -> str:
    """The survey's family of a method; "" for compositions of several, and for the baseline."""
    ways = (
        method.tokens.name != "keep",
        any(c.basis.name != "identity" for c in (method.k, method.v)),
        any(c.format.name != "full" for c in (method.k, method.v)),
    )
    names = ("sparsification", "low rank", "quantization")
    return names[ways.index(True)] if sum(ways) == 1 else ""


@dataclass(frozen=True)
class Member:
    """A method of a family with what was measured and predicted of it."""

    method: Method
    family: str
    evidence: Evidence | None
    candidate: Candidate


def members(rows: Sequence[Evidence]) -> tuple[Member, ...]:
    """Every preset and composition of one family, at QUESTION."""
    from kvsim.configs import load_model

    name, device, batch, prompt = QUESTION
    model, profile = load_model(name), load_device(device)
    return _members(model, profile, Workload(batch, prompt, 0), rows)


def _members(model: ModelSpec, device: HardwareProfile, work: Workload, rows: Sequence[Evidence]) -> tuple[Member, ...]:
    plan = fit(model, device, work, evidence=rows)
    measured = {r.method: r for r in reversed(most_measured(rows))}
    found = [
        Member(c.method, name, measured.get(str(c.method)), c) for c in plan.considered if (name := family(c.method))
    ]
    return tuple(found)


def matrix(all_members: Sequence[Member]) -> tuple[Cell, ...]:
    """The survey's 6.1, one cell a row and family."""
    found = []
    for i, name in enumerate(FAMILIES):
        own = [m for m in all_members if m.family == name]
        here = {
            "principle": _principle(name),
            "ratio": _ratio(own),
            "loss": _loss(own),
            "compute": _compute(own),
            "complexity": complexity(own),
            "compatibility": _compatibility(own),
            "typical": ", ".join(m.candidate.name for m in best(own)[:3]) or "none measured",
        }
        found += [Cell(row, name, SURVEY[row][i], text) for row, text in here.items()]
    return tuple(sorted(found, key=lambda c: list(SURVEY).index(c.row)))


def _principle(name: str) -> str:
    return {
        "quantization": "each value in fewer bits; all rows stay",
        "sparsification": "fewer rows stored or read; each in full",
        "low rank": "each row in fewer coefficients of a basis",
    }[name]


def best(own: Sequence[Member]) -> list[Member]:
    """Measured members with a usable loss, most compression first."""
    good = [m for m in own if m.evidence and m.evidence.kl <= USABLE_KL and m.evidence.bits < SMALLER]
    return sorted(good, key=lambda m: m.evidence.bits if m.evidence else 16.0)


def _ratio(own: Sequence[Member]) -> str:
    measured = [m.evidence for m in own if m.evidence is not None]
    good = [16 / e.bits for e in measured if e.kl <= USABLE_KL]
    if not measured:
        return "not measured"
    whole = f"{min(16 / e.bits for e in measured):.1f}x - {max(16 / e.bits for e in measured):.1f}x"
    return (
        f"up to {max(good):.1f}x with KL <= {USABLE_KL:g} ({whole} in all)"
        if good
        else f"{whole}, none with KL <= {USABLE_KL:g}"
    )


def _loss(own: Sequence[Member]) -> str:
    """Least KL at about twice and about four times less."""
    found = []
    for ratio in (2, 3.5):
        near = [m.evidence for m in own if m.evidence is not None and 16 / m.evidence.bits >= 0.9 * ratio]
        if near:
            best = min(near, key=lambda e: e.kl)
            found.append(f"KL {best.kl:.2g} at {16 / best.bits:.1f}x")
    return "; ".join(found) or "not measured"


def times_full(own: Sequence[Member]) -> tuple[list[float], list[float]]:
    """Steps and first tokens of methods, each over the full cache's."""
    from kvsim.prediction import predict

    full = predict(replace(own[0].candidate.record.case, method=Method()))
    step = [float(m.candidate.record.decode.seconds / full.decode.seconds) for m in own]
    return step, [float(m.candidate.record.prefill.seconds / full.prefill.seconds) for m in own]


def _compute(own: Sequence[Member]) -> str:
    """A step and a first token against the full cache's."""
    step, first = times_full(own)
    return f"step x {min(step):.2f} - {max(step):.2f}, first token x {min(first):.2f} - {max(first):.2f}"


def complexity(own: Sequence[Member]) -> str:
    """What parts declare that they need beyond rows."""
    parts = [p for m in own for p in m.method.parts()]
    weights = sum(getattr(p, "needs_weights", False) is True for p in parts)
    tied = sum(not (m.method.k.row_addressable and m.method.v.row_addressable) for m in own)
    learned = sum(
        getattr(p, "calibrated", False) is True or p.name == "kmeans"
        for m in own
        for p in (m.method.k.basis, m.method.k.format)
    )
    return f"of {len(own)}: {weights} need attention weights, {learned} calibration, {tied} tie rows together"


def _compatibility(own: Sequence[Member]) -> str:
    """Servers that run a member, members that some server runs."""
    served: set[str] = set()
    run = 0
    for m in own:
        names = {e for e in servers() if runs(e, m.method)}
        served |= names
        run += bool(names)
    return f"{run} of {len(own)} run in a server ({', '.join(sorted(served)) or 'none'})"


def servers() -> tuple[str, ...]:
    """One name of each engine."""
    return tuple({id(module): name for name, module in sorted(engines().items(), reverse=True)}.values())


def runs(engine: str, method: Method) -> bool:
    """Whether a server can run a method."""
    try:
        flags(engine, method, max_model_len=4096, max_num_seqs=1, gpu_memory_utilization=None, tensor_parallel_size=1)
    except KvsimError:
        return False
    return True
