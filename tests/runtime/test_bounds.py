"""Limits and proven bounds: by hand, against random cases, and on rows of methods that run."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.distortion import least_error
from kvsim.method import parse_method
from runtime.attention import hidden
from runtime.bounds import (
    attention_bound,
    bits_needed,
    eviction_bound,
    gap,
    measure,
    relative_error,
    spectra,
    tail_energy,
)
from runtime.cache import spec_of
from runtime.quality_reference import reference
from runtime.quality_run import Sizes


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_limit_of_two_channels_by_hand():
    # variances 4 and 1 at 1 bit a value (2 in all): level L with (log2(4/L) + log2(1/L)) / 2 = 2, so L = 1/2 * ... :
    # log2(4 / L^2) = 4, L = sqrt(4 / 16) = 1/2; both stay above it; error 2 * (1/2) / 5 = 0.2
    assert least_error([4.0, 1.0], 1.0) == pytest.approx(0.2)
    assert bits_needed(torch.tensor([4.0, 1.0]), 0.2) == pytest.approx(1.0, abs=1e-9)
    assert bits_needed(torch.tensor([4.0, 1.0]), 1.0) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.floats(0.05, 8))
def test_bits_needed_inverts_the_limit(variances, bits):
    v = torch.tensor(variances, dtype=torch.float64)
    assert bits_needed(v, least_error(variances, bits)) == pytest.approx(bits, abs=1e-6)


def test_a_uniform_quantizer_on_white_gaussian_rows_keeps_its_distance():
    # a fine uniform quantizer with entropy coding is 1.53 dB (a quarter bit) from the limit; fixed-length codes over
    # the range of 64 values it waste more, never less
    from runtime.parts import Setting, twins

    part = parse_method("int(bits=6)").k.format
    from kvsim.parts import Place

    twin = twins()["int"](part, Setting(Place("k", 2, 64, 2), torch.float32))
    x = drawn(0, 1, 2, 2000, 64).float()
    y = twin.decode(twin.encode(x, {}), {}, torch.zeros(2000, dtype=torch.int64))
    found = gap(x, y, 6.5)
    assert found.gap_db > 1.53
    assert found.gap_bits > 0.25
    assert found.error == pytest.approx(float(relative_error(x, y).mean()))
    assert len(found.head_db) == 2
    assert min(found.head_db) <= found.gap_db <= max(found.head_db)
    assert found.head_db[1] == pytest.approx(gap(x[:, 1:], y[:, 1:], 6.5).gap_db)


def test_spectra_are_variances():
    x = drawn(1, 1, 1, 4000, 3) * torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64) + 7
    assert spectra(x)[0, 0].sqrt().tolist() == pytest.approx([0.1, 1.0, 3.0], rel=0.05)


def test_svd_meets_eckart_young_and_a_projection_does_not():
    x = drawn(2, 1, 2, 50, 8)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    best = (u[..., :3] * s[..., None, :3]) @ v[..., :3, :]
    tail = tail_energy(x, 3)
    assert torch.allclose((x - best).square().sum((2, 3)), tail)
    basis = torch.linalg.qr(drawn(3, 8, 3)).Q
    assert bool(((x - x @ basis @ basis.T).square().sum((2, 3)) > tail * 1.01).all())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.floats(-4, 1.5), st.floats(-4, 1.5), st.floats(-2, 1.5), st.booleans())
def test_attention_error_never_exceeds_its_bound(seed, key_size, value_size, sharpness, causal):
    q = drawn(seed, 2, 4, 5, 6) * 10**sharpness
    k, v = drawn(seed + 1, 2, 2, 9, 6), drawn(seed + 2, 2, 2, 9, 3) + 5
    other = (k + drawn(seed + 3, *k.shape) * 10**key_size, v + drawn(seed + 4, *v.shape) * 10**value_size)
    found = attention_bound(q, (k, v), other, 0.4, hidden(5, 9, 0, q.device) if causal else None)
    assert bool((found.actual <= found.from_logits * (1 + 1e-9) + 1e-12).all())
    assert bool((found.from_logits <= found.from_norms * (1 + 1e-9) + 1e-12).all())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(-2, 2))
def test_eviction_error_never_exceeds_its_bound(seed, count, sharpness):
    q, k, v = drawn(seed, 1, 4, 3, 6) * 10**sharpness, drawn(seed + 1, 1, 2, 9, 6), drawn(seed + 2, 1, 2, 9, 3)
    order = torch.rand((1, 2, 9), generator=torch.Generator().manual_seed(seed)).argsort(-1)
    found = eviction_bound(q, k, v, order[..., :count].sort(-1).values, 0.4)
    assert bool((found.actual <= found.from_logits * (1 + 1e-9) + 1e-12).all())
    assert bool((found.actual <= found.from_norms * (1 + 1e-9) + 1e-12).all())
    if count == 9:
        assert float(found.actual.max()) < 1e-12


def test_weights_move_by_the_bound_at_its_worst_case():
    # two rows, logits +-r/4 before and -+r/4 after (range of the change r): total variation is exactly tanh(r / 4), so
    # the bound is met: values +-1 on a line, radius 1, outputs tanh(r/4) and -tanh(r/4)
    r = 3.0
    q, v = torch.ones(1, 1, 1, 1), torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1)
    k = torch.tensor([r / 4, -r / 4]).reshape(1, 1, 2, 1)
    found = attention_bound(q, (k, v), (-k, v), 1.0)
    assert float(found.actual) == pytest.approx(2 * math.tanh(r / 4), rel=1e-6)
    assert float(found.from_logits) == pytest.approx(2 * math.tanh(r / 4), rel=1e-6)


def test_a_model_with_sliding_layers_is_measured_on_the_rows_that_they_hold():
    from types import SimpleNamespace

    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(0, 40, (2, 61), generator=torch.Generator().manual_seed(1))
    bench = SimpleNamespace(subject=SimpleNamespace(model=model), sizes=Sizes(2, 50, 10), spec=spec_of(model))
    found = reference(model, tokens, 50)
    row = measure(bench, found, parse_method("int(bits=4,group=16)"))
    assert [len(heads) for heads in row["k"]["layer_head_db"]] == [1, 1]
    assert row["attention"]["broken"] == 0
    assert row["attention"]["cases"] == 2 * (16 + 32) * 2  # queries of the window's rows, and the last 32; 2 heads
    assert measure(bench, found, parse_method("snapkv(budget=0.5)"))["attention"]["cases"] == 2 * 32 * 2
