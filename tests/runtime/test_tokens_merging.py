"""Policies that write rows anew: hierarchy and LSH merging against plain Python lists and buckets."""

from itertools import chain
from math import cos, log, pi, sin

import numpy as np
import pytest
import torch
from policy_runs import Cache, Text, policy, softmax_weights

from kvsim import KvsimError
from kvsim.parts import Place
from runtime.parts import Setting, twins


class Levels:
    """The hierarchy by hand: lists of tokens, closed when they are full."""

    def __init__(self, p):
        self.p, self.sinks, self.tops, self.means, self.rows = p, [], [], [], []

    def add(self, i):
        p = self.p
        (self.sinks if i < p.sinks else self.rows).append([i])
        if len(self.rows) >= p.recent + p.block:
            self.means.append(list(chain(*self.rows[: p.block])))
            self.rows = self.rows[p.block :]
        if len(self.means) >= 2 * p.summaries:
            self.tops.append(list(chain(*self.means[: p.summaries])))
            self.means = self.means[p.summaries :]

    @property
    def held(self):
        return self.sinks + self.tops + self.means + self.rows


@pytest.mark.parametrize("text", ["hierarchy(recent=6,block=3,summaries=2,sinks=2)",
                                  "hierarchy(recent=0,block=2,sinks=0)",
                                  "hierarchy(recent=5,block=4,summaries=3,sinks=1)"])
@pytest.mark.parametrize(("prompt", "m"), [(0, 1), (1, 1), (40, 1), (40, 10), (23, 50)])
def test_hierarchy_holds_means_of_means(text, prompt, m):
    p, stream = policy(text), Text.draw(prompt + 100, batch=2)
    cache, plain = Cache(p, stream, prompt), Levels(p)
    for i in range(prompt):
        plain.add(i)
    for seen in range(prompt, prompt + 100, m):
        before = [log(len(tokens)) for tokens in plain.held] + [0.0] * m
        cache.step(m)
        for i in range(seen, seen + m):
            plain.add(i)
        run = cache.runs[0]
        bias = torch.zeros(1) if run.bias is None else run.bias
        assert torch.allclose(bias.expand(1, 3, len(before)), torch.tensor(before).expand(1, 3, -1))
        for held, rows in ((run.k, stream.k), (run.v, stream.v)):
            means = torch.stack([rows[:, :, tokens].mean(2) for tokens in plain.held], 2)
            assert torch.allclose(held, means, atol=1e-6)


