"""Models with recurrent or convolution layers, alone or between attention layers; delta nets are in delta.py."""

from __future__ import annotations

import math
from functools import partial

from kvsim.architectures import mixers
from kvsim.architectures.decoder import Traits, attention_of
from kvsim.architectures.experts import expert_counts, granite_moe
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, each, experts, head_sizes, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.architectures.windows import FULL, layer_types
from kvsim.errors import shown
from kvsim.model import Layer, ModelSpec

LINEAR = "linear_attention"
_KERNEL_MAX = 256


def _rank(f: Fields, name: str, hidden: int) -> int:
    """The rank of dt: a number, or "auto" for hidden/16 rounded up."""
    if (f.get(name) or f.default(name)) == "auto":
        return math.ceil(hidden / 16)
    return f.size(name)


def _mamba(f: Fields) -> ModelSpec:
    """Mamba-1 and FalconMamba: nothing but mixers."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    inner = f.size("intermediate_size", derive=int(f.number("expand", low=0.01, high=64) * hidden))
    f.ignore("d_inner", "d_model", "ssm_cfg", "num_heads", "head_dim", "n_layer")
    one = mixers.mamba1(hidden, inner, f.size("state_size"), f.size("conv_kernel", high=_KERNEL_MAX),
                        _rank(f, "time_step_rank", hidden), bias=f.flag("use_bias"), conv_bias=f.flag("use_conv_bias"))
    built = layer(None, one.part, Part((), hidden), states=one.states)
    return assemble(f, (built,) * count, hidden, f.size("vocab_size"), final=hidden)


def _mamba2(f: Fields) -> ModelSpec:
    """Mamba-2: nothing but mixers; expand x hidden must be heads x head_dim."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, dim = f.size("num_heads"), f.size("head_dim")
    if f.number("expand", low=0.01, high=64) * hidden != heads * dim:
        raise f.fail("num_heads", f"= {heads} times head_dim = {dim} is not expand x hidden_size")
    f.ignore("intermediate_size", "time_step_rank")
    one = mixers.mamba2(hidden, heads, dim, f.size("state_size"), f.size("n_groups"),
                        f.size("conv_kernel", high=_KERNEL_MAX),
                        bias=f.flag("use_bias"), conv_bias=f.flag("use_conv_bias"))
    built = layer(None, one.part, Part((), hidden), states=one.states)
    return assemble(f, (built,) * count, hidden, f.size("vocab_size"), final=hidden)


def mamba_d(f: Fields, hidden: int, *, inner: int | None = None, norm: bool = True) -> mixers.Mixer:
    """Mamba-2 in the mamba_* spelling (Bamba, Granite 4, Falcon-H1); `inner` where it is not expand x hidden."""
    inner = inner or f.size("mamba_expand", high=64) * hidden
    f.ignore("mamba_expand", "mamba_d_head", "mamba_chunk_size")
    heads = f.size("mamba_n_heads")
    stated = f.get("mamba_d_head")
    dim = inner // heads if stated in (None, "auto") else f.checked("mamba_d_head", stated)
    if heads * dim != inner:
        raise f.fail("mamba_n_heads", f"= {heads} heads of {dim} do not make the inner width {inner}")
    return mixers.mamba2(hidden, heads, dim, f.size("mamba_d_state"), f.size("mamba_n_groups"),
                         f.size("mamba_d_conv", high=_KERNEL_MAX), bias=f.flag("mamba_proj_bias"),
                         conv_bias=f.flag("mamba_conv_bias"), norm=norm)


