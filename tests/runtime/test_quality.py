"""Scoring: at once equals one by one, the uncompressed cache loses nothing, runs resume, intervals."""

import gc
import json
import math

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError
from kvsim.method import parse_method
from runtime.cache import CompressedCache
from runtime.quality import kept_text
from runtime.quality_forced import Forced, static
from runtime.quality_reference import handed, reference, watch
from runtime.quality_run import Bench, Sizes, interval, learns, rounded, run
from runtime.quality_scoring import compared, score
from runtime.quality_subjects import Subject, Text, weights_hash

T, M = 90, 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    # attention sums in float32 whatever the model: an order of sums may decide a code at an edge, hence 1% below
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def found(model):
    tokens = torch.randint(0, 50, (3, T + M + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return reference(model, tokens, T)


AT_ONCE = [
    "full",
    "int(bits=4,group=16)",
    "int(bits=3,group=16,residual=5)",
    "kivi-4",
    "k:int(bits=2,group=8,axis=channel,residual=16,flush=all) v:int(bits=2,group=8,residual=16)",
    "k:int(bits=4,group=8,axis=channel,rope=pre) v:int(bits=4)",
    "rotated(bits=4)",
    "int(bits=2,axis=channel,group=8)+lowrank(rank=2)",
    "snapkv(budget=0.5)",
    "ada(budget=0.5) | int(bits=4)",
    "window(sinks=2,recent=30)",
    "window(sinks=2,recent=30) | k:int(bits=4,group=8,axis=channel) v:int(bits=4)",
    "stride(every=3,recent=20)",
    "svd(rank=8)",
    "k:svd(rank=8,rope=pre) v:svd(rank=16)",
    "svd(rank=16) | int(bits=4)",
    "gguf(type=q8_0)",
    "nvfp4",
]
ONE_BY_ONE = [
    "h2o(budget=0.3)",
    "tova(budget=0.3) | int(bits=8)",
    "pages(size=8,top=32,dense_layers=0)",
    "online_svd(rank=8)",
]


@pytest.mark.parametrize("text", AT_ONCE)
def test_tokens_at_once_see_what_they_would_see_one_by_one(model, found, text):
    method = parse_method(text)
    fast, slow = (score(model, found, method, stepwise=s) for s in (False, True))
    torch.testing.assert_close(fast.kl, slow.kl, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(fast.attention_error, slow.attention_error, rtol=1e-2, atol=1e-5)
    assert torch.equal(fast.top1, slow.top1)


@pytest.mark.parametrize("text", [*AT_ONCE, *ONE_BY_ONE])
@pytest.mark.parametrize("protocol", ["after_prefill", "on_write"])
def test_scores_are_those_of_a_model_that_generates(model, found, text, protocol):
    """The reference here is the cache used as people use it: a prefill of its own, then a forward a token."""
    method = parse_method(text if protocol == "after_prefill" else f"{text} @ on_write")
    with CompressedCache(method, model) as cache, torch.no_grad():
        model(found.tokens[:, :T], **handed(model, cache))
        steps = [model(found.tokens[:, i : i + 1], **handed(model, cache)).logits for i in range(T, T + M)]
    kl, _, nll, _ = compared(found.logits, torch.cat(steps, dim=1), found.targets)
    mine = score(model, found, method)
    torch.testing.assert_close(mine.kl, kl, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(mine.nll, nll, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("text", "fast"), [(AT_ONCE[1], True), (ONE_BY_ONE[0], False), (ONE_BY_ONE[2], False)])
def test_which_methods_take_the_short_way(model, found, text, fast):
    with CompressedCache(text, model) as cache, torch.no_grad():
        model(found.tokens[:, :T], **handed(model, cache))
        watchers = watch(cache, Forced)
        assert all(static(p.store) == fast for w in watchers for p in w.layer.pieces)


def test_the_full_cache_loses_nothing_and_fewer_bits_lose_more(model, found):
    full = score(model, found, parse_method("full"))
    assert float(full.kl.max()) < 1e-6
    assert float(full.top1.min()) == 1
    assert float(full.attention_error.max()) < 1e-5
    losses = [float(score(model, found, parse_method(f"int(bits={b},group=16)")).kl.mean()) for b in (8, 6, 4, 2)]
    assert losses == sorted(losses)
    assert losses[0] > 0


def test_kl_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL = (1/2) ln 2 + (1/2) ln(2/3) = (1/2) ln(4/3) = 0.143841
    p, q = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[0.0, math.log(3.0)]]])
    kl, top1, nll, full = compared(p, q, torch.tensor([[1]]))
    assert float(kl) == pytest.approx(0.143841, abs=1e-6)
    assert float(nll) == pytest.approx(-math.log(0.75))
    assert float(full) == pytest.approx(math.log(2))
    assert float(top1) in (0.0, 1.0)


def test_interval_by_hand():
    # mean 2, s = 1, n = 3: half width = 4.302653 * 1 / sqrt(3) = 2.484138
    mean, low, high = interval(torch.tensor([1.0, 2.0, 3.0]))
    assert (mean, low, high) == pytest.approx((2.0, -0.484138, 4.484138), abs=1e-5)
    assert interval(torch.tensor([5.0])) == (5.0, 5.0, 5.0)


def test_rounded():
    assert rounded(0.123456) == 0.1235
    assert rounded(3e-12) == 0.0


@pytest.fixture
def bench(model):
    ids = torch.randint(0, 50, (900,), generator=torch.Generator().manual_seed(2))
    return Bench(Subject("tiny", model, None, weights_hash(model)), Text("noise", ids, "h"), Sizes(3, 60, 8, 1))


def test_a_run_resumes_and_repeats(bench, tmp_path):
    out, calls = tmp_path / "e.jsonl", []

    def said(method, row, reason):
        calls.append((method, reason))

    first = list(run(bench, ["full", "int4", "svd(rank=64)"], out, said))
    assert [r.method for r in first] == ["full", "int(bits=4)"]
    assert "rank" in calls[2][1]  # what this model cannot hold is said, and the run goes on
    with out.open("a") as file:
        file.write('{"model": "ti')  # killed while writing
    again = list(run(bench, ["int4", "int8"], out, said))
    assert again[0] == first[1]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["method"] for r in rows] == ["full", "int(bits=4)", "int(bits=8)"]
    fresh = bench.measure(parse_method("int4"))
    assert (fresh.kl, fresh.top1, fresh.segment_kl) == (first[1].kl, first[1].top1, first[1].segment_kl)


