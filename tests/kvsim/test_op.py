"""One piece of work on devices that know it by name, on those that know a kernel for it, and on all others."""

from dataclasses import replace

import numpy as np
import pytest

import kvsim
from kvsim.coefficients import Coefficient
from kvsim.op import Op, cold_bytes, op_seconds
from kvsim.prediction import phase_ops
from kvsim.work import joint

PEAK, STREAM = 1e12, 1e10
DEVICE = replace(kvsim.load_device("epyc-9654"), name="box", units=1, clock_hz=1e9, bandwidth_bytes_per_s=STREAM,
                 peaks={"fp32": PEAK, "bf16": PEAK}, last_level_cache_bytes=0)


def row(op, kernel, format, **more):
    more = {"t0_s": 0.0, "bandwidth_share": 1.0, "flops_share": 1.0, "power": 1.0, "slots": 0.25} | more
    return Coefficient(op, kernel, format, devices=("box",), source="test", date="2026-01-01", **more)


def seconds(op, *rows, kernel=None):
    return [float(t.seconds) for t in op_seconds(replace(DEVICE, own_coefficients=rows), op, kernel)]


ANY = row("elementwise", "*", "*", t0_s=1e-6)
READ = Op("attention", "decode", bytes=1e6, elements=1e6, flops=1e6, rows=2500.0, formats=(("int4", "unpack"),),
          kernels=("fused", "eager"))


def test_power_one_adds_what_power_eight_overlaps():
    # bytes 1e6 / 1e10 = 100 us, flops 1e8 / 1e12 = 100 us
    op = Op("x", "elementwise", bytes=1e6, flops=1e8)
    assert seconds(op, row("elementwise", "*", "*")) == pytest.approx([200e-6])
    assert seconds(op, row("elementwise", "*", "*", power=2.0)) == pytest.approx([2**0.5 * 100e-6])
    assert seconds(op, row("elementwise", "*", "*", power=0.0)) == pytest.approx([2 ** (1 / 8) * 100e-6])


def test_tiles_of_1024_rows_cost_launches():
    # 2,500 rows are three tiles of 10 us; bytes and flops as above 100 us + 1 us
    assert seconds(READ, row("decode", "*", "int4", step_s=1e-5)) == pytest.approx([101e-6 + 30e-6])


def test_a_name_that_the_device_knows_goes_before_the_general_row():
    op = Op("x", "elementwise", keys=(("svd append", 1.0), ("int4 append", 0.5)))
    known = [row("elementwise", "*/part", f"{n} append", t0_s=t) for n, t in (("svd", 8e-6), ("int4", 6e-6))]
    assert seconds(op, ANY) == [1e-6]
    assert seconds(op, *known, ANY) == pytest.approx([8e-6, 3e-6])
    assert seconds(op, known[1], ANY) == pytest.approx([3e-6])


def test_what_two_names_have_in_common_counts_once():
    svd, int4, full = (row("elementwise", "*/part", f"{n} append", t0_s=t)
                       for n, t in (("svd", 8e-6), ("int4", 6e-6), ("full", 5e-6)))
    model = kvsim.ModelSpec.from_numbers(layers=1, n_heads=2, n_kv_heads=2, head_dim=64)
    case = kvsim.Case(model, DEVICE, kvsim.parse_method("svd(rank=8) | int(bits=4)"), kvsim.Workload(1, 100, 0))
    found = (op for op in phase_ops(case, "decode") if op.name == "compress and append" and op.kind == "elementwise")
    op = replace(next(found), bytes=0.0, flops=0.0)
    # 8 + 6 - 5 us; where one of the names is not known, nothing is counted twice
    assert sum(seconds(op, svd, int4, full, ANY)) == pytest.approx(9e-6)
    assert sum(seconds(op, svd, full, ANY)) == pytest.approx(8e-6)
    assert all(share > 0 for key, share in op.keys if key != "full append")


def test_stores_after_the_first_find_warm_code():
    # 1 us each for the bytes; launches of 10 us, 4 us for each further of three stores: 10 + 2 * 4 + 3 * 1
    op = replace(READ, bytes=3e4, flops=0.0, elements=0.0, formats=(("fp32", "none"),), pieces=3)
    assert seconds(op, row("decode", "*/fused", "fp32", t0_s=1e-5)) == pytest.approx([33e-6])
    assert seconds(op, row("decode", "*/fused", "fp32", t0_s=1e-5, again_s=4e-6)) == pytest.approx([21e-6])
    assert seconds(replace(op, pieces=1), row("decode", "*/fused", "fp32", t0_s=1e-5, again_s=4e-6)) == pytest.approx(
        [13e-6])


