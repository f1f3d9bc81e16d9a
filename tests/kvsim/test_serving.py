"""A fit for a server: its own bytes, its own refusals, and flags that give back what was predicted."""

import json
import shlex

import pytest
from click.testing import CliRunner

from kvsim import Workload, fit, load_device, load_model, memory
from kvsim.cli import main
from kvsim.engines import held_bytes, memory_share
from kvsim.errors import KvsimError

H100 = load_device("h100-sxm")
LLAMA = load_model("llama-3.1-8b")


def chosen(model, engine, batch=8, prompt=16_000, device=H100, **more):
    return fit(load_model(model), device, Workload(batch, prompt, 256), engine=engine, **more).chosen


def test_llama_cpp_pads_each_slot():
    # 16256 tokens pad to 16384 cells, 8 slots, 32 layers * 2 sides * 1024 values * 2 bytes = 131072 bytes a cell
    found = chosen("llama-3.1-8b", "llama.cpp")
    assert found.engine_flags == "-c 131072 -ctk f16 -ctv f16 -ub 512 -np 8"
    assert found.engine_bytes == 131072 * 131072
    assert found.record.cache_bytes == 8 * 16_256 * 131072


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "qwen3.5-27b"])
def test_the_flags_of_llama_cpp_allocate_the_bytes(model):
    found = chosen(model, "llama.cpp")
    words = shlex.split(found.engine_flags)
    again = memory("llama.cpp", load_model(model), **dict(zip(words[::2], words[1::2], strict=True)))
    assert again.kv_bytes + again.state_bytes == found.engine_bytes


def test_windows_of_vllm_hold_one_batch_in_all():
    # gpt-oss: 12 + 12 layers in two groups of 12, 12 * 8 * 64 * 2 * 2 * 16 = 393216 bytes a block; 16256 tokens are
    # 1016 blocks; a window of 128 decodes in 8 + 1 blocks and is prefilled in ceil((127 + 8192) / 16) + 1 = 521
    model = load_model("gpt-oss-20b")
    assert held_bytes("vllm", "full", model, tokens=16_256, sequences=8) == 393216 * (8 * 1016 + 521 + 7 * 9)
    assert held_bytes("vllm", "full", model, tokens=16_256, sequences=1) == 393216 * (1016 + 521)


def test_other_engines_in_whole_pages():
    # 131072 bytes a token: SGLang has one row more, TensorRT-LLM whole blocks of 32
    assert held_bytes("sglang", "full", LLAMA, tokens=1001, sequences=3) == (3 * 1001 + 1) * 131072
    assert held_bytes("tensorrt-llm", "full", LLAMA, tokens=1001, sequences=3) == 3 * 1024 * 131072
    assert held_bytes("tensorrt-llm", "fp8", LLAMA, tokens=1001, sequences=3) == 3 * 1024 * 65536
    assert held_bytes("vllm", "full", LLAMA, tokens=1001, sequences=3, tensor_parallel_size=4) == 3 * 1008 * 32768


def test_a_method_that_fits_by_rows_but_not_in_the_engine_is_rejected():
    model = load_model("gemma-3-27b")
    plan = fit(model, H100, Workload(1, 30_000, 0), engine="llama.cpp", methods=["full", "q8_0"], weights="q8_0")
    assert plan.chosen.name == "full"
    short = H100.capacity_bytes - int(plan.chosen.record.peak_bytes) - plan.chosen.record.reserve_bytes
    extra = plan.chosen.engine_bytes - int(plan.chosen.record.cache_bytes)
    assert extra > 0
    tight = fit(model, H100, Workload(1, 30_000, 0), engine="llama.cpp", methods=["full", "q8_0"], weights="q8_0",
                reserve_bytes=plan.chosen.record.reserve_bytes + short - extra // 2)  # fmt: skip
    assert tight.chosen.name == "q8_0"
    against = next(r for r in tight.rejected if r.method == "full")
    assert against.reason.startswith("llama.cpp allocates ")
    assert tight.baseline.record.fits


def test_what_no_backend_stores_is_rejected_with_the_engines_reason():
    plan = fit(load_model("deepseek-v2"), load_device("h200"), Workload(1, 4096), devices=8, engine="vllm")
    assert {c.name for c in plan.considered} >= {"full", "fp8"}
    reason = "no vLLM backend stores latent attention (MLA) as int4_per_token_head"
    assert any(reason in r.reason for r in plan.rejected)


@pytest.mark.parametrize(
    ("engine", "flag", "share"),
    [("vllm", "--gpu-memory-utilization 0.9", 0.9), ("sglang", "--mem-fraction-static 0.88", 0.88),
     ("tensorrt-llm", "--kv_cache_free_gpu_memory_fraction 0.9", 0.9)],
)
def test_the_share_of_memory(engine, flag, share):
    assert flag in chosen("llama-3.1-8b", engine, batch=1).engine_flags
    sizes = {"weights": 60.0, "cache": 5.0, "peak": 66.0, "capacity": 100.0}
    assert memory_share(engine, **sizes) == share
    more = {"vllm": 0.96, "sglang": 0.95, "tensorrt-llm": 0.9}[engine]
    assert memory_share(engine, **sizes | {"cache": 34.05, "peak": 95.05}) == more
    assert memory_share("llama.cpp", **sizes) is None


def test_nothing_is_asked_of_no_engine():
    found = chosen("llama-3.1-8b", "")
    assert (found.engine_flags, found.engine_bytes) == (None, None)
    with pytest.raises(KvsimError, match="no flags known here"):
        chosen("llama-3.1-8b", "exllamav2")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_the_flags_of_a_fit_are_read_back(engine):
    found = chosen("llama-3.1-8b", engine, prompt=8_000)
    flags = found.engine_flags.partition(" #")[0].split()
    done = CliRunner().invoke(main, ["memory", "--engine", engine, "--model", "llama-3.1-8b", "--device", "h100-sxm",
                                     "--json", *flags])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["kv_bytes"] > found.engine_bytes * 0.9


@pytest.mark.parametrize(("engine", "length"), [("sglang", "context_length"), ("tensorrt-llm", "max_seq_len")])
def test_a_request_longer_than_the_pool_is_warned_of(engine, length):
    pool = {"sglang": "tokens", "tensorrt-llm": "max_tokens"}[engine]
    short, enough = (memory(engine, LLAMA, **{pool: 1024, length: n}) for n in (1025, 1024))
    assert f"the pool of 1024 tokens is shorter than {length} 1025" in short.warnings[-1]
    assert not any("shorter than" in w for w in enough.warnings)
    with pytest.raises(KvsimError, match=length):
        memory(engine, LLAMA, **{pool: 1024, length: 0})
    requests = {"sglang": "max_running_requests", "tensorrt-llm": "max_batch_size"}[engine]
    with pytest.raises(KvsimError, match=requests):
        memory(engine, LLAMA, **{pool: 1024, requests: 0})