def test_a_run_keeps_nothing_of_the_methods_it_has_measured(bench):
    """Memory of a long run is one method's: with the collector off, nothing of a finished one is left."""

    def held():
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in run(bench, ["full", "int4", "snapkv(budget=0.5)", "kivi-4"], None, lambda *_: counts.append(held())):
            pass
    finally:
        gc.enable()
    assert max(counts) <= counts[0]


def test_protocols_differ_and_on_write_has_fewer_segments(bench):
    after, write = (bench.measure(parse_method(f"int(bits=3){p}")) for p in ("", " @ on_write"))
    assert after.kl != write.kl
    assert (after.segments, write.segments) == (3, 1)


def test_calibrated_methods_never_see_what_is_scored(bench):
    text, s = bench.text, bench.sizes
    scored = {
        tuple(row.tolist()[i : i + 12]) for row in text.segments(s.segments, s.length) for i in range(s.length - 11)
    }
    for piece in text.between(s.segments, s.length, 4, 40):
        assert not {tuple(piece.tolist()[i : i + 12]) for i in range(len(piece) - 11)} & scored
    assert learns(parse_method("kvquant-3"))
    assert not learns(parse_method("int4"))
    with pytest.raises(KvsimError, match="longer text"):
        text.segments(100, 50)


def test_a_report_is_kept_with_its_digits_and_lists_on_one_line():
    found = {"a": 1 / 3, "b": [1 / 3, 2e-9, 4], "c": [{"d": (0.25, -1.5)}], "e": ["x, y"]}
    text = kept_text(found)
    assert json.loads(text) == {"a": 0.3333, "b": [0.3333, 0.0, 4], "c": [{"d": [0.25, -1.5]}], "e": ["x, y"]}
    assert '"b": [0.3333, 0.0, 4],' in text
