"""Family files: every measured kernel fitted, families without measurements lent to, and all written as TOML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.accuracy import log_errors
from kvsim.coefficients import BOUNDS, FAMILIES, Coefficient
from kvsim.errors import KvsimError
from kvsim.fitting import DATE, fit, predictor, quantiles, trusted
from kvsim.hardware import HardwareProfile, load_device
from kvsim.kernels import SIBLING_WIDENING, kernel_family
from kvsim.lending import CACHE_GAIN, CPU, FOREIGN, GEMM_SHARES, LENDERS, MEMORY_SHARES, OTHER_UNITS
from kvsim.measured import Table, device_of, read_table

Spreads = tuple[tuple[float, float, float], tuple[float, float, float] | None]
Errors = dict[tuple[str, str], tuple[NDArray[np.float64], NDArray[np.bool_]]]
UNKNOWN: Spreads = ((-0.7, 0.0, 0.7), None)
"""Assumed where nothing was carried from one family to another."""
ENGINE_ORDER = ("vllm", "sglang", "trtllm", "*", "")
UNFUSED = {("hopper", "int8_wo")}
"""(family, format) of products of which only a kernel that is no guide to others was measured, so that it answers under
its own engine's name alone: SGLang 0.5.6's takes 22 us for 1 MB of weights and 92 us for 151 MB on an H100, where fp8
takes 7 and 66 us with its activations quantized first. By it 4-bit weights would be slower than bf16."""
SERVED = 100
"""Rows of whole servers below which a family borrows: 15 of the 24 on a GB200 say 8 to 133 ms for like questions."""
REALLY_DIFFERENT = 1.1
"""Engine versions part where their common fit's mean error is this many times that of separate fits."""


def _kernel_name(kernel: str, op: str) -> str:
    engine, _, name = kernel_family(kernel)
    return f"{engine}/{'*' if op == 'matmul' else name}"


def _mean_error(table: Table, c: Coefficient) -> float:
    return float(np.mean(np.abs(np.log(predictor(table)(c)[0] / table.seconds))))


def _fit_versions(table: Table, kernel: str, format: str, known: dict[str, float]) -> list[Coefficient]:
    """One set for all engine versions; where they really differ, the newest keeps the name, older ones add theirs."""
    together = fit(table, kernel, format, known)
    versions = np.array([kernel_family(str(k))[1] for k in table.kernel])
    if table.op == "matmul" or len(np.unique(versions)) == 1:
        return [together]
    order = sorted(np.unique(versions), key=lambda v: [int(x) for x in v.split(".") if x.isdecimal()])
    apart = [fit(table.where(versions == v), kernel, format, known) for v in order]
    separate = np.mean([_mean_error(table.where(versions == v), c) for v, c in zip(order, apart, strict=True)])
    if _mean_error(table, together) < REALLY_DIFFERENT * separate:
        return [together]
    engine, name = kernel.split("/")
    older = zip(order[:-1], apart[:-1], strict=True)
    return [apart[-1], *(replace(c, kernel=f"{engine}-{v}/{name}") for v, c in older)]


def _order(name: str) -> tuple[int, bool, str]:
    engine, kernel = name.split("/")
    return ENGINE_ORDER.index(engine), "prefill" not in kernel, name


def fit_family(tables: Iterable[Table], family: str) -> list[Coefficient]:
    """Every (op, kernel, format) measured on devices of one family, the default kernel of each op first.

    Matrix products have no kernel in most questions: rows of all engines together come first, then each engine's.
    """
    found: list[Coefficient] = []
    for table in tables:
        mine = table.where(np.array([device_of(str(g)).family == family for g in table.gpu]))
        mine = mine.where(trusted(mine))
        names = np.array([_kernel_name(str(k), mine.op) for k in mine.kernel])
        if mine.op == "matmul":
            usual = [f for f in _formats(mine.format) if (family, f) not in UNFUSED]
            found += [fit(mine.where(mine.format == f), "*", str(f)) for f in usual]
        for name in sorted(map(str, np.unique(names)), key=_order):
            known: dict[str, float] = {}
            for format in _formats(mine.format[names == name]):
                new = _fit_versions(mine.where((names == name) & (mine.format == format)), name, format, known)
                if format == "bf16" and mine.op == "decode":
                    known = {"bandwidth_share": new[0].bandwidth_share}
                found += new
    return found


