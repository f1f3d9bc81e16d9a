"""Which rows a policy's twin keeps, against plain Python sets and numpy, token by token."""

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch
from policy_runs import Cache, Text, policy

from kvsim.parts import Place


def rule(p, i, n):
    """Whether positional policy `p` holds row i after n tokens, straight from its definition."""
    age = n - 1 - i
    if i < p.sinks:
        return True
    if p.name == "window":
        return age < p.recent
    if p.name == "stride":
        return age < p.recent or i % p.every == 0
    if p.name == "tiers":
        tier = next((t for t, end in enumerate(np.cumsum(p.sizes)) if age < end), None)
        return tier is not None and i % p.strides[tier] == 0
    return any(age < w and i % s == 0 for w, s in zip(p.windows, p.strides, strict=True))


@pytest.mark.parametrize("text", [
    "window(sinks=4,recent=16)", "window(sinks=0,recent=7)", "stride(every=3,recent=5,sinks=2)",
    "stride(every=5,recent=0,sinks=0)", "tiers(sizes=(4,8,12),strides=(1,2,6),sinks=3)",
    "tiers(sizes=(5,),strides=(2,),sinks=0)", "multiscale(windows=(5,17,40),strides=(2,3,5),sinks=1)",
])
@pytest.mark.parametrize("prompt", [0, 3, 40])
def test_positions(text, prompt):
    p = policy(text)
    cache = Cache(p, Text.draw(prompt + 50, batch=2), prompt)
    for n in range(prompt, prompt + 51):
        assert cache.held(1, 2) == cache.held(0, 0) == [i for i in range(n) if rule(p, i, n)]
        if n < prompt + 50:
            cache.step()


def share(budget, n):
    return min(n, budget) if isinstance(budget, int) else ceil(Fraction(str(budget)) * n)


def weights_of(stream, b, rows, i):
    """Softmax weights [H, G, len(rows)] of token i's queries on `rows`, in numpy."""
    q, k = stream.q[b, :, i].double().numpy(), stream.k[b][:, rows].double().numpy()
    q = q.reshape(len(k), -1, q.shape[-1])
    logits = np.einsum("hgd,hnd->hgn", q, k) * stream.scaling
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Ranked:
    """A running policy by hand, for one sequence and head: a dict of scores, evicted one token after the other."""

    def __init__(self, p, stream, b, h):
        self.p, self.stream, self.b, self.h = p, stream, b, h
        self.rows, self.mass, self.born, self.bits, self.average = [], {}, {}, {}, {}

    def observe(self, i):
        """Token i has come and its query looks at all rows."""
        self.rows.append(i)
        self.mass[i], self.average[i], self.bits[i] = 0.0, 0.0, []
        all_heads = weights_of(self.stream, self.b, self.rows, i)
        shared = self.p.name == "tova"
        found = all_heads.mean((0, 1)) if shared else all_heads[self.h].mean(0)
        self.last = dict(zip(self.rows, found, strict=True))
        for row, w in self.last.items():
            self.mass[row] += w * all_heads.shape[1]
            self.average[row] = 0.9 * self.average[row] + 0.1 * w
            self.bits[row].append((i, w > 1 / len(self.rows)))

    def score(self, row, n):
        name = getattr(self.p, "score", "persistence")
        if name == "persistence":
            return sum(bit for i, bit in self.bits[row] if i >= n - self.p.window)
        return {"cumulative": self.mass[row], "normalised": self.mass[row] / (n - row), "last": self.last[row],
                "online_average": self.average[row]}[name]

    def evict(self, n):
        keep = share(self.p.budget, n)
        newest, first = self.p.protected(keep)
        safe = self.rows[len(self.rows) - newest:] if newest else []
        others = [r for r in self.rows if r not in safe]
        safe, others = safe + others[:first], others[first:]
        others.sort(key=lambda r: (self.score(r, n), r), reverse=True)
        self.rows = sorted(safe + others[: keep - len(safe)])