def names(method, prompt=400, new=0):
    model = kvsim.ModelSpec.from_numbers(layers=1, n_heads=2, n_kv_heads=2, head_dim=64)
    case = kvsim.Case(model, DEVICE, kvsim.parse_method(method), kvsim.Workload(1, prompt, new))
    return {key: share for op in phase_ops(case, "decode") for key, share in op.keys}


def test_rows_that_wait_and_rows_that_leave_have_names_of_their_own():
    assert "int4 append" in names("int(bits=4)")
    assert "int4 tail append" in names("int(bits=4,residual=32)")
    assert names("k:int(bits=4,axis=channel) v:int(bits=8)")["int4 tail append"] == 0.5
    # of four rows that come three leave; plain rows are the policy's own work
    assert {"tova step": 1.0, "int4 leave": 0.75, "int4 moved append": 0.75}.items() <= names(
        "tova(budget=0.25) | int(bits=4)").items()
    assert "int4 leave" not in names("tova(budget=0.25)")
    # nothing leaves a window that is not full, one row at each step one that is
    assert names("window(sinks=4,recent=196) | int(bits=8)")["int8 expire"] == 1.0
    assert "int8 moved append" not in names("window(sinks=4,recent=996) | int(bits=8)")


def test_rows_leave_a_format_nobody_measured_as_they_leave_its_kin():
    leave = [row("elementwise", "*/part", f"{f} leave", t0_s=t) for f, t in (("int4", 4e-6), ("int8", 8e-6))]
    tails = [row("elementwise", "*/part", f"{f} append", t0_s=t) for f, t in (("int4", 1e-6), ("int2 tail", 2e-6))]
    op = Op("x", "elementwise", keys=(("int5 leave", 1.0), ("q8_0 leave", 0.5)), only_known=True)
    assert seconds(op, *leave, ANY) == pytest.approx([4e-6, 2e-6])
    assert seconds(replace(op, keys=(("int4 tail append", 1.0),)), *tails, ANY) == pytest.approx([2e-6])
    assert seconds(replace(op, keys=(("int4 tail append", 1.0),)), tails[0], ANY) == pytest.approx([1e-6])
    assert seconds(replace(op, keys=(("int4 append", 1.0), ("int4 moved append", 1.0))), tails[0], ANY) == [1e-6]


def test_work_that_only_an_own_runtime_does_costs_nothing_elsewhere():
    op = Op("x", "elementwise", keys=(("drop", 1.0),), copied=1e6, only_known=True)
    assert seconds(op, ANY) == []
    # 1e6 copied bytes: 100 us
    assert seconds(op, row("elementwise", "*/part", "drop", t0_s=5e-6), ANY) == pytest.approx([105e-6])


def test_the_best_family_that_has_the_format_is_used():
    fused = row("decode", "*/fused", "int4", t0_s=1e-5)
    eager = row("decode", "*/eager", "int4", t0_s=5e-5)
    plain = row("decode", "torch/sdpa", "fp32")
    assert seconds(READ, plain, fused, eager) == pytest.approx([111e-6])
    assert seconds(READ, plain, eager) == pytest.approx([151e-6])
    assert seconds(replace(READ, kernels=("eager",)), plain, fused, eager) == pytest.approx([151e-6])
    assert seconds(READ, plain, fused, eager, kernel="eager") == pytest.approx([151e-6])


def test_an_eager_kernel_reads_all_rows_and_pays_for_parts_on_top():
    # one of four rows attended: elements and flops four times, bytes as they are; the part: 2 us a tile of 10,000 rows
    eager = row("decode", "*/eager", "int4", element_rates=((128, 1.0),))
    part = row("decode", "*/part", "h2o eager", step_s=2e-6)
    op = replace(READ, held=4.0, adds=(("h2o", 1.0),), kernels=("eager",))
    # 1e6 bytes 100 us; 4e6 values at 1e9 a second 4 ms; 4e6 flops 4 us; 10 tiles of 2 us
    assert seconds(op, eager, part) == pytest.approx([100e-6 + 4e-3 + 4e-6, 20e-6])
    assert seconds(op, eager) == pytest.approx([4.104e-3])


def test_stores_that_are_walked_one_by_one_pay_for_launches_each():
    eager = row("decode", "*/eager", "int4", t0_s=1e-5)
    op = replace(READ, pieces=6, kernels=("eager",))
    assert seconds(op, eager) == pytest.approx([6e-5 + 101e-6])  # bytes and flops are shared out