def _jamba(f: Fields) -> ModelSpec:
    """Jamba: one attention layer a period, experts every other layer."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    mixer = mixers.mamba1(hidden, f.size("mamba_expand", high=64) * hidden, f.size("mamba_d_state"),
                          f.size("mamba_d_conv", high=_KERNEL_MAX), _rank(f, "mamba_dt_rank", hidden),
                          bias=f.flag("mamba_proj_bias"), conv_bias=f.flag("mamba_conv_bias"), norms=True)
    period, offset = f.size("attn_layer_period"), f.size("attn_layer_offset", low=0)
    moe_period, moe_offset = f.size("expert_layer_period"), f.size("expert_layer_offset", low=0)
    if offset >= period or moe_offset >= moe_period:
        raise f.fail("attn_layer_offset", "and expert_layer_offset must be below their periods")
    inner, count_experts = f.size("intermediate_size"), f.size("num_experts")
    dense, sparse = mlp(hidden, inner), Part()
    if count_experts > 1:
        n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
        sparse = experts(hidden, inner, n, k)
    f.ignore("num_experts_per_tok", "sliding_window", "use_mamba_kernels")
    attn, norms = projections(hidden, heads, kv, dim), Part((), 2 * hidden)

    def one(i: int) -> Layer:
        ffn = sparse if count_experts > 1 and i % moe_period == moe_offset else dense
        if i % period == offset:
            return layer(attention_of(kv, heads, dim, 0), attn, ffn, norms)
        return layer(None, mixer.part, ffn, norms, states=mixer.states)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _bamba(f: Fields) -> ModelSpec:
    """Bamba: Mamba-2 with attention at `attn_layer_indices`."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    at = set(f.items("attn_layer_indices", "int") or ())
    if any(not 0 <= i < count for i in at):
        raise f.fail("attn_layer_indices", f"= {shown(sorted(at), 40)} reaches outside {count} layers")
    ffn = mlp(hidden, f.size("intermediate_size"), bias=f.flag("mlp_bias"))
    return _mixed(f, hidden, [FULL if i in at else LINEAR for i in range(count)], mamba_d(f, hidden), ffn)


def _granite_hybrid(f: Fields) -> ModelSpec:
    """Granite 4: attention where `layer_types` says, experts (or none) and a shared feed-forward."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    types = layer_types(f, count, (FULL, LINEAR)) or [LINEAR] * count
    if f.size("num_local_experts", low=0):
        part = granite_moe(f, hidden, Traits())(0)
    else:
        part = mlp(hidden, f.size("shared_intermediate_size"), prefix="shared_mlp.")
        f.ignore("intermediate_size", "num_experts_per_tok")
    if LINEAR in types:
        return _mixed(f, hidden, types, mamba_d(f, hidden), part)
    f.ignore(*(name for name in f.raw if name.startswith("mamba_")))
    return _mixed(f, hidden, types, mixers.Mixer(Part(), ()), part)


def _mixed(f: Fields, hidden: int, types: list[str], mixer: mixers.Mixer, ffn: Part) -> ModelSpec:
    """Attention or mixer in each layer, the same feed-forward after it."""
    heads, kv, dim = head_sizes(f, hidden)
    bias = f.flag("attention_bias")
    attn, norms = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias), Part((), 2 * hidden)

    def one(i: int) -> Layer:
        if types[i] == FULL:
            return layer(attention_of(kv, heads, dim, 0), attn, ffn, norms)
        return layer(None, mixer.part, ffn, norms, states=mixer.states)

    return assemble(f, each(len(types), one), hidden, f.size("vocab_size"), final=hidden)


def _falcon_h1(f: Fields) -> ModelSpec:
    """Falcon-H1: attention and Mamba-2 side by side in every layer; `mamba_d_ssm` is the mixer's width."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    inner = f.maybe("mamba_d_ssm", low=1)
    n, stated = f.size("mamba_n_heads"), f.get("mamba_d_head")
    if "mamba_d_ssm" not in f.raw and isinstance(stated, int) and not isinstance(stated, bool) and inner != n * stated:
        inner = n * stated  # files from before the field: the class default does not fit their heads
        f.notes.append(f"mamba_d_ssm is missing: {inner}, from mamba_n_heads x mamba_d_head")
    mixer = mamba_d(f, hidden, inner=inner, norm=f.flag("mamba_rms_norm"))
    f.ignore("attn_layer_indices", "mamba_use_mlp", "mamba_norm_before_gate")
    bias, mlp_bias, out = f.flag("attention_bias"), f.flag("mlp_bias"), f.flag("projectors_bias")
    mixed = Part(tuple(m if m.name != "out_proj" else type(m)(m.name, m.out_features, m.in_features, bias=out)
                       for m in mixer.part.matrices), mixer.part.small)
    one = layer(attention_of(kv, heads, dim, 0), mixed, projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias),
                mlp(hidden, f.size("intermediate_size"), bias=mlp_bias), Part((), 2 * hidden), states=mixer.states)
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=hidden)


