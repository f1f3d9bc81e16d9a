"""Times by hand: each term alone, with its arithmetic; arrays, bad input."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.coefficients import Coefficient
from kvsim.cost import (
    KernelWork,
    allreduce_seconds,
    attention_seconds,
    attention_work,
    kernel_seconds,
    kernel_time,
    matmul_seconds,
    product_time,
)
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile, load_device

DEVICE = HardwareProfile("toy", "nobody", "toy", "hopper", "gpu", 2**30, "1 GiB", 1e12, {"bf16": 1e14, "fp8": 2e14},
                         "switch", last_level_cache_bytes=10_000_000, units=100, clock_hz=1e9,
                         interconnect_bytes_per_s=100e9)
BARE = Coefficient("decode", "toy/toy", "bf16", t0_s=0.0, bandwidth_share=0.5, flops_share=0.1, max_splits=1e4)
H100 = load_device("h100-sxm")


def own(*rows: Coefficient) -> HardwareProfile:
    return replace(DEVICE, own_coefficients=rows)


def test_decode_work_by_hand() -> None:
    # 2 sequences * 4 KV heads * 128 * (K and V) = 2,048 values a row; 1,000 rows: 2,048,000 values of 1 byte,
    # and 2 * 8 heads * 128 * 2 bytes in and out = 8,192 bytes of queries and outputs.
    work = attention_work("decode", batch=2, tokens=1000, n_heads=8, n_kv_heads=4, head_dim=128, bits=8)
    assert work.elements == 2_048_000
    assert work.bytes_moved == 2_048_000 + 8_192
    assert work.flops == 4 * 2 * 8 * 128 * 1000
    assert work.blocks == 8
    assert work.q_per_kv == 2


def test_a_window_bounds_what_is_read() -> None:
    full = attention_work("decode", batch=1, tokens=300, n_heads=8, n_kv_heads=8, head_dim=64, bits=16)
    cut = attention_work("decode", batch=1, tokens=5000, n_heads=8, n_kv_heads=8, head_dim=64, bits=16, window=300)
    assert cut.bytes_moved == full.bytes_moved
    assert (full.cut, cut.cut) == (0.0, 1.0)


def test_prefill_work_by_hand() -> None:
    # Causal pairs of 256 tokens: 256 * 257 / 2 = 32,896, and a quarter tile (32) more a row for whole diagonal tiles.
    work = attention_work("prefill", batch=1, tokens=256, n_heads=4, n_kv_heads=2, head_dim=64, bits=16)
    assert work.flops == 4 * 4 * 64 * (32_896 + 32 * 256)
    assert work.blocks == 4 * 2  # heads * ceil(256 / 128)
    # keys and values 2 * 2 * 64 * 256 * 2 bytes, queries in and outputs out 4 * 64 * 256 * 2 bytes each
    assert work.bytes_moved == 131_072 + 262_144
    windowed = attention_work("prefill", batch=1, tokens=256, n_heads=4, n_kv_heads=2, head_dim=64, bits=16, window=100)
    # each of the first 100 rows sees itself and what is before, the other 156 see 100: 5,050 + 15,600
    assert windowed.flops == 4 * 4 * 64 * (5_050 + 15_600 + 32 * 256)


def test_memory_alone() -> None:
    # 1e9 bytes at 0.5 * 1e12 bytes/s = 2 ms
    seconds, _ = kernel_time(DEVICE, BARE, KernelWork(1e9, blocks=100.0))
    assert seconds == pytest.approx(2e-3)


def test_cache_serves_what_fits_and_half_way_half() -> None:
    c = replace(BARE, cache_multiple=2.0, cache_reach=0.5)  # all of 5 MB, nothing of 10 MB
    times = kernel_time(DEVICE, c, KernelWork(np.array([4e6, 7.5e6, 20e6]), blocks=100.0))[0]
    # 4e6 / 2e12 = 2 us; 7.5e6 * (1/2e12 + 1/0.5e12) / 2 = 9.375 us; 20e6 / 0.5e12 = 40 us
    assert times == pytest.approx([2e-6, 9.375e-6, 40e-6])
    # 4 MB taken from a working set of 20 MB come from DRAM: 4e6 / 0.5e12 = 8 us
    assert kernel_time(DEVICE, c, KernelWork(4e6, blocks=100.0, working_set=20e6))[0] == pytest.approx(8e-6)


def test_conversion_is_a_ceiling_of_its_own() -> None:
    c = replace(BARE, element_rates=((64, 1.0), (256, 4.0)))
    # 1e9 values at 1 a clock on 100 units of 1 GHz = 10 ms; at head_dim 128, half way in log, 2 a clock = 5 ms
    for head_dim, seconds in ((64, 10e-3), (128, 5e-3), (256, 2.5e-3), (512, 2.5e-3), (32, 10e-3)):
        work = KernelWork(1.0, elements=1e9, blocks=100.0, head_dim=head_dim)
        assert kernel_time(DEVICE, c, work)[0] == pytest.approx(seconds)
    many = kernel_time(DEVICE, c, KernelWork(1.0, elements=1e9, blocks=100.0, head_dim=np.array([64, 128])))[0]
    assert many == pytest.approx([10e-3, 5e-3])
    halved = kernel_time(DEVICE, c, KernelWork(1.0, elements=1e9, blocks=100.0), rate_factor=0.5)[0]
    assert halved == pytest.approx(10e-3)


def test_groups_above_the_limit_read_once_for_each_query_head() -> None:
    c = replace(BARE, element_rates=((128, 1.0),), group_limit=32)
    times = kernel_time(DEVICE, c, KernelWork(1.0, elements=1e8, blocks=100.0, q_per_kv=np.array([32, 40])))[0]
    assert times == pytest.approx([1e-3, 40e-3])


def test_idle_units_cost() -> None:
    c = replace(BARE, element_rates=((128, 1.0),), max_splits=1.0)
    # one block on 100 units: 1e8 values on one unit at 1e9/s = 100 ms; 150 blocks take two rounds where 1.5 would do
    assert kernel_time(DEVICE, c, KernelWork(1.0, 1e8, blocks=1.0, rows=1e6))[0] == pytest.approx(0.1)
    assert kernel_time(DEVICE, c, KernelWork(1.0, 1e8, blocks=150.0))[0] == pytest.approx(1e-3 * 2 / 1.5)
    # free to split 1e6 rows into 100 parts, the same block keeps every unit busy: 1 ms
    split = replace(c, max_splits=1e4)
    assert kernel_time(DEVICE, split, KernelWork(1.0, 1e8, blocks=1.0, rows=1e6))[0] == pytest.approx(1e-3)
    # but 128 rows make two parts of 64 only: 50 ms
    assert kernel_time(DEVICE, split, KernelWork(1.0, 1e8, blocks=1.0, rows=128.0))[0] == pytest.approx(0.05)


def test_additive_terms() -> None:
    c = replace(BARE, t0_s=1e-6, wave_s=2e-6, split_s=4e-6, window_s=8e-6)
    # 250 blocks on 100 units: 3 waves, 6 us; 1,024 rows: 4 us * (1 - 256 / 1,024) = 3 us; window 8 us; launch 1 us
    assert kernel_time(DEVICE, c, KernelWork(0.0, blocks=250.0, rows=1024.0, cut=1.0))[0] == pytest.approx(18e-6)


def test_the_maximum_is_sharp_in_decode_and_soft_in_prefill() -> None:
    # 1e9 bytes: 2 ms; 2e10 FLOP at 0.1 * 1e14: 2 ms. Decode: 2 * 2^(1/8); prefill over 100 equal blocks: waves = 1,
    # compute 2 * sqrt(1 + 1): sqrt(4 + 8) ms.
    work = KernelWork(1e9, flops=2e10, blocks=100.0)
    assert kernel_time(DEVICE, BARE, work)[0] == pytest.approx(2e-3 * 2 ** (1 / 8))
    assert kernel_time(DEVICE, replace(BARE, op="prefill"), work)[0] == pytest.approx(12**0.5 * 1e-3)


def test_matrix_product_by_hand() -> None:
    c = replace(BARE, op="matmul", kernel="*", t0_s=5e-6, step_s=1e-6)
    seconds, parts = product_time(DEVICE, c, m=1000, n=4096, k=2048, dtype="bf16")
    memory = (4096 * 2048 * 2 + 1000 * (2048 + 4096) * 2) / 0.5e12
    compute = 2 * 1000 * 4096 * 2048 / 1e13
    assert dict(parts)["memory"] == pytest.approx(memory)
    assert dict(parts)["compute"] == pytest.approx(compute)
    assert seconds == pytest.approx(5e-6 + 2e-6 + (memory**2 + compute**2) ** 0.5)


def test_weights_only_formats_move_fewer_bytes_and_compute_in_16_bit() -> None:
    c = replace(BARE, op="matmul", kernel="*")
    parts = {d: dict(product_time(DEVICE, c, m=1, n=4096, k=4096, dtype=d)[1]) for d in ("bf16", "int8_wo", "int4_wo")}
    act = 2 * (4096 + 4096)
    assert parts["int8_wo"]["memory"] == pytest.approx((4096**2 + act) / 0.5e12)
    assert parts["int4_wo"]["memory"] == pytest.approx((4096**2 * 4.25 / 8 + act) / 0.5e12)
    assert parts["int8_wo"]["compute"] == parts["bf16"]["compute"]
    # fp8: the peak doubles, activations are also written and read as bytes (2 more a value of x)
    fp8 = dict(product_time(DEVICE, c, m=1, n=4096, k=4096, dtype="fp8")[1])
    assert fp8["compute"] == pytest.approx(parts["bf16"]["compute"] / 2)
    assert fp8["memory"] == pytest.approx((4096**2 + act + 2 * 4096) / 0.5e12)


def test_interval_follows_the_regime_and_the_stretch() -> None:
    c = replace(BARE, t0_s=1e-3, log_error=(-0.5, 0.0, 0.4), memory_log_error=(-0.1, 0.0, 0.2), devices=("toy",))
    answer = kernel_seconds(own(c), "decode", KernelWork(np.array([1e9, 1e6]), blocks=100.0))
    # 2 ms of 3 ms are memory; 2 us of 1 ms are not
    assert answer.memory_bound.tolist() == [True, False]
    assert answer.low / answer.seconds == pytest.approx(np.exp([-0.1, -0.5]))
    assert answer.high / answer.seconds == pytest.approx(np.exp([0.2, 0.4]))
    other = kernel_seconds(own(replace(c, devices=("sibling",))), "decode", KernelWork(1e6, blocks=100.0))
    assert other.high / other.seconds == pytest.approx(np.exp((0.4**2 + 0.16**2) ** 0.5))
    assert "measured on sibling" in other.coefficients


def test_terms_are_named() -> None:
    def term(**sizes: int) -> object:
        return attention_seconds(H100, phase="decode", n_heads=32, n_kv_heads=8, head_dim=128, **sizes).term

    assert term(batch=1, tokens=16) == "launch"
    assert term(batch=64, tokens=32768) == "memory"
    assert term(batch=1024, tokens=16) == "waves"
    assert attention_seconds(H100, phase="prefill", batch=1, tokens=16384, n_heads=32, n_kv_heads=8,
                             head_dim=128).term == "compute"
    both = attention_seconds(H100, phase="decode", batch=[1, 64], tokens=[16, 32768], n_heads=32, n_kv_heads=8,
                             head_dim=128).term
    assert both.tolist() == ["launch", "memory"]


def test_allreduce_by_hand() -> None:
    # 4 ranks: 5 us + 6 * 1.5 us + 2 * 3 / 4 * 1e8 / (0.83 * 1e11) = 14 us + 1.8072 ms
    assert allreduce_seconds(DEVICE, 1e8, 4).seconds == pytest.approx(14e-6 + 1.5e8 / 83e9)
    assert allreduce_seconds(DEVICE, 1e8, 1).seconds == 0.0
    mesh = replace(DEVICE, topology="mesh")
    # two ranks of a mesh share one of seven links: 1e8 / (0.75 * 1e11 / 7)
    assert allreduce_seconds(mesh, 1e8, 2).seconds == pytest.approx(5e-6 + 5e-6 + 7e8 / 75e9)
    assert allreduce_seconds(DEVICE, np.array([1e6, 1e8]), 8).seconds.shape == (2,)
    # small sums are read from all peers at once: 8 us + 3 x 16 kB over 35% of 100 GB/s, less than a ring's 14 us
    small = allreduce_seconds(DEVICE, 16e3, 4)
    assert small.seconds == pytest.approx(8e-6 + 3 * 16e3 / 35e9)
    assert small.term == "launch"
    with pytest.raises(KvsimError, match="no known links"):
        allreduce_seconds(replace(DEVICE, topology="none"), 1.0, 2)


@pytest.mark.parametrize(
    ("ranks", "size", "low", "high"),  # us: the two kernels of sgl-project/sglang PR #2904 on H100
    [(2, 32768, 4.5, 8.7), (4, 32768, 4.8, 9.2), (8, 32768, 7.8, 11.8), (2, 262144, 7.9, 12.9), (4, 262144, 13.9, 20.6),
     (8, 262144, 16.7, 24.1), (8, 1048576, 33.8, 45.0)],
)  # fmt: skip
def test_allreduce_lies_where_h100s_were_measured(ranks: int, size: int, low: float, high: float) -> None:
    found = allreduce_seconds(load_device("h100-sxm"), size, ranks)
    assert found.low * 1e6 < high
    assert found.high * 1e6 > low
    assert 0.85 * low < found.seconds * 1e6 < 1.15 * high


SIZES = {"batch": 1, "tokens": 128, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(("change", "said"), [
    ({"phase": "decoding"}, "phase must be decode or prefill"),
    ({"format": "bf61"}, "did you mean 'bf16'"),
    ({"format": 16}, "format must be a text, got 16"),
    ({"batch": 0}, "batch must lie"),
    ({"tokens": -1}, "tokens must lie"),
    ({"tokens": 1.5}, "tokens must be a whole number"),
    ({"tokens": float("nan")}, "tokens must be a whole number"),
    ({"head_dim": "128"}, "head_dim must be a whole number"),
    ({"window": -4}, "window must lie"),
    ({"n_heads": 4}, "n_heads must be n_kv_heads or more"),
    ({"batch": [1, 2], "tokens": [1, 2, 3]}, "do not broadcast: batch (2,), tokens (3,)"),
])
def test_bad_attention_questions(change: dict, said: str) -> None:
    with pytest.raises(KvsimError) as caught:
        attention_seconds(H100, **{"phase": "decode", **SIZES, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize(("change", "said"), [
    ({"dtype": "fp9"}, "did you mean 'fp8'"),
    ({"dtype": "int2"}, "unknown matrix dtype"),
    ({"m": 0}, "m must lie"),
    ({"m": [1, 2], "k": [1, 2, 3]}, "do not broadcast"),
])
def test_bad_products(change: dict, said: str) -> None:
    with pytest.raises(KvsimError) as caught:
        matmul_seconds(H100, **{"m": 1, "n": 64, "k": 64, **change})
    assert said in str(caught.value)


@pytest.mark.parametrize("work", [KernelWork(-1.0), KernelWork(float("inf")), KernelWork(1.0, blocks=0.0),
                                  KernelWork(1.0, elements=np.array([1.0, np.nan]))])
def test_bad_work(work: KernelWork) -> None:
    with pytest.raises(KvsimError, match="or more and finite"):
        kernel_seconds(H100, "decode", work)


def test_unknown_op_and_conversion() -> None:
    with pytest.raises(KvsimError, match="no 'sorting' coefficients"):
        kernel_seconds(H100, "sorting", KernelWork(1.0))
    with pytest.raises(KvsimError, match="unknown conversion"):
        kernel_seconds(H100, "decode", KernelWork(1.0), format="mine", conversion="magic")
