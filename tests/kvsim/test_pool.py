"""The pool that a device leaves: intervals that hold what public logs printed, and questions that cannot be asked."""

import pytest

from kvsim import KvsimError, ModelSpec, load_device, load_model, memory
from kvsim.engines.parallel import ParallelLayout
from kvsim.engines.pool import Interval, Pool, activation_bytes, device_pool, usable_bytes

GIB = 2**30


@pytest.mark.parametrize(("device", "printed"), [
    # CUDA totals as vLLM printed them: "total_gpu_memory (79.14GiB)", (178.36), (23.58), (31.36), (14.56)
    ("h100-sxm", 79.14), ("b200-sxm", 178.36), ("rtx-3090", 23.58), ("rtx-5090", 31.36),
])  # fmt: skip
def test_what_an_engine_sees(device, printed):
    assert usable_bytes(load_device(device)) / GIB == pytest.approx(printed, rel=0.002)


@pytest.mark.parametrize(("model", "device", "flags", "printed"), [
    # vLLM 0.6: 79.14 * 0.9 less weights 14.99, non-torch 0.12, activations 1.19
    ("llama-3.1-8b", "h100-sxm", {"version": "0.6.6", "max_num_batched_tokens": 2048}, 54.93),
    # issue 10517: the whole prompt is one batch; activations grow with max_model_len
    ("llama-3.1-8b", "rtx-3090", {"version": "0.6", "max_model_len": 20000, "max_num_batched_tokens": 20000}, 3.81),
    ("llama-3.1-8b", "rtx-3090", {"version": "0.6", "max_model_len": 29000, "max_num_batched_tokens": 29000}, 2.89),
    # vllm PR 24577
    ("qwen3-0.6b", "a100-sxm-80gb", {"version": "2025-09", "max_model_len": 4096}, 69.66),
])  # fmt: skip
def test_the_interval_holds_what_was_printed(model, device, flags, printed):
    setup = {"batched_tokens": flags.get("max_num_batched_tokens", 8192), "sequences": 256, "graphs": False}
    pool, = device_pool(load_model(model), device, ParallelLayout(), 0.9, **setup)
    assert pool.left.low < printed * GIB < pool.left.high
    assert pool.left.mid == pytest.approx(printed * GIB, rel=0.05)
    found = memory("vllm", load_model(model), device=device, gpu_memory_utilization=0.9, **flags)
    assert found.blocks == pool.left.mid // (found.kv_bytes // found.blocks)
    assert any(w.startswith("estimated pool") for w in found.warnings)


def test_activation_peak():
    # Qwen2.5 1.5B, 32768 tokens: 2 * 32768 * (4 * 1536 + 3 * 8960) bytes = 2.016 GiB; vLLM 0.7 printed 2.02
    model = ModelSpec.from_numbers(layers=28, n_heads=12, n_kv_heads=2, head_dim=128, hidden_size=1536,
                                   intermediate_size=8960, vocab_size=151936)
    assert activation_bytes(model, ParallelLayout(), 32768, 256).mid == 2 * 32768 * (4 * 1536 + 3 * 8960)
    # few tokens: the sampler's 256 rows of logits at 25 bytes
    assert activation_bytes(model, ParallelLayout(), 512, 256).mid == 256 * 151936 * 25


def test_more_batched_tokens_leave_less():
    model = load_model("llama-3.1-8b")
    pools = [memory("vllm", model, device="h100-sxm", max_num_batched_tokens=n, max_model_len=1024).blocks
             for n in (2048, 16384, 131072)]  # fmt: skip
    assert pools[0] > pools[1] > pools[2]


def test_ranks_and_weight_formats_leave_more():
    model = load_model("llama-3.1-70b")
    assert "would not start" in memory("vllm", model, device="h100-sxm", max_model_len=1024).refused
    two = memory("vllm", model, device="h100-sxm", tensor_parallel_size=2, max_model_len=1024)
    four = memory("vllm", model, device="h100-sxm", tensor_parallel_size=4, max_model_len=1024)
    narrow = memory("vllm", model, device="h100-sxm", tensor_parallel_size=2, max_model_len=1024, weights="fp8")
    assert two.tokens < narrow.tokens < four.tokens


def test_terms_and_interval():
    pool = Pool(100, (("weights", Interval(40, 40, 41)), ("rest", Interval(5, 10, 20))))
    assert pool.left == Interval(39, 50, 55)
    assert str(Interval(GIB, 2 * GIB, 3 * GIB)) == "2.00 GiB (1.00 to 3.00)"


@pytest.mark.parametrize("share", [1.5, 0.0, float("nan")])
def test_impossible_shares(share):
    with pytest.raises(KvsimError, match="must lie in"):
        device_pool(load_model("llama-3.1-8b"), "h100-sxm", ParallelLayout(), share, batched_tokens=1, sequences=1)


def test_questions_without_an_answer():
    bare = ModelSpec.from_numbers(layers=2, n_heads=2, head_dim=8)
    with pytest.raises(KvsimError, match="needs the model's weights"):
        memory("vllm", bare, device="h100-sxm")
    for wrong in ({"device": "h100-sxn"}, {"device": "h100-sxm", "weights": "fp9"}):
        with pytest.raises(KvsimError, match="did you mean"):
            memory("vllm", load_model("llama-3.1-8b"), **wrong)


def test_figures_at_the_ends_of_the_estimate():
    found = memory("vllm", load_model("llama-3.1-8b"), device="h100-sxm", max_model_len=8192)
    low, high = found.tokens_range
    assert low < found.tokens < high
    assert found.pool_bytes - 2 * 2**20 < found.kv_bytes <= found.pool_bytes
    assert found.longest_request == found.blocks * 16
    exact = memory("vllm", load_model("llama-3.1-8b"), pool_bytes=GIB, max_model_len=4096)
    assert (exact.tokens_range, exact.pool_bytes, exact.longest_request) == (None, GIB, 8192)
