"""Tails, flushes and growth of every format at awkward lengths; settings at random."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from kvsim.formats.float8 import Float8
from kvsim.formats.gguf import Gguf
from kvsim.formats.int import Int
from kvsim.formats.kmeans import KMeans
from kvsim.formats.log import Log
from kvsim.formats.lowrank import LowRank
from kvsim.formats.mixed import Mixed
from kvsim.formats.mxfp import MxFp
from kvsim.formats.nvfp4 import NvFp4
from kvsim.formats.outliers import Outliers
from kvsim.formats.rotated import Rotated
from kvsim.formats.sketch import Sketch
from kvsim.formats.widths import Widths
from kvsim.parts import Place, Quantizer, parts

LENGTHS = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 509, 1021, 4093]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        # u floor(max(0, n - R) / u)
        (Int(), {0: 0, 1: 1, 1021: 1021}),
        (Int(residual=128), {0: 0, 127: 0, 128: 0, 129: 1, 1021: 893}),
        (Int(axis="channel", group=32), {0: 0, 31: 0, 32: 32, 33: 32, 63: 32, 64: 64, 1021: 992}),
        (Int(axis="channel", group=32, residual=128), {128: 0, 159: 0, 160: 32, 161: 32, 1021: 864}),
        # R floor(n / R)
        (
            Int(axis="channel", group=32, residual=128, flush="all"),
            {0: 0, 127: 0, 128: 128, 129: 128, 255: 128, 256: 256, 1021: 896},
        ),
        (Int(residual=128, flush="all"), {127: 0, 128: 128, 300: 256}),
    ],
    ids=str,
)
def test_encoded_rows(part, expected):
    assert {n: part.quantized(n) for n in expected} == expected
    several = np.array(list(expected))
    assert part.quantized(several).tolist() == list(expected.values())


def total(part, prompt, rows, place):
    """Codes, scales and the full-precision tail of one sequence."""
    encoded, blocks = part.quantized(rows), part.flushes(prompt, rows)
    coded = sum(b.bytes for b in part.buffers(encoded, blocks, place) if not b.per_model)
    return coded + (rows - encoded) * place.heads * place.width * place.value_bits // 8


def test_kivi_2_by_hand():
    keys = Int(bits=2, group=32, axis="channel", residual=128, flush="all")
    values = Int(bits=2, group=32, residual=128)
    place = Place("k", 3, 64, 9)
    # 300 rows: keys encode 256 in 8 groups: 3 x (256 x 16 + 8 x 64 x 4), tail 44 rows of 3 x 128 bytes
    assert total(keys, 300, 300, place) == 3 * (256 * 16 + 8 * 64 * 4) + 44 * 384
    # values encode 172 rows of 3 x (16 + 2 x 4), tail 128
    assert total(values, 300, 300, place) == 172 * 72 + 128 * 384
    # one row before the flush the whole of 128 is full; at 128 the bytes fall to 3 bits a value
    assert total(keys, 0, 127, place) == 127 * 384
    assert total(keys, 0, 128, place) == 128 * 192 * 3 // 8


some = st.integers(0, 3).flatmap(lambda i: st.just([0, 1, 32, 128][i]))
quantizers = st.one_of(
    st.builds(
        Int,
        bits=st.integers(1, 8),
        group=st.sampled_from([None, 1, 7, 16, 32]),
        axis=st.sampled_from(["token", "channel", "head", "layer"]),
        residual=some,
    ),
    st.builds(Int, bits=st.integers(1, 8), axis=st.just("row"), residual=some),
    st.builds(
        Int, bits=st.integers(2, 8), symmetric=st.just(True), scale_dtype=st.sampled_from(["fp16", "fp32", "bf16"])
    ),
    st.builds(
        Int,
        axis=st.just("channel"),
        group=st.sampled_from([16, 32]),
        residual=st.sampled_from([32, 128]),
        flush=st.just("all"),
    ),
    st.builds(Log, bits=st.integers(2, 8), group=st.sampled_from([None, 5, 32]), residual=some),
    st.builds(
        KMeans,
        bits=st.integers(1, 8),
        per=st.sampled_from(["channel", "tensor", "layer"]),
        scale=st.sampled_from(["none", "row"]),
        residual=some,
    ),
    st.builds(
        Mixed,
        bits=st.just((1, 2, 4, 8)),
        mean=st.floats(1, 8).map(lambda x: round(x, 2)),
        group=st.sampled_from([None, 8, 30]),
        residual=some,
    ),
    st.builds(
        Widths,
        bits=st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple),
        group=st.sampled_from([None, 8, 30]),
        residual=some,
    ),
    st.builds(
        Float8, kind=st.sampled_from(["e4m3", "e5m2"]), scale=st.sampled_from(["row", "none", "tensor"]), residual=some
    ),
    st.builds(
        NvFp4,
        scale=st.sampled_from(["block", "row"]),
        residual=st.sampled_from([16, 128]),
        flush=st.sampled_from(["oldest", "all"]),
    ),
    st.builds(MxFp, bits=st.sampled_from([4, 8]), residual=some),
    st.builds(Gguf, type=st.sampled_from(["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]), residual=some),
    st.builds(Rotated, bits=st.integers(1, 8), residual=some),
    st.builds(Sketch, m=st.integers(1, 600), residual=some),
)
places = st.builds(
    Place,
    side=st.just("k"),
    heads=st.sampled_from([1, 3, 8]),
    width=st.sampled_from([32, 64, 80, 96, 128, 256]),
    n_heads=st.just(24),
    value_bits=st.sampled_from([16, 32]),
)


def fits(part, place):
    try:
        part.check_place(place)
    except KvsimError:
        return False
    return True


@given(quantizers, places)
def test_arrays_are_scalars(part, place):
    if fits(part, place):
        prompts = np.array([[0], [1], [64], [300]])
        rows = prompts + np.array(LENGTHS)
        many = total(part, prompts, rows, place)
        assert many.dtype == np.int64
        one = [[total(part, int(p), int(p) + n, place) for n in LENGTHS] for p in prompts[:, 0]]
        assert many.tolist() == one


@given(quantizers, places, st.integers(0, 1500), st.integers(0, 700))
def test_grows_up_to_one_tail(part, place, prompt, new):
    if fits(part, place):
        tail = max(part.residual, part.unit) * place.heads * place.width * place.value_bits // 8
        here, there = total(part, prompt, prompt + new, place), total(part, prompt, prompt + new + 1, place)
        assert there >= here - tail
        assert there - here <= 2 * place.heads * place.width * place.value_bits // 8 + 64 * place.heads * 64


@given(quantizers, places, st.integers(0, 3000))
def test_never_over_full_once_codes_are_smaller(part, place, rows):
    """Where a unit of encoded rows takes no more than full ones, no number of rows does."""
    if fits(part, place) and part.block_rows > 0:
        full = place.heads * place.width * place.value_bits // 8
        whole = part.block_rows
        unit = sum(b.bytes for b in part.buffers(whole, 1, place) if not b.per_model)
        if unit <= full * whole:
            assert total(part, rows, rows, place) <= full * rows


@given(quantizers, st.integers(0, 900), st.integers(0, 900))
def test_each_row_is_encoded_once(part, prompt, new):
    first, last = part.quantized(prompt), part.quantized(prompt + new)
    assert 0 <= first <= last <= prompt + new
    assert last % part.unit == 0
    blocks = part.flushes(prompt, prompt + new)
    assert (last - first) == (blocks - (first > 0)) * part.block_rows


@given(quantizers)
def test_written_form_holds_every_setting(part):
    from kvsim.method import parse_method

    text = f"k:{part} v:full"
    assert parse_method(text).k.format == part


def test_every_format_is_drawn_above():
    known = {p.name for p in parts().values() if p.role == "format"} - {"full"}
    drawn = {p.name for p in (Int, Log, KMeans, Mixed, Widths, Float8, NvFp4, MxFp, Gguf, Rotated, Sketch)}
    assert known == drawn
    assert {p.name for p in parts().values() if p.role == "correction"} == {Outliers.name, LowRank.name}
    assert all(issubclass(parts()[n], Quantizer) for n in known)


@given(quantizers, st.integers(1, 64))
def test_a_side_that_stores_nothing(part, rows):
    """A basis may keep a side with the other (width 0): codes then take no bytes, and nothing divides by zero."""
    nothing = Place("k", 1, 0, 4)
    part.check_place(nothing)
    coded = {b.name: b.bytes for b in part.buffers(part.quantized(64 * rows), 1, nothing)}
    assert coded.get("codes", coded.get("blocks", 0)) == 0


@given(st.floats(0.001, 1), st.integers(1, 1024), st.integers(0, 500))
def test_outliers_are_a_ceiling(fraction, width, rows):
    part = Outliers(fraction=fraction)
    kept = part.count(width)
    assert 1 <= kept <= width
    assert kept - 1 < fraction * width + 1e-6
    assert kept >= fraction * width - 1e-6 * width
    assert sum(b.bytes for b in part.buffers(rows, 0, Place("k", 2, width, 2))) == 2 * rows * kept * (
        3 if width <= 256 else 4
    )
