"""Llama-3.2-Vision's text model: some layers attend to the picture's tokens instead of the text's."""

from __future__ import annotations

from kvsim.architectures.decoder import attention_of
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, each, head_sizes, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.model import Attention, Layer, ModelSpec

IMAGE_TOKENS = 4 * 1601
"""Tokens of one picture of four 560-pixel tiles (40 x 40 patches and a class token each)."""


def mllama_text(f: Fields) -> ModelSpec:
    """`cross_attention_layers` count within num_hidden_layers, hold no text cache, and have gates and q/k norms."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    at = set(f.items("cross_attention_layers", "int") or (3, 8, 13, 18, 23, 28, 33, 38))
    part, ffn = projections(hidden, heads, kv, dim), mlp(hidden, f.size("intermediate_size"))
    cross = Attention("cross", heads, kv, dim, dim, cross_tokens=IMAGE_TOKENS)

    def one(i: int) -> Layer:
        if i in at:
            return layer(None, part, ffn, Part((), 2 * hidden + 2 * dim + 2), cross=cross)
        return layer(attention_of(kv, heads, dim, 0), part, ffn, Part((), 2 * hidden))

    vocab = f.size("vocab_size")
    f.notes.append("cross-attention bytes are for one picture of four tiles")
    return assemble(f, each(count, one), hidden, vocab, final=hidden, extra=8 * hidden, tied=False)


FAMILIES: dict[str, Builder] = {"mllama_text_model": mllama_text}
