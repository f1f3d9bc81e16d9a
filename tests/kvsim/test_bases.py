"""Coefficients, fixed buffers and arithmetic of every basis, by hand; ranks that a place does not have."""

import numpy as np
import pytest

from kvsim.bases.cp import Cp
from kvsim.bases.elitekv import EliteKv
from kvsim.bases.learned_projection import LearnedProjection
from kvsim.bases.nmf import Nmf
from kvsim.bases.online_svd import OnlineSvd
from kvsim.bases.palu import Palu
from kvsim.bases.random_projection import RandomProjection
from kvsim.bases.svd import Svd
from kvsim.bases.tucker import Tucker
from kvsim.errors import KvsimError
from kvsim.formats.full import Full
from kvsim.formats.int import Int
from kvsim.formats.nvfp4 import NvFp4
from kvsim.formats.sketch import Sketch
from kvsim.latent import svd_flops
from kvsim.parts import Latent, Place

K = Place("k", 3, 64, 9, layer=4)  # SmolLM2-135M
V = Place("v", 3, 64, 9, layer=4)
WIDE = Place("k", 8, 128, 32)


def held(part, rows, place, blocks=0):
    found = part.buffers(rows, blocks, place)
    return ({b.name: b.bytes for b in found if not b.per_model}, {b.name: b.bytes for b in found if b.per_model})


@pytest.mark.parametrize(
    ("part", "place", "heads", "width"),
    [
        (Svd(rank=32), K, 3, 32),
        (Svd(rank=64), K, 3, 64),
        (Svd(rank=96, joint="heads"), K, 1, 96),
        (Svd(rank=192, joint="heads"), K, 1, 192),
        (OnlineSvd(rank=16), V, 3, 16),
        (RandomProjection(rank=40), K, 3, 40),
        (LearnedProjection(rank=8), V, 3, 8),
        # 3 heads: the largest divisor up to 4 is 3, half of 3 x 64 is 96; 8 heads: two groups of 4, 256 each
        (Palu(), K, 1, 96),
        (Palu(), WIDE, 2, 256),
        (Palu(rank=100), WIDE, 2, 100),
        (Palu(group=1), K, 3, 32),
        (Palu(ratio=0.3, group=1), K, 3, 20),
        (Palu(), Place("k", 5, 64, 15), 5, 32),
        (Palu(), Place("k", 6, 64, 6), 2, 96),
        # 3 heads x 2 x 4 rotated values and 64 joint ones; nothing beside the values
        (EliteKv(), K, 1, 88),
        (EliteKv(), V, 1, 0),
        (EliteKv(frequencies=32, rank=10), K, 1, 202),
        (EliteKv(frequencies=0, rank=10), K, 1, 10),
        (Tucker(), K, 1, 64),
        (Tucker(ranks=(10, 2, 16)), K, 1, 10),
        (Cp(rank=50), K, 1, 50),
        (Cp(rank=192), K, 1, 192),
        (Nmf(rank=16), K, 3, 32),
        (Nmf(rank=16, sign="shift"), K, 3, 16),
    ],
    ids=str,
)
def test_latent(part, place, heads, width):
    assert part.latent(place) == Latent(heads, width)


def test_svd_bytes():
    # rank x width x heads x 2 bytes; joint: rank x (3 x 64) x 2
    assert held(Svd(rank=32), 32, K) == ({"basis": 3 * 32 * 64 * 2}, {})
    assert held(Svd(rank=32), 31, K)[0] == {"basis": 0}
    assert held(Svd(rank=96, joint="heads"), 100, K)[0] == {"basis": 96 * 192 * 2}
    assert held(Svd(rank=32), 100, Place("k", 3, 64, 9, value_bits=32))[0] == {"basis": 3 * 32 * 64 * 4}

    # it saves where r (n + d) < n d: at rank 32 of 64 from 64 rows on
    def saved(n):
        return n * 3 * 64 * 2 - n * 3 * 32 * 2 - held(Svd(rank=32), n, K)[0]["basis"]

    assert saved(64) == 0 < saved(65)


