"""Configs that are wrong: each is refused in one line that names the field or the file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvsim.configs import load_model
from kvsim.errors import KvsimError

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}


def refusal(source: Any) -> str:
    with pytest.raises(KvsimError) as caught:
        load_model(source)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("value", [-1, 0, 2.0, 64.5, "64", True, [64], {}, float("nan"), float("inf"), 10**12])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                                   "vocab_size"])
def test_sizes_must_be_whole_numbers_in_range(field: str, value: object) -> None:
    assert field in refusal(GOOD | {field: value})


def test_a_billion_layers_are_refused_at_once() -> None:
    start = time.perf_counter()
    assert "num_hidden_layers must lie between 1 and" in refusal(GOOD | {"num_hidden_layers": 10**9})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("changes", "part"), [
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size = 64 is no multiple"),
    ({"model_type": "lama"}, "architecture 'lama' is not known"),
    ({"model_type": None}, "model_type is missing"),
    ({"model_type": 7}, "model_type must be a word"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"torch_dtype": "float7"}, "torch_dtype = 'float7' is not one of"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    ({"layer_types": ["full_attention", "ring_attention"]}, "layer_types[1] = 'ring_attention'"),
    ({"layer_types": "full_attention"}, "layer_types must be a list"),
    ({"sliding_window": 16}, "sliding_window = 16 is not accounted for"),
    ({"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1 is not accounted for"),
    ({"kv_lora_rank": 512}, "kv_lora_rank = 512 is not accounted for"),
    ({"num_experts": 8}, "num_experts = 8 is not accounted for"),
    ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
    ({"cross_attention_layers": [1]}, "cross_attention_layers"),
    ({"n_embd": 32}, "n_embd = 32 is not accounted for"),
])
def test_what_cannot_be_accounted_for_is_named(changes: dict[str, Any], part: str) -> None:
    assert part in refusal(GOOD | changes)


@pytest.mark.parametrize("extra", [
    {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"attention_dropout": 0.1}, {"unsloth_fixed": True},
                                   {"bos_token_id": 1},
    {"sliding_window": None}, {"num_kv_shared_layers": 0}, {"id2label": {"0": "a"}}, {"_name_or_path": "x"},
    {"transformers_version": "5.0.0"}, {"initializer_range": 0.02}, {"layer_types": ["full_attention"] * 2},
])
def test_what_cannot_matter_is_let_through(extra: dict[str, Any]) -> None:
    assert load_model(GOOD | extra).groups == load_model(GOOD).groups


def test_two_spellings_that_disagree() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}
    assert load_model(gpt2 | {"hidden_size": 64}).hidden_size == 64
    assert "n_embd 64 and hidden_size 128 are one field" in refusal(gpt2 | {"hidden_size": 128})


@pytest.mark.parametrize(("text", "part"), [
    ("", "is empty"),
    ("   \n", "is empty"),
    ("[1, 2]", "must hold a JSON object, not list"),
    ('"llama"', "must hold a JSON object, not str"),
    ("{}", "is an empty object"),
    ('{"model_type": "llama", "hidden_size"', "is not JSON"),
    ('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}', "'hidden_size' stands there twice"),
    ('{"a": ' + "[" * 70 + "]" * 70 + "}", "is nested deeper than"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is nested deeper than"),
    ('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}", "a number too long"),
])
def test_files_that_are_no_config(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    message = refusal(file)
    assert part in message
    assert str(file) in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00junk")
    assert "is not UTF-8" in refusal(file)
    with file.open("wb") as out:
        out.truncate(9 * 2**20)
    assert "has 9437184 bytes; a config.json has at most 8388608" in refusal(file)
    assert "does not exist" in refusal(tmp_path / "nothing.json")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "params.json").write_text(json.dumps({"dim": 1}))
    assert "params.json is Mistral's own format" in refusal(tmp_path / "empty")
    assert "is not a regular file" in refusal("/dev/null")


@pytest.mark.parametrize("source", [None, 7, [GOOD], b"llama-7b", "", " ", "a\0b", "x" * 5000])
def test_sources_of_the_wrong_kind(source: object) -> None:
    refusal(source)


def test_dicts_that_json_cannot_hold() -> None:
    assert "holds a set" in refusal(GOOD | {"extra": {1, 2}})
    assert "keys are words" in refusal(GOOD | {"extra": {1: 2}})
    loop: dict[str, Any] = dict(GOOD)
    loop["extra"] = loop
    assert "is nested deeper than" in refusal(loop)


def test_nested_errors_name_the_whole_path() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": -4}
    message = refusal({"model_type": "mistral3", "text_config": text})
    assert "text_config.num_attention_heads must lie between" in message
    assert "text_config is missing" in refusal({"model_type": "mistral3"})
    assert "text_config must be an object" in refusal({"model_type": "mistral3", "text_config": [1]})
    assert "is not a known language model" in refusal({"model_type": "mistral3", "text_config": {"model_type": "ring"}})
    assert "is not a known language model" in refusal({"model_type": "mistral3",
                                                       "text_config": {"model_type": "mistral3"}})


def test_damage_that_once_escaped() -> None:
    zamba = {"model_type": "zamba2", "hidden_size": 3, "mamba_headdim": 64, "num_attention_heads": 1, "vocab_size": 97,
             "num_hidden_layers": 1, "layers_block_type": ["hybrid"]}
    assert "n_mamba_heads" in refusal(zamba)
    step = {"model_type": "step3p5", "num_hidden_layers": 4, "mlp_layer_types": ["dense"], "num_experts_per_tok": 1}
    assert "mlp_layer_types has 1 entries for 4 layers" in refusal(step)
