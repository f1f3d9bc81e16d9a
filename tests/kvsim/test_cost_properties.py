"""What must hold for every question: positive, finite, monotone, arrays equal scalars, intervals ordered."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.cost import attention_seconds, attention_work, kernel_time, matmul_seconds
from kvsim.hardware import devices, load_device
from kvsim.kernels import FORMATS, MATMUL_DTYPES

DEVICES = {name: load_device(name) for name in devices()}
device = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__)
heads = st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 5, 8, 16, 48]))
shape = {
    "phase": st.sampled_from(["decode", "prefill"]),
    "batch": st.integers(1, 4096),
    "tokens": st.integers(1, 200_000),
    "head_dim": st.sampled_from([32, 64, 80, 96, 128, 192, 256, 512]),
    "format": st.sampled_from(sorted(FORMATS)),
    "window": st.sampled_from([0, 0, 128, 4096]),
    "kernel": st.sampled_from([None, "vllm", "sglang", "trtllm", "fa3", "flashinfer", "eager", "no such kernel"]),
}


@given(device, heads, st.fixed_dictionaries(shape))
@settings(max_examples=150, deadline=None)
def test_attention_is_positive_finite_and_its_interval_holds_it(device, heads, question) -> None:
    answer = attention_seconds(device, n_kv_heads=heads[0], n_heads=heads[0] * heads[1], **question)
    assert 0 < answer.low < answer.seconds < answer.high < np.inf
    assert answer.term in {"launch", "memory", "conversion", "compute", "waves", "combine"}
    assert device.family in answer.coefficients
    assert "\n" not in answer.coefficients


@given(device, heads, st.fixed_dictionaries(shape), st.integers(1, 50_000), st.integers(1, 500))
@settings(max_examples=150, deadline=None)
def test_attention_never_falls_as_tokens_or_batch_grow(device, heads, question, more, wider) -> None:
    def seconds(**change: int) -> float:
        asked = {**question, **change}
        return attention_seconds(device, n_kv_heads=heads[0], n_heads=heads[0] * heads[1], **asked).seconds

    base = seconds()
    assert seconds(tokens=question["tokens"] + more) >= base * (1 - 1e-9)
    assert seconds(batch=question["batch"] + wider) >= base * (1 - 1e-9)


@given(device, st.sampled_from(MATMUL_DTYPES), *[st.integers(1, 2**17)] * 4)
@settings(max_examples=150, deadline=None)
def test_products_are_positive_finite_and_monotone(device, dtype, m, n, k, more) -> None:
    answer = matmul_seconds(device, m=m, n=n, k=k, dtype=dtype)
    assert 0 < answer.low < answer.seconds < answer.high < np.inf
    for grown in ({"m": m + more}, {"n": n + more}, {"k": k + more}):
        assert matmul_seconds(device, **{"m": m, "n": n, "k": k, **grown}, dtype=dtype).seconds >= answer.seconds


@pytest.mark.parametrize("name", ["h100-sxm", "rtx-pro-6000-server", "arc-pro-b60", "epyc-9654", "l40s"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_arrays_equal_scalars(name: str, phase: str) -> None:
    rng = np.random.default_rng(0)
    n = 40_000  # more than one piece
    b, t = rng.integers(1, 512, n), rng.integers(1, 100_000, n)
    d, w = rng.choice([64, 128, 256], n), rng.choice([0, 128, 4096], n)
    asked = {"phase": phase, "n_heads": 32, "n_kv_heads": 8, "format": "fp8"}
    many = attention_seconds(DEVICES[name], batch=b, tokens=t, head_dim=d, window=w, **asked)
    assert many.seconds.shape == many.low.shape == many.term.shape == (n,)
    for i in range(0, n, 997):
        one = attention_seconds(DEVICES[name], batch=int(b[i]), tokens=int(t[i]), head_dim=int(d[i]), window=int(w[i]),
                                **asked)
        assert one.seconds == pytest.approx(many.seconds[i], rel=1e-12)
        assert one.low == pytest.approx(many.low[i], rel=1e-12)
        assert one.high == pytest.approx(many.high[i], rel=1e-12)
        assert one.term == many.term[i]


def test_a_grid_broadcasts() -> None:
    b, t = np.arange(1, 301)[:, None], np.arange(1, 501) * 64
    grid = matmul_seconds(DEVICES["h100-sxm"], m=b, n=t, k=4096).seconds
    assert grid.shape == (300, 500)
    assert grid[7, 9] == pytest.approx(matmul_seconds(DEVICES["h100-sxm"], m=8, n=640, k=4096).seconds, rel=1e-12)
    empty = matmul_seconds(DEVICES["h100-sxm"], m=np.array([], int), n=64, k=64)
    assert empty.seconds.shape == (0,)


def test_the_same_work_on_a_sibling_scales_with_its_datasheet() -> None:
    asked = {"phase": "decode", "batch": 64, "tokens": 32768, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    h100, h200 = (attention_seconds(DEVICES[d], **asked) for d in ("h100-sxm", "h200-sxm"))
    # 3,350 against 4,800 GB/s, and the bf16 kernel is bound by memory
    assert h100.seconds / h200.seconds == pytest.approx(4800 / 3350, rel=0.06)
    assert h200.high / h200.seconds > h100.high / h100.seconds
    # FA3 with fp8 keys and values is bound by conversion: the same 2.2-2.6 TB/s on both
    for one in (attention_seconds(DEVICES[d], format="fp8", **asked) for d in ("h100-sxm", "h200-sxm")):
        moved = 64 * 32768 * 8 * 128 * 2
        assert 2.1e12 < moved / one.seconds < 2.7e12
        assert one.term == "conversion"


def test_fewer_bits_never_help_an_eager_cpu_kernel_and_help_a_fused_one() -> None:
    cpu = DEVICES["epyc-9654"]
    asked = {"phase": "decode", "batch": 1, "tokens": 131072, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    plain = attention_seconds(cpu, format="bf16", **asked).seconds
    assert attention_seconds(cpu, format="int8", kernel="fused", **asked).seconds < plain
    assert attention_seconds(cpu, format="int8", kernel="eager", **asked).seconds > 3 * plain
    assert attention_seconds(cpu, format="int4", kernel="eager", **asked).seconds > 3 * plain
    assert "*/fused" in attention_seconds(cpu, format="int8", **asked).coefficients


def test_a_siblings_cache_is_that_of_its_units_not_of_its_memory() -> None:
    sxm, h200 = DEVICES["h100-sxm"], DEVICES["h200-sxm"]
    row = replace(next(c for c in sxm.coefficients if c.kernel == "sglang/fa3" and c.format == "bf16"), t0_s=0.0,
                  wave_s=0.0, split_s=0.0, element_rates=(), flops_share=1.3)
    # 8 sequences of 8 heads of 64 rows: 2 MB, inside either cache; 132 units at 1,830 MHz in both
    size = attention_work("decode", batch=8, tokens=64, n_heads=8, n_kv_heads=8, head_dim=128, bits=16.0)
    near, same = (dict(kernel_time(d, row, size)[1])["memory"] for d in (sxm, h200))
    assert near == pytest.approx(same)
    far = replace(size, working_set=1e9)
    slow, faster = (dict(kernel_time(d, row, far)[1])["memory"] for d in (sxm, h200))
    assert slow / faster == pytest.approx(h200.bandwidth_bytes_per_s / sxm.bandwidth_bytes_per_s)
