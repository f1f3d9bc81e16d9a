"""Calibration's second half: points that were measured become a device's coefficients, part by part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

import kvsim
from kvsim.coefficients import Coefficient
from kvsim.fitting import fit, quantiles
from kvsim.hardware import HardwareProfile
from kvsim.kernels import FORMATS
from kvsim.measured import Table
from kvsim.op import EAGER, FUSED, PART, Op, on_top, op_seconds
from kvsim.prediction import phase_ops
from kvsim.record import Case
from runtime.calibration_plan import PLAIN_POLICIES, SAME_POLICIES
from runtime.coefficient_fit import SLOTS, Fitted, Sample, fitted
from runtime.microbench import Point
from runtime.watch import REST

LAYERS = 4
"""Layers of the model whose last one is measured: policies that spare the first ones show there what they do."""
SDPA, PARTS = "*/sdpa", f"*/{PART}"
PACE = "pace"
"""The format under which a profile tells how long `runtime.pace`'s step took."""
WORTH = 0.03
"""Share of the eager kernel's time above which a part on top of it is worth a row."""
NOISE = 0.03
"""Log widening of every interval beyond what fits left: another run of the same machine differs by as much."""


@dataclass(frozen=True)
class Origin:
    """Where the measurements come from, for each coefficient."""

    device: HardwareProfile
    source: str
    date: str

    def base(self, op: str, kernel: str, format: str) -> Coefficient:
        """A row without times yet."""
        return Coefficient(op, kernel, format, 0.0, 1.0, 1.0, devices=(self.device.name,), source=self.source,
                           date=self.date)


@lru_cache(maxsize=4096)
def ops_of(device: HardwareProfile, point: Point, dtype: str) -> tuple[Op, ...]:
    """The predicted pieces of a measured line of one layer."""
    w = dict(point.work)
    spec = kvsim.ModelSpec.from_numbers(layers=LAYERS, n_heads=w["n_heads"], n_kv_heads=w["n_kv_heads"],
                                        head_dim=w["head_dim"], dtype=dtype)
    work = kvsim.Workload(w["batch"], w["prompt"], w["rows"] - w["prompt"])
    phase, _, name = point.what.partition(" ")
    found = phase_ops(Case(spec, device, kvsim.parse_method(str(w["method"])), work), phase)  # type: ignore[arg-type]
    if name == REST:  # a layer alone has no norms: this is the plain writing of rows
        found = [op for op in found if op.keys and op.keys[0][0].startswith("full ")]
    # what is beside a part stands for it where it was not measured, which it is being
    mine = [op for op in found if op.name == name and not op.beside and np.all(np.asarray(op.count) > 0)]
    last: dict[str, Op] = {op.kind: op for op in mine}
    return tuple(last.values())


def product_rows(origin: Origin, points: Sequence[Point], path: str) -> list[Coefficient]:
    """Matrix products by dtype: those of several rows by the fit that public tables get, single rows on their own.

    path: a file that holds the device so far.
    """
    found = []
    for dtype in dict.fromkeys(str(dict(p.work)["dtype"]) for p in points):
        mine = [dict(p.work) | {"seconds": p.seconds} for p in points if dict(p.work)["dtype"] == dtype]
        several, single = ([w for w in mine if (w["m"] == 1) == one] for one in (False, True))
        sizes = {n: np.array([w[n] for w in several], np.int64) for n in ("m", "n", "k")}
        count = len(several)
        table = Table("matmul", np.full(count, path), np.full(count, "torch"), np.full(count, dtype), sizes,
                      np.array([w["seconds"] for w in several]))
        one = replace(fit(table, "torch/linear", dtype), source=origin.source, date=origin.date)
        found.append(_widened(_single(origin.device, one, single, dtype)))
    return found


def _single(device: HardwareProfile, c: Coefficient, points: Sequence[dict[str, Any]], dtype: str) -> Coefficient:
    """The same with the price of one row: weights streamed once, each output a sum of its own."""
    from scipy.optimize import nnls

    if len(points) < 3:
        return c
    seconds = np.array([w["seconds"] for w in points])
    size = FORMATS[dtype].bits / 8.0
    moved = np.array([size * w["n"] * w["k"] for w in points])
    columns = np.stack([np.ones(len(points)), moved, np.array([w["n"] / 1024.0 for w in points])], axis=1)
    scale = columns.max(axis=0)
    found, _ = nnls(columns / scale / seconds[:, None], np.ones(len(points)))
    start, stream, each = found / scale
    share = 1.0 / max(stream * device.bandwidth_bytes_per_s, 1.0 / 1.1)
    return replace(c, single_t0_s=float(start), single_share=float(max(share, 0.01)), single_s=float(each))


