"""Files that are no plain logs, servers without end, models that the log itself names."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys

import pytest

from kvsim import load_model
from kvsim.engines.explain import MAX_SERVERS, explain, named
from kvsim.errors import KvsimError

# lines of public logs: index 54698501030 (coloured, DeepSeek-R1) and 9297248278 (Gemma 3 27B under docker compose)
DEEPSEEK = """\
\x1b[1;36m(EngineCore_DP0 pid=265)\x1b[0;0m INFO 12-03 17:30:13 [core.py:93] Initializing a V1 LLM engine (v0.11.2) \
with config: model='deepseek-ai/DeepSeek-R1', speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, \
tensor_parallel_size=8, pipeline_parallel_size=1, kv_cache_dtype=auto, enable_prefix_caching=False
(Worker_TP0 pid=402) INFO 12-03 17:37:45 [gpu_worker.py:359] Available KV cache memory: 41.60 GiB
(Worker_TP1 pid=403) INFO 12-03 17:37:45 [gpu_worker.py:359] Available KV cache memory: 41.72 GiB
(EngineCore_DP0 pid=265) INFO 12-03 17:37:46 [kv_cache_utils.py:1229] GPU KV cache size: 635,648 tokens
(EngineCore_DP0 pid=265) INFO 12-03 17:37:46 [kv_cache_utils.py:1234] Maximum concurrency for 8,192 tokens per \
request: 77.59x
"""
GEMMA = """\
vllm-1  | (EngineCore_DP0 pid=278) INFO 09-25 13:38:29 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with \
config: model='/google/gemma-3-27b-it', max_seq_len=4096, tensor_parallel_size=1, kv_cache_dtype=auto
vllm-1  | (EngineCore_DP0 pid=278) INFO 09-25 13:40:27 [gpu_worker.py:306] Available KV cache memory: 109.86 GiB
vllm-1  | (EngineCore_DP0 pid=278) WARNING 09-25 13:40:28 [kv_cache_utils.py:982] Add 8 padding layers, may waste at \
most 15.38% KV cache memory
vllm-1  | (EngineCore_DP0 pid=278) INFO 09-25 13:40:28 [kv_cache_utils.py:1087] GPU KV cache size: 205,696 tokens
vllm-1  | (EngineCore_DP0 pid=278) INFO 09-25 13:40:28 [kv_cache_utils.py:1091] Maximum concurrency for 4,096 tokens \
per request: 50.05x
"""


def put(tmp_path, content):
    path = tmp_path / "server.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("pack", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")], ids=["gz", "bz2", "xz"]
)
def test_a_compressed_log_is_refused(tmp_path, pack, kind):
    with pytest.raises(KvsimError, match=f"{kind}-compressed: unpack it first"):
        explain(put(tmp_path, pack(DEEPSEEK.encode())))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(KvsimError, match="not a regular file; give a file, or - for standard input"):
            explain(path)
    with pytest.raises(KvsimError, match="it is a folder"):
        explain(tmp_path)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DEEPSEEK.encode())))
    assert explain("-").ok


def test_utf16_without_its_mark(tmp_path):
    for coding in ("utf-16-le", "utf-16-be"):
        assert explain(put(tmp_path, DEEPSEEK.encode(coding))).ok
    assert not explain(put(tmp_path, b"\0\0\0\0" * 4000)).findings


def test_the_log_names_its_model(tmp_path):
    found = explain(put(tmp_path, DEEPSEEK + GEMMA))
    assert found.ok
    assert [(f.server, f.name) for f in found.findings] == [
        (1, "tokens"), (1, "concurrency"), (2, "padding waste"), (2, "tokens"), (2, "concurrency"),
    ]  # fmt: skip
    assert "model deepseek-r1, as the log names it" in found.findings[0].rule
    assert "model gemma-3-27b, as the log names it" in found.findings[-1].rule
    asked = explain(put(tmp_path, GEMMA), load_model("deepseek-r1"))
    assert not any(f.matches for f in asked.findings)  # --model is believed before the log


@pytest.mark.parametrize("text", ["", "/", "x", "RedHatAI/Qwen3-0.6B-secret", "../../etc/passwd", "\x00", "gemma"])
def test_only_a_shipped_name_is_a_model(tmp_path, text):
    assert named(text) is None
    found = explain(put(tmp_path, GEMMA.replace("/google/gemma-3-27b-it", text)))
    assert not found.ok
    assert not text or text in "xgemma/" or text not in json.dumps(found.to_json())


def test_the_name_may_end_a_path():
    assert named("/data/models/Llama-3.1-8B-Instruct/").name == "llama-3.1-8b"
    assert named(r"D:\models\Llama-3.1-8B-Instruct").name == "llama-3.1-8b"


def test_a_pool_after_the_block_size_is_the_same_server(tmp_path):
    early = "INFO [interface.py:606] Setting attention block size to 2096 tokens to ensure that\n"
    found = explain(put(tmp_path, DEEPSEEK.replace("(Worker_TP0", early + "(Worker_TP0", 1)))
    assert {f.server for f in found.findings} == {1}


def test_servers_without_end_are_judged_to_a_bound(tmp_path):
    found = explain(put(tmp_path, DEEPSEEK * 400))
    assert found.ok
    assert max(f.server for f in found.findings) == MAX_SERVERS
    assert any(f"at most {MAX_SERVERS} servers" in note for note in found.notes)
    lines = [f.line for f in found.findings if f.name == "tokens"]
    assert lines[:2] == [4, 9]


def test_another_model_is_told_by_its_bytes(tmp_path):
    # 41.60 GiB / 635648 tokens = 70271.1 bytes: 61 layers of 1152; Llama 3.1 70B on 8 ranks stores 80 * 512 = 40960
    found = explain(put(tmp_path, DEEPSEEK), load_model("llama-3.1-70b"))
    hints = {hint for f in found.findings for hint in f.hints}
    assert hints == {"another model: pool / tokens is 70,271 bytes a token and rank; llama-3.1-70b stores 40,960"}
