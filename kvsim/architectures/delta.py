"""Hybrids with delta nets or lightning attention (Qwen3-Next, Kimi-Linear, MiniMax-M1, OLMo-Hybrid); Nemotron-H."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.architectures import mixers
from kvsim.architectures.decoder import FeedForward, Traits, attention_of
from kvsim.architectures.experts import deepseek_moe, every_layer, expert_counts, qwen_moe
from kvsim.architectures.fields import LAYERS_MAX, Fields
from kvsim.architectures.latent import latent
from kvsim.architectures.parts import Part, assemble, each, experts, head_sizes, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.architectures.windows import FULL, layer_types
from kvsim.errors import shown
from kvsim.model import Attention, Layer, Matrix, ModelSpec

LINEAR = "linear_attention"
_KERNEL_MAX = 256


def blocks(f: Fields, types: list[str], attention: tuple[Attention, Part], mixer: mixers.Mixer, ffn: FeedForward,
           norms: Part, tied: bool | None = None) -> ModelSpec:
    """A decoder with attention or a mixer in each layer and a feed-forward after it."""
    hidden = f.size("hidden_size")

    def one(i: int) -> Layer:
        if types[i] == FULL:
            return layer(attention[0], attention[1], norms, ffn(i))
        return layer(None, mixer.part, norms, ffn(i), states=mixer.states)

    return assemble(f, each(len(types), one), hidden, f.size("vocab_size"), final=hidden, tied=tied)


def _intervals(f: Fields, count: int) -> list[str]:
    """`layer_types`, else full attention every `full_attention_interval` layers (4)."""
    types = layer_types(f, count, (FULL, LINEAR))
    step = f.size("full_attention_interval", derive=4)
    return types or [FULL if (i + 1) % step == 0 else LINEAR for i in range(count)]


def _linear_net(f: Fields, hidden: int) -> mixers.Mixer:
    """The delta net of the linear_* fields."""
    k_heads, v_heads = f.size("linear_num_key_heads"), f.size("linear_num_value_heads")
    if v_heads % k_heads:
        raise f.fail("linear_num_value_heads", f"= {v_heads} is no multiple of linear_num_key_heads = {k_heads}")
    return mixers.delta_net(hidden, k_heads, v_heads, f.size("linear_key_head_dim"), f.size("linear_value_head_dim"),
                            f.size("linear_conv_kernel_dim", high=_KERNEL_MAX))


def qwen3_next(f: Fields) -> ModelSpec:
    """Qwen3-Next and Qwen3.5: gated attention (q twice as wide) every fourth layer; dense or with experts."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    bias = f.flag("attention_bias")
    plain = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias)
    gate = Matrix("attn_gate", heads * dim, hidden, bias=bias)
    ffn: FeedForward
    if f.model_type == "qwen3_next":
        ffn = qwen_moe(f, hidden, Traits(), shared=True)
    elif "moe" in f.model_type:
        ffn = _gated_shared(f, hidden)
    else:
        dense = mlp(hidden, f.size("intermediate_size"))
        ffn = lambda i: dense  # noqa: E731
    f.ignore("attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers", "intermediate_size")
    if not f.flag("attn_output_gate", default=True):
        raise f.fail("attn_output_gate", "= false is not accounted for")
    return blocks(f, _intervals(f, count), (attention_of(kv, heads, dim, 0), plain + Part((gate,), 2 * dim)),
                  _linear_net(f, hidden), ffn, Part((), 2 * hidden))


def _gated_shared(f: Fields, hidden: int) -> FeedForward:
    """Qwen3.5-MoE: experts and a gated shared expert in every layer."""
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    part = experts(hidden, f.size("moe_intermediate_size"), n, k) + Part((Matrix("shared_expert_gate", 1, hidden),))
    part += mlp(hidden, f.size("shared_expert_intermediate_size"), prefix="shared_expert.")
    if f.items("mlp_only_layers", "int"):
        raise f.fail("mlp_only_layers", "is not accounted for in Qwen3.5-MoE")
    return lambda i: part


