"""SVD against numpy and the tail's energy; the online update against the whole stream; the survey's code beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.bases.online_svd import OnlineSvd
from kvsim.bases.random_projection import RandomProjection
from kvsim.bases.svd import Svd
from kvsim.parts import Place
from runtime.latent import rebuild
from runtime.parts import Setting, twins

BITS = {torch.float32: 32, torch.bfloat16: 16}


def twin(part, heads, width, dtype=torch.float32):
    return twins()[part.name](part, Setting(Place("k", heads, width, heads, BITS[dtype]), dtype))


def energy(x):
    return float(x.double().square().sum())


def stream(batch, heads, n, width, decay, seed=0):
    """Singular values fall as decay^i; later rows are larger, in other directions: a first basis grows stale."""
    g = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(batch, heads, width, width, generator=g)).Q
    scale = decay ** torch.arange(width)
    c = torch.randn(batch, heads, n, width, generator=g) * scale
    late = 2 * c[:, :, n // 2 :] @ directions.roll(width // 8, dims=2)
    return torch.cat([c[:, :, : n // 2] @ directions, late], dim=2)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 80), width=st.integers(2, 40), heads=st.integers(1, 4), batch=st.integers(1, 3),
       data=st.data())
def test_error_is_the_tail_energy(n, width, heads, batch, data):
    rank = data.draw(st.integers(1, min(n, width)))
    x = stream(batch, heads, n, width, 0.8, seed=data.draw(st.integers(0, 99)))
    basis = twin(Svd(rank=rank), heads, width)
    fixed = basis.fit(x)
    lost = energy(rebuild(basis.project(x, fixed), basis.maps(fixed)) - x)
    tail = float((np.linalg.svd(x.double().numpy(), compute_uv=False)[..., rank:] ** 2).sum())
    assert lost == pytest.approx(tail, rel=1e-4, abs=1e-9 * energy(x))


def test_joint_error_is_the_tail_of_the_heads_side_by_side():
    x = stream(2, 3, 90, 16, 0.9)
    basis = twin(Svd(rank=20, joint="heads"), 3, 16)
    fixed = basis.fit(x)
    lost = energy(rebuild(basis.project(x, fixed), basis.maps(fixed)) - x)
    side_by_side = x.double().transpose(1, 2).reshape(2, 90, 48).numpy()
    assert lost == pytest.approx((np.linalg.svd(side_by_side, compute_uv=False)[:, 20:] ** 2).sum(), rel=1e-4)


def test_by_hand():
    # rows (3, 4) and (6, 8) lie on one line: V = (0.6, 0.8) up to sign, coefficients 5 and 10
    x = torch.tensor([[[[3.0, 4.0], [6.0, 8.0]]]])
    basis = twin(Svd(rank=1), 1, 2)
    fixed = basis.fit(x)
    assert fixed["basis"].abs().flatten().tolist() == pytest.approx([0.6, 0.8])
    assert basis.project(x, fixed).abs().flatten().tolist() == pytest.approx([5, 10])
    # a later row at a right angle is lost, one at 45 degrees keeps its part along V: (1, 0) -> 0.6 (0.6, 0.8)
    later = torch.tensor([[[[-4.0, 3.0], [1.0, 0.0]]]])
    back = rebuild(basis.project(later, fixed), basis.maps(fixed))
    assert back.flatten().tolist() == pytest.approx([0, 0, 0.36, 0.48], abs=1e-6)


def run_online(x, rank, first, step, dtype=torch.float32):
    """Fit on the first rows, then let the others arrive `step` at a time; (twin, coefficients, buffers)."""
    basis = twin(OnlineSvd(rank=rank), x.shape[1], x.shape[3], dtype)
    x = x.to(dtype)
    fixed = basis.fit(x[:, :, :first])
    c = basis.project(x[:, :, :first], fixed)
    for at in range(first, x.shape[2], step):
        c, fixed = basis.extend(x[:, :, at : at + step], c, fixed)
    return basis, c, fixed


@pytest.mark.parametrize("step", [1, 7, 50])
def test_online_equals_the_batch_while_the_rank_holds(step):
    g = torch.Generator().manual_seed(3)
    # 8 directions in all, of which the first 20 rows show only 4
    mix = torch.randn(2, 3, 8, 24, generator=g)
    c = torch.randn(2, 3, 90, 8, generator=g)
    c[:, :, :20, 4:] = 0
    x = c @ mix
    basis, found, fixed = run_online(x, 8, 20, step)
    assert energy(rebuild(found, basis.maps(fixed)) - x) < 1e-9 * energy(x)
    want = np.linalg.svd(x.double().numpy(), compute_uv=False)[..., :8]
    np.testing.assert_allclose(fixed["spectrum"][:, :, 0], want, rtol=1e-4)
    eye = fixed["basis"] @ fixed["basis"].mT
    assert (eye - torch.eye(8)).abs().max() < 1e-5
    # the frozen basis of `svd` never sees the other 4 directions
    frozen = twin(Svd(rank=8), 3, 24)
    held = frozen.fit(x[:, :, :20])
    assert energy(rebuild(frozen.project(x, held), frozen.maps(held)) - x) > 0.2 * energy(x)


@pytest.mark.parametrize("step", [1, 5])
def test_online_stays_within_the_tail_bound(step):
    """No truncation beats the tail, and none loses more than the sum of what each update had to cut."""
    x = stream(1, 2, 120, 20, 0.85)
    basis, found, fixed = run_online(x, 6, 40, step)
    lost = torch.linalg.norm((rebuild(found, basis.maps(fixed)) - x).double(), dim=(2, 3))[0].numpy()
    for h in range(2):
        rows = x[0, h].double().numpy()
        tail = np.sqrt((np.linalg.svd(rows, compute_uv=False)[6:] ** 2).sum())
        u, s, v = np.linalg.svd(rows[:40], full_matrices=False)
        held, cut = (u[:, :6] * s[:6]) @ v[:6], np.sqrt((s[6:] ** 2).sum())
        for at in range(40, 120, step):
            u, s, v = np.linalg.svd(np.concatenate([held, rows[at : at + step]]), full_matrices=False)
            held, cut = (u[:, :6] * s[:6]) @ v[:6], cut + np.sqrt((s[6:] ** 2).sum())
        assert tail * (1 - 1e-6) <= lost[h] <= cut
        # numpy's own truncated stream, by whole decompositions instead of updates, loses the same
        assert lost[h] == pytest.approx(np.linalg.norm(held - rows), rel=1e-3)
        frozen = rows @ np.linalg.svd(rows[:40])[2][:6].T @ np.linalg.svd(rows[:40])[2][:6]
        assert lost[h] < 0.8 * np.linalg.norm(frozen - rows)


def test_online_in_half_precision_drifts_little():
    x = stream(1, 2, 600, 32, 0.8)
    basis, found, fixed = run_online(x, 12, 64, 1, torch.bfloat16)
    assert found.dtype == fixed["basis"].dtype == torch.bfloat16
    exact, c, held = run_online(x, 12, 64, 1)
    half = energy(rebuild(found, basis.maps(fixed)).float() - x)
    assert half < energy(rebuild(c, exact.maps(held)) - x) + 0.003 * energy(x)


def test_flushed_blocks_are_led_into_the_present_basis():
    """Coefficients frozen in two blocks, read through their maps, are what turned coefficients would be."""
    x = stream(2, 3, 100, 24, 0.8)
    basis = twin(OnlineSvd(rank=6), 3, 24)
    fixed = basis.fit(x[:, :, :40])
    frozen = [basis.project(x[:, :, :40], fixed)]
    alive = frozen[0].clone()
    maps = basis.block_map(fixed)
    tail = alive[:, :, :0]
    for at in range(40, 100):
        row = x[:, :, at : at + 1]
        alive, _ = basis.extend(row, alive, fixed)
        tail, updated = basis.extend(row, tail, fixed | {"maps": maps})
        maps = updated.pop("maps")
        fixed = updated
        if tail.shape[2] == 20:
            frozen.append(tail)
            tail = tail[:, :, :0]
            maps = torch.cat([maps, basis.block_map(fixed)], dim=2)
    assert maps.shape == (2, 3, 4 * 6, 6)
    blocks = torch.repeat_interleave(torch.arange(4), torch.tensor([40, 20, 20, 20]))
    torch.testing.assert_close(basis.turned(torch.cat(frozen, dim=2), maps, blocks), alive, rtol=1e-3, atol=1e-4)
    part = basis.turned(torch.cat(frozen, dim=2)[:, :, 50:90], maps, blocks[50:90])
    torch.testing.assert_close(part, alive[:, :, 50:90], rtol=1e-3, atol=1e-4)


class SurveyOnlineSvd:
    """Section 5.6's OnlineSVDCache for one head: append the residual's first direction, then truncate."""

    def __init__(self, rank):
        self.rank, self.U = rank, None

    def update(self, k):
        if self.U is None:
            U, S, Vt = torch.linalg.svd(k.T, full_matrices=False)
            self.U, self.S, self.Vt = U[:, : self.rank], S[: self.rank], Vt[: self.rank]
            return
        residual = k.T - self.U @ (self.U.T @ k.T)
        U, S, Vt = torch.linalg.svd(residual, full_matrices=False)
        self.U = torch.cat([self.U, U[:, :1]], dim=1)[:, : self.rank]
        self.S = torch.cat([self.S, S[:1]])[: self.rank]


def test_the_surveys_update_never_changes_its_basis():
    x = stream(1, 1, 120, 20, 0.85)
    survey = SurveyOnlineSvd(6)
    survey.update(x[0, 0, :40])
    before, rows = survey.U.clone(), survey.Vt.shape[1]
    for at in range(40, 120):
        survey.update(x[0, 0, at : at + 1])
    assert torch.equal(survey.U, before)  # what is appended is what is truncated
    assert survey.Vt.shape[1] == rows == 40  # coefficients of 80 rows are nowhere
    basis, c, fixed = run_online(x, 6, 40, 1)
    assert c.shape[2] == 120
    overlap = torch.linalg.svdvals(fixed["basis"][0, 0] @ before)
    assert overlap.min() < 0.9
    assert energy(rebuild(c, basis.maps(fixed)) - x) < 0.7 * energy(x @ before @ before.T - x)


class SurveyProjection(torch.nn.Module):
    """Section 5.6's LowRankProjection, non-learnable branch."""

    def __init__(self, width, rank):
        super().__init__()
        self.register_buffer("k_proj", torch.randn(width, rank) / rank**0.5)

    def project_k(self, k):
        if self.k_proj.weight.device != k.device:
            self.k_proj = self.k_proj.to(k.device)
        return self.k_proj(k)


