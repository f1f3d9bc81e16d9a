"""The survey's pros and cons (6.2), each with the figure that speaks to it and a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvsim.candidates import candidates
from kvsim.compare import FAMILIES, QUESTION, USABLE_KL, Member, best, complexity, family, runs, servers, times_full
from kvsim.evidence import Evidence, most_measured
from kvsim.method import parse_method


@dataclass(frozen=True)
class Claim:
    """A pro or con of the survey with the figure that speaks to it; verdict: holds, partly, fails or not measured."""

    family: str
    kind: str
    claim: str
    figure: str
    verdict: str


def claims(all_members: Sequence[Member], evidence: Sequence[Evidence]) -> tuple[Claim, ...]:
    """The survey's 6.2: each pro and con with the figure that speaks to it."""
    by = {name: [m for m in all_members if m.family == name] for name in FAMILIES}
    rows = {r.method: r for r in reversed(most_measured(evidence))}
    return (
        *_of_quantization(by["quantization"], rows),
        *_of_sparsity(by["sparsification"], rows),
        *_of_low_rank(by["low rank"], rows),
    )


def _of_quantization(own: Sequence[Member], rows: dict[str, Evidence]) -> list[Claim]:
    name = "quantization"
    ratios = sorted({round(16 / m.evidence.bits, 1) for m in own if m.evidence})
    combined = _combined()
    plain = [rows[k] for k in ("int(bits=8)", "int(bits=4)", "int(bits=3)") if k in rows]
    served = sum(any(runs(e, m.method) for e in servers()) for m in own)
    return [
        Claim(
            name,
            "pro",
            "simple, whatever the model",
            complexity(own),
            "holds" if 2 * _plain(own) > len(own) else "partly" if _plain(own) else "fails",
        ),
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
            f"{combined} token policies compose with it",
            "holds" if combined else "fails",
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
            _verdict([e.kl > USABLE_KL for e in plain]),
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
    step = times_full(own)[0]
    good = best(own)
    long = sum(float(m.candidate.record.compression) > 8 for m in own)
    return [
        Claim(
            name,
            "pro",
            "less computation, not only less memory",
            f"a step takes {min(step):.2f} to {max(step):.2f} times the full cache's",
            _verdict([x < 1 for x in step]),
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
            f"{long} of {len(own)} shrink a {QUESTION[3]:,}-token cache more than 8 times",
            _verdict([long > 0]),
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
        _retrieval(name),
        Claim(
            name,
            "con",
            "more complex to build",
            complexity(own),
            "holds" if 2 * _plain(own) < len(own) else "partly" if _plain(own) < len(own) else "fails",
        ),
    ]


def _of_low_rank(own: Sequence[Member], rows: dict[str, Evidence]) -> list[Claim]:
    name = "low rank"
    held = [m.evidence.kl for m in own if m.evidence]
    least = min(held, default=float("nan"))
    width = max(x.attention.k_dim for x in own[0].candidate.record.case.model.layers if x.attention)
    dearest = max(times_full(own)[1])
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
            f"least KL measured {least:.2g}",
            "fails" if least > USABLE_KL else "partly" if held else "not measured",
        ),
        Claim(
            name, "pro", "suits wide data", f"rows are {width} wide a head: bases of half of it are what fits", "partly"
        ),
        Claim(
            name,
            "con",
            "reconstruction errors add up",
            _growth(own),
            _verdict([a > 1.5 for m in own if m.evidence for a in _rise(m.evidence)]),
        ),
        Claim(
            name,
            "con",
            "SVD is expensive",
            f"with a basis fitted to each prompt the first token takes up to {dearest:.3f} times as long",
            "holds" if dearest > 1.1 else "fails",
        ),
        _tuning(name),
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


def _combined() -> int:
    """Token policies among the candidates that stand with a format."""
    names = {
        m.tokens.name
        for _, m, _ in candidates(128)
        if m is not None and m.tokens.name != "keep" and not (m.k.is_full and m.v.is_full)
    }
    return len(names)


def _plain(own: Sequence[Member]) -> int:
    """Members that need neither attention weights nor calibration."""
    return sum(
        not any(getattr(p, "needs_weights", False) is True or getattr(p, "calibrated", False) is True for p in parts)
        for parts in (m.method.parts() for m in own)
    )


def _verdict(outcomes: Sequence[bool]) -> str:
    """What single outcomes make together."""
    if not outcomes:
        return "not measured"
    return "holds" if all(outcomes) else "partly" if any(outcomes) else "fails"


def _rise(row: Evidence) -> list[float]:
    """[error of the last layer's attention output over the first layer's], or nothing."""
    errors = row.attention_error
    return [errors[-1] / errors[0]] if len(errors) > 1 and errors[0] > 0 else []


def _growth(own: Sequence[Member]) -> str:
    found = [(m.candidate.name, r) for m in own if m.evidence for r in _rise(m.evidence)]
    text = "; ".join(f"{name}: x {r:.1f}" for name, r in found[:3])
    return f"attention error of the last layer over the first: {text}" if found else "not measured"


def measured_report(kind: str) -> dict[str, Any] | None:
    """What `kvsim quality` reported on the model that evidence is of: tasks, allocation or others; None without."""
    file = files("kvsim.data").joinpath("evidence").joinpath(f"{kind}-smollm2-135m.json")
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def _retrieval(name: str) -> Claim:
    """Needles found with a quarter of the prompt kept, against formats that keep every row."""
    claim = "may lose distant dependences"
    report = measured_report("tasks")
    rows = {} if report is None else {r["method"]: r for r in report["methods"] if "needle" in r}
    dropped = [r for m, r in rows.items() if family(parse_method(m)) == name]
    if not dropped:
        return Claim(name, "con", claim, "needs `kvsim quality --tasks`", "not measured")
    text = "; ".join(f"{r['method']}: {r['needle']['share']:.0%}" for r in dropped[:4])
    return Claim(name, "con", claim, f"needles found: {text}", _verdict([r["needle"]["share"] < 0.9 for r in dropped]))


def _tuning(name: str) -> Claim:
    """Whether ranks handed out by measured loss beat one rank for all at equal bytes."""
    report = measured_report("allocation")
    rows = {} if report is None else {r["what"]: r for r in report["rows"] if r["by"].startswith("ranks")}
    if len(rows) < 2:
        return Claim(name, "con", "ranks need tuning", "needs `kvsim quality --allocate`", "not measured")
    one, own = rows["uniform"]["kl"], rows["allocated"]["kl"]
    figure = f"KL {own:.2g} with ranks by layer and side, {one:.2g} with one rank at equal bytes"
    return Claim(name, "con", "ranks need tuning", figure, "holds" if own < 0.9 * one else "fails")
