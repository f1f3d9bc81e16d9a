"""Bookkeeping and work of token policies, by hand, and the estimate of lsh_merge against real hashes."""

import numpy as np
import pytest

from kvsim import parse_method
from kvsim.parts import Place, Work, parts

# 2 KV heads of 8 values, 4 query heads, 16-bit values
PLACE = Place("k", heads=2, width=8, n_heads=4, value_bits=16, layer=3, n_layers=8)


def held(text, prompt, new=0, place=PLACE):
    p = parse_method(text).tokens
    rows = p.rows(prompt, new, place)
    return {b.name: b for b in p.buffers(rows, prompt + new, place)}


def test_window_computes_nothing():
    p = parse_method("streaming-llm").tokens
    assert not p.prompt_work(5000, PLACE)
    assert not p.step_work(p.rows(5000, 1, PLACE), PLACE)
    assert not held("streaming-llm", 5000)


def test_h2o_scores():
    # ceil(0.2 * 1000) = 200 rows, one fp32 score a row and KV head
    (scores,) = held("h2o(budget=0.2)", 1000).values()
    assert scores.bytes == 200 * 2 * 4
    # normalised: also the int32 position at which each row arrived
    assert sum(b.bytes for b in held("h2o-normalised", 1000).values()) == 2 * 200 * 2 * 4


def test_h2o_work():
    p = parse_method("h2o(budget=0.2)").tokens
    # weights 4 * 100^2 = 40000: one addition each, written twice and read three times at 2 bytes;
    # the selection: 100 * 2 scores, four passes of 4 bytes
    assert p.prompt_work(100, PLACE) == Work(40000 + 800, 40000 * 6 + 3200, 40000 * 4)
    # the step at row 100 attends ceil(0.2 * 99) + 1 = 21 rows: 84 weights (fp32) and 42 scores read, 42 written,
    # 42 read again for the least
    assert p.step_work(p.rows(100, 0, PLACE), PLACE) == Work(84 + 42, 84 * 4 + 42 * 4 + 42 * 4, 42 * 4)
    assert p.needs_weights


def test_snapkv_work():
    p = parse_method("snapkv(budget=0.25,window=10,kernel=5)").tokens
    # 4 heads * 10 queries * 100 rows = 4000 pairs of 2 * 8 + 6 operations; 200 scores: 5 additions to pool, 4 to select
    # read: keys 2 * 100 * 8 * 2 = 3200, queries 4 * 10 * 8 * 2 = 640, scores 800 to pool, 3200 to select
    assert p.prompt_work(100, PLACE) == Work(4000 * 6 + 1000 + 800, 3200 + 640 + 800 + 3200, 800 + 800, 4000 * 16)
    assert not p.step_work(p.rows(100, 5, PLACE), PLACE)
    assert not p.needs_weights
    assert not held("snapkv(budget=0.25)", 1000)
    # a prompt shorter than the window has as many queries as tokens: 4 * 6 * 6 pairs
    assert p.prompt_work(6, PLACE).arithmetic == 144 * 22 + 12 * 5 + 12 * 4


def test_tova_has_no_bookkeeping_and_one_row_of_weights():
    p = parse_method("tova(budget=0.25)").tokens
    assert not held("tova(budget=0.25)", 1000)
    # the step at row 100 attends ceil(0.25 * 99) + 1 = 26 rows: 4 * 26 pairs of 2 * 8 + 6 operations, keys read again
    # (26 * 2 * 8 * 2 bytes), one score a row for the whole layer
    assert p.step_work(p.rows(100, 0, PLACE), PLACE) == Work(104 * 6 + 26, 832 + 104, 0, 104 * 16)
    assert held("tova(budget=0.25,score=online_average)", 1000)["scores"].bytes == 250 * 4


def test_scissorhands_history():
    # 20 queries are 20 bits, 3 bytes a row and head
    assert held("scissorhands(budget=0.25,window=20)", 1000)["history"].bytes == 250 * 2 * 3


def test_topk_follows_its_score():
    prompt, running = (parse_method(f"topk(score=normalised,when={w})").tokens for w in ("prompt", "running"))
    assert (prompt.drops, running.drops) == ("prefill", "rows")
    assert prompt.needs_weights
    assert not parse_method("knorm").tokens.needs_weights
    assert not parse_method("topk(score=last)").tokens.per_head
    assert not held("topk(budget=0.5,score=knorm)", 100)
    assert held("topk(budget=0.5,score=knorm,when=running)", 100)["scores"].bytes == 50 * 2 * 4
    # one selection for all heads: 4 passes over 50 scores
    assert parse_method("topk(score=random)").tokens.prompt_work(50, PLACE).flops == 4 * 50 * 2
    # estimator: 32 hidden units of 8 + 2 values (weights, bias, output), fp16, a head, once for all sequences
    (net,) = held("topk(score=auxiliary)", 100).values()
    assert (net.bytes, net.per_model) == (2 * 32 * 10 * 2, True)


def test_ada_counts_heads():
    (counts,) = held("ada(budget=0.25)", 1000).values()
    assert (counts.bytes, counts.allocated) == (8, 8)


