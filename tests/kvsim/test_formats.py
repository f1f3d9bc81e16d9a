"""Bytes of every number format and correction, by hand; what each refuses; the sum for whole models."""

import pytest

from kvsim.errors import KvsimError
from kvsim.formats.float8 import Float8
from kvsim.formats.full import Full
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
from kvsim.layout import layer_layout
from kvsim.method import parse_method
from kvsim.model import Attention, Layer
from kvsim.parts import Place

SMOL = Place("k", 3, 64, 9)  # a layer of SmolLM2-135M: 3 KV heads of 64, 9 query heads
WIDE = Place("k", 8, 128, 32)


def at(width, heads=1, **more):
    return Place("k", heads, width, heads, **more)


def held(part, rows, place, blocks=0):
    """Bytes by buffer of `rows` encoded rows, and what is stored once for the model."""
    found = part.buffers(rows, blocks, place)
    return ({b.name: b.bytes for b in found if not b.per_model}, {b.name: b.bytes for b in found if b.per_model})


def row(part, width):
    """Bytes that one encoded row of one head adds."""
    more, less = (held(part, n * part.unit, at(width))[0] for n in (2, 1))
    return (sum(more.values()) - sum(less.values())) / part.unit


@pytest.mark.parametrize(
    ("part", "width", "bytes_a_row"),
    [
        (Int(bits=8), 64, 64 + 2 + 2),  # 8.5 bits
        (Int(bits=4), 64, 32 + 2 + 2),  # 4.5 bits
        (Int(bits=4, group=32), 64, 32 + 2 * (2 + 2)),  # 5 bits
        (Int(bits=2, group=32), 64, 16 + 2 * (2 + 2)),  # 3 bits
        (Int(bits=4), 128, 64 + 2 * 4),  # 4.5 bits
        (Int(bits=4), 80, 40 + 2 * 4),  # groups of 64 and 16
        (Int(bits=4), 96, 48 + 2 * 4),  # groups of 64 and 32
        (Int(bits=4), 32, 16 + 4),  # group = min(64, width)
        (Int(bits=3), 81, 31 + 2 * 4),  # 243 bits take 31 bytes
        (Int(bits=1), 65, 9 + 2 * 4),  # 65 bits take 9 bytes
        (Int(bits=4, axis="row"), 128, 64 + 4),  # QServe: 4.25 bits
        (Int(bits=4, axis="row"), 64, 32 + 4),  # QServe: 4.5 bits
        (Int(bits=4, symmetric=True), 64, 32 + 2),
        (Int(bits=4, scale_dtype="fp32"), 64, 32 + 8),
        (Int(bits=2, group=32, axis="channel"), 64, 16 + 64 * 4 / 32),  # 3 bits
        (Int(bits=2, group=32, axis="head"), 64, 16 + 4 / 32),
        (Log(bits=4), 64, 32 + 2),  # 4 + 16/64
        (Log(bits=4, group=16), 80, 40 + 5 * 2),
        (KMeans(bits=3), 64, 24),
        (KMeans(bits=3, per="layer", scale="row"), 128, 48 + 2 + 2),
        (Mixed(), 64, 32 + 4),
        (Mixed(bits=(2, 3), mean=2.1, group=16), 80, 21 + 5 * 4),  # 2.1 * 80 / 8 is 21, in decimals
        (Mixed(bits=(2, 8), mean=2.2), 64, 18 + 4),  # 17.6 up
        (Widths(), 64, 32 + 4),  # as int(bits=4)
        (Widths(bits=(3, 6), group=32), 64, 12 + 24 + 8),  # 32 x 3 and 32 x 6 bits
        (Widths(bits=(3, 6), group=60), 64, 26 + 8),  # 60 x 3 + 4 x 6 bits are 25.5 bytes
        (Float8(), 64, 64 + 2),
        (Float8(scale="none"), 64, 64),
        (Float8(kind="e5m2", scale="tensor"), 64, 64),
        (NvFp4(), 128, 64 + 8),  # 4.5 bits
        (NvFp4(scale="row"), 128, 64 + 8 + 4),  # 4.75 bits, the 76 bytes of FreeToken's pool
        (NvFp4(), 80, 40 + 5),
        (NvFp4(), 72, 36 + 5),  # the last group has 8 values
        (MxFp(bits=4), 64, 32 + 2),  # 4.25 bits
        (MxFp(bits=8), 64, 64 + 2),  # 8.25 bits
        (MxFp(bits=4), 80, 40 + 3),  # the last group has 16 values
        (Gguf(type="q8_0"), 64, 68),
        (Gguf(type="q5_1"), 64, 48),
        (Gguf(type="q5_0"), 64, 44),
        (Gguf(type="q4_1"), 128, 80),
        (Gguf(type="q4_0"), 128, 72),
        (Gguf(type="iq4_nl"), 96, 54),
        (Rotated(bits=4), 64, 32 + 2),  # 4.25 bits
        (Rotated(bits=3), 64, 24 + 2),  # 3.25 bits
        (Sketch(m=256), 128, 32 + 2),  # 2 + 16/128 bits
        (Sketch(m=100), 64, 13 + 2),
    ],
    ids=str,
)
def test_row(part, width, bytes_a_row):
    assert row(part, width) == bytes_a_row


