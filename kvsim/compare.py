"""The survey's comparison of three families (6.1, 6.2): its claims beside declarations, predictions and evidence."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

from kvsim.candidates import candidates
from kvsim.choice import Candidate
from kvsim.engines import engines, flags
from kvsim.errors import KvsimError
from kvsim.evidence import Evidence
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


@dataclass(frozen=True)
class Claim:
    """A pro or con of the survey with the figure that speaks to it; verdict: holds, partly, fails or not measured."""

    family: str
    kind: str
    claim: str
    figure: str
    verdict: str


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
    measured = {r.method: r for r in reversed(list(rows))}
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
            "complexity": _complexity(own),
            "compatibility": _compatibility(own),
            "typical": ", ".join(m.candidate.name for m in _best(own)[:3]) or "none measured",
        }
        found += [Cell(row, name, SURVEY[row][i], text) for row, text in here.items()]
    return tuple(sorted(found, key=lambda c: list(SURVEY).index(c.row)))


def _principle(name: str) -> str:
    return {
        "quantization": "each value in fewer bits; all rows stay",
        "sparsification": "fewer rows stored or read; each in full",
        "low rank": "each row in fewer coefficients of a basis",
    }[name]


def _best(own: Sequence[Member]) -> list[Member]:
    """Measured members with a usable loss, most compression first."""
    good = [m for m in own if m.evidence is not None and m.evidence.kl <= USABLE_KL]
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


def _times_full(own: Sequence[Member]) -> tuple[list[float], list[float]]:
    """Steps and first tokens of methods, each over the full cache's."""
    from kvsim.prediction import predict

    full = predict(replace(own[0].candidate.record.case, method=Method()))
    step = [float(m.candidate.record.decode.seconds / full.decode.seconds) for m in own]
    return step, [float(m.candidate.record.prefill.seconds / full.prefill.seconds) for m in own]


def _compute(own: Sequence[Member]) -> str:
    """A step and a first token against the full cache's."""
    step, first = _times_full(own)
    return f"step x {min(step):.2f} - {max(step):.2f}, first token x {min(first):.2f} - {max(first):.2f}"


def _complexity(own: Sequence[Member]) -> str:
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
        names = {e for e in _servers() if _runs(e, m.method)}
        served |= names
        run += bool(names)
    return f"{run} of {len(own)} run in a server ({', '.join(sorted(served)) or 'none'})"


def _servers() -> tuple[str, ...]:
    """One name of each engine."""
    return tuple({id(module): name for name, module in sorted(engines().items(), reverse=True)}.values())


def _runs(engine: str, method: Method) -> bool:
    try:
        flags(engine, method, max_model_len=4096, max_num_seqs=1, gpu_memory_utilization=None, tensor_parallel_size=1)
    except KvsimError:
        return False
    return True


def claims(all_members: Sequence[Member], evidence: Sequence[Evidence]) -> tuple[Claim, ...]:
    """The survey's 6.2: each pro and con with the figure that speaks to it."""
    by = {name: [m for m in all_members if m.family == name] for name in FAMILIES}
    rows = {r.method: r for r in reversed(list(evidence))}
    return (
        *_of_quantization(by["quantization"], rows),
        *_of_sparsity(by["sparsification"], rows),
        *_of_low_rank(by["low rank"], rows),
    )


def _of_quantization(own: Sequence[Member], rows: dict[str, Evidence]) -> list[Claim]:
    name = "quantization"
    ratios = sorted({round(16 / m.evidence.bits, 1) for m in own if m.evidence})
    plain = [rows[k] for k in ("int(bits=8)", "int(bits=4)", "int(bits=3)") if k in rows]
    served = sum(any(_runs(e, m.method) for e in _servers()) for m in own)
    return [
        Claim(name, "pro", "simple, whatever the model", _complexity(own), "holds"),
        Claim(
            name,
            "pro",
            "the ratio can be set exactly",
            f"{len(ratios)} ratios measured: {_span(ratios)}",
            "holds" if ratios else "not measured",
        ),
        Claim(
            name,
            "pro",
            "combines with other methods",
            f"{_combined(own[0].method)} token policies compose with it",
            "holds",
        ),
        Claim(
            name,
            "pro",
            "hardware supports it",
            f"{served} of {len(own)} run in a server",
            "holds" if served else "fails",
        ),
        Claim(
            name,
            "con",
            "errors may cost accuracy",
            "; ".join(f"{e.method}: KL {e.kl:.2g}" for e in plain) or "not measured",
            "holds" if plain else "not measured",
        ),
        _pair(
            name,
            "con",
            "extreme values are hard",
            rows,
            "int(bits=4)",
            "int(bits=4,group=32)",
            "groups half as long lose less",
        ),
        Claim(
            name, "con", "cannot change the rank of the matrices", "bits a value fall, rows and widths stay", "holds"
        ),
    ]