def _recurrent_gemma(f: Fields) -> ModelSpec:
    """RecurrentGemma: two recurrent blocks to one with local attention, feed-forward of half the stated width."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    width, kernel = f.size("lru_width", derive=hidden), f.size("conv1d_width", low=2, high=_KERNEL_MAX)
    if width % heads:
        raise f.fail("lru_width", f"= {width} is no multiple of {heads} heads")
    cycle = f.items("block_types", "str") or f.items("_block_types", "str") or ["recurrent", "recurrent", "attention"]
    if not set(cycle) <= {"recurrent", "attention"}:
        raise f.fail("block_types", f"= {shown(cycle)} has kinds other than recurrent and attention")
    mixer, bias = mixers.gated_lru(hidden, width, heads, kernel), f.flag("attention_bias")
    attn = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=True)
    window = f.size("attention_window_size")
    rest = mlp(hidden, f.size("intermediate_size", low=2) // 2, bias=True) + Part((), 2 * hidden)

    def one(i: int) -> Layer:
        if cycle[i % len(cycle)] == "attention":
            return layer(attention_of(kv, heads, dim, window), attn, rest)
        return layer(None, mixer.part, rest, states=mixer.states)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def lfm2(f: Fields, moe: bool = False) -> ModelSpec:
    """LFM2: short convolutions between attention layers; the stated feed-forward width may be adjusted."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    types = layer_types(f, count, (FULL, "conv"))
    at = f.items("full_attn_idxs", "int")
    if types is None:
        types = [FULL if at is None or i in at else "conv" for i in range(count)]
    mixer = mixers.short_conv(hidden, f.size("conv_L_cache", high=_KERNEL_MAX), f.flag("conv_bias"))
    f.ignore("num_heads", "block_dim", "conv_dim", "conv_dim_out", "block_mlp_init_scale", "block_out_init_scale",
             "block_use_swiglu", "block_norm_eps", "block_use_xavier_init", "conv_use_xavier_init", "use_pos_enc")
    inner = f.size("block_ff_dim", "intermediate_size")
    if not moe and f.flag("block_auto_adjust_ff_dim"):
        inner = int(f.number("block_ffn_dim_multiplier") * int(2 * inner / 3))
        step = f.size("block_multiple_of")
        inner = step * -(-inner // step)
    f.ignore("block_ffn_dim_multiplier", "block_multiple_of")
    dense, first, sparse = mlp(hidden, inner), count, Part()
    if moe:
        n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
        sparse, first = experts(hidden, f.size("moe_intermediate_size"), n, k), f.size("num_dense_layers", low=0)
        f.ignore("use_expert_bias")
    attn = projections(hidden, heads, kv, dim) + Part((), 2 * dim)

    def one(i: int) -> Layer:
        rest = (dense if i < first else sparse) + Part((), 2 * hidden)
        if types[i] == FULL:
            return layer(attention_of(kv, heads, dim, 0), attn, rest)
        return layer(None, mixer.part, rest, states=mixer.states)

    tied = f.flag("tie_embedding", default=f.flag("tie_word_embeddings"))
    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden, tied=tied)


FAMILIES: dict[str, Builder] = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "recurrent_gemma": _recurrent_gemma,
    "lfm2": lfm2,
    "lfm2_moe": partial(lfm2, moe=True),
}
