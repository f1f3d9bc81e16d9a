"""Cache lines of the real llama.cpp for tiny files of many architectures: every printed digit is predicted."""

import json
from pathlib import Path

import pytest

from kvsim import ModelSpec, memory
from kvsim.model import Attention, Layer, State

DATA = json.loads((Path(__file__).parents[1] / "data" / "engine_logs_llamacpp_b11549.json").read_text())
MIB = 2**20


def spec(case):
    if case["arch"] == "deepseek4":  # compress ratios 0, 4, 128, 4
        raw = Layer(Attention("sliding", 4, 1, 512, 0, window=128))
        csa = Layer(Attention("csa", 4, 1, 512, 0, window=128, compress=4, compressed_dim=512, index_dim=128))
        hca = Layer(Attention("hca", 4, 1, 512, 0, window=128, compress=128, compressed_dim=512))
        return ModelSpec("v4", "deepseek_v4", (raw, csa, hca, csa), 128, 512)
    if case["arch"] == "lfm2":
        full, conv = Layer(Attention("full", 4, 2, 32, 32)), Layer(states=(State("conv", (128, 3)),))
        return ModelSpec("lfm2", "lfm2", (conv, conv, full) * 2, 128, 512)
    return ModelSpec.from_numbers(**case["numbers"])


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["id"])
def test_real_cache_lines(case):
    flags = dict(case["flags"])
    if flags.get("n_ubatch", 0) > 2048:  # llama.cpp's own default caps it
        flags.setdefault("n_batch", 2048)
    found = memory("llama.cpp", spec(case), **flags)
    mine = [[f"{c.bytes / MIB:.2f}", c.tokens, c.layers, f"{c.k_bytes / MIB:.2f}", f"{c.v_bytes / MIB:.2f}"]
            for c in found.caches]
    assert sorted(mine) == sorted(case["caches"])
    states = {}
    for part in found.states:
        states[part.name] = states.get(part.name, 0) + part.bytes
    for size, r, s in case["state"]:
        both = (states["recurrent R"], states["recurrent S"])
        assert [f"{x / MIB:.2f}" for x in (sum(both), *both)] == [size, r, s]
    for name, size in case["compressors"]:
        key = {"csa": "csa compressor", "hca": "hca compressor", "lid": "indexer compressor"}[name]
        assert f"{states[key] / MIB:.2f}" == size
