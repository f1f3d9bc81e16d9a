"""Rarer decoders: DBRX, RWKV-4, Hunyuan-3, Cohere2-MoE, Granite-MoE-SWA, Sarvam, Phi-4-multimodal, Omni."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.decoder import FeedForward, Traits, attention_of, decoder
from kvsim.architectures.experts import deepseek_moe, expert_counts, granite_moe, qwen_moe, sparse_layers
from kvsim.architectures.fields import Fields
from kvsim.architectures.latent import mla
from kvsim.architectures.parts import Part, assemble, each, experts, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder, families
from kvsim.model import Layer, Matrix, ModelSpec, State

_ATTN = Traits(qkv_bias="attention_bias", o_bias="attention_bias")


def _dbrx(f: Fields) -> ModelSpec:
    """DBRX: no biases, LayerNorms without bias, experts everywhere; sizes of attention and experts are nested."""
    hidden, heads, count = f.size("d_model"), f.size("n_heads", high=2**16), layer_count(f, "n_layers")
    attn, ffn = f.child("attn_config", "dbrx"), f.child("ffn_config", "dbrx")
    kv = attn.size("kv_n_heads", derive=1)
    if hidden % heads or heads % kv:
        raise f.fail("n_heads", f"= {heads} does not fit d_model = {hidden} and {kv} KV heads")
    n, k = ffn.size("moe_num_experts", derive=4), ffn.size("moe_top_k", derive=1)
    for inner in (attn, ffn):
        inner.ignore("attn_pdrop", "clip_qkv", "ffn_act_fn", "moe_jitter_eps", "moe_loss_weight", "hidden_size",
                     "moe_normalize_expert_weights", "uniform_expert_assignment")
    one = layer(attention_of(kv, heads, hidden // heads, 0), projections(hidden, heads, kv, hidden // heads),
                experts(hidden, ffn.size("ffn_hidden_size", derive=3584), n, k), Part((), 2 * hidden))
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=hidden)


def _rwkv(f: Fields) -> ModelSpec:
    """RWKV-4: no cache, five vectors a layer between tokens (three of them in float32)."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    width, inner = f.size("attention_hidden_size", derive=hidden), f.size("intermediate_size", derive=4 * hidden)
    f.ignore("rescale_every", "context_length")
    time_mix = Part((Matrix("key", width, hidden), Matrix("value", width, hidden), Matrix("receptance", width, hidden),
                     Matrix("output", hidden, width)), 2 * width + 3 * hidden)
    channel_mix = Part((Matrix("ffn.key", inner, hidden), Matrix("ffn.receptance", hidden, hidden),
                        Matrix("ffn.value", hidden, inner)), 2 * hidden)
    states = (State("shift", (2, hidden)), State("recurrent", (3, width), 32))
    one = layer(None, time_mix, channel_mix, Part((), 4 * hidden), states=states)
    return assemble(f, (one,) * count, hidden, f.size("vocab_size"), final=4 * hidden)


