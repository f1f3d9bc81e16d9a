"""Units and tables for people; the bench prints its rows."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from kvsim.errors import KvsimError
from kvsim.readme import written
from kvsim.report import Column, duration, gib, milliseconds, parameters, quantity, say, size, table
from kvsim.report_lists import mib, spans


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (81920, "80.0 KiB"),  # 80 * 1024
        (2**29, "512 MiB"),
        (2**34, "16.0 GiB"),
        (10**9, "954 MiB"),  # 1e9 / 2^20 = 953.7: GB is not GiB
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_bytes_in_binary_units(value, text):
    assert size(value) == text


def test_gib_keeps_small_amounts_readable():
    assert gib(2**34) == "16.00 GiB"
    assert gib(2**20) == "1.00 MiB"
    assert mib(2**30) == "1,024.00 MiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (5e-6, "5.00 us"),
        (0.0268, "26.8 ms"),
        (1.234, "1.23 s"),
        (90, "90.0 s"),
        (240, "4.0 min"),
        (7200, "2.0 h"),
        (259200, "3.0 d"),
    ],
)
def test_durations_in_the_unit_people_read(seconds, text):
    assert duration(seconds) == text


def test_decimal_prefixes():
    assert quantity(1.65e14, "FLOP/s") == "165 TFLOP/s"
    assert quantity(1.008e12, "B/s") == "1.01 TB/s"
    assert parameters(8_030_261_248) == "8.03 B"
    assert milliseconds(0.0268) == "26.8"


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0], "0"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 1, 5, 7, 8], "0-1, 5, 7-8"),
        ([5, 11, 17, 23], "5, 11, .. 23"),
        ([5, 11], "5, 11"),
    ],
)
def test_spans_of_layers(indices, text):
    assert spans(indices) == text


def printed(width, rows):
    out = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    columns = (
        Column("method", fold=True),
        Column("bytes", right=True),
        Column("why", optional=True),
        Column("note", optional=True),
    )
    table(out, columns, rows)
    return out.file.getvalue()


def test_a_narrow_table_leaves_optional_columns_out_last_first():
    rows = [("int(bits=4)", "1,000", "because " * 3, "note " * 6)]
    assert "note" in printed(100, rows)
    assert "note" not in printed(60, rows)
    assert "why" in printed(60, rows)
    assert "why" not in printed(40, rows)


def test_no_text_is_cut_or_read_as_markup():
    long = "k:int(bits=4,group=32,axis=channel,residual=128,flush=all) [red] v:int(bits=2)"
    for width in (20, 30, 50, 80):
        text = printed(width, [(long, "123,456,789", "x", "y")])
        assert max(len(line) for line in text.splitlines()) <= width
        everything = "".join(text.split())
        for piece in ("flush=all)", "[red]", "v:int(bits=2)"):
            assert all(c in everything for c in piece)
        assert "\u2026" not in text


def test_a_paragraph_hangs_on_a_terminal():
    out = Console(file=io.StringIO(), width=30, force_terminal=True, no_color=True)
    say(out, "chosen: " + "word " * 12, indent=8)
    first, *rest = out.file.getvalue().splitlines()
    assert first.startswith("chosen: ")
    assert rest
    assert all(line.startswith(" " * 8) for line in rest)


def test_a_readme_without_its_marks_is_an_error():
    with pytest.raises(KvsimError, match="marks for 'answer'"):
        written("# kvsim")


@pytest.mark.slow
def test_the_bench_prints_its_table():
    done = subprocess.run([sys.executable, "-m", "kvsim.bench"], capture_output=True, text=True, check=True)
    for label in ("import kvsim", "kvsim fit, cold", "points/s", "held"):
        assert label in done.stdout