@pytest.mark.parametrize(
    ("part", "bits", "bytes_a_token"),
    [
        (Int(bits=8), 8.5, 12_240),
        (Gguf(type="q8_0"), 8.5, 12_240),
        (Int(bits=4, group=32), 5, 7_200),
        (Int(bits=4), 4.5, 6_480),
        (Gguf(type="q4_0"), 4.5, 6_480),
        (NvFp4(), 4.5, 6_480),
        (Int(bits=2, group=32), 3, 4_320),
        (Full(), 16, 23_040),
    ],
    ids=str,
)
def test_smollm2_table(part, bits, bytes_a_token):
    # 30 layers x keys and values x 3 heads x 64 values = 11,520 values a token; fp16 takes 23,040 bytes
    grown = held(part, 1000, SMOL, 1)[0], held(part, 999, SMOL, 1)[0]
    token = 60 * (sum(grown[0].values()) - sum(grown[1].values()))
    assert token == bytes_a_token == 11_520 * bits / 8


def test_channel_groups():
    # 2 groups of 32 rows x 3 heads x 64 channels x fp16
    own, model = held(Int(bits=2, group=32, axis="channel"), 64, SMOL)
    assert own == {"codes": 3 * 64 * 16, "scale": 2 * 3 * 64 * 2, "min": 2 * 3 * 64 * 2}
    assert model == {}


def test_shared_scales():
    assert held(Int(bits=4, axis="head"), 128, SMOL)[0] == {"codes": 128 * 3 * 32, "scale": 2 * 3 * 2, "min": 2 * 3 * 2}
    assert held(Int(bits=4, axis="layer"), 128, SMOL)[0] == {"codes": 128 * 3 * 32, "scale": 2 * 2, "min": 2 * 2}


def test_codebooks():
    # 2^3 centroids of 2 bytes: one for each of 3 x 64 channels, for each of 3 heads, for the layer's side
    assert held(KMeans(bits=3), 10, SMOL)[1] == {"codebook": 3 * 64 * 8 * 2}
    assert held(KMeans(bits=3, per="tensor"), 10, SMOL)[1] == {"codebook": 3 * 8 * 2}
    assert held(KMeans(bits=3, per="layer"), 0, SMOL)[1] == {"codebook": 8 * 2}


def test_stored_with_the_model():
    assert held(Float8(scale="tensor"), 0, SMOL) == ({"codes": 0}, {"scale": 4})
    assert held(Rotated(bits=4), 0, WIDE)[1] == {"signs": 128, "centroids": 16 * 2}
    assert held(Sketch(m=256), 0, WIDE)[1] == {"projection": 256 * 128 * 2}
    assert held(Sketch(m=256), 0, at(128, value_bits=32))[1] == {"projection": 256 * 128 * 4}


def test_width_map_appears_with_the_first_row():
    assert held(Mixed(group=16), 0, SMOL)[0]["widths"] == 0
    assert held(Mixed(group=16), 1, SMOL)[0]["widths"] == held(Mixed(group=16), 9999, SMOL)[0]["widths"] == 3 * 4


