"""Small random models of many families, and how a cache's bytes compare with the prediction for them."""

import json
from collections import Counter
from functools import cache

import torch
import transformers as hf

import kvsim

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-mha-80": ("Llama", {"head_dim": 80, "num_key_value_heads": 4}),
    "llama-mqa-96": ("Llama", {"head_dim": 96, "num_key_value_heads": 1}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 16, "layer_types": ALTERNATING}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048}),
    "gpt_neox": ("GPTNeoX", {}),
    "gptj": ("GPTJ", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048, "rotary_dim": 8}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 16}),
    "granite": ("Granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ALTERNATING,
        },
    ),
    "cohere2": ("Cohere2", {"sliding_window": 16}),
    "smollm3": ("SmolLM3", {}),
    "exaone4": ("Exaone4", {"sliding_window": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
}
GPT = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"}


@cache
def model_of(family):
    """A random model of a family, shared by tests; weights large enough that its attention is not flat."""
    torch.manual_seed(0)
    name, changes = FAMILIES[family]
    kept = {k: v for k, v in BASE.items() if k in GPT} if name in ("GPT2", "GPTJ") else dict(BASE)
    for absent in {"GPTNeoX": ["num_key_value_heads"], "OPT": ["num_key_value_heads", "intermediate_size"]}.get(
        name, []
    ):
        del kept[absent]
    config = getattr(hf, f"{name}Config")(**(kept | changes))
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.15)
    return model


def prompt(batch=2, tokens=40, seed=0):
    """Random token ids [B, n], none of them special."""
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, cache, new=20, **more):
    """Greedy generation of exactly `new` tokens."""
    given = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | more
    with torch.no_grad():
        return model.generate(ids, cache=cache, **given)


def own_cache(model, ids, **more):
    """Greedy generation with transformers' own cache."""
    return generate(model, ids, hf.DynamicCache(config=model.config), **more)


def logits(model, ids, cache=None, **more):
    """Logits of one forward, without gradients."""
    with torch.no_grad():
        return model(ids, cache=cache, **more).logits


def record(model, method, batch, tokens, new, rows=None, kv_dtype="fp32"):
    """What kvsim predicts for the model's cache."""
    spec = kvsim.load_model(json.loads(model.config.to_json_string(use_diff=False)))
    work = kvsim.Workload(batch, tokens, new)
    case = kvsim.Case(spec, kvsim.load_device("rtx-4090"), kvsim.parse_method(method), work, kv_dtype=kv_dtype)
    return kvsim.predict(case, rows=rows)


def differences(cache, predicted):
    """(layer, buffer) whose bytes differ: {key: (held, predicted)}, with the totals; empty where all agree."""
    mine, theirs = Counter(), Counter()
    for b in cache.buffers():
        mine[b.layer, b.name] += b.bytes
    for b in predicted.buffers:
        theirs[b.layer, b.name] += int(b.bytes)
    mine["live"], theirs["live"] = cache.nbytes(), int(predicted.cache_bytes)
    mine["allocated"], theirs["allocated"] = cache.allocated_nbytes(), int(predicted.allocated_bytes)
    return {k: (mine[k], theirs[k]) for k in mine.keys() | theirs.keys() if mine[k] != theirs[k]}
