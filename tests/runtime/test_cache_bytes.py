"""Bytes on models: every preset and a covering set of compositions, through prompts, chunks, steps and turns."""

from functools import cache as cached

import pytest
import torch
import transformers as hf
from families import differences, logits, record

from kvsim import parse_method
from kvsim.errors import KvsimError
from kvsim.grammar import presets
from runtime import CompressedCache
from runtime.calibration import calibrate

BASE = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
MODELS = {
    "gqa-64": (hf.LlamaConfig, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}),
    "mha-80": (hf.Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80}),
    "mqa-96": (hf.LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 96}),
    "gemma3": (hf.Gemma3TextConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
                                     "sliding_window": 100, "layer_types": SLIDING}),
}  # fmt: skip
COVERING = [
    "k:int(bits=4,axis=channel,group=32) v:int(bits=2,group=32)",
    "h2o(budget=0.25) | k:int(bits=8) v:int(bits=4)",
    "snapkv(budget=0.3) | svd(rank=24) | int(bits=4)",
    "pyramid(budget=0.3) | kivi-4",
    "adakv(budget=0.3) | kivi-4",
    "adakv(budget=0.3) | int(bits=4,residual=32,rope=pre)",
    "window(sinks=4,recent=124) | kivi-2",
    "window(sinks=4,recent=60) | svd(rank=32,rope=pre) | int(bits=8)",
    "tova(budget=0.3) | nvfp4(scale=row)",
    "quest | turboquant-4",
    "quest | int(bits=4,residual=64,flush=all)",
    "hierarchy(recent=32,block=4,summaries=4) | int(bits=8)",
    "lsh_merge(planes=4,when=running) | q8_0",
    "online_svd(rank=32) | int(bits=8,residual=64,flush=all)+lowrank(2)",
    "tucker(ranks=(24,0,24)) | int(bits=8)",
    "int(bits=4) @ on_write",
    "full; layers=1-: kivi-2",
    "int(bits=8); layers=-1-: h2o(budget=0.25) | int(bits=2)",
    "snapkv(budget=0.25); layers=0: full",
]


@cached
def model_of(name):
    torch.manual_seed(0)
    kind, changes = MODELS[name]
    return hf.AutoModelForCausalLM.from_config(kind(**(BASE | changes))).eval()


@cached
def calibration(name, method):
    """What the method's calibrated parts learn from random ids; None where it has none."""
    ids = torch.randint(97, (4, 100), generator=torch.Generator().manual_seed(0))
    try:
        return calibrate(model_of(name), list(ids), method, length=100).tensors
    except KvsimError as error:
        if "no part that calibration would change" in str(error):
            return None
        raise


def check(name, method, batch, prompt, steps):
    """Bytes after the prompt and after each of the steps, whatever their sizes."""
    model, total = model_of(name), sum(prompt)
    try:
        made = CompressedCache(method, model, prompt_tokens=total, calibration=calibration(name, method))
    except KvsimError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(1)
    with made as cache:
        done = 0
        for count, size in enumerate((*prompt, *steps), 1):
            logits(model, torch.randint(97, (batch, size), generator=generator), cache)
            done += size
            if count >= len(prompt):
                rows = cache.rows() if any(layer.twins.ragged for layer in cache.layers) else None
                assert not differences(cache, record(model, method, batch, total, done - total, rows=rows)), done


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["full", *presets(), *COVERING])
def test_presets_and_compositions(method, name):
    check(name, method, 1, [129], [1, 1, 30])


@pytest.mark.parametrize("method", COVERING)
def test_three_sequences_in_chunks(method):
    check("gqa-64", method, 3, [64, 100, 1], [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("gqa-64", 1), ("gqa-64", 1001), (list(MODELS)[-1], 33)])
@pytest.mark.parametrize("method", ["full", *presets(), *COVERING])
def test_awkward_lengths_and_forty_steps(method, name, tokens):
    check(name, method, 3, [tokens], [1] * 38 + [2])


@pytest.mark.parametrize("method", ["full", "kivi-2", "h2o(budget=0.25) | int(bits=4)"])
def test_rows_tell_the_prediction_everything(method):
    """What a running cache reports gives the same bytes as the counts alone."""
    model = model_of("gqa-64")
    with CompressedCache(method, model) as cache:
        logits(model, torch.zeros((2, 150), dtype=torch.int64), cache)
        logits(model, torch.zeros((2, 7), dtype=torch.int64), cache)
        assert not differences(cache, record(model, method, 2, 150, 7, rows=cache.rows()))


def test_every_preset_is_written_as_a_method():
    assert all(parse_method(name) for name in presets())
