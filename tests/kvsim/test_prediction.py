"""Records: bytes by hand, phases that add up, limits that hold, arrays that equal numbers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import KvsimError
from kvsim.plan import break_even, recompute
from kvsim.prediction import CHUNK_TOKENS, phase_ops
from kvsim.weights import weights_bytes

LLAMA = kvsim.load_model("llama-3.1-8b")
H100 = kvsim.load_device("h100-sxm")
CARD = kvsim.load_device("rtx-4090")


def ask(text="full", batch=1, prompt=4096, new=0, model=LLAMA, device=H100, **more):
    return kvsim.predict(
        kvsim.Case(model, device, kvsim.parse_method(text), kvsim.Workload(batch, prompt, new), **more)
    )


def test_llama_by_hand():
    record = ask(batch=2, prompt=4000, new=96)
    # 2 sequences x 4096 tokens x 32 layers x 8 heads x 128 x 2 sides x 2 bytes = 1 GiB
    assert record.cache_bytes == 2**30
    assert record.weights_bytes == 8_030_261_248 * 2
    assert record.total_bytes == record.cache_bytes + record.weights_bytes
    assert record.compression == 1
    assert (record.state_bytes, record.cross_bytes) == (0, 0)


def test_int4_is_4_5_bits():
    assert ask("int(bits=4)").compression == pytest.approx(16 / 4.5)
    # all 32 layers: codes 64 B, scale and min 2 groups x 2 B each, per head and token and side
    assert ask("int(bits=4)", prompt=1000).cache_bytes == 32 * 2 * 8 * 1000 * (64 + 4 + 4)


def test_buffers_add_up_to_the_cache():
    for text in ("full", "kivi-2", "h2o(budget=0.2) | int(bits=4)", "svd(rank=64) | int(bits=4)", "kmeans(bits=4)"):
        record = ask(text, batch=3, prompt=777, new=9)
        assert sum(b.bytes for b in record.buffers) == record.cache_bytes
        assert len({(b.layer, b.name) for b in record.buffers}) == len(record.buffers)
        for b in record.buffers:
            many, heads, rows, width = b.shape
            assert b.bytes == many * heads * rows * -(-width * b.bits // 8)


def test_compress_after_prefill_holds_one_layer_whole():
    # 8192 tokens x 8 heads x 128 x 2 sides x 2 bytes = 32 MiB
    assert dict(ask("int(bits=4)", prompt=8192).memory)["prefill scratch"] == 32 * 2**20
    assert dict(ask("int(bits=4) @ on_write", prompt=8192).memory)["prefill scratch"] == 0
    assert dict(ask("full", prompt=8192).memory)["prefill scratch"] == 0


def test_peak_is_the_higher_of_prefill_and_decode():
    record = ask("int(bits=4)", prompt=8192)
    parts = dict(record.memory)
    assert (
        record.peak_bytes == parts["weights"] + record.allocated_bytes + parts["prefill scratch"] + parts["activations"]
    )
    long = ask("full", prompt=CHUNK_TOKENS, new=100_000)
    assert long.peak_bytes > long.weights_bytes + long.cache_bytes


def test_prefill_attends_the_whole_prompt_whatever_is_kept():
    full, window = ask(prompt=32768), ask("window(sinks=4,recent=1020)", prompt=32768)
    flops = [next(x.flops for x in r.lines if (x.phase, x.name) == ("prefill", "attention")) for r in (full, window)]
    assert flops[0] == flops[1]
    # 2 x 32 heads x (128 + 128) x T (T + 1) / 2 pairs in 32 layers
    assert flops[0] == 32 * 2 * 32 * 256 * 32768 * 32769 / 2


def test_decode_attention_by_hand():
    line = next(x for x in ask(prompt=1000).decode.lines if x.name == "attention")
    # 32 layers: 2 x 32 x (128 + 128) x 1000 products; rows 1000 x 8 x 256 x 2 B, queries and outputs 4 x 32 x 128 B
    assert line.flops == 32 * 2 * 32 * 256 * 1000
    assert line.bytes == 32 * (1000 * 8 * 256 * 2 + 4 * 32 * 128)


def test_page_selection_reads_less_than_it_stores():
    full, pages = ask(prompt=65536), ask("pages(size=16,top=2048)", prompt=65536)
    assert pages.cache_bytes > full.cache_bytes
    read = [next(x.bytes for x in r.decode.lines if x.name == "attention") for r in (full, pages)]
    assert read[1] < read[0] / 8


def test_phases_are_the_sums_of_their_lines():
    record = ask("gear", batch=4, prompt=2000, new=20)
    for phase in (record.prefill, record.decode):
        assert phase.seconds == pytest.approx(sum(line.seconds for line in phase.lines))
        assert phase.low <= phase.seconds <= phase.high
        assert phase.dominant.split(" (")[0] in {line.name for line in phase.lines}
    assert {x.phase for x in record.lines} == {"prefill", "decode"}


def test_generation_is_the_sum_of_its_steps():
    steps = [ask(prompt=1000, new=k).decode.seconds for k in range(1, 11)]
    assert ask(prompt=1000, new=10).generation_seconds == pytest.approx(sum(steps))
    many = [ask(prompt=1000, new=k).decode.seconds for k in range(1, 201)]
    assert ask(prompt=1000, new=200).generation_seconds == pytest.approx(sum(many), rel=1e-3)
    assert ask(prompt=1000).generation_seconds == 0


@pytest.mark.parametrize(
    "text", ["full", "kivi-2", "h2o(budget=0.2)", "window(sinks=4,recent=252)", "svd(rank=64)", "snapkv"]
)
def test_limits_are_the_last_that_fit(text):
    record = ask(text, prompt=8192, device=CARD)
    tokens, batch = record.max_context, record.max_batch
    assert ask(text, prompt=tokens, device=CARD).fits
    if tokens < LLAMA.max_context:
        assert not ask(text, prompt=tokens + 256, device=CARD).fits
    if batch:
        assert ask(text, batch=batch, prompt=8192, device=CARD).fits
        assert not ask(text, batch=batch + 1, prompt=8192, device=CARD).fits


def test_nothing_fits_where_the_weights_do_not():
    record = ask(model=kvsim.load_model("llama-3.1-70b"), device=CARD)
    assert not record.fits
    assert (record.max_context, record.max_batch) == (0, 0)
    assert record.short_by_bytes > 100 * 2**30


def test_devices_share_weights_and_heads():
    one, two, sixteen = (ask(prompt=32768, devices=n) for n in (1, 2, 16))
    assert two.cache_bytes * 2 == one.cache_bytes
    assert one.weights_bytes / 2 < two.weights_bytes < one.weights_bytes * 0.51
    # 8 KV heads over 16 ranks: each holds one
    assert sixteen.cache_bytes * 8 == one.cache_bytes
    assert any(line.name == "all-reduce" for line in two.lines)
    assert not any(line.name == "all-reduce" for line in one.lines)
    assert two.decode.seconds < one.decode.seconds
    with pytest.raises(KvsimError, match="3"):
        ask(devices=3)


def test_weight_formats_decide_what_fits():
    assert ask(weights="int4").weights_bytes < 0.4 * ask().weights_bytes
    # llama-3.1-8b: 6,979,321,856 in the layers' matrices at 8 bits, embeddings and head 2 x 525,336,576 and 266,240
    # of norms at 16
    assert weights_bytes(LLAMA, "fp8") == 6_979_321_856 + 2 * (2 * 525_336_576 + 266_240)
    with pytest.raises(KvsimError, match="did you mean 'q4_k_m'"):
        ask(weights="q4_km")


def test_kv_dtype_changes_full_precision_only():
    assert ask(kv_dtype="fp32").cache_bytes == 2 * ask().cache_bytes
    assert ask("int(bits=4)", kv_dtype="fp32").cache_bytes == ask("int(bits=4)").cache_bytes


def test_measured_rows_replace_estimates():
    method = kvsim.parse_method("lsh_merge")
    case = kvsim.Case(LLAMA, H100, method, kvsim.Workload(1, 1000))
    counted = kvsim.predict(case, rows=[[100] * 8] * 32)
    assert kvsim.predict(case).warnings
    assert next(b for b in counted.buffers if b.name == "k.rows").shape == (1, 8, 100, 128)
    with pytest.raises(KvsimError, match="one entry a layer"):
        kvsim.predict(case, rows=[1])


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("text", ["full", "kivi-2", "h2o", "snapkv", "svd(rank=8)", "hierarchy", "pages", "gear"])
def test_tiny_prompts(text, prompt):
    record = ask(text, prompt=prompt)
    assert record.cache_bytes >= 0
    assert record.decode.seconds > 0
    assert (record.prefill.seconds > 0) == (prompt > 0)


def test_json_is_plain_and_whole():
    found = json.loads(json.dumps(ask("kivi-2", batch=2, prompt=500, new=3).to_json()))
    for name in (
        "cache_bytes",
        "peak_bytes",
        "weights_bytes",
        "total_bytes",
        "allocated_bytes",
        "state_bytes",
        "cross_bytes",
    ):
        assert isinstance(found[name], int)
    assert set(found["prefill"]) == {"seconds", "low", "high", "dominant"}
    assert {"phase", "name", "bytes", "flops", "seconds", "low", "high", "term"} <= set(found["lines"][0])
    assert {"name", "layer", "shape", "bits", "bytes"} == set(found["buffers"][0])
    assert {"name", "bytes"} == set(found["memory"][0])


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(
        ["full", "int(bits=4)", "kivi-2", "h2o(budget=0.3)", "snapkv", "pages", "svd(rank=32) | int(bits=4)"]
    ),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    st.lists(st.integers(1, 64), min_size=1, max_size=3),
)
def test_arrays_equal_numbers(text, prompts, batches):
    work = kvsim.Workload(np.array(batches)[:, None], np.array(prompts)[None, :], 5)
    grid = kvsim.predict(kvsim.Case(LLAMA, H100, kvsim.parse_method(text), work))
    for i, batch in enumerate(batches):
        for j, prompt in enumerate(prompts):
            one = ask(text, batch=batch, prompt=prompt, new=5)
            assert np.broadcast_to(grid.cache_bytes, work.shape)[i, j] == one.cache_bytes
            assert np.broadcast_to(grid.peak_bytes, work.shape)[i, j] == pytest.approx(one.peak_bytes)
            assert np.broadcast_to(grid.decode.seconds, work.shape)[i, j] == pytest.approx(one.decode.seconds)
            assert np.broadcast_to(grid.prefill.seconds, work.shape)[i, j] == pytest.approx(one.prefill.seconds)


def test_context_over_the_model_is_refused():
    with pytest.raises(KvsimError, match="context of 131072"):
        ask(prompt=131073)


@pytest.mark.parametrize(
    "bad", [{"batch": 0}, {"prompt": -1}, {"prompt": 1.5}, {"prompt": float("nan")}, {"batch": 2**60}, {"new": "3"}]
)
def test_sizes_out_of_range_are_refused(bad):
    with pytest.raises(KvsimError):
        ask(**bad)


def test_break_even_is_where_the_method_becomes_faster():
    method = kvsim.parse_method("int(bits=4)")
    tokens = break_even(LLAMA, CARD, method, batch=8)
    assert tokens is not None
    times = [ask(t, batch=8, prompt=tokens, device=CARD).decode.seconds for t in ("int(bits=4)", "full")]
    assert times[0] < times[1]
    slower = max(1, tokens // 2)
    times = [ask(t, batch=8, prompt=slower, device=CARD).decode.seconds for t in ("int(bits=4)", "full")]
    assert times[0] >= times[1]


def test_recomputing_instead_of_caching():
    case = kvsim.Case(LLAMA, H100, kvsim.Method(), kvsim.Workload(1, 8192))
    found = recompute(case)
    assert found["seconds_per_token"] == pytest.approx(ask(prompt=8192).prefill.seconds)
    assert found["bytes_saved"] == 2**30
    assert found["slower_than_cached"] > 10


def test_weights_used_again_are_multiplied_again():
    # Zamba2's attention blocks share two sets of weights; 13 of its 81 layers multiply by one of them all the same:
    # one q_proj in each of the 13
    model = kvsim.load_model("zamba2-7b")
    case = kvsim.Case(model, H100, kvsim.parse_method("full"), kvsim.Workload(1, 512))
    hybrid = sum(1 for layer in model.layers if layer.attention is not None)
    run = [op for op in phase_ops(case, "decode") if op.name == "q_proj"]
    assert hybrid == 13
    assert sum(op.count for op in run) == hybrid


def test_states_are_updated_side_by_side():
    # falcon-mamba-7b: 8192 channels of 16 states in each of 64 layers, every channel a recurrence of its own
    model = kvsim.load_model("falcon-mamba-7b")
    case = kvsim.Case(model, H100, kvsim.parse_method("full"), kvsim.Workload(2, 32768))
    (op,) = (op for op in phase_ops(case, "prefill") if op.name == "state update")
    assert (op.blocks, op.count) == (2 * 8192, 64)
    # so that a long prompt stays a matter of products: 32768 x 2 x 7.27 G flops at 989 TFLOP/s take 0.48 s a sequence
    record = kvsim.predict(case)
    assert 2 * 0.48 < record.prefill.seconds < 2 * 1.0


@pytest.mark.parametrize("device", ["h100-sxm", "h200-sxm", "a100-sxm-80gb", "b200-sxm", "rtx-4090", "mi300x"])
def test_fewer_bits_of_weights_make_a_small_batch_faster(device):
    # at batch 1 a step reads the weights: 4 bits are a quarter of 16 (W4A16 kernels give 1.5 to 3 times in practice)
    bf16, int8, int4 = (
        ask(prompt=128, device=kvsim.load_device(device), weights=w).decode.seconds for w in ("bf16", "int8", "int4")
    )
    assert int4 < int8 < 1.1 * bf16
    assert int4 < bf16 / 1.05
