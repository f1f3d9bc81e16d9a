"""Zamba 1 and 2: Mamba layers and a few transformer blocks whose weights are used again and again."""

from __future__ import annotations

from dataclasses import replace

from kvsim.architectures import mixers
from kvsim.architectures.decoder import attention_of
from kvsim.architectures.fields import Fields
from kvsim.architectures.hybrids import _rank
from kvsim.architectures.parts import Part, assemble, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.architectures.windows import layer_types
from kvsim.model import Attention, Layer, Matrix, ModelSpec

HYBRID, LINEAR = "hybrid", "linear_attention"


def again(part: Part) -> Part:
    """The same weights used once more: no copies of their own (`copies` 0), the same products."""
    return Part(tuple(replace(m, copies=0) for m in part.matrices))


def _tied_only(f: Fields) -> None:
    """Refuse an untied head: the class then unties the shared blocks too, which no published model does."""
    if not f.flag("tie_word_embeddings"):
        raise f.fail("tie_word_embeddings", f"= false is not accounted for in {f.model_type!r}")


def _shared(f: Fields, hidden: int, inner: int, bias: bool, attn_hidden: int, dim: int) -> tuple[Attention, Part]:
    """One transformer block; it reads the layer's input beside the embedding (2 x hidden)."""
    heads = f.size("num_attention_heads", high=2**16)
    kv = f.size("num_key_value_heads", derive=heads, high=2**16)
    if heads % kv:
        raise f.fail("num_key_value_heads", f"= {kv} does not divide num_attention_heads = {heads}")
    q, k, v, _ = projections(attn_hidden, heads, kv, dim).matrices
    attn = Part((q, k, v, Matrix("o_proj", hidden, heads * dim)))
    return attention_of(kv, heads, dim, 0), attn + mlp(hidden, inner, bias=bias) + Part((), attn_hidden + hidden)


def _zamba(f: Fields) -> ModelSpec:
    """Zamba-1: one shared block, Mamba-1 heads."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    types = layer_types(f, count, (HYBRID, LINEAR), "layers_block_type")
    period, offset = f.size("attn_layer_period"), f.size("attn_layer_offset", low=0)
    if types is None:
        types = [LINEAR, LINEAR, HYBRID] + [HYBRID if i % period == offset else LINEAR for i in range(count - 3)]
    heads = f.size("n_mamba_heads")
    inner = f.size("mamba_expand", high=64) * hidden
    if inner % heads:
        raise f.fail("n_mamba_heads", f"= {heads} does not divide the inner width {inner}")
    mixer = mixers.mamba1(hidden, inner, f.size("mamba_d_state"), f.size("mamba_d_conv", high=256),
                          _rank(f, "mamba_dt_rank", hidden), bias=f.flag("mamba_proj_bias"),
                          conv_bias=f.flag("mamba_conv_bias"), heads=heads)
    wide = f.size("attention_hidden_size", derive=2 * hidden)
    dim = f.size("attention_head_dim", derive=2 * hidden // f.size("num_attention_heads"))
    kind, block = _shared(f, hidden, f.size("intermediate_size"), False, wide, dim)
    f.ignore("attn_layer_period", "attn_layer_offset", "num_logits_to_keep", "hidden_mamba_act")
    layers: list[Layer] = []
    _tied_only(f)
    for name in types:
        own: tuple[Part, ...] = (mixer.part, Part((), hidden))
        if name == HYBRID:
            first = not any(x.attention for x in layers)
            own = (*own, Part((Matrix("linear", hidden, hidden),)), block if first else again(block))
        layers.append(layer(kind if name == HYBRID else None, *own, states=mixer.states))
    return assemble(f, layers, hidden, f.size("vocab_size"), final=hidden)


def _zamba2(f: Fields) -> ModelSpec:
    """Zamba-2: `num_mem_blocks` shared blocks in turn, each use with adapters of its own; Mamba-2 everywhere."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    types = layer_types(f, count, (HYBRID, LINEAR), "layers_block_type")
    if types is None:
        raise f.fail("layers_block_type", "is missing")
    at = [i for i, t in enumerate(types) if t == HYBRID]
    if (stated := f.items("hybrid_layer_ids", "int")) not in (None, at):
        raise f.fail("hybrid_layer_ids", f"= {stated} does not match layers_block_type")
    inner = f.size("mamba_expand", "expansion_factor", high=64) * hidden
    dim = f.maybe("mamba_headdim", low=1)
    heads = f.size("n_mamba_heads") if f.has("n_mamba_heads") or dim is None else max(inner // dim, 1)
    if inner % heads or (dim is not None and heads * dim != inner):
        raise f.fail("n_mamba_heads", f"= {heads} does not fit the inner width {inner}")
    mixer = mixers.mamba2(hidden, heads, inner // heads, f.size("mamba_d_state", "state_size"), f.size("mamba_ngroups"),
                          f.size("mamba_d_conv", "conv_dimension", high=256), bias=f.flag("add_bias_linear"),
                          conv_bias=True)
    width = 2 * hidden // f.size("num_attention_heads")
    wide = f.size("ffn_hidden_size", "intermediate_size", derive=4 * hidden)
    kind, block = _shared(f, hidden, wide, f.flag("add_bias_linear"), 2 * hidden, width)
    rank, adapted = f.size("adapter_rank", "lora_rank"), f.flag("use_shared_attention_adapter",
                                                                "use_shared_attention_lora")
    adapter = Part((Matrix("gate_up_adapter.0", rank, hidden), Matrix("gate_up_adapter.1", 2 * wide, rank)))
    if adapted:
        adapter += Part(tuple(Matrix(f"{x}_adapter.{j}", *shape) for x in "qkv"
                              for j, shape in ((0, (rank, 2 * hidden)), (1, (2 * hidden, rank)))))
    f.ignore("attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "use_mem_rope",
             "conv_dimension",
             "expansion_factor", "use_mem_eff_path", "gated_linear_unit", "ft_lora", "use_long_context",
             "num_logits_to_keep",
             "state_size", "num_mem_blocks", "lora_rank", "use_shared_block_lora", "use_conv_bias")
    if f.flag("ft_lora") or not f.flag("gated_linear_unit", default=True):
        raise f.fail("ft_lora", "or an ungated feed-forward is not accounted for")
    blocks, layers = f.size("num_mem_blocks", high=64), []
    _tied_only(f)
    for i, name in enumerate(types):
        own: tuple[Part, ...] = (mixer.part, Part((), hidden))
        if name == HYBRID:
            use = at.index(i)
            own = (*own, Part((Matrix("linear", hidden, hidden),)), adapter, block if use < blocks else again(block))
        layers.append(layer(kind if name == HYBRID else None, *own, states=mixer.states))
    return assemble(f, layers, hidden, f.size("vocab_size"), final=hidden)


FAMILIES: dict[str, Builder] = {"zamba": _zamba, "zamba2": _zamba2}