def test_online_svd_bytes():
    own, model = held(OnlineSvd(rank=16), 100, K)
    assert own == {"basis": 3 * 16 * 64 * 2, "spectrum": 3 * 16 * 4, "maps": 0}
    assert model == {}
    # two quantized blocks: two maps of 16 x 16 a head
    assert held(OnlineSvd(rank=16), 100, K, 2)[0]["maps"] == 3 * 2 * 16 * 16 * 2
    assert held(OnlineSvd(rank=16), 15, K, 0)[0] == {"basis": 0, "spectrum": 0, "maps": 0}


def test_calibrated_and_random_are_the_models():
    assert held(RandomProjection(rank=32), 0, K) == ({}, {"matrix": 32 * 64 * 2})
    assert held(RandomProjection(rank=32, kind="sparse"), 9, K) == ({}, {"matrix": 32 * 64 * 2})
    assert held(RandomProjection(rank=32, kind="embedding"), 9, K) == ({}, {"buckets": 64 * 2, "signs": 64})
    both = 3 * 8 * 64 * 2
    assert held(LearnedProjection(rank=8), 9, K) == ({}, {"encoder": both, "decoder": both})
    # palu: each of 8 heads has a 256 x 128 slice of its group's factors
    both = 8 * 256 * 128 * 2
    assert held(Palu(), 9, WIDE) == ({}, {"encoder": both, "decoder": both})
    # elitekv: 64 x 3 x (64 - 8) beside the keys, 64 x 3 x 64 beside the values, 4 frequencies a head in a byte each
    assert held(EliteKv(), 9, K) == ({}, {"basis": 64 * 168 * 2, "elite": 12})
    assert held(EliteKv(), 9, V) == ({}, {"basis": 64 * 192 * 2})
    assert held(EliteKv(), 9, Place("k", 1, 576, 9))[1]["elite"] == 8


def test_tensor_bytes():
    own, _ = held(Tucker(ranks=(10, 2, 16)), 10, K)
    assert own == {"core": 10 * 2 * 16 * 2, "head_factor": 3 * 2 * 2, "channel_factor": 64 * 16 * 2}
    assert held(Tucker(), 64, K)[0] == {
        "core": 64 * 3 * 32 * 2,
        "head_factor": 3 * 3 * 2,
        "channel_factor": 64 * 32 * 2,
    }
    assert sum(held(Tucker(), 63, K)[0].values()) == 0
    assert held(Cp(rank=50), 50, K)[0] == {"head_factor": 3 * 50 * 2, "channel_factor": 64 * 50 * 2}
    assert held(Nmf(rank=16), 16, K)[0] == {"factors": 3 * 32 * 64 * 2}
    assert held(Nmf(rank=16, sign="shift"), 16, K)[0] == {"factors": 3 * 16 * 64 * 2, "offset": 3 * 64 * 2}


@pytest.mark.parametrize(
    ("part", "place", "word"),
    [
        (Svd(rank=65), K, "rank 65 exceeds 64.*keys of layer 4"),
        (Svd(rank=193, joint="heads"), K, "heads x width"),
        (OnlineSvd(rank=65), V, "values of layer 4"),
        (RandomProjection(rank=65), K, "64 or less"),
        (LearnedProjection(rank=65), K, "learned_projection"),
        (Palu(rank=193), K, "values of 3 heads"),
        (Palu(group=2), K, "does not divide the 3 heads"),
        (EliteKv(frequencies=33), K, "frequencies exceed 32"),
        (EliteKv(rank=193), V, "rank 193"),
        (Tucker(ranks=(8, 4, 16)), K, "rank 4 exceeds 3, the heads"),
        (Tucker(ranks=(8, 3, 65)), K, "rank 65"),
        (Tucker(ranks=(33, 1, 32)), K, "rank 33 exceeds 32"),
        (Cp(rank=193), K, "192"),
        (Nmf(rank=65, sign="shift"), K, "rank 65"),
        (Nmf(rank=33), K, "rank=32 or less, or sign=shift"),
    ],
    ids=str,
)
def test_ranks_refused(part, place, word):
    with pytest.raises(KvsimError, match=word):
        part.latent(place)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Svd(rank=0), "rank"),
        (lambda: Svd(joint="layers"), "joint"),
        (lambda: Svd(rope="mid"), "rope"),
        (lambda: RandomProjection(kind="hadamard"), "kind"),
        (lambda: Palu(rank=8, ratio=0.25), "not both"),
        (lambda: Palu(ratio=0.0), "above 0"),
        (lambda: Palu(ratio=1.1), "ratio"),
        (lambda: Tucker(ranks=(4, 4)), "tokens,heads"),
        (lambda: Tucker(ranks=(0, 1, 1)), "above 0"),
        (lambda: Tucker(ranks=8), "list"),
        (lambda: Nmf(sign="abs"), "sign"),
        (lambda: EliteKv(frequencies=-1), "frequencies"),
        (lambda: Svd(rank=2.0), "whole"),
    ],
)
def test_settings_refused(make, word):
    with pytest.raises(KvsimError, match=word):
        make()