def prefill_rows(origin: Origin, points: Sequence[Point]) -> list[Coefficient]:
    """Attention of a whole prompt, by dtype."""
    by_format: dict[str, list[Sample]] = defaultdict(list)
    for p in points:
        w = dict(p.work)
        whole = Point("prefill attention", tuple({**w, "prompt": w["rows"], "method": "full"}.items()), 0.0, 1.0, 1.0)
        by_format[w["format"]] += [Sample(op, p.seconds) for op in ops_of(origin.device, whole, w["format"])]
    return pooled([fitted(origin.device, origin.base("prefill", SDPA, form), samples, own=False)
                   for form, samples in by_format.items()])


def layer_rows(origin: Origin, points: Sequence[Point], dtype: str, prefills: list[Coefficient]) -> list[Coefficient]:
    """Attention over caches, writing and policies, each part by its name."""
    attention = [p for p in points if p.what == "decode attention"]
    rows = _formats(origin, attention, dtype)
    device = replace(origin.device, own_coefficients=(*(r.row for r in rows), *prefills, _any(origin)))
    rows += _on_top(replace(origin, device=device), attention, dtype)
    by_key: dict[str, list[Sample]] = defaultdict(list)
    for p in points:
        if p.what == "decode attention":
            continue
        ops = {op.kind: op for op in ops_of(origin.device, p, dtype)}
        main = ops.get("elementwise")
        # a part alone has one name; with corrections the last name is the new one
        if main is not None and main.keys:
            other = sum(float(t.seconds) for op in ops.values() if op is not main for t in op_seconds(device, op))
            by_key[main.keys[-1][0]].append(Sample(main, p.seconds - other, str(dict(p.work)["method"]), other))
    known: dict[str, Fitted] = {}
    for key, samples in sorted(by_key.items(), key=lambda item: max(len(s.op.keys) for s in item[1])):
        so_far = replace(device, own_coefficients=(*(k.row for k in known.values()), _any(origin)))
        own = _without_known(so_far, samples, key)
        known[key] = fitted(origin.device, origin.base("elementwise", PARTS, key), own)
    return pooled([*rows, *known.values()])


def _any(origin: Origin) -> Coefficient:
    return replace(origin.base("elementwise", "*", "*"), t0_s=3e-6)


def _without_known(device: HardwareProfile, samples: list[Sample], key: str) -> list[Sample]:
    """Samples of one part alone: what the other parts of the method take is subtracted."""
    found = []
    for s in samples:
        others = tuple((name, share) for name, share in s.op.keys if name != key)
        took = sum(float(t.seconds) for t in op_seconds(device, replace(s.op, keys=others, only_known=True)))
        share = float(dict(s.op.keys)[key])
        found.append(replace(s, seconds=(s.seconds - took) / share, paid=(s.paid + took) / share))
    return found


def _formats(origin: Origin, points: Iterable[Point], dtype: str) -> list[Fitted]:
    """The kernels themselves: torch's own, and those over packed rows by format, with nothing on top."""
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for p in points:
        w = dict(p.work)
        for op in ops_of(origin.device, p, dtype):
            policy = op.adds[-1][0] if op.adds else ""
            # torch's own attention, where nothing stands between and no kernel of ours was taken
            plain = w["method"] == "full" and w["path"] == EAGER
            family = SDPA if plain else f"*/{w['path']}"
            if not op.adds or policy in PLAIN_POLICIES:
                groups[family, op.formats[0][0]].append(Sample(op, p.seconds, str(w["method"])))
    order = (SDPA, f"*/{FUSED}", f"*/{EAGER}")
    return [fitted(origin.device, origin.base("decode", family, form), samples, gathers=family != order[2])
            for (family, form), samples in sorted(groups.items(), key=lambda g: order.index(g[0][0]))]


