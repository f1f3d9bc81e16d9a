"""Mixture-of-experts decoders with grouped-query attention: Mixtral, Qwen-MoE, OLMoE, gpt-oss, GLM-MoE, Ernie..."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.decoder import Feed, FeedForward, Traits, decoder, dense_feed, switch
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import Part, experts, layer_count, mlp
from kvsim.architectures.registry import Builder
from kvsim.errors import shown
from kvsim.model import Matrix

_ATTN = Traits(qkv_bias="attention_bias", o_bias="attention_bias")


def expert_counts(f: Fields, count: str, top: str) -> tuple[int, int]:
    """(experts, experts a token) under these names; the second may not exceed the first."""
    n, k = f.size(count, high=2**16), f.size(top, high=2**16)
    if k > n:
        raise f.fail(top, f"= {k} exceeds {count} = {n}")
    return n, k


def every_layer(count: str = "num_local_experts", inner: str = "intermediate_size", *, top: str = "num_experts_per_tok",
                bias: bool = False) -> Feed:
    """Routed experts in every layer, nothing shared."""

    def feed(f: Fields, hidden: int, traits: Traits) -> FeedForward:
        n, k = expert_counts(f, count, top)
        part = experts(hidden, f.size(inner), n, k, bias=bias, router_bias=bias, gated=traits.gated)
        return lambda i: part

    return feed


def qwen_moe(f: Fields, hidden: int, traits: Traits, shared: bool = False) -> FeedForward:
    """Experts every `decoder_sparse_step` layers except `mlp_only_layers`; Qwen2 adds a gated shared expert."""
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok") if f.size("num_experts", low=0) else (0, 0)
    sparse = experts(hidden, f.size("moe_intermediate_size"), n, k)
    if shared:
        one = mlp(hidden, f.size("shared_expert_intermediate_size"), prefix="shared_expert.")
        sparse = sparse + one + Part((Matrix("shared_expert_gate", 1, hidden),))
    dense = mlp(hidden, f.size("intermediate_size"))
    step, only = f.size("decoder_sparse_step"), set(f.items("mlp_only_layers", "int") or ())
    return lambda i: sparse if i not in only and n and (i + 1) % step == 0 else dense


def deepseek_moe(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Dense first layers, then routed experts and shared ones as one wider feed-forward (DeepSeek, GLM, dots)."""
    count = layer_count(f)
    sparse_at = sparse_layers(f, count)
    if True not in sparse_at:
        f.ignore("moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts_per_tok")
        return dense_feed(f, hidden, traits)
    f.get("n_routed_experts", "num_experts")  # some files say both; they must agree
    if not f.has("n_routed_experts") and f.has("num_experts"):
        f.raw["n_routed_experts"] = f.raw["num_experts"]
    n, k = expert_counts(f, "n_routed_experts", "num_experts_per_tok")
    inner = f.size("moe_intermediate_size")
    sparse = experts(hidden, inner, n, k)
    shared = f.maybe("n_shared_experts")
    if shared:
        sparse += mlp(hidden, inner * shared, bias=switch(f, traits.mlp_bias), prefix="shared_experts.")
    f.ignore("intermediate_size", "ep_size")
    if False not in sparse_at:
        return lambda i: sparse
    dense = dense_feed(f, hidden, traits)
    return lambda i: sparse if sparse_at[i] else dense(i)


def sparse_layers(f: Fields, count: int) -> list[bool]:
    """Which layers have experts: `mlp_layer_types`, else all after `first_k_dense_replace`."""
    types = windows.layer_types(f, count, ("sparse", "dense"), "mlp_layer_types")
    first = f.size("first_k_dense_replace", low=0, derive=1 if f.model_type == "glm4_moe_lite" else 0)
    step = f.get("moe_layer_freq")
    if step not in (None, 1) and step != [0] * first + [1] * (count - first):
        raise f.fail("moe_layer_freq", f"= {shown(step, 40)} is not accounted for in {f.model_type!r}")
    return [i >= first if types is None else types[i] == "sparse" for i in range(count)]


