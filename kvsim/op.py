"""One kernel-sized piece of work, and how long a device takes for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from kvsim import cost
from kvsim.hardware import HardwareProfile
from kvsim.kernels import FORMATS, PART, kernel_family
from kvsim.whatif import WRITING, written_faster

ANALOGY = 1.2
"""How much further the ends of an interval lie where a format of the same name, but other bits, answers."""
Named = tuple[tuple[str, float], ...]
"""Names of parts of a piece of work, and the share of each."""
FUSED, EAGER = "fused", "eager"
"""Kernel families of the project's own runtime, beside PART."""


@dataclass(frozen=True)
class Op:
    """One kernel, run `count` times in a phase. Matrix products have m, n, k; the others bytes, elements, flops.

    blocks: independent pieces (sequences * KV heads). rows: what one piece walks. formats: (format, conversion) of the
    stored values, both where keys and values differ.

    What only devices with measurements of the project's runtime use: keys: names under which they know this very work,
    with a share each, negative for what others of them have in common. adds: the same, on top of the format's time
    (listed as `name family`). kernels: families that do it, the best first; none: the device's default. held: rows held
    for each row attended, all of which a kernel that cannot gather decodes. copied: bytes that move because rows leave.
    pieces: stores that are walked one by one. only_known: no work elsewhere. beside: a part that does this too: nothing
    more where it is known, or no part is.

    joint: outputs of the one product in which servers compute this one and others of the same input (queries with keys
    and values, gate with up), as a multiple of its own; this op is charged its share.
    """

    name: str
    kind: Literal["matmul", "decode", "prefill", "elementwise"]
    count: Any = 1
    bytes: Any = 0.0
    flops: Any = 0.0
    elements: Any = 0.0
    blocks: Any = 1.0
    rows: Any = 64.0
    head_dim: int = 128
    q_per_kv: float = 1.0
    windowed: bool = False
    formats: tuple[tuple[str, str], ...] = (("bf16", "none"),)
    m: Any = 1
    n: Any = 1
    k: int = 1
    dtype: str = "bf16"
    keys: Named = ()
    adds: Named = ()
    kernels: tuple[str, ...] = ()
    held: Any = 1.0
    copied: Any = 0.0
    pieces: Any = 1
    only_known: bool = False
    beside: str = ""
    joint: float = 1.0


def kernel_work(op: Op, own: bool = True, gathers: bool = False, cold: Any = None) -> cost.KernelWork:
    """The op as the cost formula takes it.

    own: as the project's runtime does it, one store after another. gathers: its kernel reads attended rows alone.
    cold: bytes that pass by before the same ones are read again.
    """
    pieces, held = (op.pieces if own else 1), (op.held if own and not gathers else 1.0)
    return cost.KernelWork(
        bytes_moved=(op.bytes + (op.copied if own else 0.0)) / pieces,
        elements=op.elements * held / pieces,
        flops=op.flops * held / pieces,
        blocks=np.maximum(op.blocks / pieces, 1.0),
        rows=op.rows * held,
        working_set=cold,
        head_dim=op.head_dim,
        q_per_kv=max(op.q_per_kv, 1.0),
        cut=float(op.windowed),
        pieces=pieces,
    )