@pytest.mark.parametrize("text", [
    "hierarchy(recent=6,block=3,summaries=64,sinks=0)",
    "lsh_merge(planes=48,recent=3,sinks=1)",
    "lsh_merge(planes=48,recent=3,when=running)",
    "lsh_merge(planes=40,tables=2,recent=2,when=running)",
    "lsh_merge(planes=48,recent=3,merge=weighted,window=4)",
])
def test_merging_equal_rows_changes_nothing(text):
    """Equal rows merged into one whose logit gains the log of their number: attention's output is the same."""
    stream = Text.draw(61, batch=2, width=16)
    for x in (stream.k, stream.v):
        x.copy_(x[:, :, : 61 // 3 + 1].repeat_interleave(3, 2)[:, :, :61])
    full, merged = Cache("keep", stream, 42), Cache(text, stream, 42)
    assert merged.counts().max() < 42 - 10
    for _ in range(19):
        assert torch.allclose(full.step(), merged.step(), atol=2e-5)


def buckets_by_hand(p, twin, stream, prompt, b, h):
    """One head's buckets after the prompt: (weighted sums of k and v, weight, count, hashes by table) in order."""
    k, v = (x[b, h].double().numpy() for x in (stream.k, stream.v))
    mean = k[:prompt].mean(0) if prompt else np.zeros(k.shape[1])
    planes = twin.planes[0, 0].double().numpy().reshape(p.tables, p.planes, -1)
    weight = np.ones(len(k))
    if p.merge == "weighted":
        group = stream.q.shape[1] // stream.k.shape[1]
        q = stream.q[b : b + 1, h * group : (h + 1) * group, max(0, prompt - p.window) : prompt]
        w = softmax_weights(q, stream.k[b : b + 1, h : h + 1, :prompt], stream.scaling)
        weight[:prompt] = w.mean((0, 1, 2)).numpy()

    def sign(x, table):
        return tuple((planes[table] @ (x - mean) > 0).tolist())

    def single(i):
        return [weight[i] * k[i], weight[i] * v[i], weight[i], 1, [sign(k[i], t) for t in range(p.tables)]]

    def join(rows, entry, tables, protect):
        for t in tables:
            for other in rows[protect:]:
                if other[4][t] == entry[4][t]:
                    for i in range(4):
                        other[i] = other[i] + entry[i]
                    return
        rows.append(entry)

    edge = max(prompt - p.recent, min(prompt, p.sinks))
    rows = [single(i) for i in range(edge)]
    first = min(p.sinks, edge)
    for t in range(p.tables):
        left = rows[:first]
        for entry in rows[first:]:
            if t:
                entry[4][t] = sign(entry[0] / entry[2], t)
        for entry in rows[first:]:
            join(left, entry, [t], first)
        rows = left
    return rows, [single(i) for i in range(edge, prompt)], single, join


@pytest.mark.parametrize("text", ["lsh_merge(planes=3,recent=4,sinks=2)",
                                  "lsh_merge(planes=4,tables=3,recent=0,sinks=0)",
                                  "lsh_merge(planes=3,merge=weighted,window=6,recent=5,sinks=1)",
                                  "lsh_merge(planes=3,recent=4,sinks=2,when=running)",
                                  "lsh_merge(planes=4,tables=2,recent=0,sinks=1,when=running)",
                                  "lsh_merge(planes=11,recent=40,sinks=3,when=running)"])
@pytest.mark.parametrize(("batch", "heads", "prompt"), [(1, 1, 0), (1, 3, 2), (3, 3, 45)])
def test_lsh_merges_buckets(text, batch, heads, prompt):
    p, stream = policy(text), Text.draw(prompt + 30, batch, heads, seed=11)
    cache, plain = Cache(p, stream, prompt), []
    for b in range(batch):
        for h in range(heads):
            plain.append(buckets_by_hand(p, cache.twin, stream, prompt, b, h))
    for new in range(31):
        for run, (rows, newest, _, _) in zip(cache.runs, plain, strict=True):
            expected = rows + newest
            assert run.rows == len(expected)
            if expected:
                for got, i in ((run.k, 0), (run.v, 1)):
                    assert np.allclose(got[0, 0].numpy(), [e[i] / e[2] for e in expected], atol=1e-5)
                log_count = run.state["log_count"][0, 0, :, 0].numpy()
                assert np.allclose(log_count, np.log([e[3] for e in expected]), atol=1e-6)
        if new == 30:
            break
        cache.step()
        for rows, newest, single, join in plain:
            entry = single(cache.seen - 1)
            entry[:3] = [entry[0] / entry[2], entry[1] / entry[2], 1.0]
            newest.append(entry)
            if p.when == "running" and len(newest) > p.recent:
                old = newest.pop(0)
                if len(rows) < p.sinks:
                    rows.append(old)
                else:
                    join(rows, old, range(p.tables), p.sinks)


@pytest.mark.parametrize(("width", "degrees"), [(8, 20), (64, 60), (64, 90), (128, 75), (16, 150)])
def test_collision_rate_is_one_minus_the_angle_over_pi(width, degrees):
    part = policy("lsh_merge(planes=48,tables=64)")
    twin = twins()["lsh_merge"](part, Setting(Place("k", 1, width, 1, 32), torch.float32))
    g = torch.Generator().manual_seed(width)
    a, noise = torch.randn((2, 40, width), generator=g, dtype=torch.float64)
    across = noise - a * (noise * a).sum(-1, keepdim=True) / a.square().sum(-1, keepdim=True)
    a, across = (x / x.norm(dim=-1, keepdim=True) for x in (a, across))
    b = cos(degrees * pi / 180) * a + sin(degrees * pi / 180) * across
    bits = [twin.signs(x[None, None].float(), torch.zeros(1)) for x in (a, b)]
    agree = (bits[0] == bits[1]).double().mean().item()
    # 40 pairs share 3072 planes: the error of one pair, sqrt(p (1 - p) / 3072) <= 0.009, bounds that of their mean
    assert abs(agree - (1 - degrees / 180)) < 4 * 0.009


def test_random_keys_fill_as_many_buckets_as_predicted():
    """Centred gaussian keys stand at right angles on average: the prediction at 90 degrees, the most there can be."""
    part = policy("lsh_merge(planes=8,recent=0,sinks=0)")
    # 256 equally likely buckets: 256 (1 - (255 / 256)^600) = 231.55
    assert part.buckets(600, 90.0) == 232
    # 8 random planes of 512 channels are nearly at right angles to each other, of 16 channels they are not
    wide, narrow = (Cache(part, Text.draw(600, heads=4, width=w), 600).counts().double().mean() for w in (512, 16))
    assert abs(wide - 231.55) < 0.02 * 231.55
    assert narrow < wide


def test_planes_are_stored_once_for_all_heads():
    stream = Text.draw(30, batch=2)
    one, other = (Cache("lsh_merge(planes=6,tables=2,recent=2)", stream, 30, seed=seed) for seed in (0, 1))
    planes = one.twin.model_buffers()["planes"]
    assert planes.shape == (1, 1, 12, 8)
    assert planes is one.twin.model_buffers()["planes"]
    assert all(torch.equal(run.twin.planes, planes) for run in one.runs)
    assert not torch.equal(other.twin.model_buffers()["planes"], planes)


def test_a_row_nobody_looked_at_has_a_mean_too():
    stream = Text.draw(12, heads=1, group=1)
    stream.q[:] = 100.0  # weights fall on one row, the others get 0
    stream.k[:] = -1.0
    stream.k[0, 0, 0] = 1.0
    cache = Cache("lsh_merge(planes=4,merge=weighted,window=4,recent=0,sinks=1)", stream, 12)
    assert cache.runs[0].rows == 2
    assert torch.allclose(cache.runs[0].v[0, 0, 1], stream.v[0, 0, 1:12].mean(0), atol=1e-6)


def test_what_merging_misses_is_an_error():
    cache = Cache("hierarchy(recent=2,block=2,summaries=2,sinks=0)", Text.draw(12), 9)
    cache.runs[0].seen += 4  # tokens that the cache has never been given
    with pytest.raises(KvsimError, match="position allows"):
        cache.step()
