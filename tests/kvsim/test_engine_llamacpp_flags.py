"""The command line of llama.cpp for a method, and what it cannot run."""

import pytest

from kvsim.engines import flags
from kvsim.engines.llamacpp_flags import cache_types, realise
from kvsim.errors import KvsimError


@pytest.mark.parametrize(
    ("method", "types"),
    [("full", ("f16", "f16")), ("q8_0", ("q8_0", "q8_0")), ("k:q8_0 v:q4_0", ("q8_0", "q4_0")),
     ("k:iq4_nl v:full", ("iq4_nl", "f16")), ("q5_1 @ on_write", ("q5_1", "q5_1"))],
)
def test_types(method, types):
    assert cache_types(method) == types


def test_flags():
    assert realise("k:q8_0 v:full", max_model_len=4096) == "-c 4096 -ctk q8_0 -ctv f16 -ub 512"
    # 8000 tokens pad to 8192 a slot, times 4 slots
    assert realise("q4_0", max_model_len=8000, max_num_seqs=4) == "-c 32768 -ctk q4_0 -ctv q4_0 -fa on -ub 512 -np 4"
    assert realise("full", tensor_parallel_size=2, n_ubatch=4096) == "-ctk f16 -ctv f16 -b 4096 -ub 4096 -ts 1,1"


@pytest.mark.parametrize(
    ("method", "words"),
    [("h2o(budget=0.2)", "drops no tokens"), ("window(recent=1024)", "drops no tokens"), ("svd(rank=64)", "own basis"),
     ("int(bits=4)", "cannot store keys"), ("k:full v:fp8", "cannot store values"), ("gear", "cannot run"),
     ("q8_0; layers=0-3: full", "one type a side")],
)
def test_refusals(method, words):
    with pytest.raises(KvsimError, match=words):
        realise(method)


def test_one_door_for_all_engines():
    assert flags("llama.cpp", "q8_0", max_model_len=512) == "-c 512 -ctk q8_0 -ctv q8_0 -fa on -ub 512"
    assert "--kv-cache-dtype fp8" in flags("vllm", "fp8")
    with pytest.raises(KvsimError, match="no flags"):
        flags("exllamav2", "full")
    with pytest.raises(KvsimError, match="no share"):
        flags("llama.cpp", "full", gpu_memory_utilization=0.9)


def test_the_engine_takes_what_the_flags_say():
    from kvsim import ModelSpec, memory

    model = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
    words = realise("k:q8_0 v:q4_0", max_model_len=8000, max_num_seqs=4).split()
    found = memory("llama.cpp", model, **dict(zip(words[::2], words[1::2], strict=True)))
    assert found.tokens == 4 * 8192
    assert (found.k_bytes, found.v_bytes) == (32768 * 32 * 32 * 34, 32768 * 32 * 32 * 18)
