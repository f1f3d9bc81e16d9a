"""Evidence: broken files, rows that speak for a question or do not, limits on loss."""

import json
from dataclasses import replace

import pytest

import kvsim
from kvsim.choice import Limits, too_lossy
from kvsim.errors import KvsimError
from kvsim.evidence import Evidence, Table, from_json, gathered, kept, most_measured, read, shipped, spread, stored_bits
from kvsim.plan import fit

SMALL = kvsim.load_model("smollm2-135m")
LLAMA = kvsim.load_model("llama-3.1-8b")
CARD = kvsim.load_device("rtx-4090")
WORK = kvsim.Workload(1, 2048)


def row(method, kl, model="smollm2-135m", **more):
    method = str(kvsim.parse_method(method))
    fields = {
        "model": model,
        "method": method,
        "kl": kl,
        "kl_low": kl * 0.8,
        "kl_high": kl * 1.2,
        "top1": 1 - kl,
        "top1_low": 1 - 1.2 * kl,
        "top1_high": 1 - 0.8 * kl,
        "ppl_ratio": 1 + kl,
        "ppl_low": 1 + 0.8 * kl,
        "ppl_high": 1 + 1.2 * kl,
        "ppl_full": 10.0,
        "segments": 8,
        "prompt": 1024,
        "scored": 128,
        "kept": kept(kvsim.parse_method(method), 1024, 128, SMALL),
        "bits": 4.5,
        "text": "t",
        "text_hash": "h",
        "model_hash": "m",
        "seed": 0,
        "machine": "x",
        "date": "2026-01-01",
        "versions": {},
    }
    return Evidence(**(fields | more))


ROWS = (row("int8", 0.0003), row("kivi-4", 0.006), row("int4", 0.09), row("kivi-2", 0.2), row("h2o(budget=0.5)", 0.02))


def test_a_row_comes_back_from_its_json():
    for one in (row("int4", 0.1, attention_error=(0.1, 0.2), segment_kl=(0.1,)), row("full", 0.0)):
        assert from_json(json.loads(json.dumps(one.to_json())), "here") == one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kl": "x"}, "kl is a finite number"),
        ({"kl": float("inf")}, "finite"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"kl": None}, "finite"),
        ({"kl": 10**400}, "finite"),
        ({"kl": -0.1}, "kl lies between 0 and"),
        ({"top1_low": "0.9"}, "top1_low is a finite number"),
        ({"top1": 1.5}, "top1 lies between 0 and 1, got 1.5"),
        ({"ppl_low": 0.0}, "ppl_low lies between"),
        ({"segments": 2.5}, "segments is a whole number"),
        ({"prompt": 0}, "prompt lies between 1 and"),
        ({"model": 5}, "model is text"),
        ({"method": None}, "method is text"),
        ({"versions": "2.0"}, "versions is an object"),
        ({"calibrated": 1}, "calibrated is true or false"),
        ({"segment_kl": 0.1}, "segment_kl is a list of finite numbers"),
        ({"attention_error": ["x"]}, "attention_error is a list of finite numbers"),
    ],
)
def test_broken_rows_are_told(change, said):
    with pytest.raises(KvsimError, match=said):
        from_json(row("int4", 0.1).to_json() | change, "file:3")


def test_files(tmp_path):
    file = tmp_path / "e.jsonl"
    line = json.dumps(row("int4", 0.1).to_json())
    file.write_text(f"{line}\n\n{line[:40]}")
    assert len(read(file)) == 1  # the half line of a run that was killed
    file.write_text(f"{line[:40]}\n{line}\n")
    with pytest.raises(KvsimError, match=r"e\.jsonl:1 is no JSON"):
        read(file)
    for own in ("a note without a line's end", "[" * 100_000, '{"other": 1', '{"kl": 1'):  # no row that was cut off
        file.write_text(f"{line}\n{own}")
        with pytest.raises(KvsimError, match=r"e\.jsonl:2 is no JSON"):
            read(file)
    file.write_text("[1]\n")
    with pytest.raises(KvsimError, match="no JSON object"):
        read(file)
    with pytest.raises(KvsimError, match="no such file"):
        read(tmp_path / "none.jsonl")


def test_a_users_own_rows_come_first(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row("int4", 0.5).to_json()) + "\n")
    found, _ = Table(gathered(str(file)), SMALL).of(kvsim.parse_method("int4"), WORK, SMALL)
    assert found.kl == 0.5


