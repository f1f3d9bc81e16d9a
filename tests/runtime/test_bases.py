"""Every basis on the contract: shapes, buffers as declared, maps that reconstruct, determinism, dtypes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.bases.cp import Cp
from kvsim.bases.elitekv import EliteKv
from kvsim.bases.identity import Identity
from kvsim.bases.learned_projection import LearnedProjection
from kvsim.bases.nmf import Nmf
from kvsim.bases.online_svd import OnlineSvd
from kvsim.bases.palu import Palu
from kvsim.bases.random_projection import RandomProjection
from kvsim.bases.svd import Svd
from kvsim.bases.tucker import Tucker
from kvsim.errors import KvsimError
from kvsim.parts import Basis, Place, parts
from runtime.latent import rebuild
from runtime.parts import Setting, twins

BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


def setting(heads=3, width=64, side="k", dtype=torch.float32, calibration=None, seed=0, layer=0):
    place = Place(side, heads, width, 3 * heads, BITS[dtype], layer)
    return Setting(place, dtype, calibration=calibration or {}, seed=seed)


def twin(part, where):
    return twins()[part.name](part, where)


def calibrated(part, where, rows=400):
    """A calibration of random matrices that suits a part at a place."""
    g = torch.Generator().manual_seed(1)
    heads, width, found = where.place.heads, where.place.width, {}
    maker = twin(part, where)
    if part.name == "elitekv":
        plain = part.plain(where.place)
        found["elitekv.4.basis"] = torch.randn(part.rank, heads * plain, generator=g) / (heads * plain) ** 0.5
        if where.place.side == "k":
            found["elitekv.4.elite"] = torch.arange(4).expand(heads, -1).clone()
            found["elitekv.4.rotary"] = torch.tensor(width)
    elif part.calibrated:
        found = maker.calibrate(torch.randn(1, heads, rows, width, generator=g))
    return found


def everything(heads, width):
    """One of each, with ranks that the place has."""
    return [
        Identity(), Svd(rank=16), Svd(rank=width, joint="heads"), OnlineSvd(rank=8),
        RandomProjection(rank=16), RandomProjection(rank=16, kind="sparse"),
        RandomProjection(rank=16, kind="embedding"),
        LearnedProjection(rank=8), Palu(rank=20), Palu(group=1), Tucker(ranks=(16, 0, 16), iterations=2),
        Tucker(ranks=(8, 1, 12), iterations=2), Cp(rank=12, iterations=3), Nmf(rank=8, iterations=5),
        Nmf(rank=8, sign="shift", iterations=5), EliteKv(rank=24),
    ]


def rows(batch, heads, n, width, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, n, width, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [64, 80, 96])
@pytest.mark.parametrize("side", ["k", "v"])
def test_buffers_are_those_declared(width, heads, batch, dtype, side):
    for chosen in everything(heads, width):
        before = side == "v" and getattr(chosen, "rope", "post") == "pre"
        part = chosen.with_settings(rope="post") if before else chosen
        bare = setting(heads, width, side, dtype)
        basis = twin(part, setting(heads, width, side, dtype, calibrated(part, bare)))
        latent = part.latent(bare.place)
        for n in {max(part.minimum_rows, 1), 101}:
            x = rows(batch, heads, n, width, dtype)
            fixed = basis.fit(x)
            declared = {b.name: b for b in part.buffers(n, 0, bare.place) if b.width and np.all(b.rows)}
            held = {(k, False): t for k, t in fixed.items()} | {(k, True): t for k, t in basis.model_buffers().items()}
            assert {(b.name, b.per_model) for b in declared.values()} == set(held), part
            for (name, per_model), tensor in held.items():
                b = declared[name]
                assert tensor.shape == (1 if per_model else batch, b.heads, b.rows, b.width), (part, name)
                assert tensor.element_size() * 8 == b.bits, (part, name)
                assert tensor.untyped_storage().nbytes() == int(b.bytes) * (1 if per_model else batch), (part, name)
            c = basis.project(x, fixed)
            expected = (latent.heads, latent.width)
            if part.name == "elitekv":
                expected = (1, part.latent(setting(heads, width, "k").place).width)
            assert c.shape == (batch, expected[0], n, expected[1]), part
            assert c.dtype == dtype
            maps, offset = basis.maps(fixed), basis.offset(fixed)
            assert maps.shape[1:] == (heads, expected[1], width)
            assert maps.shape[0] in (1, batch)
            assert maps.dtype == dtype
            back = rebuild(c, maps, offset)
            assert back.shape == x.shape
            assert torch.isfinite(back).all(), part


def test_every_part_has_its_twin():
    names = {n for n, p in parts().items() if issubclass(p, Basis)}
    assert names == {p.name for p in everything(3, 64)} == {n for n in twins() if n in names}
    for part in everything(3, 64):
        assert twins()[part.name].__module__ == type(part).__module__.replace("kvsim", "runtime")


@settings(max_examples=25, deadline=None)
@given(heads=st.integers(1, 4), width=st.sampled_from([16, 24, 40]), n=st.integers(16, 70), batch=st.integers(1, 3),
       seed=st.integers(0, 99))
def test_rows_of_the_rank_come_back(heads, width, n, batch, seed):
    """Data of rank 6 is kept exactly by every fitted basis of rank 6 or more, fitted rows and later ones."""
    g = torch.Generator().manual_seed(seed)
    shared = torch.randn(batch, 1, n + 5, 6, generator=g)
    mixing = torch.randn(batch, heads, 6, width, generator=g)
    x = shared @ mixing
    for part in (Svd(rank=6), Svd(rank=6, joint="heads"), OnlineSvd(rank=8), Tucker(ranks=(6, 0, 0), iterations=1)):
        basis = twin(part, setting(heads, width))
        fixed = basis.fit(x[:, :, :n])
        back = rebuild(basis.project(x, fixed), basis.maps(fixed))
        assert (back - x).abs().max() < 2e-4 * x.abs().max(), part


@pytest.mark.parametrize("name", ["learned_projection", "palu", "elitekv"])
def test_calibrated_bases_refuse_to_run_without(name):
    basis = twins()[name](parts()[name](), setting())
    with pytest.raises(KvsimError, match="calibration=FILE"):
        basis.model_buffers()


def test_calibration_of_other_settings_is_refused():
    where = setting()
    made = calibrated(LearnedProjection(rank=8), where)
    narrower = twin(LearnedProjection(rank=5), setting(calibration=made)).model_buffers()
    assert torch.equal(narrower["encoder"][0], made["learned_projection.post.encoder"][:, :5])
    with pytest.raises(KvsimError, match=r"needs learned_projection\.post\.encoder of shape \(3, 9, 64\)"):
        twin(LearnedProjection(rank=9), setting(calibration=made)).model_buffers()
    with pytest.raises(KvsimError, match=r"not learned_projection\.pre\.encoder"):
        twin(LearnedProjection(rank=8, rope="pre"), setting(calibration=made)).model_buffers()
    grouped = calibrated(Palu(group=3), where)
    with pytest.raises(KvsimError, match="group1"):
        twin(Palu(group=1), setting(calibration=grouped)).model_buffers()


def test_random_bases_follow_the_seed():
    for part in everything(3, 64):
        if part.name not in ("random_projection", "cp", "nmf"):
            continue
        x = rows(1, 3, 50, 64)

        def run(seed, layer=0, part=part, x=x):
            basis = twin(part, setting(seed=seed, layer=layer))
            return basis.maps(basis.fit(x))

        assert torch.equal(run(1), run(1)), part
        if part.name == "random_projection":
            assert not torch.equal(run(1), run(2))
            assert not torch.equal(run(1), run(1, layer=3))


def test_rebuild_repeats_the_latent_of_a_group():
    # two groups of two heads, one coefficient each; head h's map is h + 1 in one channel
    c = torch.tensor([[[[10.0]], [[100.0]]]])
    maps = torch.arange(1.0, 5.0).reshape(1, 4, 1, 1)
    assert rebuild(c, maps).flatten().tolist() == [10, 20, 300, 400]
