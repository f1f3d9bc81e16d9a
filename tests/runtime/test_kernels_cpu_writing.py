"""Interleaved buffers hold the rows that plain ones do, and the kernels write the bytes that the formats' twins do."""

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from runtime.buffers import Paged, Tail
from runtime.kernels import bench, bench_step, load
from runtime.kernels.tiled import TiledPaged
from tests.runtime.kernel_stores import filled, needs_kernels


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_interleaved_rows_are_plain_rows(data):
    layouts = [(16, 4, torch.uint8), (4, 1, torch.uint8), (16, 1, torch.float16)]
    tile, element, dtype = data.draw(st.sampled_from(layouts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    like = torch.zeros(2, 3, 0, 12, dtype=dtype)
    plain, tiled = Paged(like, 32), TiledPaged(like, 32, tile, element)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = plain.rows
        change = data.draw(st.sampled_from(["append", "append", "truncate", "runs", "keep", "put", "front", "picked"]))
        count = data.draw(st.integers(1, 70))
        x = torch.randint(0, 250, (2, 3, count, 12), generator=generator).to(dtype)
        if change == "append" or not rows:
            plain.append(x), tiled.append(x)
        elif change == "truncate":
            left = data.draw(st.integers(0, rows))
            plain.truncate(left), tiled.truncate(left)
        elif change == "runs":
            first = data.draw(st.integers(0, rows - 1))
            runs = [(0, first // 2), (first, rows)]
            plain.keep_runs(runs), tiled.keep_runs(runs)
        elif change == "front":
            plain.drop_front(rows // 2), tiled.drop_front(rows // 2)
        elif change == "picked":
            index = torch.tensor([1, 0])
            plain, tiled = plain.picked(index), tiled.picked(index)
        else:
            index = torch.stack([torch.randperm(rows, generator=generator) for _ in range(6)]).view(2, 3, rows)
            if change == "keep":
                index = index[:, :, : max(1, rows // 2)].sort(-1).values
                plain.keep(index), tiled.keep(index)
            else:
                some = min(rows, count)
                plain.put(index[:, :, :some], x[:, :, :some]), tiled.put(index[:, :, :some], x[:, :, :some])
        assert torch.equal(plain.read(), tiled.read())
        assert (plain.shape, plain.nbytes, plain.allocated, plain.capacity) == (
            tiled.shape, tiled.nbytes, tiled.allocated, tiled.capacity)
        low = data.draw(st.integers(0, plain.rows))
        assert torch.equal(plain.read(low, low + 20), tiled.read(low, low + 20))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(["one", "two", "apart", "front", "cut", "keep", "put", "picked", "look"]), max_size=12))
def test_a_row_that_is_lent_is_a_row(changes):
    plain, tail = (kind(torch.zeros(2, 3, 0, 4), 8) for kind in (Paged, Tail))
    for i, change in enumerate(changes):
        rows = plain.rows
        if change in ("one", "two"):
            x = torch.rand(2, 3, 1 if change == "one" else 2, 4)
        elif change == "apart":  # sequences lie further apart than heads do: such a row is copied
            x = torch.rand(2, 9, 1, 4)[:, :3]
        elif change == "keep" and rows:
            x = torch.arange(rows).expand(2, 3, rows)[:, :, i % rows :]
        else:
            x = torch.full((2, 3, 1, 4), float(i))
        for each in (plain, tail):
            if change in ("one", "two", "apart"):
                each.append(x)
            elif change == "front":
                each.drop_front(min(1, rows))
            elif change == "cut":
                each.truncate(max(0, rows - 1))
            elif change == "keep" and rows:
                each.keep(x)
            elif change == "put" and rows:
                each.put(torch.zeros(2, 3, 1, dtype=torch.int64), x)
        if change == "picked":
            plain, tail = (each.picked(torch.tensor([1, 0])) for each in (plain, tail))
        if change == "look":
            assert plain.allocated == tail.allocated
        assert (plain.shape, plain.nbytes) == (tail.shape, tail.nbytes)
        assert torch.equal(plain.read(), tail.read())
    assert (plain.allocated, plain.capacity) == (tail.allocated, tail.capacity)
    assert torch.equal(plain.read(), tail.read())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "method",
    ["int(bits=8)", "int(bits=4)", "int(bits=2,group=24)", "int(bits=3)", "int(bits=5)", "int(bits=4,symmetric=true)",
     "int(bits=2,symmetric=true)", "int(bits=8,axis=row,scale_dtype=bf16)", "int(bits=4,scale_dtype=fp32)", "kivi-2",
     "int(bits=4,residual=16)"],
)  # fmt: skip
def test_a_step_writes_the_bytes_that_the_twin_writes(method, dtype, monkeypatch):
    def written():
        store = filled(method, 250, 30, d=80, batch=2, dtype=dtype)
        return store, [b.read().clone() for side in store.sides.values() for b in side.encoded.values()]

    fused, found = written()
    monkeypatch.setenv("KVSIM_KERNELS", "eager")
    eager, wanted = written()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    sizes = [[(name, p.nbytes, p.allocated) for name, p in store.pages()] for store in (fused, eager)]
    assert sizes[0] == sizes[1]


@needs_kernels
def test_constant_and_tiny_and_huge_groups(monkeypatch):
    rows = torch.tensor([0.0, 1.0, -3.0, 1e-30, -1e-7, 3e4, 6e4]).view(1, 1, 7, 1).expand(1, 2, 7, 64).contiguous()
    for method in ("int(bits=4)", "int(bits=4,symmetric=true)"):
        found = []
        for mode in ("auto", "eager"):
            monkeypatch.setenv("KVSIM_KERNELS", mode)
            store = filled(method, 20)
            store.append(rows, rows, torch.arange(20, 27)[None])
            store.settle()
            found.append(store.keys.read())
        assert torch.equal(*found)
        assert not found[0].isnan().any()


@needs_kernels
def test_what_overflows_a_scale_is_still_an_error():
    store = filled("int(bits=8)", 20)
    huge = torch.full((1, 2, 1, 64), 1e8)
    huge[..., 0] = -1e8
    store.append(huge, huge, torch.tensor([[20]]))
    with pytest.raises(KvsimError, match="scale"):
        store.settle()


def test_without_a_compiler_it_is_said_once_and_runs(tmp_path):
    code = (
        "import torch\n"
        "from tests.runtime.kernel_stores import filled, query\n"
        "from runtime import kernels\n"
        "from runtime.attention import Rule, attend\n"
        "store = filled('int(bits=4)', 40, 2)\n"
        "print(kernels.path(store), attend(store, query(store), Rule(0.125))[0].shape)\n"
    )
    env = {"PATH": str(tmp_path), "KVSIM_KERNELS": "auto", "PYTHONPATH": str(load.SOURCES.parents[2]),
           "TORCH_EXTENSIONS_DIR": str(tmp_path)}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("kvsim: no CPU kernels") == 1
    assert done.stdout.startswith("eager: k: c++ ")  # ninja may lie beside this Python
    assert "not found torch.Size([1, 6, 1, 64])" in done.stdout


def test_a_compiler_that_does_not_work_is_none(tmp_path, monkeypatch, capsys):
    # as the one that a system without its developer tools has
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    load.library.cache_clear()
    try:
        why = load.library()
    finally:
        load.library.cache_clear()
    assert isinstance(why, str)
    assert capsys.readouterr().err.splitlines()[-1].startswith("kvsim: no CPU kernels (")
    assert not list((tmp_path / "built").glob("*"))


@pytest.mark.parametrize(("mode", "said"), [("eagre", "did you mean 'eager'?"), ("EAGER", "auto, eager, triton")])
def test_an_unknown_switch_is_an_error(mode, said, monkeypatch):
    monkeypatch.setenv("KVSIM_KERNELS", mode)
    with pytest.raises(KvsimError, match="KVSIM_KERNELS=") as caught:
        filled("int(bits=4)", 40, 2)
    assert said in str(caught.value)
    monkeypatch.setenv("KVSIM_KERNELS", "")  # as not set
    assert load.switch() == "auto"


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("flags", [["-mavx2", "-mfma", "-mf16c"], ["-O2"]], ids=["avx2", "least"])
def test_the_same_source_without_avx512(flags, monkeypatch):
    if load.library().lanes != 16:
        pytest.skip("this machine has no AVX-512: the other tests ran without")
    from tests.runtime import test_kernels_cpu as cases

    monkeypatch.setattr(load, "machine_flags", lambda: flags)
    load.library.cache_clear()
    try:
        assert load.library().level == 0
        for method in cases.METHODS:
            cases.test_every_length(method, monkeypatch)
    finally:
        load.library.cache_clear()


@pytest.mark.parametrize("command", [bench.main, bench_step.main])
@pytest.mark.parametrize(("words", "said"), [
    (["--methods", "imt(bits=4)"], "imt"),
    (["--tokens", "0"], "--tokens"), (["--threads", "0"], "--threads"), (["--rounds", "1"], "--rounds"),
])  # fmt: skip
def test_benches_say_what_is_wrong(command, words, said):
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert said in done.output
