"""Figures of public logs that nothing was fitted to: every engine's own flags in, every printed digit out."""

import json
import re
from pathlib import Path

import pytest

from kvsim import ModelSpec, memory

CASES = json.loads((Path(__file__).parents[1] / "data" / "engine_logs_more.json").read_text())["cases"]
MIB, GIB = 2**20, 2**30


def answers(case):
    """The engine's answer; one for every block count that the printed decimals of a pool allow."""
    model, flags = ModelSpec.from_numbers(**case["numbers"]), case["flags"]
    pool = case.get("pool_gib")
    if pool is None:
        return [memory(case["engine"], model, **flags)]
    half = 0.5 * 10.0 ** -len(pool.partition(".")[2])
    ends = [(float(pool) + end) * GIB for end in (-half, half)]
    if case["engine"] == "tensorrt-llm":
        low, high = (memory(case["engine"], model, **flags, free_bytes=end).tokens for end in ends)
        size = memory(case["engine"], model, **flags, free_bytes=ends[0]).block_tokens
        return [memory(case["engine"], model, **flags, max_tokens=n) for n in range(low, high + 1, size)]
    low, high = (memory("vllm", model, **flags, pool_bytes=end).blocks for end in ends)
    return [memory("vllm", model, **flags, num_gpu_blocks_override=n) for n in range(low, high + 1)]


def cache(found, name, field="bytes"):
    return sum(getattr(c, field) for c in (*found.caches, *found.states) if c.name == name)


def figure(case, found, name):
    """The answer's figure of that name as the engine writes it."""
    scale = MIB if case["engine"] in ("llama.cpp", "ollama") else GIB
    sizes = {"KV": found.kv_bytes, "K": found.k_bytes, "V": found.v_bytes, "GiB": found.kv_bytes,
             "state": found.state_bytes, "R": cache(found, "recurrent R"), "S": cache(found, "recurrent S"),
             "conv": cache(found, "conv"), "ssm": cache(found, "ssm"), "SWA": cache(found, "SWA"),
             "non-SWA": cache(found, "non-SWA")}  # fmt: skip
    if name in sizes:
        return f"{sizes[name] / scale:.2f}"
    if name.startswith("GPU"):
        return f"{sum(c.bytes for c in found.caches if c.device == name) / scale:.2f}"
    pools = {"full": "attention", "window": "window"}
    if name in ("full K", "window K"):
        return f"{cache(found, pools[name.split()[0]], 'k_bytes') / scale:.2f}"
    if name.endswith(("cells", "window tokens")):
        kind = {"cells": "kv", "window tokens": "window"}.get(name, name.removesuffix(" cells"))
        return str(next(c.tokens for c in found.caches if c.name == kind))
    if name == "padding":
        noted = [re.search(r"waste at most ([\d.]+)%", w) for w in found.warnings]
        return next((m[1] for m in noted if m), None)
    plain = {"tokens": found.tokens, "blocks": found.blocks, "block": found.block_tokens}
    return f"{found.max_concurrency:.2f}" if name == "concurrency" else plain[name]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']}-{c['grade']}")
def test_printed_figures(case):
    told = [{name: figure(case, found, name) for name in case["printed"]} for found in answers(case)]
    assert case["printed"] in told, told[:2]


def test_every_engine_and_grade_is_there():
    assert {c["engine"] for c in CASES} == {"llama.cpp", "ollama", "vllm", "sglang", "tensorrt-llm"}
    assert len({c["id"] for c in CASES}) == len(CASES) >= 60
    assert [sum(c["grade"] == g for c in CASES) for g in "ABC"] == [50, 16, 5]
