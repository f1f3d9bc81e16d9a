"""TensorRT-LLM's pool: figures of public logs to the last byte, blocks rounded up, refusals."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import KvsimError, ModelSpec, load_model, memory

DATA = Path(__file__).parents[1] / "data"
CASES = {c["id"]: c for c in json.loads((DATA / "engine_logs.json").read_text())["cases"]}
MORE = json.loads((DATA / "engine_logs_vllm.json").read_text())["tensorrt-llm"]
GIB = 2**30
LLAMA = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)


def printed(case, name):
    return next(f["printed"] for f in CASES[case]["figures"] if f["name"] == name)


@pytest.mark.parametrize(("case", "tokens", "version"), [
    # bytes / bytes a token (512, 96, 96 and 128 KiB): whole blocks of 128 tokens, as releases before 0.10 had them
    ("trt-01", 132608, "0.8"), ("trt-06", 220800, "0.8.0"), ("trt-07", 219776, "0.8"), ("trt-09", 31616, "0.9"),
])  # fmt: skip
def test_allocated_bytes(case, tokens, version):
    found = memory("tensorrt-llm", ModelSpec.from_numbers(**CASES[case]["arch"]), max_tokens=tokens, version=version)
    assert found.kv_bytes == int(printed(case, "allocated bytes"))
    assert (found.tokens, found.block_tokens) == (tokens, 128)


def test_nine_tenths_of_the_free_memory_rounded_up():
    # 64 KiB a token in fp8, 2 MiB a block of 32: 17.83 GiB +- 0.005 allows 8214 to 8219 blocks; 8219 was printed
    model = ModelSpec.from_numbers(**CASES["trt-04"]["arch"])
    found = [memory("trtllm", model, free_bytes=(17.83 + d) * GIB, kv_cache_dtype="fp8") for d in (-0.005, 0.005)]
    assert [m.blocks for m in found] == [8214, 8219]
    assert found[1].tokens == int(printed("trt-04", "tokens"))
    assert f"{found[1].kv_bytes / GIB:.2f}" == printed("trt-04", "allocated")


def test_blocks_of_64():
    found = memory("tensorrt-llm", ModelSpec.from_numbers(**CASES["trt-05"]["arch"]), max_tokens=220480, version="0.16")
    assert f"{found.kv_bytes / GIB:.2f}" == printed("trt-05", "allocated")
    assert (found.blocks, found.block_tokens) == (3445, 64)


@pytest.mark.parametrize("case", MORE, ids=lambda c: c["id"])
def test_further_logs(case):
    model = ModelSpec.from_numbers(**case["arch"])
    ends = [{}]
    if "free_gib" in case:
        ends = [{"free_bytes": (float(case["free_gib"]) + d) * GIB} for d in (-0.005, 0.005)]
    low, high = (memory("tensorrt-llm", model, **case["flags"], **end) for end in (ends[0], ends[-1]))
    want = case["printed"]
    assert low.tokens <= want["tokens"] <= high.tokens
    exact = memory("tensorrt-llm", model, **case["flags"] | {"max_tokens": want["tokens"]})
    assert f"{exact.kv_bytes / GIB:.2f}" == want["GiB"]
    assert exact.blocks == want.get("blocks", exact.blocks)


@pytest.mark.parametrize(("free", "blocks"), [(10 * 2**22, 9), (10 * 2**22 + 10, 10)])
def test_a_begun_block_counts(free, blocks):
    # 2 * 32 * 8 * 128 * 2 bytes * 32 tokens = 4 MiB a block; 0.9 of ten blocks are nine, a byte more begins the tenth
    assert memory("tensorrt-llm", LLAMA, free_bytes=free).blocks == blocks


def test_the_smaller_limit_holds():
    assert memory("tensorrt-llm", LLAMA, free_bytes=GIB, max_tokens=100).tokens == 128


@pytest.mark.parametrize(("dtype", "k"), [("auto", 256), ("fp8", 128), ("int8", 128), ("nvfp4", 72)])
def test_bytes_of_a_head(dtype, k):
    one = ModelSpec.from_numbers(layers=1, n_heads=1, head_dim=128)
    assert memory("tensorrt-llm", one, max_tokens=1, tokens_per_block=1, kv_cache_dtype=dtype).k_bytes == k


def test_ranks_and_stages():
    # a quarter of the heads; the fullest of three stages holds 11 of 32 layers
    assert memory("tensorrt-llm", LLAMA, max_tokens=32, tp_size=4).kv_bytes == 32 * 32768
    assert memory("tensorrt-llm", LLAMA, max_tokens=32, pp_size=3).kv_bytes == 32 * 11 * 4096


def test_from_a_device():
    found = memory("tensorrt-llm", load_model("llama-3.1-8b"), device="h100-sxm")
    assert 50 * GIB < found.kv_bytes < 60 * GIB
    assert found.warnings[0].startswith("free memory is estimated")


@pytest.mark.parametrize(("flags", "message"), [
    ({}, "needs free_bytes, device or max_tokens"),
    ({"free_bytes": float("inf")}, "free_bytes must be"),
    ({"free_bytes": GIB, "free_gpu_memory_fraction": 1.2}, "free_gpu_memory_fraction must lie in"),
    ({"free_bytes": GIB, "tp_size": 7}, r"\(32\) must be divisible by it"),
    ({"free_bytes": GIB, "kv_cache_dtype": "fp7"}, "no kv_cache_dtype 'fp7' .did you mean 'fp8'"),
    ({"free_bytes": GIB, "tokens_per_block": 0}, "tokens_per_block must lie between 1"),
    ({"free_bytes": GIB, "version": "new"}, "version 'new' is unknown"),
])  # fmt: skip
def test_refusals(flags, message):
    with pytest.raises(KvsimError, match=message):
        memory("tensorrt-llm", LLAMA, **flags)


@given(st.integers(2**23, 2**40), st.sampled_from([1, 32, 64, 128]))
def test_at_most_one_block_over(free, block):
    found = memory("tensorrt-llm", LLAMA, free_bytes=free, tokens_per_block=block)
    assert 0 <= found.kv_bytes - int(free * 0.9) < block * 131072
