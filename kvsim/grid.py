"""Sweep: predictions over arrays of batches and prompts, as columns for CSV, JSON or a DataFrame."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError, shown
from kvsim.hardware import HardwareProfile
from kvsim.method import Method, parse_methods
from kvsim.model import ModelSpec
from kvsim.prediction import predict
from kvsim.record import Case, Record
from kvsim.workload import Workload, one_whole, whole

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

CHUNK = 65536
"""Points predicted at once: their arrays stay in a core's cache, which is faster than one pass over all."""

COLUMNS = (
    "cache_bytes",
    "total_bytes",
    "peak_bytes",
    "fits",
    "ttft_s",
    "ttft_low_s",
    "ttft_high_s",
    "tpot_s",
    "tpot_low_s",
    "tpot_high_s",
)


@dataclass(frozen=True, eq=False)
class Sweep:
    """Totals over a grid: each column has shape [methods, batches, prompts]."""

    model: str
    device: str
    methods: tuple[str, ...]
    batch: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    new_tokens: int
    columns: dict[str, NDArray[Any]]
    capacity_bytes: int = 0
    reserve_bytes: int = 0

    def __len__(self) -> int:
        return len(self.methods) * self.batch.size * self.prompt_tokens.size

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict a point, methods outermost."""
        for i, method in enumerate(self.methods):
            for j, batch in enumerate(self.batch.tolist()):
                for k, prompt in enumerate(self.prompt_tokens.tolist()):
                    point = {"model": self.model, "device": self.device, "method": method, "batch": batch}
                    point |= {"prompt_tokens": prompt, "new_tokens": self.new_tokens}
                    yield point | {name: column[i, j, k].item() for name, column in self.columns.items()}

    def to_frame(self) -> pd.DataFrame:
        """The points as a pandas DataFrame; what they share is in its `attrs` (capacity, reserve, model, device)."""
        from kvsim.frames import frame, sweep_attributes

        return frame(self.rows(), **sweep_attributes(self))

    def to_xarray(self) -> xr.Dataset:
        """The columns as labelled arrays [kv_method, batch, prompt_tokens] with units (xarray must be installed)."""
        from kvsim.frames import dataset

        return dataset(self)

    def _repr_html_(self) -> str:
        from kvsim.display import sweep_html

        return sweep_html(self)

    def __str__(self) -> str:
        from kvsim.display import as_text

        return as_text(self)

    def __repr__(self) -> str:
        return f"<Sweep of {len(self):,} points: {self.model} on {self.device}, {len(self.methods)} methods>"

    def __rich__(self) -> object:
        from kvsim.display import as_rich

        return as_rich(self)

    def write(self, path: str | Path) -> None:
        """Write to a .csv or .json file, whole or not at all."""
        target = check_target(path)
        draft = target.with_name(target.name + ".part")
        try:
            with draft.open("w", newline="", encoding="utf-8") as out:
                self._write(out, target.suffix)
            draft.replace(target)
        except OSError as problem:
            draft.unlink(missing_ok=True)
            raise KvsimError(f"cannot write {target.name}: {problem.strerror or problem}") from None

    def _write(self, out: Any, kind: str) -> None:
        if kind == ".json":
            json.dump(list(self.rows()), out)
            return
        head = ["model", "device", "method", "batch", "prompt_tokens", "new_tokens", *self.columns]
        table = csv.DictWriter(out, head)
        table.writeheader()
        table.writerows(self.rows())


def check_target(path: str | Path) -> Path:
    """The path if a sweep can be written there, so that a long one is not computed in vain; KvsimError otherwise."""
    target = Path(path)
    if target.suffix not in (".csv", ".json"):
        raise KvsimError(f"--out {shown(target.name)}: write to a file that ends in .csv or .json")
    if not target.parent.is_dir():
        raise KvsimError(f"--out {shown(str(path))}: the folder does not exist")
    return target


def sweep(
    model: ModelSpec,
    device: HardwareProfile,
    methods: Sequence[str | Method],
    prompt_tokens: Any,
    batch: Any = 1,
    new_tokens: int = 0,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Predict every combination of method, batch and prompt length.

    Args:
        methods: written forms or Methods. prompt_tokens, batch: whole numbers or 1-D arrays of them.
        progress: called with the number of points just finished.
        options: those of Case (weights, kv_dtype, devices, reserve_bytes, kernel).

    Raises KvsimError on a wrong question, before anything is computed.
    """
    parsed = parse_methods(methods)
    if not parsed:
        raise KvsimError("sweep needs at least one method")
    prompts = np.atleast_1d(np.asarray(whole(prompt_tokens, "prompt tokens")))
    batches = np.atleast_1d(np.asarray(whole(batch, "batch", low=1)))
    new_tokens = one_whole(new_tokens, "new tokens")
    if prompts.ndim > 1 or batches.ndim > 1 or not (prompts.size and batches.size):
        raise KvsimError("sweep takes prompt tokens and batches as lists of one or more, which it combines")
    shape = (len(parsed), batches.size, prompts.size)
    columns: dict[str, NDArray[Any]] = {
        c: np.empty(shape, bool if c == "fits" else np.float64 if c.endswith("_s") else np.int64) for c in COLUMNS
    }
    wide = max(1, CHUNK // batches.size)
    reserve = 0
    for i, method in enumerate(parsed):
        for start in range(0, prompts.size, wide):
            some = prompts[start : start + wide]
            case = Case(model, device, method, Workload(batches[:, None], some[None, :], new_tokens), **options)
            record = predict(case)
            reserve = record.reserve_bytes
            for name, values in _totals(record).items():
                columns[name][i, :, start : start + some.size] = values
            if progress is not None:
                progress(batches.size * some.size)
    names = tuple(str(m) for m in parsed)
    memory = (device.capacity_bytes, reserve)
    return Sweep(model.name, device.name, names, batches, prompts, new_tokens, columns, *memory)


def _totals(record: Record) -> dict[str, Any]:
    return {
        "cache_bytes": record.cache_bytes,
        "total_bytes": record.total_bytes,
        "peak_bytes": record.peak_bytes,
        "fits": record.fits,
        "ttft_s": record.prefill.seconds,
        "ttft_low_s": record.prefill.low,
        "ttft_high_s": record.prefill.high,
        "tpot_s": record.decode.seconds,
        "tpot_low_s": record.decode.low,
        "tpot_high_s": record.decode.high,
    }