def _formats(column: NDArray[Any]) -> list[str]:
    return sorted(map(str, np.unique(column)), key=lambda f: (f != "bf16", f))


def _elementwise(rows: list[Coefficient]) -> Coefficient:
    """Element-wise kernels: a product's launch, attention's bandwidth; arithmetic runs off the matrix unit."""
    decode = next(c for c in rows if c.op == "decode" and c.format == "bf16")
    product = next(c for c in rows if c.op == "matmul" and c.format == "bf16")
    return Coefficient("elementwise", "*", "*", product.t0_s, decode.bandwidth_share, 0.03, decode.cache_multiple,
                       cache_reach=decode.cache_reach, max_splits=1e4, slots=1.0, log_error=(-0.5, 0.0, 0.5),
                       devices=decode.devices, borrowed=decode.borrowed, date=DATE,
                       source=f"launch of a product, bandwidth of {decode.kernel}; no rows of its own")


def by_unit(rows: Iterable[Coefficient], device: HardwareProfile) -> list[Coefficient]:
    """Cache bandwidths as bytes a unit and clock of the device where they were measured: so siblings can have them."""
    each = device.bandwidth_bytes_per_s / (device.units * device.clock_hz)
    return [replace(c, cache_rate=c.cache_multiple * each, cache_multiple=0.0) for c in rows]


def to_lend(rows: Iterable[Coefficient]) -> list[Coefficient]:
    """The same for families that borrow, but products keep their cache's bandwidth as a multiple of memory's.

    Carried from one measured family to another, attention is off by 19 to 24% with the one and 23 to 28% with the
    other among recent GPUs, products by 16 to 25% and 14 to 19% (`python -m kvsim.crosscheck`).
    """
    return [c if c.op == "matmul" else by_unit([c], load_device(c.devices[0]))[0] for c in rows]


def lent(rows: list[Coefficient], lender: str, family: str, spreads: dict[str, Spreads]) -> list[Coefficient]:
    """The lender's coefficients for a family without measurements: published shares, wider intervals."""
    best = max(c.bandwidth_share for c in rows if c.op == "decode")
    found = []
    usual = next(c.flops_share for c in rows if c.op == "matmul" and c.format == "bf16")
    for c in rows:
        memory = min(1.0, c.bandwidth_share * MEMORY_SHARES[family] / best)
        product = GEMM_SHARES[family] / usual if c.op == "matmul" and family in GEMM_SHARES else 1.0
        other, bound = spreads.get(c.op, UNKNOWN)
        one = replace(c, bandwidth_share=memory, flops_share=min(1.2, c.flops_share * product), rows=0, devices=(),
                      borrowed=lender, log_error=other, memory_log_error=bound,
                      cache_rate=c.cache_rate * CACHE_GAIN.get(family, 1.0))
        # Elsewhere a "unit" is no streaming multiprocessor: rates and waves per unit would mean nothing.
        found.append(replace(one, element_rates=(), wave_s=0.0, slots=1.0) if family in OTHER_UNITS else one)
    return found


def carried_errors(table: Table, measured: dict[str, list[Coefficient]]) -> Errors:
    """ln(measured / predicted), and where memory bounds it, of each family under each other one's coefficients.

    Keyed (predicted family, lender).
    """
    families = np.array([device_of(str(gpu)).family for gpu in table.gpu])
    good = trusted(table)
    return {(str(family), lender): log_errors(table.where(good & (families == family)), tuple(rows))
            for family in np.unique(families) for lender, rows in measured.items() if lender != family}


def spread_of(errors: Errors, unseen: str = "", foreign: bool = False) -> Spreads:
    """Quantiles of errors between GPU families of one maker, those of `unseen` left out; wide where none are left.

    foreign: those of the one family of another maker that was measured (xe), under the others' coefficients, count too.
    """
    out = {unseen, "xe"}
    some = [e for (family, lender), e in errors.items()
            if lender not in out and (family not in out or (foreign and family == "xe"))]
    if not some:
        return UNKNOWN
    error, bound = (np.concatenate(column) for column in zip(*some, strict=True))
    return _no_bias(quantiles(error[~bound])), _no_bias(quantiles(error[bound]))


def _no_bias(log_error: tuple[float, float, float]) -> tuple[float, float, float]:
    low, _, high = log_error
    return min(low, -0.1), 0.0, max(high, 0.1)