def _olmo_hybrid(f: Fields) -> ModelSpec:
    """OLMo-Hybrid: delta nets with three to one attention; norms before mixers, after attention."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    types = layer_types(f, count, (FULL, LINEAR)) or [FULL if i % 4 == 3 else LINEAR for i in range(count)]
    if FULL not in types:
        types[-1] = FULL
    n_k, n_v = f.size("linear_num_key_heads", derive=heads), f.size("linear_num_value_heads", derive=heads)
    k_dim = f.size("linear_key_head_dim", derive=int(0.75 * hidden / n_k))
    mixer = mixers.delta_net(hidden, n_k, n_v, k_dim, f.size("linear_value_head_dim", derive=2 * k_dim),
                             f.size("linear_conv_kernel_dim", high=_KERNEL_MAX))
    f.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_allow_neg_eigval")
    bias, dense = f.flag("attention_bias"), mlp(hidden, f.size("intermediate_size"))
    attn = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias) + Part((), (heads + kv) * dim)
    return blocks(f, types, (attention_of(kv, heads, dim, 0), attn), mixer, lambda i: dense, Part((), 2 * hidden))


def _minimax(f: Fields) -> ModelSpec:
    """MiniMax-Text-01 and M1: lightning attention with full attention between, experts everywhere."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    types = layer_types(f, count, (FULL, LINEAR))
    coded = f.items("attn_type_list", "int", count)
    if types is None and coded is not None:
        if not set(coded) <= {0, 1}:
            raise f.fail("attn_type_list", "must hold 1 for full and 0 for lightning attention")
        types = [FULL if x else LINEAR for x in coded]
    if types is None:
        if f.model_type != "minimax":
            raise f.fail("attn_type_list", "is missing")
        types = [FULL if (i + 1) % 2 else LINEAR for i in range(count)]
    if f.get("sliding_window") is not None or f.maybe("shared_intermediate_size"):
        raise f.fail("sliding_window", "and shared_intermediate_size are not accounted for in MiniMax")
    f.ignore("block_size", "postnorm", "shared_moe_mode", *(n for n in f.raw if n.startswith("layernorm_")))
    f.ignore(*(n for n in f.raw if n.endswith(("_alpha_factor", "_beta_factor"))))
    feed = every_layer()(f, hidden, Traits())
    attn = (attention_of(kv, heads, dim, 0), projections(hidden, heads, kv, dim))
    return blocks(f, types, attn, mixers.lightning(hidden, heads, dim), feed, Part((), 2 * hidden))


