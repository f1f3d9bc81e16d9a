"""Row counts of token policies against simulations that hold real sets of rows, and by hand."""

from fractions import Fraction
from itertools import chain
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import parse_method
from kvsim.parts import Place, TokenPolicy

PLACE = Place("k", heads=4, width=8, n_heads=8, value_bits=16, layer=3, n_layers=8)
HIERARCHIES = ["hierarchy(recent=6,block=3,summaries=2,sinks=2)", "hierarchy(recent=0,block=2,sinks=0)"]
POSITIONAL = [
    "window(sinks=4,recent=16)",
    "window(sinks=0,recent=7)",
    "stride(every=3,recent=5,sinks=2)",
    "stride(every=1)",
    "stride(every=5,recent=0,sinks=0)",
    "tiers(sizes=(4,8,12),strides=(1,2,6),sinks=3)",
    "tiers(sizes=(5,),strides=(2,),sinks=0)",
    "multiscale(windows=(5,17,40),strides=(2,3,5),sinks=1)",
    "multiscale(windows=(4,9),strides=(1,1))",
]


def policy(text) -> TokenPolicy:
    return parse_method(text).tokens


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
        ends = np.cumsum(p.sizes)
        tier = next((t for t, end in enumerate(ends) if age < end), None)
        return tier is not None and i % p.strides[tier] == 0
    return any(age < w and i % s == 0 for w, s in zip(p.windows, p.strides, strict=True))


@pytest.mark.parametrize("text", POSITIONAL)
def test_positional_sets(text):
    p = policy(text)
    held: set[int] = set()
    for n in range(1, 121):
        before = len(held) + 1
        held = {i for i in held | {n - 1} if rule(p, i, n)}
        # nothing is wanted that has left before: the prompt at once gives the same rows
        assert held == {i for i in range(n) if rule(p, i, n)}
        assert p.rows(n, 0, PLACE).prompt == len(held) == p.rows(0, n, PLACE).stored
        assert p.rows(1, n - 1, PLACE).attended == before


@pytest.mark.parametrize("sinks", [0, 4])
def test_window_ranges_are_the_live_rows(sinks):
    p = policy(f"window(sinks={sinks},recent=10)")
    for n in range(40):
        live = [i for start, end in p.ranges(n) for i in range(start, end)]
        assert live == [i for i in range(n) if rule(p, i, n)]
    starts = np.array([start for start, _ in p.ranges(np.arange(40))])
    assert starts.shape[-1] == 40


def share(budget, n):
    return min(n, budget) if isinstance(budget, int) else ceil(Fraction(str(budget)) * n)


@pytest.mark.parametrize("text", [
    "h2o(budget=0.2)",
    "h2o(budget=9,recent=3,sinks=2)",
    "tova(budget=0.3,sinks=2)",
    "tova(budget=1)",
    "scissorhands(budget=0.1,recent=4)",
    "topk(budget=0.37,when=running,recent=2,sinks=1)",
])
@pytest.mark.parametrize("prompt", [0, 1, 7, 50])
def test_running_sets(text, prompt):
    """Evict by random scores after every step, newest first, then sinks, then the best."""
    p, rng = policy(text), np.random.default_rng(0)

    def evicted(held, n):
        kept = share(p.budget, n)
        newest, first = p.protected(kept)
        rows = sorted(held)
        safe = rows[len(rows) - newest:] if newest else []
        safe += [r for r in rows if r < p.sinks and r not in safe][:first]
        others = sorted((r for r in rows if r not in safe), key=lambda _: rng.random())
        return set(safe) | set(others[: kept - len(safe)])

    held = evicted(set(range(prompt)), prompt)
    assert p.rows(prompt, 0, PLACE).prompt == len(held)
    for new in range(1, 60):
        held.add(prompt + new - 1)
        attended = len(held)
        held = evicted(held, prompt + new)
        rows = p.rows(prompt, new, PLACE)
        assert (rows.stored, rows.attended) == (len(held), attended)


@pytest.mark.parametrize("text", [
    "snapkv(budget=0.25,window=6)",
    "snapkv(budget=12,window=6,sinks=2)",
    "topk(budget=0.5,recent=3,sinks=2)",
    "ada(budget=0.3,window=4)",
])
def test_prompt_budgets(text):
    p = policy(text)
    protected = getattr(p, "window", 0) + p.sinks if p.name != "topk" else p.recent + p.sinks
    for prompt in range(100):
        kept = prompt if prompt <= protected else max(protected, share(p.budget, prompt))
        rows = p.rows(prompt, 9, PLACE)
        assert (rows.prompt, rows.stored, rows.attended) == (kept, kept + 9, kept + 9)


def test_budgets_by_hand():
    # ceil(0.2 * 101) = 21; the step that writes row 101 reads ceil(0.2 * 100) + 1 = 21
    rows = policy("h2o(budget=0.2)").rows(100, 1, PLACE)
    assert (rows.prompt, rows.stored, rows.attended) == (20, 21, 21)
    # 0.07 * 100 is 7 in decimals; in binary floating point it is 7.000000000000001, whose ceiling would be 8
    assert policy("tova(budget=0.07)").rows(100, 0, PLACE).prompt == 7
    # max(32, ceil(0.25 * 100)) = 32 of the prompt, then 5 more
    assert policy("snapkv(budget=0.25)").rows(100, 5, PLACE).stored == 37
    # a budget of 1 is one row, 1.0 is everything
    assert policy("h2o(budget=1)").rows(50, 5, PLACE).stored == 1
    assert policy("h2o(budget=1.0)").rows(50, 5, PLACE).stored == 55
    # protected rows give way to a small budget: 3 rows keep the 3 newest of recent=10, no sink
    assert policy("scissorhands(budget=0.1,recent=10,sinks=4)").protected(3) == (3, 0)
    assert policy("h2o(budget=0.2)").protected(21) == (10, 0)
    assert policy("h2o(budget=9,recent=3,sinks=2)").protected(9) == (3, 2)


