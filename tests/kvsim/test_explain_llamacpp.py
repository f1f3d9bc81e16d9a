"""llama.cpp start-up logs of every age, written as its builds print them, with figures of public logs."""

import json
from pathlib import Path

import pytest

from kvsim import ModelSpec
from kvsim.engines.explain import Line, explain
from kvsim.engines.llamacpp_log import contexts

CASES = {c["id"]: c for c in json.loads(
    (Path(__file__).parents[1] / "data" / "engine_logs.json").read_text())["cases"]}

# 2025-11, CPU; figures of lcpp-03
GEMMA2 = """\
print_info: n_layer          = 26
print_info: n_head           = 8
print_info: n_head_kv        = 4
print_info: n_swa            = 4096
print_info: n_embd_head_k    = 256
print_info: n_embd_head_v    = 256
print_info: n_embd_k_gqa     = 1024
print_info: n_embd_v_gqa     = 1024
llama_context: constructing llama_context
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 8192
llama_context: n_ctx_seq     = 8192
llama_context: n_batch       = 2048
llama_context: n_ubatch      = 512
llama_context: kv_unified    = true
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache:        CPU KV buffer size =   416.00 MiB
llama_kv_cache: size =  416.00 MiB (  8192 cells,  13 layers,  4/1 seqs), K (f16):  208.00 MiB, V (f16):  208.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 8192 cells
llama_kv_cache:        CPU KV buffer size =   416.00 MiB
llama_kv_cache: size =  416.00 MiB (  8192 cells,  13 layers,  4/1 seqs), K (f16):  208.00 MiB, V (f16):  208.00 MiB
"""
# 2026, Vulkan; figures of lcpp-33
HYBRID = """\
0.00.1 I print_info: n_layer               = 32
0.00.1 I print_info: n_head_kv             = [EVERY]
0.00.1 I print_info: n_embd_head_k         = 256
0.00.1 I print_info: n_embd_head_v         = 256
0.00.1 I print_info: ssm_d_conv            = 4
0.00.1 I print_info: ssm_d_inner           = 4096
0.00.1 I print_info: ssm_d_state           = 128
0.00.1 I print_info: ssm_n_group           = 16
0.27.2 I llama_context: n_ctx         = 8192
0.27.2 I llama_context: n_ctx_seq     = 8192
0.27.2 I llama_context: kv_unified    = false
0.27.2 I llama_kv_cache:        CPU KV buffer size =    96.00 MiB
0.27.3 I llama_kv_cache:    Vulkan1 KV buffer size =   160.00 MiB
0.27.7 I llama_memory_recurrent:        CPU RS buffer size =    20.94 MiB
0.27.8 I llama_memory_recurrent:    Vulkan1 RS buffer size =    29.31 MiB
0.27.8 I llama_memory_recurrent: size =   50.25 MiB (     1 cells,  32 layers,  1 seqs  0 rs_seq), \
R (f32):    2.25 MiB, S (f32):   48.00 MiB
0.37.2 I srv    load_model: initializing, n_slots = 1, n_ctx_slot = 8192, kv_unified = 'false'
""".replace("EVERY", ", ".join(["0, 0, 0, 4"] * 8))
# 2024-03, two cards; figures of lcpp-01
TWO_CARDS = """\
llm_load_print_meta: n_head           = 64
llm_load_print_meta: n_head_kv        = 64
llm_load_print_meta: n_layer          = 40
llm_load_print_meta: n_embd_head_k    = 128
llm_load_print_meta: n_embd_head_v    = 128
llm_load_print_meta: n_embd_k_gqa     = 8192
llm_load_print_meta: n_embd_v_gqa     = 8192
llama_new_context_with_model: n_ctx      = 4096
llama_kv_cache_init:      CUDA0 KV buffer size =  1536.00 MiB
llama_kv_cache_init:      CUDA1 KV buffer size =  3584.00 MiB
llama_new_context_with_model: KV self size  = 5120.00 MiB, K (f16): 2560.00 MiB, V (f16): 2560.00 MiB
"""
# ik_llama.cpp, four cards; figures of lcpp-24: rows of 576 values do not fill blocks of 512, so CUDA pads each layer
KIMI = """\
llm_load_print_meta: n_layer          = 61
llm_load_print_meta: n_rot            = 64
llm_load_print_meta: n_lora_kv        = 512
llama_new_context_with_model: n_ctx      = 131072
llama_kv_cache_init:      CUDA0 KV buffer size =   765.00 MiB
llama_kv_cache_init:      CUDA1 KV buffer size =  1147.51 MiB
llama_kv_cache_init:      CUDA2 KV buffer size =  1453.51 MiB
llama_kv_cache_init:      CUDA3 KV buffer size =  1300.51 MiB
llama_new_context_with_model: KV self size  = 4666.50 MiB, c^KV (q8_0): 4666.50 MiB, kv^T: not used
"""


def read(tmp_path, text, model=None):
    path = tmp_path / "x.log"
    path.write_text(text)
    return explain(path, model)