@pytest.mark.parametrize("text", [
    "h2o(budget=0.3)",
    "h2o(budget=14,recent=4,sinks=2)",
    "h2o(budget=0.3,score=normalised,recent=3)",
    "h2o(budget=0.25,recent=0)",
    "tova(budget=0.3)",
    "tova(budget=11,recent=2,sinks=1)",
    "scissorhands(budget=0.3,window=7,recent=3)",
    "scissorhands(budget=12,window=64,recent=2,sinks=2)",
    "topk(score=cumulative,budget=0.3,when=running,recent=2,sinks=1)",
    "topk(score=normalised,budget=13,when=running,recent=0,sinks=0)",
])
@pytest.mark.parametrize(("batch", "heads", "group", "prompt"), [(1, 1, 1, 1), (3, 3, 2, 24)])
def test_running_policies_evict_the_least(text, batch, heads, group, prompt):
    p, stream = policy(text), Text.draw(prompt + 25, batch, heads, group, seed=3)
    cache = Cache(p, stream, prompt)
    for b in range(batch):
        for h in range(heads):
            if b or h:
                cache = Cache(p, stream, prompt)
            plain = Ranked(p, stream, b, h)
            for i in range(prompt):
                plain.observe(i)
            plain.evict(prompt)
            for n in range(prompt, prompt + 26):
                assert cache.held(b, h) == plain.rows
                if n < prompt + 25:
                    cache.step()
                    plain.observe(n)
                    plain.evict(n + 1)


def test_tova_chooses_once_for_a_layer_and_h2o_for_each_head():
    stream = Text.draw(60, heads=3)
    for text, sets in (("tova(budget=0.3)", 1), ("h2o(budget=0.3)", 3)):
        cache = Cache(text, stream, 50)
        for _ in range(10):
            cache.step()
        assert len({tuple(cache.held(0, h)) for h in range(3)}) == sets


def window_scores(p, stream, prompt):
    """SnapKV's scores [B, H, T] in numpy: mean weights of the window's queries, a mean over neighbours."""
    batch, heads = stream.k.shape[:2]
    found = np.zeros((batch, heads, prompt))
    for b in range(batch):
        for i in range(prompt - p.window, prompt):
            found[b, :, : i + 1] += weights_of(stream, b, list(range(i + 1)), i).mean(1) / p.window
    before, pooled = prompt - p.window, found.copy()
    for j in range(before):
        low, high = max(0, j - p.kernel // 2), min(before, j + p.kernel // 2 + 1)
        pooled[..., j] = found[..., low:high].mean(-1)
    return pooled


def choice(scores, count, safe):
    others = sorted((j for j in range(len(scores)) if j not in safe), key=lambda j: (scores[j], j), reverse=True)
    return sorted([*safe, *others[: count - len(safe)]])


@pytest.mark.parametrize("text", ["snapkv(budget=0.4,window=6)", "snapkv(budget=17,window=5,kernel=1,sinks=2)",
                                  "snapkv(budget=0.5,window=4,kernel=7,sinks=3)", "pyramid(budget=0.4,window=4,beta=3)",
                                  "pyramid(budget=30,window=4,sinks=1,kernel=3)"])
@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 1, 4), (3, 3, 1), (2, 3, 2)])
def test_windows_of_queries(text, batch, heads, group):
    p, prompt = policy(text), 47
    stream = Text.draw(prompt + 2, batch, heads, group, seed=5)
    layers = (0, 3, 7) if p.name == "pyramid" else (0,)
    scores = window_scores(p, stream, prompt)
    sizes = set()
    for layer in layers:
        cache = Cache(p, stream, prompt, layer=layer)
        count = p.rows(prompt, 0, Place("k", heads, 8, heads * group, layer=layer, n_layers=8)).prompt
        sizes.add(count)
        safe = [*range(p.sinks), *range(prompt - p.window, prompt)]
        for b in range(batch):
            for h in range(heads):
                assert cache.held(b, h) == choice(scores[b, h], count, safe)
        cache.step()
        assert cache.held(batch - 1, 0)[-1] == prompt
    assert len(sizes) == len(layers)


@pytest.mark.parametrize("text", ["ada(budget=0.4,window=6)", "ada(budget=0.4,window=3,floor=0.0,sinks=2)",
                                  "ada(budget=19,window=5,floor=0.7,kernel=1)", "ada(budget=0.9,window=5)"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 3)])
