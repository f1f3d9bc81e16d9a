"""Real configs against an independent implementation, hand-computed caches, and the ways to name a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.configs import load_model
from kvsim.model import ModelSpec

DATA = Path(__file__).parents[1] / "data" / "configs"
TRUTH = json.loads((DATA / "truth.json").read_text(encoding="utf-8"))["models"]
BY_NAME = {row["name"]: row for row in TRUTH}
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048, "torch_dtype": "float16",
}


@pytest.mark.parametrize("row", TRUTH, ids=lambda row: row["name"])
def test_real_config_is_exact(row: dict[str, Any]) -> None:
    model = load_model(row["config"])
    found = {tokens: model.cache_bytes(int(tokens)) for tokens in row["kv_bytes"]}
    assert found == row["kv_bytes"]
    assert model.state_bytes() == row["state_bytes"]
    for name, value in (("parameters", row["params"]), ("active_parameters", row["active_params"]),
                        ("tied", row["tied"])):
        if value is not None:
            assert getattr(model, name) == value, name


def test_llama_7b_by_hand() -> None:
    model = load_model(LLAMA_7B)
    # 32 layers x (K + V) x 32 heads x 128 x 8192 tokens x 2 bytes = 4 GiB
    assert model.cache_bytes(8192) == 32 * 2 * 32 * 128 * 8192 * 2 == 4 * 2**30
    assert model.cache_bytes(8192, bits=32) == 8 * 2**30
    # a layer: 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 = 202383360; two tables of 32000 x 4096, one norm
    assert model.parameters == 32 * 202383360 + 2 * 32000 * 4096 + 4096 == 6738415616
    assert not model.tied


def test_windows_by_hand() -> None:
    gemma = load_model({"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
                        "vocab_size": 262144,
                        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                        "sliding_window": 512})
    # layers 6, 12, 18 are full: 3 x 4096 + 15 x 512 rows of 2 x 256 values of 2 bytes
    assert gemma.cache_bytes(4096) == (3 * 4096 + 15 * 512) * 2 * 256 * 2
    assert gemma.kinds() == {"sliding": 15, "full": 3}


def test_latent_attention_by_hand() -> None:
    row = BY_NAME["deepseek-ai/DeepSeek-R1"]
    # 61 layers x (512 latent + 64 RoPE) x 2 bytes a token
    assert load_model(row["config"]).cache_bytes(1) == 61 * 576 * 2 == 70272


def test_switched_off_window_is_no_window() -> None:
    base = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 97,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "max_window_layers": 2}
    assert load_model(base | {"use_sliding_window": False}).kinds() == {"full": 4}
    assert load_model(base | {"use_sliding_window": True}).kinds() == {"full": 2, "sliding": 2}


def test_old_names_of_phi_are_read_as_its_own_code_did() -> None:
    # phi-2 with GPT-2's names: 32 layers of 2560, 2.78 billion parameters, not phi-1.5's 1.42
    model = load_model({"model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_layer": 32, "n_positions": 2048,
                        "vocab_size": 51200, "n_inner": None, "n_head_kv": None, "tie_word_embeddings": False})
    assert model.parameters == 2779683840


def test_missing_fields_are_filled_as_the_class_does_and_said() -> None:
    model = load_model({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
                        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8})
    assert model.kinds() == {"sliding": 32}
    assert any("sliding_window is missing: 4096" in text for text in model.warnings)


def test_every_way_to_name_a_model(tmp_path: Path) -> None:
    file = tmp_path / "my-llama" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(LLAMA_7B))
    whole = load_model(LLAMA_7B)
    for source in (file, str(file), file.parent, str(file.parent)):
        model = load_model(source)
        assert (model.groups, model.name, model.source) == (whole.groups, "my-llama", str(file))
    assert load_model(whole) is whole
    assert load_model("LLaMA 7B").groups == whole.groups
    assert isinstance(load_model("meta-llama/Llama-3.1-8B-Instruct"), ModelSpec)


def test_quantized_weights_do_not_change_the_count() -> None:
    plain = load_model(LLAMA_7B)
    packed = load_model(LLAMA_7B | {"quantization_config": {"quant_method": "fp8"}})
    assert packed.parameters == plain.parameters
    assert any("quantization_config" in text for text in packed.warnings)


def test_reading_leaves_the_dict_alone() -> None:
    for row in TRUTH:
        before = json.dumps(row["config"], sort_keys=True)
        load_model(row["config"])
        assert json.dumps(row["config"], sort_keys=True) == before


def test_matrices_are_what_a_token_multiplies() -> None:
    layer = load_model(BY_NAME["mistralai/Mixtral-8x22B-v0.1"]["config"]).layers[0]
    routed = [m for m in layer.matrices if m.routed]
    assert [(m.copies, m.active, m.out_features, m.in_features) for m in routed] == [
        (8, 2, 16384, 6144), (8, 2, 16384, 6144), (8, 2, 6144, 16384)]
    assert sum(m.parameters for m in layer.matrices) + layer.other_parameters == layer.parameters
