"""Portions on a model: bytes exact, what equal portions must equal, rows chosen inside their portion."""

import pytest
import torch

pytest.importorskip("transformers")
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.adaptive_steps import JOIN_CALLS, STORE_CALLS
from kvsim.errors import KvsimError
from kvsim.portions import parse_portions
from kvsim.tasks import labels_for, portions_for, task
from runtime.cache import CompressedCache, spec_of
from runtime.portioned import PortionedCache
from runtime.quality_reference import handed, reference

T, M = 60, 9
LABELS = [["a"] * 20 + ["b"] * 7 + ["a"] * 13 + ["c"] * 20, ["c"] * 5 + ["b"] * 55]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 50, (2, T + M), generator=torch.Generator().manual_seed(1))


def generated(model, cache, tokens, prompt=T):
    with torch.no_grad():
        model(tokens[:, :prompt], **handed(model, cache))
        steps = [model(tokens[:, i : i + 1], **handed(model, cache)).logits for i in range(prompt, tokens.shape[1])]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("text", [
    "a = full",
    "a = int(bits=8) // b = topk(budget=0.3,score=window,recent=0,sinks=0) // * = int(bits=2,group=16)",
    "a, c = snapkv(budget=0.5,window=4) | int(bits=4,group=8,axis=channel,residual=5) // new = int(bits=4,group=8)",
    "b = pyramid(budget=0.4,window=4) // a = topk(budget=6,score=cumulative,recent=0,sinks=0) | svd(rank=3)",
    "a = rotated(bits=3) // b = kivi-2 // new = kivi-2",
])  # fmt: skip
def test_bytes_are_what_portions_predict(model, tokens, text):
    with PortionedCache(text, model, LABELS) as cache:
        generated(model, cache, tokens)
        expected = parse_portions(text).cache_bytes(spec_of(model), LABELS, M, "fp32")
        assert cache.nbytes() == expected
        assert parse_portions(str(cache.portions)) == cache.portions


@pytest.mark.parametrize("text", ["full", "int(bits=4,group=16)", "rotated(bits=4)"])
def test_equal_portions_are_one_cache(model, tokens, text):
    # a format that writes each row by itself cannot tell in which store a row lies
    with CompressedCache(text, model) as cache:
        expected = generated(model, cache, tokens)
    with PortionedCache(f"* = {text}", model, LABELS) as cache:
        torch.testing.assert_close(generated(model, cache, tokens), expected, rtol=1e-4, atol=1e-4)


def test_one_portion_chooses_what_the_policy_chooses(model, tokens):
    policy = "snapkv(budget=0.4,window=4)"
    with CompressedCache(policy, model) as cache:
        expected = generated(model, cache, tokens)
    with PortionedCache(f"x = {policy} // new = full", model, [["x"] * T] * 2) as cache:
        torch.testing.assert_close(generated(model, cache, tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_portion_ranks_its_own_rows_by_the_whole_prompts_weights(model, tokens):
    found = reference(model, torch.cat([tokens, tokens[:, :1]], dim=1), T)
    with PortionedCache("b = topk(budget=3,score=cumulative,recent=0,sinks=0)", model, LABELS) as cache:
        cache.take(found)
        layer, seen = cache.layers[0], found.prompt[0]
        (piece,) = [p for p in layer.pieces if int(p.sequences[0]) == 0 and p.store.policy is not None]
        keys, _ = piece.store.read()
        weights = torch.softmax((seen.q[0] @ seen.k[0].repeat_interleave(2, 0).mT) * seen.rule.scaling
                                + torch.full((T, T), float("-inf")).triu(1), -1)
        mass = weights.sum(1).unflatten(0, (2, 2)).sum(1)[:, 20:27]
        best = mass.topk(3).indices.sort().values + 20
        torch.testing.assert_close(keys[0], seen.k[0].gather(1, best[..., None].expand(-1, -1, 32)))


def test_what_is_kept_of_a_portion_changes_the_answer_there_alone(model, tokens):
    found = reference(model, torch.cat([tokens, tokens[:, :1]], dim=1), T)
    with PortionedCache("b = int(bits=2,group=16)", model, LABELS) as cache:
        cache.take(found)
        for piece in cache.layers[1].pieces[:-1]:
            exact = piece.store.keys.plain
            labels = LABELS[int(piece.sequences[0])]
            assert exact == (piece.store.keys.rows != labels.count("b"))


def test_calls_of_a_step_are_those_that_torch_is_asked_for(model, tokens):
    found, counts = reference(model, torch.cat([tokens[:1], tokens[:1, :1]], dim=1), T), []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += 1
            return func(*args, **(kwargs or {}))

    for labels in (["a"] * T, LABELS[0]):
        with PortionedCache("* = full", model, [labels]) as cache:
            cache.take(found)
            attend = cache.layers[1].attend

            def counted(*args, attend=attend):
                counts.append(0)
                with Calls():
                    return attend(*args)

            cache.layers[1].attend = counted
            with torch.no_grad():
                model(tokens[:1, T : T + 1], **handed(model, cache))
    # one portion and the later tokens, three and the later tokens
    assert [counts[0], counts[1]] == pytest.approx([JOIN_CALLS + 2 * STORE_CALLS, JOIN_CALLS + 4 * STORE_CALLS], abs=3)


def test_a_task_spends_its_bytes_and_no_more(model):
    spec, words = spec_of(model), ["The ", "count ", "of ", "Ada ", "is ", "1815", ".", "\n"] * 8
    for name in ("summarisation", "retrieval", "facts"):
        preset = task(name)
        labels = labels_for(preset, words, system=0 if name == "facts" else 4, question=0)
        full = spec.cache_bytes(64, 1, 32)
        portions, apart = portions_for(preset, labels, spec, full // 2, recent=8, kv_dtype="fp32")
        # 64 rows of 2 layers x 2 heads x 32 values x 4 bytes x 2 sides; half of it, to within a row of each label
        held = portions.cache_bytes(spec, [apart], 0, "fp32")
        assert full // 2 - 5 * full // 64 <= held <= full // 2
        kept = {n: getattr(portions.at(n).tokens, "budget", 1.0) for n in dict.fromkeys(apart) if n != "recent"}
        if name == "summarisation":
            assert kept["start"] == pytest.approx(3 * kept["middle"], rel=1e-4)
        if name == "retrieval":
            assert kept["middle"] == pytest.approx(2 * kept["end"], rel=1e-4)


def test_wrong_questions(model, tokens):
    for text, what in (
        ("a = h2o(budget=0.5)", "cannot choose inside a portion"),
        ("a = k:int(bits=4,rope=pre) v:full", "consecutive positions"),
        ("a = full // a = int4", "twice"),
        ("int4", "is not NAME = METHOD"),
        ("d = int4", "no token has that label"),
    ):
        with pytest.raises(KvsimError, match=what):
            PortionedCache(text, model, LABELS)
    slip = pytest.raises(KvsimError, match="69 tokens and 60 labels")
    with PortionedCache("a = int4", model, LABELS) as cache, torch.no_grad(), slip:
        model(tokens, **handed(model, cache))