def _of_sparsity(own: Sequence[Member], rows: dict[str, Evidence]) -> list[Claim]:
    name = "sparsification"
    step = [float(m.candidate.record.decode.seconds) for m in own]
    good = _best(own)
    return [
        Claim(
            name,
            "pro",
            "less computation, not only less memory",
            f"a step takes {min(step) * 1e3:.1f} to {max(step) * 1e3:.1f} ms",
            "holds",
        ),
        Claim(
            name,
            "pro",
            "keeps what matters most",
            "; ".join(f"{m.candidate.name}: KL {m.evidence.kl:.2g}" for m in good[:3] if m.evidence) or "not measured",
            "holds" if good else "not measured",
        ),
        Claim(
            name,
            "pro",
            "suits long sequences",
            f"{sum(float(m.candidate.record.compression) > 8 for m in own)} of {len(own)} shrink a "
            f"{QUESTION[3]:,}-token cache more than 8 times",
            "holds",
        ),
        _pair(
            name,
            "con",
            "the dropping policy decides",
            rows,
            "window(sinks=0,recent=256)",
            "window(recent=252)",
            "four sinks",
        ),
        Claim(name, "con", "may lose distant dependences", "retrieval: `kvsim quality --tasks`", "not measured"),
        Claim(name, "con", "more complex to build", _complexity(own), "holds"),
    ]


def _of_low_rank(own: Sequence[Member], rows: dict[str, Evidence]) -> list[Claim]:
    name = "low rank"
    held = [m.evidence.kl for m in own if m.evidence]
    best = min(held, default=float("nan"))
    width = max(x.attention.k_dim for x in own[0].candidate.record.case.model.layers if x.attention)
    dearest = max(_times_full(own)[1])
    return [
        _pair(
            name,
            "pro",
            "theory: the best approximation of its rank",
            rows,
            "random_projection(rank=32)",
            "svd(rank=32)",
            "a fitted basis",
        ),
        Claim(
            name,
            "pro",
            "keeps meaning whole",
            f"least KL measured {best:.2g}",
            "fails" if best > USABLE_KL else "partly" if held else "not measured",
        ),
        Claim(
            name, "pro", "suits wide data", f"rows are {width} wide a head: bases of half of it are what fits", "partly"
        ),
        Claim(
            name,
            "con",
            "reconstruction errors add up",
            f"least KL measured {best:.2g}",
            "holds" if held else "not measured",
        ),
        Claim(
            name,
            "con",
            "SVD is expensive",
            f"with a basis fitted to each prompt the first token takes up to {dearest:.3f} times as long",
            "holds" if dearest > 1.1 else "fails",
        ),
        Claim(
            name,
            "con",
            "ranks need tuning",
            "`kvsim quality --allocate` hands ranks to layers by measured loss",
            "holds",
        ),
    ]


def _pair(name: str, kind: str, claim: str, rows: dict[str, Evidence], worse: str, better: str, what: str) -> Claim:
    """A claim that holds where one method loses more than another."""
    a, b = rows.get(worse), rows.get(better)
    if a is None or b is None:
        return Claim(name, kind, claim, f"needs {worse if a is None else better} measured", "not measured")
    figure = f"KL {a.kl:.2g} of {worse}, {b.kl:.2g} of {better} ({what})"
    return Claim(name, kind, claim, figure, "holds" if a.kl > b.kl else "fails")


def _span(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.1f}x to {max(ratios):.1f}x" if ratios else "none"


def _combined(method: Method) -> int:
    """Token policies among the candidates that stand with this method's formats."""
    names = {
        m.tokens.name
        for _, m, _ in candidates(128)
        if m is not None and m.tokens.name != "keep" and not np.all([m.k.is_full, m.v.is_full])
    }
    return len(names)
