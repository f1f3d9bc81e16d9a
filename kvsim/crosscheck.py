"""How well fits carry: to shapes held out of them, and to device families without measurements of their own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsim.accuracy import Row, evaluate_table, summary
from kvsim.coefficients import Coefficient
from kvsim.errors import KvsimError
from kvsim.families import carried_errors, fit_family, read_tables, spread_of, to_lend
from kvsim.fitting import trusted
from kvsim.measured import Table, device_of
from kvsim.serving_steps import read_steps, unseen_blocks

BLOCK = {"decode": ("n_heads", "n_kv_heads", "head_dim", "batch"), "matmul": ("m", "n", "k"),
         "prefill": ("n_heads", "n_kv_heads", "head_dim", "batch")}
PRIMES = (7919, 104_729, 1_299_709, 15_485_863)


def held_out(table: Table, fold: int = 0, folds: int = 4) -> NDArray[np.bool_]:
    """True for one fold of blocks: rows that share heads, head_dim and batch (products: m, n and k) stay together."""
    key = sum(table.sizes[name] * prime for name, prime in zip(BLOCK[table.op], PRIMES, strict=False))
    found: NDArray[np.bool_] = (np.asarray(key) // 3 * 2_654_435_761 % 2**32 >> 7) % folds == fold
    return found


def family_of(table: Table) -> NDArray[np.str_]:
    """The device family of every row."""
    return np.array([device_of(str(gpu)).family for gpu in table.gpu])


def unseen_shapes(table: Table) -> list[Row]:
    """Errors on a quarter of the blocks of shapes after fitting each family to the other three."""
    found: list[Row] = []
    families, out = family_of(table), held_out(table)
    for family in np.unique(families):
        mine = families == family
        fitted = fit_family([table.where(mine & ~out)], str(family))
        found += evaluate_table(table.where(mine & out), tuple(fitted))
    return found


def carried(table: Table, measured: dict[str, list[Coefficient]]) -> dict[tuple[str, str], list[Row]]:
    """Errors of each family's rows under each other family's coefficients, keyed (predicted family, lender).

    Intervals are those that a family without measurements gets: from errors between the families besides it; where
    it is the one of another maker, none were measured on another, and they come from this maker's.
    """
    families, errors, found = family_of(table), carried_errors(table, measured), {}
    for family, lender in errors:
        error, bound = spread_of(errors, family)
        rows = tuple(replace(c, log_error=error, memory_log_error=bound) for c in measured[lender])
        found[family, lender] = evaluate_table(table.where(families == family), rows)
    return found


def _line(what: str, rows: Sequence[Row]) -> str:
    total = summary(rows)
    numbers = [f"{name} {100 * value:5.1f}%" for name, value in total.items() if value is not None]
    return f"{what:44} {'  '.join(numbers)}"


def _served(path: Path) -> str:
    errors, dense = unseen_blocks(read_steps(path)[0])
    numbers = [f"{name} {100 * float(np.median(some)):5.1f}% of {len(some)}"
               for name, some in (("dense", errors[dense]), ("experts", errors[~dense])) if len(some)]
    return f"{'servers: blocks of shapes held out':44} {'  '.join(numbers)}"


def main() -> None:
    """Command line: print held-out and carried errors for a folder of measured CSV files."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.crosscheck", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder of measured CSV files")
    folder = parser.parse_args().folder
    try:
        for path in sorted(folder.glob("serving*.csv")):
            print(_served(path))
        tables = [t.where(trusted(t)) for t in read_tables(folder)]
        families = sorted({str(f) for t in tables for f in np.unique(family_of(t))})
        for table in tables:
            print(_line(f"{table.op}: blocks of shapes held out", unseen_shapes(table)))
            measured = {family: to_lend(fit_family([table], family)) for family in families}
            for (family, lender), rows in carried(table, measured).items():
                print(_line(f"{table.op}: {family} by {lender}", rows))
    except KvsimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)  # as every command of kvsim ends on a wrong question


if __name__ == "__main__":
    main()
