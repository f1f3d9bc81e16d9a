"""Added hardware by hand: what each rate takes off a step, which one is enough, and what a wrong question is told."""

import json
from dataclasses import replace

import pytest

import kvsim
from kvsim.cli import main
from kvsim.codesign import GAINED, additions, attention_at, break_even, codesign
from kvsim.coefficients import Coefficient
from kvsim.cost import KernelWork, attention_seconds, kernel_seconds
from kvsim.errors import KvsimError
from kvsim.op import Op, op_seconds
from kvsim.whatif import parse_what_if, what_if

BASE = kvsim.load_device("h100-sxm")
# 1 TB/s, one unit of 1 GHz that takes in 100 values a clock: 1e11 values/s; arithmetic 1e15 flop/s
FOUR = Coefficient("decode", "vllm/fa3", "int4", 0.0, 1.0, 1.0, element_rates=((128, 100.0),), max_splits=1)
PLAIN = replace(FOUR, format="bf16", element_rates=())
WRITE = Coefficient("elementwise", "*", "*", 0.0, 1.0, 1.0)
DEVICE = replace(BASE, bandwidth_bytes_per_s=1e12, units=1, clock_hz=1e9, peaks={"bf16": 1e15},
                 last_level_cache_bytes=0, own_coefficients=(PLAIN, FOUR, WRITE))  # fmt: skip
MODEL = kvsim.ModelSpec.from_numbers(layers=2, n_heads=8, n_kv_heads=8, head_dim=128, hidden_size=256,
                                     intermediate_size=256, vocab_size=100)  # fmt: skip


@pytest.mark.parametrize(("text", "told"), [
    ("decompres=4TB/s", "did you mean 'decompress'"),
    ("near-memory=4TB/s", "did you mean 'near_memory'"),
    ("decompress=4TB", "B/s"),
    ("decompress=4", "4TB/s"),
    ("mixed=4TB/s", "FLOP/s"),
    ("capacity=4TB/s", "141GiB"),
    ("decompress=-4TB/s", "above zero"),
    ("decompress=0TB/s", "above zero"),
    ("decompress=1e40TB/s", "above zero and finite"),
    ("decompress", "has no value"),
    ("", "unknown key"),
    ("link=1GB/s,link=2GB/s", "given twice"),
    ("decompress=1TB/s,mixed=1TFLOP/s", "each take over the conversion"),
])  # fmt: skip
def test_a_wrong_what_if_is_told_in_one_line(text, told):
    with pytest.raises(KvsimError) as wrong:
        parse_what_if(text)
    assert told in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_units():
    found = parse_what_if("compress=4TB/s, bandwidth=1.5GiB/s,mixed=2PFLOPS,capacity=141GiB")
    assert found == {"compress": 4e12, "bandwidth": 1.5 * 2**30, "mixed": 2e15, "capacity": 141 * 2**30}


def attention(device, format="int4"):
    # 8 heads x 128 x 2 sides x 100,000 rows = 204.8 M values; int4: 0.5625 bytes each
    return attention_seconds(device, phase="decode", batch=1, tokens=100_000, n_heads=8, n_kv_heads=8, head_dim=128,
                             format=format)  # fmt: skip


def test_each_addition_by_hand():
    # as it is: 204.8e6 values / 1e11 a second = 2.048 ms; 8 blocks on one unit: no idle
    assert attention(DEVICE).seconds == pytest.approx(2.048e-3, rel=1e-3)
    assert attention(DEVICE).term == "conversion"
    # a pipeline of 4e11 B/s puts out 2 bytes a value: 409.6e6 / 4e11 = 1.024 ms; slower than the units: 8.192 ms
    assert attention(what_if(DEVICE, "decompress=400GB/s")).seconds == pytest.approx(1.024e-3, rel=1e-3)
    assert attention(what_if(DEVICE, "decompress=50GB/s")).seconds == pytest.approx(8.192e-3, rel=1e-3)
    # without limit: 115.2 MB + 4 KB at 1 TB/s
    assert attention(what_if(DEVICE, {"decompress": 1e18})).seconds == pytest.approx(115.204e-6, rel=1e-3)
    # mixed units: 4 x 8 x 128 x 100,000 = 409.6 Mflop at 1 TFLOP/s = 409.6 us, no conversion
    assert attention(what_if(DEVICE, "mixed=1TFLOP/s")).seconds == pytest.approx(409.6e-6, rel=1e-3)
    # beside the banks: 115.204 MB at 10 TB/s, conversion and arithmetic keep up
    assert attention(what_if(DEVICE, "near_memory=10TB/s")).seconds == pytest.approx(11.5204e-6, rel=1e-3)


