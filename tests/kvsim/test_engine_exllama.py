"""ExLlamaV2/V3 caches: figures of public threads and hand-computed blocks."""

import json
from pathlib import Path

import pytest

from kvsim import ModelSpec, memory
from kvsim.errors import KvsimError

CASES = {c["id"]: c for c in json.loads(
    (Path(__file__).parents[1] / "data" / "engine_logs.json").read_text())["cases"] if c["id"].startswith("exl")}
LLAMA2 = ModelSpec.from_numbers(layers=32, n_heads=32, head_dim=128)


def test_yi_200k():
    case = CASES["exl-01"]
    found = memory("exllamav2", ModelSpec.from_numbers(**case["arch"]), cache="fp16", ctx=200_000)
    per_token, total = case["figures"]
    assert f"{found.kv_bytes / 200_000 / 1024:.0f}" == per_token["printed"]
    assert f"{found.kv_bytes / 2**30:.0f}" == total["printed"]


def test_eight_bit_cache_keeps_one_layer_in_fp16():
    case = CASES["exl-03"]
    full, eight, four = (memory("exllamav2", ModelSpec.from_numbers(**case["arch"]), cache=c, tokens=4096).kv_bytes
                         for c in ("fp16", "cache_8bit", "q4"))
    printed = [f["printed"] for f in case["figures"]]
    # 2048 - (1024 + 64) MiB, the thread's figure to the MiB
    assert f"{(full - eight) / 2**20:.0f}" == printed[0] == "960"
    # 2048 - (2048 * 18/64 + 64) = 1408: the thread says 1280, its process held 128 MiB more
    assert (full - four) / 2**20 == case["figures"][1]["computed"] == 1408


@pytest.mark.parametrize(("cache", "k", "v"), [("q8", 34, 34), ("q6", 34, 18), ("q4", 18, 18)])
def test_blocks(cache, k, v):
    found = memory("exllamav2", LLAMA2, cache=cache, tokens=1024)
    # 32 layers * 4096 values = 4096 blocks a token and side
    assert (found.k_bytes, found.v_bytes) == (1024 * 4096 * k, 1024 * 4096 * v)
    assert found.caches[1].bytes == 1024 * 8192 * 2


def test_v3_pages_and_bits():
    found = memory("exllamav3", LLAMA2, tokens=1000, cache="6,4")
    assert (found.tokens, found.blocks) == (1024, 4)
    assert (found.k_bytes, found.v_bytes) == (1024 * 4096 * (24 + 2), 1024 * 4096 * (16 + 2))
    # 4 bits and a scale: 18 bytes where fp16 has 64
    four, full = (memory("exl3", LLAMA2, tokens=8192, cq=c).kv_bytes for c in ("q4", "fp16"))
    assert four * 64 == full * 18


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [("exllamav2", {"cache": "q5", "tokens": 8}, "unknown"), ("exllamav2", {}, "tokens is needed"),
     ("exllamav3", {"cache": "9", "tokens": 8}, "2 to 8"), ("exllamav3", {"cache": "4,4,4", "tokens": 8}, "2 to 8")],
)
def test_refusals(engine, flags, words):
    with pytest.raises(KvsimError, match=words):
        memory(engine, LLAMA2, **flags)


def test_narrow_heads_are_refused():
    with pytest.raises(KvsimError, match="divisible by 32"):
        memory("exllamav2", ModelSpec.from_numbers(layers=2, n_heads=4, head_dim=80), cache="q4", tokens=8)
