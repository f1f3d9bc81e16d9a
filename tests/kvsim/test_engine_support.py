"""Which engine runs which method: flags that realise one, reasons where none does, a table that names real parts."""

import tomllib
from importlib.resources import files

import pytest

from kvsim import KvsimError
from kvsim.engines import engine_module, flags
from kvsim.engines.support import support
from kvsim.grammar import parts, presets
from kvsim.method import parse_method

TABLE = tomllib.loads(files("kvsim").joinpath("data/engines/support.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("engine", "method", "flags"), [
    ("vllm", "full", ""),
    ("vllm", "float8(kind=e4m3,scale=none)", "--kv-cache-dtype fp8_e4m3"),
    ("vllm", "float8(kind=e5m2,scale=none)", "--kv-cache-dtype fp8_e5m2"),
    ("vllm", "float8(kind=e4m3)", "--kv-cache-dtype fp8_per_token_head"),
    ("vllm", "nvfp4", "--kv-cache-dtype nvfp4"),
    ("vllm", "int(bits=8,axis=row)", "--kv-cache-dtype int8_per_token_head"),
    ("vllm", "k:rotated(bits=4) v:int(bits=4,axis=row)", "--kv-cache-dtype turboquant_4bit_nc"),
    ("vllm", "k:float8(kind=e4m3,scale=none) v:int(bits=4,axis=row)", "--kv-cache-dtype turboquant_k8v4"),
    ("sglang", "full", ""),
    ("sglang", "float8(kind=e5m2,scale=none)", "--kv-cache-dtype fp8_e5m2"),
    ("sglang", "mxfp(bits=4)", "--kv-cache-dtype fp4_e2m1"),
    ("tensorrt-llm", "nvfp4", "--extra_llm_api_options kv.yaml  # kv.yaml: kv_cache_config: {dtype: nvfp4}"),
])  # fmt: skip
def test_flags(engine, method, flags):
    assert engine_module(engine).realise(parse_method(method)) == flags


@pytest.mark.parametrize(("engine", "flags"), [
    ("vllm", "--kv-cache-dtype fp8_e4m3 --max-model-len 8192 --max-num-seqs 8 --gpu-memory-utilization 0.9 "
             "--tensor-parallel-size 2 --pipeline-parallel-size 4"),
    ("sglang", "--kv-cache-dtype fp8_e4m3 --context-length 8192 --mem-fraction-static 0.9 --max-running-requests 8 "
               "--tp-size 2 --pp-size 4"),
    ("tensorrt-llm", "--max_seq_len 8192 --max_batch_size 8 --kv_cache_free_gpu_memory_fraction 0.9 --tp_size 2 "
                     "--pp_size 4 --extra_llm_api_options kv.yaml  # kv.yaml: kv_cache_config: {dtype: fp8}"),
])  # fmt: skip
def test_the_whole_command_line(engine, flags):
    found = engine_module(engine).realise(
        parse_method("float8(kind=e4m3,scale=none)"), max_model_len=8192, gpu_memory_utilization=0.9, max_num_seqs=8,
        tensor_parallel_size=2, pipeline_parallel_size=4)
    assert found == flags


@pytest.mark.parametrize(("engine", "method", "message"), [
    ("vllm", "snapkv(budget=0.25)", "vLLM cannot run snapkv: vLLM keeps every token"),
    ("sglang", "window(sinks=4,recent=100)", "SGLang cannot run window: SGLang keeps every token"),
    ("tensorrt-llm", "h2o(budget=0.2)", "TensorRT-LLM drops tokens only by a window"),
    ("vllm", "int(bits=4,group=64)", "vLLM cannot store keys as int.*its formats: auto, fp8_e4m3"),
    ("vllm", "int(bits=8,axis=row,residual=128)", "cannot store keys as int"),
    ("vllm", "int(bits=2,axis=row)+outliers(fraction=0.01)", "vLLM cannot run outliers: vLLM has no outlier"),
    ("sglang", "float8(kind=e4m3)", "SGLang cannot store keys as float8"),
    ("vllm", "full; layers=0-3: float8(kind=e4m3,scale=none)", "the clause for layers=0-3 cannot be run"),
])  # fmt: skip
def test_reasons(engine, method, message):
    with pytest.raises(KvsimError, match=message):
        engine_module(engine).realise(parse_method(method))


@pytest.mark.parametrize(("numbers", "message"), [
    ({"max_model_len": 0}, "max_model_len must lie"), ({"tensor_parallel_size": -1}, "tensor_parallel_size must"),
    ({"gpu_memory_utilization": 1.5}, "must lie in"), ({"gpu_memory_utilization": float("nan")}, "must lie in"),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_numbers_that_no_server_takes(engine, numbers, message):
    with pytest.raises(KvsimError, match=message):
        flags(engine, "full", **numbers)


def test_rows_of_a_part_a_preset_and_a_method():
    assert {row.where for row in support("float8")} == {"vLLM", "SGLang", "TensorRT-LLM"}
    assert {row.part for row in support("snapkv(budget=0.25) | float8(kind=e4m3)")} == {"snapkv", "float8"}
    assert [row.where for row in support("knorm")] == ["kvpress"]
    assert support("kivi-2")[0].part == "int"
    assert support("multiscale") == ()
    with pytest.raises(KvsimError, match="did you mean"):
        support("snapvk")


def test_every_row_names_a_real_part_and_place():
    known = set(parts()) | set(presets())
    for row in TABLE["part"]:
        assert row["name"] in known, row
        assert TABLE["engines"][row["where"]]["source"], row
        assert row["how"], row


def test_every_flag_of_the_table_is_one_that_the_engine_lays_out():
    from kvsim.engines.sglang import FP4, WIDTHS
    from kvsim.engines.tensorrt_llm import WIDTHS as TRT
    from kvsim.engines.vllm_formats import SPELLINGS

    for engine, words in (("vllm", SPELLINGS), ("sglang", (*WIDTHS, *FP4)), ("tensorrt-llm", (*TRT, "nvfp4"))):
        assert set(TABLE["engines"][engine]["formats"].values()) <= set(words)
