"""Whole servers' TPOT from a CSV, by model, lengths, concurrency and ranks, beside predictions; no KV dtype known."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.accuracy import Row
from kvsim.catalogue import find
from kvsim.coefficients import Coefficient
from kvsim.configs import load_model
from kvsim.engines.parallel import ParallelLayout
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.fitting import DATE, SOURCE, quantiles
from kvsim.hardware import HardwareProfile
from kvsim.kernels import Choice, engine_choice, kernel_family
from kvsim.measured import ENCODING, MAX_LINE, device_of, file_named, header, rows_of
from kvsim.method import parse_method
from kvsim.model import ModelSpec
from kvsim.prediction import predict
from kvsim.record import Case
from kvsim.seconds import Seconds
from kvsim.server import added_seconds, routed_layers, token_seconds
from kvsim.workload import Workload

Floats = NDArray[np.float64]
COLUMNS = ("system", "backend", "model_path", "gemm_quant_mode", "isl", "osl", "concurrency", "tp_size", "tpot_ms")
WEIGHTS = {"": "", "float16": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4",
           "int8_wo": "int8", "int4_wo": "int4"}
"""Weight formats that tables name; not recorded: the model's own."""
SUFFIXES = ("-nvfp4", "-fp8", "-fp4", "-instruct")
FOLDS = 4
START = {"layer_s": 4e-6, "experts_s": 4e-6, "prefill_share": 1.0}
"""Where a fit begins, and what holds a number that few rows speak of."""
PRIOR, LOSS = 0.3, 0.1


class Server(NamedTuple):
    """What rows that are predicted together share."""

    gpu: str
    engine: str
    model: str
    weights: str
    ranks: int
    experts: int
    groups: int
    stages: int = 1


@dataclass(frozen=True, eq=False)
class Steps:
    """Rows of one server with what the kernels alone take: a step of all sequences, and one prompt, in seconds.

    fold: which of FOLDS blocks of shapes (lengths, concurrency) a row belongs to.
    """

    server: Server
    device: HardwareProfile
    spec: ModelSpec
    concurrency: Floats
    new_tokens: Floats
    step: Floats
    prompt: Floats
    measured: Floats
    fold: NDArray[np.int64]

    def where(self, mask: NDArray[np.bool_]) -> Steps:
        """The rows that a mask selects."""
        names = ("concurrency", "new_tokens", "step", "prompt", "measured", "fold")
        return replace(self, **{name: getattr(self, name)[mask] for name in names})


def is_serving(path: str | Path) -> bool:
    """Whether a CSV holds whole-server figures: its header has a column tpot_ms."""
    try:
        with Path(path).open(encoding=ENCODING, newline="") as file:
            return "tpot_ms" in header(file.readline(MAX_LINE))
    except (OSError, UnicodeDecodeError, csv.Error):
        return False  # whoever reads it as a table says why not


def read_steps(path: str | Path) -> tuple[list[Steps], dict[str, int]]:
    """The rows of a CSV with their kernels' predicted times, by server; and why others were left out, with counts.

    Columns: system, backend, model_path, gemm_quant_mode ("" = the model's own), isl, osl, concurrency, tp_size,
    tpot_ms, and where there are any attention_dp_size, moe_ep_size, pp_size. Raises KvsimError, one line, naming file
    and line, or the reason where no row can be predicted.
    """
    where = file_named(path)
    rows: dict[Server, list[tuple[float, ...]]] = {}
    try:
        with Path(path).open(encoding=ENCODING, newline="") as file:
            for server, numbers in _rows(file, where):
                rows.setdefault(server, []).append(numbers)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise KvsimError(f"{where} cannot be read: {shown(str(error), 120)[1:-1]}") from None
    if not rows:
        raise KvsimError(f"{where} holds no rows")
    found: list[Steps] = []
    left_out: dict[str, int] = {}
    for server, some in rows.items():
        try:
            found.append(_steps(server, np.array(some)))
        except KvsimError as why:
            reason = f"{server.model} on {server.ranks} {server.gpu}: {str(why).partition(';')[0]}"
            left_out[reason] = left_out.get(reason, 0) + len(some)
    if not found:
        first, *others = left_out
        more = f", and {len(others)} more reasons" if others else ""
        raise KvsimError(f"{where} holds no row that can be predicted: {first}{more}")
    return found, left_out


