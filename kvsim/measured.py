"""Read measured kernel times from CSV files: columns, units and bounds; not what a model makes of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.hardware import HardwareProfile, load_device

ENCODING = "utf-8-sig"
"""What spreadsheets save as UTF-8 begins with a mark, which is no part of the first column's name."""
MAX_ROWS = 2_000_000
MAX_LINE = 4096
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8", "sq": "int8"}
ATTENTION = {"batch": 2**20, "seq": 2**30, "n_heads": 2**16, "n_kv_heads": 2**16, "head_dim": 2**14, "window": 2**30}
PRODUCT = {"m": 2**30, "n": 2**30, "k": 2**30}
"""Whole-number columns of each kind of table and the largest value that makes sense."""

FULL_NAMES = {"a100_sxm": "a100-sxm-80gb", "a100_pcie": "a100-pcie-80gb", "b60": "arc-pro-b60"}
"""What the public tables mean by names that leave the memory size or the maker's line out."""


@lru_cache(maxsize=256)
def device_of(gpu: str) -> HardwareProfile:
    """The device that a table's gpu column names; KvsimError where it is unknown or ambiguous."""
    return load_device(FULL_NAMES.get(gpu, gpu))


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of one op: `labels` and `sizes` by column, `seconds` measured. op: decode, prefill or matmul."""

    op: str
    gpu: NDArray[Any]
    kernel: NDArray[Any]
    format: NDArray[Any]
    sizes: dict[str, NDArray[np.int64]]
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, mask: NDArray[Any]) -> Table:
        """The rows that a mask or an index array selects."""
        return Table(self.op, self.gpu[mask], self.kernel[mask], self.format[mask],
                     {name: column[mask] for name, column in self.sizes.items()}, self.seconds[mask])

    def groups(self) -> Iterator[tuple[tuple[str, str, str], Table]]:
        """Sub-tables by (gpu, kernel, format), sorted."""
        keys = np.char.add(np.char.add(np.char.add(self.gpu, "\t"), np.char.add(self.kernel, "\t")), self.format)
        for key in np.unique(keys):
            gpu, kernel, format = str(key).split("\t")
            yield (gpu, kernel, format), self.where(keys == key)


def read_table(path: str | Path) -> Table:
    """Read one CSV of kernel times; the op is told from its columns and its name.

    Attention: gpu, kernel, kv_dtype, batch, seq, n_heads, n_kv_heads, head_dim, window, latency_us (prefill where a
    column `phase` says so, or, without one, the file's name holds `prefill` or `context`). Products: gpu, kernel,
    dtype, m, n, k, latency_us. Other columns are ignored. Raises KvsimError, one line, naming file and line.
    """
    path, where = Path(path), file_named(path)
    try:
        with path.open(encoding=ENCODING, newline="") as file:
            return _read(file, path.name.lower(), where)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise KvsimError(f"{where} cannot be read: {shown(str(error), 120)[1:-1]}") from None


def file_named(path: str | Path) -> str:
    """How lines about a file begin."""
    return f"measured file {shown(str(path), 200)[1:-1]}"


def header(line: str) -> list[str]:
    """The columns that a file's first line names."""
    return [c.strip() for c in next(csv.reader([line]), [])]


def rows_of(file: Iterable[str], where: str) -> Iterator[tuple[str, list[str]]]:
    """The header, then the rows of a CSV, each with where it stands; all as long as the header, empty lines aside."""
    reader = csv.reader(_short_lines(file, where))
    columns = [c.strip() for c in next(reader, [])]
    twice = next((c for i, c in enumerate(columns) if c in columns[:i]), None)
    if twice is not None:
        raise KvsimError(f"{where} has two columns {shown(twice)}")
    yield where, columns
    for number, row in enumerate(reader, 2):
        if row and len(row) != len(columns):
            raise KvsimError(f"{where} line {number}: {len(row)} fields where the header has {len(columns)}")
        if row:
            yield f"{where} line {number}:", row


def _short_lines(file: Iterable[str], where: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if len(line) > MAX_LINE or number > MAX_ROWS:
            raise KvsimError(f"{where} line {number}: lines hold at most {MAX_LINE} characters, files {MAX_ROWS} lines")
        yield line


def _op(columns: list[str], name: str, where: str) -> str:
    """decode, prefill or matmul; KvsimError naming the columns that are missing."""
    product = "m" in columns and "batch" not in columns
    label = "dtype" if product else "kv_dtype"
    for need in ("gpu", "kernel", label, *(PRODUCT if product else ATTENTION), "latency_us"):
        if need not in columns:
            raise KvsimError(f"{where} has no column {need!r}{did_you_mean(need, columns)}")
    if product:
        return "matmul"
    return "prefill" if "prefill" in name or "context" in name else "decode"


def _read(file: Iterable[str], name: str, where: str) -> Table:
    rows = rows_of(file, where)
    _, columns = next(rows)
    op = _op(columns, name, where)
    bounds = PRODUCT if op == "matmul" else ATTENTION
    at = {c: i for i, c in enumerate(columns)}
    label = at["dtype" if op == "matmul" else "kv_dtype"]
    texts: list[tuple[str, str, str]] = []
    numbers: list[list[float]] = []
    for here, row in rows:
        if op != "matmul" and "phase" in at:
            op = _phase(row[at["phase"]], op if numbers else "", here)
        texts.append((_text(row[at["gpu"]]), _text(row[at["kernel"]]), _text(row[label])))
        sizes = {c: _size(row[at[c]], c, int(c != "window"), most, here) for c, most in bounds.items()}
        if op != "matmul" and sizes["n_heads"] % sizes["n_kv_heads"]:
            raise KvsimError(f"{here} n_heads must be a multiple of n_kv_heads, got {sizes['n_heads']} and "
                             f"{sizes['n_kv_heads']}")
        numbers.append([*sizes.values(), _latency(row[at["latency_us"]], here)])
    if not numbers:
        raise KvsimError(f"{where} holds no rows")
    gpu, kernel, format = (np.array(column) for column in zip(*texts, strict=True))
    values = np.array(numbers)
    sizes_by_name = {c: values[:, i].astype(np.int64) for i, c in enumerate(bounds)}
    return Table(op, gpu, kernel, np.array([DTYPES.get(f, f) for f in format]), sizes_by_name, values[:, -1])


def _phase(value: str, before: str, where: str) -> str:
    """decode or prefill, the same in all rows of a file."""
    phase = value.strip().lower()
    if phase not in ("decode", "prefill"):
        raise KvsimError(f"{where} phase must be decode or prefill, got {shown(value)}")
    if before not in ("", phase):
        raise KvsimError(f"{where} phase is {phase} where the rows before are {before}: give each phase its own file")
    return phase


def _text(value: str) -> str:
    return "".join(c for c in value.strip()[:200] if c.isprintable())


def _size(value: str, what: str, least: int, most: int, where: str) -> int:
    try:
        size = int(value) if value.strip().lstrip("+-").isdecimal() and len(value) < 20 else int(_whole_float(value))
    except ValueError:
        raise KvsimError(f"{where} {what} must be a whole number, got {shown(value)}") from None
    if not least <= size <= most:
        raise KvsimError(f"{where} {what} must lie between {least} and {most}, got {shown(value)}")
    return size


def _whole_float(value: str) -> float:
    number = float(value)
    if not isfinite(number) or number != int(number):
        raise ValueError(value)
    return number


def _latency(value: str, where: str) -> float:
    try:
        micros = float(value)
    except ValueError:
        micros = -1.0
    if not 0.0 < micros < 1e12:
        raise KvsimError(f"{where} latency_us must be a positive number of microseconds, got {shown(value)}")
    return micros * 1e-6
