"""Gemma 3, 3n and 4 text models: interleaved windows, layers that share another's cache, per-layer embeddings."""

from __future__ import annotations

from kvsim.architectures import windows
from kvsim.architectures.decoder import Traits, attention_of, decoder
from kvsim.architectures.experts import expert_counts
from kvsim.architectures.fields import LAYERS_MAX, Fields
from kvsim.architectures.parts import Part, assemble, each, experts, head_sizes, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.model import Attention, Layer, Matrix, ModelSpec

_GEMMA3 = Traits("attention_bias", "attention_bias", norms=4, qk_norm="head", window=windows.pattern(6))


def gemma3(f: Fields) -> ModelSpec:
    """Gemma-3: every sixth layer full, four norms a layer; the bidirectional variant halves the window."""
    if f.flag("use_bidirectional_attention"):
        f.raw["sliding_window"] = f.size("sliding_window") // 2 + 1
    return decoder(f, _GEMMA3)


def _shared_from(f: Fields, spans: list[int]) -> int:
    """The first layer that reads another's cache; each kind of layer there must have a layer before that stores."""
    count = len(spans)
    shared = f.size("num_kv_shared_layers", low=0, high=LAYERS_MAX)
    if shared >= count:
        raise f.fail("num_kv_shared_layers", f"= {shared} leaves no layer of {count} that stores anything")
    first = count - shared
    if shared and {bool(w) for w in spans[:first]} != {bool(w) for w in spans}:
        raise f.fail("num_kv_shared_layers", f"= {shared} shares a kind of layer that no earlier layer stores")
    return first


def _per_layer_inputs(f: Fields, hidden: int, count: int, width: int) -> tuple[Part, tuple[Matrix, ...], int]:
    """(part of each layer, tables, further small parameters) of the embeddings that feed every layer."""
    if not width:
        f.ignore("vocab_size_per_layer_input")
        return Part(), (), 0
    table = Matrix("embed_tokens_per_layer", f.size("vocab_size_per_layer_input"), count * width)
    mixer = Matrix("per_layer_model_projection", count * width, hidden)
    each_one = Part((Matrix("per_layer_input_gate", width, hidden), Matrix("per_layer_projection", hidden, width)),
                    hidden)
    return each_one, (table, mixer), width


def _reader(heads: int, kv: int, dim: int, window: int) -> Attention:
    """A layer that attends over rows which an earlier layer stores."""
    return Attention("shared", heads, kv, dim, dim, window)


def gemma3n(f: Fields) -> ModelSpec:
    """Gemma-3n: AltUp streams, Laurel bypasses, per-layer embeddings; the last layers share caches."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    spans = windows.pattern(5, "-", fixed=True)(f, count)
    first, bias = _shared_from(f, spans), f.flag("attention_bias")
    inner = f.items("intermediate_size", "int", count) if isinstance(f.get("intermediate_size"), list) else None
    widths = [f.checked("intermediate_size", x) for x in inner] if inner else [f.size("intermediate_size")] * count
    streams, rank = f.size("altup_num_inputs", high=64), f.size("laurel_rank")
    per_layer, tables, small = _per_layer_inputs(f, hidden, count, f.size("hidden_size_per_layer_input"))
    f.ignore("activation_sparsity_pattern", "altup_active_idx", "altup_coef_clip", "altup_correct_scale",
             "altup_lr_multiplier")
    extras = Part((Matrix("altup.correction_coefs", streams, streams),
                   Matrix("altup.prediction_coefs", streams**2, streams),
                   Matrix("altup.modality_router", streams, hidden), Matrix("laurel.left", rank, hidden),
                   Matrix("laurel.right", hidden, rank)), 3 * hidden) + per_layer + Part((), 4 * hidden + dim)
    mix = Matrix("altup_projections", hidden, hidden, 2 * (streams - 1)) if streams > 1 else None

    def one(i: int) -> Layer:
        full = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias)
        if i >= first:
            own = Part(tuple(m for m in full.matrices if m.name in ("q_proj", "o_proj")))
            return layer(_reader(heads, kv, dim, spans[i]), own, mlp(hidden, widths[i]), extras)
        return layer(attention_of(kv, heads, dim, spans[i]), full, Part((), dim), mlp(hidden, widths[i]), extras)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden, extra=small,
                    embeddings=(*tables, mix) if mix else tables)


def gemma4(f: Fields) -> ModelSpec:
    """Gemma-4: full layers have heads of their own width and number; k = v there needs one projection, stores two."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    if f.get("use_bidirectional_attention") == "all":
        f.raw["sliding_window"] = f.size("sliding_window") // 2 + 1
    types = windows.layer_types(f, count)
    if types is not None and types[-1] != windows.FULL:
        raise f.fail("layer_types", "must end with full_attention in Gemma-4")
    if types is None and count % 6:
        f.raw["layer_types"] = [windows.FULL if (i + 1) % 6 == 0 or i == count - 1 else windows.SLIDING
                                for i in range(count)]
    spans = windows.pattern(6, "-", fixed=True)(f, count)
    wide, same = f.size("global_head_dim", derive=512, high=2**16), f.flag("attention_k_eq_v",
                                                                           default=f.model_type != "gemma4_text")
    wide_kv = f.size("num_global_key_value_heads", derive=kv, high=2**16) if same else kv
    f.ignore("num_global_key_value_heads", "use_bidirectional_attention")
    if heads % wide_kv:
        raise f.fail("num_global_key_value_heads", f"= {wide_kv} does not divide {heads} query heads")
    first, bias = _shared_from(f, spans), f.flag("attention_bias")
    inner, double = f.size("intermediate_size"), f.flag("use_double_wide_mlp")
    unified = f.model_type == "gemma4_unified_text"  # without per-layer inputs and experts
    width = 0 if unified else f.maybe("hidden_size_per_layer_input") or 0
    per_layer, tables, small = _per_layer_inputs(f, hidden, count, width)
    norms = per_layer + Part((), 4 * hidden) + (Part() if unified else _moe(f, hidden))

    def one(i: int) -> Layer:
        n, d = (kv, dim) if spans[i] else (wide_kv, wide)
        full = projections(hidden, heads, n, d, qkv_bias=bias, o_bias=bias, k_eq_v=same and not spans[i])
        if i >= first:
            own = Part(tuple(m for m in full.matrices if m.name in ("q_proj", "o_proj")), d)
            return layer(_reader(heads, n, d, spans[i]), own, mlp(hidden, inner * (2 if double else 1)), norms)
        return layer(attention_of(n, heads, d, spans[i]), full, Part((), 2 * d), mlp(hidden, inner), norms)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden, extra=small,
                    embeddings=tables)


def _moe(f: Fields, hidden: int) -> Part:
    """Gemma-4's experts beside the feed-forward: a scaled router and three more norms."""
    if not f.flag("enable_moe_block"):
        f.ignore("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
        return Part()
    n, k = expert_counts(f, "num_experts", "top_k_experts")
    return experts(hidden, f.size("moe_intermediate_size", "expert_intermediate_size"), n, k) + Part((), 4 * hidden + n)


FAMILIES: dict[str, Builder] = {
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
}