@pytest.mark.parametrize(
    ("part", "prompt", "tokens", "scales"),
    [
        (NvFp4(), 0, 0, 0),
        (NvFp4(), 1000, 1000, 1),
        (NvFp4(), 1000, 1010, 11),
        (NvFp4(), 0, 10, 10),
        (NvFp4(residual=128), 100, 128, 0),
        (NvFp4(residual=128), 100, 130, 2),
        (NvFp4(residual=128), 129, 130, 2),
        (NvFp4(residual=128, flush="all"), 300, 300, 1),
        (NvFp4(residual=128, flush="all"), 300, 512, 3),
        (NvFp4(residual=128, flush="all"), 5, 128, 1),
    ],
)
def test_nvfp4_scale_a_flushed_block(part, prompt, tokens, scales):
    blocks = part.flushes(prompt, tokens)
    assert held(part, part.quantized(tokens), SMOL, blocks)[0]["block_scale"] == 4 * scales


def test_outliers():
    # ceil(0.01 x 64) = 1, ceil(0.01 x 128) = 2, ceil(0.02 x 512) = 11 whose places need two bytes
    assert held(Outliers(fraction=0.01), 10, SMOL)[0] == {"values": 3 * 10 * 2, "index": 3 * 10}
    assert held(Outliers(fraction=0.01), 10, WIDE)[0] == {"values": 8 * 10 * 4, "index": 8 * 10 * 2}
    assert held(Outliers(fraction=0.02), 10, at(512))[0] == {"values": 10 * 22, "index": 10 * 22}
    assert held(Outliers(fraction=0.02), 10, at(256))[0] == {"values": 10 * 12, "index": 10 * 6}
    assert Outliers(fraction=0.3).count(10) == 3  # 0.3 x 10 is 3, whatever 0.3 is in binary
    assert Outliers(fraction=1.0).count(64) == 64


def test_lowrank():
    # A: 128 rows x 4; B: 2 blocks x 4 x 64; 2 bytes each, 3 heads
    assert held(LowRank(rank=4), 128, SMOL, 2)[0] == {"row_factors": 3 * 128 * 8, "block_factors": 3 * 2 * 4 * 64 * 2}


@pytest.mark.parametrize(
    "part",
    [
        Int(bits=4, residual=64, flush="all"),
        Int(bits=4, axis="channel"),
        Int(bits=4, axis="channel", group=5),
        Rotated(residual=5, flush="all"),
    ],
    ids=str,
)
def test_lowrank_stands_on_blocks(part):
    LowRank(rank=4).check_format(part)


def test_lowrank_corrects_the_prompt_alone_where_later_blocks_are_too_small():
    # GEAR as semantics writes it: 100 prompt rows in one block, then 20 rows one by one
    smol = Layer(Attention("full", 9, 3, 64, 64))
    layout = layer_layout(smol, parse_method("int(bits=2)+outliers(0.02)+lowrank(4)"), 100, 20, 16)
    held = {b.name: b.bytes for b in layout.buffers}
    # A: 3 heads x 100 rows x 4 x 2 B; B: 3 heads x 1 block x 4 x 64 x 2 B; ceil(0.02 x 64) = 2 outliers in all 120 rows
    assert held["k.lowrank.row_factors"] == 2400
    assert held["k.lowrank.block_factors"] == 1536
    assert held["k.outliers.values"] == 3 * 120 * 2 * 2
    # a prompt of 4 rows has no error of rank 4 worth keeping
    small = layer_layout(smol, parse_method("int(bits=2)+lowrank(4)"), 4, 20, 16)
    assert all(b.bytes == 0 for b in small.buffers if "lowrank" in b.name)


def test_lowrank_needs_values_back():
    with pytest.raises(KvsimError, match="lowrank"):
        LowRank(rank=4).check_format(Sketch(residual=64, flush="all"))


def test_outliers_need_values_back():
    Outliers().check_format(Int())
    with pytest.raises(KvsimError, match="sketch only estimates"):
        Outliers().check_format(Sketch())


