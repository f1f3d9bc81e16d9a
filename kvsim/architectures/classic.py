"""Decoders before Llama: GPT-2, GPT-J, GPT-NeoX, BigCode, OPT, BLOOM, MPT, Falcon, XGLM, CodeGen, BioGPT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvsim.architectures.decoder import attention_of
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import NORM, Part, assemble, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.errors import shown
from kvsim.model import Matrix, ModelSpec


@dataclass(frozen=True)
class Names:
    """Spellings of sizes and facts about biases and tables in one old family."""

    hidden: str = "n_embd"
    layers: str = "n_layer"
    heads: str = "n_head"
    inner: str = "n_inner"
    positions: str = ""
    shift: int = 0
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    norms: int = 2
    head_bias: bool = False


def classic(f: Fields, names: Names, *, kv: int | None = None, tables: int = 0) -> ModelSpec:
    """LayerNorms, an ungated feed-forward (4 x hidden where not said), learned positions in some, `kv` KV heads."""
    hidden, count, heads = f.size(names.hidden), layer_count(f, names.layers), f.size(names.heads, high=2**16)
    width = whole_heads(f, hidden, heads)
    for name in ("add_cross_attention", "is_encoder_decoder"):
        if f.flag(name):
            raise f.fail(name, "= true is not accounted for")
    parts = (projections(hidden, heads, kv or heads, width, qkv_bias=names.qkv_bias, o_bias=names.o_bias),
             mlp(hidden, f.size(names.inner, derive=4 * hidden), gated=False, bias=names.mlp_bias),
             Part((), names.norms * 2 * hidden))
    one = layer(attention_of(kv or heads, heads, width, 0), *parts)
    places = (Matrix("positions", f.size(names.positions) + names.shift, hidden),) if names.positions else ()
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=2 * hidden, embeddings=places, extra=tables,
                    head_bias=names.head_bias)


def whole_heads(f: Fields, hidden: int, heads: int) -> int:
    """hidden / heads, which must be whole."""
    if hidden % heads:
        raise f.fail("hidden_size", f"= {hidden} is no multiple of the {heads} heads")
    return hidden // heads


def _bigcode(f: Fields) -> ModelSpec:
    """StarCoder-1: one KV head with `multi_query`."""
    return classic(f, Names(positions="n_positions"), kv=1 if f.flag("multi_query") else None)


def _gpt_neo(f: Fields) -> ModelSpec:
    """GPT-Neo: local layers are masked, yet the library caches every token for them."""
    count = f.size("num_layers")
    types = f.get("attention_types")
    flat: list[object] = []
    for entry in types if isinstance(types, list) else [[["global", "local"], 12]]:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], int)
                and 0 <= entry[1] <= 1024):
            raise f.fail("attention_types", f"holds {shown(entry)} instead of [[kinds], times]")
        flat += entry[0] * entry[1]
    if any(x not in ("global", "local") for x in flat) or len(flat) != count:
        raise f.fail("attention_types",
                     f"describes {len(flat)} layers of {count}, or kinds other than global and local")
    if "local" in flat:
        f.notes.append(f"local layers attend {f.size('window_size')} tokens, but all rows stay cached")
    f.ignore("attention_layers", "window_size")
    return classic(f, Names("hidden_size", "num_layers", "num_heads", "intermediate_size",
                            positions="max_position_embeddings", qkv_bias=False))


def _gpt_neox(f: Fields) -> ModelSpec:
    bias = f.flag("attention_bias")
    return classic(f, Names("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                            qkv_bias=bias, o_bias=bias))


def _gpt_neox_japanese(f: Fields) -> ModelSpec:
    """No biases but one on the last attention output."""
    hidden = f.size("hidden_size")
    f.raw["intermediate_size"] = hidden * f.size("intermediate_multiple_size", high=64)
    return classic(f, Names("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                            qkv_bias=False, o_bias=False, mlp_bias=False), tables=hidden)


def _bloom(f: Fields) -> ModelSpec:
    """BLOOM: ALiBi, and a norm on the embeddings."""
    hidden = f.size("hidden_size", "n_embed")
    f.raw.setdefault("hidden_size", hidden)
    f.ignore("apply_residual_connection_post_layernorm")
    return classic(f, Names("hidden_size", inner="-"), tables=2 * hidden)


def _opt(f: Fields) -> ModelSpec:
    """OPT: positions start at 2; embeddings may be narrower than the model; norms may be bare."""
    hidden, count, heads = f.size("hidden_size"), layer_count(f), f.size("num_attention_heads", high=2**16)
    width, bias = whole_heads(f, hidden, heads), f.flag("enable_bias")
    norm = NORM["layer"] if f.flag("layer_norm_elementwise_affine") else 0
    narrow = f.size("word_embed_proj_dim", derive=hidden)
    one = layer(attention_of(heads, heads, width, 0),
                projections(hidden, heads, heads, width, qkv_bias=bias, o_bias=bias),
                mlp(hidden, f.size("ffn_dim"), gated=False, bias=bias), Part((), 2 * norm * hidden))
    tables: tuple[Matrix, ...] = (Matrix("positions", f.size("max_position_embeddings") + 2, hidden),)
    if narrow != hidden:
        tables += (Matrix("project_in", hidden, narrow), Matrix("project_out", narrow, hidden))
    final = norm * hidden if f.flag("do_layer_norm_before") and not f.flag("_remove_final_layer_norm") else 0
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=final, embeddings=tables, width=narrow)


def _mpt(f: Fields) -> ModelSpec:
    """MPT: no biases anywhere, ALiBi; grouped heads as llm-foundry has them (the transformers class knows none)."""
    hidden, heads, count = f.size("d_model"), f.size("n_heads", high=2**16), layer_count(f, "n_layers")
    width = whole_heads(f, hidden, heads)
    attn = f.child("attn_config", "mpt") if f.has("attn_config") else Fields({}, "mpt", "attn_config.", f.notes)
    kind = attn.text("attn_type", ("multihead_attention", "multiquery_attention", "grouped_query_attention"),
                     "multihead_attention")
    kv = attn.size("kv_n_heads", derive=1 if kind == "multiquery_attention" else heads)
    if heads % kv:
        raise attn.fail("kv_n_heads", f"= {kv} does not divide n_heads = {heads}")
    if not attn.flag("alibi", default=True) or attn.flag("qk_ln") or not f.flag("no_bias", default=True):
        raise f.fail("attn_config", "without alibi, with qk_ln or with biases is not accounted for")
    f.ignore("learned_pos_emb", "attn_config", "embedding_fraction", "norm_type")
    if f.size("expansion_ratio") != 4:
        raise f.fail("expansion_ratio", "other than 4 is not accounted for")
    attn.ignore("attn_pdrop", "attn_impl", "clip_qkv", "softmax_scale", "prefix_lm", "attn_uses_sequence_id",
                "alibi_bias_max", "model_type")
    one = layer(attention_of(kv, heads, width, 0), projections(hidden, heads, kv, width),
                mlp(hidden, 4 * hidden, gated=False), Part((), 2 * hidden))
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=hidden)


def _falcon(f: Fields) -> ModelSpec:
    """Falcon: one KV head (7B), grouped heads (40B, 180B: transformers caches all query heads instead), or MHA."""
    hidden, heads = f.size("hidden_size", "n_embed"), f.size("num_attention_heads", "n_head", high=2**16)
    count, width = layer_count(f, "num_hidden_layers", "n_layer"), whole_heads(f, hidden, heads)
    stated = f.size("num_kv_heads", "n_head_kv", derive=heads, high=2**16)
    new, bias, parallel = f.flag("new_decoder_architecture"), f.flag("bias"), f.flag("parallel_attn")
    kv = stated if new else 1 if f.flag("multi_query") else heads
    if heads % kv or (not new and kv == heads != stated):
        raise f.fail("num_kv_heads", f"= {stated} does not fit {heads} query heads in this layout")
    if new and kv != heads:
        f.notes.append(f"transformers broadcasts the {kv} KV heads to {heads} before caching; engines store {kv}")
    two = f.maybe("num_ln_in_parallel_attn") or (2 if new else 1)
    norms = 2 if not parallel or two == 2 else 1
    one = layer(attention_of(kv, heads, width, 0), projections(hidden, heads, kv, width, qkv_bias=bias, o_bias=bias),
                mlp(hidden, f.size("ffn_hidden_size", derive=4 * hidden), gated=False, bias=bias),
                Part((), norms * 2 * hidden))
    f.ignore("alibi")
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=2 * hidden)


_GPTJ = Names(qkv_bias=False, o_bias=False, norms=1, head_bias=True)
FAMILIES: dict[str, Builder] = {
    "gpt2": partial(classic, names=Names(positions="n_positions")),
    "gpt-sw3": partial(classic, names=Names(positions="n_positions")),
    "gpt_bigcode": _bigcode,
    "gptj": partial(classic, names=_GPTJ),
    "codegen": partial(classic, names=_GPTJ),
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_neox_japanese": _gpt_neox_japanese,
    "bloom": _bloom,
    "opt": _opt,
    "mpt": _mpt,
    "falcon": _falcon,
    "RefinedWeb": _falcon,
    "RefinedWebModel": _falcon,
    "xglm": partial(classic, names=Names("d_model", "num_layers", "attention_heads", "ffn_dim")),
    "biogpt": partial(classic, names=Names("hidden_size", "num_hidden_layers", "num_attention_heads",
                                           "intermediate_size",
                                           positions="max_position_embeddings", shift=2)),
}
