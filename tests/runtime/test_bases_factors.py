"""Tucker, CP and NMF against tensorly, scikit-learn and scipy, and against SVD at equal bytes."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from kvsim.bases.cp import Cp
from kvsim.bases.nmf import Nmf
from kvsim.bases.svd import Svd
from kvsim.bases.tucker import Tucker
from kvsim.parts import Place
from runtime.bases.nmf import factorise, non_negative, start
from runtime.latent import rebuild
from runtime.parts import Setting, twins

tensorly = pytest.importorskip("tensorly")


def twin(part, heads, width, dtype=torch.float32, bits=32):
    return twins()[part.name](part, Setting(Place("k", heads, width, heads, bits), dtype))


def smooth(batch, heads, n, width, rank=8, noise=0.2, seed=0):
    """Rows of a few shared directions, stronger in some heads, and noise."""
    g = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(batch, m, rank, generator=g) for m in (n, heads, width))
    scale = 2.0 ** -torch.arange(rank)
    x = torch.einsum("bnr,bhr,bdr,r->bhnd", a, b, c, scale)
    return x + noise * torch.randn(x.shape, generator=g)


def whole(basis, x):
    fixed = basis.fit(x)
    return rebuild(basis.project(x, fixed), basis.maps(fixed), basis.offset(fixed))


def energy(x):
    return float(x.double().square().sum())


@pytest.mark.parametrize("ranks", [(8, 2, 6), (5, 0, 6), (12, 1, 12), (20, 4, 0)])
def test_tucker_equals_tensorlys(ranks):
    x = smooth(2, 4, 60, 16)
    basis = twin(Tucker(ranks=ranks, iterations=60), 4, 16)
    back = whole(basis, x)
    rt, rh, rd = basis.part.sizes(basis.place)
    for b in range(2):
        theirs = tensorly.decomposition.tucker(x[b].transpose(0, 1).double().numpy(), rank=(rt, rh, rd), n_iter_max=200,
                                               tol=1e-12)
        want = np.swapaxes(tensorly.tucker_to_tensor(theirs), 0, 1)
        np.testing.assert_allclose(back[b], want, atol=2e-3)
        assert energy(back[b] - x[b]) == pytest.approx(((want - x[b].numpy()) ** 2).sum(), rel=1e-4)


def test_tucker_of_all_heads_and_channels_is_the_joint_svd():
    x = smooth(1, 3, 50, 12)
    basis, joint = twin(Tucker(ranks=(7, 0, 0)), 3, 12), twin(Svd(rank=7, joint="heads"), 3, 12)
    torch.testing.assert_close(whole(basis, x), whole(joint, x), rtol=1e-3, atol=1e-3)


def test_tuckers_appended_rows_are_least_squares():
    x, later = smooth(1, 3, 50, 12), smooth(1, 3, 9, 12, seed=5)
    basis = twin(Tucker(ranks=(6, 2, 8)), 3, 12)
    fixed = basis.fit(x)
    unfolding = basis.maps(fixed)[0].transpose(0, 1).reshape(6, 36).double().numpy()
    want = np.linalg.lstsq(unfolding.T, later[0].transpose(0, 1).reshape(9, 36).double().numpy().T, rcond=None)[0].T
    np.testing.assert_allclose(basis.project(later, fixed)[0, 0], want, atol=1e-4)


def test_more_sweeps_never_lose():
    x = smooth(1, 4, 40, 16)
    for part in (Tucker(ranks=(6, 2, 5), iterations=1), Cp(rank=6, iterations=1)):
        errors = [energy(whole(twin(part.with_settings(iterations=i), 4, 16), x) - x) for i in (1, 3, 10, 30)]
        assert errors == sorted(errors, reverse=True) or np.allclose(errors, sorted(errors, reverse=True), rtol=1e-5)
        assert errors[-1] < errors[0]


@pytest.mark.parametrize("rank", [3, 8])
def test_cp_equals_tensorlys(rank):
    """The same start and as many sweeps give the same factors; ours then solves all rows for them once more."""
    x = smooth(1, 4, 40, 10, rank=5)
    basis = twin(Cp(rank=rank, iterations=12), 4, 10)
    back = whole(basis, x)
    heads, channels = basis.begin(x)
    begin = [np.zeros((40, rank)), heads[0].double().numpy(), channels[0].double().numpy()]
    theirs = tensorly.decomposition.parafac(
        x[0].transpose(0, 1).double().numpy(), rank, n_iter_max=12, tol=0,
        init=tensorly.cp_tensor.CPTensor((np.ones(rank), begin)),
    )
    _, (_, b, c) = theirs
    products = np.einsum("hr,dr->rhd", b, c).reshape(rank, 40)
    flat = x[0].transpose(0, 1).reshape(40, 40).double().numpy()
    want = (np.linalg.lstsq(products.T, flat.T, rcond=None)[0].T @ products).reshape(40, 4, 10)
    np.testing.assert_allclose(back[0].transpose(0, 1), want, atol=1e-2 * float(x.abs().max()))
    lost = ((tensorly.cp_to_tensor(theirs) - x[0].transpose(0, 1).numpy()) ** 2).sum()
    assert energy(back - x) <= lost * (1 + 1e-6)
    assert energy(back - x) == pytest.approx(lost, rel=0.02)


def test_cp_by_hand():
    # K = a (2, 1) (0, 3, 4): heads scaled 2 and 1, one channel direction; A carries the scale: |(2,1)| * 5 * a
    a = torch.tensor([1.0, -2.0, 0.5])
    x = torch.einsum("n,h,d->hnd", a, torch.tensor([2.0, 1.0]), torch.tensor([0.0, 3.0, 4.0]))[None]
    basis = twin(Cp(rank=1), 2, 3)
    fixed = basis.fit(x)
    assert basis.project(x, fixed).abs().flatten().tolist() == pytest.approx([5 * 5**0.5 * v for v in (1, 2, 0.5)])
    assert fixed["channel_factor"].abs().flatten().tolist() == pytest.approx([0, 0.6, 0.8], abs=1e-6)
    torch.testing.assert_close(whole(basis, x), x)


def test_cp_recovers_a_sum_of_terms_and_later_rows():
    x = smooth(1, 3, 120, 16, rank=4, noise=0.0)
    basis = twin(Cp(rank=4, iterations=300), 3, 16)
    fixed = basis.fit(x[:, :, :80])
    back = rebuild(basis.project(x, fixed), basis.maps(fixed))
    assert energy(back - x) < 1e-3 * energy(x)


def test_redundant_terms_stay_finite_in_half_precision():
    """More terms than the rows have: the normal matrix is singular, its null space must not be amplified."""
    x = smooth(1, 3, 80, 16, rank=2, noise=0.0)
    for part in (Cp(rank=40, iterations=10), Tucker(ranks=(40, 0, 0))):
        basis = twin(part, 3, 16, torch.bfloat16, bits=16)
        fixed = basis.fit(x.bfloat16())
        c = basis.project(x.bfloat16(), fixed)
        back = rebuild(c.float(), basis.maps(fixed).float())
        assert c.abs().max() < 30 * x.abs().max() * x.shape[1] ** 0.5
        assert energy(back - x) < 2e-3 * energy(x), part


def test_nmf_equals_scikit_learns_from_the_same_start():
    sklearn = pytest.importorskip("sklearn.decomposition")
    x = smooth(1, 1, 60, 20)[0, 0].abs()
    w, h = (t.double().numpy() for t in start(x, 5))
    model = sklearn.NMF(5, init="custom", solver="mu", max_iter=60, tol=0)
    with np.errstate(all="ignore"):
        theirs = model.fit_transform(x.double().numpy(), W=w.copy(), H=h.copy()) @ model.components_
    ours = factorise(x.double(), 5, 60).numpy()
    # the factors up to the length of each row
    want = model.components_ / np.linalg.norm(model.components_, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, want, atol=1e-4)
    back = (non_negative(x.double(), torch.from_numpy(ours)) @ torch.from_numpy(ours)).numpy()
    assert ((back - x.numpy()) ** 2).sum() <= ((theirs - x.numpy()) ** 2).sum() * 1.001


def test_nmfs_start_is_tensorlys():
    from tensorly.tenalg.svd import make_svd_non_negative

    x = smooth(1, 1, 30, 12)[0, 0].abs().double().numpy()
    u, s, v = np.linalg.svd(x, full_matrices=False)
    w, h = make_svd_non_negative(x, u[:, :4], s[:4], v[:4], nntype="nndsvda")
    found = [t.numpy() for t in start(torch.from_numpy(x), 4)]
    np.testing.assert_allclose(found[0] @ found[1], w @ h, rtol=0.15, atol=0.05 * x.max())
    plain, _ = make_svd_non_negative(x, u[:, :4], s[:4], v[:4], nntype="nndsvd")
    np.testing.assert_allclose(found[0][plain > 0], plain[plain > 0], rtol=1e-6)


def test_new_rows_are_non_negative_least_squares():
    g = torch.Generator().manual_seed(0)
    factors, x = torch.rand(6, 16, generator=g).double(), torch.randn(40, 16, generator=g).double()
    found = non_negative(x, factors)
    assert (found >= 0).all()
    exact = np.array([nnls(factors.numpy().T, row)[1] for row in x.numpy()])
    ours = (found @ factors - x).norm(dim=1).numpy()
    assert (ours >= exact - 1e-9).all()
    np.testing.assert_allclose(ours, exact, rtol=1e-3)


def test_nmf_keeps_signs_and_constants():
    # channel 0 is always -2, channel 1 is 0 or 3: one factor each way, or a shift of (2, 0)
    x = torch.tensor([[[[-2.0, 0.0], [-2.0, 3.0], [-2.0, 3.0], [-2.0, 0.0]]]])
    split = twin(Nmf(rank=1), 1, 2)
    fixed = split.fit(x)
    torch.testing.assert_close(fixed["factors"][0, 0], torch.tensor([[0.0, 1.0], [1.0, 0.0]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(split.project(x, fixed)[0, 0], torch.tensor([[0.0, 2], [3, 2], [3, 2], [0, 2]]),
                               atol=1e-4, rtol=0)
    torch.testing.assert_close(whole(split, x), x, atol=1e-4, rtol=0)
    shift = twin(Nmf(rank=1, sign="shift"), 1, 2)
    fixed = shift.fit(x)
    assert fixed["offset"].flatten().tolist() == [2, 0]
    torch.testing.assert_close(whole(shift, x), x, atol=1e-4, rtol=0)


def test_nmf_at_the_bytes_of_svd_loses_more():
    """Equal coefficients and equal fixed values: nmf(rank=8) with split signs against svd(rank=16)."""
    x = smooth(2, 3, 100, 32, rank=12)
    place = Place("k", 3, 32, 3, 32)
    split, svd = Nmf(rank=8), Svd(rank=16)
    assert split.latent(place) == svd.latent(place)
    assert sum(b.bytes for b in split.buffers(100, 0, place)) == sum(b.bytes for b in svd.buffers(100, 0, place))
    shift = Nmf(rank=16, sign="shift")
    assert shift.latent(place) == svd.latent(place)
    errors = {str(p): energy(whole(twin(p, 3, 32), x) - x) / energy(x) for p in (svd, split, shift)}
    assert errors[str(svd)] < 0.8 * min(errors[str(split)], errors[str(shift)])
    assert errors[str(split)] < 0.5
