"""Edges: no prompt, one token, prompts shorter than everything, the model's limit, values too large or none at all."""

import pytest
import torch
from families import logits, model_of, own_cache, prompt
from rows import Shape, Stream, layer_of

from kvsim.errors import KvsimError
from runtime import CompressedCache
from runtime.attention import Rule

DROPPING = ["window(sinks=2,recent=14)", "h2o(budget=0.25)", "snapkv(budget=0.25,window=8)", "int(bits=2,group=16)"]
HOLD = ("nvfp4", "float8", "q8_0")
"""3e6 is within what their codes and scales reach together: 448 or 127 times fp16, 6 * 448 times fp32."""


@pytest.mark.parametrize(
    "method",
    [
        *DROPPING,
        "full",
        "kivi-2(group=8,residual=16)",
        "svd(rank=8)",
        "pyramidkv(budget=0.1,window=4)",
        "adakv(budget=0.1,window=4)",
        "pages(size=8,top=0.25)",
        "lsh_merge(planes=3)",
        "h2o(budget=2)",
        "hierarchy(recent=4,block=2,summaries=2)",
    ],
)
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_short_prompts_first_and_tenth_token(method, tokens):
    """Shorter than window, budget, group or rank: kept whole, so that the first tokens are the model's own."""
    model, ids = model_of("llama"), prompt(2, tokens)
    with CompressedCache(method, model) as cache, torch.no_grad():
        given = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, cache=cache, **given)
        assert cache.get_seq_length() == tokens + 9
    assert torch.equal(out[:, : tokens + 1], own_cache(model, ids)[:, : tokens + 1])
    if method in ("full", "kivi-2(group=8,residual=16)", "window(sinks=2,recent=14)", "snapkv(budget=0.25,window=8)"):
        assert torch.equal(
            out[:, : tokens + 5], own_cache(model, ids)[:, : tokens + 5]
        )  # at most 10 rows: nothing to do yet


def test_no_prompt_at_all():
    shape = Shape()
    for method in (
        "full",
        "int(bits=4)",
        "kivi-2(group=8,residual=16)",
        "svd(rank=8)",
        "h2o(budget=4)",
        "snapkv(window=4)",
    ):
        layer = layer_of(method, shape)
        stream = Stream(layer, shape)
        stream.feed(0)
        assert layer.get_seq_length() == 0
        for _ in range(10):
            assert torch.isfinite(stream.feed(1)).all()


def test_the_models_limit():
    model = model_of("llama")
    with CompressedCache("int(bits=8,group=16)", model) as cache:
        logits(model, prompt(1, 2047), cache)
        assert torch.isfinite(logits(model, prompt(1, 1), cache)).all()
        assert cache.get_seq_length() == model.config.max_position_embeddings


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["full", "int(bits=4)", "float8", "h2o(budget=4)", "svd(rank=8)", "kmeans(bits=4)"])
@pytest.mark.parametrize("when", [0, 3])
def test_what_is_not_a_number_is_an_error_that_says_where(method, value, when):
    shape = Shape()
    layer = layer_of(method, shape)
    stream = Stream(layer, shape)
    for size in [12] * min(when, 1) + [1] * max(0, when - 1):
        stream.feed(size)
    draw = stream._draw

    def spoiled(heads, count):
        x = draw(heads, count)
        x[0, 0, -1, 3] = value
        return x

    stream._draw = spoiled
    with pytest.raises(KvsimError, match="layer 3"):
        stream.feed(2)


def test_large_values_overflow_no_scale():
    """fp16 scales end at 65504: an error or a wider scale, never infinity."""
    shape = Shape()
    for method in (
        "int(bits=4)",
        "int(bits=4,scale_dtype=fp32)",
        "float8",
        "nvfp4",
        "log(bits=4)",
        "rotated(bits=4)",
        "q8_0",
    ):
        layer = layer_of(method, shape)
        x = torch.full((1, 2, 4, 32), 3.0e6) * torch.linspace(-1, 1, 32)
        layer.update(x, x, kwargs={"position_ids": torch.arange(4)[None]})
        ask = (torch.ones((1, 4, 4, 32)), None, Rule(1e-6))
        if "fp32" in method or method in HOLD:
            layer.attend(*ask)
            assert float((layer.pieces[0].store.keys.read() - x).abs().max()) < 0.15 * 3.0e6
        else:
            with pytest.raises(KvsimError, match=r"reach|range"):
                layer.attend(*ask)
