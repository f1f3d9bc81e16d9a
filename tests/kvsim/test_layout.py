"""Bytes by hand: every number with its arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import KvsimError
from kvsim.layout import layer_layout
from kvsim.model import Attention, Layer
from kvsim.parts import ALLOCATION_ROWS

SMOL = Layer(Attention("full", 9, 3, 64, 64))
SLIDING = Layer(Attention("sliding", 8, 4, 128, 128, window=512))


def held(text, prompt, new=0, layer=SMOL, bits=16):
    layout = layer_layout(layer, kvsim.parse_method(text), prompt, new, bits)
    return {b.name: b.bytes for b in layout.buffers if np.any(np.asarray(b.bytes) > 0)}


def test_full_rows():
    # 3 heads x 1032 rows x 64 values x 2 bytes
    assert held("full", 1032) == {"k.rows": 396_288, "v.rows": 396_288}


def test_int4_with_groups_of_64():
    # codes 3 x 1000 x 32; one fp16 scale and one fp16 minimum a row: 3 x 1000 x 2 each
    assert held("int(bits=4)", 1000)["k.codes"] == 96_000
    assert held("int(bits=4)", 1000)["k.scale"] == held("int(bits=4)", 1000)["k.min"] == 6_000
    assert "k.tail" not in held("int(bits=4)", 1000)


def test_odd_width_has_a_shorter_last_group():
    odd = Layer(Attention("full", 2, 1, 80, 80))
    # 80 values in groups of 32: 3 groups; 3 bits: 30 bytes a row
    assert held("int(bits=3,group=32)", 10, layer=odd) == {
        "k.codes": 300,
        "k.scale": 60,
        "k.min": 60,
        "v.codes": 300,
        "v.scale": 60,
        "v.min": 60,
    }


def test_kivi_tails():
    # T = 300, R = 128: keys flush whole tails: 128 * floor(300 / 128) = 256 encoded, 44 in the tail;
    # values: 300 - 128 = 172 encoded, 128 in the tail
    found = held("kivi-2", 300)
    assert found["k.codes"] == 3 * 256 * 16
    assert found["k.scale"] == 3 * (256 // 32) * 64 * 2
    assert found["k.tail"] == 3 * 44 * 64 * 2
    assert found["v.codes"] == 3 * 172 * 16
    assert found["v.scale"] == 3 * 172 * 2 * 2
    assert found["v.tail"] == 3 * 128 * 64 * 2


def test_channel_groups_without_residual_still_have_a_tail():
    assert held("int(bits=4,axis=channel,group=32)", 33)["k.tail"] == 3 * 1 * 64 * 2
    assert "k.tail" not in held("int(bits=4,axis=channel,group=32)", 32)


def test_allocation_rounds_rows_up():
    layout = layer_layout(SMOL, kvsim.parse_method("int(bits=4,axis=channel,group=32)"), 33, 0, 16)
    sizes = {b.name: b.allocated for b in layout.buffers}
    # codes and tail: 256 rows; scales: one row for 32 tokens, so 8 rows are 256 tokens
    assert sizes["k.codes"] == 3 * 256 * 32
    assert sizes["k.scale"] == 3 * 8 * 64 * 2
    assert sizes["k.tail"] == 3 * 256 * 64 * 2


def test_policies_drop_rows_and_keep_their_books():
    # ceil(0.2 * 1001) = 201 rows, an fp32 score for each row and head
    assert held("h2o(budget=0.2)", 1001) == {"k.rows": 3 * 201 * 128, "v.rows": 3 * 201 * 128, "scores": 3 * 201 * 4}


def test_sliding_layers_are_exempt_from_policies_but_not_from_formats():
    assert held("h2o(budget=0.2)", 2000, layer=SLIDING)["k.rows"] == 4 * 512 * 256
    assert held("int(bits=4)", 2000, layer=SLIDING)["k.codes"] == 4 * 512 * 64


def test_a_group_stays_until_its_last_row_leaves_the_window():
    # 512 rows written at the prompt's end, then 10 more: live rows are 10..522, whole groups of 32: 0..512 encoded, and
    # row 0..9 wait for their group; the tail holds 522 - 512 = 10 rows
    found = held("int(bits=4,axis=channel,group=32)", 512, 10, layer=SLIDING)
    assert found["k.codes"] == 4 * 512 * 64
    assert found["k.tail"] == 4 * 10 * 256
    # after 32 rows the first group has left, and a new one has come
    assert held("int(bits=4,axis=channel,group=32)", 512, 32, layer=SLIDING)["k.codes"] == 4 * 512 * 64


def test_positions_are_stored_where_rows_leave_and_keys_lie_before_the_rotation():
    assert held("h2o(budget=100) | int(bits=4,rope=pre)", 1000)["positions"] == 3 * 100 * 4
    assert held("tova(budget=100) | int(bits=4,rope=pre)", 1000)["positions"] == 100 * 4
    assert "positions" not in held("int(bits=4,rope=pre)", 1000)


def test_svd_needs_rows_enough():
    assert held("svd(rank=32)", 31) == {"k.full": 3 * 31 * 128, "v.full": 3 * 31 * 128}
    # rank 32: coefficients 3 x 100 x 32 x 2, basis 3 x 32 x 64 x 2
    assert held("svd(rank=32)", 100) == {
        "k.basis": 12_288,
        "k.rows": 19_200,
        "v.basis": 12_288,
        "v.rows": 19_200,
    }


def test_mla_takes_formats_on_both_parts_and_no_basis():
    mla = Layer(Attention("mla", 16, 1, 512, 64, qk_dim=192, out_dim=128))
    assert held("full", 10, layer=mla) == {"k.rows": 10_240, "v.rows": 1_280}
    # latent 8 groups of 64, rope part one group
    assert held("int(bits=4)", 10, layer=mla)["k.scale"] == 10 * 8 * 2
    with pytest.raises(KvsimError, match="latent already"):
        held("svd(rank=32)", 10, layer=mla)
    with pytest.raises(KvsimError, match="no rotation"):
        held("int(bits=4,rope=pre)", 10, layer=mla)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("svd(rank=65)", "rank"),
        ("int(bits=4,group=65)", "group=65"),
        ("cp(rank=200)", "192"),
        ("palu(rank=500)", "palu"),
    ],
)
def test_settings_beyond_the_layer_name_the_place(text, words):
    with pytest.raises(KvsimError, match=words) as caught:
        held(text, 1000)
    assert "layer 0" in str(caught.value)


TEXTS = (
    "full",
    "int(bits=4)",
    "int(bits=3,axis=channel,group=32,residual=40)",
    "kivi-2",
    "nvfp4",
    "h2o(budget=0.3) | int(bits=8)",
    "snapkv | kivi-4",
    "window(sinks=4,recent=60) | int(bits=4,axis=channel,group=16)",
    "svd(rank=16) | int(bits=4)",
    "gear",
    "hierarchy",
    "pages",
    "ada | int(bits=4)",
    "q4_0",
    "tucker",
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(0, 50))
def test_arrays_equal_numbers(text, prompts, new):
    method = kvsim.parse_method(text)
    array = layer_layout(SMOL, method, np.array(prompts), new, 16)
    for i, prompt in enumerate(prompts):
        one = layer_layout(SMOL, method, prompt, new, 16)
        for allocated in (False, True):
            assert np.broadcast_to(array.bytes(3, allocated), len(prompts))[i] == one.bytes(3, allocated)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 2000), st.integers(0, 60))
def test_allocation_holds_the_live_rows_and_less_than_a_unit_more(text, prompt, new):
    layout = layer_layout(SMOL, kvsim.parse_method(text), prompt, new, 16)
    for b in layout.buffers:
        assert b.bytes <= b.allocated
        if b.rows_per_unit:
            assert b.allocated - b.bytes < b.heads * b.row_bytes * b.rows_per_unit
            assert b.rows_per_unit <= ALLOCATION_ROWS * 64


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(1, 2000), st.integers(1, 5))
def test_bytes_are_affine_in_the_batch(text, prompt, batch):
    layout = layer_layout(SMOL, kvsim.parse_method(text), prompt, 0, 16)
    model = sum(b.bytes for b in layout.buffers if b.per_model)
    assert layout.bytes(batch) - model == batch * (layout.bytes(1) - model)
