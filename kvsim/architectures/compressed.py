"""DeepSeek-V4: one vector is key and value; a short window of them and compressed entries of everything before."""

from __future__ import annotations

from kvsim.architectures.experts import expert_counts
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, assemble, each, experts, layer, layer_count, mlp
from kvsim.architectures.registry import Builder
from kvsim.architectures.windows import SLIDING, layer_types
from kvsim.errors import shown
from kvsim.model import Attention, Layer, Matrix, ModelSpec

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {0: SLIDING, 4: CSA, 128: HCA}


def _types(f: Fields, count: int) -> list[str]:
    """`layer_types`, else `compress_ratios` (0, 4 or 128; entries beyond the layers are MTP's), else the default."""
    types = f.items("layer_types", "str")
    ratios = f.items("compress_ratios", "int")
    if types is None and ratios is not None:
        if any(r not in _RATIOS for r in ratios):
            raise f.fail("compress_ratios", f"= {shown(ratios, 40)} holds ratios other than 0, 4 and 128")
        types = [_RATIOS[r] for r in ratios]
    if types is None:
        types = [HCA] * min(count, 2) + [CSA if i % 2 else HCA for i in range(count - 2)]
    if len(types) < count:
        raise f.fail("layer_types", f"or compress_ratios has {len(types)} entries for {count} layers")
    f.raw["layer_types"] = types[:count]
    return layer_types(f, count, (SLIDING, CSA, HCA)) or []


def _rates(f: Fields) -> dict[str, int]:
    """Tokens per compressed entry of each kind."""
    inner = f.child("compress_rates", "-") if f.has("compress_rates") else Fields({}, "-", "compress_rates.", f.notes)
    return {CSA: f.maybe("compress_rate_csa", low=1) or inner.size(CSA, derive=4),
            HCA: f.maybe("compress_rate_hca", low=1) or inner.size(HCA, derive=128)}


def _compressor(prefix: str, hidden: int, width: int, rate: int, overlap: int) -> Part:
    """Projections that turn `rate` tokens into one entry; twice as wide for CSA, whose windows overlap."""
    wide = overlap * width
    return Part((Matrix(f"{prefix}kv_proj", wide, hidden), Matrix(f"{prefix}gate_proj", wide, hidden)),
                rate * wide + width)


def deepseek_v4(f: Fields) -> ModelSpec:
    """DeepSeek-V4: hyper-connections of `hc_mult` streams, grouped low-rank output, experts in every layer."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, dim, q_rank = f.size("num_attention_heads", high=2**16), f.size("head_dim"), f.size("q_lora_rank")
    if f.size("num_key_value_heads") != 1 or f.flag("attention_bias") or f.flag("mlp_bias"):
        raise f.fail("num_key_value_heads", "other than 1, or biases, are not accounted for in 'deepseek_v4'")
    types, rates, window = _types(f, count), _rates(f), f.size("sliding_window")
    groups, o_rank, streams = f.size("o_groups"), f.size("o_lora_rank"), f.size("hc_mult", high=64)
    if heads * dim % groups:
        raise f.fail("o_groups", f"= {groups} does not divide {heads} heads of {dim}")
    i_heads, i_dim, top_k = f.size("index_n_heads"), f.size("index_head_dim"), f.size("index_topk")
    f.ignore("num_hash_layers", "mlp_layer_types", "qk_rope_head_dim", "hc_sinkhorn_iters", "expert_dtype",
             "intermediate_size")
    attn = Part((Matrix("q_a_proj", q_rank, hidden), Matrix("q_b_proj", heads * dim, q_rank),
                 Matrix("kv_proj", dim, hidden),
                 Matrix("o_a_proj", o_rank, heads * dim // groups, groups, groups),
                 Matrix("o_b_proj", hidden, groups * o_rank)), q_rank + dim + heads)
    mixes = (2 + streams) * streams
    hyper = Part((Matrix("attn_hc", mixes, streams * hidden), Matrix("ffn_hc", mixes, streams * hidden)),
                 2 * (mixes + 3))
    n, k = expert_counts(f, "n_routed_experts", "num_experts_per_tok")
    inner = f.size("moe_intermediate_size")
    ffn = experts(hidden, inner, n, k) + mlp(hidden, inner, prefix="shared_experts.") + Part((), 2 * hidden)
    if f.size("n_shared_experts") != 1:
        raise f.fail("n_shared_experts", "other than 1 is not accounted for in 'deepseek_v4'")
    index = _compressor("indexer.", hidden, i_dim, rates[CSA], 2)
    index += Part((Matrix("indexer.q_b_proj", i_heads * i_dim, q_rank),
                   Matrix("indexer.weights_proj", i_heads, hidden)))

    def one(i: int) -> Layer:
        if types[i] == SLIDING:
            return layer(Attention("sliding", heads, 1, dim, 0, window), attn, hyper, ffn)
        rate = rates[types[i]]
        if types[i] == HCA:
            kind = Attention("hca", heads, 1, dim, 0, window, compress=rate, compressed_dim=dim)
            return layer(kind, attn, _compressor("compressor.", hidden, dim, rate, 1), hyper, ffn)
        kind = Attention("csa", heads, 1, dim, 0, window, index_dim=i_dim, selected=top_k, compress=rate,
                         compressed_dim=dim)
        return layer(kind, attn, _compressor("compressor.", hidden, dim, rate, 2), index, hyper, ffn)

    last = Matrix("hc_head", streams, streams * hidden)
    spec = assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden, embeddings=(),
                    extra=last.parameters + streams + 1)
    return spec


FAMILIES: dict[str, Builder] = {"deepseek_v4": deepseek_v4}
