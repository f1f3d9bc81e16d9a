"""What the shipped evidence must show, or it is not to be believed: on both models, within paired intervals."""

import re
from collections import defaultdict
from importlib.resources import files
from itertools import pairwise
from statistics import mean, median, stdev

import pytest
from scipy.stats import t

import kvsim
from kvsim.claims import measured_report
from kvsim.evidence import shipped

MODELS = ("smollm2-135m", "gemma3-270m")
NOTES = files("kvsim.data").joinpath("evidence/README.md").read_text("utf-8")


def tables():
    """Rows by method and model; where a method was measured twice, on more segments."""
    found = {m: {} for m in MODELS}
    for r in sorted(shipped(), key=lambda r: r.segments):
        found[r.model][kvsim.parse_method(r.method)] = r
    return found


TABLES = tables()


def of(text, model="smollm2-135m"):
    return TABLES[model][kvsim.parse_method(text)]  # a row that is missing fails


def surely_worse(a, b):
    """Whether a loses more than b on the segments of both, beyond the 95% interval of the paired difference."""
    each = [x - y for x, y in zip(a.segment_kl, b.segment_kl, strict=False)]
    return mean(each) > t.ppf(0.975, len(each) - 1) * stdev(each) / len(each) ** 0.5


@pytest.mark.parametrize("model", MODELS)
def test_full_loses_nothing(model):
    assert of("full", model).kl < 1e-6
    assert of("full", model).top1 == 1.0
    assert all(r.kl > 0 for m, r in TABLES[model].items() if r.bits < 15)


def test_surely_worse_can_tell():
    assert surely_worse(of("int(bits=3)"), of("int(bits=4)"))
    assert not surely_worse(of("int(bits=4)"), of("int(bits=3)"))
    assert not surely_worse(of("h2o(budget=0.25)"), of("snapkv(budget=0.25)"))  # two segments decide: no order


