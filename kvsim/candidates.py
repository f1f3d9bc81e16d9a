"""Which methods `fit` considers: every preset and a grid of compositions; which of them never win unless asked for."""

from __future__ import annotations

from functools import cache

from kvsim.errors import KvsimError
from kvsim.grammar import presets
from kvsim.method import Method, parse_method

LEAST_BITS = 3
"""Bits a code below which a format never wins unless it was asked for by name."""

FORMATS = ("int(bits=8)", "int(bits=4)", "kivi-4", "kivi-2", "fp8", "nvfp4(scale=row)")
POLICIES = (
    "h2o(budget=0.5)",
    "h2o(budget=0.2)",
    "snapkv(budget=0.5)",
    "snapkv(budget=0.25)",
    "window(sinks=4,recent=2044)",
    "pages(size=16,top=2048)",
)
BASIS_FORMATS = ("int(bits=8)", "int(bits=4)")

SCHEDULES = ("pyramid(budget=0.25)", "ada(budget=0.25)")
"""Policies whose budgets differ by layer or head: with one format each, since every layer is predicted apart."""


@cache
def compositions(head_dim: int) -> tuple[str, ...]:
    """Policies with formats, bases with formats, unequal sides; in the written form."""
    found = [f"int(bits={b})" for b in (8, 6, 5, 4, 3)]
    found += [
        "k:int(bits=8) v:int(bits=4)",
        "k:int(bits=4) v:int(bits=2)",
        "k:int(bits=4,group=32) v:int(bits=4,group=32)",
    ]
    found += [*POLICIES, *(f"{p} | {f}" for p in POLICIES for f in FORMATS)]
    found += [*SCHEDULES, *(f"{p} | int(bits=4)" for p in SCHEDULES)]
    half, quarter = max(1, head_dim // 2), max(1, head_dim // 4)
    found += [f"svd(rank={r})" for r in (half, quarter)] + [f"k:svd(rank={half},rope=pre) v:full"]
    found += [f"svd(rank={r}) | {f}" for r in (half, quarter) for f in BASIS_FORMATS]
    return tuple(found)


def candidates(head_dim: int) -> tuple[tuple[str, Method | None, str], ...]:
    """(name as written, method, reason why it cannot compose): the baseline, every preset and the grid, each once."""
    found: list[tuple[str, Method | None, str]] = []
    seen: set[Method] = set()
    for text in ("full", *presets(), *compositions(head_dim)):
        try:
            method = parse_method(text)
        except KvsimError as problem:
            found.append((text, None, str(problem)))
            continue
        if method not in seen:
            seen.add(method)
            found.append((text, method, ""))
    return tuple(found)


def caution(method: Method) -> str:
    """Why a method never wins unless asked for by name; empty where nothing speaks against it."""
    for part in method.parts():
        if part.caution:
            return part.caution
        bits = getattr(part, "bits", LEAST_BITS)
        if part.role == "format" and isinstance(bits, int) and bits < LEAST_BITS:
            return (
                f"{part.name} with {bits} bits a code: below {LEAST_BITS} bits quality is not to be taken for granted"
            )
    return ""
