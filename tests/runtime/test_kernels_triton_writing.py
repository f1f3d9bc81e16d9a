"""Triton writes the bytes that the format's twin writes; its kernels compile for GPUs that are not here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kvsim.errors import KvsimError
from tests.runtime.kernel_stores import DEVICE, filled

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: its kernels do not exist")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("int(bits=8)", torch.bfloat16), ("int(bits=4)", torch.float32), ("int(bits=2,group=32)", torch.float16),
     ("int(bits=1)", torch.float32), ("int(bits=4,symmetric=true)", torch.bfloat16), ("kivi-2", torch.float32),
     ("int(bits=8,axis=row,scale_dtype=bf16)", torch.float16), ("int(bits=4,scale_dtype=fp32)", torch.bfloat16),
     ("int(bits=2,group=24)", torch.float32), ("int(bits=5)", torch.float32)],
)  # fmt: skip
def test_a_step_writes_the_bytes_that_the_twin_writes(method, dtype, monkeypatch):
    def written():
        store = filled(method, 250, 12, d=80, batch=2, dtype=dtype, device=DEVICE)
        return store, [b.read().clone() for side in store.sides.values() for b in side.encoded.values()]

    monkeypatch.setenv("KVSIM_KERNELS", "triton")
    fused, found = written()
    monkeypatch.setenv("KVSIM_KERNELS", "eager")
    eager, wanted = written()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    sizes = [[(name, p.nbytes, p.allocated) for name, p in store.pages()] for store in (fused, eager)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("method", ["int(bits=4)", "int(bits=4,symmetric=true)"])
def test_constant_and_tiny_and_huge_groups(method, monkeypatch):
    rows = torch.tensor([0.0, 1.0, -3.0, 1e-30, -1e-7, 3e4, 6e4]).view(1, 1, 7, 1).expand(1, 2, 7, 64).contiguous()
    found = []
    for mode in ("triton", "eager"):
        monkeypatch.setenv("KVSIM_KERNELS", mode)
        store = filled(method, 20, device=DEVICE)
        store.append(rows.to(DEVICE), rows.to(DEVICE), torch.arange(20, 27, device=DEVICE)[None])
        store.settle()
        found.append(store.keys.read())
    assert torch.equal(*found)
    assert not found[0].isnan().any()


def test_what_overflows_a_scale_is_still_an_error(monkeypatch):
    monkeypatch.setenv("KVSIM_KERNELS", "triton")
    store = filled("int(bits=8)", 20, device=DEVICE)
    huge = torch.full((1, 2, 1, 64), 1e8, device=DEVICE)
    huge[..., 0] = -1e8
    store.append(huge, huge, torch.tensor([[20]], device=DEVICE))
    with pytest.raises(KvsimError, match="scale"):
        store.settle()


def test_triton_is_imported_only_where_its_kernels_run():
    # torch imports Triton by itself where it is installed: what counts is that our kernels stay away
    code = (
        "import sys, torch\n"
        "from tests.runtime.kernel_stores import filled, query\n"
        "from runtime import kernels\n"
        "from runtime.attention import Rule, attend\n"
        "store = filled('int(bits=4)', 40, 2)\n"
        "attend(store, query(store), Rule(0.125))\n"
        "print('runtime.kernels.triton_decode' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def compiled(*cases):
    """What came of compiling for GPUs that are not here, in a process that does not interpret."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "KVSIM_KERNELS": "eager"}
    done = subprocess.run([sys.executable, "-m", "tests.runtime.triton_ahead", json.dumps(cases)], cwd=ROOT, env=env,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_kernels_compile_without_a_gpu():
    for found in compiled(["int(bits=4)", 128, 4, "bfloat16", 80], ["write", 128, 4, "bfloat16", 80]):
        assert found["code"] > 0
        # more would not fit a multiprocessor of the smallest GPU that is compiled for
        assert found["shared"] <= 96 * 1024
        # bytes of codes are fetched 16 at a time and ahead, not one by one
        if found["what"] != "write":
            assert found["ahead"] > 0


@pytest.mark.slow
def test_every_format_compiles_for_two_generations():
    from tests.runtime.test_kernels_triton import METHODS

    cases = [[method, 128, 4, "bfloat16", 80] for method in METHODS]
    cases += [["kivi-2", 80, 1, "float16", 90], ["int(bits=4)", 96, 8, "float32", 90]]
    cases += [["full", 256, 64, "bfloat16", 90], ["int(bits=4)", 512, 16, "bfloat16", 90]]
    cases += [["svd(rank=48,rope=pre) | int(bits=4)", 128, 4, "bfloat16", 80], ["kivi-2", 128, 4, "bfloat16", 90]]
    cases += [["int(bits=4,axis=channel,rope=pre)", 80, 4, "float16", 80]]
    cases += [["q4_0", 64, 8, "float32", 80], ["write", 80, 1, "float32", 90]]
    for found in compiled(*cases):
        assert found["code"] > 0, found
        assert found["shared"] <= 160 * 1024, found