def _kimi_linear(f: Fields) -> ModelSpec:
    """Kimi-Linear: delta attention, latent attention at the (1-based) full_attn_layers, experts after dense layers."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    inner = f.child("linear_attn_config", "kimi_linear") if f.has("linear_attn_config") else Fields({}, "-", "",
                                                                                                    f.notes)
    types = layer_types(f, count, (FULL, LINEAR))
    full, kda = inner.items("full_attn_layers", "int"), inner.items("kda_layers", "int")
    if types is None and full is not None and kda is not None:
        if sorted(full + kda) != list(range(1, count + 1)):
            raise inner.fail("full_attn_layers", f"and kda_layers do not name each of {count} layers once (from 1)")
        types = [FULL if i + 1 in full else LINEAR for i in range(count)]
    types = types or [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    sizes = [inner.maybe(name, low=1) or f.size(other) for name, other in (
        ("num_heads", "linear_num_heads"), ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"))]
    f.ignore("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "num_key_value_heads", "head_dim",
             "mla_use_nope", "use_grouped_topk", "moe_router_activation_func", "moe_layer_freq")
    f.raw.setdefault("first_k_dense_replace", 1)
    for canonical, names in (("n_routed_experts", ("num_local_experts",)),
                             ("n_shared_experts", ("num_shared_experts",)),
                             ("num_experts_per_tok", ("num_experts_per_token",))):
        f.raw.setdefault(canonical, f.size(canonical, *names, low=0))
    kind, part, _ = latent(f, hidden)
    mixer = mixers.kimi_delta(hidden, sizes[0], sizes[1], sizes[2])
    return blocks(f, types, (kind, part), mixer, deepseek_moe(f, hidden, Traits()), Part((), 2 * hidden),
                  tied=_untied(f))


def _untied(f: Fields) -> bool:
    """False: the class has a head of its own whatever tie_word_embeddings says."""
    if f.flag("tie_word_embeddings"):
        f.notes.append(f"{f.where('tie_word_embeddings')} = true is ignored: the class of {f.model_type!r} never ties")
    return False


_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_types(f: Fields) -> list[str]:
    """The kind of every layer: a list, or letters M (Mamba), * (attention), - (feed-forward), E (experts)."""
    listed = f.items("layers_block_type", "str")
    letters = f.get("hybrid_override_pattern")
    if listed is not None:
        names = [{"linear_attention": "mamba", FULL: "attention"}.get(x, x) for x in listed]
    elif isinstance(letters, str):
        names = [_LETTERS.get(c, c) for c in letters if c != "|"]
    else:
        raise f.fail("hybrid_override_pattern", "or layers_block_type is needed")
    unknown = sorted(set(names) - set(_LETTERS.values()))
    if unknown or not 0 < len(names) <= LAYERS_MAX:
        raise f.fail("hybrid_override_pattern", f"has {len(names)} layers and unknown kinds {shown(unknown)}")
    stated = f.maybe("num_hidden_layers", low=1)
    if stated not in (None, len(names)):
        raise f.fail("num_hidden_layers", f"= {stated} but the pattern has {len(names)} layers")
    return names


def _nemotron_h(f: Fields) -> ModelSpec:
    """Nemotron-H: every layer is one thing: Mamba-2, attention, a feed-forward (relu2, ungated) or experts."""
    hidden, names = f.size("hidden_size"), _nemotron_types(f)
    for name in ("mtp_layers_block_type", "mtp_hybrid_override_pattern", "expand", "mamba_expand",
                 "mamba_ssm_cache_dtype",
                 "mamba_hidden_act", "num_logits_to_keep", "moe_shared_expert_overlap"):
        f.ignore(name)
    if f.get("sliding_window") is not None:
        raise f.fail("sliding_window", "is not accounted for in 'nemotron_h'")
    makers: dict[str, Callable[[Fields, int], Layer]] = {
        "mamba": _nemotron_mamba, "attention": _nemotron_attention, "mlp": _nemotron_mlp, "moe": _nemotron_moe}
    made = {name: makers[name](f, hidden) for name in dict.fromkeys(names)}
    f.ignore(*(n for n in f.raw if n.startswith(("mamba_", "moe_", "n_", "ssm_", "num_experts", "intermediate_size"))))
    f.ignore("conv_kernel", "use_conv_bias", "num_key_value_heads", "num_attention_heads", "head_dim", "mlp_bias",
             "use_bias")
    return assemble(f, tuple(made[n] for n in names), hidden, f.size("vocab_size"), final=hidden, tied=_untied(f))


def _nemotron_mamba(f: Fields, hidden: int) -> Layer:
    mixer = mixers.mamba2(hidden, f.size("mamba_num_heads"), f.size("mamba_head_dim"), f.size("ssm_state_size"),
                          f.size("n_groups", "mamba_n_groups"), f.size("conv_kernel", "mamba_d_conv", high=_KERNEL_MAX),
                          bias=f.flag("use_bias"), conv_bias=f.flag("use_conv_bias", "mamba_conv_bias"))
    f.ignore("mamba_proj_bias")
    return layer(None, mixer.part, Part((), hidden), states=mixer.states)


def _nemotron_attention(f: Fields, hidden: int) -> Layer:
    heads, kv, dim = head_sizes(f, hidden)
    f.ignore("attention_bias")
    if f.get("attention_head_dim") not in (None, dim):
        raise f.fail("attention_head_dim", f"= {shown(f.get('attention_head_dim'))} where the class has heads of {dim}")
    return layer(attention_of(kv, heads, dim, 0), projections(hidden, heads, kv, dim), Part((), hidden))


def _nemotron_mlp(f: Fields, hidden: int) -> Layer:
    return layer(None, mlp(hidden, f.size("intermediate_size"), gated=False, bias=f.flag("mlp_bias")), Part((), hidden))


def _nemotron_moe(f: Fields, hidden: int) -> Layer:
    """Experts, in a narrower latent where `moe_latent_size`, and one shared feed-forward."""
    n, k = expert_counts(f, "n_routed_experts", "num_experts_per_tok")
    bias, width = f.flag("mlp_bias"), f.maybe("moe_latent_size", low=1)
    inside = experts(width or hidden, f.size("moe_intermediate_size"), n, k, gated=False, router=False)
    part = Part((Matrix("router", n, hidden),)) + inside
    if width:
        part += Part((Matrix("fc1_latent_proj", width, hidden, bias=bias),
                      Matrix("fc2_latent_proj", hidden, width, bias=bias)))
    part += mlp(hidden, f.size("moe_shared_expert_intermediate_size"), gated=False, bias=bias, prefix="shared_experts.")
    f.ignore("n_shared_experts")
    return layer(None, part, Part((), hidden))


FAMILIES: dict[str, Builder] = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "olmo_hybrid": _olmo_hybrid,
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
}