def _line(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f'{name} = "{value}"'
    if name in ("log_error", "memory_log_error"):
        return f"{name} = [{', '.join(f'{v:.3f}' for v in value)}]"
    if name == "devices":
        quoted = ", ".join('"' + v + '"' for v in value)
        return f"{name} = [{quoted}]"
    if isinstance(value, tuple):
        return f"{name} = {{ {', '.join(f'{d} = {v:.4g}' for d, v in value)} }}"
    return f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"


def written(family: str, rows: list[Coefficient]) -> str:
    """The family's TOML text; fields at their default are left out."""
    head = ["# Written by `python -m kvsim.fitting`; edit the measurements, not this file.", f'family = "{family}"']
    blank = {f.name: f.default for f in fields(Coefficient)}
    for c in rows:
        head += ["", "[[coefficients]]"]
        for name, default in blank.items():
            value = getattr(c, name)
            if name in BOUNDS and isinstance(value, float):
                value = float(f"{value:.4g}")
            if value != default or name in ("log_error",):
                head.append(_line(name, value))
    return "\n".join(head) + "\n"


def read_tables(folder: Path) -> list[Table]:
    """Every CSV of kernel times in a folder (whole-server tables, named serving..., are left out): decode first."""
    tables = [read_table(p) for p in sorted(folder.glob("*.csv")) if not p.name.startswith("serving")]
    if not tables:
        raise KvsimError(f"no measured tables (*.csv) in {folder}")
    return sorted(tables, key=lambda t: ("decode", "prefill", "matmul").index(t.op))


def regenerate(folder: Path, out: Path) -> dict[str, list[Coefficient]]:
    """Fit every CSV of kernel times in `folder`, lend to the families without, and write one TOML a family."""
    tables = read_tables(folder)
    have = sorted({device_of(str(g)).family for t in tables for g in np.unique(t.gpu)})
    measured = {family: fit_family(tables, family) for family in have}
    measured = {family: [*rows, _elementwise(rows)] for family, rows in measured.items()}
    everything = {family: by_unit(rows, load_device(rows[0].devices[0])) for family, rows in measured.items()}
    loans = {family: to_lend(rows) for family, rows in measured.items()}
    errors = {t.op: carried_errors(t, loans) for t in tables}
    for family in FAMILIES:
        if family not in measured:
            lender = LENDERS[family]
            spreads = {op: spread_of(e, foreign=family in FOREIGN) for op, e in errors.items()}
            rows = lent((measured if family in OTHER_UNITS else loans)[lender], lender, family, spreads)
            everything[family] = CPU(rows) if family == "cpu" else rows
    engines = served(folder)
    out.mkdir(parents=True, exist_ok=True)
    for family, rows in everything.items():
        (out / f"{family}.toml").write_text(written(family, [*rows, *engines.get(family, [])]), encoding="utf-8")
    return everything


def served(folder: Path) -> dict[str, list[Coefficient]]:
    """What servers add, by family: fitted to tables of whole servers where they have SERVED rows, else borrowed.

    Empty where the folder has no such table. A CPU has none: no server of these was measured on one, nor is like it.
    """
    from kvsim.serving_steps import fit_engines, read_steps

    steps = [s for p in sorted(folder.glob("serving*.csv")) for s in read_steps(p)[0]]
    counts = {f: sum(len(s.measured) for s in steps if s.device.family == f) for f in FAMILIES}
    own = {f: fit_engines([s for s in steps if s.device.family == f]) for f, n in counts.items() if n >= SERVED}
    if not own:
        return {}
    lender = max(own, key=lambda f: counts[f])
    loan = [replace(c, rows=0, devices=(), borrowed=lender, log_error=_apart(c.log_error)) for c in own[lender]]
    return {f: own.get(f, loan) for f in FAMILIES if f != "cpu"}


def _apart(log_error: tuple[float, float, float]) -> tuple[float, float, float]:
    """A server's spread on devices of another family: wider by what kernels' times differ there."""
    more = SIBLING_WIDENING["cast"]
    low, _, high = log_error
    return -((low * low + more * more) ** 0.5), 0.0, (high * high + more * more) ** 0.5


def main() -> None:
    """Command line: fit the tables of a folder and write the family files."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.fitting", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder of measured CSV files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the family TOMLs")
    given = parser.parse_args()
    try:
        for family, rows in regenerate(given.folder, given.out).items():
            print(f"{family}: {len(rows)} rows")
    except KvsimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)  # as every command of kvsim ends on a wrong question