def op_seconds(hardware: HardwareProfile, op: Op, family: str | None = None, cold: Any = None) -> list[cost.Seconds]:
    """One op's time, in parts to be added up: keys and values in different formats count half in each.

    family: the attention kernels asked for; None: those that the op can use and the device has measured. cold: bytes
    that a whole pass moves, between two visits to the same weights and rows; None: the op is repeated by itself.
    """
    if op.kind == "matmul":
        return [_matmul(hardware, op, cold)]
    added = hardware.added
    if added is not None and added.compress_bytes_per_s and op.name in WRITING:
        streamed = cost.kernel_seconds(hardware, "elementwise", cost.KernelWork(op.bytes, blocks=op.blocks))
        return [replace(streamed, seconds=written_faster(added, streamed.seconds, op.bytes))]
    if op.beside and ((PART, op.beside) in _measured_kernels(hardware, "elementwise") or not runs_here(hardware)):
        return []
    known = _measured_kernels(hardware, op.kind)
    if named := _named(hardware, op, known):
        return named
    if op.only_known:
        return []
    times = []
    for form, how in op.formats:
        kernel, near = (family, form) if family else _measured(known, op.kernels, form)
        found = kernel_family(kernel)[2] if kernel and op.kernels else ""
        own = found in (EAGER, FUSED)
        work = kernel_work(op, own, gathers=found != EAGER, cold=cold if op.kind == "decode" else None)
        one = cost.kernel_seconds(hardware, op.kind, work, format=near, conversion=how, kernel=kernel)
        one = one if near == form else _by_analogy(one, form, near)
        times.append(_scaled(one, (op.pieces if own else 1) / len(op.formats)))
        for name, share in op.adds if own else ():
            if (PART, f"{name} {found}") in known:
                times.append(_own_time(hardware, on_top(op), f"{name} {found}", share / len(op.formats)))
    return times


def _named(hardware: HardwareProfile, op: Op, known: frozenset[tuple[str, str]]) -> list[cost.Seconds]:
    """The times of the parts under whose names the device knows this work, or one like it; empty where it does not.

    A negative share is what others have in common: nothing is there twice where one of them is not known.
    """
    answers = [(key, key if (PART, key) in known else _written_alike(known, key), share) for key, share in op.keys]
    whole = all(found for _, found, _ in answers)
    times = [(key, found, _own_time(hardware, op, found, share)) for key, found, share in answers
             if found and (share > 0 or whole)]
    return [one if found == key else _by_analogy(one, key, found) for key, found, one in times]


def _measured(known: frozenset[tuple[str, str]], kernels: tuple[str, ...], form: str) -> tuple[str | None, str]:
    """Family and format that answer for `form`: itself, else the nearest of its name; (None, form): none."""
    exact = next((k for k in kernels if (k, form) in known), None)
    if exact is not None:
        return exact, form
    for stem in STEMS:
        for k in kernels:
            if near := _nearest(form, stem, (f for family, f in known if family == k)):
                return k, near
    sole = len(kernels) == 1 and any(family == kernels[0] for family, _ in known)
    return (kernels[0] if sole else None), form


STEMS = (r"[a-z]+\d+_", r"[a-z]+")
"""What formats that are alike have in common: q4_0 and q4_1, else q4_0 and q8_0 or int2 and int4."""


def _nearest(form: str, stem: str, names: Iterable[str]) -> str:
    """Of the names with the same stem and other digits the one whose digits are nearest; empty where there is none."""
    found = re.match(stem, form)
    if found is None:
        return ""
    alike = [f for f in sorted(names) if re.fullmatch(re.escape(found[0]) + r"[\d_]*", f)]
    return min(alike, key=lambda f: abs(_digits(f) - _digits(form)), default="")


def _digits(form: str) -> int:
    found = re.search(r"\d+", form)
    return int(found[0]) if found else 0


def _written_alike(known: frozenset[tuple[str, str]], key: str) -> str:
    """The part that answers for a format that nobody measured (`rotated4 append`): the nearest of its name, else one of
    4 bits, else any other; for `int8 tail append` one with a tail first.

    Formats have their bits in their names; bases and policies have none, and no other stands for them.
    """
    what, _, how = key.rpartition(" ")
    if how not in ("compress", "append", "leave", "expire") or not re.search(r"\d", what):
        return ""
    names = sorted(f.rpartition(" ")[0] for family, f in known if family == PART and f.endswith(f" {how}"))
    what, _, tail = what.partition(" ")
    if tail and (tails := [n for n in names if n.endswith(f" {tail}")]):
        return f"{min(tails, key=lambda n: abs(_digits(n) - _digits(what)))} {how}"
    if tail == "moved":  # comes on top of the plain name
        return ""
    near = what if what in names else next((n for stem in STEMS if (n := _nearest(what, stem, names))), "")
    formats = [near] if near else [f for f in names if f in FORMATS]
    return f"int4 {how}" if "int4" in formats else f"{formats[0]} {how}" if formats else ""