def test_another_models_rows_are_borrowed_and_widened():
    mine, _ = Table(ROWS, SMALL).of(kvsim.parse_method("int4"), WORK, SMALL)
    lent, _ = Table(ROWS, LLAMA).of(kvsim.parse_method("int4"), WORK, LLAMA)
    assert not mine.borrowed_from
    assert lent.borrowed_from == "llama-3.1-8b"
    assert lent.kl == mine.kl
    assert lent.kl_high == pytest.approx(4 * mine.kl_high)  # one model was measured: the factor is the assumed one
    assert lent.kl_low == pytest.approx(mine.kl_low / 4)
    assert lent.ppl_low <= lent.ppl_ratio <= lent.ppl_high
    assert lent.top1_low <= lent.top1 <= lent.top1_high
    assert "borrowed from smollm2-135m" in lent.where


def test_the_factor_is_measured_where_two_models_were():
    # ten methods, each twice as lossy on the second model: every ratio is 2
    pairs = [row(f"int(bits=4,residual={i})", 0.1 * k, m) for i in range(10) for m, k in (("a", 1), ("b", 2))]
    factor, why = spread(pairs)
    assert factor == pytest.approx(2.0)
    assert "10 methods" in why


def test_evidence_does_not_reach_beyond_what_was_kept():
    window = row("streaming-llm", 0.001)  # 1024 of 1152 rows: hardly anything was dropped
    method = kvsim.parse_method("streaming-llm")
    assert Table([window], SMALL).of(method, kvsim.Workload(1, 1024), SMALL)[0] is not None
    found, why = Table([window], SMALL).of(method, kvsim.Workload(1, 8192), SMALL)
    assert found is None
    assert "89% of 1152 tokens; here it keeps 12%" in why or "here it keeps 13%" in why
    # a prompt policy kept a quarter of the prompt and all that came after
    assert Table([row("snapkv(budget=0.25)", 0.1)], SMALL).of(kvsim.parse_method("snapkv(budget=0.25)"), WORK, SMALL)[0]
    # a budget that is a share keeps the same share of any length
    assert Table(ROWS, SMALL).of(kvsim.parse_method("h2o(budget=0.5)"), kvsim.Workload(1, 8000), SMALL)[0] is not None


def test_counts_by_hand():
    assert kept(kvsim.parse_method("full"), 1000, 24, SMALL) == 1.0
    assert kept(kvsim.parse_method("window(sinks=4,recent=251)"), 1000, 24, SMALL) == pytest.approx(
        256 / 1024
    )  # a step reads one more
    assert stored_bits(kvsim.parse_method("int4"), 1000, 24, SMALL) == pytest.approx(4.5)  # 4 + 32 / 64
    assert stored_bits(kvsim.parse_method("k:int(bits=8) v:full"), 100, 0, SMALL) == pytest.approx((8.5 + 16) / 2)


@pytest.mark.parametrize(("limit", "expected"), [(0.001, "int8"), (0.01, "kivi-4"), (0.1, "int4"), (0.3, "kivi-2")])
def test_a_limit_on_loss_chooses_the_smallest_that_keeps_to_it(limit, expected):
    methods = ["int8", "kivi-4", "int4", "kivi-2"]
    plan = fit(SMALL, CARD, WORK, limits=Limits(max_kl=limit), evidence=ROWS, methods=methods)
    assert plan.objective == "memory"
    assert plan.chosen.name == expected
    allowed = [c for c in plan.considered if c.loss <= limit]
    assert plan.chosen.record.peak_bytes == min(c.record.peak_bytes for c in allowed)
    assert all(f"limit {limit:g}" in r.reason for r in plan.rejected)


def test_a_caution_gives_way_to_evidence_of_this_very_model_within_a_limit():
    asked = {"limits": Limits(max_kl=0.3), "evidence": ROWS}
    assert fit(SMALL, CARD, WORK, **asked).chosen.name == "kivi-2"
    assert "kivi-2" in {r.method for r in fit(LLAMA, CARD, WORK, **asked).rejected}


def test_other_limits_and_required_evidence():
    judged = {c.name: c for c in fit(LLAMA, CARD, WORK, evidence=ROWS, methods=["int4", "int8", "nvfp4"]).considered}
    assert (
        too_lossy(judged["int8"], Limits(max_kl=0.001))
        == "KL 0.0014 (borrowed from smollm2-135m, widened), limit 0.001"
    )
    assert "top-1" in too_lossy(judged["int4"], Limits(min_top1=0.99))
    assert "perplexity" in too_lossy(judged["int4"], Limits(max_ppl=1.01))
    assert too_lossy(judged["nvfp4"], Limits(max_kl=5)) == "no evidence of its quality: not measured"
    assert "only on smollm2-135m" in too_lossy(judged["int8"], Limits(require_evidence=True))
    assert too_lossy(judged["full"], Limits(max_kl=1e-9, require_evidence=True)) == ""
    for bad in ({"max_kl": 0.0}, {"min_top1": 2.0}, {"max_ppl": 0.9}, {"max_kl": float("nan")}):
        with pytest.raises(KvsimError):
            Limits(**bad)