def test_formats_that_a_basis_refuses():
    fine = Int(bits=4, residual=64, flush="all")
    OnlineSvd(rank=32).check_format(fine)
    OnlineSvd(rank=32).check_format(Full())
    for part in (
        Int(bits=4),
        Int(bits=4, residual=32, flush="all"),
        NvFp4(residual=128),
        Int(axis="channel", group=32),
    ):
        with pytest.raises(KvsimError, match="32 x 32 map"):
            OnlineSvd(rank=32).check_format(part)
    Svd(rank=32).check_format(Sketch())
    for basis in (Svd(rank=32, rope="pre"), EliteKv(), Palu()):
        with pytest.raises(KvsimError, match="sketch"):
            basis.check_format(Sketch())


def test_minimum_rows_and_sides():
    assert [
        p.minimum_rows for p in (Svd(rank=7), OnlineSvd(rank=7), Tucker(ranks=(7, 1, 8)), Cp(rank=7), Nmf(rank=7))
    ] == [7] * 5
    assert [p.minimum_rows for p in (RandomProjection(), LearnedProjection(), Palu(), EliteKv())] == [0] * 4
    assert [p.calibrated for p in (LearnedProjection(), Palu(), EliteKv(), Svd(), RandomProjection())] == [True] * 3 + [
        False
    ] * 2
    assert EliteKv.both_sides
    assert not EliteKv().before_rope
    assert Palu().before_rope
    assert Svd(rope="pre").before_rope
    assert not Svd().before_rope
    assert OnlineSvd.rewrites_rows
    assert not Svd.rewrites_rows


def test_svd_arithmetic():
    # 100 x 64: 4 n d^2 + 8 d^3; 40 x 64 is wide: d is 40
    assert svd_flops(100, 64) == (8 * 64**3, 4 * 100 * 64**2)
    assert svd_flops(40, 64) == (8 * 40**3, 4 * 64 * 40**2)
    work = Svd(rank=32).fit_work(100, K)
    assert work.arithmetic == 3 * (4 * 100 * 64**2 + 8 * 64**3 + 2 * 100 * 64 * 32)
    assert (work.read_bytes, work.write_bytes) == (100 * 3 * 64 * 2, 3 * 32 * 64 * 2)
    assert not Svd(rank=32).fit_work(31, K)
    assert Svd(rank=32).write_work(K).arithmetic == 3 * 2 * 32 * 64
    # joint: one 100 x 192 decomposition
    assert Svd(rank=96, joint="heads").fit_work(100, K).arithmetic == sum(svd_flops(100, 192)) + 2 * 100 * 192 * 96


def test_attention_in_the_latent():
    # 9 query heads: enter 2 x 64 x 32 once, and 32 fewer products a row
    assert Svd(rank=32).attend_flops(1000, K) == 9 * (2 * 64 * 32 - 2 * 1000 * 32)
    assert Svd(rank=32).attend_flops(1000, V) == 9 * (2 * 64 * 32 - 2 * 1000 * 32)
    # fewer rows than the rank are plain attention
    assert Svd(rank=32).attend_flops(31, K) == 0
    # before the rotation each of 3 heads rebuilds 2 x 32 x 64 and turns 3 x 64 a row; values stay in the latent
    assert Svd(rank=32, rope="pre").attend_flops(1000, K) == 1000 * 3 * (2 * 32 * 64 + 3 * 64)
    assert Svd(rank=32, rope="pre").attend_flops(1000, V) == Svd(rank=32).attend_flops(1000, V)
    # a count sketch enters with one signed sum a channel
    assert RandomProjection(rank=32, kind="embedding").attend_flops(0, K) == 0
    assert RandomProjection(rank=32, kind="embedding").attend_flops(10, K) == 9 * (2 * 64 - 2 * 10 * 32)
    # elitekv: 56 plain values enter 64 joint ones, a row costs 8 + 64 instead of 64
    assert EliteKv().attend_flops(10, K) == 9 * (2 * 56 * 64 + 2 * 10 * 8)
    assert EliteKv(rank=10).attend_flops(10, V) == 9 * (2 * 64 * 10 - 2 * 10 * 54)


