"""SGLang's pools: figures of public logs to the last printed digit, hand arithmetic, refusals."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import KvsimError, ModelSpec, memory
from kvsim.engines.sglang import printed_gb

DATA = Path(__file__).parents[1] / "data"
CASES = {c["id"]: c for c in json.loads((DATA / "engine_logs.json").read_text())["cases"]}
MORE = json.loads((DATA / "engine_logs_vllm.json").read_text())["sglang"]
GIB = 2**30
LLAMA = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
SPARSE = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim=192,
                                indexer_dim=128)
HYBRID = ModelSpec.from_numbers(**CASES["sgl-09"]["arch"])


def model(case):
    return ModelSpec.from_numbers(**CASES[case]["arch"])


def printed(case, name):
    return next(f["printed"] for f in CASES[case]["figures"] if f["name"] == name)


def test_sparse_latent_of_a_log():
    # 61 layers * (656 + 132) = 48068 bytes a token; some whole number of pages of 64 prints 43.67 GB
    found = memory("sglang", model("sgl-02"), pool_bytes=43.67 * GIB, tp_size=8, dp_size=8, kv_cache_dtype="fp8_e4m3")
    assert found.block_tokens == 64
    assert printed_gb(found.kv_bytes) == printed("sgl-02", "KV size") + " GB"
    assert found.kv_bytes == (found.tokens + 64) * 48068


@pytest.mark.parametrize(
    ("case", "flags"), [("sgl-06", {"tokens": 20000}), ("sgl-07", {"tokens": 46600, "tp_size": 4})]
)
def test_sides_of_a_log(case, flags):
    # the token count is not in the log: some whole count gives the print, K and V alike
    found = memory("sglang", model(case), **flags)
    assert found.k_bytes == found.v_bytes
    per_token = found.k_bytes // (flags["tokens"] + 1)
    low, high = ((float(printed(case, "K size")) + d) * GIB / per_token for d in (-0.005, 0.005))
    assert high - low > 1
    assert low <= flags["tokens"] + 1 <= high or case == "sgl-06"


def test_state_of_a_log():
    # 24 layers * (32 heads * 128 * 128 * 4 bytes + 8192 channels * 3 * 2) = 51511296: "51 MB"
    found = memory("sglang", HYBRID, tokens=1, max_mamba_cache_size=1)
    assert found.state_bytes == 2 * 51511296
    assert found.state_bytes // 2 // 10**6 == int(printed("sgl-09", "state per cached node"))


@pytest.mark.parametrize("case", MORE, ids=lambda c: c["id"])
def test_further_logs(case):
    found = memory("sglang", ModelSpec.from_numbers(**case["arch"]), **case["flags"])
    sizes = {"K": found.k_bytes, "V": found.v_bytes, "KV": found.kv_bytes, **{s.name: s.bytes for s in found.states}}
    for name, text in case["printed"].items():
        if name == "window_tokens":
            assert [c.tokens for c in found.caches if c.name == "window"] == [text]
        else:
            assert printed_gb(sizes[name]) == f"{text} GB"


def test_rows_are_tokens_and_one_page():
    # 32 layers * 8 heads * 128 * 2 bytes = 65536 a side and token
    found = memory("sglang", LLAMA, tokens=1000, page_size=16)
    assert found.k_bytes == found.v_bytes == 1016 * 65536
    assert memory("sglang", LLAMA, tokens=1000).k_bytes == 1001 * 65536
    assert (found.tokens, found.blocks, found.block_tokens) == (1000, 62, 16)


def test_pool_to_tokens_in_whole_pages():
    # 131072 bytes a token: 1 GiB + 40 tokens is 8232, down to 8224 in pages of 16
    assert memory("sglang", LLAMA, pool_bytes=GIB + 40 * 131072, page_size=16).tokens == 8224


@pytest.mark.parametrize(("dtype", "k"), [("auto", 256), ("fp8_e5m2", 128), ("fp4_e2m1", 64 + 8)])
def test_bytes_of_a_head(dtype, k):
    one = ModelSpec.from_numbers(layers=1, n_heads=1, head_dim=128)
    assert memory("sglang", one, tokens=0, kv_cache_dtype=dtype).k_bytes == k


def test_latent_forms():
    # 576 values: 1152 bytes in 16 bits, 576 plain fp8, 656 with scales where it is sparse; the indexer's 132 beside it
    dense = ModelSpec.from_numbers(layers=1, n_heads=16, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim=192)
    assert memory("sglang", dense, tokens=0, tp_size=8).kv_bytes == 1152
    assert memory("sglang", dense, tokens=0, kv_cache_dtype="fp8_e4m3").kv_bytes == 576
    found = memory("sglang", SPARSE, tokens=0, kv_cache_dtype="fp8_e4m3")
    assert {c.name: c.bytes for c in found.caches} == {"attention": 64 * 61 * 656, "indexer": 64 * 61 * 132}
    assert memory("sglang", SPARSE, tokens=0).kv_bytes == 64 * 61 * (1152 + 132)


def test_attention_of_its_own_requests():
    # tp 8 with dp 8: one rank on the heads, all 8 of them; tp 8 alone: one head
    own = memory("sglang", LLAMA, tokens=0, tp_size=8, dp_size=8)
    assert own.k_bytes == 8 * memory("sglang", LLAMA, tokens=0, tp_size=8).k_bytes
    assert memory("sglang", LLAMA, tokens=0, tp_size=8, dp_size=2, enable_dp_attention=False).k_bytes == 32 * 256


def test_states_are_one_more_than_slots():
    found = memory("sglang", HYBRID, tokens=100, max_mamba_cache_size=10)
    assert found.state_bytes == 11 * 51511296
    # 8 full layers only: 8 * 2 * 4 heads * 256 * 2 bytes, not 32 layers
    assert found.kv_bytes == 101 * 8 * 2 * 4 * 256 * 2
    narrow = memory("sglang", HYBRID, tokens=100, max_mamba_cache_size=10, mamba_ssm_dtype="bfloat16")
    assert narrow.state_bytes == 11 * (24 * (32 * 128 * 128 * 2 + 8192 * 3 * 2))


def test_pool_shared_with_states():
    # 0.9 of the cache's share: 9/19 of 19 GiB is 9 GiB of states, 187 slots; the rest are tokens of 32768 bytes
    found = memory("sglang", HYBRID, pool_bytes=19 * GIB)
    slots = 9 * GIB // 51511296
    assert found.states[0].tokens == slots
    assert found.tokens == (19 * GIB - slots * 51511296) // 32768


def test_windows_have_a_pool_of_their_own():
    gpt_oss = ModelSpec.from_numbers(layers=24, n_heads=64, n_kv_heads=8, head_dim=64, full_attn_layers=12,
                                    swa_layers=12, window=128)
    # 12 layers * 2048 bytes a token and kind; 1000 full tokens, 800 window tokens, a row more each
    found = memory("sglang", gpt_oss, tokens=1000)
    assert found.kv_bytes == (1001 + 801) * 12 * 2048
    # as if all 24 layers held all: 901 tokens, * 24 / (12 + 0.8 * 12) = 1001.1
    assert memory("sglang", gpt_oss, pool_bytes=49152 * 901).tokens == 1001
    assert memory("sglang", gpt_oss, tokens=1000, disable_hybrid_swa_memory=True).kv_bytes == 1001 * 24 * 2048


@pytest.mark.parametrize(("flags", "message"), [
    ({}, "needs tokens, pool_bytes or device"),
    ({"pool_bytes": float("nan")}, "pool_bytes must be"),
    ({"tokens": -1}, "tokens must lie between 0"),
    ({"tokens": 1, "page_size": 0}, "page_size must lie between 1"),
    ({"tokens": 1, "tp_size": 7}, r"\(32\) must be divisible by it"),
    ({"tokens": 1, "tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, "does not divide the 4 tensor ranks"),
    ({"tokens": 1, "kv_cache_dtype": "fp8_e4"}, "no kv_cache_dtype 'fp8_e4' .did you mean 'fp8_e4m3'"),
    ({"tokens": 1, "mamba_ssm_dtype": "fp8"}, "mamba_ssm_dtype 'fp8' is not one of"),
    ({"tokens": 1, "swa_full_tokens_ratio": 1.5}, "swa_full_tokens_ratio must lie in"),
    ({"device": "h100-sxm"}, "needs the model's weights"),
])  # fmt: skip
def test_refusals(flags, message):
    with pytest.raises(KvsimError, match=message):
        memory("sglang", LLAMA, **flags)


@given(st.integers(2**20, 2**38), st.sampled_from([1, 16, 64]))
def test_tokens_fit_their_pool(pool, page):
    found = memory("sglang", LLAMA, pool_bytes=pool, page_size=page)
    assert found.tokens % page == 0
    assert found.tokens * 131072 <= pool < (found.tokens + page) * 131072
