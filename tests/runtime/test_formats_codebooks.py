"""Logarithms, codebooks, rotations, sketches and mixed widths against scipy, scikit-learn and published tables."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running_parts import normal, one_block, relative_error, rows, run, there_and_back
from scipy.linalg import hadamard as scipy_hadamard

from kvsim.errors import KvsimError
from runtime.formats.kmeans import kmeans_1d
from runtime.formats.rotated import gaussian_codebook, hadamard
from runtime.levels import lookup, nearest


@settings(deadline=None)
@given(
    levels=st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=16).map(sorted),
    values=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=20),
)
def test_nearest_is_nearest(levels, values):
    table, x = torch.tensor(levels), torch.tensor(values).view(1, 1, 1, -1)
    found = lookup(nearest(x, table), table)
    best = (x.flatten()[:, None] - table).abs().amin(1)
    torch.testing.assert_close((found - x).abs().flatten(), best, rtol=1e-5, atol=1e-5)


class TestLog:
    def test_by_hand(self):
        # 4 bits: 7 magnitudes 8, 4, 2, 1, 1/2, 1/4, 1/8; log2(8/3) = 1.4 -> 1, that is 4; log2(8/2.5) = 1.7 -> 2, that
        # is 2; 0.1 -> 1/8; 0.0625 is half the smallest, a tie, to zero; 0.07 -> 1/8
        x = torch.tensor([8.0, 3.0, -2.5, 0.1, 0.0625, -0.07, 0.0, -8.0]).view(1, 1, 1, 8)
        back = there_and_back(run("log(bits=4)", heads=1, width=8), x)
        assert back.flatten().tolist() == [8.0, 4.0, -2.0, 0.125, 0.0, -0.125, 0.0, -8.0]

    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    @settings(max_examples=25, deadline=None)
    @given(x=rows())
    def test_bounds(self, bits, x):
        """Within the exponent range a factor of sqrt(2); below it half the smallest magnitude (semantics)."""
        twin = run(f"log(bits={bits})", width=x.shape[3])
        try:
            coded = twin.encode(x, {})
        except KvsimError:
            assert float(x.float().abs().max()) > 65504
            return
        back = twin.decode(coded, {}, one_block(x.shape[2])).double()
        wide = x.double()
        scale = coded["scale"].double().repeat_interleave(min(64, x.shape[3]), -1)[..., : x.shape[3]]
        smallest = scale * 2.0 ** -(2 ** (bits - 1) - 2)
        inside = wide.abs() >= smallest
        assert (back.abs() <= wide.abs() * 2**0.5 * 1.001)[inside].all()
        assert (back.abs() >= wide.abs() / 2**0.5 / 1.001)[inside].all()
        assert (back * wide >= 0).all()
        assert ((back - wide).abs() <= smallest / 2 * 1.001 + 1e-37)[~inside].all()

    def test_zero_stays_zero(self):
        """Survey 3.1.2: sign(x) * round(log(|x| + eps)) sends zero to a large negative exponent of no sign."""
        x = torch.zeros(1, 2, 3, 64)
        x[..., 0] = 5
        assert torch.equal(there_and_back(run("log(bits=4)"), x), x)


class TestKMeans:
    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_as_good_as_scikit_learns(self, bits, weighted):
        from sklearn.cluster import KMeans

        rng = np.random.default_rng(bits)
        x = np.concatenate([rng.normal(0, 1, 600), rng.normal(5, 0.3, 200), rng.standard_t(3, 200)])
        w = rng.exponential(1, 1000) if weighted else np.ones(1000)
        theirs = KMeans(2**bits, n_init=10, random_state=0).fit(x[:, None], sample_weight=w)
        ours = kmeans_1d(torch.from_numpy(x)[None], torch.from_numpy(w)[None], 2**bits)[0].double().numpy()
        inertia = float((w * ((x[:, None] - ours) ** 2).min(1)).sum())
        # one start against the best of their ten, on lopsided data; without weights 0 to 6% worse were seen
        assert inertia <= theirs.inertia_ * (1.2 if weighted else 1.08)

    def test_a_fixed_point_of_lloyds_steps(self):
        """Every centroid is the mean of the samples nearest to it."""
        x = normal(3, 2000).double()
        centers = kmeans_1d(x, torch.ones_like(x), 8).double()
        nearest_of = (x[..., None] - centers[:, None]).abs().argmin(-1)
        for unit in range(3):
            for k in range(8):
                assert float(x[unit][nearest_of[unit] == k].mean()) == pytest.approx(float(centers[unit, k]), abs=1e-3)

    def test_fewer_values_than_centroids_come_back_exactly(self):
        x = torch.tensor([1.0, -2.0, 0.5, 4.0]).repeat(16).view(1, 1, 1, 64).expand(1, 2, 8, 64).contiguous()
        for per in ("channel", "tensor", "layer"):
            assert torch.equal(there_and_back(run(f"kmeans(bits=3,per={per})"), x), x)

    def test_more_codebooks_less_error(self):
        x = normal(1, 2, 256, 64) * torch.linspace(0.1, 3, 64) + torch.linspace(-4, 4, 64)
        x[:, 1] *= 5
        layer, tensor, channel = (
            relative_error(x, there_and_back(run(f"kmeans(bits=3,per={p})"), x)) for p in ("layer", "tensor", "channel")
        )
        assert channel < tensor < layer

    def test_codebooks_stay_once_learned_or_calibrated(self):
        first, later = normal(1, 2, 128, 64), 3 + normal(1, 2, 128, 64, seed=1)
        twin = run("kmeans(bits=4)")
        empty = twin.model_buffers()["codebook"]
        assert empty.shape == (1, 2, 64, 16)
        assert not empty.any()
        twin.start(first)
        learned = empty.clone()
        twin.start(later)
        assert torch.equal(twin.model_buffers()["codebook"], learned)
        calibrated = run("kmeans(bits=4)", calibration=run("kmeans(bits=4)").calibrate(later))
        calibrated.start(first)
        assert relative_error(later, there_and_back(calibrated, later)) < 0.02

    def test_weights_pull_the_centroids(self):
        """Samples near 3 count a hundredfold, and come back better than without weights."""
        x = normal(1, 2, 512, 64) * 2
        close = (x - 3).abs() < 0.3
        weights = torch.where(close, 100.0, 1.0)
        form = "kmeans(bits=2,per=layer,weighting=fisher)"
        weighted = run(form, calibration=run(form).calibrate(x, weights))
        plain = run("kmeans(bits=2,per=layer)")
        assert relative_error(x[close], there_and_back(weighted, x)[close]) < relative_error(
            x[close], there_and_back(plain, x)[close]
        )

    def test_a_channel_without_weights_counts_its_samples_alike(self):
        """Channel 3 has no gradients: its codebook is the one that equal weights give; negative ones are refused."""
        x, form = normal(1, 1, 256, 8), "kmeans(bits=2,weighting=fisher)"
        weights = torch.ones(1, 1, 256, 8)
        weights[..., 3] = 0
        weights[..., 5] = x[..., 5].square()
        found, alike = (run(form, heads=1, width=8).calibrate(x, w)["codebook"] for w in (weights, torch.ones_like(x)))
        found, alike = found.reshape(8, 4), alike.reshape(8, 4)
        assert torch.equal(found[3], alike[3])
        assert not torch.equal(found[5], alike[5])
        with pytest.raises(KvsimError, match="0 or more"):
            run(form, heads=1, width=8).calibrate(x, -weights)

    def test_weights_are_not_guessed(self):
        with pytest.raises(KvsimError, match="weighting=fisher needs calibration"):
            run("kmeans(bits=3,weighting=fisher)").start(normal(1, 2, 8, 64))
        with pytest.raises(KvsimError, match="has shape"):
            run("kmeans(bits=3)", calibration={"codebook": torch.zeros(1, 2, 64, 4)}).model_buffers()


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("form", ["mixed(bits=({0},),mean={0},group=16)", "widths(bits=({0},),group=16)"])
def test_one_width_is_plain_integers(form, bits):
    x = normal(2, 2, 9, 80)
    found = there_and_back(run(form.format(bits), width=80), x)
    assert torch.equal(found, there_and_back(run(f"int(bits={bits},group=16)", width=80), x))


class TestMixed:
    def test_each_group_is_plain_integers_of_its_width(self):
        """Heads and sequences with different widths, codes that straddle bytes, a shorter last group."""
        x = normal(2, 3, 11, 80) * torch.logspace(-1, 1, 80)
        x[1] = x[1].flip(-1)
        x[:, 2] = x[:, 2].flip(-1)
        twin = run("mixed(bits=(1,2,3,5,7),mean=3.3,group=24)", heads=3, width=80)
        fixed = twin.start(x)
        widths = fixed["widths"][:, :, 0]
        assert not torch.equal(widths[0], widths[1])
        assert not torch.equal(widths[0, 0], widths[0, 2])
        back = twin.decode(twin.encode(x, fixed), fixed, one_block(11))
        for b in range(2):
            for h in range(3):
                for g, first in enumerate(range(0, 80, 24)):
                    piece = x[b : b + 1, h : h + 1, :, first : first + 24]
                    plain = run(f"int(bits={int(widths[b, h, g])})", heads=1, width=piece.shape[3])
                    part = back[b : b + 1, h : h + 1, :, first : first + 24]
                    assert torch.equal(part, there_and_back(plain, piece)), (b, h, g)

    def test_loud_groups_get_the_bits_and_the_mean_holds(self):
        x = normal(1, 2, 64, 64) * torch.tensor([0.1, 1, 1, 10]).repeat_interleave(16)
        fixed = run("mixed(group=16)").start(x)
        widths = fixed["widths"].flatten(1).view(2, 4).int().tolist()
        assert all(w[0] == 2 and w[3] == 8 and sum(w) <= 16 for w in widths)
        mixed = relative_error(x, there_and_back(run("mixed(group=16)"), x))
        assert mixed < relative_error(x, there_and_back(run("int(bits=4,group=16)"), x)) / 3

    def test_widths_are_the_best_of_all(self):
        """By brute force over 3^4 choices, with the loss spread / (2^b - 1)^2 summed over channels."""
        x = normal(1, 1, 32, 64) * torch.tensor([0.3, 1, 2, 5]).repeat_interleave(16)
        widths = run("mixed(group=16)", heads=1).start(x)["widths"].flatten().tolist()
        far = x - x.unflatten(-1, (4, 16)).mean(-1).repeat_interleave(16, -1)
        spread = far.square().unflatten(-1, (4, 16)).sum(-1).mean(2).flatten().tolist()

        def loss(choice):
            return sum(s / (2**b - 1) ** 2 for s, b in zip(spread, choice, strict=True))

        choices = np.array(np.meshgrid(*[(2, 4, 8)] * 4)).reshape(4, -1).T
        assert loss(widths) == pytest.approx(min(loss(c) for c in choices.tolist() if sum(c) <= 16))

    def test_sensitivity_comes_from_calibration(self):
        x = normal(1, 2, 64, 64)
        weights = torch.ones(64)
        weights[:16] = 1000  # squared gradients: the first channels matter
        with pytest.raises(KvsimError, match="by=hessian needs the calibrated sensitivity"):
            run("mixed(by=hessian,group=16)").start(x)
        found = run("mixed(by=hessian,group=16)").calibrate(x, weights)
        assert found["sensitivity"].shape == (2, 4)
        widths = run("mixed(by=hessian,group=16)", calibration=found).start(x)["widths"]
        assert (widths[..., 0] == 8).all()


class TestWidths:
    @pytest.mark.parametrize("bits", [(4, 3, 5), (1, 7, 2, 8, 3, 5, 6, 4, 2, 2, 2, 5)])
    def test_each_head_and_group_is_plain_integers_of_its_width(self, bits):
        """Codes that straddle bytes and heads, a shorter last group."""
        x = normal(2, 3, 11, 80)
        twin = run(f"widths(bits={bits},group=24)", heads=3, width=80)
        back, each = there_and_back(twin, x), len(bits) // 3
        for h in range(3):
            for g, first in enumerate(range(0, 80, 24)):
                piece = x[:, h : h + 1, :, first : first + 24]
                plain = run(f"int(bits={bits[h * each + g * each // 4]})", heads=1, width=piece.shape[3])
                assert torch.equal(back[:, h : h + 1, :, first : first + 24], there_and_back(plain, piece)), (h, g)


class TestRotated:
    @pytest.mark.parametrize(("width", "blocks"), [(64, [64]), (80, [64, 16]), (96, [64, 32]), (7, [4, 2, 1])])
    def test_blocks_are_scipys(self, width, blocks):
        ours, first = hadamard(width, torch.device("cpu")), 0
        for size in blocks:
            block = ours[first : first + size, first : first + size].numpy()
            np.testing.assert_allclose(block, scipy_hadamard(size) / np.sqrt(size), atol=1e-6)
            first += size
        torch.testing.assert_close(ours @ ours.T, torch.eye(width), atol=1e-5, rtol=0)

    def test_codebook_is_maxs(self):
        """J. Max, Quantizing for minimum distortion, 1960, table I: output levels and mean square error."""
        half = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
        distortion = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
        for bits, levels in half.items():
            np.testing.assert_allclose(gaussian_codebook(bits)[2 ** (bits - 1) :], levels, atol=6e-4)
        x = np.random.default_rng(0).normal(size=400_000)
        for bits, expected in distortion.items():
            centers = gaussian_codebook(bits)
            cuts = (centers[1:] + centers[:-1]) / 2
            assert ((x - centers[np.searchsorted(cuts, x)]) ** 2).mean() == pytest.approx(expected, rel=0.02)

    @pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
    def test_error_is_the_gaussian_one_whatever_the_rows(self, bits, distortion):
        """Spiky rows too: the rotation makes their coordinates Gaussian."""
        spiky = normal(1, 2, 256, 128) ** 3
        spiky[..., 7] *= 10
        for x in (normal(1, 2, 256, 128), spiky):
            error = relative_error(x, there_and_back(run(f"rotated(bits={bits})", width=128), x))
            # 2 - 2 sqrt(1 - D) is what a vector of the right norm at this angle is off by
            bound = 2 - 2 * (1 - distortion) ** 0.5
            assert 0.75 * bound < error < 1.1 * bound

    @settings(max_examples=25, deadline=None)
    @given(x=rows(widths=(16, 64, 80)))
    def test_norms_are_kept(self, x):
        twin = run("rotated(bits=3)", width=x.shape[3])
        try:
            back = there_and_back(twin, x)
        except KvsimError:
            assert float(x.float().norm(dim=-1).max()) > 65504 / 2
            return
        torch.testing.assert_close(back.norm(dim=-1), x.float().norm(dim=-1), rtol=2e-3, atol=3e-7)

    def test_products_are_kept(self):
        """With queries on average, and turned queries against turned rows give the same products."""
        k, q = normal(1, 1, 512, 128), normal(1, 1, 64, 128, seed=1)
        twin = run("rotated(bits=4)", heads=1, width=128)
        fixed = twin.model_buffers()
        coded = twin.encode(k, fixed)
        exact, close = q @ k.mT, q @ twin.decode(coded, fixed, one_block(512)).mT
        slope = float((exact * close).sum() / exact.square().sum())
        assert slope == pytest.approx(1, abs=0.01)
        assert float((close - exact).std()) < 0.11 * float(exact.std())

    def test_places_differ_and_repeat(self):
        signs = [run("rotated(bits=4)", layer=i, side=s).model_buffers()["signs"] for i in (0, 1) for s in ("k", "v")]
        assert len({tuple(s.flatten().tolist()) for s in signs}) == 4
        assert torch.equal(signs[0], run("rotated(bits=4)").model_buffers()["signs"])


class TestSketch:
    def test_estimates_are_unbiased(self):
        """Over 200 projections the mean product is the true one to a few standard errors (QJL, lemma 3.2)."""
        k, q = normal(1, 1, 4, 32), normal(1, 1, 3, 32, seed=1)
        draws = torch.stack([
            q @ there_and_back(run("sketch(m=64)", heads=1, width=32, seed=s), k).mT for s in range(200)
        ])
        exact = q @ k.mT
        error = (draws.mean(0) - exact).abs() / (draws.std(0) / 200**0.5)
        assert float(error.max()) < 4

    def test_error_falls_with_the_root_of_m(self):
        """QJL, lemma 3.5: standard deviation at most sqrt(pi/2 / m) * ||q|| ||k||, nearly that for a product of 0."""
        k, q = normal(1, 1, 300, 64), normal(1, 1, 100, 64, seed=1)
        norms = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None]
        spread = {}
        for m in (64, 256, 1024):
            off = (q @ there_and_back(run(f"sketch(m={m})", heads=1), k).mT - q @ k.mT) / norms
            spread[m] = float(off.square().mean().sqrt())
            assert spread[m] <= (np.pi / 2 / m) ** 0.5 * 1.1
        assert spread[64] / spread[1024] == pytest.approx(4, rel=0.2)

    def test_projection_is_stored_in_the_caches_dtype(self):
        twin = run("sketch(m=100)", width=80, dtype=torch.bfloat16)
        assert twin.model_buffers()["projection"].shape == (1, 1, 100, 80)
        assert twin.model_buffers()["projection"].dtype == torch.bfloat16