def _rows(file: Any, where: str) -> Iterator[tuple[Server, tuple[float, ...]]]:
    lines = rows_of(file, where)
    _, columns = next(lines)
    for need in COLUMNS:
        if need not in columns:
            raise KvsimError(f"{where} has no column {need!r}{did_you_mean(need, columns)}")
    for here, fields in lines:
        row = dict(zip(columns, fields, strict=True))
        ranks = _number(row, "tp_size", here) * max(1, _number(row, "attention_dp_size", here, 1))
        experts, groups = (max(1, _number(row, name, here, 1)) for name in ("moe_ep_size", "attention_dp_size"))
        quantized = row["gemm_quant_mode"].strip()
        if quantized not in WEIGHTS:
            raise KvsimError(f"{here} unknown gemm_quant_mode {shown(quantized)}{did_you_mean(quantized, WEIGHTS)}")
        server = Server(row["system"].strip(), kernel_family(row["backend"].strip() or "?")[0],
                        _model(row["model_path"]), WEIGHTS[quantized], ranks, experts, groups,
                        _number(row, "pp_size", here, 1))
        sizes = tuple(float(_number(row, name, here)) for name in ("isl", "osl", "concurrency"))
        yield server, (*sizes, _milliseconds(row["tpot_ms"], here))


def _number(row: dict[str, str], name: str, where: str, empty: int = 0) -> int:
    """A whole number, 1 or more; `empty` (0: an error) where the table has none, or 0."""
    text = row.get(name, "").strip()
    try:
        value = float(text) if text or not empty else 0.0
    except ValueError:
        value = -1.0
    if value == 0.0 and empty:
        return empty
    if not (1.0 <= value < 2**30 and value == int(value)):
        raise KvsimError(f"{where} {name} must be a whole number, 1 or more, got {shown(text)}")
    return int(value)


def _milliseconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and 0.0 < value < 1e7):
        raise KvsimError(f"{where} tpot_ms must be a positive number of milliseconds, got {shown(text)}")
    return value * 1e-3


def _model(path: str) -> str:
    """The shipped model that a hub id means, what names its weights aside."""
    name = path.strip().lower().rpartition("/")[2]
    for tried in (name, *(name.removesuffix(s) for s in SUFFIXES)):
        entry = find(tried, must=False)
        if entry is not None:
            return entry.name
    return name