def _on_top(origin: Origin, points: Iterable[Point], dtype: str) -> list[Fitted]:
    """What bases, corrections and policies add to attention on rows of a format, fused and eager."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for p in points:
        w = dict(p.work)
        for op in ops_of(origin.device, p, dtype):
            if op.adds and op.adds[-1][0] not in (*PLAIN_POLICIES, *SAME_POLICIES):
                here = replace(op, kernels=(str(w["path"]),))
                paid = sum(float(t.seconds) for t in op_seconds(origin.device, here))
                key = f"{op.adds[-1][0]} {w['path']}"
                groups[key].append(Sample(on_top(op), p.seconds - paid, str(w["method"]), paid))
    found = []
    for key, samples in groups.items():
        # where a part makes attention faster than the plain eager kernel, nothing is added
        if np.median([s.seconds / s.paid for s in samples]) > WORTH:
            found.append(fitted(origin.device, origin.base("decode", PARTS, key), samples))
    return found


def activation_rows(origin: Origin, samples: Sequence[tuple[Op, Op, float]]) -> list[Coefficient]:
    """Small kernels of a layer and the Python around them; and what a pass does once, around its layers.

    samples: (a layer's kernels, the once part, seconds of both) for models of few and of many layers.
    """
    inside: list[Sample] = []
    once: list[Sample] = []
    by_work: dict[tuple[float, float], list[tuple[Op, Op, float]]] = defaultdict(list)
    for each, around, seconds in samples:
        by_work[float(each.bytes), float(around.bytes)].append((each, around, seconds))
    for alike in by_work.values():
        (few, around, short), *_, (many, _, long) = sorted(alike, key=lambda s: float(s[0].count))
        per = max((long - short) / (float(many.count) - float(few.count)), 1e-7)
        inside.append(Sample(few, per, paid=0.0))
        once.append(Sample(around, max(short - per * float(few.count), 1e-6), paid=per * float(few.count)))
    rows = [fitted(origin.device, origin.base("elementwise", PARTS, "activations"), inside),
            fitted(origin.device, origin.base("elementwise", PARTS, "around layers"), once)]
    return [_widened(r.row) for r in rows]


def pace_row(origin: Origin, seconds: float) -> Coefficient:
    """A small model's step when nothing disturbed it: no prediction's part, validations compare the machine with it."""
    return replace(origin.base("elementwise", PARTS, PACE), t0_s=seconds)


def stream_row(origin: Origin, points: Sequence[Point], launch: Point) -> Coefficient:
    """Elementwise kernels of any kind: the least launch, bandwidth by working set."""
    device, reads = origin.device, [p for p in points if p.what == "copy"]
    sizes = np.array([dict(p.work)["bytes"] for p in reads], float)
    rates = sizes / np.maximum(np.array([p.seconds for p in reads]) - launch.seconds, 1e-9)
    cache = float(device.last_level_cache_bytes or 0)
    far = rates[sizes >= 2.0 * cache] if cache else rates
    near = rates[(sizes >= cache / 32) & (sizes <= cache / 4)] if cache else rates[:0]
    share = float(np.clip(np.median(far) / device.bandwidth_bytes_per_s, 0.05, 1.05))
    multiple = float(np.clip(np.median(near) / device.bandwidth_bytes_per_s, 0.0, 15.0)) if near.size else 0.0
    base = replace(origin.base("elementwise", "*", "*"), t0_s=launch.seconds, bandwidth_share=share, flops_share=0.03,
                   cache_multiple=multiple if multiple > share else 0.0, slots=SLOTS, rows=len(reads))
    best: tuple[float, Coefficient, np.ndarray] | None = None
    for reach in (0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.1):
        one = replace(base, cache_reach=reach)
        times = [op_seconds(replace(device, own_coefficients=(one,)), Op("copy", "elementwise", bytes=s))[0].seconds
                 for s in sizes]
        error = np.log(np.array([p.seconds for p in reads]) / np.array(times, float))
        if best is None or np.abs(error).sum() < best[0]:
            best = (float(np.abs(error).sum()), one, error)
    assert best is not None
    return replace(best[1], log_error=quantiles(best[2]))


def pooled(rows: Sequence[Fitted]) -> list[Coefficient]:
    """Rows of one kind share their errors: eight points have no 5% quantile of their own."""
    by_kind: dict[tuple[str, str], list[Fitted]] = defaultdict(list)
    for one in rows:
        by_kind[one.row.op, one.row.kernel].append(one)
    found = []
    for one in rows:
        kin = by_kind[one.row.op, one.row.kernel]
        errors = np.concatenate([k.errors - np.median(k.errors) for k in kin])
        found.append(_widened(replace(one.row, log_error=quantiles(errors))))
    return found


def _widened(c: Coefficient) -> Coefficient:
    low, middle, high = c.log_error
    return replace(c, log_error=(-((low * low + NOISE**2) ** 0.5), middle, (high * high + NOISE**2) ** 0.5))