def test_pages_bounds():
    # 100 rows are 7 pages of 16: two rows of 8 values of 2 bytes a page and head
    found = held("pages(size=16,top=32)", 100)
    assert sum(b.bytes for b in found.values()) == 2 * 7 * 2 * 16
    # bounds grow by the pages of 256 tokens: 16
    assert found["page_min"].allocated == 16 * 2 * 16
    assert not held("pages(size=16,top=32)", 100, place=Place("k", 2, 8, 4, layer=1, n_layers=8))
    p = parse_method("pages(size=16,top=32)").tokens
    # prompt: 1600 key values compared twice, 3200 bytes read, 2 * 7 * 16 values written
    assert p.prompt_work(100, PLACE) == Work(3200, 3200, 448)
    # step: newest page 32 operations and 64 bytes; 4 heads * 7 pages * 4 * 8; bounds read 448, 14 scores of 4 bytes
    # written and read by four selection passes
    assert p.step_work(p.rows(100, 0, PLACE), PLACE) == Work(32 + 896 + 56, 448 + 224, 64 + 56)


def test_hierarchy_work():
    p = parse_method("hierarchy(recent=10,block=4,summaries=2,sinks=0)").tokens
    # 50 rows: floor(40 / 4) = 10 blocks, floor((10 - 2) / 2) = 4 summaries, 2 block means, 10 rows
    assert p.levels(50) == (0, 4, 2, 10)
    # 40 rows and 10 means are added and read, 10 means and (10 / 2) summaries written, K and V: 32 values
    assert p.prompt_work(50, PLACE) == Work(50 * 32, 50 * 64, 15 * 64)


@pytest.mark.parametrize("name", sorted(n for n, p in parts().items() if p.role == "tokens"))
def test_work_takes_arrays_and_no_tokens(name):
    p = parse_method(name).tokens
    prompt = np.array([0, 1, 33, 4096, 2**40])
    work = p.prompt_work(prompt, PLACE)
    step = p.step_work(p.rows(prompt, 1, PLACE), PLACE)
    for field in ("flops", "read_bytes", "write_bytes"):
        for got, one in ((work, p.prompt_work), (step, lambda t, place: p.step_work(p.rows(t, 1, place), place))):
            values = np.broadcast_to(getattr(got, field), prompt.shape)
            assert np.all(values >= 0)
            assert np.all(np.isfinite(values))
            assert list(values) == pytest.approx([getattr(one(int(t), PLACE), field) for t in prompt])


def test_lsh_buffers():
    found = held("lsh_merge(planes=4,tables=2,recent=3,sinks=1,when=running)", 1000)
    p = parse_method("lsh_merge(planes=4,tables=2,recent=3,sinks=1,when=running)").tokens
    stored = p.rows(1000, 0, PLACE).stored
    assert found["log_count"].bytes == stored * 2 * 4
    assert found["hashes"].bytes == stored * 2  # 8 bits
    assert found["mean_key"].bytes == 2 * 8 * 4
    assert (found["planes"].bytes, found["planes"].per_model) == (8 * 8 * 2, True)
    assert set(held("lsh_merge", 1000)) == {"log_count", "planes"}


def test_lsh_by_hand():
    p = parse_method("lsh_merge(planes=1,recent=0,sinks=0)").tokens
    # one plane, 90 degrees, 3 rows: 2 * (1 - (1/2)^3) = 1.75 buckets
    assert p.buckets(3, 90.0) == 2
    # 75 degrees: s^2 + (1 - s)^2 = 7/12, s = (1 + sqrt(1/6)) / 2 = 0.7041: 1 - 0.2959^3 + 1 - 0.7041^3 = 1.625
    assert p.buckets(3, 75.0) == 2
    # 2 rows: 1 - 0.2959^2 + 1 - 0.7041^2 = 1.4167, which is 2 - 7/12: they merge with 7/12
    assert p.buckets(2, 75.0) == 1
    # 12 planes, 32768 rows, 90 degrees: 4096 * (1 - (1 - 1/4096)^32768) = 4096 * (1 - e^-8.001) = 4094.6
    big = parse_method("lsh_merge(planes=12)").tokens
    assert big.buckets(32768, 90.0) == 4095
    rows = big.rows(32768, 100, PLACE)
    assert rows.high == 4095 + 36 + 100
    assert rows.low == big.buckets(32768 - 36, 60.0) + 36 + 100


@pytest.mark.parametrize("degrees", [60.0, 75.0, 90.0])
def test_lsh_against_hashes(degrees):
    """Keys at one angle to each other, really hashed: mean occupied buckets are near the estimate (and below 90's)."""
    rng, cosine = np.random.default_rng(0), np.cos(np.deg2rad(degrees))
    for planes, n in ((6, 100), (8, 200), (9, 1000)):
        p = parse_method(f"lsh_merge(planes={planes},recent=0,sinks=0)").tokens
        counts = []
        for _ in range(100):
            keys = cosine**0.5 * rng.normal(size=(1, 128)) + (1 - cosine) ** 0.5 * rng.normal(size=(n, 128))
            counts.append(len(np.unique((keys @ rng.normal(size=(128, planes)) > 0) @ (1 << np.arange(planes)))))
        assert np.mean(counts) == pytest.approx(p.buckets(n, degrees), rel=0.05 if degrees == 90 else 0.2)
        assert np.mean(counts) <= p.buckets(n, 90.0)


def test_lsh_collision_probability():
    """Two vectors at angle t share a sign with 1 - t / pi."""
    rng = np.random.default_rng(1)
    angle = np.deg2rad(75)
    planes = rng.normal(size=(40000, 2))
    same = (planes[:, 0] > 0) == (planes @ [np.cos(angle), np.sin(angle)] > 0)
    assert same.mean() == pytest.approx(1 - 75 / 180, abs=0.01)