REFUSED = [
    (lambda: Int(bits=0), "bits"),
    (lambda: Int(bits=9), "bits"),
    (lambda: Int(bits=True), "bits"),
    (lambda: Int(bits=4.0), "whole"),
    (lambda: Int(bits=1, symmetric=True), "symmetric"),
    (lambda: Int(group=0), "group"),
    (lambda: Int(axis="tokens"), "did you mean 'token'"),
    (lambda: Int(axis="row", group=32), "axis=row"),
    (lambda: Int(residual=-1), "residual"),
    (lambda: Int(flush="all"), "multiple of 1"),
    (lambda: Int(axis="channel", group=32, residual=48, flush="all"), "multiple of 32"),
    (lambda: Log(bits=1), "bits"),
    (lambda: KMeans(per="head"), "per"),
    (lambda: Mixed(bits=(8, 4)), "rising"),
    (lambda: Mixed(bits=(4, 4)), "rising"),
    (lambda: Mixed(bits=()), "list"),
    (lambda: Mixed(bits=4), "list"),
    (lambda: Mixed(bits=(4, 16)), "bits"),
    (lambda: Mixed(mean=1.5), "lie in 2 to 8"),
    (lambda: Mixed(mean=8.5), "mean"),
    (lambda: Mixed(mean=float("nan")), "mean"),
    (lambda: Widths(bits=(0, 4)), "bits"),
    (lambda: Widths(bits=4), "list"),
    (lambda: Float8(kind="e3m4"), "kind"),
    (lambda: Float8(calibration="x"), "scale=tensor"),
    (lambda: NvFp4(scale="tensor"), "scale"),
    (lambda: MxFp(bits=6), "4 .E2M1. or 8"),
    (lambda: Gguf(type="q6_k"), "type"),
    (lambda: Rotated(bits=9), "bits"),
    (lambda: Sketch(m=0), "m must"),
    (lambda: Sketch(rope="pre"), "never rebuilt"),
    (lambda: Outliers(fraction=0.0), "above 0"),
    (lambda: Outliers(fraction=1.5), "fraction"),
    (lambda: LowRank(rank=0), "rank"),
]


@pytest.mark.parametrize(("make", "word"), REFUSED)
def test_refused(make, word):
    with pytest.raises(KvsimError, match=word):
        make()


VALUES = Place("v", 3, 64, 9, layer=7)


@pytest.mark.parametrize(
    ("part", "place", "word"),
    [
        (Int(group=128), VALUES, "values of layer 7"),
        (Log(group=65), VALUES, "group"),
        (Mixed(group=65), VALUES, "group"),
        (Widths(group=65), VALUES, "group"),
        (Widths(bits=(4, 3)), VALUES, "3 heads of 1 groups; give 1, 3 or 3"),
        (Gguf(), at(80), "blocks of 32"),
        (Sketch(), VALUES, "values of layer 7"),
        (Sketch(), at(512, mla=True), "MLA"),
        (Int(rope="pre"), VALUES, "rope"),
        (KMeans(rope="pre"), at(512, mla=True), "rope"),
    ],
    ids=str,
)
def test_places_refused(part, place, word):
    with pytest.raises(KvsimError, match=word):
        part.check_place(place)


def test_whole_numbers_are_decimals():
    assert Mixed(mean=4) == Mixed(mean=4.0)
    assert str(Mixed(mean=4)) == "mixed(bits=(2,4,8),mean=4.0)"
    assert Float8(scale=None) == Float8(scale="none")


def test_given_widths_fall_on_heads_and_groups_in_order():
    assert Widths(bits=(5,)).of_groups(3, 64) == [5, 5, 5]
    assert Widths(bits=(4, 3, 5), group=32).of_groups(3, 64) == [4, 4, 3, 3, 5, 5]  # a number a head
    assert Widths(bits=(4, 3, 5, 2, 2, 8), group=32).of_groups(3, 64) == [4, 3, 5, 2, 2, 8]  # a number a group
    # heads of a row share its bytes: 64 x (4 + 3 + 5) bits are the 96 bytes of int(bits=4)
    own = {b.name: int(b.bytes) for b in Widths(bits=(4, 3, 5)).buffers(10, 1, Place("k", 3, 64, 9))}
    assert own == {"codes": 960, "scale": 60, "min": 60}


def test_a_row_of_all_heads_cannot_lose_one_heads_row():
    with pytest.raises(KvsimError, match="h2o drops other rows in each head, but widths writes one row"):
        parse_method("h2o(budget=0.5) | widths(bits=(4,3,5))")
    with pytest.raises(KvsimError, match="writes keys of several heads together"):
        parse_method("ada(budget=0.5) | widths(bits=(4,3,5))")
    assert str(parse_method("snapkv(budget=0.5) | widths(bits=(4,3,5))"))