def _steps(server: Server, rows: NDArray[np.float64]) -> Steps:
    prompt, new, many, measured = rows.T
    spec, device = load_model(server.model), device_of(server.gpu)
    if server.stages > 1:
        raise KvsimError(f"a pipeline of {server.stages} stages is not predicted")
    _engine(device, server.engine)
    fits = server.experts > 1 and server.ranks % server.experts == 0
    layout = ParallelLayout(tensor=server.ranks, expert=server.experts if fits else 1, attention_data=server.groups)
    case = Case(spec, device, parse_method("full"), Workload(1, 1, 0), weights=server.weights, layout=layout,
                kernel=server.engine)
    whole = np.stack([prompt, new, many]).astype(np.int64)
    # in the middle of an answer; one step of as many sequences as run at once
    decode = predict(replace(case, workload=Workload(whole[2], whole[0] + whole[1] // 2, 0))).decode
    lengths, at = np.unique(whole[0], return_inverse=True)
    prefill = predict(replace(case, workload=Workload(1, lengths, 0))).prefill
    bare = [sum(line.seconds for line in t.lines if line.name != "engine") for t in (decode, prefill)]
    fold = (whole[0] // 128 * 7 + whole[1] // 128 * 13 + whole[2] * 5) * 2_654_435_761 % 2**32 // 2**7 % FOLDS
    return Steps(server, device, spec, many, new, np.broadcast_to(bare[0], many.shape) * 1.0,
                 np.broadcast_to(bare[1], lengths.shape)[at], measured, fold)


def predicted(steps: Steps, own: Coefficient | None = None) -> Seconds:
    """TPOT of every row; `own` replaces the engine's coefficients."""
    s, device = steps, steps.device
    if own is not None:
        device = replace(device, own_coefficients=(replace(own, kernel="*", borrowed=""),))
    added = added_seconds(_engine(device, s.server.engine).coefficient, s.spec.n_layers, routed_layers(s.spec))
    return token_seconds(device, s.step + added, s.prompt, concurrency=s.concurrency, new_tokens=s.new_tokens,
                         engine=s.server.engine)


def _engine(device: HardwareProfile, engine: str) -> Choice:
    choice = engine_choice(device, engine)
    if choice is None:
        raise KvsimError(f"no engine coefficients for device {device.name} (family {device.family})")
    return choice


def fit_engine(steps: Sequence[Steps], kernel: str) -> Coefficient:
    """An engine's coefficients from its rows: the log error made small, outliers counting little.

    Its spread is that of rows whose block of shapes the fit has not seen, where every block has rows.
    """
    errors = []
    for fold in range(FOLDS):
        seen = [s.where(s.fold != fold) for s in steps]
        c = _fit([s for s in seen if len(s.measured)], kernel)
        errors += [np.log(s.measured / predicted(s, c).seconds) for s in (s.where(s.fold == fold) for s in steps)]
    return replace(_fit(steps, kernel), log_error=quantiles(np.concatenate(errors)))


def _fit(steps: Sequence[Steps], kernel: str) -> Coefficient:
    from scipy.optimize import least_squares

    names = tuple(START)
    starts = np.log([START[n] for n in names])
    base = Coefficient("engine", kernel, "*", 0.0, 1.0, 1.0, rows=sum(len(s.measured) for s in steps), source=SOURCE,
                       date=DATE, devices=tuple(sorted({s.device.name for s in steps})))

    def misfit(x: Floats) -> Floats:
        c = replace(base, **dict(zip(names, np.exp(x).tolist(), strict=True)))
        return np.concatenate([*(np.log(s.measured / predicted(s, c).seconds) for s in steps), PRIOR * (x - starts)])

    found = least_squares(misfit, starts, loss="soft_l1", f_scale=LOSS)
    return replace(base, **dict(zip(names, np.exp(found.x).tolist(), strict=True)))


def fit_engines(steps: Sequence[Steps]) -> list[Coefficient]:
    """Coefficients of all engines together (kernel `*`), then of each, from rows of one device family."""
    engines = dict.fromkeys(s.server.engine for s in steps)
    return [fit_engine([s for s in steps if e in ("*", s.server.engine)], "*" if e == "*" else f"{e}/*")
            for e in ("*", *engines)]


def evaluate_steps(steps: Sequence[Steps]) -> list[Row]:
    """Errors and coverage by server; dense models count as what is like a language model's kernel elsewhere."""
    return [_row(s, predicted(s)) for s in sorted(steps, key=lambda s: s.server)]


def steps_summary(steps: Sequence[Steps]) -> dict[str, float | None]:
    """Over rows, not groups: median errors and coverage of dense models, of those with experts."""
    found: dict[str, float | None] = {}
    for name, wanted in (("dense", False), ("experts", True)):
        some = [s for s in steps if bool(routed_layers(s.spec)) is wanted]
        pairs = [(s, predicted(s)) for s in some]
        errors = [np.abs(p.seconds / s.measured - 1.0) for s, p in pairs]
        inside = [(p.low <= s.measured) & (s.measured <= p.high) for s, p in pairs]
        found[f"{name}_rows_error"] = float(np.median(np.concatenate(errors))) if some else None
        found[f"{name}_rows_coverage"] = float(np.mean(np.concatenate(inside))) if some else None
    return found


def _row(s: Steps, answer: Seconds) -> Row:
    error = np.abs(answer.seconds / s.measured - 1.0)
    inside = (answer.low <= s.measured) & (s.measured <= answer.high)
    dense = not routed_layers(s.spec)
    median, share = float(np.median(error)), float(np.mean(inside))
    name = f"{s.server.engine}/{s.server.model} on {s.server.ranks}"
    return Row(s.server.gpu, name, s.server.weights or s.spec.dtype, "serving", len(error), median,
               float(np.mean(error)), share, len(error) if dense else 0, median if dense else None,
               share if dense else None, answer.coefficients)


def unseen_blocks(steps: Sequence[Steps]) -> tuple[Floats, NDArray[np.bool_]]:
    """Relative errors of rows, each under its engine's fit to other blocks of shapes; which are of dense models."""
    found: list[Floats] = []
    dense: list[bool] = []
    for engine in dict.fromkeys((s.device.family, s.server.engine) for s in steps):
        mine = [s for s in steps if (s.device.family, s.server.engine) == engine]
        for fold in range(FOLDS):
            seen = [t for t in (s.where(s.fold != fold) for s in mine) if len(t.measured)]
            if not seen:
                continue
            c = _fit(seen, "*")
            for s in (s.where(s.fold == fold) for s in mine):
                found.append(np.abs(predicted(s, c).seconds / s.measured - 1.0))
                dense += [not routed_layers(s.spec)] * len(s.measured)
    return np.concatenate(found), np.array(dense)
