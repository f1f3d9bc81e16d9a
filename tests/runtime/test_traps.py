"""The traps that others fell into, each with the wrong version shown wrong beside ours."""

import types

import pytest
import torch
from families import logits, model_of, prompt
from rows import Shape, Stream, layer_of
from smollm2 import subject, topics
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Fp8QuantizedLayer
from transformers.masking_utils import sdpa_mask

from kvsim import parse_method
from kvsim.parts import Place
from runtime import CompressedCache
from runtime.attention import Rule
from runtime.parts import Setting, twins
from runtime.rope import Rotation

DROPPING = ["window(sinks=2,recent=14)", "h2o(budget=0.25)", "snapkv(budget=0.25,window=8)", "int(bits=2,group=16)"]


def divergence(a, b):
    p, q = (torch.log_softmax(x.double(), -1) for x in (a, b))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("method", DROPPING)
def test_1_the_prompt_attends_all_of_itself_and_is_compressed_after(method):
    model, ids = model_of("llama"), prompt(1, 60)
    plain = DynamicCache()
    with CompressedCache(method, model) as cache:
        torch.testing.assert_close(logits(model, ids, cache), logits(model, ids, plain), atol=1e-5, rtol=1e-5)
        step = logits(model, ids[:, :1], cache) - logits(model, ids[:, :1], plain)
        assert float(step.abs().max()) > 0.02  # from then on it sees what was kept


def windowed_away(model, ids, reports_rows):
    """Logits after a window of 4 + rest of half the prompt was kept; wrong: it says that only as many tokens came."""
    half = ids.shape[1] // 2
    with CompressedCache(f"window(sinks=4,recent={half - 4})", model) as cache:
        logits(model, ids[:, :-32], cache)
        if reports_rows:
            for layer in cache.layers:
                layer.get_seq_length = types.MethodType(lambda self: self.pieces[0].store.keys.rows, layer)
        return torch.cat([logits(model, ids[:, i : i + 1], cache)[0] for i in range(ids.shape[1] - 32, ids.shape[1])])


@pytest.mark.slow
def test_2_positions_count_the_tokens_seen():
    """Rows stored in place of tokens seen: new tokens stand where old ones stood (KL 2.79 where 0.018 is right)."""
    model, _ = subject()
    ids = topics(544)
    full = logits(model, ids)[0, -32:]
    right = divergence(full, windowed_away(model, ids, reports_rows=False))
    wrong = divergence(full, windowed_away(model, ids, reports_rows=True))
    assert right < 0.05
    assert wrong > 1.0


def test_2_positions_on_a_small_model():
    model, ids = model_of("llama"), prompt(1, 60)
    with CompressedCache("window(sinks=4,recent=12)", model) as cache:
        logits(model, ids, cache)
        assert (cache.get_seq_length(), cache.layers[0].pieces[0].store.keys.rows) == (60, 16)
        given = logits(model, ids[:, :1], cache, position_ids=torch.tensor([[60]]))
    with CompressedCache("window(sinks=4,recent=12)", model) as cache:
        logits(model, ids, cache)
        assert torch.equal(logits(model, ids[:, :1], cache), given)


