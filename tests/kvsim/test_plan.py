"""Fit and sweep: what is chosen, what is rejected and why, and that every point equals a prediction."""

import csv
import json

import numpy as np
import pytest

import kvsim
from kvsim.candidates import candidates, caution
from kvsim.errors import KvsimError
from kvsim.plan import OBJECTIVES, Limits, fit

LLAMA = kvsim.load_model("llama-3.1-8b")
CARD = kvsim.load_device("rtx-4090")
LONG = kvsim.Workload(1, 131072)


@pytest.fixture(scope="module")
def plan():
    return kvsim.fit(LLAMA, CARD, LONG)


def test_the_question_of_the_readme(plan):
    # 16 GiB of bf16 cache beside 15 GiB of weights on 24 GiB
    assert plan.baseline.record.cache_bytes == 16 * 2**30
    assert not plan.baseline.record.fits
    assert plan.chosen is not None
    assert plan.chosen.record.fits
    assert "16.0 GiB" in plan.why()
    assert "short" in plan.why()


def test_every_candidate_is_answered_once(plan):
    considered = {c.name for c in plan.considered}
    rejected = [r.method for r in plan.rejected]
    assert len(rejected) == len(set(rejected))
    fitting = {c.name for c in plan.considered if c.record.fits and not c.caution}
    assert fitting == considered - set(rejected)
    assert {c.name for c in plan.frontier} <= fitting
    assert all(r.reason for r in plan.rejected)
    assert all(r.short_by_bytes > 0 for r in plan.rejected if r.reason == "does not fit")


def test_gentle_keeps_most_bits_of_what_fits_where_nothing_was_measured():
    found = kvsim.fit(LLAMA, CARD, LONG, evidence=[])
    fitting = [c for c in found.considered if c.record.fits and not c.caution]
    assert found.chosen.gentleness == max(c.gentleness for c in fitting)
    assert found.chosen.quality is None


def test_gentle_loses_least_where_losses_are_measured(plan):
    # evidence came with the quality issue: bits kept were only ever a stand-in for it (a token policy keeps all bits of
    # the rows that it keeps)
    measured = [c for c in plan.considered if c.record.fits and not c.caution and c.loss is not None]
    assert plan.chosen.loss == min(c.loss for c in measured)
    assert "borrowed" in plan.chosen.quality["evidence"]


def test_nothing_on_the_frontier_is_beaten(plan):
    def point(c):
        return c.record.peak_bytes, c.record.decode.seconds

    def third(a, b):
        return (a.record.compression, b.record.compression) if None in (a.loss, b.loss) else (a.loss, b.loss)

    for mine in plan.frontier:
        for other in plan.considered:
            if other.record.fits and not other.caution and other is not mine:
                pairs = [*zip(point(other), point(mine), strict=True), third(other, mine)]
                assert not all(o < m for o, m in pairs)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(objective):
    found = fit(
        LLAMA, CARD, kvsim.Workload(1, 32768), objective=objective, methods=["int(bits=8)", "int(bits=4)", "snapkv"]
    )
    fitting = [c for c in found.considered if c.record.fits]
    best = {
        "gentle": lambda c: -c.gentleness,
        "memory": lambda c: c.record.peak_bytes,
        "speed": lambda c: c.record.decode.seconds,
        "context": lambda c: -c.record.max_context,
        "batch": lambda c: -c.record.max_batch,
    }[objective]
    assert best(found.chosen) == min(best(c) for c in fitting)


def test_weak_methods_win_only_when_asked_for():
    assert caution(kvsim.parse_method("int(bits=2)"))
    assert caution(kvsim.parse_method("jl-gaussian"))
    assert caution(kvsim.parse_method("window(sinks=0)"))
    assert not caution(kvsim.parse_method("window(sinks=4)"))
    assert not caution(kvsim.parse_method("kivi-4"))
    asked = fit(LLAMA, CARD, LONG, methods=["int(bits=2)"], objective="memory")
    assert asked.chosen.name in ("int2", "int(bits=2)")
    assert not any(c.caution for c in kvsim.fit(LLAMA, CARD, LONG, objective="memory").frontier)


def test_limits_reject_with_the_figure():
    found = fit(LLAMA, CARD, kvsim.Workload(1, 4096), limits=Limits(max_tpot_ms=0.001))
    assert found.chosen is None
    assert any("ms a token, limit 0.001 ms" in r.reason for r in found.rejected)
    long = fit(LLAMA, CARD, kvsim.Workload(1, 4096), limits=Limits(min_context=100_000))
    assert long.chosen.record.max_context >= 100_000
    for bad in (-1, 0, float("nan"), "5"):
        with pytest.raises(KvsimError, match="positive"):
            Limits(max_ttft_ms=bad)


