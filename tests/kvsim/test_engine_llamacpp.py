"""llama.cpp's rules one by one, each with its arithmetic in a comment; and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import ModelSpec, memory
from kvsim.engines import flag_names
from kvsim.engines.llamacpp_layers import devices
from kvsim.engines.llamacpp_version import rules, when
from kvsim.errors import KvsimError

MIB = 2**20
LLAMA = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128, max_context=8192)
GEMMA3 = ModelSpec.from_numbers(layers=34, n_heads=8, n_kv_heads=4, head_dim=256, window=1024, window_pattern=6)
HYBRID = ModelSpec.from_numbers(layers=32, kv_heads=4, head_dim=256, full_attn_layers=8, linear_layers=24,
                                ssm_d_inner=4096, ssm_d_state=128, ssm_n_group=16, ssm_d_conv=4)


def llama(model=LLAMA, **flags):
    return memory("llama.cpp", model, **flags)


@pytest.mark.parametrize(
    ("kind", "bytes_of_32"),
    [("f32", 128), ("f16", 64), ("bf16", 64), ("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18),
     ("iq4_nl", 18)],
)
def test_block_formats(kind, bytes_of_32):
    # 32 layers * 1024 values = 32 * 32 blocks a cell and side
    found = llama(n_ctx=256, type_k=kind, type_v="f16")
    assert found.k_bytes == 256 * 32 * 32 * bytes_of_32
    assert found.v_bytes == 256 * 32 * 1024 * 2


def test_context_is_padded_and_split_over_streams():
    assert llama(n_ctx=1000).tokens == 1024
    assert llama(n_ctx=1024, n_parallel=3).tokens == 3 * 512  # 341 a slot, padded to 512
    assert llama(n_ctx=1024, n_parallel=3, kv_unified=True).tokens == 1024
    assert llama(n_ctx=8192, n_parallel=4).caches[0].tokens == 2048


def test_automatic_slots_are_four_and_unified():
    # window 1024 * 4 slots + 512 = 4608 cells; alone 1536
    assert [c.tokens for c in llama(GEMMA3, n_ctx=32768, n_parallel=-1).caches] == [32768, 4608]
    assert [c.tokens for c in llama(GEMMA3, n_ctx=32768).caches] == [32768, 1536]
    assert [c.tokens for c in llama(GEMMA3, n_ctx=32768, np=4).caches] == [8192, 1536]


def test_sliding_layers_by_pattern():
    # 34 layers, every 6th global: 5 global and 29 sliding; 4 * 256 values a side
    full, swa = llama(GEMMA3, n_ctx=32768).caches
    assert (full.layers, swa.layers) == (5, 29)
    assert full.bytes == 5 * 32768 * 2048 * 2
    assert swa.bytes == 29 * 1536 * 2048 * 2
    assert llama(GEMMA3, n_ctx=32768, swa_full=True).caches[1].tokens == 32768


def test_padding_of_the_window_comes_last():
    # 1024 + 100 = 1124 -> 1280; capped by the context first: min(1024, 1124) = 1024
    assert llama(GEMMA3, n_ctx=4096, n_ubatch=100).caches[1].tokens == 1280
    assert llama(GEMMA3, n_ctx=1024, n_ubatch=100).caches[1].tokens == 1024


def test_micro_batch_is_capped_where_the_batch_is_given():
    assert llama(GEMMA3, n_ctx=32768, ub=4096, b=4096).caches[1].tokens == 5120
    assert llama(GEMMA3, n_ctx=32768, ub=4096, b=2048).caches[1].tokens == 3072
    assert any("-b 4096" in w for w in llama(GEMMA3, n_ctx=32768, ub=4096).warnings)


def test_older_builds():
    assert len(llama(GEMMA3, n_ctx=8192, version="2025-04").caches) == 1  # one cache, full context everywhere
    # b5427: window + n_batch (2048) -> 3072 cells
    assert llama(GEMMA3, n_ctx=8192, version="b5430").caches[1].tokens == 3072
    assert llama(n_ctx=1000, version="2025-06").tokens == 1024  # 32 without flash attention
    assert llama(n_ctx=1030, version="2025-06").tokens == 1056
    assert llama(n_ctx=1030, version="2025-06", fa="on").tokens == 1280
    assert llama(n_ctx=8192, n_parallel=4, version="2025-06").caches[0].tokens == 8192


def test_latent_attention():
    spec = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim_k=192,
                                  head_dim_v=128)
    now = llama(spec, n_ctx=4096)
    assert (now.k_bytes, now.v_bytes) == (61 * 4096 * 576 * 2, 0)
    assert llama(spec, n_ctx=4096, version="2025-10").v_bytes == 61 * 4096 * 512 * 2  # V kept beside K then
    legacy = llama(spec, n_ctx=4096, mla=False)
    assert (legacy.k_bytes, legacy.v_bytes) == (61 * 4096 * 128 * 192 * 2, 61 * 4096 * 128 * 128 * 2)
    # K only, so a quantized V type asks nothing
    assert llama(spec, n_ctx=4096, ctv="q4_0", fa="off").kv_bytes == now.kv_bytes


def test_recurrent_state_per_slot_and_snapshot():
    # R: 24 * 3 * (4096 + 2*16*128) * 4 = 2.25 MiB; S: 24 * 128 * 4096 * 4 = 48 MiB
    assert llama(HYBRID, n_ctx=4096).state_bytes == 2359296 + 50331648
    assert llama(HYBRID, n_ctx=4096, n_parallel=2, kv_unified=True).state_bytes == 2 * 52690944
    assert llama(HYBRID, n_ctx=4096, n_parallel=2, n_rs_seq=3).state_bytes == 8 * 52690944
    assert llama(HYBRID, n_ctx=4096).caches[0].layers == 8


def test_draft_layer_has_its_own_cache():
    found = llama(HYBRID, n_ctx=4096, type_k="q8_0", type_v="q8_0", mtp=True)
    assert found.caches[-1].name == "mtp"
    assert found.caches[-1].bytes == 4096 * 2 * 1024 * 2  # one layer, f16 whatever the main types are


def test_deepseek_v4_streams_and_compressed_rows():
    from kvsim.model import Attention, Layer

    csa = Attention("csa", 64, 1, 512, 0, window=128, compress=4, compressed_dim=512, index_dim=128)
    hca = Attention("hca", 64, 1, 512, 0, window=128, compress=128, compressed_dim=512)
    spec = ModelSpec("v4", "deepseek_v4", (Layer(csa), Layer(hca)), 4096, 1000)
    found = {c.name: c for c in llama(spec, n_ctx=65536).caches}
    assert found["SWA"].bytes == 2 * 768 * 512 * 2  # 128 + 512 = 640 -> 768 cells, K only
    assert (found["csa 1/4"].tokens, found["csa 1/4"].bytes) == (16384, 16384 * 1024)
    assert (found["hca 1/128"].tokens, found["hca 1/128"].bytes) == (512, 512 * 1024)
    assert found["indexer 1/4"].bytes == 16384 * 128 * 2
    # f32 values and scores: csa 8 x 1024, hca 128 x 512, indexer 8 x 256
    assert llama(spec, n_ctx=65536).state_bytes == 2 * 4 * (8 * 1024 + 128 * 512 + 8 * 256)
    # a stream a slot even when unified
    assert {c.name: c for c in llama(spec, n_ctx=65536, np=2, kvu=True).caches}["SWA"].bytes == 2 * found["SWA"].bytes


def test_values_are_padded_without_flash_attention():
    spec = ModelSpec.from_numbers(layers=6, swa_layers=5, full_attn_layers=1, kv_heads_full=1, head_dim_full=512,
                                  kv_heads_swa=8, head_dim_swa=256, window=1024)
    on, off = llama(spec, n_ctx=8192).caches[0], llama(spec, n_ctx=8192, fa="off").caches[0]
    assert (on.v_bytes, off.v_bytes) == (8192 * 512 * 2, 8192 * 2048 * 2)
    assert on.k_bytes == off.k_bytes


def test_layers_per_device():
    # 33 places (the output is one): -ngl 15 leaves 18 layers on the CPU
    assert devices(32, 15, None, True) == ("CPU",) * 18 + ("GPU0",) * 14
    assert devices(32, 15, None, False) == ("CPU",) * 17 + ("GPU0",) * 15  # until 2025-12 the output came last
    assert devices(32, None, (1, 1), True).count("GPU0") == 17  # il/33 < 0.5 for il = 0..16
    assert devices(32, None, None, True) is None
    split = llama(n_ctx=8192, n_gpu_layers=15)
    assert sum(c.bytes for c in split.caches) == split.kv_bytes == llama(n_ctx=8192).kv_bytes
    assert {c.device for c in llama(n_ctx=8192, ngl=99, nkvo=True).caches} == {"CPU"}


def test_dates_and_builds():
    assert str(when("2025-02")) == "2025-02-28"
    assert str(when("2025")) == "2025-12-31"
    assert when("b7343") == when("7343") == when("build 7343")
    assert when("b99999") == when(None)
    assert rules("2026-04-01").swa_f16
    assert not rules("2026-04-02").swa_f16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"type_k": "q8"}, "did you mean 'q8_0'"),
        ({"type_v": "q4_0", "flash_attn": "off"}, "needs flash attention"),
        ({"type_v": "q4_0", "version": "2025-01"}, "needs flash attention"),
        ({"n_ctxx": 1}, "did you mean 'n_ctx'"),
        ({"n_ctx": "many"}, "whole number"),
        ({"n_ctx": -1}, "n_ctx"),
        ({"n_parallel": 300}, "n_parallel"),
        ({"flash_attn": "maybe"}, "on, off or auto"),
        ({"version": "spring"}, "neither a llama.cpp build"),
        ({"version": "2025-13"}, "not a date"),
        ({"tensor_split": "0,0"}, "tensor_split"),
        ({"c": 4, "n_ctx": 4}, "twice"),
        ({"swa_full": "perhaps"}, "on or off"),
        ({"n_ctx": None}, "needs a value"),
        ({"mtp": 3}, "mtp"),
    ],
)
def test_refusals(flags, words):
    with pytest.raises(KvsimError, match=words):
        llama(**{"n_ctx": 4096} | flags if "n_ctx" not in flags and "c" not in flags else flags)


def test_blocks_must_divide_heads():
    odd = ModelSpec.from_numbers(layers=2, n_heads=6, head_dim=48)
    with pytest.raises(KvsimError, match="not divisible by the block of 32"):
        llama(odd, n_ctx=256, type_k="q8_0")
    # without flash attention only the row must divide: 6 * 48 = 288 = 9 blocks of 34 bytes
    assert llama(odd, n_ctx=256, type_k="q8_0", fa="off").k_bytes == 2 * 256 * 9 * 34
    with pytest.raises(KvsimError, match="not divisible"):
        llama(ModelSpec.from_numbers(layers=2, n_heads=1, head_dim=48), n_ctx=256, type_k="q8_0", fa="off")


def test_mixed_heads_forced_flash_off_in_older_builds():
    spec = ModelSpec.from_numbers(layers=27, heads=16, head_dim_k=192, head_dim_v=128)
    with pytest.raises(KvsimError, match="differ in width"):
        llama(spec, n_ctx=4096, ctv="q8_0", fa="on", version="2024-08")
    assert llama(spec, n_ctx=4096, ctv="q8_0").v_bytes == 27 * 4096 * 16 * 128 // 32 * 34


def test_the_models_own_context():
    assert llama().tokens == 8192
    with pytest.raises(KvsimError, match="give n_ctx"):
        llama(HYBRID)


def test_text_values_and_dashes():
    assert llama(**{"n-ctx": "128k"}).tokens == 131072
    assert llama(**{"--ctx-size": "4096", "-ctk": "Q8_0", "-fa": "1"}).k_bytes == 4096 * 32 * 1024 // 32 * 34
    assert "type_k" in flag_names("llama.cpp")


def test_unused_windows_keep_the_full_context():
    from dataclasses import replace

    mistral = replace(ModelSpec.from_numbers(layers=2, n_heads=8, head_dim=64, window=4096), architecture="mistral")
    found = llama(mistral, n_ctx=32768)
    assert found.caches[0].tokens == 32768
    assert any("does not use the sliding window" in w for w in found.warnings)
    plain = replace(LLAMA, architecture="llama")
    assert llama(plain, n_ctx=4096).warnings == ()


def test_minicpm3_stores_heads():
    from dataclasses import replace

    spec = ModelSpec.from_numbers(layers=62, n_heads=40, mla_kv_lora_rank=256, mla_rope_dim=32, head_dim_k=96,
                                  head_dim_v=64)
    found = llama(replace(spec, architecture="minicpm3"), n_ctx=4096)
    assert (found.k_bytes, found.v_bytes) == (62 * 4096 * 40 * 96 * 2, 62 * 4096 * 40 * 64 * 2)


def test_unknown_engines():
    with pytest.raises(KvsimError, match=r"did you mean 'llama\.cpp'"):
        memory("lama.cpp", LLAMA)
    with pytest.raises(KvsimError, match="ModelSpec"):
        memory("llama.cpp", "llama")


def test_ollama_multiplies_and_falls_back():
    # 2048 * 4 slots = 8192 tokens of 128 KiB
    assert memory("ollama", LLAMA, num_ctx=2048, num_parallel=4).kv_bytes == 8192 * 131072
    fallen = memory("ollama", LLAMA, num_ctx=2048, kv_cache_type="q8_0")
    assert fallen.kv_bytes == 2048 * 131072
    assert "falls back to f16" in fallen.warnings[0]
    on = memory("ollama", LLAMA, num_ctx=2048, kv_cache_type="q8_0", flash_attention=True)
    assert on.kv_bytes == 2048 * 131072 // 64 * 34
    old = memory("ollama", GEMMA3, num_ctx=32768, version="0.6.0")
    assert old.kv_bytes == 34 * 32768 * 2048 * 2
    assert memory("ollama", GEMMA3, num_ctx=32768).kv_bytes < old.kv_bytes / 3


@given(
    n_ctx=st.integers(1, 2**20), slots=st.integers(1, 64), unified=st.booleans(), ub=st.integers(1, 4096),
    kinds=st.tuples(*[st.sampled_from(["f16", "q8_0", "q4_0", "iq4_nl"])] * 2),
)
def test_invariants(n_ctx, slots, unified, ub, kinds):
    flags = {"n_parallel": slots, "kv_unified": unified, "n_ubatch": ub, "type_k": kinds[0], "type_v": kinds[1]}
    found = llama(GEMMA3, n_ctx=n_ctx, **flags)
    assert found.kv_bytes == found.k_bytes + found.v_bytes == sum(c.bytes for c in found.caches)
    assert found.tokens >= n_ctx
    assert all(c.tokens % 256 == 0 for c in found.caches)
    assert found.caches[1].tokens <= found.caches[0].tokens
    assert llama(GEMMA3, n_ctx=n_ctx + 256, **flags).kv_bytes >= found.kv_bytes
    assert found.kv_bytes <= llama(GEMMA3, n_ctx=n_ctx, swa_full=True, **flags).kv_bytes


def test_quantized_values_before_flash_attention_are_made():
    # lcpp-43: a build of 2023-12 printed K 256.00, V 80.00 MiB and failed at the first batch
    found = llama(n_ctx=4096, type_v="q4_1", version="2023-12")
    assert (found.k_bytes, found.v_bytes) == (256 * 2**20, 80 * 2**20)
    assert any("before flash attention" in note for note in found.warnings)
    with pytest.raises(KvsimError, match="a quantized V needs flash attention"):
        llama(n_ctx=4096, type_v="q4_1", version="2024-06")
