"""Plain dense decoders of the Llama kind: they differ by biases, norms, windows and gating only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.decoder import Traits, decoder
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import head_sizes
from kvsim.architectures.registry import Builder
from kvsim.model import ModelSpec

_BIASED = Traits(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_ATTN = Traits(qkv_bias="attention_bias", o_bias="attention_bias")
_EVERY_SECOND = windows.pattern(2, fixed=True)


def _heads(f: Fields) -> int:
    """One attention sink a query head."""
    return f.size("num_attention_heads")


def _stablelm_norms(f: Fields) -> int:
    """Per-head norms without bias, where switched on."""
    heads = f.size("num_attention_heads")
    kv = f.size("num_key_value_heads", derive=heads)
    return (heads + kv) * (f.size("hidden_size") // heads) if f.flag("qk_layernorm") else 0


def _stablelm(f: Fields) -> ModelSpec:
    """StableLM: one norm a layer where attention and feed-forward run in parallel."""
    norms = 1 if f.flag("use_parallel_residual") else 2
    return decoder(f, Traits(qkv_bias="use_qkv_bias", norm="layer", norms=norms, extra=_stablelm_norms))


def _xielu(f: Fields) -> int:
    """Apertus: its activation xIELU learns two numbers a layer."""
    return 2 if f.text("hidden_act", ("xielu", "silu", "gelu", "relu"), "xielu") == "xielu" else 0


def _hyperclovax(f: Fields) -> ModelSpec:
    """HyperCLOVA X: Granite with two more norms a layer where `use_post_norm`."""
    return decoder(f, replace(_BIASED, norms=4 if f.flag("use_post_norm") else 2))


def _helium(f: Fields) -> ModelSpec:
    """Helium: its output projection is hidden x hidden, so heads times head_dim must be hidden."""
    if f.size("num_attention_heads") * f.size("head_dim") != f.size("hidden_size"):
        raise f.fail("head_dim", "times num_attention_heads must be hidden_size in 'helium'")
    return decoder(f, Traits(qkv_bias="attention_bias", mlp_bias="mlp_bias"))


TRAITS = {
    "llama": _BIASED,
    "mistral": Traits(window=windows.every),
    "ministral": Traits(window=windows.typed(windows.SLIDING)),
    "ministral3": Traits(window=windows.every),
    "qwen2": Traits(qkv_bias=True, window=windows.switched),
    "qwen3": replace(_ATTN, qk_norm="head", window=windows.switched),
    "gemma": _ATTN,
    "qwen2_vl_text": Traits(qkv_bias=True, window=windows.switched),
    "qwen2_5_vl_text": Traits(qkv_bias=True, window=windows.switched),
    "qwen2_5_omni_text": Traits(qkv_bias=True, window=windows.switched),
    "qwen3_vl_text": replace(_ATTN, qk_norm="head"),
    "glm4v_text": Traits(qkv_bias=True, norms=4),
    "gemma2": replace(_ATTN, norms=4, window=_EVERY_SECOND),
    "vaultgemma": replace(_ATTN, norms=2, window=_EVERY_SECOND),
    "granite": _BIASED,
    "granite_swa": replace(_BIASED, window=windows.pattern(4, offset=0, fixed=True), extra=_heads),
    "exaone": _BIASED,
    "exaone4": Traits(qk_norm="head", window=windows.optional_pattern),
    "iquestcoder": _BIASED,
    "internlm3": _BIASED,
    "olmo": replace(_ATTN, norm="none"),
    "olmo2": replace(_ATTN, qk_norm="width"),
    "olmo3": replace(_ATTN, qk_norm="width", window=windows.pattern(4, fixed=True)),
    "cohere": replace(_ATTN, norms=1, qk_norm="width", qk_flag="use_qk_norm"),
    "cohere2": replace(_ATTN, norms=1, window=windows.pattern(4)),
    "starcoder2": Traits("use_bias", "use_bias", "use_bias", gated=False, norm="layer", window=windows.every),
    "phi": Traits(True, True, True, gated=False, norm="layer", norms=1, qk_norm="head", qk_flag="qk_layernorm",
                  head_bias=True),
    "phi3": Traits(window=windows.every),
    "persimmon": Traits(True, True, True, gated=False, norm="layer", qk_norm="head", qk_flag="qk_layernorm"),
    "nemotron": replace(_BIASED, gated=False, norm="layer"),
    "arcee": replace(_BIASED, gated=False),
    "jais2": replace(_BIASED, gated=False, norm="layer"),
    "glm": Traits(qkv_bias="attention_bias"),
    "glm4": Traits(qkv_bias="attention_bias", norms=4),
    "seed_oss": Traits("attention_bias", "attention_out_bias", "mlp_bias"),
    "smollm3": replace(_BIASED, window=windows.where_no_rope),
    "hunyuan_v1_dense": replace(_ATTN, qk_norm="head"),
    "ernie4_5": Traits("use_bias", "use_bias", "use_bias"),
    "cwm": Traits(mlp_bias="mlp_bias", window=windows.pattern(4, offset=0, fixed=True)),
    "bitnet": replace(_ATTN, extra=lambda f: f.size("hidden_size") + f.size("intermediate_size")),
    "apertus": replace(_ATTN, gated=False, qk_norm="head", extra=_xielu),
    "nanochat": replace(_ATTN, gated=False, norm="none"),
    "diffllama": replace(_ATTN, extra=lambda f: 4 * head_sizes(f, f.size("hidden_size"))[2]),
}

FAMILIES: dict[str, Builder] = {name: partial(decoder, traits=traits) for name, traits in TRAITS.items()}
FAMILIES |= {"stablelm": _stablelm, "hyperclovax": _hyperclovax, "helium": _helium}