@pytest.mark.parametrize(
    ("log", "count"), [(GEMMA2, 10), (HYBRID, 7), (TWO_CARDS, 5), (KIMI, 6)], ids=["gemma2", "hybrid", "cards", "kimi"]
)
def test_all_figures_are_predicted(tmp_path, log, count):
    found = read(tmp_path, log)
    assert [f"{f.name}: {f.printed} {f.predicted}" for f in found.findings if not f.matches] == []
    assert len(found.findings) == count
    assert found.ok


def test_mismatches_name_inputs(tmp_path):
    half = GEMMA2.replace("13 layers,  4/1 seqs), K (f16):  208.00 MiB, V (f16):  208.00 MiB",
                          "13 layers,  4/1 seqs), K (f16):  110.50 MiB, V (f16):  110.50 MiB").replace(
        "size =  416.00 MiB (", "size =  221.00 MiB (")
    hints = " ".join(h for f in read(tmp_path, half).findings for h in f.hints)
    assert "types K q8_0, V q8_0" in hints


def test_wrong_width_says_query_heads(tmp_path):
    log = TWO_CARDS.replace("n_head_kv        = 64", "n_head_kv        = 8").replace("gqa     = 8192", "gqa     = 1024")
    found = [f for f in read(tmp_path, log).findings if f.name == "KV cache"]
    assert found[0].predicted == "640.00"
    assert any("query heads" in hint for hint in found[0].hints)


def test_sliding_cells_name_the_micro_batch(tmp_path):
    # window 128: 128 + 2048 = 2176 -> 2304 cells; the log says 512
    log = GEMMA2.replace("n_swa            = 4096", "n_swa            = 128")
    log = log.replace("n_seq_max     = 4", "n_seq_max     = 1")
    log = log.replace("SWA KV cache, size = 8192", "SWA KV cache, size = 2304")
    head, tail = log.split("creating     SWA")
    for old, new in (("8192 cells", "2304 cells"), ("4/1", "1/1"), ("416.00", "117.00"), ("208.00", "58.50")):
        tail = tail.replace(old, new)
    found = read(tmp_path, head.replace("4/1", "1/1") + "creating     SWA" + tail)
    wrong = [f for f in found.findings if not f.matches]
    assert [f.name for f in wrong] == ["SWA cache cells"]
    assert wrong[0].predicted == "768"
    assert "n_ubatch of up to 2176" in wrong[0].hints


def test_the_model_fills_in(tmp_path):
    # 2026 at low verbosity: no widths, no slots, no summary lines; figures of lcpp-05
    log = """\
llama_context: n_ctx         = 8192
llama_context: n_ctx_seq     = 8192
llama_context: kv_unified    = true
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache:    Vulkan0 KV buffer size =   128.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 6144 cells
llama_kv_cache:    Vulkan0 KV buffer size =  1920.00 MiB
"""
    bare = read(tmp_path, log)
    assert [f.matches for f in bare.findings] == [None, None]
    full = read(tmp_path, log, ModelSpec.from_numbers(**CASES["lcpp-05"]["arch"]))
    assert [f.matches for f in full.findings] == [True, True]
    assert full.findings[1].rule.startswith("40 of 40 layers")


def test_two_servers_in_one_file(tmp_path):
    found = read(tmp_path, TWO_CARDS + "some line\n" + HYBRID + GEMMA2)
    assert found.ok
    assert sorted({f.server for f in found.findings}) == [1, 2, 3]


def test_a_draft_context_keeps_the_first_ones_facts(tmp_path):
    log = HYBRID.replace("0.37.2", """\
0.30.0 I llama_context: constructing llama_context
0.30.0 I llama_context: n_ctx         = 4096
0.30.0 I llama_kv_cache: size =   16.00 MiB (  4096 cells,   1 layers,  1/1 seqs), K (f16):    8.00 MiB, \
V (f16):    8.00 MiB
0.37.2""")
    found = read(tmp_path, log)
    assert found.ok
    assert found.findings[-1].server == 2


def test_ollama_estimate(tmp_path):
    # lcpp's oll-02: 2048 x 4 = 8192 tokens of 32 * 2 * 1024 f16 values
    log = """\
level=INFO msg="offload to cuda" memory.required.kv="1.0 GiB"
level=INFO msg="starting llama server" cmd="/x/ollama runner --ctx-size 8192 --parallel 4"
llama_model_loader: - kv   5:                          llama.block_count u32              = 32
llama_model_loader: - kv   7:                     llama.embedding_length u32              = 4096
llama_model_loader: - kv   9:                 llama.attention.head_count u32              = 32
llama_model_loader: - kv  10:              llama.attention.head_count_kv u32              = 8
"""
    found = read(tmp_path, log, ModelSpec.from_numbers(**CASES["oll-02"]["arch"]))
    assert [(f.engine, f.printed, f.predicted) for f in found.findings] == [("ollama", "1.0", "1.0")]


def test_lines_of_a_dry_run_are_left_out():
    lines = [Line(1, "print_info: no_alloc              = 1", "", ""),
             Line(2, "llama_kv_cache:        CPU KV buffer size =     0.00 MiB", "", "")]
    assert contexts(lines) == []
