"""Multi-head latent attention: DeepSeek-V2/V3/V3.2, Kimi-K2, GLM-5, MiniCPM3, LongCat; one latent a token."""

from __future__ import annotations

from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.decoder import Feed, Traits, decoder, dense_feed
from kvsim.architectures.experts import deepseek_moe, expert_counts
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, each, experts, head_width, layer, layer_count, mlp
from kvsim.architectures.registry import Builder
from kvsim.errors import shown
from kvsim.model import Attention, Layer, Matrix, ModelSpec

INDEXED = "indexed_attention"


def latent(f: Fields, hidden: int, *, index_dim: int = 0, selected: int = 0) -> tuple[Attention, Part, int]:
    """(attention, its matrices, rank of the query latent or 0) of one MLA module; biases are on down-projections."""
    heads = f.size("num_attention_heads", high=2**16)
    rank, rope = f.size("kv_lora_rank"), f.size("qk_rope_head_dim")
    nope = f.size("qk_nope_head_dim", low=0)
    value = f.size("v_head_dim", derive=hidden // heads or 1)
    bias, q_rank = f.flag("attention_bias"), f.maybe("q_lora_rank", low=1) or 0
    f.ignore("num_key_value_heads", "head_dim")
    width = nope + rope
    if f.get("qk_head_dim") not in (None, width):
        raise f.fail("qk_head_dim", f"= {shown(f.get('qk_head_dim'))} is not the sum of its parts, {width}")
    if q_rank:
        query = Part((Matrix("q_a_proj", q_rank, hidden, bias=bias), Matrix("q_b_proj", heads * width, q_rank)), q_rank)
    else:
        query = Part((Matrix("q_proj", heads * width, hidden),))
    rest = Part((Matrix("kv_a_proj", rank + rope, hidden, bias=bias), Matrix("kv_b_proj", heads * (nope + value), rank),
                 Matrix("o_proj", hidden, heads * value, bias=bias)), rank)
    kind = Attention("mla", heads, 1, rank, rope, qk_dim=width, out_dim=value, index_dim=index_dim, selected=selected)
    return kind, query + rest, q_rank


def indexer(f: Fields, hidden: int, q_rank: int) -> tuple[int, int, Part]:
    """(key width, selected tokens, matrices) of the lightning indexer of DeepSeek Sparse Attention."""
    heads, width = f.size("index_n_heads", high=2**16), f.size("index_head_dim")
    if not q_rank:
        raise f.fail("q_lora_rank", "is null; the indexer reads the query latent")
    part = Part((Matrix("indexer.wq_b", heads * width, q_rank), Matrix("indexer.wk", width, hidden),
                 Matrix("indexer.weights_proj", heads, hidden)), 2 * width)
    return width, f.size("index_topk"), part


def mla(f: Fields, feed: Feed, traits: Traits | None = None, sparse: bool = False) -> ModelSpec:
    """A decoder whose layers all have latent attention; `sparse`: with an indexer, whose keys are cached beside."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    plain, part, q_rank = latent(f, hidden)
    ffn, norms = feed(f, hidden, traits or Traits()), Part((), 2 * hidden)
    indexed = [False] * count
    own = Part()
    with_index = plain
    if sparse:
        width, top_k, own = indexer(f, hidden, q_rank)
        with_index = latent(f, hidden, index_dim=width, selected=top_k)[0]
        plain = latent(f, hidden, selected=top_k)[0]
        indexed = _own_indexers(f, count)
        f.ignore("mlp_bias")
    else:
        windows.full(f, count)

    def one(i: int) -> Layer:
        if indexed[i]:
            return layer(with_index, part, own, norms, ffn(i))
        return layer(plain, part, norms, ffn(i))

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _own_indexers(f: Fields, count: int) -> list[bool]:
    """Which layers have an indexer of their own; the others use the selection of a layer before (GLM-5.2)."""
    windows.layer_types(f, count, (INDEXED, "deepseek_sparse_attention"))
    if f.model_type != "glm_moe_dsa":
        return [True] * count
    types = windows.layer_types(f, count, ("full", "shared"), "indexer_types")
    pattern = f.get("index_topk_pattern")
    step, offset = max(f.size("index_topk_freq", low=0, derive=1), 1), f.size("index_skip_topk_offset", low=0, derive=2)
    if types is not None:
        return [t == "full" for t in types]
    if pattern is not None:
        full = [x in ("F", "full") for x in pattern] if isinstance(pattern, (str, list)) else []
        if len(full) != count or any(x not in ("F", "S", "full", "shared") for x in pattern):
            raise f.fail("index_topk_pattern",
                         f"= {shown(pattern, 30)} does not give F or S for each of {count} layers")
        return full
    return [max(i - offset + 1, 0) % step == 0 for i in range(count)]


def deepseek_v2(f: Fields) -> ModelSpec:
    """DeepSeek-V2; with `use_mla` false (VL2-tiny) plain multi-head attention, as in DeepSeek-MoE."""
    if f.flag("use_mla", default=True):
        return mla(f, deepseek_moe, Traits(mlp_bias="mlp_bias"))
    return deepseek_v1(f)


def deepseek_v1(f: Fields) -> ModelSpec:
    """DeepSeek-MoE and relatives without MLA: all the latent's sizes must be absent or zero."""
    f.ignore("lm_head", "rm_head")
    for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        value = f.get(name)
        if value is not None and f.checked(name, value, low=0) and name != "v_head_dim":
            raise f.fail(name, f"= {value} contradicts use_mla = false")
    if f.get("head_dim") in (None, 0):
        f.raw["head_dim"] = head_width(Fields({}, "llama", f.path), f.size("hidden_size"),
                                       f.size("num_attention_heads"))
    traits = Traits(qkv_bias="attention_bias", o_bias="attention_bias")
    return decoder(f, traits, feed=deepseek_moe)


def _longcat(f: Fields) -> ModelSpec:
    """LongCat-Flash: each layer is two attentions and two feed-forwards with one shortcut MoE: two entries here."""
    hidden, count = f.size("hidden_size"), layer_count(f, "num_layers", "num_hidden_layers")
    kind, part, _ = latent(f, hidden)
    n, k, idle = f.size("n_routed_experts"), f.size("moe_topk"), f.size("zero_expert_num", low=0)
    dense, inner = mlp(hidden, f.size("ffn_hidden_size")), f.size("expert_ffn_hidden_size")
    all_in = experts(hidden, inner, n + idle, k).matrices[:-1]
    moe = Part((*all_in, Matrix("experts.down_proj", hidden, inner, n, min(k, n), True)))
    f.notes.append(f"{idle} of {n + idle} experts compute nothing, so active parameters are an upper bound")
    norms = Part((), 2 * hidden)
    pair = (layer(kind, part, dense, moe, norms), layer(kind, part, dense, norms))
    return assemble(f, pair * count, hidden, f.size("vocab_size"), final=hidden)


FAMILIES: dict[str, Builder] = {
    "deepseek_v2": deepseek_v2,
    "deepseek": deepseek_v1,
    "deepseek_v3": partial(mla, feed=deepseek_moe),
    "kimi_k2": partial(mla, feed=deepseek_moe),
    "mistral4": partial(mla, feed=deepseek_moe),
    "glm4_moe_lite": partial(mla, feed=deepseek_moe),
    "deepseek_v32": partial(mla, feed=deepseek_moe, sparse=True),
    "glm_moe_dsa": partial(mla, feed=deepseek_moe, sparse=True),
    "youtu": partial(mla, feed=dense_feed),
    "minicpm3": partial(mla, feed=dense_feed, traits=Traits(mlp_bias="mlp_bias")),
    "longcat_flash": _longcat,
}
__all__ = ["FAMILIES", "deepseek_v1", "deepseek_v2", "expert_counts", "latent", "mla"]
