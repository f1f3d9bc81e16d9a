"""The slowed converter: the same results, predictions by hand; how long it takes gates nothing."""

import pytest
import torch

from kvsim.errors import KvsimError
from runtime import converter, kernels
from runtime.kernels.load import Library, library


def test_predictions_from_a_rate_by_hand():
    # 8 GB/s, 10 us of launch; 10,000 rows x 4 heads x 128 x 2 sides = 10.24 M values of int4, 4.5 bits: 5.76 MB (and
    # 16 queries of 128, four bytes in and out): 721 us from memory
    device = converter.machine(8e9, 1e-5)
    shape = {"batch": 1, "tokens": 10_000, "n_heads": 16, "n_kv_heads": 4, "head_dim": 128}

    def at(form, rate):
        return converter.attention_at(device, form, rate, **shape)

    assert at("int4", 1e15) == pytest.approx(1e-5 + (5.76e6 + 8192) / 8e9, rel=1e-3)
    # 2 G values/s: 5.12 ms, far above memory's 0.72
    assert at("int4", 2e9) == pytest.approx(1e-5 + 5.12e-3, rel=1e-3)
    # bf16 rows need no converter: 20.48 MB
    assert at("bf16", 2e9) == at("bf16", None) == pytest.approx(1e-5 + 20.488e6 / 8e9, rel=1e-3)


def test_where_measured_times_cross():
    turned = tuple(converter.Turned(p, rate, 0.0, s) for p, rate, s in ((0, 4e9, 1.0), (2, 2e9, 2.0), (6, 1e9, 4.0)))
    # half way from 2 s to 4 s: 1 / rate half way from 0.5 to 1 ns
    assert converter._crossing(turned, 3.0) == pytest.approx(1e9 / 0.75)
    assert converter._crossing(turned, 9.0) is None


@pytest.mark.slow
def test_a_slower_converter_gives_the_same_results():
    found = library()
    if not isinstance(found, Library) or not found.dots:
        with pytest.raises(KvsimError, match="do not run here"):
            converter.slower(2)
        pytest.skip("no kernels with integer products here")
    plain = vars(kernels)["library"]
    with torch.inference_mode():
        call = converter.step("int(bits=4)", 300)
        before = call().clone()
        with converter.converting(2):
            assert vars(kernels)["library"]() is converter.slower(2)
            assert torch.equal(call(), before)
    assert vars(kernels)["library"] is plain
