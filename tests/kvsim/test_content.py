"""Classes of tokens and segments, portions and tasks by numbers, and the controller's rules."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import parse_method
from kvsim.content import classify, counted, in_segments, thirds
from kvsim.controller import Candidate, Controller, Seen, Signals, fitted
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec
from kvsim.portions import Portions, parse_portions, shared_out
from kvsim.survey_results import TABLES, adapted, decision_lines, lines, shipped, step_table
from kvsim.tasks import TASKS, labels_for, portions_for, task

MODEL = ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=2, head_dim=8)
ROW = 2 * 2 * 2 * 8 * 2
"""Bytes of one token: layers, sides, heads, values, 16 bits."""


def test_classes_by_hand():
    tokens = ["The", " lighthouse", " of", " Cape", " Mer", "row", " was", " built", " in", " ", "187", "4", ".",
              "\n", "Use", " os", ".", "path", "(", "x_", "1", ")", " <=", " 3", ".", " Then"]  # fmt: skip
    assert list(zip(tokens, classify(tokens), strict=True)) == [
        ("The", "function"), (" lighthouse", "word"), (" of", "function"), (" Cape", "entity"), (" Mer", "entity"),
        ("row", "entity"), (" was", "function"), (" built", "word"), (" in", "function"), (" ", "separator"),
        ("187", "entity"), ("4", "entity"), (".", "separator"), ("\n", "separator"), ("Use", "word"), (" os", "code"),
        (".", "code"), ("path", "code"), ("(", "code"), ("x_", "entity"), ("1", "entity"), (")", "code"),
        (" <=", "code"), (" 3", "entity"), (".", "separator"), (" Then", "function"),
    ]  # fmt: skip


@given(st.lists(st.text(max_size=6), max_size=20))
def test_every_token_has_one_class(tokens):
    labels = classify(tokens)
    assert len(labels) == len(tokens)
    assert set(labels) <= {"entity", "function", "code", "separator", "word"}


def test_segments():
    assert in_segments([("system", 2), ("question", 1)]) == ["system", "system", "question"]
    assert counted(thirds(11)) == {"start": 2, "middle": 7, "end": 2}
    with pytest.raises(KvsimError, match="-1 tokens"):
        in_segments([("system", -1)])


def test_portions_by_hand():
    portions = parse_portions("a = topk(budget=0.5,score=knorm,recent=0,sinks=0) // b = int(bits=4) // * = full")
    assert parse_portions(str(portions)) == portions
    assert str(portions.at("new")) == "full"
    # of 10 a's 5 rows; 3 b's of 8 values at 4 bits with fp16 scale and minimum: 4 + 4 bytes for 16; 2 c's; 4 new
    labels = ["a"] * 10 + ["b"] * 3 + ["c"] * 2
    assert portions.cache_bytes(MODEL, [labels], 4, "bf16") == (5 + 2 + 4) * ROW + 3 * ROW // 2
    assert portions.cache_bytes(MODEL, [labels, ["c"]], 0, "bf16") == (5 + 2 + 1) * ROW + 3 * ROW // 2
    one = Portions((("*", parse_method("snapkv(budget=0.25) | int(bits=4)")),))
    assert str(one.at("new")) == "int(bits=4)"


def test_bytes_are_shared_out_in_proportion():
    labels = ["a"] * 100 + ["b"] * 300

    def make(budgets):
        text = "topk(budget={:.6f},score=knorm,recent=0,sinks=0)"
        return parse_portions(" // ".join(f"{n} = {text.format(b)}" for n, b in budgets.items()))

    found = shared_out({"a": 3, "b": 1}, make, MODEL, labels, 120 * ROW, kv_dtype="bf16")
    # 100 * 3x + 300 * x = 120 rows: x = 0.2
    assert found.at("a").tokens.budget == pytest.approx(0.6, abs=0.01)
    assert found.at("b").tokens.budget == pytest.approx(0.2, abs=0.004)
    assert found.cache_bytes(MODEL, [labels], 0, "bf16") <= 120 * ROW
    with pytest.raises(KvsimError, match="too few"):
        shared_out({"a": 1, "b": 1}, make, MODEL, labels, ROW, kv_dtype="bf16")


def test_presets_lean_where_the_survey_says():
    words = ["word "] * 200
    for name in TASKS:
        labels = labels_for(task(name), words, *((20, 20) if TASKS[name].by == "place" else ()))
        portions, apart = portions_for(task(name), labels, MODEL, 100 * ROW, recent=0, kv_dtype="bf16")
        assert portions.cache_bytes(MODEL, [apart], 0, "bf16") <= 100 * ROW
    kept = {}
    for name in ("summarisation", "retrieval"):
        labels = labels_for(task(name), words)
        portions, _ = portions_for(task(name), labels, MODEL, 100 * ROW, recent=0, kv_dtype="bf16")
        kept[name] = {n: portions.at(n).tokens.budget for n in ("start", "middle", "end")}
    assert kept["summarisation"]["start"] == kept["summarisation"]["end"] > kept["summarisation"]["middle"]
    assert kept["retrieval"]["middle"] > kept["retrieval"]["start"]
    with pytest.raises(KvsimError, match="did you mean 'retrieval'"):
        task("retreival")


SMALL, LARGE = Candidate("small", -2.0), Candidate("large", -4.0)


def chooser(price=0.0, patience=0.2):
    # `small` takes a byte a token and loses e^-2 = 0.135, `large` takes four and loses e^-4 = 0.018
    return Controller((SMALL, LARGE), lambda m, t: t if m == "small" else 4 * t, price, patience)


def test_the_controller_by_hand():
    decide = chooser()
    said = decide.decide_all(Signals(100, 0.5, free) for free in (400, 399, 420, 480, 479))
    # large fits; it no longer does; 420 is not yet 400 * 1.2; now it is; and there it stays
    assert [d.method for d in said] == ["large", "small", "small", "large", "large"]
    assert [d.changed for d in said] == [True, True, False, True, False]
    assert "no longer fits" in said[1].reason
    hasty = chooser(patience=0.0)
    said = hasty.decide_all(Signals(100, 0.5, free) for free in (400, 399, 400, 399, 400))
    assert sum(d.changed for d in said) == 5
    with pytest.raises(KvsimError, match="need 100 bytes even as small, 99 are free"):
        decide.decide(Signals(100, 0.5, 99))


def test_a_price_moves_the_choice_and_patience_holds_it():
    # 0.1353 + 100 p against 0.0183 + 400 p: small from p = 0.00039 on
    assert chooser(price=0.0003).decide(Signals(100, 0.5, 10**6)).method == "large"
    assert chooser(price=0.0005).decide(Signals(100, 0.5, 10**6)).method == "small"
    decide = chooser(price=0.0004)
    decide.current = "large"
    # 0.1753 instead of 0.1783 is not a fifth less
    assert decide.decide(Signals(100, 0.5, 10**6)).method == "large"


def test_losses_are_fitted_to_length_and_entropy():
    import math

    rows = [Seen(t, e, math.exp(-1 - 0.5 * math.log(t) + 2 * e)) for t in (64, 256, 1024) for e in (0.2, 0.4, 0.7)]
    found = fitted("m", rows, ridge=1e-9)
    assert (found.a, found.b, found.c) == pytest.approx((-1, -0.5, 2), abs=1e-5)
    assert found.expected(Signals(500, 0.3, 0)) == pytest.approx(math.exp(-1 - 0.5 * math.log(500) + 0.6), rel=1e-4)
    flat = fitted("m", [Seen(64, 0.5, 0.2)])
    assert flat.expected(Signals(9999, 0.9, 0)) == pytest.approx(0.2)  # one request teaches no slope
    with pytest.raises(KvsimError, match="no request"):
        fitted("m", [])


@pytest.mark.parametrize("name", TABLES)
def test_shipped_results_say_where_they_come_from_and_print(name):
    found = shipped(name)
    assert len(found["model_hash"]) == len(found["text_hash"]) == 16
    assert found["date"]
    assert found["seed"] == 0
    text = "\n".join(lines(found))
    assert found["model_hash"] in text
    json.dumps(found, allow_nan=False)


PAGE = (Path(__file__).parents[2] / "runtime/survey.md").read_text("utf-8")


def timed(way, measured):
    step = {"step_predicted_seconds": 0.08, "step_low": 0.05, "step_high": 0.1, "step_measured_seconds": measured}
    cache = {"cache_predicted_seconds": 0.02, "cache_low": 0.01, "cache_high": 0.03, "cache_measured_seconds": 0.04}
    return {"way": way} | step | cache


def test_steps_stand_in_a_table_where_they_were_timed():
    assert step_table([{"way": "x", "kl": 0.1}], ("way",)) == []
    told = step_table([timed("x", 0.07), timed("x", 0.09), timed("y", 0.2), {"way": "x"}], ("way",))
    # the mean of 70 and 90 ms; one of three steps is outside, and every cache's part of 40 ms above 30
    assert [line.split() for line in told[2:4]] == [
        ["x", "80", "50-100", "80", "20", "10-30", "40"], ["y", "80", "50-100", "200", "20", "10-30", "40"]
    ]  # fmt: skip
    assert told[4] == "measured inside the 90% interval: 2 of 3 steps, 0 of 3 of the cache's parts"
    row = timed("x", 0.07) | {"text": "t", "share": 0.5, "decision_predicted_seconds": 0.04, "decision_low": 0.03,
                              "decision_high": 0.06, "decision_measured_seconds": 0.05}  # fmt: skip
    assert decision_lines([row, timed("y", 0.1)])[2].split() == ["t", "0.5", "x", "40", "30-60", "50"]
    assert decision_lines([timed("y", 0.1)]) == []


def milliseconds(*cells):
    return [float(c.replace(",", "")) for c in cells]


def test_the_pages_importance_is_what_was_measured():
    part = PAGE.split("## 4.2 Importance")[1].split("\n## ")[0]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in part.splitlines() if re.match(r"\| \w+ \|", line)]
    rows = [(c[0], c[2], c[6], c[8], c[4], c[5], c[9:]) for c in cells if c[0] != "score"]
    known = {(r["score"], r["when"]): r for r in shipped("importance")["rows"]}
    assert {r[0] for r in rows} == {name for name, when in known if when == "prompt"}
    for name, own, kl, running, said, took, step in rows:
        r = known[name, "prompt"]
        assert milliseconds(said, took.split(" + ")[0]) == pytest.approx(
            [1e3 * r["predicted_seconds"], 1e3 * r["measured_seconds"]], rel=0.06
        )
        if running:
            r = known[name, "running"]
            told = [1e3 * r["step_predicted_seconds"], 1e3 * r["step_measured_seconds"]]
            assert milliseconds(*step) == pytest.approx(told, rel=0.06)
        assert int(own.replace(",", "")) == known[name, "prompt"]["own_bytes"]
        assert float(kl) == pytest.approx(known[name, "prompt"]["kl"], rel=0.05)
        assert (running != "") == ((name, "running") in known)
        if running:
            assert float(running) == pytest.approx(known[name, "running"]["kl"], rel=0.05)


def test_the_pages_ranks_are_what_was_measured():
    part = PAGE.split("## 7.2 Dynamic ranks")[1].split("\n## ")[0]
    found, known = shipped("ranks"), {}
    for r in found["rows"]:
        known[r["way"], r["text"], r["share"]] = r
    rows = re.findall(r"^\| ([a-z, ]+) \|(( [\d.]+ \|){6})$", part, re.MULTILINE)
    assert len(rows) == 6
    for way, cells, _ in rows:
        values = [float(x) for x in cells.split("|")[:-1]]
        cases = [("the same text", 0.5), ("the same text", 0.35), ("a change of text", 0.5), ("a change of text", 0.35)]
        assert values[2:] == pytest.approx([known[way, *c]["kl"] for c in cases], rel=0.05)
        assert values[:2] == pytest.approx([known[way, *c]["bytes"] / 1e6 for c in cases[:2]], abs=0.06)
    for text, share in {(t, s) for _, t, s in known}:
        static, dynamic = (known[f"{x} by weighted energy", text, share] for x in ("static", "dynamic"))
        assert all(b < a for a, b in zip(static["segment_kl"], dynamic["segment_kl"], strict=True))
        assert dynamic["bytes"] == pytest.approx(static["bytes"], rel=1e-3)
    learned = re.findall(r"^\| ([a-z -]+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", part, re.MULTILINE)
    own = {r["ranks"]: r for r in found["learned"]["rows"]}
    assert len(learned) == len(own)
    for name, gone, kl in learned:
        assert (float(gone), float(kl)) == pytest.approx((own[name]["energy_lost"], own[name]["kl"]), rel=0.01)
    assert len({r["bytes"] for r in own.values()}) == 1


def test_the_pages_adaptation_is_what_was_measured():
    part = PAGE.split("## 7.1 Adaptive compression")[1].split("\n## ")[0].replace("\\|", "/")
    found = shipped("adapt")
    told = {}
    for line in part.splitlines():
        cells = [c.strip().strip("`").replace("/", "|") for c in line.split("|")[1:-1]]
        if cells and cells[0] in ("fixed", "adapted"):
            told[cells[1]] = cells[2:]
    for level in ("rows", "bits"):
        for _, method, kb, text, tasks, right, asked in adapted([r for r in found["rows"] if r["level"] == level]):
            own = told.pop(method)
            assert (int(own[0].replace(",", "")), own[3]) == (kb, f"{right} of {asked}")
            assert [float(x) for x in own[1:3]] == pytest.approx([text, tasks], rel=0.05)
    assert not told
    for row in found["controller"]["equal_bytes"]:
        assert row["controlled"]["bytes"] <= row["fixed"]["bytes"]


@pytest.mark.parametrize(("name", "title", "by"), [("adapt", "7.1 Adaptive compression", "method"),
                                                   ("ranks", "7.2 Dynamic ranks", "way")])  # fmt: skip
def test_the_pages_steps_are_what_was_predicted_and_measured(name, title, by):
    table = PAGE.split(f"## {title}")[1].split("\n## ")[0].split("| ms a step: predicted")[1].split("\n\n")[0]
    rows = [r for r in shipped(name)["rows"] if "step_measured_seconds" in r and r.get("level") != "pool"]
    known = {r[by]: [x for x in rows if x[by] == r[by]] for r in rows}
    told = table.replace("\\|", "/").splitlines()[2:]
    assert len(told) == len(known)
    for line in told:
        cells = [c.strip() for c in line.split("|")[1:-1]]
        own = known.pop(cells[0].strip("`").replace("/", "|"))
        names = ["step_predicted_seconds", "step_measured_seconds", "cache_predicted_seconds", "cache_measured_seconds"]
        shown = [cells[i] for i in (1, 2, 3, 5)]
        if name == "ranks":
            names += ["decision_predicted_seconds", "decision_measured_seconds"]
            shown += [cells[6], cells[8]]
        expected = [1e3 * sum(r[n] for r in own) / len(own) for n in names]
        assert milliseconds(*shown) == pytest.approx(expected, rel=0.06)


def test_commands_show_results_and_hand_measuring_over(monkeypatch):
    from click.testing import CliRunner

    import kvsim.cli_adaptive
    from kvsim.cli import main

    calls = []
    monkeypatch.setattr(kvsim.cli_adaptive, "hand_over", lambda name, args: calls.append((name, args)))
    for name in TABLES:
        shown = CliRunner().invoke(main, [name])
        assert shown.exit_code == 0
        assert shown.output == "\n".join(lines(shipped(name))) + "\n"
        assert json.loads(CliRunner().invoke(main, [name, "--json"]).output) == shipped(name)
        CliRunner().invoke(main, [name, "--measure", "--json", "--seed", "3"])
        CliRunner().invoke(main, [name, "--measure", "--help"])
        assert calls[-2:] == [(name, ["--json", "--seed", "3"]), (name, ["--help"])]
        wrong = CliRunner().invoke(main, [name, "--seed", "3"])
        assert wrong.exit_code == 2
        assert "--seed is an option of measuring" in wrong.output


def test_shipped_bytes_were_held_as_predicted():
    assert all(r["cache_bytes"] == r["held_bytes"] for r in shipped("importance")["rows"])
    assert all(r["bytes"] == r["predicted"] for r in shipped("ranks")["rows"])
    ways = [r for r in shipped("adapt")["rows"] if r["way"] == "adapted"]
    assert ways
    assert all(r["bytes"] <= r["limit"] for r in ways)