def test_writing_a_row():
    assert Cp(rank=50).write_work(K).arithmetic == 3 * (2 * 64 * 50 + 50) + 3 * 50 + 2 * 50 * 50
    # 64 -> 16 channels for 3 heads, 3 -> 2 heads, core 10 x 32, solve 10 x 10 both ways
    by_hand = 2 * 3 * 16 * 64 + 2 * 3 * 16 * 2 + 2 * 32 * 10 + 2 * 100
    assert Tucker(ranks=(10, 2, 16)).write_work(K).arithmetic == by_hand
    assert Nmf(rank=16).write_work(K).arithmetic == 3 * 2 * (2 * 64 * 16 + 20 * 2 * 16**2)
    assert Nmf(rank=16, sign="shift").write_work(K).arithmetic == 3 * (2 * 64 * 16 + 20 * 2 * 16**2)
    # Brand: 4 d r + 21 (r+1)^3 + 2 d r (r+1) a head, and the older rows turn: 2 r^2 each
    assert OnlineSvd(rank=16).write_work(K).arithmetic == 3 * (4 * 64 * 16 + 21 * 17**3 + 2 * 64 * 16 * 17)
    assert OnlineSvd(rank=16).rewrite_work(100, K).arithmetic == 3 * 100 * 2 * 16**2
    assert OnlineSvd(rank=16).rewrite_work(100, K).write_bytes == 3 * 100 * 16 * 2
    assert not Svd().rewrite_work(100, K)


ALL = [
    Svd(),
    Svd(joint="heads", rank=96),
    Svd(rope="pre"),
    OnlineSvd(),
    RandomProjection(),
    RandomProjection(kind="embedding"),
    LearnedProjection(),
    Palu(),
    Palu(rope="post"),
    EliteKv(),
    Tucker(),
    Tucker(rope="pre"),
    Cp(),
    Nmf(),
    Nmf(sign="shift"),
]


@pytest.mark.parametrize("part", ALL, ids=str)
def test_arrays_are_scalars(part):
    rows = np.array([0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 4093])
    for place in (K, V):
        many = part.fit_work(rows, place)
        one = [part.fit_work(int(n), place) for n in rows]
        for name in ("flops", "read_bytes", "write_bytes"):
            expected = [float(getattr(w, name)) for w in one]
            assert np.broadcast_to(getattr(many, name), rows.shape).tolist() == pytest.approx(expected)
        assert part.attend_flops(rows, place).tolist() == pytest.approx(
            [float(part.attend_flops(int(n), place)) for n in rows]
        )
        for several, *single in zip(
            part.buffers(rows, 0 * rows, place), *(part.buffers(int(n), 0, place) for n in rows), strict=True
        ):
            assert np.broadcast_to(several.bytes, rows.shape).tolist() == [b.bytes for b in single]


@pytest.mark.parametrize("part", ALL, ids=str)
def test_work_is_finite_and_positive(part):
    for place in (K, V):
        fit, write = part.fit_work(4093, place), part.write_work(place)
        for value in (fit.arithmetic, fit.read_bytes, write.arithmetic, write.read_bytes):
            assert np.isfinite(value)
            assert value > 0
        assert np.isfinite(part.attend_flops(4093, place))


@pytest.mark.parametrize("part", ALL, ids=str)
def test_fewer_values_a_row_than_full(part):
    stored = sum(part.latent(p).heads * part.latent(p).width for p in (K, V))
    assert stored < 2 * 3 * 64
