"""Plain dense decoders of the Llama kind: they differ by biases, norms, windows and gating only."""

from __future__ import annotations

from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.decoder import Traits, decoder
from kvsim.architectures.registry import Builder

_BIASED = Traits(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_PLAIN = Traits()
_ATTN = Traits(qkv_bias="attention_bias", o_bias="attention_bias")

FAMILIES: dict[str, Builder] = {
    name: partial(decoder, traits=traits)
    for name, traits in {
        "llama": _BIASED,
        "mistral": Traits(window=windows.every),
        "ministral": Traits(window=windows.typed(windows.SLIDING)),
        "ministral3": Traits(window=windows.every),
        "qwen2": Traits(qkv_bias=True, window=windows.switched),
        "qwen3": Traits(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", window=windows.switched),
        "gemma": _ATTN,
        "granite": _BIASED,
    }.items()
}
