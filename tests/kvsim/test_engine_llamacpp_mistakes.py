"""Where public calculators of llama.cpp memory go wrong, with the right value beside the usual wrong one."""

from dataclasses import replace

import pytest

from kvsim import ModelSpec, memory

GIB = 2**30
LLAMA_70B = ModelSpec.from_numbers(layers=80, n_heads=64, n_kv_heads=8, head_dim=128, hidden_size=8192)
HYBRID = ModelSpec.from_numbers(layers=64, kv_heads=4, head_dim=256, full_attn_layers=16, linear_layers=48,
                                ssm_d_inner=6144, ssm_d_state=128, ssm_n_group=16, ssm_d_conv=4)
GPT_OSS = ModelSpec.from_numbers(layers=24, full_attn_layers=12, swa_layers=12, kv_heads=8, head_dim=64, window=128)
DEEPSEEK = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim_k=192,
                                  head_dim_v=128)


def kv(model, **flags):
    return memory("llama.cpp", model, **flags).kv_bytes


def test_query_heads_are_not_stored():
    # 80 layers * 2 * 8 * 128 * 2 bytes = 320 KiB a token, not 2.5 MiB
    assert kv(LLAMA_70B, n_ctx=32768) == 10 * GIB
    assert 8 * 10 * GIB == 80 * 2 * 64 * 128 * 2 * 32768


def test_hidden_size_is_not_the_width():
    # one KV head of 128 beside a hidden size of 3584: 28 times less
    narrow = ModelSpec.from_numbers(layers=28, n_heads=28, n_kv_heads=1, head_dim=128, hidden_size=3584)
    assert kv(narrow, n_ctx=4096) == 28 * 2 * 128 * 2 * 4096
    assert 28 * kv(narrow, n_ctx=4096) == 28 * 2 * 3584 * 2 * 4096


def test_hybrids_store_rows_in_their_attention_layers_only():
    assert kv(HYBRID, n_ctx=8192) == 16 * 2 * 1024 * 2 * 8192  # 512 MiB; on all 64 layers it would be 2 GiB


def test_sliding_layers_are_neither_dropped_nor_full():
    full, swa = memory("llama.cpp", GPT_OSS, n_ctx=131072).caches
    assert full.bytes == 12 * 2 * 512 * 2 * 131072  # 3 GiB
    assert swa.bytes == 12 * 2 * 512 * 2 * 768  # 128 + 512 -> 768 cells: 18 MiB, neither 0 nor 3 GiB


def test_latent_attention_is_one_row():
    # 576 values a layer and token; as full heads 128 * (192 + 128) = 40960, 71 times more
    assert kv(DEEPSEEK, n_ctx=4096) == 61 * 576 * 2 * 4096
    assert kv(DEEPSEEK, n_ctx=4096, mla=False) * 576 == kv(DEEPSEEK, n_ctx=4096) * 40960


@pytest.mark.parametrize(("kind", "eighths"), [("q8_0", 8.5), ("q4_0", 4.5), ("q5_1", 6.0)])
def test_scales_are_part_of_a_block(kind, eighths):
    # bits a value: 8.5, 4.5, 6.0; neither 8, 4, 5 nor 34, 18, 24 bytes a value
    assert kv(LLAMA_70B, n_ctx=4096, type_k=kind, type_v=kind) == 80 * 2 * 1024 * 4096 * eighths / 8


def test_heads_may_differ_by_layer():
    heads = [8, 8, 0, 4] * 8
    uneven = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=heads, head_dim=128)
    assert kv(uneven, n_ctx=4096) == sum(heads) * 2 * 128 * 2 * 4096


def test_mib_are_binary():
    # 4096 MiB in the log is 4294967296 bytes, which a decimal reading takes for 4.29 GB
    llama = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
    assert kv(llama, n_ctx=32768) == 4096 * 2**20


def test_weights_do_not_decide_the_cache_type():
    assert kv(replace(LLAMA_70B, dtype="fp8"), n_ctx=4096) == kv(LLAMA_70B, n_ctx=4096)


def test_a_slot_has_its_share_of_the_context():
    # -c 8192 -np 4 is 8192 cells in all, not 4 x 8192
    assert kv(LLAMA_70B, n_ctx=8192, n_parallel=4) == kv(LLAMA_70B, n_ctx=8192)
