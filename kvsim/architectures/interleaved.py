"""Decoders whose layers differ in heads, windows, experts or indexers: Llama-4, MiMo-V2, Exaone-MoE, MiniMax-M3."""

from __future__ import annotations

from kvsim.architectures import windows
from kvsim.architectures.decoder import FeedForward, Traits, attention_of, decoder
from kvsim.architectures.experts import expert_counts, sparse_layers
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import (
    Part,
    assemble,
    each,
    experts,
    head_sizes,
    head_width,
    layer,
    layer_count,
    mlp,
    projections,
)
from kvsim.architectures.registry import Builder
from kvsim.architectures.windows import FULL, SLIDING, layer_types
from kvsim.errors import shown
from kvsim.model import Attention, Layer, Matrix, ModelSpec

CHUNKED, INDEXED = "chunked_attention", "minimax_m3_sparse"


def llama4(f: Fields) -> ModelSpec:
    """Llama-4: chunks of `attention_chunk_size` where RoPE is used, full attention elsewhere; experts at intervals."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    chunk = f.maybe("attention_chunk_size", low=1)
    types = layer_types(f, count, (FULL, CHUNKED))
    step = f.size("no_rope_layer_interval", derive=4)
    rope = f.items("no_rope_layers", "int") or [int((i + 1) % step != 0) for i in range(count)]
    if types is None:
        if len(rope) != count:
            raise f.fail("no_rope_layers", f"has {len(rope)} entries for {count} layers")
        types = [CHUNKED if r and chunk else FULL for r in rope]
    if CHUNKED in types and not chunk:
        raise f.fail("attention_chunk_size", "is null but layers are chunked")
    every = f.size("interleave_moe_layer_step")
    at = f.items("moe_layers", "int")
    sparse_at = set(range(every - 1, count, every)) if at is None else set(at)
    n, k = expert_counts(f, "num_local_experts", "num_experts_per_tok")
    inner = f.size("intermediate_size")
    sparse = experts(hidden, inner, n, k) + mlp(hidden, inner, prefix="shared_expert.")
    dense, bias = mlp(hidden, f.size("intermediate_size_mlp")), f.flag("attention_bias")
    f.ignore("use_qk_norm", "nope_layer_interval", "attn_temperature_tuning", "floor_scale", "attn_scale")
    attn = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias) + Part((), 2 * hidden)

    def one(i: int) -> Layer:
        kind = Attention("chunked" if types[i] == CHUNKED else "full", heads, kv, dim, dim,
                         (chunk or 0) if types[i] == CHUNKED else 0)
        return layer(kind, attn, sparse if i in sparse_at else dense)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _mimo_v2(f: Fields) -> ModelSpec:
    """MiMo-V2: keys wider than values; windowed layers have twice the KV heads and a sink a head."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    value = f.size("v_head_dim")
    types = layer_types(f, count) or [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    coded = f.items("hybrid_layer_pattern", "int", count)
    if coded is not None and coded != [int(t == SLIDING) for t in types]:
        raise f.fail("hybrid_layer_pattern", "differs from the layers that the class builds")
    window = f.maybe("sliding_window_size", low=1)
    window = f.size("sliding_window") if window is None else window + 1  # previous tokens, plus the query's own
    for name, same in (("swa_num_attention_heads", heads), ("swa_num_key_value_heads", 2 * kv), ("swa_head_dim", dim),
                       ("swa_v_head_dim", value)):
        if (stated := f.get(name)) not in (None, same):
            raise f.fail(name, f"= {shown(stated)} where the class builds {same}")
    f.ignore("sliding_window", "attention_chunk_size", "add_swa_attention_sink_bias", "attention_value_scale")
    if f.flag("add_full_attention_sink_bias"):
        raise f.fail("add_full_attention_sink_bias", "= true is not accounted for")
    f.raw.setdefault("first_k_dense_replace", 1)
    sparse_at, bias = sparse_layers(f, count), f.flag("attention_bias")
    if f.maybe("n_shared_experts"):
        raise f.fail("n_shared_experts", "is not accounted for in 'mimo_v2_flash'")
    n, k = expert_counts(f, "n_routed_experts", "num_experts_per_tok")
    sparse, dense = experts(hidden, f.size("moe_intermediate_size"), n, k), mlp(hidden, f.size("intermediate_size"))

    def one(i: int) -> Layer:
        wide = types[i] == SLIDING
        n_kv = 2 * kv if wide else kv
        attn = projections(hidden, heads, n_kv, dim, v_dim=value, qkv_bias=bias)
        return layer(attention_of(n_kv, heads, dim, window if wide else 0, value), attn,
                     Part((), 2 * hidden + (heads if wide else 0)), sparse if sparse_at[i] else dense)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _shared_moe(f: Fields, hidden: int, sparse_at: list[bool], *, correction: bool = False) -> FeedForward:
    """Experts with `num_shared_experts` shared ones as one wider feed-forward."""
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    inner, shared = f.size("moe_intermediate_size"), f.size("num_shared_experts", low=0)
    sparse = experts(hidden, inner, n, k, correction=correction)
    if shared:
        sparse += mlp(hidden, inner * shared, prefix="shared_experts.")
    dense = mlp(hidden, f.size("intermediate_size"))
    return lambda i: sparse if sparse_at[i] else dense


def _exaone_moe(f: Fields) -> ModelSpec:
    """Exaone-MoE: Exaone-4's windows, experts after the first layers."""
    traits = Traits(qk_norm="head", window=windows.optional_pattern)
    return decoder(f, traits, feed=lambda f, hidden, _: _shared_moe(f, hidden, sparse_layers(f, layer_count(f))))


def _afmoe(f: Fields) -> ModelSpec:
    """Afmoe: four norms a layer, a gate on the attention output, full attention every few layers."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    first, bias = f.size("num_dense_layers", low=0), f.flag("attention_bias")
    ffn = _shared_moe(f, hidden, [i >= first for i in range(count)], correction=True)
    spans = windows.pattern(4, "global_attn_every_n_layers")(f, count)
    attn = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias)
    attn += Part((Matrix("attn_gate", heads * dim, hidden),), 2 * dim + 4 * hidden)
    built = each(count, lambda i: layer(attention_of(kv, heads, dim, spans[i]), attn, ffn(i)))
    return assemble(f, built, hidden, f.size("vocab_size"), final=hidden)


def _laguna(f: Fields) -> ModelSpec:
    """Laguna: query heads per layer, a gate a head, one shared expert."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    base, kv = f.size("num_attention_heads", high=2**16), f.size("num_key_value_heads", high=2**16)
    dim = head_width(f, hidden, base)
    per = f.items("num_attention_heads_per_layer", "int", count) or [base] * count
    if any(not 1 <= h <= 2**16 or h % kv for h in per):
        raise f.fail("num_attention_heads_per_layer", f"= {shown(per, 40)} are not all multiples of {kv} KV heads")
    gating = f.get("gating")
    if gating not in (None, True, "per-head", "per-element", False):
        raise f.fail("gating", f"= {shown(gating)} is not known")
    types = layer_types(f, count, ("sparse", "dense"), "mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    spans, bias = windows.typed()(f, count), f.flag("attention_bias")
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    sparse = experts(hidden, f.size("moe_intermediate_size"), n, k, correction=True)
    sparse += mlp(hidden, f.size("shared_expert_intermediate_size"), prefix="shared_expert.")
    dense = mlp(hidden, f.size("intermediate_size"))
    f.ignore("moe_apply_router_weight_on_input")

    def one(i: int) -> Layer:
        h = per[i]
        gate = Matrix("g_proj", h if gating in (None, True, "per-head") else h * dim, hidden)
        attn = projections(hidden, h, kv, dim, qkv_bias=bias, o_bias=bias)
        return layer(attention_of(kv, h, dim, spans[i]), attn + Part((gate,), 2 * dim + 2 * hidden),
                     sparse if types[i] == "sparse" else dense)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def minimax_m3(f: Fields) -> ModelSpec:
    """MiniMax-M3: grouped attention whose later layers pick blocks of tokens by an indexer with its own key cache."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    given = f.has("sparse_attention_config")
    old = f.child("sparse_attention_config", "-") if given else Fields({}, "-", "", f.notes)
    types = layer_types(f, count, (FULL, INDEXED))
    freq = old.items("sparse_attention_freq", "int", count)
    if types is None:
        types = [INDEXED if x else FULL for x in freq] if freq is not None else [FULL] * count
    index_heads, width, block, blocks = (
        old.maybe(o, low=1) or f.size(name) for o, name in (
            ("sparse_num_index_heads", "index_n_heads"), ("sparse_index_dim", "index_head_dim"),
            ("sparse_block_size", "index_block_size"), ("sparse_topk_blocks", "index_topk_blocks")))
    old.ignore("sparse_disable_index_value", "sparse_score_type", "sparse_init_block", "sparse_local_block",
               "use_sparse_attention")
    f.ignore("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks",
             "use_gemma_norm",
             "use_qk_norm", "qk_norm_type", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace")
    if f.flag("attention_output_gate") or not old.flag("use_sparse_attention", default=True):
        raise f.fail("attention_output_gate", "or sparse attention switched off is not accounted for")
    listed = f.items("moe_layer_freq", "int", count)
    kinds = layer_types(f, count, ("sparse", "dense"), "mlp_layer_types")
    sparse_at = [k == "sparse" for k in kinds] if kinds else [bool(x) for x in listed] if listed else [True] * count
    n, k = expert_counts(f, "num_local_experts", "num_experts_per_tok")
    sparse = experts(hidden, f.size("intermediate_size"), n, k) + mlp(hidden, f.size("shared_intermediate_size"),
                                                                       prefix="shared_experts.")
    dense = mlp(hidden, f.size("dense_intermediate_size"))
    attn = projections(hidden, heads, kv, dim) + Part((), 2 * dim + 2 * hidden)
    own = Part((Matrix("indexer.q_proj", index_heads * width, hidden), Matrix("indexer.k_proj", width, hidden)),
               2 * width)
    picking = Attention("full", heads, kv, dim, dim, index_dim=width, selected=block * blocks)

    def one(i: int) -> Layer:
        ffn = sparse if sparse_at[i] else dense
        if types[i] == INDEXED:
            return layer(picking, attn, own, ffn)
        return layer(attention_of(kv, heads, dim, 0), attn, ffn)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


FAMILIES: dict[str, Builder] = {
    "llama4_text": llama4,
    "mimo_v2_flash": _mimo_v2,
    "exaone_moe": _exaone_moe,
    "afmoe": _afmoe,
    "laguna": _laguna,
    "minimax_m3": minimax_m3,
    "minimax_m3_vl_text": minimax_m3,
}
