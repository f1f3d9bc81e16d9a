"""Every basis under every format, laid out in a layer: exact sums, scalars against arrays, sides that store nothing."""

import numpy as np
import pytest

from kvsim.errors import KvsimError
from kvsim.grammar import presets
from kvsim.layout import layer_layout
from kvsim.method import parse_method, preset_name
from kvsim.model import Attention, Layer
from kvsim.parts import parts

LAYER = Layer(Attention("full", n_heads=9, n_kv_heads=3, k_dim=64, v_dim=64))
LENGTHS = np.array([0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193, 257, 1021])
BASES = [n for n, p in parts().items() if p.role == "basis"]
FORMATS = [n for n, p in parts().items() if p.role == "format"]
FLUSHED = "residual=64,flush=all"


def cache_bytes(text, prompt, new=0, allocated=False):
    layout = layer_layout(LAYER, parse_method(text), prompt, new, 16)
    return layout.bytes(1, allocated)


def written_pair(basis, form):
    """The pair with settings under which it stands: groups and blocks that fit latents of 16 and more."""
    if form == "full":
        return basis
    settings = {"int": "group=16,", "log": "group=16,", "mixed": "group=16,"}.get(form, "") + FLUSHED
    chosen = {"elitekv": "elitekv(frequencies=4,rank=72)", "palu": "palu(rope=post)"}.get(basis, basis)
    return f"k:{chosen} | {form}({settings}) v:{chosen}" if form == "sketch" else f"{chosen} | {form}({settings})"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("basis", BASES)
def test_pairs(basis, form):
    text = written_pair(basis, form)
    if basis == "elitekv" and form == "sketch":
        with pytest.raises(KvsimError, match="one latent"):
            parse_method(text)
        return
    method = parse_method(text)
    assert parse_method(str(method)) == method
    for new in (0, 1, 64, 200):
        many = cache_bytes(text, LENGTHS, new)
        assert np.broadcast_to(many, LENGTHS.shape).tolist() == [cache_bytes(text, int(n), new) for n in LENGTHS]
    bytes_, room = cache_bytes(text, LENGTHS), cache_bytes(text, LENGTHS, allocated=True)
    assert np.all(bytes_ <= room)


def test_svd_int_by_hand():
    # 100 rows, 64 of them encoded: 3 heads x 32 coefficients of 4 bits and one fp16 scale and minimum for each 16;
    # 36 rows of 3 x 32 coefficients in full; a basis of 3 x 32 x 64
    side = 64 * 3 * (16 + 2 * 4) + 36 * 3 * 32 * 2 + 3 * 32 * 64 * 2
    assert cache_bytes("svd(rank=32) | int(bits=4,group=16,residual=64,flush=all)", 100) == 2 * side
    # fewer rows than the rank stay as they are
    assert cache_bytes("svd(rank=32) | int(bits=4,group=16,residual=64,flush=all)", 31) == 31 * 2 * 3 * 64 * 2


def test_elitekv_by_hand():
    # 10 rows of 3 x 8 + 64 joint values beside the keys and none beside the values; the model's bases and indices
    model = 64 * 3 * 56 * 2 + 64 * 3 * 64 * 2 + 3 * 4
    assert cache_bytes("elitekv(frequencies=4,rank=64)", 10) == 10 * 88 * 2 + model
    # as bytes: 88 codes, and a scale a row
    assert cache_bytes("elitekv(frequencies=4,rank=64) | float8", 10) == 10 * (88 + 2) + model


def test_online_svd_keeps_maps_only_for_quantized_blocks():
    # prompt of 128 rows: one block; 64 more flush another
    base = 3 * (16 * 64 * 2 + 16 * 4)
    assert cache_bytes("online_svd(rank=16)", 192) == 2 * (192 * 3 * 16 * 2 + base)
    coded = 192 * 3 * (8 + 4)
    maps = 2 * 3 * 16 * 16 * 2
    assert cache_bytes("online_svd(rank=16) | int(bits=4,group=16,residual=64,flush=all)", 128, 64) == 2 * (
        coded + base + maps
    )


def test_gear_by_hand():
    # 130 rows: 128 in one prompt block. Codes 16 bytes a row; keys 2 groups of 64 rows x 64 channels, values 1 group
    # a row, each 4 bytes; 2 outliers of 3 bytes; A 4 x 2 bytes a row, B 4 x 64 x 2; two rows in full
    keys = 128 * 16 + 2 * 64 * 4 + 128 * (2 * 3 + 8) + 4 * 64 * 2
    values = 128 * (16 + 4) + 128 * (2 * 3 + 8) + 4 * 64 * 2
    assert cache_bytes("gear", 130) == 3 * (keys + values) + 2 * 2 * 3 * 64 * 2


PRESETS = [n for n in presets() if parse_method(n).tokens.name == "keep"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    method, facts = parse_method(name), presets()[name]
    assert parse_method(str(method)) == method
    assert facts.source
    assert facts.summary
    assert preset_name(method) == ("gear" if name == "gear-2" else name)
    many = cache_bytes(name, LENGTHS, 100)
    assert np.broadcast_to(many, LENGTHS.shape).tolist() == [cache_bytes(name, int(n), 100) for n in LENGTHS]
    # at 4096 tokens every preset saves, fixed buffers of the model included
    assert cache_bytes(name, 4096) < 4096 * 2 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8),
        ("int8", 8.5),
        ("q8_0", 8.5),
        ("int4", 4.5),
        ("q4_0", 4.5),
        ("int2", 3),
        ("mxfp4", 4.25),
        ("mxfp8", 8.25),
        ("q5_1", 6),
        ("q5_0", 5.5),
        ("q4_1", 5),
        ("iq4_nl", 4.5),
        ("qserve-kv4", 4.5),
        ("k4v2", 4),
    ],
)
def test_bits_a_value(name, bits):
    assert cache_bytes(name, 1000) == 1000 * 2 * 3 * 64 * bits / 8


def test_overrides():
    assert parse_method("kivi-2(bits=4)") == parse_method("kivi-4")
    assert parse_method("fp8(scale=row)") == parse_method("float8")
    assert parse_method("jl-sparse(rank=16)") == parse_method("random_projection(rank=16,kind=sparse)")
