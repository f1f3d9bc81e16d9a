"""Records, plans and sweeps as rows, DataFrames and labelled arrays; DataFrames as questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError, did_you_mean
from kvsim.grid import Sweep
from kvsim.hardware import HardwareProfile, load_device
from kvsim.method import Method, parse_method, preset_name
from kvsim.model import ModelSpec
from kvsim.parts import TokenPolicy
from kvsim.plan import Plan
from kvsim.prediction import predict
from kvsim.record import Case, Record
from kvsim.tokens.keep import Keep
from kvsim.workload import Workload

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

Row = dict[str, Any]

UNITS = {
    "cache_bytes": "B",
    "total_bytes": "B",
    "peak_bytes": "B",
    "ttft_s": "s",
    "ttft_low_s": "s",
    "ttft_high_s": "s",
    "tpot_s": "s",
    "tpot_low_s": "s",
    "tpot_high_s": "s",
    "prompt_tokens": "tokens",
    "batch": "sequences",
}
LOSSES = ("kl", "top1", "ppl_ratio", "evidence")
"""What a plan's rows say of measured quality; None where nothing was measured."""
INSTALL = "pip install 'kvsim[plot]'"


def family(method: Method) -> str:
    """Which of the three choices a method makes: full, format, tokens, basis, or hybrid for more than one."""
    roles = {"tokens" if isinstance(p, TokenPolicy) else p.role for p in method.parts()}
    made = sorted("format" if r == "correction" else r for r in roles)
    return made[0] if len(set(made)) == 1 else "hybrid" if made else "full"


def called(method: Method) -> str:
    """The preset's name, a policy before a preset's name, or the written form: short, and it reads back."""
    whole = preset_name(method)
    if whole or method.clauses or isinstance(method.tokens, Keep):
        return whole or str(method)
    kept = preset_name(replace(method, tokens=Keep()))
    return f"{method.tokens} | {kept}" if kept and kept != "full" else str(method)


def record_rows(record: Record) -> list[Row]:
    """One row a point of the workload: what was asked, bytes, seconds with their interval, what fits."""
    case, work = record.case, record.case.workload
    columns = {
        "batch": work.batch,
        "prompt_tokens": work.prompt_tokens,
        "new_tokens": work.new_tokens,
        "cache_bytes": record.cache_bytes,
        "weights_bytes": record.weights_bytes,
        "total_bytes": record.total_bytes,
        "peak_bytes": np.asarray(record.peak_bytes).astype(np.int64),  # whole, as in a sweep
        "reserve_bytes": record.reserve_bytes,
        "capacity_bytes": case.hardware.capacity_bytes,
        "fits": record.fits,
        "compression": record.compression,
        "ttft_s": record.prefill.seconds,
        "ttft_low_s": record.prefill.low,
        "ttft_high_s": record.prefill.high,
        "tpot_s": record.decode.seconds,
        "tpot_low_s": record.decode.low,
        "tpot_high_s": record.decode.high,
    }
    names, values = list(columns), np.broadcast_arrays(*columns.values())
    fixed = {
        "model": case.model.name,
        "device": case.hardware.name,
        "method": called(case.method),
        "family": family(case.method),
        "bits_per_value": None,
        "source": record.source,
    }
    found = []
    for point in zip(*(v.ravel().tolist() for v in values), strict=True):
        row = fixed | dict(zip(names, point, strict=True))
        found.append(row | {"bits_per_value": case.value_bits / max(row["compression"], 1e-9)})
    return found


def plan_rows(plan: Plan) -> list[Row]:
    """One row a method that was considered: its record's row, whether it was chosen, and why it was not."""
    reasons = {r.method: r.reason for r in plan.rejected}
    found = []
    for c in plan.considered:
        (row,) = record_rows(c.record)
        state: Row = {"chosen": c is plan.chosen, "frontier": c in plan.frontier, "allowed": c in plan.ranked}
        quality = c.quality or dict.fromkeys(LOSSES)
        state |= {name: quality[name] for name in LOSSES}
        found.append({**row, "method": c.name, **state, "reason": reasons.get(c.name, "")})
    return found


def sweep_rows(sweep: Sweep) -> list[Row]:
    """One row a point, with the device's capacity and the reserve where the sweep knows them."""
    extra = {"capacity_bytes": sweep.capacity_bytes, "reserve_bytes": sweep.reserve_bytes}
    methods = {text: parse_method(text) for text in sweep.methods}
    names = {text: {"method": called(m), "family": family(m)} for text, m in methods.items()}
    return [{**row, **names[row["method"]], **extra} for row in sweep.rows()]


