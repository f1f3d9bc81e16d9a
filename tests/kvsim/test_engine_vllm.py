"""vLLM's block rules by hand arithmetic, its refusals, and what public calculators get wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import KvsimError, ModelSpec, load_model, memory
from kvsim.engines.vllm_formats import SPELLINGS, spelled, token_bytes
from kvsim.engines.vllm_versions import release
from kvsim.model import Attention, Layer, Matrix, State

GIB = 2**30
LLAMA = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
DEEPSEEK = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim=192,
                                  indexer_dim=128)
MLA = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim=192)
GPT_OSS = ModelSpec.from_numbers(layers=24, n_heads=64, n_kv_heads=8, head_dim=64, full_attn_layers=12, swa_layers=12,
                                 window=128)


def test_block_bytes_and_tokens():
    # 2 * 8 * 128 * 2 bytes * 16 tokens * 32 layers = 2 MiB a block; 1 GiB holds 512 blocks, 8192 tokens, 2 of 4096
    found = memory("vllm", LLAMA, pool_bytes=GIB, max_model_len=4096)
    assert (found.blocks, found.block_tokens, found.tokens, found.max_concurrency) == (512, 16, 8192, 2.0)
    assert found.kv_bytes == GIB
    assert found.k_bytes == found.v_bytes == GIB // 2
    assert found.state_bytes == 0
    assert found.refused == ""


def test_tokens_are_whole_blocks():
    # one byte less than 512 blocks: 511 blocks
    assert memory("vllm", LLAMA, pool_bytes=GIB - 1, max_model_len=4096).blocks == 511


@pytest.mark.parametrize(("ranks", "per_token"), [(1, 131072), (2, 65536), (8, 16384), (16, 16384), (32, 16384)])
def test_ranks_divide_kv_heads_and_then_replicate(ranks, per_token):
    # 8 heads: a rank holds 8/tp, at least one: 32 layers * 2 * 1 * 128 * 2 = 16384 bytes a token from tp 8 on
    found = memory("vllm", LLAMA, num_gpu_blocks_override=1, tensor_parallel_size=ranks)
    assert found.kv_bytes == 16 * per_token


def test_latent_is_whole_on_every_rank_and_is_not_full_heads():
    # 61 layers * 576 values * 2 bytes = 70272 a token, whatever the ranks; full heads: 128 * (192 + 128) * 2 * 61
    flags = {"num_gpu_blocks_override": 1, "block_size": 64}
    sizes = {memory("vllm", MLA, tensor_parallel_size=n, **flags).kv_bytes for n in (1, 8)}
    assert sizes == {64 * 70272}
    assert 128 * 320 * 2 * 61 / 70272 > 70


def test_sparse_latent_with_its_indexer():
    # fp8: 512 + 4 * 4 scale bytes + 64 * 2 rope = 656, indexer 128 + 4 = 132; 61 * 788 * 64 tokens
    found = memory("vllm", DEEPSEEK, num_gpu_blocks_override=10)
    assert found.kv_bytes == 10 * 64 * 61 * 788
    assert {c.name: c.bytes for c in found.caches} == {"attention": 640 * 61 * 656, "indexer": 640 * 61 * 132}
    wide = memory("vllm", DEEPSEEK, num_gpu_blocks_override=10, kv_cache_dtype="bfloat16")
    assert wide.kv_bytes == 640 * 61 * (1152 + 132)


@pytest.mark.parametrize(("dtype", "k", "v"), [
    ("auto", 256, 256), ("fp8", 128, 128), ("float32", 512, 512),
    ("nvfp4", 64 + 8, 64 + 8),  # half a byte and one scale a 16 values: 0.5625, not 0.5
    ("int8_per_token_head", 132, 132),  # one fp32 scale
    ("int4_per_token_head", 68, 68),
    ("turboquant_k8v4", 128, 68),  # fp8 keys; 64 bytes of codes, fp16 scale and zero
    ("turboquant_4bit_nc", 66, 68),  # 64 + fp16 norm
    ("turboquant_k3v4_nc", 50, 68),  # 48 + 2
    ("turboquant_3bit_nc", 50, 52),
])  # fmt: skip
def test_bytes_of_a_token_and_head(dtype, k, v):
    one = token_bytes(Attention("full", 8, 1, 128, 128), 1, spelled(dtype), 2)
    assert (one.k, one.v) == (k, v)


def test_turboquant_slot_is_even_and_spares_the_ends():
    # head_dim 5: keys ceil(20/8) + 2 = 5, values ceil(20/8) + 4 = 7: 12, even already; 3 bits: 2+2, 2+4 = 10
    odd = token_bytes(Attention("full", 1, 1, 6, 6), 1, "turboquant_k8v4", 2)
    assert odd.attention == 6 + 3 + 4 + 1
    # 4 of 32 layers stay in 16 bits: 28 * 8 * 134 + 4 * 8 * 512 bytes a token
    found = memory("vllm", LLAMA, num_gpu_blocks_override=1, kv_cache_dtype="turboquant_4bit_nc")
    assert found.kv_bytes == 16 * (28 * 8 * 134 + 4 * 8 * 512)


def test_windows_are_groups_with_blocks_of_their_own():
    # 12 full + 12 sliding: 2 groups of 12; a block id costs 12 * 16 * 2 * 8 * 64 * 2 = 393216 bytes.
    # full: 8192/16 = 512; sliding: ceil(min(127 + 2048, 8192) / 16) + 1 = 137; 649 blocks a request
    found = memory("vllm", GPT_OSS, max_model_len=8192, max_num_batched_tokens=2048)
    assert found.blocks == 649
    assert found.kv_bytes == 649 * 393216
    # charged on all layers it would be 2 * 512 blocks
    full = memory("vllm", GPT_OSS, max_model_len=8192, disable_hybrid_kv_cache_manager=True)
    assert full.kv_bytes == 512 * 2 * 393216


def test_newer_releases_reserve_two_batches_beside_a_window():
    # 0.26: ceil(min(127 + 4096, 8192) / 16) + 1 = 265 instead of 137
    flags = {"max_model_len": 8192, "max_num_batched_tokens": 2048}
    assert memory("vllm", GPT_OSS, version="0.26.0", **flags).blocks == 512 + 265
    assert any("from 0.26" in w for w in memory("vllm", GPT_OSS, **flags).warnings)


@pytest.mark.parametrize(("version", "tokens"), [("0.20", 1000 // 2 * 16), ("0.21", int(1000 / 649 * 8192))])
def test_what_the_token_print_means_by_release(version, tokens):
    found = memory("vllm", GPT_OSS, max_model_len=8192, max_num_batched_tokens=2048, num_gpu_blocks_override=1000,
                   version=version)
    assert found.tokens == tokens


def test_the_same_server_printed_ten_times_the_tokens_one_release_later():
    # vllm#43308: Gemma 4 31B, about 50 GiB: 55 thousand tokens in 0.20.0; 6 groups of 10 layers * 262144 bytes a block:
    # 20480 blocks // 6 * 16 = 54608; 0.21.0 printed about 525 thousand for the same pool
    gemma = ModelSpec.from_numbers(layers=60, n_heads=32, full_attn_layers=10, swa_layers=50, kv_heads_full=4,
                                   head_dim_full=512, kv_heads_swa=16, head_dim_swa=256, window=1024)
    flags = {"pool_bytes": 50 * GIB, "max_model_len": 262144, "max_num_batched_tokens": 8192}
    assert memory("vllm", gemma, version="0.20.0", **flags).tokens == 54608
    assert memory("vllm", gemma, version="0.21.0", **flags).tokens == pytest.approx(525_000, rel=0.1)


def test_tokens_shared_out_over_ranks():
    # each of 4 ranks keeps a quarter of a sequence's tokens: ceil(4096 / 4 / 16) = 64 blocks a request of 4096
    found = memory("vllm", LLAMA, num_gpu_blocks_override=128, max_model_len=4096, tensor_parallel_size=4,
                   decode_context_parallel_size=4, version="0.19")
    assert (found.max_concurrency, found.tokens) == (2.0, 128 * 16 * 4)


def test_group_sizes_follow_the_release():
    # 13 full + 12 sliding (a drafting layer more): groups of 13 from 0.11 on (13 < 12 * 1.25), of 12 before
    mixed = ModelSpec.from_numbers(layers=25, n_kv_heads=8, head_dim=64, full_attn_layers=13, swa_layers=12, window=128)
    page = 16 * 2 * 8 * 64 * 2
    assert memory("vllm", mixed, num_gpu_blocks_override=1, version="0.11").kv_bytes == 13 * page
    assert memory("vllm", mixed, num_gpu_blocks_override=1, version="0.10").kv_bytes == 12 * page


def test_pages_of_unlike_layers_become_equal():
    # per rank: full 2 * 2 * 512 * 2 = 4096 bytes a token, sliding 2 * 8 * 256 * 2 = 8192: 32 or 16 tokens in 131072
    gemma = ModelSpec.from_numbers(layers=60, full_attn_layers=10, swa_layers=50, kv_heads_full=4, head_dim_full=512,
                                   kv_heads_swa=16, head_dim_swa=256, window=1024)
    found = memory("vllm", gemma, num_gpu_blocks_override=1, tensor_parallel_size=2)
    assert found.kv_bytes == 10 * 131072
    # a request of 1600 tokens: 50 blocks of 32; 5 groups of ceil(1600 / 16) + 1 = 101
    need = memory("vllm", gemma, max_model_len=1600, tensor_parallel_size=2, max_num_batched_tokens=8192)
    assert need.blocks == 50 + 5 * 101


def test_pages_that_do_not_divide():
    odd = ModelSpec.from_numbers(layers=4, full_attn_layers=2, swa_layers=2, kv_heads_full=3, head_dim_full=64,
                                 kv_heads_swa=2, head_dim_swa=64, window=64)
    with pytest.raises(KvsimError, match=r"one page size: .* do not divide .*; a newer version pads them"):
        memory("vllm", odd, num_gpu_blocks_override=1, version="0.19")
    assert memory("vllm", odd, num_gpu_blocks_override=1, version="0.20").kv_bytes == 2 * 16 * 2 * 3 * 64 * 2


NEMOTRON = ModelSpec.from_numbers(layers=56, attn_layers=4, mamba_layers=27, n_kv_heads=8, head_dim=128,
                                  mamba_heads=128, mamba_head_dim=80, ssm_d_state=128, ssm_n_group=8, ssm_d_conv=4)


def test_prefix_caching_charges_two_states_a_group():
    # 27 states in 7 groups of 4 beside the attention's one; blocks of 672 tokens: ceil(6720 / 672) + 7 or + 14
    assert memory("vllm", NEMOTRON, max_model_len=6720).blocks == 10 + 7
    assert memory("vllm", NEMOTRON, max_model_len=6720, enable_prefix_caching=True).blocks == 10 + 14
    assert memory("vllm", NEMOTRON, max_model_len=6720, mamba_cache_mode="align").blocks == 10 + 14
    # mode all: blocks of 768 (a multiple of the chunk of 256), a state kept for each: ceil(6720 / 768) * 8
    assert memory("vllm", NEMOTRON, max_model_len=6720, mamba_cache_mode="all").blocks == 9 * 8


def test_eight_bit_keys_double_the_block_and_not_the_state():
    flags = {"num_gpu_blocks_override": 1, "max_model_len": 4096}
    assert memory("vllm", NEMOTRON, **flags).block_tokens == 672
    assert memory("vllm", NEMOTRON, kv_cache_dtype="fp8", **flags).block_tokens == 1328  # ceil16(2695168 / 2048)


def test_states_only():
    # conv 3 columns * (16 + 2 * 4) channels, recurrent 4 * 4 * 4 values, 2 bytes: 272 a layer; a request is one block
    pure = ModelSpec.from_numbers(layers=2, linear_layers=2, full_attn_layers=0, mamba_heads=4, mamba_head_dim=4,
                                  ssm_d_state=4, ssm_n_group=1, ssm_d_conv=4)
    found = memory("vllm", pure, pool_bytes=544 * 7, max_model_len=1000)
    assert (found.blocks, found.kv_bytes, found.state_bytes, found.max_concurrency) == (7, 0, 7 * 544, 7.0)


def test_pipeline_stages_the_fullest_decides():
    # 30 layers over 4 stages: 7, 8, 8, 7; a block of the fullest is 8 * 16 * 2 * 1 * 64 * 2 bytes
    model = ModelSpec.from_numbers(layers=30, n_heads=4, n_kv_heads=1, head_dim=64)
    found = memory("vllm", model, pool_bytes=100 * 8 * 4096 + 4095, pipeline_parallel_size=4, max_model_len=16)
    assert (found.blocks, found.kv_bytes) == (100, 100 * 8 * 4096)


def test_a_pool_too_small_is_told_with_the_longest_that_fits():
    found = memory("vllm", LLAMA, pool_bytes=GIB, max_model_len=16384)
    assert "2.00 GiB KV cache is needed, larger than the available 1.00 GiB" in found.refused
    assert "estimated maximum model length is 8192" in found.refused
    assert found.refused in found.warnings
    assert memory("vllm", LLAMA, pool_bytes=1000, max_model_len=16).refused.endswith("smaller weights")


@pytest.mark.parametrize(("flags", "message"), [
    ({"pool_bytes": float("nan")}, "pool_bytes must be"),
    ({"pool_bytes": -1}, "pool_bytes must be a positive number of bytes"),
    ({"pool_bytes": GIB, "tensor_parallel_size": 7}, r"heads \(32\) must be divisible by it; use one of 1, 2"),
    ({"pool_bytes": GIB, "tensor_parallel_size": 0}, "tensor parallel size must lie between 1"),
    ({"pool_bytes": GIB, "pipeline_parallel_size": 33}, "pipeline parallel size 33 is more than the model's 32 layers"),
    ({"pool_bytes": GIB, "kv_cache_dtype": "fp9"}, r"no kv_cache_dtype 'fp9' \(did you mean 'fp8'"),
    ({"pool_bytes": GIB, "kv_cache_dtype": "fp8_ds_mla"}, "a layout of DeepSeek's sparse latent attention"),
    ({"pool_bytes": GIB, "mamba_cache_mode": "aligned"}, "did you mean 'align'"),
    ({"pool_bytes": GIB, "mamba_cache_mode": "align", "enable_prefix_caching": False}, "needs prefix caching"),
    ({"pool_bytes": GIB, "platform": "gpu"}, "platform 'gpu' is not one of cuda"),
    ({"pool_bytes": GIB, "version": "latest"}, "version 'latest' is unknown"),
    ({"pool_bytes": GIB, "version": "2023-01"}, "no release by 2023-01"),
    ({"pool_bytes": GIB, "version": "0.12 V0"}, "removed in 0.11"),
    ({"pool_bytes": GIB, "version": "0.6", "kv_cache_dtype": "nvfp4"}, "vLLM V0 has no kv_cache_dtype nvfp4"),
    ({"pool_bytes": GIB, "tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "must divide"),
    ({"pool_bytes": GIB, "max_model_len": 0}, "max_model_len must lie between 1"),
    ({"pool_bytes": GIB, "swap_space_gib": -1.0, "version": "0.6"}, "swap_space_gib must be"),
    ({"gpu_memory_utilization": 0.9}, "needs device"),
    ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must lie in \(0, 1\], got 1.5"),
    ({}, "needs pool_bytes, device, num_gpu_blocks_override or max_model_len"),
    ({"pool_byte": GIB}, r"no flag 'pool_byte' \(did you mean 'pool_bytes'"),
])  # fmt: skip
def test_refusals(flags, message):
    with pytest.raises(KvsimError, match=message):
        memory("vllm", LLAMA, **flags)


@pytest.mark.parametrize(("model", "flags", "message"), [
    (MLA, {"kv_cache_dtype": "nvfp4"}, r"no vLLM backend stores latent attention \(MLA\) as nvfp4: use auto"),
    (DEEPSEEK, {"kv_cache_dtype": "fp8_e5m2"}, "stores sparse latent attention"),
    (ModelSpec.from_numbers(layers=1, n_heads=1, head_dim=72), {"kv_cache_dtype": "nvfp4"}, "divisible by 16"),
    (ModelSpec.from_numbers(layers=1, n_heads=1, head_dim=72), {"version": "0.5"}, "head size 72 is not supported"),
    (GPT_OSS, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "does not support sliding windows"),
    (ModelSpec.from_numbers(layers=2, n_heads=12, n_kv_heads=6, head_dim=64), {"tensor_parallel_size": 4},
     "6 KV heads can be neither divided over nor replicated on 4"),
])  # fmt: skip
def test_refusals_of_a_model(model, flags, message):
    with pytest.raises(KvsimError, match=message):
        memory("vllm", model, num_gpu_blocks_override=1, **flags)


@pytest.mark.parametrize(("text", "number", "v0"), [
    ("0.6.x V0", (0, 6, 0), True), ("v0.11.2", (0, 11, 2), False), ("V1 2025-07", (0, 10, 0), False),
    ("2025-09", (0, 10, 0), False), ("V0 2025-08 (Unsloth)", (0, 10, 0), True), ("2026", (0, 21, 0), False),
    ("0.8.5", (0, 8, 5), False), (None, (0, 25, 0), False),
])  # fmt: skip
def test_versions(text, number, v0):
    assert (release(text).number, release(text).v0) == (number, v0)


def test_defaults_that_changed():
    assert (release("0.20").utilization, release("0.21").utilization) == (0.9, 0.92)
    assert (release("0.20").counts_graphs, release("0.21").counts_graphs) == (False, True)
    assert release("0.27").batches(4) == 4


@settings(max_examples=60, deadline=None)
@given(pool=st.integers(2**20, 2**40), length=st.integers(1, 2**20),
       dtype=st.sampled_from(sorted(set(SPELLINGS.values()) - {"fp8_ds_mla"})))
def test_never_more_than_the_pool_and_monotone(pool, length, dtype):
    found = memory("vllm", LLAMA, pool_bytes=pool, max_model_len=length, kv_cache_dtype=dtype)
    more = memory("vllm", LLAMA, pool_bytes=2 * pool, max_model_len=length, kv_cache_dtype=dtype)
    assert found.kv_bytes <= pool < found.kv_bytes + found.kv_bytes // max(1, found.blocks) + 2**22
    assert more.blocks >= 2 * found.blocks
    assert (found.max_concurrency >= 1) == (not found.refused)


@pytest.mark.parametrize(("architecture", "routed", "block"), [
    # Nemotron 3 names float32 in its config, Nemotron Nano v2 nothing. Attention 2 * 1 * 64 * 2 = 256 bytes a token;
    # a state of 64 * 64 values of 4 or 2 bytes is 16384 / 256 = 64 or 8192 / 256 = 32 tokens of it
    ("nemotron_h", True, 64), ("nemotron_h", False, 32), ("qwen3_5_moe", False, 64), ("qwen3_next", True, 32),
])  # fmt: skip
def test_the_states_dtype_is_the_configs(architecture, routed, block):
    model = ModelSpec(
        "m", architecture, hidden_size=64, vocab_size=64, max_context=4096,
        layers=(Layer(attention=Attention("full", 1, 1, 64, 64), matrices=(Matrix("experts.up", 1, 1, routed=routed),)),
                Layer(states=(State("recurrent", (1, 64, 64), 32),))))  # fmt: skip
    found = memory("vllm", model, num_gpu_blocks_override=1)
    assert found.block_tokens == block
    assert any("recurrent state taken at" in w for w in found.warnings)
    assert memory("vllm", model, num_gpu_blocks_override=1, mamba_ssm_cache_dtype="float32").block_tokens == 64


def test_blocks_that_no_backend_has():
    with pytest.raises(KvsimError, match="block_size 15 is no block"):
        memory("vllm", LLAMA, pool_bytes=GIB, block_size=15)
    for block in (1, 8, 16, 544, 1600):
        assert memory("vllm", LLAMA, pool_bytes=GIB, block_size=block).block_tokens == block


@pytest.mark.parametrize(
    ("engine", "flags"),
    [("vllm", {"max_model_len": 8192}), ("sglang", {}), ("tensorrt-llm", {})],
)
def test_weights_beyond_the_device_are_an_answer(engine, flags):
    found = memory(engine, load_model("llama-3.1-70b"), device="h100-sxm", **flags)
    assert found.refused
    assert found.refused in found.warnings
    assert (found.tokens, found.pool_bytes) == (0, 0)


def test_sizes_and_switches_as_servers_write_them():
    found = memory("vllm", LLAMA, pool_bytes="10.12 GiB", max_model_len="8k")
    assert found == memory("vllm", LLAMA, pool_bytes=10.12 * GIB, max_model_len=8192)
    assert memory("vllm", LLAMA, pool_bytes="20GB").pool_bytes == 20 * 10**9
    with pytest.raises(KvsimError, match="pool_bytes must be a number, got '10 XiB'"):
        memory("vllm", LLAMA, pool_bytes="10 XiB")
    flags = {"no-enable-prefix-caching": True, "pool_bytes": GIB}
    assert memory("vllm", LLAMA, **flags) == memory("vllm", LLAMA, pool_bytes=GIB, enable_prefix_caching=False)
    for name, value in (("no-max-model-len", True), ("no-enable-prefix-caching", "perhaps"), ("no-prefix", True)):
        with pytest.raises(KvsimError, match="vllm has no flag"):
            memory("vllm", LLAMA, pool_bytes=GIB, **{name: value})