def ernie_moe(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Ernie 4.5: experts from a first to a last layer at an interval; the router learns a score correction."""
    bias = f.flag("use_bias")
    n, k = expert_counts(f, "moe_num_experts", "moe_k")
    inner = f.size("moe_intermediate_size")
    sparse = experts(hidden, inner, n, k, correction=True)
    shared = f.size("moe_num_shared_experts", low=0)
    if shared:
        sparse += mlp(hidden, inner * shared, bias=bias, prefix="shared_experts.")
    dense = mlp(hidden, f.size("intermediate_size"), bias=bias)
    count, step = layer_count(f), f.size("moe_layer_interval")
    first, last = f.size("moe_layer_start_index", low=0), f.size("moe_layer_end_index", low=-1)
    last = count - 1 if last == -1 else last
    return lambda i: sparse if first <= i <= last and (i + 1) % step == 0 else dense


def granite_moe(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Granite: experts in every layer, and a shared feed-forward where `shared_intermediate_size` is not 0."""
    n, k = expert_counts(f, "num_local_experts", "num_experts_per_tok")
    part = experts(hidden, f.size("intermediate_size"), n, k)
    shared = f.maybe("shared_intermediate_size")
    if shared:
        part += mlp(hidden, shared, prefix="shared_mlp.")
    return lambda i: part


def typed_moe(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Mellum: `mlp_layer_types` says which layers have experts."""
    types = windows.layer_types(f, layer_count(f), ("sparse", "dense"), "mlp_layer_types")
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    sparse, dense = experts(hidden, f.size("moe_intermediate_size"), n, k), mlp(hidden, f.size("intermediate_size"))
    return lambda i: sparse if types is None or types[i] == "sparse" else dense


def hunyuan_moe(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Hunyuan: experts and one shared feed-forward of the same width in every layer."""
    for name in ("num_experts", "moe_topk"):
        value = f.get(name)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise f.fail(name, "differs between layers, which is not accounted for")
            f.raw[name] = value[0]
    n, k = expert_counts(f, "num_experts", "moe_topk")
    inner = f.size("intermediate_size")
    part = experts(hidden, inner, n, k) + mlp(hidden, inner, prefix="shared_mlp.")
    return lambda i: part


def _sinks(f: Fields) -> int:
    return f.size("num_attention_heads")


_KINDS: dict[str, tuple[Traits, Feed]] = {
    "mixtral": (Traits(window=windows.every), every_layer()),
    "phimoe": (replace(_ATTN, norm="layer", window=windows.every, head_bias="lm_head_bias"), every_layer()),
    "minimax_m2": (Traits(qk_norm="width", window=windows.coded_full), every_layer()),
    "gpt_oss": (replace(_ATTN, window=windows.pattern(2, fixed=True), extra=_sinks), every_layer(bias=True)),
    "olmoe": (replace(_ATTN, qk_norm="width"), every_layer("num_experts")),
    "flex_olmo": (replace(_ATTN, qk_norm="width"), every_layer("num_experts")),
    "qwen2_moe": (Traits("qkv_bias", window=windows.switched_even), partial(qwen_moe, shared=True)),
    "qwen3_moe": (replace(_ATTN, qk_norm="head", window=windows.switched_every), qwen_moe),
    "qwen3_vl_moe_text": (replace(_ATTN, qk_norm="head"), qwen_moe),
    "glm4v_moe_text": (Traits("attention_bias"), deepseek_moe),
    "glm4_moe": (Traits("attention_bias", qk_norm="head", qk_flag="use_qk_norm"), deepseek_moe),
    "dots1": (replace(_ATTN, qk_norm="head", window=windows.from_layer), deepseek_moe),
    "solar_open": (Traits("attention_bias"), deepseek_moe),
    "ernie4_5_moe": (Traits("use_bias", "use_bias", head_bias="use_bias"), ernie_moe),
    "granitemoe": (_ATTN, granite_moe),
    "granitemoeshared": (_ATTN, granite_moe),
    "hunyuan_v1_moe": (replace(_ATTN, qk_norm="head"), hunyuan_moe),
    "mellum": (replace(_ATTN, qk_norm="head", window=windows.typed()), typed_moe),
}
FAMILIES: dict[str, Builder] = {
    name: partial(decoder, traits=traits, feed=feed) for name, (traits, feed) in _KINDS.items()
}
__all__ = ["FAMILIES", "deepseek_moe", "dense_feed", "expert_counts", "qwen_moe"]