def eager_without_causality(module, query, key, value, mask, scaling=None, **_):
    """An attention function as people write it: it trusts the mask."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    weights = torch.softmax(scores if mask is None else scores.masked_fill(~mask, float("-inf")), -1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def naive(model, ids):
    """Logits with such a function registered beside `sdpa_mask`."""
    AttentionInterface.register("naive", eager_without_causality)
    AttentionMaskInterface.register("naive", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive")
    try:
        return logits(model, ids)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("method", ["full", "int(bits=4,group=16) @ on_write", "h2o(budget=0.25)"])
def test_3_causality_survives(method):
    model, ids = model_of("llama"), prompt(1, 40)
    other = ids.clone()
    other[0, -1] = 5
    assert float((naive(model, ids) - naive(model, other))[0, :-1].abs().max()) > 0.01  # the wrong one sees the future
    with CompressedCache(method, model) as cache:
        first = logits(model, ids, cache)
        cache.reset()
        second = logits(model, other, cache)
    torch.testing.assert_close(first[0, :-1], second[0, :-1], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_3_perplexity_says_so():
    """Perplexity without causality is far off (158 where 30 is right on another text)."""
    model, _ = subject()
    ids = topics(512)

    def perplexity(found):
        return float(torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:]).exp())

    with CompressedCache("int(bits=4)", model) as cache:
        right = perplexity(logits(model, ids, cache))
    assert right == pytest.approx(perplexity(logits(model, ids)), rel=1e-4)
    assert perplexity(naive(model, ids)) > 1.8 * right


@pytest.mark.parametrize("method", ["int(bits=2,axis=channel,group=8,rope={})", "svd(rank=4,rope={})"])
def test_4_keys_compress_better_before_the_rotation(method):
    """Keys with channels that are large all along, as real ones have: the rotation smears them over pairs."""
    shape, generator = Shape(2, 1, 32), torch.Generator().manual_seed(0)
    at, hot = torch.arange(256)[None], torch.zeros(32)
    hot[[1, 5, 20]] = torch.tensor([9.0, -6.0, 7.0])
    plain = hot + 0.3 * torch.randn((1, 1, 256, 32), generator=generator)
    turn = Rotation(*_tiny_attention())
    keys, queries = turn.rotate(plain, at), torch.randn((1, 2, 256, 32), generator=generator)
    errors = {}
    for rope in ("pre", "post"):
        layer = layer_of(f"k:{method.format(rope)} v:full", shape)
        layer.update(keys, keys, kwargs={"position_ids": at})
        layer.attend(queries, None, Rule(32**-0.5))
        errors[rope] = float((layer.pieces[0].store.read()[0] - keys).square().mean())
    assert errors["pre"] < errors["post"] / 3


def test_a_rotation_averaged_is_the_mean_of_rotations():
    turn, at = Rotation(*_tiny_attention()), torch.tensor([[3, 40, 41, 1000], [0, 1, 2, 3]])
    unit = torch.eye(32)[None, :, None].expand(2, 32, 4, 32)
    torch.testing.assert_close(turn.averaged(32, at), turn.rotate(unit, at).mean(2)[:, None], rtol=1e-5, atol=1e-6)


def _tiny_attention():
    from rows import tiny

    model = tiny(Shape(2, 1, 32))
    return model, model.model.layers[0].self_attn


def test_5_ragged_layers_and_heads_have_masks_of_their_own():
    """Layers of different lengths break the one mask that a model builds; ours need none."""
    model, ids, turn = model_of("llama"), prompt(1, 60), prompt(1, 5, seed=2)
    own = DynamicCache()
    logits(model, ids, own)
    own.layers[1].keys, own.layers[1].values = own.layers[1].keys[:, :, 20:], own.layers[1].values[:, :, 20:]
    with pytest.raises(RuntimeError, match=r"size|shape|expand"):
        logits(model, turn, own)
    for method in (
        "pyramidkv(budget=0.5,window=8)",
        "adakv(budget=0.5,window=8)",
        "window(sinks=2,recent=20);layers=1-2:full",
    ):
        with CompressedCache(method, model) as cache:
            logits(model, ids, cache)
            rows = cache.rows()
            assert len({n for layer in rows for n in layer}) > 1
            assert torch.isfinite(logits(model, turn, cache)).all()


def test_6_what_is_compressed_is_small():
    """Codes that are decoded again and kept so save nothing; here the storages themselves shrink."""
    model, ids = model_of("llama-mha-80"), prompt(1, 512)
    sizes = {}
    for method in ("full", "int(bits=4)", "int(bits=2,group=16)"):
        with CompressedCache(method, model) as cache:
            logits(model, ids, cache)
            sizes[method] = cache.allocated_nbytes()
            held = {
                x.dtype
                for layer in cache.layers
                for p in layer.pieces
                for _, page in p.store.pages()
                for x in page.chunks
            }
            assert method == "full" or torch.float32 not in held
    # fp32 rows of 80 values against 40 bytes of codes and 2 scales and minima: 320 / 48; 320 / (20 + 4 * 5)
    assert sizes["full"] / sizes["int(bits=4)"] == pytest.approx(320 / 48)
    assert sizes["full"] / sizes["int(bits=2,group=16)"] == pytest.approx(320 / 40)


def test_7_no_scale_is_frozen_at_the_first_update():
    """One scale for the tensor, fixed by the first token, clips what comes later: 50.0 comes back as 2.41."""
    first = torch.linspace(-2.41, 2.41, 64).reshape(1, 1, 1, 64)
    later = torch.full((1, 1, 1, 64), 50.0)
    layer = Fp8QuantizedLayer()
    layer.update(first, first)
    keys, _ = layer.update(later, later)
    clipped = (
        float(layer._dequantize(layer._quantized_keys)[0, 0, 1, 0])
        if hasattr(layer, "_quantized_keys")
        else float(keys[0, 0, 1, 0])
    )
    assert clipped == pytest.approx(2.41, abs=0.01)
    shape = Shape(1, 1, 64)
    for method in ("float8", "float8(scale=none)", "int(bits=8)", "nvfp4(scale=row)", "q8_0"):
        ours = layer_of(method, shape)
        for x in (first, later):
            ours.update(x, x, kwargs={"position_ids": torch.tensor([[ours.get_seq_length()]])})
            ours.attend(x, None, Rule(0.1))
        assert float(ours.pieces[0].store.keys.read()[0, 0, 1, 0]) == pytest.approx(50.0, rel=0.07)


def test_8_each_row_is_quantized_once():
    """Re-quantizing all rows with every flush drifts; the packed bytes of a row here never change again."""
    shape, text = Shape(), "int(bits=2,axis=channel,group=8,residual=16)"
    layer = layer_of(text, shape)
    stream = Stream(layer, shape)
    stream.feed(40)
    side = layer.pieces[0].store.keys
    codes, scales = side.encoded["codes"].read(0, 24).clone(), side.encoded["scale"].read(0, 3).clone()
    for _ in range(40):
        stream.feed(1)
    assert side.encoded_rows == 64
    assert torch.equal(side.encoded["codes"].read(0, 24), codes)
    assert torch.equal(side.encoded["scale"].read(0, 3), scales)

    part = parse_method("k:int(bits=2,axis=channel,group=8) v:full").k.format
    twin = twins()["int"](part, Setting(Place("k", 2, 32, 4, 32), torch.float32))
    x = torch.randn((1, 2, 32, 32), generator=torch.Generator().manual_seed(0))

    def again(rows):
        return twin.decode(twin.encode(rows, {}), {}, torch.zeros(rows.shape[2], dtype=torch.int64))

    once = again(x)
    drifting = x
    for shift in range(8):  # groups that form anew as rows come, over what was decoded before
        drifting = torch.roll(again(torch.roll(drifting, shift, 2)), -shift, 2)
    assert float((drifting - x).square().mean()) > 1.5 * float((once - x).square().mean())


def test_9_the_two_protocols_are_two():
    model, ids = model_of("llama"), prompt(1, 60)
    full = logits(model, ids)
    found = {}
    for protocol in ("after_prefill", "on_write"):
        with CompressedCache(f"int(bits=2,group=16) @ {protocol}", model) as cache:
            found[protocol] = logits(model, ids, cache)
    torch.testing.assert_close(found["after_prefill"], full, atol=1e-5, rtol=1e-5)
    assert float((found["on_write"] - full).abs().max()) > 0.1


@pytest.mark.slow
def test_9_they_differ_in_quality():
    """The same bits cost more where the prompt itself attends what they left of it."""
    model, _ = subject()
    ids = topics(544)
    full, found = logits(model, ids)[0, 512:], {}
    with CompressedCache("int(bits=3) @ on_write", model) as cache:
        found["on_write"] = divergence(full, logits(model, ids, cache)[0, 512:])
    with CompressedCache("int(bits=3)", model) as cache:
        logits(model, ids[:, :512], cache)
        after = torch.cat([logits(model, ids[:, i : i + 1], cache)[0] for i in range(512, 544)])
    assert divergence(full, after) < 0.8 * found["on_write"]


@pytest.mark.parametrize("family", ["llama", "llama-mqa-96"])
def test_10_one_row_for_each_stored_head(family):
    """Compressing what `repeat_kv` made would hold each row once for every query head."""
    model, ids = model_of(family), prompt(1, 64)
    with CompressedCache("int(bits=4,group=16)", model) as cache:
        logits(model, ids, cache)
        for b in cache.buffers():
            assert b.shape[1] == model.config.num_key_value_heads
        repeated = cache.nbytes() * model.config.num_attention_heads // model.config.num_key_value_heads
        assert repeated in (2 * cache.nbytes(), 4 * cache.nbytes())
