"""Answers as DataFrames, labelled arrays, HTML, rich and plain text: the same figures everywhere."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import kvsim
from kvsim.distortion import least_error, limit_rows
from kvsim.errors import KvsimError
from kvsim.frames import predict_frame, record_rows, rows_of

MODEL, DEVICE = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
RECORD = kvsim.predict(kvsim.Case(MODEL, DEVICE, kvsim.parse_method("kivi-4"), kvsim.Workload(1, 32768)))
MANY = kvsim.predict(kvsim.Case(MODEL, DEVICE, kvsim.parse_method("kivi-4"), kvsim.Workload(1, np.arange(1, 101) * 64)))
PLAN = kvsim.fit(MODEL, DEVICE, kvsim.Workload(1, 131072), methods=["fp8", "int(bits=4)", "snapkv(budget=0.25)"])
SWEEP = kvsim.sweep(MODEL, DEVICE, ["full", "kivi-4"], [1024, 4096, 131072], [1, 2])


class Cells(HTMLParser):
    """Rows of cells of a page's tables; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_record_shows_its_memory_and_lines():
    rows = Cells(RECORD._repr_html_()).rows
    # 32768 x 8 x 128 codes of half a byte, and scale and minimum (2 x 2 bytes) for each 32 of them: 20 MiB x 32 layers.
    assert ["cache: keys", "640 MiB", f"{dict(RECORD.memory)['cache: keys']:,}"] in rows
    assert [r[1] for r in rows if r[0] == "decode"] == [
        *(x.name for x in sorted(RECORD.decode.lines, key=lambda x: -x.seconds)), "all"]  # fmt: skip


def test_a_measured_record_shows_itself_too():
    # what runtime.measure gives: one line for the cache, no largest context and batch
    memory = (("weights", 100), ("cache", 20), ("beside the weights at the peak", 30))
    seen = replace(RECORD, source="measured", memory=memory, limits_of=lambda: (None, None))
    text = seen._repr_html_()
    assert "longest context" not in text
    assert "(measured)" in text
    assert "largest context" not in str(seen)
    assert repr(seen).startswith("<Record, measured")


def test_arrays_show_points_and_say_how_many_more():
    text = MANY._repr_html_()
    assert len(Cells(text).rows) == 61  # a head and MOST_ROWS points of 100
    assert "40 more points" in text
    assert "100 points" in repr(MANY)
    assert "to_frame" in str(MANY)


def test_a_plan_marks_its_choice():
    text = PLAN._repr_html_()
    rows = Cells(text).rows
    assert rows[0][0] == "method"
    assert PLAN.why() in text
    bold = re.findall(r'<tr style="font-weight:bold"><td[^>]*>([^<]*)', text)
    assert bold == [PLAN.chosen.name]


def test_a_sweep_shows_its_points():
    rows = Cells(SWEEP._repr_html_()).rows[1:]
    assert len(rows) == len(SWEEP) == 12
    assert [r[5] for r in rows] == ["yes" if x else "no" for x in SWEEP["fits"].ravel()]


@pytest.mark.parametrize("thing", [RECORD, PLAN, SWEEP], ids=["record", "plan", "sweep"])
def test_text_is_plain_in_pipes_and_coloured_on_terminals(thing):
    plain = str(thing)
    assert "\x1b" not in plain
    assert len(plain.splitlines()) > 5
    held = StringIO()
    Console(file=held, force_terminal=True, width=100, color_system="standard").print(thing)
    assert "\x1b[" in held.getvalue()
    assert repr(thing).startswith("<")
    assert len(repr(thing)) < 160


def test_names_from_outside_are_escaped():
    spec = kvsim.ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=4, head_dim=64, name="<script>1</script>")
    record = kvsim.predict(kvsim.Case(spec, DEVICE, kvsim.parse_method("full"), kvsim.Workload(1, 128)))
    assert "<script" not in record._repr_html_()


def test_rows_hold_the_record():
    (row,) = record_rows(RECORD)
    assert row["cache_bytes"] == RECORD.cache_bytes
    assert row["tpot_s"] == RECORD.decode.seconds
    assert row["bits_per_value"] == pytest.approx(16 * RECORD.cache_bytes / RECORD.full_bytes)
    assert row["family"] == "format"
    assert [r["peak_bytes"] for r in rows_of(MANY)] == MANY.peak_bytes.tolist()
    assert len(rows_of([RECORD, MANY])) == 101


