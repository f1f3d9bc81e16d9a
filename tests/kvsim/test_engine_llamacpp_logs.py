"""llama.cpp, ik_llama and ollama figures of public logs, to the last printed digit, from numbers and flags."""

import json
import re
from pathlib import Path

import pytest

from kvsim import ModelSpec, memory

CASES = json.loads((Path(__file__).parents[1] / "data" / "engine_logs.json").read_text())["cases"]
MINE = [c for c in CASES if c["id"].startswith(("lcpp", "oll"))]
FLAGS = {"n_ctx": "n_ctx", "n_parallel": "n_parallel", "n_ubatch": "n_ubatch", "n_rs_seq": "n_rs_seq"}
UNITS = {"MiB": 2**20, "GiB": 2**30}
# What a log shows only as a split or a version, or that the file's `flags` word differently.
EXTRA = {
    "lcpp-01": {"version": "2024-03", "n_gpu_layers": 40, "tensor_split": (12, 28)},
    "lcpp-11": {"version": "2025-06", "mla": False},
    "lcpp-12": {"version": "2024-08"},
    "lcpp-14": {"n_gpu_layers": 15},
    "lcpp-15": {"version": "b7343"},
    "lcpp-16": {"version": "2024-12"},
    "lcpp-17": {"version": "2025-01"},
    "lcpp-18": {"version": "b623"},
    "lcpp-29": {"mtp": True},
    "lcpp-31": {"n_ctx": 4096},
    "lcpp-33": {"n_gpu_layers": 20},
    "lcpp-34": {"version": "b8467"},
    "lcpp-39": {"tensor_split": (55, 8, 8, 8)},
    "lcpp-42": {"n_ctx": 65536},
}
# GLM-5 keeps an indexer in the first three layers and in every fourth one after them.
EXTRA_ARCH = {"lcpp-39": {"indexer_layers": [0, 1, 2, *range(6, 78, 4)]}}


def asked(case):
    flags = {}
    for key, value in case["flags"].items():
        if key in FLAGS:
            flags[FLAGS[key]] = int(re.match(r"\d+", str(value)).group())
        elif key in ("ctk", "ctv", "kv_unified"):
            flags[key] = value
        elif key == "swa_full":
            flags["swa_full"] = True
    return flags | EXTRA.get(case["id"], {})


def answer(case):
    model = ModelSpec.from_numbers(**case["arch"], **EXTRA_ARCH.get(case["id"], {}))
    engine = case["engine"].split()[0]
    if engine == "ollama" and case["id"].startswith("oll"):
        parallel = case["flags"].get("parallel", 1)
        return memory("ollama", model, num_ctx=case["flags"]["n_ctx_total"] // parallel, num_parallel=parallel)
    flags = asked(case)
    if engine == "ik_llama.cpp":
        return memory(engine, model, **flags)
    return memory("llama.cpp", model, **flags)


def total(items, name, device=None):
    return sum(c.bytes for c in items if c.name == name and (device is None or c.device == device))


def value(result, name):
    """What the result says for a figure of the log, in the unit it is printed in (bytes, cells)."""
    def of(which):
        return [c for c in result.caches if c.name == which]

    if name in ("K", "K+V", "V", "memory.required.kv"):
        return {"K": result.k_bytes, "V": result.v_bytes}.get(name, result.k_bytes + result.v_bytes)
    if name in ("SWA cells", "raw SWA cells"):
        return of("SWA")[0].tokens
    if name in ("SWA cache", "raw SWA cache"):
        return total(result.caches, "SWA")
    if name in ("full-attention cache", "non-SWA cache"):
        return total(result.caches, "non-SWA" if of("non-SWA") else "kv")
    if name.startswith("MTP"):
        return total(result.caches, "mtp")
    if name.startswith("indexer"):
        return total(result.caches, "indexer", "GPU0")
    if name.startswith("recurrent"):
        states = {"total": result.state_bytes, "R": total(result.states, "recurrent R"),
                  "S": total(result.states, "recurrent S")}
        return states[name.split()[1]]
    device = {"CUDA0": "GPU0", "CUDA1": "GPU1", "CPU": "CPU", "Vulkan1": "GPU0"}[name.split()[0]]
    return total(result.caches, "kv", device)


def printed_as(case, figure, found):
    """`found` written as the log writes it."""
    if figure["unit"] == "cells":
        return str(found)
    digits = len(figure["printed"].partition(".")[2])
    return f"{found / UNITS[figure['unit']]:.{digits}f}"


def special(case):
    """lcpp-21 prints what the cache was before, with other types."""
    return {"before: q8_0/q8_0": {"ctk": "q8_0", "ctv": "q8_0"}} if case["id"] == "lcpp-21" else {}


@pytest.mark.parametrize("case", MINE, ids=lambda c: f"{c['id']}-{c['grade']}")
def test_printed_figures(case):
    result = answer(case)
    for figure in case["figures"]:
        if figure["name"] in special(case):
            model = ModelSpec.from_numbers(**case["arch"])
            found = memory("llama.cpp", model, n_ctx=32768, **special(case)[figure["name"]]).kv_bytes
        else:
            found = value(result, figure["name"])
        assert printed_as(case, figure, found) == figure["printed"], figure["name"]


def test_every_grade_is_covered():
    grades = [c["grade"] for c in MINE]
    assert [grades.count(g) for g in "ABC"] == [8, 13, 13]


def test_kimi_split_over_four_devices():
    # 10, 15, 19 and 17 layers of 76.5 MiB: the log's 765.00 / 1147.51 / 1453.51 / 1300.51 MiB
    case = next(c for c in MINE if c["id"] == "lcpp-24")
    model = ModelSpec.from_numbers(**case["arch"])
    split = memory("ik_llama.cpp", model, n_ctx=131072, ctk="q8_0", ts="10,15,19,18")
    assert [round(c.bytes / 2**20, 1) for c in split.caches] == [765.0, 1147.5, 1453.5, 1300.5]
