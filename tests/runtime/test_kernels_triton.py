"""Triton's attention against the eager version: interpreted on the CPU, compiled where there is a GPU."""

from importlib.util import find_spec

import pytest
import torch

from runtime import kernels
from runtime.attention import Rule, attend
from tests.runtime.kernel_stores import DEVICE, assert_fused_is_eager, filled, query, rotation

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: its kernels do not exist")

METHODS = [
    "full", "int(bits=8)", "int(bits=4)", "int(bits=2)", "int(bits=4,symmetric=true)", "int(bits=8,symmetric=true)",
    "int(bits=4,group=16)", "int(bits=2,group=24)", "int(bits=8,axis=row)", "int(bits=4,scale_dtype=fp32)",
    "int(bits=4,scale_dtype=bf16)", "int(bits=3)", "int(bits=1)", "int(bits=6)", "int(bits=4,residual=32)",
    "int(bits=8,axis=channel,group=32)", "int(bits=4,axis=channel,group=64)", "int(bits=2,axis=channel,group=128)",
    "int(bits=3,axis=channel,group=16)", "int(bits=4,axis=channel,group=32,symmetric=true)", "kivi-2", "kivi-4",
    "float8", "float8(kind=e5m2)", "float8(scale=none)", "q8_0", "q4_0", "gguf(type=q4_1)", "kmeans(bits=4)",
    "kmeans(bits=3)", "kmeans(bits=2,scale=row)", "kmeans(bits=4,per=layer)", "kmeans(bits=1,per=tensor)",
    "kmeans(bits=6)", "k:int(bits=8) v:int(bits=2)", "k:q8_0 v:kmeans(bits=4)", "k:full v:int(bits=4)",
    "k:float8 v:full",
]  # fmt: skip
FEW = ["full", "int(bits=8)", "int(bits=4)", "int(bits=2)", "kivi-2", "float8", "kmeans(bits=4)"]
TILE = 64
LENGTHS = (1, 15, 31, 33, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE + 1, 255, 256, 257, 500)
SHAPES = [(64, 1, 8, 2), (80, 2, 1, 1), (96, 1, 4, 1), (128, 2, 4, 1), (256, 1, 5, 1), (64, 1, 17, 1)]
"""Width, KV heads, queries of each, sequences."""


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    monkeypatch.setenv("KVSIM_KERNELS", "triton")


def check(monkeypatch, method, prompt, steps=0, **shape):
    seed = shape.get("seed", 1)
    store = filled(method, prompt, steps, device=DEVICE, **shape)
    batch, dtype = shape.get("batch", 1), shape.get("dtype", torch.float32)
    assert_fused_is_eager(store, monkeypatch, seed=seed, batch=batch, dtype=dtype)