def test_frames_hold_every_point():
    pytest.importorskip("pandas")
    table = SWEEP.to_frame()
    assert len(table) == len(SWEEP)
    assert table["cache_bytes"].tolist() == SWEEP["cache_bytes"].ravel().tolist()
    assert table.attrs["capacity_bytes"] == DEVICE.capacity_bytes
    assert table.attrs["reserve_bytes"] == RECORD.reserve_bytes
    plan = PLAN.to_frame()
    assert plan.loc[plan.chosen, "method"].tolist() == [PLAN.chosen.name]
    assert (plan.reason != "").sum() == len(PLAN.rejected)
    assert MANY.to_frame()["prompt_tokens"].tolist() == MANY.case.workload.prompt_tokens.tolist()


def test_labelled_arrays_are_the_sweep():
    pytest.importorskip("xarray")
    held = SWEEP.to_xarray()
    assert held.sizes == {"kv_method": 2, "batch": 2, "prompt_tokens": 3}
    point = held.sel(kv_method="kivi-4", batch=2, prompt_tokens=4096)
    assert int(point.cache_bytes) == SWEEP["cache_bytes"][1, 1, 1]
    assert held.tpot_s.attrs == {"units": "s"}
    assert held.cache_bytes.attrs == {"units": "B"}


def test_a_frame_of_questions_is_answered_row_by_row():
    pd = pytest.importorskip("pandas")
    asked = pd.DataFrame({"method": ["full", "kivi-4", "full"], "prompt_tokens": [1000, 2000, 3000],
                          "batch": [1, 2, 4], "note": list("abc")})  # fmt: skip
    found = predict_frame(asked, MODEL, DEVICE)
    assert found["note"].tolist() == list("abc")
    for _, row in found.iterrows():
        work = kvsim.Workload(row.batch, row.prompt_tokens)
        one = kvsim.predict(kvsim.Case(MODEL, DEVICE, kvsim.parse_method(row.method), work))
        assert row.cache_bytes == one.cache_bytes
        assert row.tpot_s == pytest.approx(one.decode.seconds)
    named = predict_frame(asked.assign(model="llama-3.1-8b", device="rtx-4090"))
    assert named["cache_bytes"].tolist() == found["cache_bytes"].tolist()
    with pytest.raises(KvsimError, match="row 0 names no device"):
        predict_frame(asked, MODEL)
    with pytest.raises(KvsimError, match="no 'prompt_tokens'"):
        predict_frame(asked.drop(columns="prompt_tokens"), MODEL, DEVICE)


def test_the_limit_of_equal_channels_is_shannons_and_unequal_ones_are_filled_like_water():
    for bits in (0.0, 0.5, 1.0, 4.0):
        assert least_error([3.0] * 8, bits) == pytest.approx(4.0**-bits)  # D = 2^-2R
    # Variances 4 and 1 with 2 bits in all: log2 level = (2 + 0 - 4) / 2 = -1, both above it: 2 * 0.5 / 5.
    assert least_error([4.0, 1.0], 1.0) == pytest.approx(0.2)
    # With half a bit in all only the first is above: log2 level = 2 - 1, level 2; errors 2 + 1 of 5.
    assert least_error([4.0, 1.0], 0.25) == pytest.approx(0.6)
    errors = [r["relative_error"] for r in limit_rows([9.0, 1.0, 0.1, 0.0])]
    assert errors[0] == pytest.approx(1.0)
    assert all(b < a for a, b in itertools.pairwise(errors))
    for wrong in ([], [-1.0], [0.0], [float("nan")]):
        with pytest.raises(KvsimError, match="variances"):
            least_error(wrong, 1.0)
    with pytest.raises(KvsimError, match="bits"):
        least_error([1.0], -1.0)


def test_importing_kvsim_and_its_pictures_brings_neither_pandas_nor_matplotlib():
    heavy = "{'pandas', 'matplotlib', 'xarray'}"
    code = f"import sys, kvsim.plot, kvsim.display, kvsim.frames; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_whole_numbers_stay_whole_in_frames():
    pd = pytest.importorskip("pandas")
    from kvsim.frames import frame

    made = frame([{"bytes": 2**40 + 1, "s": 0.5}, {"bytes": None, "s": None}])
    assert str(made["bytes"].dtype) == "Int64"  # a float would show 1.099512e+12
    assert made["bytes"][0] == 2**40 + 1
    assert made["bytes"].isna().tolist() == [False, True]
    assert made["s"].dtype == "float64"
    model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
    held = kvsim.fit(model, device, kvsim.Workload(1, 999), methods=["int8"]).to_frame()
    assert all(pd.api.types.is_integer_dtype(held[c]) for c in held if c.endswith("_bytes"))