def test_an_enormous_device_needs_no_compression():
    found = kvsim.fit(LLAMA, kvsim.load_device("b300-sxm"), kvsim.Workload(1, 1000))
    assert found.chosen.method.is_full
    assert "no compression is needed" in found.why()


def test_nothing_fits():
    found = kvsim.fit(kvsim.load_model("llama-3.1-70b"), CARD, kvsim.Workload(1, 1000))
    assert found.chosen is None
    assert found.frontier == ()
    assert found.why().startswith("nothing fits")


def test_weights_that_leave_no_room_are_named():
    # 8.03 G weights of 2 bytes are 15.0 GiB of a T4's 15.0, before the runtime's own
    answer = kvsim.fit(LLAMA, kvsim.load_device("t4"), kvsim.Workload(1, 4096), methods=["int4"])
    assert answer.chosen is None
    assert "the weights take 15.0 GiB" in answer.why()
    assert "fewer bits of weights" in answer.why()


def test_a_context_beyond_the_models_own_is_named():
    answer = kvsim.fit(LLAMA, CARD, kvsim.Workload(1, 4096), methods=["int4"], limits=Limits(min_context=200_000))
    assert answer.why() == "nothing reaches 200,000 tokens: the model's own context ends at 131,072"


def test_methods_that_miss_a_limit_alike_have_one_reason():
    answer = kvsim.fit(LLAMA, kvsim.load_device("rtx-4090"), kvsim.Workload(1, 65536), limits=Limits(max_ttft_ms=1000),
                       methods=["int4", "int8", "kivi-4", "kivi-2", "q8_0"])  # fmt: skip
    reasons = {r.reason for r in answer.rejected if r.reason.startswith("first token")}
    assert len(reasons) == 1
    assert reasons.pop().endswith("00 ms, limit 1000 ms")


def test_json_has_the_contract(plan):
    found = json.loads(json.dumps(plan.to_json()))
    assert set(found) >= {"chosen", "frontier", "rejected", "question"}
    assert {"method", "quality", "compression", "engine_flags", "cache_bytes", "fits"} <= set(found["chosen"])
    assert set(found["rejected"][0]) == {"method", "reason", "short_by_bytes"}


def test_wrong_questions():
    with pytest.raises(KvsimError, match="did you mean 'gentle'"):
        fit(LLAMA, CARD, LONG, objective="gentl")
    with pytest.raises(KvsimError, match="sweep"):
        fit(LLAMA, CARD, kvsim.Workload(np.array([1, 2]), 10))
    with pytest.raises(KvsimError, match="rank"):
        fit(LLAMA, CARD, LONG, methods=["svd(rank=4096)"])


def test_candidates_compose_or_say_why():
    for _, method, problem in candidates(128):
        assert (method is None) == bool(problem)


def test_sweep_equals_predictions(tmp_path):
    found = kvsim.sweep(LLAMA, CARD, ["full", "kivi-4"], prompt_tokens=[1000, 2000, 4000], batch=[1, 7])
    assert found["cache_bytes"].shape == (2, 2, 3)
    case = kvsim.Case(LLAMA, CARD, kvsim.parse_method("kivi-4"), kvsim.Workload(7, 2000))
    record = kvsim.predict(case)
    assert found["cache_bytes"][1, 1, 1] == record.cache_bytes
    assert found["tpot_s"][1, 1, 1] == pytest.approx(record.decode.seconds)
    assert found["fits"][1, 1, 1] == record.fits
    found.write(tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == len(found) == 12
    assert int(rows[-1]["cache_bytes"]) == found["cache_bytes"][1, 1, 2]
    found.write(tmp_path / "out.json")
    assert len(json.loads((tmp_path / "out.json").read_text())) == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.json"]
    with pytest.raises(KvsimError, match=r"\.csv or \.json"):
        found.write(tmp_path / "out.xlsx")
    with pytest.raises(KvsimError, match="does not exist"):
        found.write(tmp_path / "nowhere" / "out.csv")


def test_sweep_to_frame():
    pytest.importorskip("pandas")
    frame = kvsim.sweep(LLAMA, CARD, ["full"], prompt_tokens=[10, 20]).to_frame()
    assert list(frame["prompt_tokens"]) == [10, 20]


def test_a_long_sweep_is_cut_into_pieces():
    whole = kvsim.sweep(LLAMA, CARD, ["int(bits=4)"], prompt_tokens=np.arange(1, 131072), batch=[1, 2])
    assert whole["cache_bytes"][0, 1, -1] == 2 * 131071 * 32 * 2 * 8 * 72
