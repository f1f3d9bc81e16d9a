"""Models whose code is in their own repository: known layouts mapped onto the plain decoder; nothing of theirs runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvsim.architectures import windows
from kvsim.architectures.classic import Names, classic
from kvsim.architectures.decoder import Traits, attention_of, decoder
from kvsim.architectures.fields import Fields
from kvsim.architectures.latent import deepseek_v1, deepseek_v2
from kvsim.architectures.parts import Part, assemble, head_width, layer, layer_count, mlp, projections
from kvsim.architectures.registry import Builder
from kvsim.errors import shown
from kvsim.model import Layer, Matrix, ModelSpec

LLAMA = Traits()


def _default(f: Fields, **values: object) -> Fields:
    """Fill in what the repository's own configuration class has where the file is silent."""
    for name, value in values.items():
        if f.raw.get(name) is None:
            f.raw[name] = value
    return f


def _qwen1(f: Fields) -> ModelSpec:
    """Qwen-1: MHA with `kv_channels` a head; `intermediate_size` counts gate and up together; only qkv has biases."""
    inner = f.size("intermediate_size", low=2)
    if inner % 2:
        raise f.fail("intermediate_size", f"= {inner} must be even: it counts gate and up")
    if not f.flag("no_bias", default=True):
        raise f.fail("no_bias", "= false is not accounted for")
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads", high=2**16)
    f.ignore("intermediate_size", "use_dynamic_ntk", "use_logn_attn", "seq_length", "use_cache_quantization",
             "use_cache_kernel", "softmax_in_fp32")
    for name in ("use_cache_quantization",):
        if f.flag(name):
            raise f.fail(name, "= true changes what the cache holds; choose a method instead")
    dim = f.size("kv_channels", derive=hidden // heads)
    one = layer(attention_of(heads, heads, dim, 0), projections(hidden, heads, heads, dim, qkv_bias=True),
                mlp(hidden, inner // 2), Part((), 2 * hidden))
    return assemble(f, (one,) * layer_count(f), hidden, f.size("vocab_size"), final=hidden,
                    tied=f.flag("tie_word_embeddings"))


def _minicpm(f: Fields) -> Fields:
    """MiniCPM 1 and 2: Llama with scalings, tied unless the file says otherwise."""
    f.ignore("dim_model_base", "scale_emb", "scale_depth")
    return _default(f, tie_word_embeddings=True)


def _chatglm(f: Fields) -> ModelSpec:
    """ChatGLM 2 and 3, GLM-4-9B: `multi_query_group_num` KV heads if `multi_query_attention`; padded vocabulary."""
    hidden, count = f.size("hidden_size"), layer_count(f, "num_layers")
    heads, kv = f.size("num_attention_heads", high=2**16), 0
    groups = f.maybe("multi_query_group_num", low=1)
    kv = groups if groups and f.flag("multi_query_attention") else heads
    if heads % kv:
        raise f.fail("multi_query_group_num", f"= {kv} does not divide {heads} query heads")
    dim, bias = f.size("kv_channels", derive=hidden // heads), f.flag("add_bias_linear")
    norm = 1 if f.flag("rmsnorm", default=True) else 2
    f.ignore("apply_residual_connection_post_layernorm", "apply_query_key_layer_scaling", "original_rope",
             "pre_seq_len",
             "prefix_projection", "multi_query_group_num")
    if f.has("pre_seq_len"):
        raise f.fail("pre_seq_len", "(prefix tuning) is not accounted for")
    one = layer(attention_of(kv, heads, dim, 0),
                projections(hidden, heads, kv, dim, qkv_bias=bias or f.flag("add_qkv_bias"), o_bias=bias),
                mlp(hidden, f.size("ffn_hidden_size"), bias=bias), Part((), 2 * norm * hidden))
    final = norm * hidden if f.flag("post_layer_norm", default=True) else 0
    return assemble(f, (one,) * count, hidden, f.size("padded_vocab_size", "vocab_size"), final=final,
                    tied=f.flag("tie_word_embeddings"))


def _baichuan(f: Fields) -> ModelSpec:
    """Baichuan 1 and 2: Llama with fused MHA projections; 13B uses ALiBi, which stores nothing more."""
    f.ignore("model_max_length", "gradient_checkpointing", "z_loss_weight")
    return decoder(_default(f, tie_word_embeddings=False), LLAMA)


def _phi_msft(f: Fields) -> ModelSpec:
    """The old file of phi-1, 1.5 and 2, with GPT-2's names, as its own code read it."""
    f.ignore("flash_rotary", "fused_dense", "flash_attn", "rotary_dim", "n_inner")
    if f.maybe("n_head_kv", low=1) not in (None, f.size("n_head")):
        raise f.fail("n_head_kv", "other than n_head is not accounted for")
    return classic(_default(f, tie_word_embeddings=False), Names(norms=1, head_bias=True))


def _phi3small(f: Fields) -> ModelSpec:
    """Phi-3-small: biases everywhere, LayerNorms, gated feed-forward; block-sparse layers still cache every token."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads", high=2**16)
    kv, dim = f.size("num_key_value_heads", derive=heads), head_width(f, hidden, heads)
    if heads % kv:
        raise f.fail("num_key_value_heads", f"= {kv} does not divide num_attention_heads = {heads}")
    f.ignore("dense_attention_every_n_layers", "attention_bias", "ff_dim_multiplier",
             *(n for n in f.raw if n.startswith(("blocksparse_", "gegelu_", "pad_sequence"))))
    f.notes.append("block-sparse layers are taken to cache and attend every token")
    one = layer(attention_of(kv, heads, dim, 0), projections(hidden, heads, kv, dim, qkv_bias=True, o_bias=True),
                mlp(hidden, f.size("ff_intermediate_size"), bias=True), Part((), 4 * hidden))
    return assemble(f, (one,) * layer_count(f), hidden, f.size("vocab_size"), final=2 * hidden,
                    tied=f.flag("tie_word_embeddings", default=True))


def _nemotron_nas(f: Fields) -> ModelSpec:
    """Llama-Nemotron (arXiv:2411.19146): each layer may lack attention or have its own group and feed-forward size."""
    hidden, heads, count = f.size("hidden_size"), f.size("num_attention_heads", high=2**16), layer_count(f)
    dim, bias, ffn_bias = head_width(f, hidden, heads), f.flag("attention_bias"), f.flag("mlp_bias")
    blocks = f.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != count or not all(isinstance(b, dict) for b in blocks):
        raise f.fail("block_configs", f"must be a list of {count} objects")
    f.ignore("num_key_value_heads", "intermediate_size")
    layers = tuple(_nas_layer(f, i, block, (hidden, heads, dim), (bias, ffn_bias)) for i, block in enumerate(blocks))
    return assemble(f, layers, hidden, f.size("vocab_size"), final=hidden)


def _nas_layer(f: Fields, i: int, block: dict[str, object], sizes: tuple[int, int, int],
               biases: tuple[bool, bool]) -> Layer:
    """One searched block; linear replacements, sinks and windows are refused."""
    hidden, heads, dim = sizes
    inner = Fields(block, "nemotron-nas", f"{f.path}block_configs[{i}].", f.notes)
    attn, ffn = inner.child("attention", "-"), inner.child("ffn", "-")
    for part in (attn, ffn):
        for name in ("replace_with_linear", "sparsify", "num_sink_tokens", "window_length", "unshifted_sink"):
            if part.get(name) not in (None, False, 0):
                raise part.fail(name, f"= {shown(part.get(name))} is not accounted for")
    kind, parts = None, [Part((), 0)]
    if not attn.flag("no_op"):
        group = attn.size("n_heads_in_group", high=2**16)
        if heads % group:
            raise attn.fail("n_heads_in_group", f"= {group} does not divide {heads} query heads")
        kind = attention_of(heads // group, heads, dim, 0)
        parts.append(projections(hidden, heads, heads // group, dim, qkv_bias=biases[0], o_bias=biases[0])
                     + Part((), hidden))
    if not ffn.flag("no_op"):
        width = int(2 * ffn.number("ffn_mult", low=0.001, high=1000) * hidden / 3)
        parts.append(mlp(hidden, 256 * -(-width // 256), bias=biases[1]) + Part((), hidden))
    return layer(kind, *parts)


def _text_only(f: Fields, name: str, builder: Builder | None = None, kind: str | None = None) -> ModelSpec:
    """The language model nested under `name`, without the towers, which are left out and said so."""
    from kvsim.architectures.registry import families

    inner = f.child(name, kind)
    chosen = builder or families().get(inner.model_type)
    if chosen is None:
        raise inner.fail("model_type", f"= {shown(inner.model_type)} is not a known language model")
    _skip_towers(f)
    if f.has("torch_dtype") and not inner.has("torch_dtype"):
        inner.raw["torch_dtype"] = f.get("torch_dtype")
    f.ignore("torch_dtype", "tie_word_embeddings", "hidden_size")
    return chosen(inner)


def _skip_towers(f: Fields) -> None:
    """Accept the tower's fields unread and note that they are not counted."""
    f.ignore(*(n for n in f.raw if n.endswith("_config") and n not in ("text_config", "llm_config", "language_config")))
    f.ignore(*(n for n in f.raw if n.startswith(("mm_", "vision_", "vit_", "image_", "img_", "tune_", "unfreeze_",
                                                 "freeze_",
                                                 "embd_layer", "candidate_", "tile_", "global_view", "use_mm",
                                                 "select_",
                                                 "dynamic_image", "force_image", "downsample_ratio", "ps_version",
                                                 "min_dynamic", "max_dynamic", "use_thumbnail", "pad2square",
                                                 "use_backbone_lora",
                                                 "use_llm_lora", "template", "system_message", "ignore_index"))))
    f.notes.append("the vision tower's code is in the model's repository; its parameters are not counted")


def _flat_text(f: Fields, builder: Builder) -> ModelSpec:
    """A vision model whose text fields stand at the top level."""
    _skip_towers(f)
    return builder(f)


def _llava_flat(f: Fields) -> ModelSpec:
    return _flat_text(_default(f, attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
                      partial(decoder, traits=LLAMA))


_BIAS = Traits(qkv_bias="bias", o_bias="bias")
FAMILIES: dict[str, Builder] = {
    "qwen": _qwen1,
    "chatglm": _chatglm,
    "baichuan": _baichuan,
    "xverse": partial(decoder, traits=LLAMA),
    "Yi": partial(decoder, traits=LLAMA),
    "yi": partial(decoder, traits=LLAMA),
    "aquila": partial(decoder, traits=LLAMA),
    "skywork": partial(decoder, traits=LLAMA),
    "orion": partial(decoder, traits=Traits(norm="layer")),
    "internlm": lambda f: decoder(_default(f, bias=True), _BIAS),
    "internlm2": lambda f: decoder(_default(f, bias=False), _BIAS),
    "minicpm": lambda f: decoder(_minicpm(f),
                                 replace(LLAMA, qkv_bias="attention_bias", o_bias="attention_bias")),
    "mimo": partial(decoder, traits=Traits(qkv_bias="attention_bias", window=windows.switched)),
    "stablelm_epoch": lambda f: decoder(f, Traits(qkv_bias="use_qkv_bias", norm="layer")),
    "phi-msft": _phi_msft,
    "phi3small": _phi3small,
    "phi3_v": lambda f: _flat_text(f, partial(decoder, traits=Traits(window=windows.every))),
    "nemotron-nas": _nemotron_nas,
    "deepseek_vl_v2": lambda f: _text_only(f, "language_config", deepseek_v2, "deepseek_v2"),
    "multi_modality": lambda f: _text_only(f, "language_config", None, "llama"),
    "internvl_chat": lambda f: _text_only(f, "llm_config"),
    "kimi_vl": lambda f: _text_only(f, "text_config"),
    "minimax_vl_01": lambda f: _text_only(f, "text_config"),
    "llava_llama": _llava_flat,
    "llava_mistral": lambda f: _flat_text(f, partial(decoder, traits=Traits(window=windows.every))),
    "llava_qwen": lambda f: _flat_text(_default(f, tie_word_embeddings=False),
                                       partial(decoder, traits=Traits(qkv_bias=True, window=windows.switched))),
}
__all__ = ["FAMILIES", "LLAMA", "Matrix", "deepseek_v1"]