def test_names_change_nothing_on_devices_without_them():
    h100 = kvsim.load_device("h100-sxm")
    plain = replace(READ, kernels=())
    named = replace(plain, keys=(("x", 1.0),), adds=(("y", 1.0),), kernels=("fused", "eager"), held=9.0, pieces=3)
    (a,), (b,) = op_seconds(h100, plain), op_seconds(h100, named)
    assert (a.seconds, a.low, a.high, a.coefficients) == (b.seconds, b.low, b.high, b.coefficients)


def test_arrays_stay_arrays():
    op = replace(READ, bytes=np.array([1e6, 2e6]), pieces=np.array([1, 2]), kernels=("eager",))
    (found,) = op_seconds(replace(DEVICE, own_coefficients=(row("decode", "*/eager", "int4", t0_s=1e-5),)), op)
    assert found.seconds == pytest.approx([10e-6 + 101e-6, 20e-6 + 201e-6])


def test_a_product_of_one_row_may_have_a_kernel_of_its_own():
    plain = row("matmul", "torch/linear", "fp32", t0_s=1e-6, bandwidth_share=0.5)
    # weights 1000 x 2000 in fp32: 8e6 bytes, activations (2 k + 2 n) m = 6e3: at half of 1e10 B/s 1601.2 us
    device = replace(DEVICE, own_coefficients=(plain,))
    one = kvsim.matmul_seconds(device, m=1, n=1000, k=2000, dtype="fp32")
    assert one.seconds == pytest.approx(np.hypot(1601.2e-6, 4e-6) + 1e-6)
    gemv = replace(plain, single_share=1.0, single_t0_s=2e-6, single_s=1.024e-3)
    device = replace(DEVICE, own_coefficients=(gemv,))
    # at the full 1e10 B/s 800.6 us, 1 us for each of 1,000 outputs, 2 us to start
    found = kvsim.matmul_seconds(device, m=np.array([1, 2]), n=1000, k=2000, dtype="fp32")
    assert found.seconds[0] == pytest.approx(800.6e-6 + 1e-3 + 2e-6)
    two = kvsim.matmul_seconds(replace(DEVICE, own_coefficients=(plain,)), m=2, n=1000, k=2000, dtype="fp32")
    assert found.seconds[1] == pytest.approx(two.seconds)
    assert str(found.term[0]) == "walk"


def test_a_format_without_a_row_is_answered_by_one_of_its_name():
    fused = row("decode", "*/fused", "int4", t0_s=1e-5, log_error=(-0.1, 0.0, 0.1))
    eager = row("decode", "*/eager", "rotated3", t0_s=5e-5, log_error=(-0.1, 0.0, 0.1))
    device = replace(DEVICE, own_coefficients=(row("decode", "*/sdpa", "fp32"), fused, eager))
    (found,) = op_seconds(device, replace(READ, formats=(("rotated5", "lookup"),)))
    assert found.seconds == pytest.approx(151e-6)
    assert "rotated5 by analogy with rotated3" in found.coefficients
    assert found.high == pytest.approx(151e-6 * np.exp(0.1) * 1.2)
    (other,) = op_seconds(device, replace(READ, formats=(("int3", "unpack"),)))
    assert other.seconds == pytest.approx(111e-6)


def test_servers_join_products_of_one_input_and_each_pays_its_share():
    # q of 4 with k and v of 1 each: n = 6,144 in 10 us + 6144 * 4096 * 2 bytes / 1e10, two thirds of it for q
    gpu = replace(DEVICE, kind="gpu", own_coefficients=(row("matmul", "*", "bf16", t0_s=1e-5, flops_share=1.3), ANY))
    op = Op("q_proj", "matmul", m=1, n=4096, k=4096, joint=1.5)
    whole = op_seconds(gpu, replace(op, n=6144, joint=1.0))[0].seconds
    assert op_seconds(gpu, op)[0].seconds == pytest.approx(whole / 1.5)
    # models that run as they are written multiply by each matrix alone
    alone = op_seconds(gpu, replace(op, joint=1.0))[0].seconds
    own = replace(gpu, own_coefficients=(*gpu.own_coefficients, row("elementwise", "*/part", "activations")))
    assert op_seconds(own, op)[0].seconds == op_seconds(replace(gpu, kind="cpu"), op)[0].seconds == alone