def test_full_precision_needs_no_converter_but_gains_from_bandwidth_near_memory():
    full = attention(DEVICE, "bf16").seconds
    assert full == pytest.approx(409.604e-6, rel=1e-3)
    assert attention(what_if(DEVICE, "decompress=1GB/s"), "bf16").seconds == full
    assert attention(what_if(DEVICE, "mixed=1GFLOP/s"), "bf16").seconds == full
    assert attention(what_if(DEVICE, "near_memory=10TB/s"), "bf16").seconds == pytest.approx(40.96e-6, rel=1e-3)
    assert attention(what_if(DEVICE, "bandwidth=2TB/s"), "bf16").seconds == pytest.approx(full / 2, rel=1e-3)


def test_the_prompt_is_left_alone_and_writing_has_a_pipeline_of_its_own():
    op = Op("compress", "elementwise", bytes=1e9, flops=1e15)
    # 1e15 flop at 1e15 flop/s take 1 s; the pipeline takes 1e9 / 2e11 = 5 ms, streaming alone 1 ms
    assert sum(t.seconds for t in op_seconds(DEVICE, op)) == pytest.approx(1.0, rel=0.05)
    assert sum(t.seconds for t in op_seconds(what_if(DEVICE, "compress=200GB/s"), op)) == pytest.approx(5e-3)
    assert sum(t.seconds for t in op_seconds(what_if(DEVICE, "compress=10TB/s"), op)) == pytest.approx(1e-3)
    other = replace(op, name="norms")
    assert op_seconds(what_if(DEVICE, "compress=1GB/s"), other)[0].seconds == op_seconds(DEVICE, other)[0].seconds
    work = KernelWork(1e9, 1e9, 1e12)
    there = what_if(BASE, "near_memory=100TB/s,compress=1GB/s")
    assert kernel_seconds(there, "prefill", work).seconds == kernel_seconds(BASE, "prefill", work).seconds


def test_what_is_added_shows_and_widens():
    there = what_if(BASE, "decompress=4TB/s,capacity=141GiB")
    assert there.name == "H100-SXM5-80GB what-if decompress=4TB/s,capacity=141GiB"
    assert there.capacity_bytes == 141 * 2**30
    one, other = attention(BASE, "bf16"), attention(there, "bf16")
    assert one.seconds == other.seconds
    assert other.low < one.low < one.high < other.high
    again = what_if(there, "compress=1TB/s")
    assert (again.added.decompress_bytes_per_s, again.added.compress_bytes_per_s) == (4e12, 1e12)


def case(text="int(bits=4)", device=BASE):
    work = kvsim.Workload(4, 20_000, 0)
    return kvsim.Case(MODEL, device, kvsim.parse_method(text), work)


def test_what_gains_nothing_has_no_rate():
    # converting is the limit: more bandwidth alone saves next to nothing, a link between devices is not there
    found = {a.name: a for a in additions(case())}
    assert found["bandwidth"].least is None
    assert found["bandwidth"].share < 0.01 < found["decompress"].share
    assert "link" not in found


def test_the_least_rate_is_enough_and_a_smaller_one_is_not():
    # 20,000 x 4 x 8 x 128 x 2 values of int4 on an H100: conversion limits
    now = kvsim.predict(case()).decode.seconds
    for one in additions(case(), ("decompress", "mixed", "near_memory")):
        assert one.least is not None
        wanted = now - GAINED * (now - one.limit_s)
        assert one.limit_s < one.step_s <= wanted < now
        less = case(device=what_if(BASE, {one.name: one.least / 1.05}))
        assert kvsim.predict(less).decode.seconds > wanted


