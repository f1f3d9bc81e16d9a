"""Importance scores against their formulas in numpy, sampling, and taking rows out for real."""

import numpy as np
import pytest
import torch
from policy_runs import Text, mean_group, policy, softmax_weights
from scipy.stats import spearmanr

from kvsim import KvsimError
from kvsim.scores import HIDDEN, SCORES
from runtime.estimator import apply, train_estimator
from runtime.parts import Prompt, Setting, twins
from runtime.running import pack_bits, unpack_bits
from runtime.scores import ALL_QUERIES, PROMPT, mean_rotation, prompt_scores, queries_wanted

SHAPES = [(1, 1, 1, 9), (3, 3, 2, 20), (2, 3, 1, 4)]
WINDOW = 6


def drawn(batch, heads, group, tokens, dtype=torch.float32):
    return Text.draw(tokens, batch, heads, group, seed=batch + tokens, dtype=dtype)


def score(name, stream, window=WINDOW, **more):
    tokens = stream.k.shape[2]
    weights = mean_group(softmax_weights(stream.q, stream.k, stream.scaling), stream.k.shape[1])
    wanted = queries_wanted(SCORES[name], window)
    prompt = Prompt(stream.k, stream.v, stream.scaling, mass=weights.sum(2).float(), **more)
    prompt.queries = stream.q[:, :, max(0, tokens - wanted) :] if wanted else None
    setting = Setting(stream.place(), stream.k.dtype)
    found = prompt_scores(SCORES[name], prompt, window, setting)
    assert found.dtype == torch.float32
    assert found.shape == stream.k.shape[:3]
    return found.double().numpy()


def weights(stream):
    """Causal weights [B, H, G, T, T], numpy."""
    batch, heads, tokens, _ = stream.k.shape
    return softmax_weights(stream.q, stream.k, stream.scaling).reshape(batch, heads, -1, tokens, tokens).numpy()


