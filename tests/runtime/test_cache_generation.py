"""Everything that `generate` does with a cache: beams, padding, chunks, turns, drafts, crop."""

import pytest
import torch
from families import differences, generate, logits, model_of, own_cache, prompt, record
from transformers import DynamicCache, TextStreamer

from kvsim.errors import KvsimError
from runtime import CompressedCache

METHODS = [
    "full",
    "int(bits=4,group=16)",
    "kivi-2(group=8,residual=16)",
    "int(bits=4,axis=channel,group=8,rope=pre)",
    "svd(rank=8) | int(bits=4)",
    "window(sinks=2,recent=30)",
    "h2o(budget=0.5) | int(bits=8)",
    "snapkv(budget=0.5,window=8)",
    "pages(size=8,top=0.25)",
    "adakv(budget=0.5,window=8)",
    "lsh_merge(planes=3,recent=8)",
]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_and_returned_sequences(family):
    model, ids = model_of(family), prompt()
    for more in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        with CompressedCache("full", model) as cache:
            assert torch.equal(generate(model, ids, cache, **more), own_cache(model, ids, **more))
    torch.manual_seed(0)
    sampled = own_cache(model, ids, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    with CompressedCache("full", model) as cache:
        assert torch.equal(generate(model, ids, cache, do_sample=True, num_return_sequences=3), sampled)


def test_beams_with_prompts_of_different_lengths():
    model, ids = model_of("llama"), prompt()
    mask = torch.ones_like(ids)
    mask[0, :9] = ids[0, :9] = 0
    with CompressedCache("full", model) as cache:
        mine = generate(model, ids, cache, attention_mask=mask, num_beams=3)
    assert torch.equal(mine, own_cache(model, ids, attention_mask=mask, num_beams=3))


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method):
    """A prompt alone, and the same prompt padded beside a longer one: the same logits and the same rows."""
    model, ids = model_of("llama"), prompt(1, 30)
    longer = prompt(1, 41, seed=1)
    batch = torch.cat([torch.cat([torch.zeros((1, 11), dtype=torch.int64), ids], 1), longer])
    mask = (batch != 0).long()
    with CompressedCache(method, model) as cache:
        alone = generate(model, ids, cache, return_dict_in_generate=True, output_logits=True)
        rows, size = cache.rows(), cache.nbytes()
    with CompressedCache(method, model) as cache:
        generate(model, longer, cache)
        other = cache.nbytes()
    with CompressedCache(method, model) as cache:
        together = generate(model, batch, cache, attention_mask=mask, return_dict_in_generate=True, output_logits=True)
        shared = sum(t.nbytes for layer in cache.layers for _, t in layer.twins.held())
        assert [r[:2] for r in cache.rows()] == [list(r) for r in rows]
        assert cache.nbytes() == size + other - shared
    assert torch.equal(alone.sequences[0, 30:], together.sequences[0, 41:])
    for a, b in zip(alone.logits, together.logits, strict=True):
        torch.testing.assert_close(a[0], b[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_sequences_picked_and_repeated(method):
    """Whatever is done to the batch, each sequence goes on as it would have alone."""
    model, ids = model_of("llama"), prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :5] = ids[1, :5] = 0
    at = mask.cumsum(-1) - 1
    step = prompt(3, 1, seed=5)
    chosen = torch.tensor([2, 1, 1, 0])

    def run(act, tokens, rows):
        with CompressedCache(method, model) as cache:
            logits(model, ids, cache, attention_mask=mask, position_ids=at.clamp_min(0))
            act(cache)
            return logits(model, tokens, cache, position_ids=at[rows, -1:] + 1)

    base = run(lambda c: None, step, torch.arange(3))
    for act in (lambda c: c.batch_select_indices(chosen), lambda c: c.reorder_cache(chosen)):
        torch.testing.assert_close(run(act, step[chosen], chosen), base[chosen], atol=1e-4, rtol=1e-4)
    twice = torch.arange(3).repeat_interleave(2)
    torch.testing.assert_close(
        run(lambda c: c.batch_repeat_interleave(2), step[twice], twice), base[twice], atol=1e-4, rtol=1e-4
    )
    kept = torch.tensor([True, False, True])
    torch.testing.assert_close(
        run(lambda c: c.batch_select_indices(kept), step[kept], torch.tensor([0, 2])), base[kept], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_in_chunks_is_the_prompt(method):
    model, ids = model_of("llama"), prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :17] = ids[0, :17] = 0
    at = (mask.cumsum(-1) - 1).clamp_min(0)

    def last(pieces):
        with CompressedCache(method, model, prompt_tokens=40) as cache:
            start = 0
            for size in pieces:
                here = slice(start, start + size)
                out = logits(
                    model, ids[:, here], cache, attention_mask=mask[:, : start + size], position_ids=at[:, here]
                )
                start += size
            more = logits(model, ids[:, :1], cache, attention_mask=torch.ones((2, 41)), position_ids=at[:, -1:] + 1)
            return out[:, -1], more, cache.nbytes(), cache.rows()

    whole, pieces = last([40]), last([7, 20, 12, 1])
    torch.testing.assert_close(whole[0], pieces[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole[1], pieces[1], atol=5e-3, rtol=1e-3)  # a code may fall to the other side
    assert whole[2:] == pieces[2:]


def test_chunked_prefill_of_generate():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("int(bits=8)", model, prompt_tokens=40) as cache:
        mine = generate(model, ids, cache, prefill_chunk_size=16)
        assert not differences(cache, record(model, "int(bits=8)", 2, 40, 19))
    with CompressedCache("int(bits=8)", model) as cache:
        assert torch.equal(mine, generate(model, ids, cache))


@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_in_one_forward(method):
    """Several tokens on compressed rows are the same tokens one by one, where the method does not drop in between."""
    model, ids, turn = model_of("llama"), prompt(2, 40), prompt(2, 9, seed=3)
    results = []
    for pieces in ([9], [1] * 9):
        with CompressedCache(method, model) as cache:
            logits(model, ids, cache)
            start = 0
            for size in pieces:
                out = logits(model, turn[:, start : start + size], cache)
                start += size
            results.append((out[:, -1], cache.nbytes(), cache.allocated_nbytes(), cache.rows()))
    assert results[0][1:] == results[1][1:]
    if method in ("full", "snapkv(budget=0.5,window=8)", "adakv(budget=0.5,window=8)", "lsh_merge(planes=3,recent=8)"):
        torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_turns_with_generate(family):
    """A conversation goes on with all ids, and `generate` feeds what is new."""
    model, ids, turn = model_of(family), prompt(2, 40), prompt(2, 9, seed=3)
    results = []
    own = DynamicCache(config=model.config)
    with CompressedCache("full", model) as cache:
        for held in (own, cache):
            first = generate(model, ids, held)
            second = torch.cat([first, turn], dim=1)
            results.append(generate(model, second, held))
        assert not differences(cache, record(model, "full", 2, 40, 19 + 1 + 9 + 19))
    assert torch.equal(*results)


def test_the_old_name_and_streaming(capsys):
    model, ids = model_of("llama"), prompt(1)
    expected = own_cache(model, ids)
    with CompressedCache("full", model) as cache, torch.no_grad():
        given = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with pytest.warns(FutureWarning, match="past_key_values"):
            out = model.generate(ids, past_key_values=cache, **given)
        assert torch.equal(out, expected)

    class Words:
        def decode(self, ids, **_):
            return " ".join(str(int(i)) for i in ids) + " "

    with CompressedCache("int(bits=8)", model) as cache:
        out = generate(model, ids, cache, streamer=TextStreamer(Words(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [str(int(i)) for i in out[0, 40:]]


@pytest.mark.parametrize(
    "method",
    [
        "full",
        "int(bits=8,group=1,scale_dtype=fp32)",
        "kivi-4(group=8,residual=16)",
        "window(sinks=2,recent=30)",
        "h2o(budget=0.5) | int(bits=8)",
        "snapkv(budget=0.5,window=8)",
        "pages(size=8,top=0.25)",
        "hierarchy(recent=16,block=4,summaries=2)",
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_assisted_generation_leaves_no_trace(family, method):
    """Drafts are cropped away again: tokens and bytes are those of plain generation with the same method."""
    model, ids = model_of(family), prompt(1, 40)
    ids[:, 20:] = ids[:, :20]  # so that look-up finds drafts
    with CompressedCache(method, model) as cache:
        expected = generate(model, ids, cache, new=24)
        size = cache.nbytes(), cache.allocated_nbytes(), cache.rows()
    with CompressedCache(method, model) as cache:
        mine = generate(model, ids, cache, new=24, prompt_lookup_num_tokens=3)
        cache.crop(0)
        assert cache.get_seq_length() in (63, 64)
        if cache.get_seq_length() == 63:
            assert (cache.nbytes(), cache.allocated_nbytes(), cache.rows()) == size
    if "pages" in method:  # a draft of several tokens reads every page
        return
    if "hierarchy" in method or "window" in method or "h2o" in method:
        # a step of several tokens drops after the last of them, so that the first ones see more
        assert torch.equal(mine[:, :41], expected[:, :41])
        return
    assert torch.equal(mine, expected)


def test_assisted_generation_with_another_model():
    model, assistant, ids = model_of("llama"), model_of("llama-mqa-96"), prompt(1, 40)
    with CompressedCache("full", model) as cache:
        mine = generate(model, ids, cache, assistant_model=assistant)
    assert torch.equal(mine, own_cache(model, ids))


def test_crop_goes_back_where_it_can():
    model, ids = model_of("llama"), prompt(2, 40)
    for method in ("full", "int(bits=4,group=16)", "svd(rank=8)", "int(bits=4,axis=channel,group=8) @ on_write"):
        with CompressedCache(method, model) as cache:
            logits(model, ids, cache)
            first = logits(model, ids[:, :1], cache)
            logits(model, ids[:, 1:5], cache)
            cache.crop(-5)
            assert cache.get_seq_length() == 40
            again = logits(model, ids[:, :1], cache)
            torch.testing.assert_close(first, again, atol=1e-5, rtol=1e-4)
            assert not differences(cache, record(model, method, 2, 40, 1))


def test_crop_into_codes_leaves_what_they_hold():
    """Encoded rows come back to the tail as they were decoded: lengths are right, precision is not regained."""
    model, ids = model_of("llama"), prompt(2, 40)
    with CompressedCache("kivi-2(group=8,residual=16)", model) as cache:
        logits(model, ids, cache)
        keys = cache.layers[0].pieces[0].store.keys
        before = keys.read()
        assert keys.encoded_rows == 32
        cache.crop(-21)
        assert (keys.rows, keys.encoded_rows, keys.tail_rows) == (19, 16, 3)
        torch.testing.assert_close(keys.read(), before[:, :, :19])
        logits(model, ids[:, :1], cache)
        assert keys.rows == cache.get_seq_length() == 20


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("h2o(budget=0.5)", "h2o drops rows"),
        ("window(sinks=2,recent=30)", "drops rows"),
        ("snapkv(budget=0.5,window=8)", "reach into the prompt"),
        ("pages(size=8,top=0.25)", "moved its state"),
    ],
)
def test_crop_across_dropped_rows_is_an_error(method, why):
    model = model_of("llama")
    with CompressedCache(method, model) as cache:
        generate(model, prompt(), cache, new=4)
        with pytest.raises(KvsimError, match=why):
            cache.crop(-6)
        with pytest.raises(KvsimError, match="negative"):
            cache.crop(3)


def test_crop_of_everything_and_more():
    model, ids = model_of("llama"), prompt()
    with CompressedCache("int(bits=8)", model) as cache:
        first = logits(model, ids, cache)
        with pytest.raises(KvsimError, match="more than the 40"):
            cache.crop(-41)
        cache.crop(-40)
        assert cache.nbytes() == cache.get_seq_length() == 0
        assert torch.equal(logits(model, ids, cache), first)