def test_break_even_by_hand_and_by_the_model():
    at = kvsim.Case(MODEL, DEVICE, kvsim.parse_method("int(bits=4)"), kvsim.Workload(1, 100_000, 0))
    found = break_even(at, "int4")
    # full precision takes 409.604 us, so the converter must take in 204.8e6 / 409.604e-6 = 5.0e11 values/s (the smooth
    # maximum of 409.6 and 115.2 us is the larger of them to 1e-5); bytes alone take 115.2 us, and within 5% of that
    # (1 + x^8)^(1/8) <= 1.05: x = 0.477^(1/8) = 0.912, so 204.8e6 / (0.912 x 115.2e-6) = 1.95e12 values/s
    assert found.now == pytest.approx(1e11)
    assert found.even == pytest.approx(5.0e11, rel=0.015)
    assert found.enough == pytest.approx(1.95e12, rel=0.015)
    assert "5.0x the rate breaks even" in found.verdict
    shape = {"batch": 1, "tokens": 100_000, "n_heads": 8, "n_kv_heads": 8, "head_dim": 128}
    full = attention(DEVICE, "bf16").seconds
    assert attention_at(DEVICE, "int4", found.even, **shape) == pytest.approx(full, rel=0.01)


def test_bounds_hold_for_every_addition():
    found = codesign(case(), ("int4", "fp8"))
    bounds = dict(found.bounds)
    every = bounds["every byte of the step once at the datasheet's bandwidth"]
    assert bounds["the same without attention's bytes"] < every < found.step_s
    for one in found.added:
        if one.name in ("decompress", "mixed", "near_memory"):
            assert one.limit_s >= bounds["attention in no time, all else as it is"]
    assert found.best.name in ("near_memory", "decompress")


def test_models_without_plain_attention():
    latent, work = kvsim.load_model("deepseek-v2"), kvsim.Workload(8, 8192, 0)
    found = codesign(kvsim.Case(latent, BASE, kvsim.parse_method("int(bits=4)"), work, devices=16))
    assert found.formats == ()
    assert {a.name for a in found.added} >= {"decompress", "link"}
    state = kvsim.Case(kvsim.load_model("falcon-mamba-7b"), BASE, kvsim.parse_method("full"), work)
    with pytest.raises(KvsimError, match="no attention to speed up"):
        codesign(state)


def test_a_workload_of_many_points_is_refused():
    with pytest.raises(KvsimError, match="one batch and one length"):
        codesign(kvsim.Case(MODEL, BASE, kvsim.parse_method("full"), kvsim.Workload([1, 2], 10, 0)))


def run(capsys, *args):
    with pytest.raises(SystemExit) as left:
        main([*args])
    out = capsys.readouterr()
    return left.value.code, out.out, out.err


QUESTION = ("--model", "llama-3.1-8b", "--device", "h100-sxm", "--prompt", "32k", "--batch", "16")


def test_commands(capsys):
    code, out, _ = run(capsys, "codesign", *QUESTION, "--method", "int(bits=4)", "--json")
    found = json.loads(out)
    assert (code, found["attention_term"], found["best"]) == (0, "conversion", "near_memory")
    code, out, _ = run(capsys, "codesign", *QUESTION, "--method", "int(bits=4)")
    assert code == 0
    assert "removes the bottleneck" in out
    code, _, err = run(capsys, "predict", *QUESTION, "--method", "int4", "--what-if", "decompres=4TB/s")
    assert (code, err.count("\n")) == (2, 1)
    assert "did you mean 'decompress'" in err
    _, slow, _ = run(capsys, "predict", *QUESTION, "--method", "int4", "--json")
    _, fast, _ = run(capsys, "predict", *QUESTION, "--method", "int4", "--json", "--what-if", "decompress=20TB/s")
    assert json.loads(fast)["decode"]["seconds"] < 0.6 * json.loads(slow)["decode"]["seconds"]
    assert json.loads(fast)["cache_bytes"] == json.loads(slow)["cache_bytes"]
