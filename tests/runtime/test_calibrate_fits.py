"""Coefficients found again from times that were made from them, and what disturbed points do to them."""

from dataclasses import replace

import numpy as np
import pytest

import kvsim
from kvsim.coefficients import Coefficient
from kvsim.cost import kernel_time
from kvsim.op import Op, kernel_work
from runtime.calibration_fits import _without_known
from runtime.coefficient_fit import Sample, fitted, left_out, predicted, studentized

DEVICE = replace(kvsim.load_device("epyc-9654"), units=2, clock_hz=2e9, bandwidth_bytes_per_s=2e10,
                 peaks={"fp32": 2e11, "bf16": 2e11}, last_level_cache_bytes=0)
BASE = Coefficient("decode", "*/eager", "int4", 0.0, 1.0, 1.0, source="test", date="2026-01-01")
TRUE = replace(BASE, t0_s=2e-4, step_s=3e-5, bandwidth_share=1.0, flops_share=1.2, power=1.0, slots=0.25,
               max_splits=256.0, element_rates=((64, 0.4), (128, 0.8)))


def attention(rows, heads, group, head_dim, batch=1, **more):
    values = 2.0 * batch * heads * rows * head_dim
    return Op("attention", "decode", bytes=values * 0.56, elements=values, flops=values * 2 * group,
              blocks=batch * heads, rows=float(rows), head_dim=head_dim, q_per_kv=group, **more)


OPS = [attention(*sizes) for sizes in ((300, 3, 3, 64), (1500, 3, 3, 64), (3000, 2, 7, 64), (700, 8, 4, 128),
                                       (2100, 8, 4, 128), (150, 8, 4, 128), (900, 12, 3, 64), (1200, 8, 1, 64))]


def times(c, ops):
    return [float(kernel_time(DEVICE, c, kernel_work(op))[0]) * op.pieces for op in ops]


def test_prices_come_back():
    samples = [Sample(op, s) for op, s in zip(OPS, times(TRUE, OPS), strict=True)]
    found = fitted(DEVICE, BASE, samples).row
    assert predicted(DEVICE, found, samples, True, False) == pytest.approx(times(TRUE, OPS), rel=1e-3)
    assert found.t0_s == pytest.approx(2e-4, rel=0.02)
    assert found.step_s == pytest.approx(3e-5, rel=0.05)
    assert dict(found.element_rates) == pytest.approx({64: 0.4, 128: 0.8}, rel=0.05)
    assert found.rows == 8


def test_one_disturbed_point_does_not_bend_the_rest():
    seconds = times(TRUE, OPS)
    samples = [Sample(op, s * (3.0 if i == 4 else 1.0)) for i, (op, s) in enumerate(zip(OPS, seconds, strict=True))]
    close = np.array(predicted(DEVICE, fitted(DEVICE, BASE, samples).row, samples, True, False)) / seconds
    assert np.median(np.abs(close - 1.0)) < 0.05


def test_prices_are_never_negative_and_stay_within_physics():
    rng = np.random.default_rng(0)
    for _ in range(20):
        samples = [Sample(op, s * rng.lognormal(0.0, 0.8)) for op, s in zip(OPS, times(TRUE, OPS), strict=True)]
        c = fitted(DEVICE, BASE, samples).row
        assert 0.0 <= c.t0_s <= 1e-2
        assert 0.0 <= c.step_s <= 1e-2
        assert 0.01 <= c.bandwidth_share <= 1.1
        assert 1e-4 <= c.flops_share <= 1.3
        assert all(1e-6 <= rate <= 1e6 for _, rate in c.element_rates)


def test_errors_come_from_points_that_the_fit_has_not_seen():
    rng = np.random.default_rng(1)
    samples = [Sample(op, s * rng.lognormal(0.0, 0.1)) for op, s in zip(OPS, times(TRUE, OPS), strict=True)]
    c = fitted(DEVICE, BASE, samples).row
    seen = np.abs(np.log([s.seconds for s in samples]) - np.log(predicted(DEVICE, c, samples, True, False)))
    assert np.mean(np.abs(left_out(DEVICE, BASE, samples, True, False))) > np.mean(seen)
    assert c.log_error[0] < 0.0 < c.log_error[2]


def test_errors_are_neither_those_of_points_seen_nor_of_points_left_out():
    # the mean of 0, 0, 3 leaves -1, -1, 2; without each the others' means miss it by -1.5, -1.5, 3; leverage is 1/3,
    # and -1 / sqrt(1 - 1/3) = -1.2247
    found = studentized(np.array([-1.0, -1.0, 2.0]), np.array([-1.5, -1.5, 3.0]))
    assert found == pytest.approx([-1.2247, -1.2247, 2.4495], abs=1e-4)
    assert studentized(np.array([0.1]), np.array([-0.5, 0.5])) == pytest.approx([-0.5, 0.5])  # too few to say


def test_what_is_left_out_of_a_part_is_what_it_costs_whole():
    known = replace(BASE, op="elementwise", kernel="*/part", format="tova step", t0_s=1e-4)
    device = replace(DEVICE, own_coefficients=(known,))
    op = Op("tova step", "elementwise", keys=(("tova step", 1.0), ("int4 leave", 0.5)))
    # 300 us, of which 100 are known; the rest is half of what leaving costs
    (one,) = _without_known(device, [Sample(op, 3e-4)], "int4 leave")
    assert one.seconds == pytest.approx(4e-4)
    assert one.paid == pytest.approx(2e-4)


def test_stores_that_are_walked_one_by_one_are_fitted_as_such():
    ops = [replace(op, pieces=n) for op, n in zip(OPS, (3, 3, 2, 8, 8, 8, 12, 8), strict=True)]
    samples = [Sample(op, s) for op, s in zip(ops, times(TRUE, ops), strict=True)]
    assert fitted(DEVICE, BASE, samples).row.t0_s == pytest.approx(2e-4, rel=0.05)
