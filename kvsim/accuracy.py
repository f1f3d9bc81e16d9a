"""How far predictions are from measured kernel times: by device, kernel and format, with the intervals' coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.coefficients import Coefficient
from kvsim.cost import attention_seconds, matmul_seconds
from kvsim.errors import KvsimError
from kvsim.fitting import trusted
from kvsim.measured import Table, device_of, file_named, read_table
from kvsim.seconds import Seconds


@dataclass(frozen=True)
class Row:
    """Accuracy over one group of measured rows.

    error: median of |predicted / measured - 1|; mean_error its mean; coverage: share of rows inside the 90% interval;
    like_llm: rows of shapes that language models use (decode only), llm_error their median error (None: no such rows).
    trusted: False for rows that contradict the datasheet or come from a table known to be wrong; reported apart.
    """

    device: str
    kernel: str
    format: str
    op: str
    rows: int
    error: float
    mean_error: float
    coverage: float
    like_llm: int
    llm_error: float | None
    llm_coverage: float | None
    coefficients: str
    trusted: bool = True


def predicted(table: Table, gpu: str, kernel: str, format: str, own: tuple[Coefficient, ...] = ()) -> Seconds:
    """Predict rows that share gpu, kernel and format; `own` replaces the device's coefficients."""
    device = device_of(gpu)
    if own:
        device = replace(device, own_coefficients=own)
    sizes: dict[str, Any] = dict(table.sizes)
    if table.op == "matmul":
        return matmul_seconds(device, dtype=format, kernel=kernel, **sizes)
    sizes["tokens"] = sizes.pop("seq")
    return attention_seconds(device, phase=table.op, format=format, kernel=kernel, **sizes)


def log_errors(table: Table, own: tuple[Coefficient, ...] = ()) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """ln(measured / predicted), group by group, and where memory bounds the prediction."""
    answers = [(rows, predicted(rows, *key, own=own)) for key, rows in table.groups()]
    return (np.concatenate([np.log(rows.seconds / answer.seconds) for rows, answer in answers]),
            np.concatenate([answer.memory_bound for _, answer in answers]))


def like_llm(table: Table) -> NDArray[np.bool_]:
    """Decode rows of shapes that language models use.

    No window, head_dim 128, at most 8 KV heads, 4 to 16 queries per KV head, 512 tokens or more, batch at most 256.
    """
    if table.op != "decode":
        return np.zeros(len(table), bool)
    s = table.sizes
    group = s["n_heads"] // s["n_kv_heads"]
    found: NDArray[np.bool_] = ((s["window"] == 0) & (s["head_dim"] == 128) & (s["n_kv_heads"] <= 8) & (group >= 4)
                                & (group <= 16) & (s["seq"] >= 512) & (s["batch"] <= 256))
    return found


@dataclass(frozen=True)
class Compared:
    """A measured file beside predictions: rows by group, figures over all, and why rows were left out, with counts."""

    rows: list[Row]
    summary: dict[str, float | None]
    left_out: dict[str, int]


def compared(path: str | Path) -> Compared:
    """Compare a measured CSV with predictions: kernels' times, or whole servers' where it has a column tpot_ms.

    Raises KvsimError, one line, for a file that cannot be read or holds nothing that can be predicted.
    """
    from kvsim import serving_steps

    if serving_steps.is_serving(path):
        steps, left_out = serving_steps.read_steps(path)
        rows = serving_steps.evaluate_steps(steps)
        return Compared(rows, summary(rows) | serving_steps.steps_summary(steps), left_out)
    rows = evaluate(path)
    return Compared(rows, summary(rows), {})


def evaluate(path: str | Path) -> list[Row]:
    """Compare a measured CSV of kernel times with predictions, one Row for each (gpu, kernel, format).

    Raises KvsimError, one line naming the file, where it cannot be read or a device or format is unknown.
    """
    table = read_table(path)
    try:
        return evaluate_table(table)
    except KvsimError as why:
        raise KvsimError(f"{file_named(path)}: {why}") from None


def evaluate_table(table: Table, own: tuple[Coefficient, ...] = ()) -> list[Row]:
    """The same for rows already read; `own` replaces every device's coefficients."""
    keep = trusted(table)
    return [_row(key, rows, own, good) for good in (True, False) if (keep == good).any()
            for key, rows in table.where(keep == good).groups()]


def _row(key: tuple[str, str, str], rows: Table, own: tuple[Coefficient, ...], good: bool) -> Row:
    answer = predicted(rows, *key, own=own)
    error = np.abs(answer.seconds / rows.seconds - 1.0)
    inside = (answer.low <= rows.seconds) & (rows.seconds <= answer.high)
    llm = like_llm(rows)
    some = bool(llm.any())
    return Row(*key, rows.op, len(rows), float(np.median(error)), float(np.mean(error)), float(np.mean(inside)),
               int(llm.sum()), float(np.median(error[llm])) if some else None,
               float(np.mean(inside[llm])) if some else None, answer.coefficients, good)


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """Over groups of trusted rows: median error, mean coverage, median error over rows like a language model's."""
    rows = [r for r in rows if r.trusted]
    if not rows:
        return {"error": None, "coverage": None, "llm_error": None}
    llm = [r.llm_error for r in rows if r.llm_error is not None]
    return {"error": float(np.median([r.error for r in rows])), "coverage": float(np.mean([r.coverage for r in rows])),
            "llm_error": float(np.median(llm)) if llm else None}


def table_lines(rows: Sequence[Row], more: Mapping[str, float | None] | None = None) -> list[str]:
    """The rows as text lines with a header, the medians over groups and any other figures at the end."""
    def percent(value: float | None) -> str:
        return f"{100 * value:6.1f}%" if value is not None else "      -"

    lines = [f"{'device':20} {'kernel':42} {'format':9} {'rows':>6} {'error':>7} {'in 90%':>7} {'LLM':>5} {'error':>7}"]
    for r in rows:
        note = "" if r.trusted else "  not trusted"
        lines.append(f"{r.device[:20]:20} {r.kernel[-42:]:42} {r.format[:9]:9} {r.rows:6d} {percent(r.error)} "
                     f"{percent(r.coverage)} {r.like_llm:5d} {percent(r.llm_error)}{note}")
    total = summary(rows)
    lines.append(f"{'median over groups':73} {'':6} {percent(total['error'])} {percent(total['coverage'])} {'':5} "
                 f"{percent(total['llm_error'])}")
    lines += [f"{name.replace('_', ' '):73} {'':6} {percent(value)}" for name, value in (more or {}).items()
              if name not in total]
    return lines
