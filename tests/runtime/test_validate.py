"""Validation in miniature, and its figures by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import kvsim
from kvsim.errors import KvsimError
from runtime import running_model
from runtime import validate as module
from runtime.cache import spec_of
from runtime.device import this_machine
from runtime.measure import measure as real
from runtime.pace import Pace
from runtime.random_model import random_model
from runtime.timing import QUIET_SPREAD, summary
from runtime.validate import METHODS, Grid, crowded, validate
from runtime.validation_stats import coverage_range, figures, order
from tests.runtime.test_measure import CONFIG

DATA = Path(__file__).parents[1] / "data" / "measured"


def row(method, predicted, measured, low=0.0, high=0.0, prompt=100, phase="decode", name="whole"):
    return {"method": method, "batch": 1, "prompt_tokens": prompt, "phase": phase, "name": name,
            "predicted_s": predicted, "low_s": low or predicted * 0.9, "high_s": high or predicted * 1.1,
            "measured_s": measured, "spread": 1.0}


def test_errors_and_coverage_by_hand():
    rows = [row("a", 1.1, 1.0), row("b", 0.8, 1.0), row("c", 1.0, 1.0)]
    found = figures(rows)["lines"]["decode step"]
    # errors +10%, -20%, 0; intervals .99-1.21 holds 1, .72-.88 does not, .9-1.1 does
    assert found["median_error"] == pytest.approx(0.1)
    assert found["mean_error"] == pytest.approx(0.1)
    assert found["coverage"] == pytest.approx(2 / 3)
    assert found["median_half_width"] == pytest.approx(0.1)
    assert found["coverage_low"] == 0.0  # three draws of b: one in 27
    assert found["consistent_with_90"]


def test_rows_of_one_method_count_as_one_draw():
    apart = [row(str(i), 1.0, 1.0 if i else 2.0) for i in range(20)]
    together = [row("a" if i else "b", 1.0, 1.0 if i else 2.0) for i in range(20)]
    low, _ = coverage_range(apart)
    assert 0.8 < low < 0.95
    # both draws fall on b with one in four: coverage 0
    assert coverage_range(together)[0] == 0.0


def test_order_is_told_for_each_length_and_batch():
    rows = [row("a", 1, 1), row("b", 2, 2), row("c", 3, 3), row("d", 4, 3.5)]
    rows += [row("a", 1, 3, prompt=200), row("b", 2, 2, prompt=200), row("c", 3, 1, prompt=200)]
    found = order(rows)
    assert [g["tau"] for g in found["groups"]] == [1.0, -1.0]
    assert found["tau"] == 0.0
    assert [g["pairs_apart"] for g in found["groups"]] == [6, 3]
    assert order(rows[:2])["tau"] is None


def test_pairs_that_hardly_differ_have_no_order_to_predict():
    # b and c are 5% apart and swapped; of the other pairs all agree
    found = order([row("a", 1, 1.0), row("b", 3, 2.0), row("c", 2, 2.1), row("d", 4, 4.0)])
    assert found["tau"] == pytest.approx(4 / 6)
    assert (found["groups"][0]["pairs_apart"], found["tau_apart"]) == (5, 1.0)


def test_the_record_that_is_kept_says_what_its_page_says():
    with (DATA / "validation_cpu.csv").open(newline="") as file:
        rows = [{**r, **{k: float(v) for k, v in r.items() if k.endswith("_s")}} for r in csv.DictReader(file)]
    found = figures(rows)
    attention, step, prompt = (found["lines"][name] for name in ("decode attention", "decode step", "prefill"))
    assert [f["rows"] for f in (attention, step, prompt)] == [100, 100, 100]
    assert [round(f["median_error"], 3) for f in (attention, step, prompt)] == [0.063, 0.031, 0.034]
    assert [round(f["coverage"], 2) for f in (attention, step, prompt)] == [0.83, 0.98, 0.97]
    assert [round(f["median_half_width"], 2) for f in (attention, step, prompt)] == [0.19, 0.16, 0.13]
    assert attention["consistent_with_90"]
    assert [round(found[key][tau], 2) for key in ("order", "attention_order") for tau in ("tau", "tau_apart")] == [
        0.71, 0.95, 0.86, 0.91]


def test_methods_are_many_and_none_is_one_that_calibration_measures():
    from runtime.calibration_plan import FULL

    calibrated = {str(kvsim.parse_method(m)) for m, _ in FULL.methods} - {"full"}
    chosen = {str(kvsim.parse_method(m)) for m in METHODS} - {"full"}
    assert len(chosen) >= 21
    assert not chosen & calibrated


@pytest.fixture
def here():
    return replace(kvsim.load_device("epyc-9654"), name="here", units=1, capacity_bytes=this_machine().capacity_bytes)


def test_a_record_has_what_is_needed_to_repeat_it(here):
    model = random_model(CONFIG)
    grid = Grid(("full", "int(bits=4)", "h2o(budget=0.5)", "palu(rank=8)"), (24, 40), (1,), steps=4)
    found = validate(grid, model, replace(spec_of(model), name="small", dtype="fp32"), here)
    assert {r["method"] for r in found["rows"]} == {"full", "int(bits=4)", "h2o(budget=0.5)"}
    assert "calibrat" in found["left_out"]["palu(rank=8)"]
    assert {"decode attention", "decode step", "prefill"} <= set(found["summary"]["lines"])
    assert found["summary"]["order"]["groups"][0]["methods"] == 3
    needed = "date machine profile threads clock versions model layers dtype grid load"
    for key in needed.split():
        assert found[key] not in (None, "")
    assert found["grid"]["seed"] == 0
    json.dumps(found, allow_nan=False)


def test_a_busy_machine_is_said_and_is_no_failure(here, monkeypatch):
    model = random_model(CONFIG)
    monkeypatch.setattr(module, "QUIET_SPREAD", 0.0)
    found = validate(Grid(("full",), (24,), (1,), steps=4), model, replace(spec_of(model), dtype="fp32"), here)
    assert found["busy"]


def test_repeats_that_jump_make_errors_unreliable(here, monkeypatch, capsys):
    # every other look at the clock runs three times as fast: repeats differ by a factor that no quiet machine shows
    ticks = iter(range(10**9))

    def jumpy(device):
        import time

        start = time.perf_counter()
        return lambda: start + (time.perf_counter() - start) * (1.0 + 2.0 * (next(ticks) // 7 % 2))

    monkeypatch.setattr(running_model, "clock", jumpy)
    model = random_model(CONFIG)
    found = validate(Grid(("full",), (24,), (1,), steps=8), model, replace(spec_of(model), dtype="fp32"), here)
    assert found["spread"] > QUIET_SPREAD
    assert found["busy"]
    module.print_validation(found)
    assert "these errors are unreliable" in " ".join(capsys.readouterr().out.split())


def test_more_who_want_to_run_than_processors_are_noticed(monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1)
    assert not crowded([2.9, 9.0, 9.0])
    assert crowded([3.2, 0.0, 0.0])
    assert not crowded([])


def test_a_validation_goes_on_where_a_window_ended(here, tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "now", lambda self: 1.0)
    model = random_model(CONFIG)
    spec = replace(spec_of(model), dtype="fp32")
    parts = []
    first = validate(Grid(("full", "int(bits=4)"), (24,), (1,), steps=4), model, spec, here, keep=parts.append)
    assert [len({r["method"] for r in p["rows"]}) for p in parts] == [1, 2]
    told = []
    both = validate(Grid(("full", "int(bits=4)"), (24, 40), (1,), steps=4), model, spec, here, told.append,
                    json.loads(json.dumps(parts[0])))
    assert both["grid"]["cells"] == 4
    assert [r for r in both["rows"] if (r["method"], r["prompt_tokens"]) == ("full", 24)] == [
        r for r in first["rows"] if r["method"] == "full"]
    assert {(r["method"], r["prompt_tokens"]) for r in both["rows"]} == {
        ("full", 24), ("full", 40), ("int(bits=4)", 24), ("int(bits=4)", 40)}
    # what was disturbed is measured again
    busy = {**parts[0], "rows": [row | {"slower": 2.0} for row in parts[0]["rows"]]}
    anew = validate(Grid(("full",), (24,), (1,), steps=4), model, spec, here, before=busy)
    assert {r["slower"] for r in anew["rows"]} == {1.0}
    with pytest.raises(KvsimError, match="differs in threads: give --out another file"):
        validate(Grid(("full",), (24,), (1,), steps=4), model, spec, here, before={**parts[0], "threads": 99})


@pytest.mark.parametrize("words", [["--out", "{}/file/x.json"], ["--plot", "{}/x.jpg"], ["--plot", "{}/file/x.png"]])
def test_places_that_cannot_be_written_are_told_before_anything_runs(words, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(module, "load_running", lambda *given: pytest.fail("a model was made"))
    with pytest.raises(KvsimError, match=f"{words[0]} .*x"):
        module.command.main(["--device", "h200-sxm", *(w.format(tmp_path) for w in words)], standalone_mode=False)


def test_nothing_that_runs_is_an_error(here):
    model = random_model(CONFIG)
    with pytest.raises(KvsimError, match="none of the methods runs"):
        validate(Grid(("palu(rank=8)",), (24,), (1,), steps=4), model, replace(spec_of(model), dtype="fp32"), here)


def test_the_command_saves_its_record(here, tmp_path, monkeypatch):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(module.kvsim, "load_device", lambda name: here)
    out = tmp_path / "record.json"
    words = ["--device", "x.toml", "--model", str(folder), "--layers", "2", "--methods", "full,int(bits=4,group=8),fp8",
             "--prompt", "24,40", "--steps", "4", "--threads", "1", "--out", str(out)]
    monkeypatch.setenv("COLUMNS", "140")  # errors of a busy machine are wide numbers, beside which names fold
    found = CliRunner().invoke(module.command, words)
    assert found.exit_code == 0, found.exception
    assert "decode attention" in found.output
    assert "Kendall tau" in found.output
    record = json.loads(out.read_text())
    assert record["kind"] == "validation"
    assert record["grid"]["methods"] == ["full", "int(bits=4,group=8)", "fp8"]


def test_a_machine_slower_than_at_its_best_is_told_by_a_read_a_product_and_a_step():
    pace = Pace(torch.device("cpu"), known=4.0)
    times = iter([2.0, 4.0, 5.0, 1.0, 6.0, 4.0, 3.0, 4.0, 2.0])
    pace.bench.time = lambda work, cold: replace(summary([1.0], [0]), seconds=next(times))
    # the step took 4 when calibrated, now 5
    assert pace.now() == 1.25
    # quarters of 4 and 6, of 2 and 1, of 5 and 4: 4.5, 1.25, 4 as calibrated; the product took 6
    assert pace.now() == pytest.approx(6 / 4.5)
    # a quarter of 2, 1, 3 is 1.5: the read took twice that
    assert pace.now() == pytest.approx(2.0)
    assert pace.step_s == pytest.approx(3.0)  # of 5, 4, 2


def test_disturbed_cells_are_taken_again_while_runs_are_spare(here, monkeypatch):
    # slow beside every run of the first cell; then calm
    paces = iter([1.0, 1.5, 1.3, 1.4, 1.0, 1.0, 1.0])
    monkeypatch.setattr(Pace, "now", lambda self: next(paces))
    runs = []
    monkeypatch.setattr(module, "measure", lambda *args, **more: runs.append(args) or real(*args, **more))
    model = random_model(CONFIG)
    grid = Grid(("full", "int(bits=4)"), (24, 40), (1,), steps=4)
    found = validate(grid, model, replace(spec_of(model), dtype="fp32"), here)
    # half as many runs as cells may be taken again. The first cell has three: 1.0 and 1.5 at its ends, 1.5 and 1.3, 1.3
    # and 1.4; the second begins at 1.4 and has none left
    assert len(runs) == 6
    slower = {(r["method"], r["prompt_tokens"]): r["slower"] for r in found["rows"]}
    assert list(slower.values()) == [1.4, 1.4, 1.0, 1.0]