@pytest.mark.parametrize("method", METHODS)
def test_every_format(method, monkeypatch):
    # a row alone, a block and one row more of which the last is not encoded yet, two splits with a batch
    check(monkeypatch, method, 1, heads=1)
    check(monkeypatch, method, TILE, 1)
    check(monkeypatch, method, 150, 2, heads=1, group=4, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_length(method, monkeypatch):
    for rows in LENGTHS:
        check(monkeypatch, method, rows, heads=1, seed=rows)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_width_and_grouping(method, monkeypatch):
    for d, heads, group, batch in SHAPES:
        if d % 32 == 0 or not any(kind in method for kind in ("q8_0", "q4_0", "gguf")):
            check(monkeypatch, method, 140, 2, d=d, heads=heads, group=group, batch=batch)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("method", ["int(bits=4)", "kivi-2", "k:full v:int(bits=2)"])
def test_widths_and_groupings(method, shape, monkeypatch):
    d, heads, group, batch = shape
    check(monkeypatch, method, 70, 2, d=d, heads=heads, group=group, batch=batch)


@pytest.mark.parametrize("method", ["int(bits=4)", "kivi-4", "q8_0"])
def test_rows_that_come_step_by_step(method, monkeypatch):
    # the prompt fills a chunk of 256 rows but for two, so that steps fill it and begin another
    for steps in (2, 3, 20):
        check(monkeypatch, method, 254, steps, heads=1, group=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", FEW)
def test_half_precision(method, dtype, monkeypatch):
    check(monkeypatch, method, 100, 3, heads=1, batch=2, dtype=dtype)


@pytest.mark.parametrize("method", ["int(bits=4)", "full"])
def test_soft_caps_and_sinks(method, monkeypatch):
    store = filled(method, 130, 1, device=DEVICE)
    sinks = torch.tensor([0.0, 3.0, -2.0, 8.0, 0.5, 40.0], device=DEVICE)
    for rule in (Rule(0.125, softcap=20.0), Rule(0.125, sinks=sinks), Rule(0.3, 5.0, sinks), Rule(30.0)):
        assert_fused_is_eager(store, monkeypatch, rule)


@pytest.mark.parametrize("basis", ["svd(rank=16)", "random_projection(rank=32)", "svd(rank=20,joint=heads)"])
def test_latents(basis, monkeypatch):
    for chain in (f"{basis} | int(bits=4)", basis):
        check(monkeypatch, chain, 90, 2)


@pytest.mark.parametrize(
    ("method", "d"),
    [("int(bits=4,rope=pre)", 64), ("k:int(bits=2,axis=channel,group=32,rope=pre) v:int(bits=4)", 80),
     ("kmeans(bits=3,rope=pre)", 64), ("svd(rank=20,rope=pre) | int(bits=4)", 64), ("svd(rank=16,rope=pre)", 96)],
)  # fmt: skip
def test_keys_that_are_rotated_after_they_are_decoded(method, d, monkeypatch):
    for prompt, steps, batch in ((40, 1, 1), (150, 3, 2)):
        store = filled(method, prompt, steps, d=d, batch=batch, device=DEVICE, rotation=rotation(d, DEVICE))
        assert kernels.path(store).startswith("fused triton")
        assert_fused_is_eager(store, monkeypatch, batch=batch)


@pytest.mark.parametrize(
    "method",
    ["snapkv(budget=0.25) | int(bits=4)", "window(recent=40) | int(bits=4)", "window(recent=100,sinks=5) | q8_0",
     "stride(every=3,recent=20) | int(bits=8)"],
)  # fmt: skip
def test_rows_that_a_policy_kept(method, monkeypatch):
    for prompt, steps in ((20, 1), (200, 3)):
        check(monkeypatch, method, prompt, steps, heads=1)


def test_a_sliding_layer(monkeypatch):
    for prompt, steps in ((30, 1), (120, 30)):
        check(monkeypatch, "int(bits=4)", prompt, steps, heads=1, window=50)


@pytest.mark.parametrize("size", [16, 10])
@pytest.mark.parametrize("chain", ["int(bits=4)", "full", "kivi-4"])
def test_selected_pages_without_gathering(size, chain, monkeypatch):
    for prompt, batch in ((300, 1), (133, 2)):
        check(monkeypatch, f"pages(size={size},top=0.3,dense_layers=0) | {chain}", prompt, 1, batch=batch)


def test_a_table_of_pages_follows_its_chunks(monkeypatch):
    store = filled("int(bits=4)", 255, 4, heads=1, device=DEVICE)
    assert_fused_is_eager(store, monkeypatch)
    store.crop(100)
    assert_fused_is_eager(store, monkeypatch)
    picked = store.picked(torch.tensor([0, 0], device=DEVICE))
    assert_fused_is_eager(picked, monkeypatch, batch=2)


def test_attend_takes_the_kernels_and_says_so(monkeypatch):
    store = filled("int(bits=4)", 80, 1, device=DEVICE)
    q = query(store)
    assert torch.equal(attend(store, q, Rule(0.125))[0], kernels.decode(store, q, Rule(0.125)))
    assert kernels.path(store) == "fused triton int4 | int4"
    assert kernels.path(filled("log(bits=4)", 20, 1, device=DEVICE)) == "eager: k: no kernel reads log"
    monkeypatch.setenv("KVSIM_KERNELS", "eager")
    assert kernels.path(store) == "eager: k: KVSIM_KERNELS=eager"
