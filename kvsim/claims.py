"""The survey's pros and cons (6.2), each with the figure that speaks to it and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.candidates import candidates
from kvsim.compare import FAMILIES, QUESTION, USABLE_KL, Member, best, complexity, runs, servers, times_full
from kvsim.evidence import Evidence
from kvsim.method import Method


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
    served = sum(any(runs(e, m.method) for e in servers()) for m in own)
    return [
        Claim(name, "pro", "simple, whatever the model", complexity(own), "holds"),
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
    good = best(own)
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
        Claim(name, "con", "more complex to build", complexity(own), "holds"),
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
            f"least KL measured {least:.2g}",
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
        if m is not None and m.tokens.name != "keep" and not (m.k.is_full and m.v.is_full)
    }
    return len(names)