def _by_analogy(one: cost.Seconds, form: str, near: str) -> cost.Seconds:
    low, high = ((spread[0] / ANALOGY, spread[1] * ANALOGY) for spread in (one.spread, one.memory_spread))
    said = f"{one.coefficients} ({form} by analogy with {near})"
    return replace(one, spread=low, memory_spread=high, coefficients=said)


def on_top(op: Op) -> Op:
    """The op without what its format's time has paid for: values and rows are all that is left."""
    return replace(op, bytes=0.0, flops=0.0, copied=0.0)


def _own_time(hardware: HardwareProfile, op: Op, key: str, share: float) -> cost.Seconds:
    """The time of a part that the device knows by name."""
    work = kernel_work(op)
    one = cost.kernel_seconds(hardware, op.kind, work, format=key, conversion="none", kernel=PART)
    return _scaled(one, share * op.pieces)


def _scaled(one: cost.Seconds, by: Any) -> cost.Seconds:
    return one if np.ndim(by) == 0 and by == 1 else replace(one, seconds=one.seconds * by)


@lru_cache(maxsize=512)
def _measured_kernels(hardware: HardwareProfile, op: str) -> frozenset[tuple[str, str]]:
    """(kernel family, format) of a device's coefficients for an op."""
    return frozenset((kernel_family(c.kernel)[2], c.format) for c in hardware.coefficients if c.op == op)


def runs_here(hardware: HardwareProfile) -> bool:
    """Whether a device's coefficients were measured with the project's own runtime: eager models, no server."""
    return any(family == PART for family, _ in _measured_kernels(hardware, "elementwise"))


def _matmul(hardware: HardwareProfile, op: Op, cold: Any) -> cost.Seconds:
    """A product's share of the one in which a server computes it; of its own where models run as they are written."""
    wide = 1.0 if op.joint == 1.0 or hardware.kind == "cpu" or runs_here(hardware) else op.joint
    n = op.n if wide == 1.0 else np.rint(op.n * wide).astype(np.int64)[()]
    scalar = np.ndim(op.m) == np.ndim(n) == np.ndim(cold) == 0
    product = _product if scalar else _product.__wrapped__
    return _scaled(product(hardware, op.m, n, op.k, op.dtype, cold), 1.0 / wide)


@lru_cache(maxsize=8192)
def _product(hardware: HardwareProfile, m: Any, n: Any, k: int, dtype: str, cold: Any) -> cost.Seconds:
    """A matrix product's time; the same ones come with every method of a plan."""
    return cost.matmul_seconds(hardware, m=m, n=n, k=k, dtype=dtype, working_set=cold)


FAR = 8.0
"""Last-level caches beyond which nothing of a working set is left in one, whatever a coefficient's reach."""


def cold_bytes(hardware: HardwareProfile, ops: Sequence[Op]) -> Any:
    """Bytes that a pass moves from one visit to a layer to the next: weights and rows of all layers; None: no cache.

    What lies beyond every cache counts as FAR caches, one number, so that products of unlike methods stay alike.
    """
    cache = float(hardware.last_level_cache_bytes or 0)
    if not cache:
        return None
    moved = sum((op.count * moved_bytes(op) for op in ops if op.kind in ("matmul", "decode")), start=0.0)
    found = np.minimum(moved, FAR * cache)
    return float(np.max(found)) if np.ndim(found) == 0 or np.all(found == FAR * cache) else found


def moved_bytes(op: Op) -> Any:
    """What an op reads and writes: of a product its weights, activations and results."""
    if op.kind != "matmul":
        return op.bytes
    return 1.0 * op.n * op.k * (FORMATS[op.dtype].bits / 8.0) + 2.0 * op.m * (1.0 * op.k + op.n)