def test_weights_and_rows_are_cold_once_a_whole_step_goes_by():
    near = row("decode", "*", "bf16", cache_multiple=4.0)
    cached = replace(DEVICE, last_level_cache_bytes=10_000_000, own_coefficients=(near, ANY))
    op = Op("attention", "decode", bytes=1e6, rows=64.0)
    # 1 MB lies inside 10 MB: four times the bandwidth; but not where 40 MB pass by before the next visit
    assert op_seconds(cached, op)[0].seconds == pytest.approx(25e-6)
    assert op_seconds(cached, op, cold=cold_bytes(cached, [replace(op, count=40)]))[0].seconds == pytest.approx(100e-6)
    assert cold_bytes(DEVICE, [op]) is None
    # beyond eight caches nothing is left in one: the same number for all
    assert cold_bytes(cached, [replace(op, count=900)]) == cold_bytes(cached, [replace(op, count=90)]) == 8e7


def test_what_servers_join():
    layer = kvsim.load_model("llama-3.1-8b").layers[0]
    wide = {m.name: joint(layer, m) for m in layer.matrices}
    assert wide == {"q_proj": 1.5, "k_proj": 6.0, "v_proj": 6.0, "o_proj": 1.0, "gate_proj": 2.0, "up_proj": 2.0,
                    "down_proj": 1.0}
    experts = kvsim.load_model("deepseek-v3").layers[10]
    assert [joint(experts, m) for m in experts.matrices if "experts" in m.name] == [2.0, 2.0, 1.0] * 2


def test_latent_attention_has_more_small_kernels():
    def small(name):
        case = kvsim.Case(kvsim.load_model(name), kvsim.load_device("h200-sxm"), kvsim.parse_method("full"),
                          kvsim.Workload(1, 64, 0))
        return sum(op.count for op in phase_ops(case, "decode") if op.keys and op.keys[0][0] == "activations")

    # 32 layers of 5; 61 of 5 and 6
    assert small("llama-3.1-8b") == 160
    assert small("deepseek-v3") == 671


def test_parts_answer_to_their_names_alone():
    part, any_ = row("elementwise", "*/part", "int8 compress", t0_s=1e-3), row("elementwise", "*", "*", t0_s=1e-6)
    decode = row("decode", "*/eager", "int4", t0_s=5e-5)
    # 1e6 bytes in 100 us: work without a name takes the general row, though a part stands before it
    unnamed = Op("rows put together", "elementwise", bytes=1e6)
    assert seconds(unnamed, part, any_, decode) == pytest.approx([101e-6])
    chosen = replace(unnamed, name="topk selection", keys=(("topk selection", 1.0),))
    assert seconds(chosen, part, any_, decode) == pytest.approx([101e-6])


def test_writing_a_format_nobody_measured_is_answered_by_another_one():
    parts = [row("elementwise", "*/part", f"{f} append", t0_s=t) for f, t in (("fp8", 1e-3), ("int4", 2e-3))]
    base, any_ = row("elementwise", "*/part", "svd append", t0_s=9e-3), row("elementwise", "*", "*")
    op = Op("compress and append", "elementwise", bytes=1e6, keys=(("rotated4 append", 1.0),))
    assert seconds(op, *parts, base, any_) == pytest.approx([2.1e-3])
    assert seconds(op, parts[0], base, any_) == pytest.approx([1.1e-3])
    assert seconds(op, base, any_) == pytest.approx([100e-6])  # a basis is not a format
    assert seconds(replace(op, keys=(("tucker append", 1.0),)), *parts, base, any_) == pytest.approx([100e-6])
    (found,) = op_seconds(replace(DEVICE, own_coefficients=(parts[1], any_)), op)
    assert "rotated4 append by analogy with int4 append" in found.coefficients
    # one of the same name, the nearest number of bits
    kin = [row("elementwise", "*/part", f"rotated{bits} append", t0_s=bits * 1e-6) for bits in (2, 3)]
    (found,) = op_seconds(replace(DEVICE, own_coefficients=(*kin, parts[1], any_)), op)
    assert "rotated4 append by analogy with rotated3 append" in found.coefficients


def test_an_op_of_one_family_stays_in_it():
    plain, fused = row("decode", "*/sdpa", "fp32"), row("decode", "*/fused", "int4", t0_s=1e-5)
    eager = row("decode", "*/eager", "int4", t0_s=5e-5)
    op = replace(READ, formats=(("kmeans3", "lookup"),), kernels=("eager",))
    assert seconds(op, plain, fused, eager) == pytest.approx([151e-6])
