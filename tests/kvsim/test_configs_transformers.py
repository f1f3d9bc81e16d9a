"""Families against their transformers classes: small random configs, built and run (slow, needs transformers)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvsim.architectures.fields import class_facts
from kvsim.architectures.registry import families
from kvsim.configs import load_model
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAMILIES = [
    "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "vaultgemma",
            "granite",
    "granite_swa", "hyperclovax", "exaone", "exaone4", "iquestcoder", "olmo", "olmo2", "olmo3", "cohere", "cohere2",
            "starcoder2",
    "stablelm", "phi", "phi3", "persimmon", "arcee", "jais2", "glm", "glm4", "seed_oss", "smollm3", "ernie4_5", "cwm",
            "bitnet",
    "nanochat", "apertus", "mixtral", "phimoe", "minimax_m2", "gpt_oss", "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe",
            "glm4_moe",
    "dots1", "solar_open", "ernie4_5_moe", "granitemoe", "granitemoeshared", "mellum", "gpt2", "gpt_bigcode", "gptj",
            "codegen",
    "gpt_neox", "gpt_neox_japanese", "bloom", "opt", "xglm", "biogpt", "deepseek_v2", "deepseek_v3", "deepseek_v32",
            "glm_moe_dsa",
    "glm4_moe_lite", "youtu", "minicpm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2",
            "mamba",
    "falcon_mamba", "exaone_moe", "afmoe",
]
# What one generator of sizes must be told about a family.
FIXED: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 16}, "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4}, "lfm2": {"full_attn_idxs": [1, 3]},
    "qwen3_5_moe_text": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "exaone_moe": {"num_experts": 4}, "afmoe": {"sliding_window": 3, "global_attn_every_n_layers": 2},
    "vaultgemma": {"sliding_window": 5}, "gemma2": {"sliding_window": 5}, "gemma3_text": {"sliding_window": 5},
}
CHOICES: dict[str, list[Any]] = {
    "head_dim": [16, 24, 32], "vocab_size": [97, 128], "num_experts": [4, 8], "num_local_experts": [4, 8],
    "n_routed_experts": [4, 8], "moe_num_experts": [4, 8], "num_experts_per_tok": [1, 2], "moe_k": [1, 2],
                                 "moe_topk": [1, 2],
    "n_shared_experts": [1, 2], "num_shared_experts": [1, 2], "moe_num_shared_experts": [1, 2], "n_group": [1],
    "topk_group": [1], "kv_lora_rank": [16, 32], "q_lora_rank": [24, 40], "qk_nope_head_dim": [16, 24],
                                 "qk_rope_head_dim": [8],
    "v_head_dim": [16, 24], "index_topk": [4], "index_head_dim": [16, 32], "index_n_heads": [2, 4],
                                 "state_size": [5, 8],
    "first_k_dense_replace": [0, 1], "num_dense_layers": [0, 1], "sliding_window": [3, 7], "max_window_layers": [1, 2],
    "max_position_embeddings": [64, 100], "n_positions": [64, 100], "sliding_window_pattern": [2, 3],
                                 "conv_kernel": [3, 4],
    "conv_L_cache": [3, 4], "rotary_dim": [4], "linear_key_head_dim": [8], "linear_value_head_dim": [8, 16],
}
INNER = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size",
         "shared_intermediate_size")
KEPT = ("use_cache", "is_decoder", "add_cross_attention", "is_encoder_decoder", "scale_embedding",
        "output_router_logits",
        "use_bidirectional_attention", "norm_topk_prob", "use_mambapy")


def small_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """Random small values for every field of the class that shapes a model."""
    heads = rng.choice([4, 8])
    hidden = heads * rng.choice([8, 16, 24])
    config: dict[str, Any] = {}
    for name, default in class_facts()[kind]["fields"].items():
        if name in ("hidden_size", "d_model", "n_embd"):
            config[name] = hidden
        elif name in ("num_hidden_layers", "n_layer", "num_layers"):
            config[name] = rng.choice([4, 6])
        elif name in ("num_attention_heads", "n_head", "attention_heads"):
            config[name] = heads
        elif name == "num_key_value_heads":
            config[name] = rng.choice([1, 2, 4])
        elif name in INNER:
            config[name] = rng.choice([48, 80, 112])
        elif name in CHOICES and (default is not None or name not in ("head_dim", "rotary_dim")):
            config[name] = rng.choice(CHOICES[name])
        elif isinstance(default, bool) and name not in KEPT:
            config[name] = rng.random() < 0.5
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = heads
    return config | FIXED.get(kind, {})


def held(cache: Any) -> tuple[int, int]:
    """Values that a transformers cache holds: (growing rows, states)."""
    rows = states = 0
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys"):
            part = getattr(layer, name, None)
            rows += part.numel() if torch.is_tensor(part) else 0
        for name in ("conv_states", "recurrent_states"):
            parts = getattr(layer, name, None) or {}
            states += sum(x.numel() for x in parts.values() if torch.is_tensor(x))
    return rows, states


def expected(model: ModelSpec, tokens: int) -> tuple[int, int]:
    """The same from the spec; transformers' own windowed layers keep W - 1 rows."""
    rows = 0
    for attention in (x.attention for x in model.layers):
        for store in attention.stores(tokens) if attention else ():
            kept = min(tokens, attention.window - 1) if attention and attention.window else int(store.rows)
            rows += store.heads * store.width * kept
    one = 0
    for layer in model.layers:
        for state in layer.states:
            size = 1
            for dim in state.shape:
                size *= dim
            one += size
    return rows, one


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_agrees_with_its_class(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    rng, agreed = random.Random(0), 0
    for _ in range(4):
        config = small_config(kind, rng)
        try:
            given = config | {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
            built = CONFIG_MAPPING[kind](**json.loads(json.dumps(given)))
            model = transformers.AutoModelForCausalLM.from_config(built)
        except (ValueError, TypeError):
            continue  # the class itself refuses these sizes
        spec = load_model({"model_type": kind, **config})
        out = model.get_output_embeddings()
        assert spec.parameters == sum(p.numel() for p in model.parameters()), config
        assert spec.tied == (out.weight is model.get_input_embeddings().weight), config
        with torch.no_grad():
            result = model(input_ids=torch.ones(1, 9, dtype=torch.long), use_cache=True)
        found = [getattr(result, n, None) for n in ("past_key_values", "cache_params", "cache")]
        cache = next(x for x in found if x is not None)
        assert held(cache) == expected(spec, 9), config
        agreed += 1
    assert agreed >= 2


def test_every_listed_family_is_registered_and_unknown_ones_are_refused() -> None:
    assert set(FAMILIES) <= set(families())
    with pytest.raises(KvsimError, match="is not known"):
        load_model({"model_type": "no_such_family"})