@pytest.mark.parametrize(("model", "least"), [("smollm2-135m", 90), ("gemma3-270m", 10)])
def test_more_bits_ranks_or_rows_lose_less_in_every_family(model, least):
    """Methods that differ in one number: bits, a rank or a budget."""
    families = defaultdict(dict)
    for method, r in TABLES[model].items():
        written = str(method)
        for found in re.finditer(r"(?<=bits=)\d+|(?<=rank=)\d+|(?<=budget=)0\.\d+", written):
            families[written[: found.start()] + "#" + written[found.end() :]][float(found[0])] = r
    steps = [(a, b) for held in families.values() for a, b in pairwise(r for _, r in sorted(held.items()))]
    assert len(steps) >= least
    wrong = [(a.method, b.method) for a, b in steps if surely_worse(b, a)]
    assert len(wrong) <= len(steps) // 40, wrong  # of equals, so many are told apart by chance
    assert sum(b.kl < a.kl for a, b in steps) >= 0.95 * len(steps)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ("kivi-4", "kivi-2"),
        ("turboquant-4", "turboquant-3"),
        ("q8_0", "q4_0"),
        ("int4", "int2"),
        ("int(bits=5)", "int(bits=4)"),
        ("int(bits=4)", "int(bits=3)"),
        ("int(bits=4,group=32)", "int(bits=4)"),
        ("svd(rank=48)", "svd(rank=32)"),
        ("h2o(budget=0.5)", "h2o(budget=0.2)"),
        ("snapkv(budget=0.5)", "snapkv(budget=0.25)"),
        ("int(bits=4,residual=128)", "int(bits=4)"),
    ],
)
def test_orders_that_must_hold(better, worse):
    assert of(better).kl < of(worse).kl
    assert all(a < b for a, b in zip(of(better).segment_kl, of(worse).segment_kl, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_keys_need_the_bits(model):
    assert of("k4v2", model).kl_high < of("k:int(bits=2,group=32) v:int(bits=4,group=32)", model).kl_low


@pytest.mark.parametrize(("model", "times"), [("smollm2-135m", 5), ("gemma3-270m", 3)])
def test_eviction_without_sinks_is_far_worse(model, times):
    # by segment: one whose text needs what both windows dropped makes both bad
    without, with_sinks = (of(f"window(sinks={s},recent={256 - s})", model).segment_kl for s in (0, 4))
    assert all(a > b for a, b in zip(without, with_sinks, strict=True))
    assert median(without) > times * median(with_sinks)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["", ",kind=sparse", ",kind=embedding"])
def test_a_random_projection_is_far_worse_than_svd_at_equal_rank(model, kind):
    one, other = of(f"random_projection(rank=32{kind})", model), of("svd(rank=32)", model)
    assert one.kl > 3 * other.kl
    assert one.kl_low > other.kl_high


@pytest.mark.parametrize("text", ["int4", "int8", "kivi-4", "kivi-2", "q8_0"])
def test_both_protocols_are_measured_and_differ(text):
    # on the segments that both have, the first ones: what was attended while the prompt was read makes other rows
    after, write = of(text), of(f"{text} @ on_write")
    both = list(zip(after.segment_kl, write.segment_kl, strict=False))
    assert len(both) == write.segments >= 4
    assert any(a != w for a, w in both)


def test_writing_at_once_loses_more_over_all_methods_measured_both_ways():
    rows = TABLES["smollm2-135m"]
    both = [(rows[m], r) for r in rows.values() if r.method.endswith(" @ on_write")
            and (m := kvsim.parse_method(r.method.removesuffix(" @ on_write"))) in rows and r.kl > 0]  # fmt: skip
    assert len(both) >= 15
    ratio = median(mean(w.segment_kl) / mean(a.segment_kl[: w.segments]) for a, w in both)
    assert 1.0 < ratio < 3.0


@pytest.mark.parametrize("model", MODELS)
def test_normalised_h2o_is_no_worse_than_raw_at_a_quarter(model):
    raw, normalised = of("h2o(budget=0.25)", model), of("h2o(budget=0.25,score=normalised)", model)
    assert not surely_worse(normalised, raw)
    # on Gemma the mean is 14% higher, within the interval of four segments
    assert normalised.kl <= raw.kl * (1.0 if model == "smollm2-135m" else 1.2)


def test_the_second_model_agrees_on_the_order():
    def kl(text):
        return of(text, "gemma3-270m").kl

    assert kl("int(bits=6)") < kl("int(bits=5)") < kl("int(bits=4,group=32)") < kl("int(bits=3)") < kl("int2")
    assert kl("turboquant-4") < kl("turboquant-3")
    assert kl("q8_0") < kl("q4_0")
    assert kl("snapkv(budget=0.5)") < kl("snapkv(budget=0.25)")


# -- what differs from earlier figures, in words -----------------------------------------------------------------------

HERE = {
    "`snapkv(budget=0.25)` KL": ["snapkv(budget=0.25)"],
    "`h2o(budget=0.25)` KL, normalised": ["h2o(budget=0.25)", "h2o(budget=0.25,score=normalised)"],
    "K4V2, K2V4 KL": ["k4v2", "k:int(bits=2,group=32) v:int(bits=4,group=32)"],
    "int4: perplexity after prefill": ["int4"],
    "`rotated`: perplexity at 4 and 3 bits": ["rotated(bits=4)", "rotated(bits=3)"],
    "random projection, r = d/2: perplexity": ["random_projection(rank=32)"],
}


@pytest.mark.parametrize("name", HERE)
def test_figures_of_the_notes_are_those_of_the_rows(name):
    cells = next(line for line in NOTES.splitlines() if line.startswith(f"| {name}")).split("|")
    told = [float(x) for x in re.findall(r"[\d.]*\d", cells[3])]
    for text, figure in zip(HERE[name], told, strict=True):
        found = of(text).kl if name.endswith(("KL", "normalised")) else of(text).ppl_ratio
        assert figure == pytest.approx(found, rel=0.02), (text, found)


# -- reports -----------------------------------------------------------------------------------------------------------


def allocations():
    found = defaultdict(dict)
    for r in measured_report("allocation")["rows"]:
        found[r["by"]][r["what"]] = r
    return found


def test_allocations_beat_the_uniform_choice_on_text_held_out():
    for by in ("bits, gradient", "bits, hessian", "3 bits, gradient", "ranks, gradient", "tokens, attention"):
        one, own = allocations()[by]["uniform"], allocations()[by]["allocated"]
        assert own["kl"] < 0.8 * one["kl"]
        assert own["bytes"] == own["predicted_bytes"] <= one["bytes"]
        assert all(a < b for a, b in zip(own["segment_kl"], one["segment_kl"], strict=True))


@pytest.mark.parametrize("by", ["bits, variance", "bits, attention", "bits, gradient", "bits, hessian",
                                "3 bits, gradient"])  # fmt: skip
def test_bits_by_head_and_group_beat_bits_by_layer_and_the_uniform_choice_at_equal_bytes(by):
    rows = allocations()[by]
    assert [rows[w]["groups"] for w in ("allocated", "by head", "by group")] == [60, 180, 360]
    assert all(r["bytes"] == r["predicted_bytes"] <= rows["uniform"]["bytes"] for r in rows.values())
    estimates = [rows[w]["estimated_loss"] for w in ("uniform", "allocated", "by head", "by group")]
    assert estimates == sorted(estimates, reverse=True)
    assert all(rows[w]["kl"] < rows["allocated"]["kl"] < 1.1 * rows["uniform"]["kl"] for w in ("by head", "by group"))
    for what in ("by head", "by group"):
        assert rows[what]["kl"] < 0.8 * rows["uniform"]["kl"]
        if "gradient" in by or "hessian" in by:
            assert all(a < b for a, b in zip(rows[what]["segment_kl"], rows["uniform"]["segment_kl"], strict=True))
        assert "widths(bits=" in rows[what]["method"]
        assert str(kvsim.parse_method(rows[what]["method"])) == rows[what]["method"]


def test_other_libraries_are_met_at_equal_bytes_but_for_one_tie():
    pairs = measured_report("others")["pairs"]
    assert len(pairs) == 14
    assert {p["other"] for p in pairs if not p["at_least_as_good"]} <= {"SnapKVPress(0.75)"}
    assert max(p["ratio"] for p in pairs) < 1.05  # the same score as here, other ties: within every interval