def reference_pyramid(p, prompt, layer, layers):
    """The published rule in exact fractions: Python rounds halves to even too."""
    safe = p.window + p.sinks
    even = min(prompt, max(safe, share(p.budget, prompt)))
    low = Fraction(even, p.beta)
    high = 2 * even - low
    if high >= prompt - safe:
        high = Fraction(prompt - safe)
        low = 2 * even - high
    if layers == 1 or not prompt >= high >= low >= safe:
        return even
    return round(high - layer * (high - low) / (layers - 1))


@given(prompt=st.integers(0, 3000), layers=st.integers(1, 40), beta=st.integers(1, 40), window=st.integers(1, 40),
       budget=st.one_of(st.integers(50, 2000), st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.77, 1.0])))
def test_pyramid_rule(prompt, layers, beta, window, budget):
    p = policy("pyramid").with_settings(budget=budget, beta=beta, window=window)
    kept = [p.kept(prompt, layer, layers) for layer in range(layers)]
    assert kept == [reference_pyramid(p, prompt, layer, layers) for layer in range(layers)]
    assert kept == sorted(kept, reverse=True)
    assert sum(kept) == layers * min(prompt, max(window, share(budget, prompt)))


def test_pyramid_by_hand():
    p = policy("pyramid(budget=0.25,window=32,beta=20)")
    # T=4096: B=1024, low=51.2, high=1996.8 < 4064; 32 layers: 1996.8 - 31 * 1945.6 / 31 = 51.2
    assert [p.kept(4096, layer, 32) for layer in (0, 31)] == [1997, 51]
    # layer 10: 1996.8 - 10 * 62.761.. = 1369.19
    assert p.kept(4096, 10, 32) == 1369
    # T=200: B=50, low=2.5 is less than the window of 32: every layer keeps 50
    assert {p.kept(200, layer, 32) for layer in range(32)} == {50}
    assert p.by_layer
    assert p.rows(4096, 10, Place("k", 4, 8, 8, layer=31, n_layers=32)).stored == 61


@pytest.mark.parametrize("seed", range(8))
def test_ada_shares(seed):
    """Give every head its floor, then share out by score over all heads: the total is exact, heads stay in range."""
    rng = np.random.default_rng(seed)
    p, heads, prompt = policy("ada(budget=0.3,floor=0.2,window=4)"), 4, 50 + seed
    even = p.rows(prompt, 0, PLACE).prompt
    scores = rng.random((heads, prompt)) * rng.random((heads, 1)) ** 4
    scores[:, -p.window:] = 3
    safe = max(p.window, share(p.floor, even))
    for head in range(heads):
        scores[head, np.argsort(-scores[head])[:safe]] = 3
    chosen = np.zeros(heads * prompt, bool)
    chosen[np.argsort(-scores.ravel(), kind="stable")[: heads * even]] = True
    counts = chosen.reshape(heads, prompt).sum(1)
    low, high = p.head_range(prompt, heads)
    assert counts.sum() == heads * even
    assert low <= counts.min() <= counts.max() <= high
    # floor=1 leaves nothing to share
    assert p.with_settings(floor=1.0).head_range(prompt, heads) == (even, even)


@pytest.mark.parametrize("text", HIERARCHIES)
def test_hierarchy_lists(text):
    p = policy(text)
    sinks, tops, means, rows = [], [], [], []
    for n in range(1, 150):
        before = len(sinks) + len(tops) + len(means) + len(rows) + 1
        (sinks if n - 1 < p.sinks else rows).append([n - 1])
        if len(rows) >= p.recent + p.block:
            means.append(list(chain(*rows[: p.block])))
            rows = rows[p.block:]
        if len(means) >= 2 * p.summaries:
            tops.append(list(chain(*means[: p.summaries])))
            means = means[p.summaries:]
        assert list(chain(*sinks, *tops, *means, *rows)) == list(range(n))
        assert p.levels(n) == (len(sinks), len(tops), len(means), len(rows))
        assert (p.rows(n, 0, PLACE).prompt, p.rows(0, n, PLACE).attended) == (sum(p.levels(n)), before)


@pytest.mark.parametrize("text", ["pages(size=4,top=0.3,dense_layers=0)", "pages(size=4,top=9,dense_layers=0)",
                                  "pages(size=16,top=0.5,least_pages=1,dense_layers=0)"])
def test_pages_read_whole_pages_and_the_newest(text):
    p, rng = policy(text), np.random.default_rng(1)
    for n in range(1, 200):
        found = [range(start, min(n, start + p.size)) for start in range(0, n, p.size)]
        wanted = max(p.least_pages, ceil(share(p.top, n) / p.size))
        others = rng.permutation(len(found) - 1)[: min(len(found), wanted) - 1]
        read = len(found[-1]) + sum(len(found[i]) for i in others)
        rows = p.rows(n, 0, PLACE)
        assert (rows.stored, rows.attended) == (n, read)


def test_pages_by_hand():
    p = policy("quest")
    here = Place("k", 8, 128, 32, layer=2, n_layers=32)
    # 10000 rows are 625 pages; 2048 / 16 = 128 are read, all full: 2048 rows. 10001 rows: the 626th page has one row
    assert p.rows(10000, 0, here).attended == 2048
    assert p.rows(10000, 1, here).attended == 127 * 16 + 1
    assert p.rows(10000, 0, Place("k", 8, 128, 32, layer=1, n_layers=32)).attended == 10000
    # 3 pages at least, though 5 rows are one page
    assert policy("pages(top=5)").rows(100, 0, here).attended == 2 * 16 + 4