def _hunyuan3(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """Hunyuan-3: dense first, then experts; biases only on dense and shared feed-forwards."""
    f.raw.setdefault("first_k_dense_replace", 1)
    bias, sparse_at = f.flag("mlp_bias"), sparse_layers(f, layer_count(f))
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    inner = f.size("moe_intermediate_size")
    shared = mlp(hidden, inner * f.size("num_shared_experts"), bias=bias, prefix="shared_experts.")
    sparse, dense = experts(hidden, inner, n, k) + shared, mlp(hidden, f.size("intermediate_size"), bias=bias)
    return lambda i: sparse if sparse_at[i] else dense


def _cohere2_moe(f: Fields) -> ModelSpec:
    """Cohere-2 with experts, one norm a layer; dense first layers have a pattern of windows of their own."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads = f.size("num_attention_heads", high=2**16)
    kv, dim = f.size("num_key_value_heads", derive=heads, high=2**16), f.size("head_dim", derive=hidden // heads)
    if heads % kv:
        raise f.fail("num_key_value_heads", f"= {kv} does not divide num_attention_heads = {heads}")
    sparse_at, first = sparse_layers(f, count), f.size("first_k_dense_replace", low=0, derive=0)
    early, step = f.size("prefix_dense_sliding_window_pattern"), f.size("sliding_window_pattern")
    if not f.has("layer_types"):
        places = [(i, early) if i < first else (i - first, step) for i in range(count)]
        f.raw["layer_types"] = [windows.FULL if (i + 1) % s == 0 else windows.SLIDING for i, s in places]
    spans, bias = windows.typed()(f, count), f.flag("attention_bias")
    n, k = expert_counts(f, "num_experts", "num_experts_per_tok")
    inner, shared = f.size("intermediate_size"), f.size("num_shared_experts", low=0)
    sparse = experts(hidden, inner, n, k)
    if shared:
        sparse += mlp(hidden, inner * shared, prefix="shared_experts.")
    dense = mlp(hidden, f.size("prefix_dense_intermediate_size", derive=inner))
    f.ignore("shared_expert_combination_strategy", "expert_selection_fn")
    attn = projections(hidden, heads, kv, dim, qkv_bias=bias, o_bias=bias) + Part((), hidden)

    def one(i: int) -> Layer:
        return layer(attention_of(kv, heads, dim, spans[i]), attn, sparse if sparse_at[i] else dense)

    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=hidden)


def _phi4_multimodal(f: Fields) -> ModelSpec:
    """Phi-4-multimodal: Phi-3 with adapters and towers, which are not counted."""
    f.notes.append("the towers and adapters of 'phi4_multimodal' are not counted")
    f.ignore(*(n for n in f.raw if n.endswith("_config") or n.startswith(("audio_", "vision_", "speech_", "embd_layer",
                                                                          "img_", "lm_head_bias", "full_attn_mod",
                                                                          "interpolate_factor", "num_lora"))))
    if f.flag("lm_head_bias"):
        raise f.fail("lm_head_bias", "= true is not accounted for")
    f.ignore("attention_bias", "mlp_bias", "vision_lora", "speech_lora")
    return decoder(f, Traits(window=windows.every))


def _omni(f: Fields, thinker: str) -> ModelSpec:
    """Qwen-Omni as published: the thinker is the language model; talker and vocoder are not counted."""
    if not f.has("thinker_config"):
        raise f.fail("thinker_config", f"is missing; {f.model_type!r} cannot be read without it")
    inner = f.child("thinker_config", thinker, thinker)
    for name in ("dtype", "torch_dtype"):
        if f.has(name):
            inner.raw.setdefault(name, f.get(name))
    f.notes.append("talker and vocoder are not counted")
    spec = families()[thinker](inner)
    f.ignore(*f.raw)
    return replace(spec, architecture=f.model_type)


FAMILIES: dict[str, Builder] = {
    "dbrx": _dbrx,
    "rwkv": _rwkv,
    "hy_v3": partial(decoder, traits=replace(_ATTN, qk_norm="head"), feed=_hunyuan3),
    "cohere2_moe": _cohere2_moe,
    "granitemoe_swa": partial(
        decoder, feed=granite_moe,
        traits=replace(_ATTN, window=windows.pattern(4, offset=0, fixed=True),
                       extra=lambda f: f.size("num_attention_heads"))),
    "sarvam_moe": partial(decoder, traits=Traits("attention_bias", qk_norm="head", qk_flag="use_qk_norm"),
                          feed=deepseek_moe),
    "sarvam_mla": partial(mla, feed=deepseek_moe),
    "qwen3_omni_moe_text": partial(decoder, traits=replace(_ATTN, qk_norm="head", window=windows.every), feed=qwen_moe),
    "phi4_multimodal": _phi4_multimodal,
    "phi4mm": _phi4_multimodal,
    "qwen2_5_omni": partial(_omni, thinker="qwen2_5_omni_thinker"),
    "qwen3_omni_moe": partial(_omni, thinker="qwen3_omni_moe_thinker"),
}
