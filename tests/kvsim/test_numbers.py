"""Specs from bare numbers: hand-counted bytes, every engine-log geometry, and errors that name the nearest word."""

import json
from pathlib import Path

import pytest

from kvsim import ModelSpec
from kvsim.errors import KvsimError

CASES = json.loads((Path(__file__).parents[1] / "data" / "engine_logs.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_every_logged_architecture_builds(case):
    spec = ModelSpec.from_numbers(**case["arch"])
    assert spec.n_layers == case["arch"]["layers"]
    assert spec.cache_bytes(1000) > 0


def test_llama_bytes():
    spec = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128)
    assert spec.cache_bytes(1) == 2 * 32 * 8 * 128 * 2 == 131072


def test_llama_8b_matrices():
    spec = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_size=4096,
                                  intermediate_size=14336, vocab_size=128256)
    # a layer: q,o 2*4096*4096 + k,v 2*1024*4096 + 3*4096*14336 = 218103808; embeddings and head 2*128256*4096
    assert spec.parameters == 32 * 218_103_808 + 2 * 128_256 * 4096
    known = ModelSpec.from_numbers(layers=32, n_heads=32, n_kv_heads=8, head_dim=128, parameters=8_030_261_248)
    assert known.parameters == 8_030_261_248


def test_experts_active_share():
    spec = ModelSpec.from_numbers(layers=1, n_heads=4, n_kv_heads=4, head_dim=16, hidden_size=64, n_experts=8, top_k=2,
                                  expert_intermediate_size=128)
    attention, expert, router = 4 * 64 * 64, 3 * 64 * 128, 8 * 64
    assert spec.parameters == attention + 8 * expert + router
    assert spec.active_parameters == attention + 2 * expert + router


def test_counts_close_each_period():
    spec = ModelSpec.from_numbers(layers=8, kv_heads=4, head_dim=256, full_attn_layers=2, linear_layers=6,
                                  ssm_d_inner=4096, ssm_d_state=128, ssm_n_group=16, ssm_d_conv=4)
    assert [i for i, layer in enumerate(spec.layers) if layer.attention] == [3, 7]
    # conv channels 4096 + 2*16*128 = 8192
    assert spec.layers[0].states[0].shape == (8192, 4)
    assert spec.layers[0].states[1].shape == (32, 128, 128)


def test_per_layer_heads():
    spec = ModelSpec.from_numbers(layers=3, n_heads=32, n_kv_heads=[8, 0, 1], head_dim=64)
    assert spec.cache_bytes(1) == (8 + 1) * 2 * 64 * 2
    assert spec.layers[1].attention is None


def test_mla_keeps_the_latent():
    spec = ModelSpec.from_numbers(layers=61, n_heads=128, mla_kv_lora_rank=512, mla_rope_dim=64, head_dim_k=192,
                                  head_dim_v=128)
    assert spec.cache_bytes(1) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"layers": 2, "n_kv_head": 2, "head_dim": 4}, "did you mean 'n_kv_heads'"),
        ({"layers": 2, "n_heads": 2}, "n_kv_heads and head_dim"),
        ({"layers": 2, "heads": 2, "n_heads": 2, "head_dim": 4}, "same number"),
        ({"layers": 0, "n_heads": 2, "head_dim": 4}, "layers"),
        ({"layers": "4", "n_heads": 2, "head_dim": 4}, "layers"),
        ({"layers": 4, "kv_heads": 2, "head_dim": 4, "full_attn_layers": 2}, "the other 2"),
        ({"layers": 4, "kv_heads": 2, "head_dim": 4, "full_attn_layers": 2, "swa_layers": 3, "window": 8}, "add up"),
        ({"layers": 4, "kv_heads": 2, "head_dim": 4, "swa_layers": 4}, "window"),
        ({"layers": 4, "n_heads": 8, "n_kv_heads": [1, 2], "head_dim": 4}, "one a layer"),
        ({"layers": 1, "n_heads": 8, "head_dim": 4, "layer_types": ["slidin"]}, "did you mean 'sliding'"),
        ({"layers": 1, "kv_heads": 3, "n_embd_gqa": 1024}, "n_embd_gqa"),
        ({"layers": 1, "n_heads": 8, "head_dim": 4, "linear_layers": 1}, "ssm_d_state"),
    ],
)
def test_wrong_numbers_say_what_to_do(numbers, words):
    with pytest.raises(KvsimError, match=words):
        ModelSpec.from_numbers(**numbers)
