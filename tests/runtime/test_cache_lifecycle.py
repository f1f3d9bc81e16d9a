"""What people do to a cache: reset, close, share a model, stop midway, move it, use it wrongly."""

import gc
from copy import deepcopy

import pytest
import torch
from families import differences, generate, logits, model_of, own_cache, prompt, record

from kvsim.errors import KvsimError
from runtime import CompressedCache


def test_reset_and_other_batches():
    model = model_of("llama")
    with CompressedCache("kmeans(bits=4)", model) as cache:
        generate(model, prompt(2), cache)
        size = cache.nbytes()
        with pytest.raises(KvsimError, match="holds 2 sequences, got 3"):
            logits(model, prompt(3), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        generate(model, prompt(2, seed=9), cache)
        assert cache.nbytes() == size  # the codebook is the model's, and stayed
        cache.reset()
        generate(model, prompt(3), cache)
        assert not differences(cache, record(model, "kmeans(bits=4)", 3, 40, 19))


def test_closing_gives_the_model_back():
    model, ids = model_of("llama"), prompt()
    before, expected = model.config._attn_implementation, logits(model, ids)
    cache = CompressedCache("int(bits=4)", model)
    other = CompressedCache("full", model)
    mine = generate(model, ids, other)
    cache.close()
    cache.close()
    assert torch.equal(generate(model, mine, other), generate(model, mine, other.__class__("full", model)))
    with pytest.raises(KvsimError, match="closed"):
        logits(model, ids, cache)
    other.close()
    gc.collect()
    assert model.config._attn_implementation == before
    assert torch.equal(logits(model, ids), expected)
    with pytest.raises(KvsimError, match="closed"):
        generate(model, ids, other)
    assert model.config._attn_implementation == before


def test_an_error_inside_leaves_the_model_usable():
    model = model_of("llama")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="mine"), CompressedCache("full", model):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_forwards_without_the_cache_are_what_they_were(family):
    """While a cache is open the model's other forwards keep their mask, soft cap and sinks."""
    model, ids = model_of(family), prompt()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = [logits(model, ids), logits(model, ids, attention_mask=mask), own_cache(model, ids)]
    with CompressedCache("int(bits=4)", model) as cache:
        logits(model, ids, cache)
        cache.get_mask_sizes(1, 0)  # asked for a mask that never follows
        found = [logits(model, ids), logits(model, ids, attention_mask=mask), own_cache(model, ids)]
        logits(model, ids[:, :1], cache)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a[~(a != a)], b[~(b != b)])


def test_another_model_cannot_use_it():
    model, other, ids = model_of("llama"), model_of("qwen2"), prompt()
    with CompressedCache("full", model) as cache:
        with pytest.raises(KvsimError, match="did not pass through kvsim"):
            logits(other, ids, cache)
        with pytest.raises(KvsimError, match="reset"):
            logits(model, ids, cache)
        cache.reset()
        torch.testing.assert_close(logits(model, ids, cache), logits(model, ids))


def test_a_forward_that_stops_midway_must_be_reset():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("int(bits=4)", model) as cache:
        logits(model, ids, cache)
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            logits(model, ids[:, :1], cache)
        handle.remove()
        with pytest.raises(KvsimError, match="stopped midway"):
            logits(model, ids[:, :1], cache)
        cache.reset()
        logits(model, ids, cache)


def test_what_a_cache_does_not_do():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("int(bits=4)", model) as cache:
        with pytest.raises(KvsimError, match="no_grad"):
            model(ids, cache=cache)
        cache.reset()
        for mask, why in (
            (torch.ones(2, 1, 40, 40), "4-D"),
            (torch.arange(40).expand(2, -1) < 30, "holes or padding on the right"),
        ):
            with pytest.raises(KvsimError, match=why):
                logits(model, ids, cache, attention_mask=mask)
            cache.reset()
        logits(model, ids, cache)
        hidden = torch.ones((2, 41))
        hidden[0, 40] = 0
        with pytest.raises(KvsimError, match="masked out"):
            logits(model, ids[:, :1], cache, attention_mask=hidden)
    model = deepcopy(model).train()  # shared models stay in eval mode
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with CompressedCache("int(bits=4)", model) as cache, pytest.raises(KvsimError, match="eval mode"):
        logits(model, ids, cache)


def test_prompt_and_decode_under_different_modes():
    """Rows written under inference_mode can be appended to outside of it."""
    model, ids = model_of("llama"), prompt()
    for method in ("full", "kivi-2(group=8,residual=16)", "h2o(budget=0.5)", "svd(rank=8)"):
        with CompressedCache(method, model) as cache:
            with torch.inference_mode():
                model(ids, cache=cache)
            logits(model, ids[:, :1], cache)
            with torch.inference_mode():
                model(ids[:, :1], cache=cache)


def test_offload_and_prefetch_keep_everything():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("kivi-2(group=8,residual=16)", model) as cache:
        logits(model, ids, cache)
        size = cache.nbytes()
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        assert cache.nbytes() == size
        logits(model, ids[:, :1], cache)


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "kivi-4(group=8,residual=16)",
        "h2o(budget=0.5) | int(bits=8)",
        "adakv(budget=0.5,window=8)",
        "online_svd(rank=8)",
        "lsh_merge(planes=3,recent=8,when=running)",
        "int(bits=4,rope=pre)",
    ],
)
def test_a_copy_is_a_cache_of_its_own(method):
    """`copy.deepcopy` of a prompt's cache, as people reuse prefixes: same rows, same model, nothing shared but that."""
    model, ids = model_of("llama"), prompt()
    before = model.config._attn_implementation
    with CompressedCache(method, model) as cache:
        logits(model, ids, cache)
        size, rows = cache.nbytes(), cache.rows()
        other = deepcopy(cache)
        assert other.model is model
        assert (other.nbytes(), other.allocated_nbytes(), other.rows()) == (size, cache.allocated_nbytes(), rows)
        first = [logits(model, ids[:, i : i + 1], other) for i in range(9)]
        assert (cache.nbytes(), cache.rows(), cache.get_seq_length()) == (size, rows, 40)
        for i, expected in enumerate(first):
            assert torch.equal(logits(model, ids[:, i : i + 1], cache), expected)
        own = {x.untyped_storage().data_ptr() for _, x in _pages(cache)}
        assert not own & {x.untyped_storage().data_ptr() for _, x in _pages(other)}
    logits(model, ids[:, :1], other)  # the first one's end is not the copy's
    other.close()
    assert model.config._attn_implementation == before
    with pytest.raises(KvsimError, match="closed"):
        deepcopy(other)


def _pages(cache):
    stores = [p.store for layer in cache.layers for p in layer.pieces]
    return [(name, x) for store in stores for name, page in store.pages() for x in page.chunks]


def test_a_copy_in_the_middle_of_a_prompt():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("int(bits=8)", model, prompt_tokens=40) as cache:
        logits(model, ids[:, :10], cache)
        other = deepcopy(cache)
        whole = logits(model, ids[:, 10:], cache)
        assert torch.equal(logits(model, ids[:, 10:], other), whole)
        assert other.nbytes() == cache.nbytes()
        other.close()


def test_no_tokens_and_no_weights():
    model = model_of("llama")
    with CompressedCache("int(bits=8)", model) as cache:
        with pytest.raises(KvsimError, match="a forward of no tokens"):
            logits(model, torch.zeros((1, 0), dtype=torch.int64), cache)
        cache.reset()
        with pytest.raises(KvsimError, match="leave output_attentions off"):
            logits(model, prompt(), cache, output_attentions=True)