def rows_of(source: Any) -> list[Row]:
    """Rows of a Record, Plan, Sweep, DataFrame, xarray Dataset, a row, or a list of any of these.

    Raises KvsimError for anything else. What a DataFrame keeps in `attrs` (capacity, reserve, names) joins its rows.
    """
    if isinstance(source, Record):
        return record_rows(source)
    if isinstance(source, Plan):
        return plan_rows(source)
    if isinstance(source, Sweep):
        return sweep_rows(source)
    if isinstance(source, Mapping) and not hasattr(source, "to_dataframe"):
        return [dict(source)]
    if hasattr(source, "to_dataframe"):  # xarray
        held = source.to_dataframe().reset_index().rename(columns={"kv_method": "method"})
        held.attrs = dict(source.attrs)
        return rows_of(held)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas
        extra = {k: v for k, v in source.attrs.items() if k not in source.columns}
        return [{**extra, **row} for row in source.to_dict("records")]
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return [row for one in source for row in rows_of(one)]
    raise KvsimError(
        f"rows come from a record, a plan, a sweep, a DataFrame or a list of them; got a {type(source).__name__}"
    )


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """One column; KvsimError with the nearest name where a row lacks it."""
    for row in rows:
        if name not in row:
            raise KvsimError(f"a row has no {name!r}{did_you_mean(name, row)}; it has {', '.join(map(str, row))}")
    return [row[name] for row in rows]


def frame(rows: Iterable[Row], **attrs: Any) -> pd.DataFrame:
    """Rows as a DataFrame with these attributes; KvsimError where pandas is not installed."""
    try:
        import pandas as pd
    except ImportError:
        raise KvsimError(f"DataFrames need pandas: {INSTALL}") from None
    held = list(rows)
    made = pd.DataFrame(held)
    for name in made.columns:
        values = [row.get(name) for row in held]
        if None in values and {type(v) for v in values} == {int, type(None)}:
            made[name] = made[name].astype("Int64")  # else whole numbers would turn into floats beside what is missing
    made.attrs |= attrs
    return made


def dataset(sweep: Sweep) -> xr.Dataset:
    """A sweep as labelled arrays [kv_method, batch, prompt_tokens], each with its unit; KvsimError without xarray.

    The first axis is not called `method`, because `Dataset.sel` has an argument of that name.
    """
    try:
        import xarray as xr
    except ImportError:
        raise KvsimError(f"labelled arrays need xarray: {INSTALL}") from None
    names = ("kv_method", "batch", "prompt_tokens")
    methods = [called(parse_method(m)) for m in sweep.methods]
    coordinates = dict(zip(names, (methods, sweep.batch, sweep.prompt_tokens), strict=True))
    held = {name: (names, values, _unit(name)) for name, values in sweep.columns.items()}
    made = xr.Dataset(held, coordinates, sweep_attributes(sweep))
    for name in names[1:]:
        made[name].attrs |= _unit(name)
    return made


def _unit(name: str) -> dict[str, str]:
    return {"units": UNITS[name]} if name in UNITS else {}


def sweep_attributes(sweep: Sweep) -> Row:
    """What all points of a sweep share."""
    names = ("model", "device", "new_tokens", "capacity_bytes", "reserve_bytes")
    return {name: getattr(sweep, name) for name in names}


def predict_frame(
    questions: pd.DataFrame,
    model: ModelSpec | str | None = None,
    device: HardwareProfile | str | None = None,
) -> pd.DataFrame:
    """Answer a DataFrame of questions: the same rows in the same order, with bytes, seconds and `fits` beside them.

    Args:
        questions: columns `method` and `prompt_tokens`; `batch` (1), `new_tokens` (0), `model` and `device` where
            they are not given here; further columns are kept.

    Raises KvsimError for a missing column or a wrong question.
    """
    rows: list[Row] = questions.to_dict("records")
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(rows):
        asked = (model or row.get("model"), device or row.get("device"), row.get("method"))
        for name, value in zip(("model", "device", "method"), asked, strict=True):
            if value is None:
                raise KvsimError(f"predict_frame: row {i} names no {name}; give it as a column or as an argument")
        groups.setdefault(asked, []).append(i)
    for (which, where, how), indices in groups.items():
        for i, answer in zip(indices, _answers(which, where, how, [rows[i] for i in indices]), strict=True):
            rows[i] = {**rows[i], **{k: v for k, v in answer.items() if k not in rows[i]}}
    return frame(rows)


def _answers(model: Any, device: Any, method: Any, rows: Sequence[Row]) -> Iterator[Row]:
    """Answers to questions that share model, device and method, in one prediction over arrays."""
    from kvsim.configs import load_model

    sizes = [
        np.array([row.get(name, default) for row in rows] if default is not None else column(rows, name))
        for name, default in (("batch", 1), ("prompt_tokens", None), ("new_tokens", 0))
    ]
    case = Case(load_model(model), load_device(device), parse_method(method), Workload(*sizes))
    yield from record_rows(predict(case))
