"""Step-3.5 and 3.7: windowed layers with more query heads, a gate a head, experts after three dense layers."""

from __future__ import annotations

from kvsim.architectures import windows
from kvsim.architectures.decoder import attention_of
from kvsim.architectures.experts import expert_counts
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, each, experts, head_sizes, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.errors import shown
from kvsim.model import Layer, Matrix, ModelSpec


def _sliding_heads(f: Fields, heads: int, kv: int, dim: int) -> int:
    """Query heads of windowed layers; their KV heads and width must be those of the other layers."""
    stated = f.maybe("num_sliding_attention_heads", low=1)
    other = f.child("attention_other_setting", "-") if f.has("attention_other_setting") else None
    if other is not None:
        for name, same in (("num_attention_groups", kv), ("num_key_value_heads", kv), ("head_dim", dim)):
            if other.get(name) not in (None, same):
                raise other.fail(name, f"= {shown(other.get(name))} differs from the other layers' {same}")
        other.ignore("attention_type", "true_head_dim")
        stated = stated or other.maybe("num_attention_heads", low=1)
    stated = stated or heads
    if stated % kv:
        raise f.fail("num_sliding_attention_heads", f"= {stated} is no multiple of {kv} KV heads")
    return stated


def _sparse_at(f: Fields, count: int) -> list[bool]:
    """Layers with experts: listed types, the old comma list, or all after the first dense ones (3)."""
    types = windows.layer_types(f, count, ("sparse", "dense"), "mlp_layer_types")
    if types is not None:
        return [t == "sparse" for t in types]
    listed = f.get("moe_layers_enum")
    if listed is not None:
        words = listed.split(",") if isinstance(listed, str) else listed if isinstance(listed, list) else []
        if not all(str(w).strip().isdigit() for w in words):
            raise f.fail("moe_layers_enum", f"= {shown(listed, 40)} is no list of layer numbers")
        return [i in {int(w) for w in words} for i in range(count)]
    first = f.size("first_k_dense_replace", low=0, derive=3)
    return [i >= first for i in range(count)]


def step(f: Fields) -> ModelSpec:
    """The text model; per-layer lists may be longer by the MTP layers, which are not counted."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    f.raw.setdefault("num_key_value_heads", f.get("num_key_value_heads", "num_attention_groups"))
    heads, kv, dim = head_sizes(f, hidden)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(f.raw.get(name), list):
            f.raw[name] = f.raw[name][:count]
    wide, spans = _sliding_heads(f, heads, kv, dim), windows.typed()(f, count)
    sparse_at, bias = _sparse_at(f, count), f.flag("attention_bias")
    n, k = expert_counts(f, "n_routed_experts", "num_experts_per_tok") if not f.has("num_experts") \
        else expert_counts(f, "num_experts", "num_experts_per_tok")
    sparse = experts(hidden, f.size("moe_intermediate_size"), n, k)
    sparse += mlp(hidden, f.size("share_expert_dim"), prefix="shared_experts.")
    dense = mlp(hidden, f.size("intermediate_size"))
    f.ignore("n_shared_experts", "use_moe_router_bias", "moe_router_scaling_factor", "use_moe", "moe_every_n_layer",
             "use_head_wise_attn_gate", "need_fp32_gate", "swiglu_limits", "swiglu_limits_shared", "sink",
             "att_impl_type",
             "partial_rotary_factors", "mlp_bias", "use_rope_layers", "yarn_only_types", "query_pre_attn_scalar",
             "first_k_dense_replace")

    def one(i: int) -> Layer:
        h = wide if spans[i] else heads
        attn = projections(hidden, h, kv, dim, qkv_bias=bias, o_bias=bias)
        return layer(attention_of(kv, h, dim, spans[i]), attn,
                     Part((Matrix("g_proj", h, hidden),), 2 * dim + 2 * hidden),
                     sparse if sparse_at[i] else dense)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _outer(f: Fields) -> ModelSpec:
    """Step-3.7: nested beside a tower that is not counted, or flat as text alone."""
    if not f.has("text_config"):
        return step(f)
    inner = f.child("text_config", "step3p5", "step3p5")
    for name in ("dtype", "torch_dtype"):
        if f.has(name):
            inner.raw.setdefault(name, f.get(name))
    f.notes.append("the vision tower is not counted")
    f.ignore(*f.raw)
    return step(inner)


FAMILIES: dict[str, Builder] = {"step3p5": step, "step3p7": _outer, "step3p7_text": step}
