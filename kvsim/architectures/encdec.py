"""Encoder-decoders: T5, BART, mBART, Whisper; the decoder caches itself and, once, the encoder's output."""

from __future__ import annotations

from dataclasses import replace

from kvsim.architectures.decoder import attention_of
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.architectures.vision import encoder, small, whisper_encoder
from kvsim.model import Attention, Matrix, ModelSpec

T5_SOURCE = 512
"""Source tokens that T5's cross-attention is counted for: the length it was trained with."""


def _cross(heads: int, width: int, tokens: int) -> Attention:
    return Attention("cross", heads, heads, width, width, cross_tokens=tokens)


def _t5(f: Fields) -> ModelSpec:
    """T5 and mT5: no biases, RMSNorms, heads of `d_kv`, one table of relative positions a stack; always tied."""
    hidden, heads, width = f.size("d_model"), f.size("num_heads", high=2**16), f.size("d_kv", high=2**16)
    count = layer_count(f, "num_layers")
    decoders = f.size("num_decoder_layers", derive=count, high=1024)
    act = f.get("feed_forward_proj") or f.default("feed_forward_proj") or "relu"
    if not isinstance(act, str):
        raise f.fail("feed_forward_proj", "must be a word")
    ffn = mlp(hidden, f.size("d_ff"), gated=act.startswith("gated-"))
    attn, buckets = projections(hidden, heads, heads, width), f.size("relative_attention_num_buckets")
    f.ignore("tie_word_embeddings", "dense_act_fn", "is_gated_act", "n_positions")
    each_one = attn + ffn + Part((), 2 * hidden)
    towers = tuple(replace(m, name=f"encoder.{m.name}", copies=count, active=count) for m in each_one.matrices)
    towers += small("encoder.rest", count * each_one.small + hidden + buckets * heads)
    other = Part(tuple(replace(m, name=f"cross.{m.name}") for m in attn.matrices), 3 * hidden)
    one = layer(attention_of(heads, heads, width, 0), attn, other, ffn, cross=_cross(heads, width, T5_SOURCE))
    f.notes.append(f"cross-attention bytes are for {T5_SOURCE} source tokens")
    spec = assemble(f, (one,) * decoders, hidden, f.size("vocab_size"), final=hidden, extra=buckets * heads, tied=True)
    return replace(spec, towers=towers)


def _bart(f: Fields) -> ModelSpec:
    """BART and mBART: biases everywhere, positions shifted by 2, norms on the embeddings (mBART: one more a stack)."""
    hidden = f.size("d_model")
    if not f.flag("tie_word_embeddings"):
        raise f.fail("tie_word_embeddings", f"= false is not accounted for in {f.model_type!r}")
    tokens = f.size("max_position_embeddings")
    table = (tokens + 2) * hidden + 2 * hidden + (2 * hidden if f.model_type == "mbart" else 0)
    layers, inner = f.size("encoder_layers", high=1024), f.size("encoder_ffn_dim")
    towers = encoder("encoder", hidden, layers, inner) + small("encoder.rest", table)
    f.ignore("encoder_attention_heads", "num_hidden_layers", "is_encoder_decoder", "classif_dropout",
             "static_position_embeddings",
             "add_bias_logits", "add_final_layer_norm", "normalize_before", "normalize_embedding",
             "extra_pos_embeddings")
    return replace(_decoder(f, hidden, tokens, key_bias=True, extra=table), towers=towers)


def _decoder(f: Fields, hidden: int, source: int, *, key_bias: bool, extra: int) -> ModelSpec:
    """The decoder stack with self- and cross-attention, three LayerNorms a layer."""
    heads, count = f.size("decoder_attention_heads", high=2**16), f.size("decoder_layers", high=1024)
    if hidden % heads:
        raise f.fail("d_model", f"= {hidden} is no multiple of {heads} heads")
    width = hidden // heads
    attn = projections(hidden, heads, heads, width, qkv_bias=True, o_bias=True)
    if not key_bias:
        attn = Part(tuple(replace(m, bias=m.name != "k_proj") for m in attn.matrices))
    other = Part(tuple(replace(m, name=f"cross.{m.name}") for m in attn.matrices), 6 * hidden)
    one = layer(attention_of(heads, heads, width, 0), attn, other,
                mlp(hidden, f.size("decoder_ffn_dim"), gated=False, bias=True),
                cross=_cross(heads, width, source))
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), extra=extra)


def _whisper(f: Fields) -> ModelSpec:
    """Whisper: an audio encoder of `max_source_positions` rows, keys without bias."""
    hidden = f.size("d_model")
    towers = whisper_encoder(f)
    f.ignore("num_hidden_layers", "hidden_size", "median_filter_width", "use_weighted_layer_sum",
             "classifier_proj_size",
             "is_encoder_decoder", *(n for n in f.raw
                                     if n.startswith(("mask_", "suppress", "begin_", "forced_", "alignment_"))))
    table = f.size("max_target_positions") * hidden
    spec = _decoder(f, hidden, f.size("max_source_positions"), key_bias=False, extra=table + 2 * hidden)
    return replace(spec, towers=towers, max_context=f.size("max_target_positions"))


FAMILIES: dict[str, Builder] = {"t5": _t5, "mt5": _t5, "bart": _bart, "mbart": _bart, "whisper": _whisper}
__all__ = ["FAMILIES", "T5_SOURCE", "Matrix"]