def test_widening_never_narrows():
    for one in ROWS:
        wide = one.widened(3.0, "x")
        assert wide.kl_low <= one.kl_low <= one.kl_high <= wide.kl_high
        assert wide.ppl_low <= one.ppl_low <= one.ppl_high <= wide.ppl_high
        assert wide.top1_low <= one.top1_low <= one.top1_high <= wide.top1_high
    gain = replace(ROWS[0], ppl_ratio=0.99, ppl_low=0.98, ppl_high=1.0).widened(2.0, "x")
    assert gain.ppl_low <= 0.98


# -- the shipped table ---------------------------------------------------------------------------------------------

TABLE = {kvsim.parse_method(r.method): r for r in reversed(shipped()) if r.model == "smollm2-135m"}


def test_every_shipped_row_says_where_it_comes_from():
    assert TABLE
    for r in shipped():
        assert str(kvsim.parse_method(r.method)) == r.method
        assert r.text_hash
        assert r.model_hash
        assert r.versions["torch"]
        assert r.date
        assert r.segments >= 2
        assert r.kl_low <= r.kl <= r.kl_high


def test_two_models_were_measured_with_the_same_methods():
    by = {}
    for r in shipped():
        by.setdefault(r.model, set()).add(r.method)
    assert {"smollm2-135m", "gemma3-270m"} <= set(by)
    assert len(by["smollm2-135m"] & by["gemma3-270m"]) >= 20
    factor, why = spread(shipped())
    assert factor > 1
    assert "measured on two models" in why


def test_a_shipped_models_own_name_finds_its_rows():
    gemma = kvsim.load_model("gemma-3-270m")
    found, _ = Table(shipped(), gemma).of(kvsim.parse_method("int(bits=5)"), kvsim.Workload(1, 1024), gemma)
    assert found.model == "gemma3-270m"
    assert not found.borrowed_from


def test_the_model_that_lends_is_the_one_with_most_text_under_its_rows():
    few = [replace(r, segments=8) for r in ROWS[:3]]
    many = [replace(r, model="gemma3-270m", segments=4) for r in ROWS]
    assert len(many) > len(few)  # 5 rows of 4 segments against 3 of 8
    llama = kvsim.load_model("llama-3.1-8b")
    assert Table([*many, *few], llama).lender == "smollm2-135m"
    assert most_measured([*many, *few]) == tuple(few)
    assert Table(shipped(), llama).lender == "smollm2-135m"


def test_a_tighter_limit_chooses_another_method_and_both_are_right_by_the_table():
    work, chosen = kvsim.Workload(1, 4096), {}
    for limit in (0.01, 0.1):
        plan = fit(SMALL, CARD, work, limits=Limits(max_kl=limit), evidence=shipped())
        chosen[limit] = plan.chosen.method
        assert TABLE[plan.chosen.method].kl <= limit
        allowed = [c for c in plan.considered if c.method in TABLE and TABLE[c.method].kl <= limit and c.evidence]
        assert plan.chosen.record.peak_bytes == min(c.record.peak_bytes for c in allowed)
        # of those that are as small, and as fast to a thousandth, the one that was measured to lose least
        alike = [c for c in allowed if c.record.peak_bytes == plan.chosen.record.peak_bytes
                 and abs(c.record.decode.seconds / plan.chosen.record.decode.seconds - 1) < 1e-4]
        assert TABLE[plan.chosen.method].kl == min(TABLE[c.method].kl for c in alike)
    assert chosen[0.01] != chosen[0.1]
    assert TABLE[chosen[0.1]].bits < TABLE[chosen[0.01]].bits


@pytest.mark.parametrize(
    "asked",
    [
        {"max_kl": -1.0}, {"max_kl": float("inf")}, {"max_ppl": 0.5}, {"max_ppl": float("nan")}, {"min_top1": 1.5},
        {"min_top1": -0.1},
    ],
)  # fmt: skip
def test_odd_limits_are_one_line(asked):
    with pytest.raises(KvsimError) as told:
        Limits(**asked)
    assert next(iter(asked)) in str(told.value)
    assert "\n" not in str(told.value)