def test_ada_shares_a_layers_budget(text, batch, heads):
    p, prompt = policy(text), 45
    stream = Text.draw(prompt, batch, heads, seed=6)
    stream.q[:, : stream.q.shape[1] // heads] *= 3  # one head looks more sharply
    cache, scores = Cache(p, stream, prompt), window_scores(p, stream, prompt)
    even = max(p.window + p.sinks, share(p.budget, prompt))
    floor = min(even, max(p.window + p.sinks, share(p.floor, even) if p.floor else 0))
    for b in range(batch):
        safe = [*range(p.sinks), *range(prompt - p.window, prompt)]
        kept = {(h, j) for h in range(heads) for j in choice(scores[b, h], floor, safe)}
        rest = sorted(((scores[b, h, j], h, j) for h in range(heads) for j in range(prompt) if (h, j) not in kept),
                      reverse=True)
        kept |= {(h, j) for _, h, j in rest[: heads * even - len(kept)]}
        for h in range(heads):
            assert cache.held(b, h) == sorted(j for head, j in kept if head == h)
    if heads > 1 and p.floor < 0.5 and p.budget != 0.9:
        assert len(set(cache.counts()[0].tolist())) > 1


@pytest.mark.parametrize("text", ["pages(size=4,top=0.3,dense_layers=0)",
                                  "pages(size=5,top=11,dense_layers=0,least_pages=1)",
                                  "pages(size=1,top=0.2,dense_layers=0)"])
@pytest.mark.parametrize("prompt", [0, 31])
@pytest.mark.parametrize("m", [1, 7])
def test_pages_read_what_may_matter(text, prompt, m):
    p, batch, heads, group = policy(text), 2, 3, 2
    stream = Text.draw(prompt + 35, batch, heads, group, seed=8)
    cache = Cache(p, stream, prompt)
    for seen in range(prompt, prompt + 35, m):
        cache.step(m)
        n, run = seen + m, cache.runs[0]
        pages = [range(a, min(n, a + p.size)) for a in range(0, n, p.size)]
        for b in range(batch):
            for h in range(heads):
                k = stream.k[b, h].numpy()
                bounds = [(k[page].min(0), k[page].max(0)) for page in pages]
                assert np.array_equal(run.state["page_min"][b, h].numpy(), [low for low, _ in bounds])
                assert np.array_equal(run.state["page_max"][b, h].numpy(), [high for _, high in bounds])
                if run.attended is None:
                    assert p.selected(n) == len(pages)
                    continue
                q = stream.q[b, h * group : (h + 1) * group, seen:n].numpy().reshape(-1, 8)
                upper = [max(np.maximum(one * low, one * high).sum() for one in q) for low, high in bounds]
                for i, page in enumerate(pages):  # pages that the step itself has changed are read
                    upper[i] = float("inf") if page[-1] >= seen else upper[i]
                chosen = sorted(sorted(range(len(pages)), key=lambda i: (upper[i], i), reverse=True)[: p.selected(n)])
                assert run.attended[b, h].tolist() == [row for i in chosen for row in pages[i]]
    # a bound is one: no key of a page has a larger product than its page's bound
    low, high = (cache.runs[0].state[x][0, 0] for x in ("page_min", "page_max"))
    q = torch.randn(50, 8)
    bound = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1)
    products = q @ cache.runs[0].k[0, 0].T
    assert (products <= bound.repeat_interleave(p.size, 1)[:, : products.shape[1]] + 1e-5).all()


@pytest.mark.parametrize("text", ["h2o(budget=0.3)", "tova(budget=0.3)", "topk(budget=9,when=running,recent=2)"])
def test_rows_that_are_not_encoded_yet_stay(text):
    cache = Cache(text, Text.draw(60, batch=2), 30)
    for _ in range(30):
        tails = [[*cache.held(1, h), cache.seen][-6:] for h in range(3)]
        cache.step(tail=6)
        assert [cache.held(1, h)[-6:] for h in range(3)] == tails
    # a tail larger than the budget: the oldest row goes, whatever its weight
    cache = Cache("h2o(budget=10)", Text.draw(20), 12)
    before = [cache.held(0, h) for h in range(3)]
    cache.step(tail=12)
    assert [cache.held(0, h) for h in range(3)] == [[*rows[1:], 12] for rows in before]