def test_every_score_has_its_function():
    assert set(PROMPT) == set(SCORES)


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_from_weights(shape):
    stream = drawn(*shape)
    a, n = weights(stream), shape[3]
    mean = a.mean(2)
    assert np.allclose(score("last", stream), mean[:, :, -1], atol=1e-6)
    assert np.allclose(score("window", stream), mean[:, :, -WINDOW:].mean(2), atol=1e-6)
    assert np.allclose(score("cumulative", stream), a.sum((2, 3)), atol=1e-5)
    assert np.allclose(score("normalised", stream), a.sum((2, 3)) / np.arange(n, 0, -1), atol=1e-5)
    over = mean > 1 / np.arange(1, n + 1)[:, None]
    assert np.array_equal(score("persistence", stream), over[:, :, -WINDOW:].sum(2))
    average = np.zeros((*mean.shape[:2], n))
    for i in range(max(0, n - WINDOW), n):
        average = 0.9 * average + 0.1 * mean[:, :, i]
    assert np.allclose(score("online_average", stream), average, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_from_keys(shape):
    stream = drawn(*shape)
    k = stream.k.double().numpy()
    q = stream.q.double().numpy().reshape(*k.shape[:2], shape[2], shape[3], 8)
    logits = np.einsum("bhgd,bhnd->bhgn", q[:, :, :, -1], k) * stream.scaling
    assert np.allclose(score("query_key", stream), logits.mean(2), atol=1e-5)
    length = np.linalg.norm(k, axis=-1)
    assert np.allclose(score("knorm", stream), -length, atol=1e-5)
    unit = k / length[..., None]
    anchor = unit.mean(2, keepdims=True)
    cosine = (unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)
    assert np.allclose(score("keydiff", stream), -cosine, atol=1e-5)


def test_lengths_in_half_precision_would_tie():
    stream = drawn(1, 1, 1, 400, torch.bfloat16)
    exact = score("knorm", stream)[0, 0]
    assert len(np.unique(exact)) > 390
    assert len(torch.unique(stream.k.norm(dim=-1))) < 200


@pytest.mark.parametrize("shape", SHAPES)
def test_mutual_information(shape):
    stream = drawn(*shape)
    a = weights(stream)[..., -WINDOW:, :]
    joint = a / a.shape[3]
    product = joint.sum(4, keepdims=True) * joint.sum(3, keepdims=True)
    parts = np.where(joint > 0, joint * np.log(np.where(joint > 0, joint, 1) / np.where(product > 0, product, 1)), 0)
    found = score("mutual_information", stream)
    assert np.allclose(found, parts.sum(3).mean(2), atol=1e-6)
    # the parts add up to I(query; row) = H(row) - H(row | query)
    row = joint.sum(3)
    entropy = -(row * np.log(np.where(row > 0, row, 1))).sum(-1)
    conditional = -(joint * np.log(np.where(a > 0, a, 1))).sum((3, 4))
    assert np.allclose(found.sum(-1), (entropy - conditional).mean(2), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_perturbation_is_what_leaving_a_row_out_does(shape):
    stream = drawn(*shape)
    batch, heads, group, n = shape
    found, expected = score("perturbation", stream), np.zeros((batch, heads, n))
    q, k, v = (x.double().numpy() for x in (stream.q, stream.k, stream.v))
    queries = range(max(0, n - WINDOW), n)
    for b in range(batch):
        for h in range(heads):
            for g in range(group):
                for i in queries:
                    logits = k[b, h, : i + 1] @ q[b, h * group + g, i] * stream.scaling
                    e = np.exp(logits - logits.max())
                    whole = e @ v[b, h, : i + 1] / e.sum()
                    for j in range(i + 1 if i else 0):
                        left = np.delete(e, j)
                        moved = left @ np.delete(v[b, h, : i + 1], j, 0) / left.sum() - whole
                        expected[b, h, j] += np.linalg.norm(moved) / len(queries) / group
    assert np.allclose(found, expected, rtol=2e-3, atol=1e-5)


class Turned:
    """A rotary embedding with two frequencies on 4 of the 8 channels."""

    angles = torch.tensor([0.9, 0.05])

    def rotate(self, x, positions, sign=1):
        at = positions[:, None, :, None] * self.angles * sign
        first, second, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        cos, sin = at.cos(), at.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def unrotate(self, x, positions):
        return self.rotate(x, positions, -1)

    def averaged(self, width, positions):
        unit = torch.eye(width)[None, :, None].expand(len(positions), width, positions.shape[1], width)
        return self.rotate(unit, positions).mean(2)[:, None]


def test_expected_is_the_mean_exponential_of_a_normal_query():
    """softmax(m.k s + k S k s^2 / 2) is E[exp(s q.k)] of q ~ N(m, S), normalised: sampled here."""
    stream = drawn(1, 1, 1, 30)
    found = score("expected", stream)[0, 0] / np.linalg.norm(stream.v[0, 0].double().numpy(), axis=-1)
    q = stream.q[0, 0, 4:].double().numpy()  # without the first four
    rng = np.random.default_rng(0)
    many = rng.multivariate_normal(q.mean(0), np.cov(q.T, bias=True), size=400_000)
    mean = np.exp(many @ stream.k[0, 0].double().numpy().T * stream.scaling * 0.25).mean(0)
    # milder logits sample well: the same score with a quarter of the scaling
    mild = Prompt(stream.k, stream.v, stream.scaling * 0.25, queries=stream.q)
    weights = prompt_scores(SCORES["expected"], mild, 1, Setting(stream.place(), torch.float32))[0, 0].double().numpy()
    weights /= np.linalg.norm(stream.v[0, 0].double().numpy(), axis=-1)
    assert np.allclose(weights, mean / mean.sum(), rtol=0.02)
    assert found.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("offset", [0, 1000])
def test_expected_turns_queries_to_the_positions_ahead(offset):
    """By brute force: queries before the rotation, each of the 512 positions' rotations averaged as matrices."""
    stream, rope = drawn(2, 3, 2, 25), Turned()
    at = torch.arange(25).expand(2, 25) + offset
    plain = stream.q.double()
    turned = Text(rope.rotate(stream.k, at), stream.v, rope.rotate(plain, at).float())
    found = score("expected", turned, rotation=rope, positions=at)
    matrix = np.zeros((8, 8))
    for position in range(25 + offset, 25 + offset + 512):
        for c in range(8):
            unit = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
            unit[..., c] = 1
            matrix[c] += rope.rotate(unit, torch.tensor([[position]]))[0, 0, 0].numpy() / 512
    prompt = Prompt(turned.k, turned.v, turned.scaling, rotation=rope, positions=at)
    assert np.allclose(mean_rotation(prompt)[0, 0].numpy(), matrix, atol=1e-4)
    k, v = turned.k.double().numpy(), turned.v.double().numpy()
    expected = np.zeros((2, 3, 25))
    for b in range(2):
        for head in range(6):
            q = plain[b, head, 4:].numpy()
            mean, spread = q.mean(0) @ matrix, matrix.T @ np.cov(q.T, bias=True) @ matrix
            rows = k[b, head // 2]
            logits = rows @ mean * turned.scaling + np.einsum("nd,de,ne->n", rows, spread, rows) * turned.scaling**2 / 2
            e = np.exp(logits - logits.max())
            expected[b, head // 2] += e / e.sum() / 2
    assert np.allclose(found, expected * np.linalg.norm(v, axis=-1), rtol=5e-3, atol=1e-6)


def test_expected_asks_for_all_queries():
    assert queries_wanted(SCORES["expected"], 32) == ALL_QUERIES
    assert [queries_wanted(SCORES[n], 32) for n in ("window", "last", "knorm", "cumulative")] == [32, 1, 0, 0]


def test_random_follows_the_seed_the_layer_and_nothing_else():
    stream = drawn(2, 3, 1, 50)
    prompt = Prompt(stream.k, stream.v, stream.scaling)

    def at(seed, layer):
        setting = Setting(stream.place(layer=layer), torch.float32, seed=seed)
        return prompt_scores(SCORES["random"], prompt, 1, setting)

    assert torch.equal(at(3, 1), at(3, 1))
    assert not torch.equal(at(3, 1), at(4, 1))
    assert not torch.equal(at(3, 1), at(3, 2))
    # 300 uniform numbers: the mean's deviation is 1 / sqrt(12 * 300) = 0.017
    assert abs(at(3, 1).mean().item() - 0.5) < 4 * 0.017


def test_the_auxiliary_network_learns_what_keys_tell():
    """Mass that a key's length and one direction decide, with noise: the trained ranks agree on keys not seen."""
    g = torch.Generator().manual_seed(0)
    keys = 3 * torch.randn((2, 3, 400, 8), generator=g) + 5

    def mass(k):
        return (0.4 * k[..., 0] - 0.3 * k.norm(dim=-1)).exp()

    noise = (0.2 * torch.randn((2, 3, 400), generator=g)).exp()
    net = train_estimator(keys, mass(keys) * noise)
    assert (net.shape, net.dtype) == ((1, 3, HIDDEN, 10), torch.float16)
    assert torch.equal(net, train_estimator(keys, mass(keys) * noise))
    fresh = 3 * torch.randn((1, 3, 300, 8), generator=g) + 5
    for h in range(3):
        assert spearmanr(apply(net, fresh)[0, h], mass(fresh)[0, h]).statistic > 0.95
    stream = drawn(1, 3, 2, 20)
    twin = twins()["topk"](policy("topk(score=auxiliary)"),
                           Setting(stream.place(), torch.float32, calibration={"estimator": net}))
    assert torch.equal(twin.model_buffers()["estimator"], net)
    hidden = np.maximum(stream.k[0, 1].double().numpy() @ net[0, 1, :, :8].double().numpy().T
                        + net[0, 1, :, 8].double().numpy(), 0)
    found = PROMPT["auxiliary"](Prompt(stream.k, stream.v, 1.0), 1, twin.setting)[0, 1]
    assert np.allclose(found.numpy(), hidden @ net[0, 1, :, 9].double().numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [1, 7, 8, 20, 64])
def test_bits_come_back(width):
    bits = torch.rand(2, 3, 5, width) > 0.5
    packed = pack_bits(bits)
    assert (packed.shape[-1], packed.dtype) == (-(-width // 8), torch.uint8)
    assert torch.equal(unpack_bits(packed, width), bits)
    assert packed[0, 0, 0, 0].item() == sum(2**i for i in range(min(width, 8)) if bits[0, 0, 0, i])


def test_what_a_score_misses_is_said():
    stream = drawn(1, 3, 2, 20)
    setting = Setting(stream.place(), torch.float32)
    prompt = Prompt(stream.k, stream.v, stream.scaling)
    for name, word in (("window", "queries"), ("cumulative", "weights"), ("gradient", "gradient_scores"),
                       ("auxiliary", "trained estimator")):
        with pytest.raises(KvsimError, match=word):
            prompt_scores(SCORES[name], prompt, 4, setting)
    prompt.scores = torch.rand(1, 3, 19)
    with pytest.raises(KvsimError, match="on this prompt"):
        prompt_scores(SCORES["gradient"], prompt, 4, setting)
    wrong = Setting(stream.place(), torch.float32, calibration={"estimator": torch.zeros(1, 2, HIDDEN, 10)})
    with pytest.raises(KvsimError, match="this layer needs"):
        prompt_scores(SCORES["auxiliary"], prompt, 4, wrong)
