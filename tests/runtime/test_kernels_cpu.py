"""Fused attention on the CPU against the eager version: every format, width, grouping and awkward length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from runtime.attention import Rule, attend
from tests.runtime.kernel_stores import assert_fused_is_eager, filled, needs_kernels, oracle, query

pytestmark = needs_kernels

METHODS = [
    "int(bits=8)", "int(bits=4)", "int(bits=2)", "int(bits=4,symmetric=true)", "int(bits=8,symmetric=true)",
    "int(bits=4,group=16)", "int(bits=2,group=32)", "int(bits=8,axis=row)", "int(bits=4,scale_dtype=fp32)",
    "int(bits=4,scale_dtype=bf16)", "int(bits=3)", "int(bits=1)", "int(bits=6)", "int(bits=4,residual=32)",
    "int(bits=8,axis=channel,group=32)", "int(bits=4,axis=channel,group=64)", "int(bits=2,axis=channel,group=128)",
    "int(bits=3,axis=channel,group=32)", "int(bits=4,axis=channel,group=32,symmetric=true)", "kivi-2", "kivi-4",
    "float8", "float8(kind=e5m2)", "float8(scale=none)", "q8_0", "q4_0", "gguf(type=q4_1)", "kmeans(bits=4)",
    "kmeans(bits=3)", "kmeans(bits=2,scale=row)", "kmeans(bits=4,per=layer)", "kmeans(bits=1,per=tensor)",
    "k:int(bits=8) v:int(bits=2)", "k:q8_0 v:kmeans(bits=4)", "k:full v:int(bits=4)", "k:float8 v:full",
]  # fmt: skip
LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1001)


@pytest.mark.parametrize("method", METHODS)
def test_every_length(method, monkeypatch):
    for rows in LENGTHS:
        assert_fused_is_eager(filled(method, rows, seed=rows), monkeypatch, seed=rows)


@pytest.mark.parametrize("method", METHODS)
def test_every_width_and_grouping(method, monkeypatch):
    for d, heads, group in ((64, 3, 1), (96, 2, 2), (128, 1, 4), (128, 1, 7), (256, 1, 5), (64, 1, 16)):
        assert_fused_is_eager(filled(method, 150, 3, d, heads, group), monkeypatch)


@pytest.mark.parametrize("method", ["int(bits=8)", "int(bits=4)", "kivi-4", "int(bits=4,group=64)", "full"])
def test_a_last_group_that_is_shorter(method, monkeypatch):
    # 80 = 64 + 16
    assert_fused_is_eager(filled(method, 300, 2, d=80), monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_come_step_by_step(method, monkeypatch):
    # the prompt fills a chunk of 256 rows but for two, so that steps fill it and begin another
    for steps in (1, 2, 3, 40):
        assert_fused_is_eager(filled(method, 254, steps), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["full", "int(bits=4)", "kivi-2", "q8_0", "float8", "kmeans(bits=4)"])
def test_half_precision_and_a_batch(method, dtype, monkeypatch):
    assert_fused_is_eager(filled(method, 300, 5, batch=3, dtype=dtype), monkeypatch, batch=3, dtype=dtype)


@pytest.mark.parametrize("method", ["int(bits=8)", "kivi-2", "float8", "full"])
def test_a_batch_on_one_thread_and_on_two(method, monkeypatch):
    store = filled(method, 3000, 3, d=64, batch=3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_fused_is_eager(store, monkeypatch, batch=3)
            found.append(kernels.decode(store, query(store, batch=3), Rule(0.125)))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["int(bits=4)", "full"])
def test_soft_caps_and_sinks(method, monkeypatch):
    store = filled(method, 500, 1)
    sinks = torch.tensor([0.0, 3.0, -2.0, 8.0, 0.5, 40.0])
    for rule in (Rule(0.125, softcap=20.0), Rule(0.125, sinks=sinks), Rule(0.3, 5.0, sinks)):
        assert_fused_is_eager(store, monkeypatch, rule)


def test_logits_that_would_overflow_alone(monkeypatch):
    # softmax must subtract the largest logit, also across blocks and chunks that end after it
    store = filled("int(bits=8)", 2000, 1)
    assert_fused_is_eager(store, monkeypatch, Rule(30.0))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 700), st.integers(0, 4), st.sampled_from([32, 64, 96, 160]),
       st.integers(1, 3), st.integers(1, 9), st.integers(1, 2), st.integers(0, 10**6))
def test_any_shape(method, rows, steps, d, heads, group, batch, seed):
    with pytest.MonkeyPatch.context() as patch:
        store = filled(method, rows, steps, d, heads, group, batch, seed=seed)
        q = query(store, seed, batch=batch)
        found = kernels.decode(store, q, Rule(d**-0.5))
        if found is None:  # 32 channels of 1 bit are a word, 2 x 16 groups of other widths may be none
            assert "words" in kernels.path(store) or "full" in method
            return
        torch.testing.assert_close(found, oracle(store, q, Rule(d**-0.5), patch), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("basis", ["svd(rank=16)", "random_projection(rank=32)", "svd(rank=32,joint=heads)"])
def test_latents(basis, monkeypatch):
    for chain in (f"{basis} | int(bits=4)", f"{basis} | int(bits=8,residual=16)", basis):
        assert_fused_is_eager(filled(chain, 400, 3), monkeypatch)


@pytest.mark.parametrize("policy", ["snapkv(budget=0.25)", "pyramid(budget=0.5)"])
def test_rows_that_a_policy_kept(policy, monkeypatch):
    assert_fused_is_eager(filled(f"{policy} | int(bits=4)", 600, 2), monkeypatch)


LEAVING = [
    "window(recent=40) | int(bits=4)",
    "window(recent=100,sinks=5) | q8_0",
    "window(recent=290,sinks=0) | float8",
    "stride(every=3,recent=20) | int(bits=8)",
]


@pytest.mark.parametrize("method", LEAVING)
def test_rows_that_leave_by_position(method, monkeypatch):
    for prompt, steps in ((20, 1), (200, 1), (300, 25)):
        assert_fused_is_eager(filled(method, prompt, steps), monkeypatch)


def test_a_sliding_layer(monkeypatch):
    for prompt, steps in ((30, 1), (50, 1), (250, 30)):
        assert_fused_is_eager(filled("int(bits=4)", prompt, steps, window=50), monkeypatch)


@pytest.mark.parametrize("size", [16, 10, 64])
@pytest.mark.parametrize("chain", ["int(bits=4)", "full", "kivi-4", "int(bits=4,axis=channel,group=32)"])
def test_selected_pages_without_gathering(size, chain, monkeypatch):
    for prompt, batch in ((700, 1), (333, 2)):
        store = filled(f"pages(size={size},top=0.3,dense_layers=0) | {chain}", prompt, 1, batch=batch)
        assert_fused_is_eager(store, monkeypatch, batch=batch)


def test_attend_takes_the_kernels_and_returns_the_step():
    store = filled("int(bits=4)", 300, 1)
    q = query(store)
    out, step = attend(store, q, Rule(0.125))
    assert torch.equal(out, kernels.decode(store, q, Rule(0.125)))
    assert (step.rows, step.new, step.seen) == (301, 1, 301)


def test_what_has_no_kernel_is_eager_and_says_why(monkeypatch):
    store = filled("int(bits=4)", 300, 1)
    assert kernels.path(store) == "fused cpu int4 | int4"
    assert kernels.decode(store, query(store).expand(-1, -1, 2, -1), Rule(0.125)) is None  # two tokens at once
    assert kernels.path(filled("log(bits=4)", 20, 1)) == "eager: k: no kernel reads log"
    assert "corrects" in kernels.path(filled("int(bits=2)+outliers(fraction=0.01)", 20, 1))
    assert "weights" in kernels.path(filled("h2o(budget=0.5) | int(bits=4)", 20, 0))
    monkeypatch.setenv("KVSIM_KERNELS", "eager")
    assert kernels.path(store) == "eager: k: KVSIM_KERNELS=eager"
    assert kernels.decode(store, query(store), Rule(0.125)) is None