def test_the_surveys_random_projection_does_not_run():
    with pytest.raises(AttributeError, match="weight"):
        SurveyProjection(16, 4).project_k(torch.randn(1, 16))
    basis = twin(RandomProjection(rank=4), 1, 16)
    assert basis.project(torch.randn(1, 1, 1, 16), {}).shape == (1, 1, 1, 4)


@pytest.mark.parametrize("kind", ["gaussian", "sparse", "embedding"])
def test_random_projection_is_far_worse_than_svd(kind):
    x = stream(1, 4, 200, 64, 0.9)
    errors = {}
    for part in (Svd(rank=32), RandomProjection(rank=32, kind=kind)):
        basis = twin(part, 4, 64)
        fixed = basis.fit(x)
        errors[part.name] = energy(rebuild(basis.project(x, fixed), basis.maps(fixed)) - x) / energy(x)
    # a projection's error is about d / r of the energy, the svd's is its tail
    assert errors["svd"] < 0.01
    assert 0.8 < errors["random_projection"] < 3.5


def test_random_matrices_have_their_distributions():
    place = Place("k", 1, 4096, 1, 32)
    gaussian = twins()["random_projection"](RandomProjection(rank=64), Setting(place, torch.float32)).model_buffers()
    assert float(gaussian["matrix"].var()) == pytest.approx(1 / 64, rel=0.02)
    part = RandomProjection(rank=64, kind="sparse")
    matrix = twins()["random_projection"](part, Setting(place, torch.float32)).model_buffers()["matrix"]
    values, counts = matrix.unique(return_counts=True)
    # 4096 x 64 entries: +-sqrt(3 / 64) = +-0.2165 with 1/6 each, else 0; the standard error is 0.0007
    assert values.tolist() == pytest.approx([-(3 / 64) ** 0.5, 0, (3 / 64) ** 0.5])
    assert (counts / matrix.numel()).tolist() == pytest.approx([1 / 6, 2 / 3, 1 / 6], abs=0.004)
    part = RandomProjection(rank=64, kind="embedding")
    sketch = twins()["random_projection"](part, Setting(place, torch.float32))
    dense = sketch.matrix({})[0, 0]
    assert torch.equal(dense.abs().sum(0), torch.ones(4096))  # one bucket and one sign a channel
    assert sorted(set(dense.sum(0).tolist())) == [-1, 1]
    hit = dense.abs().sum(1)
    assert hit.min() > 30
    assert hit.max() < 110  # 64 a bucket on average, standard deviation 8


def test_projections_keep_products_on_average():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, generator=g)
    for kind in ("gaussian", "sparse", "embedding"):
        found = []
        for seed in range(400):
            where = Setting(Place("k", 1, 64, 1, 32), torch.float32, seed=seed)
            basis = twins()["random_projection"](RandomProjection(rank=32, kind=kind), where)
            a, b = (basis.project(t.reshape(1, 1, 1, 64), {}).flatten() for t in (q, k))
            found.append(float(a @ b))
        # variance of one estimate is about (|q|^2 |k|^2 + (q k)^2) / r
        error = float((q.norm() * k.norm()) ** 2 + (q @ k) ** 2) ** 0.5 / (32 * 400) ** 0.5
        assert abs(np.mean(found) - float(q @ k)) < 4 * error, kind
