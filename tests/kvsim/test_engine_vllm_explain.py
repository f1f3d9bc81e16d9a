"""Start-up logs of vLLM and SGLang: figures found, judged, and hints where they differ; any bytes are an answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim import ModelSpec
from kvsim.engines.explain import explain
from kvsim.engines.explain_sglang import KEYWORDS as SGLANG_WORDS
from kvsim.engines.explain_vllm import KEYWORDS as VLLM_WORDS

LLAMA = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
QWEN = ModelSpec.from_numbers(layers=28, n_heads=16, n_kv_heads=8, head_dim=128)
HYBRID = ModelSpec.from_numbers(layers=64, full_attn_layers=16, linear_layers=48, n_kv_heads=4, head_dim=256,
                                mamba_heads=48, mamba_head_dim=128, ssm_d_state=128, ssm_n_group=16, ssm_d_conv=4,
                                ssm_dtype="fp32", next_n_layers=1)
# figures of vllm#10517, vllm PR 24577, index 61070459083, vllm#21348 and index 69213517065 in their engines' wording
V0 = """INFO 12-02 llm_engine.py:249] Initializing an LLM engine (v0.6.4) with config: model='x', \
dtype=torch.bfloat16, max_seq_len={length}, tensor_parallel_size=1, pipeline_parallel_size=1, kv_cache_dtype=auto, \
enable_prefix_caching=False
INFO 12-02 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB kv_cache_size={pool}GiB
INFO 12-02 gpu_executor.py:76] # GPU blocks: {blocks}, # CPU blocks: 2048
INFO 12-02 gpu_executor.py:80] Maximum concurrency for {length} tokens per request: {times}x
"""
V1 = """(EngineCore_0 pid=9) INFO [core.py:58] Initializing a V1 LLM engine (v0.10.2) with config: model='x', \
max_seq_len=4096, tensor_parallel_size=1, pipeline_parallel_size=1, kv_cache_dtype={dtype}, \
enable_prefix_caching=True
(EngineCore_0 pid=9) INFO [gpu_worker.py:298] Available KV cache memory: 69.66 GiB
(EngineCore_0 pid=9) INFO [kv_cache_utils.py:864] GPU KV cache size: 652,144 tokens
(EngineCore_0 pid=9) INFO [kv_cache_utils.py:868] Maximum concurrency for 4,096 tokens per request: 159.21x
"""
NEW = """INFO [core.py:120] Initializing a V1 LLM engine (v0.24.0) with config: model='x', \
speculative_config=SpeculativeConfig(method='mtp', num_speculative_tokens=3), max_seq_len=262144, \
kv_cache_dtype=fp8, enable_prefix_caching=False
INFO [interface.py:911] Setting attention block size to 1600 tokens to ensure that attention page size is >= mamba \
page size.
INFO [gpu_worker.py:563] Available KV cache memory: 9.28 GiB
WARNING [kv_cache_utils.py:1201] Add 3 padding layers, may waste at most 6.25% KV cache memory
INFO [kv_cache_utils.py:1733] GPU KV cache size: 265,122 tokens, Maximum concurrency for 262,144 tokens per request: \
1.01x
"""
REFUSED = """INFO [core.py:120] Initializing a V1 LLM engine (v0.24.0) with config: model='x', \
num_speculative_tokens=3, max_seq_len=262144, kv_cache_dtype=auto, enable_prefix_caching=False
INFO [gpu_worker.py:563] Available KV cache memory: 9.67 GiB
ValueError: To serve at least one request with the models's max seq len (262144), (17.64 GiB KV cache is needed, which \
is larger than the available KV cache memory (9.67 GiB). Based on the available memory, the estimated maximum model \
length is 139200.
"""
SGLANG = """[2025-07-22 05:27:13] server_args=ServerArgs(model_path='x', tp_size=4, dp_size=1, page_size=1, \
kv_cache_dtype='auto', enable_dp_attention=False)
[2025-07-22 05:28:13 TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB
[2025-07-22 05:28:13 TP1] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB
"""
STATES = """Mamba Cache is allocated. max_mamba_cache_size: 360, conv_state size: 0.99GB, ssm_state size: 50.77GB
KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 228520, K size: 3.49 GB, V size: 3.49 GB
"""


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "server.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def table(found):
    return {f.name: (f.printed, f.predicted, f.matches) for f in found.findings}


def test_first_engine(log):
    found = explain(log(V0.format(length=20000, pool="3.81", blocks=1952, times="1.56")), LLAMA)
    assert found.ok
    assert table(found) == {"GPU blocks": ("1952", "1952", True), "CPU blocks": ("2048", "2048", True),
                            "concurrency": ("1.56", "1.56", True)}  # fmt: skip


def test_current_engine(log):
    found = explain(log(V1.format(dtype="auto")), QWEN)
    assert table(found) == {"tokens": ("652,144", "652144", True), "concurrency": ("159.21", "159.21", True)}
    assert "1835008 bytes a block" in found.findings[0].rule


def test_hybrid_with_drafting(log):
    found = explain(log(NEW), HYBRID)
    assert table(found) == {
        "attention block": ("1600", "1600", True), "padding waste": ("6.25", "6.25", True),
        "tokens": ("265,122", "265122", True), "concurrency": ("1.01", "1.01", True),
    }  # fmt: skip


def test_a_refusal(log):
    found = table(explain(log(REFUSED), HYBRID))
    assert found == {"KV needed": ("17.64", "17.64", True), "longest request": ("139200", "139200", True)}


def test_a_mismatch_says_what_would_explain_it(log):
    # the log is told as fp8; in 16 bits the printed tokens come out
    found = explain(log(V1.format(dtype="fp8")), QWEN)
    assert not found.ok
    assert all(f.matches is False for f in found.findings)
    assert any("kv_cache_dtype auto" in hint for hint in found.findings[0].hints)


def test_without_a_model(log):
    found = explain(log(V1.format(dtype="auto")))
    assert table(found) == {"tokens": ("652,144", None, None), "concurrency": ("159.21", "159.21", True)}


def test_two_servers_in_one_file(log):
    both = V0.format(length=20000, pool="3.81", blocks=1952, times="1.56") + V0.format(
        length=29000, pool="2.89", blocks=1478, times="0.82")  # fmt: skip
    found = explain(log(both), LLAMA)
    assert [f.server for f in found.findings] == [1, 1, 1, 2, 2, 2]
    assert found.ok


def test_smallest_worker_decides(log):
    two = V1.format(dtype="auto").replace("69.66 GiB\n", "70.10 GiB\n(Worker_1) Available KV cache memory: 69.66 GiB\n")
    assert explain(log(two), QWEN).ok


def test_sglang_sides_once_a_server(log):
    found = explain(log(SGLANG), ModelSpec.from_numbers(layers=94, n_heads=64, n_kv_heads=4, head_dim=128))
    assert table(found) == {"K size": ("8.23", "8.23", True), "V size": ("8.23", "8.23", True)}
    assert len(found.findings) == 2


def test_sglang_states(log):
    found = explain(log(STATES), HYBRID)
    assert found.ok
    assert table(found)["ssm state"] == ("50.77", "50.77", True)
    assert table(found)["K size"] == ("3.49", "3.49", True)


def test_sglang_mismatch_names_the_dtype(log):
    found = explain(log(STATES.replace("dtype: torch.float8_e4m3fn, ", "")), HYBRID)
    assert "kv_cache_dtype fp8 or twice the tp_size" in next(f for f in found.findings if f.name == "K size").hints


def test_a_model_that_does_not_fit_the_flags_is_an_answer(log):
    found = explain(log(SGLANG.replace("tp_size=4", "tp_size=7")), LLAMA)
    assert {f.matches for f in found.findings} == {None}
    assert "cannot be predicted" in found.findings[0].rule


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(VLLM_WORDS + SGLANG_WORDS), st.binary(max_size=60),
                          st.sampled_from([b" 1,,,", b"9" * 40, b" 0 tokens\n", b": nan GiB\n", b" -1.00 GiB\n"])),
                max_size=12))
def test_any_bytes_are_an_answer(tmp_path_factory, pieces):
    path = tmp_path_factory.getbasetemp() / "any.log"
    path.write_bytes(b" ".join(pieces))
    explain(path, LLAMA)
    explain(path)
