"""Notebooks: stripped in git, run top to bottom, no warnings or errors, no picture without its table."""

from __future__ import annotations

import ast
import base64
import json
import re

import pytest
from notebook_runs import FOLDER, NAMES, SECONDS, cells, executed, need

EXPECTED = ("01_capacity_planning", "02_which_method_fits", "03_predicted_vs_measured", "04_inside_a_method",
            "05_your_own")  # fmt: skip


def code(name):
    return ["".join(c["source"]) for c in cells(name) if c["cell_type"] == "code"]


def test_the_five_are_there():
    assert NAMES == EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped_and_ids_distinct(name):
    held = cells(name)
    assert len({c["id"] for c in held}) == len(held)
    for cell in held:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert json.loads((FOLDER / f"{name}.ipynb").read_text())["nbformat"] == 4


@pytest.mark.parametrize("name", NAMES)
def test_prose_teaches_and_code_parses(name):
    held = cells(name)
    assert held[0]["cell_type"] == "markdown"
    assert "".join(held[0]["source"]).startswith("# ")
    words = sum(len("".join(c["source"]).split()) for c in held if c["cell_type"] == "markdown")
    assert words > 150
    for source in code(name):
        ast.parse(source)
        assert max(map(len, source.splitlines())) < 125


def test_an_answer_takes_three_cells():
    assert "kvsim.fit(" in "".join(code("01_capacity_planning")[:3])
    assert "plot.waterfall(" in "".join(code("01_capacity_planning")[:3])


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_that_draws_ends_in_a_table(name):
    for source in code(name):
        if "plt.show()" in source:
            after = source[source.rindex("plt.show()") + len("plt.show()") :].strip()
            assert after, f"a picture without its table in {name}: {source[:80]}"
        assert "%matplotlib" not in source


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_top_to_bottom_with_a_table_beside_each_picture(name):
    need(name)
    pictures = 0
    for cell in executed(name).cells:
        if cell.cell_type != "code":
            continue
        outputs = cell.outputs
        assert all(o.output_type != "error" for o in outputs)
        said = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stderr")
        assert not re.search(r"Warning|Traceback|Error", said), said
        drawn = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
        for picture in drawn:
            assert len(base64.b64decode(picture)) > 5_000
        pictures += len(drawn)
        if drawn:
            assert any("<table" in o.data.get("text/html", "") for o in outputs if "data" in o), cell.source
    assert pictures >= (0 if name == "05_your_own" else 2)


@pytest.mark.slow
def test_all_together_take_minutes_not_hours(capsys):
    for name in NAMES:
        need(name)
        executed(name)
    with capsys.disabled():  # a figure to read, never a gate: it depends on who else uses the machine
        print(f"\nnotebooks: {sum(SECONDS.values()):.0f} s together, {({k: round(v) for k, v in SECONDS.items()})}")
    assert set(SECONDS) == set(NAMES)
