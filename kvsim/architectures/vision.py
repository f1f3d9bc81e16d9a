"""Parameters of vision and audio towers and of their projectors; they are resident, and their work is not modelled."""

from __future__ import annotations

from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import layer_count
from kvsim.model import Matrix

Tower = tuple[Matrix, ...]


def small(name: str, count: int) -> Tower:
    """`count` small parameters (norms, tables, convolutions) under one name."""
    return (Matrix(name, count, 1),) if count else ()


def linear(name: str, out: int, inside: int, bias: bool = True, copies: int = 1) -> Tower:
    """A projection."""
    return (Matrix(name, out, inside, copies, copies, bias=bias),)


def encoder(prefix: str, hidden: int, layers: int, inner: int, *, bias: bool = True, attn_bias: bool | None = None,
            gated: bool = False, norm: int = 2, key_bias: bool = True, o_bias: bool = True) -> Tower:
    """`layers` transformer blocks with two norms of `norm` vectors each."""
    attn = bias if attn_bias is None else attn_bias
    names = ("gate_proj", "up_proj") if gated else ("fc1",)
    blocks: Tower = ()
    for name, has_bias in (("q", attn), ("k", attn and key_bias), ("v", attn), ("o", attn and o_bias)):
        blocks += linear(f"{prefix}.{name}", hidden, hidden, has_bias, layers)
    for name in names:
        blocks += linear(f"{prefix}.{name}", inner, hidden, bias, layers)
    norms = small(f"{prefix}.norms", 2 * norm * hidden * layers)
    return blocks + linear(f"{prefix}.fc2", hidden, inner, bias, layers) + norms


def _square(f: Fields, name: str) -> None:
    """[n, n], in the file or as the class default, becomes n."""
    value = f.get(name) or f.default(name)
    if isinstance(value, list) and value and all(x == value[0] for x in value):
        f.raw[name] = value[0]


def _pixels(f: Fields) -> int:
    """Values of one patch: channels x patch x patch."""
    _square(f, "patch_size")
    side = f.size("patch_size", high=2**12)
    return f.size("num_channels", "in_channels", "in_chans", derive=3, high=64) * side * side


def _grid(f: Fields) -> int:
    """Patches of one square image."""
    _square(f, "image_size")
    _square(f, "patch_size")
    return int(f.size("image_size", high=2**16) // f.size("patch_size")) ** 2


def _sizes(f: Fields) -> tuple[int, int, int]:
    """(hidden, layers, feed-forward width) in the usual spelling."""
    f.ignore("num_attention_heads", "attention_heads", "num_heads", "head_dim", "projection_dim", "vocab_size")
    return f.size("hidden_size"), layer_count(f), f.size("intermediate_size")


def clip(f: Fields) -> Tower:
    """CLIP's image encoder."""
    hidden, layers, inner = _sizes(f)
    rest = hidden * (_pixels(f) + _grid(f) + 2) + 4 * hidden
    return encoder("vision", hidden, layers, inner) + small("vision.rest", rest)


def siglip(f: Fields) -> Tower:
    """SigLIP: a convolution with bias, no class token, an attention-pooling head unless switched off."""
    hidden, layers, inner = _sizes(f)
    rest = hidden * (_pixels(f) + 1 + _grid(f)) + 2 * hidden
    return encoder("vision", hidden, layers, inner) + small("vision.rest", rest) + _pooling(f, hidden, inner)


def siglip2(f: Fields) -> Tower:
    """SigLIP-2 with any resolution: positions for `num_patches`."""
    hidden, layers, inner = _sizes(f)
    rest = hidden * (_pixels(f) + 1 + f.size("num_patches")) + 2 * hidden
    return encoder("vision", hidden, layers, inner) + small("vision.rest", rest) + _pooling(f, hidden, inner)


def _pooling(f: Fields, hidden: int, inner: int) -> Tower:
    if not f.flag("vision_use_head", default=True):
        return ()
    return (*linear("vision.head.in", 3 * hidden, hidden), *linear("vision.head.out", hidden, hidden),
            *linear("vision.head.fc1", inner, hidden), *linear("vision.head.fc2", hidden, inner),
            *small("vision.head.rest", 3 * hidden))


def pixtral(f: Fields) -> Tower:
    """Pixtral: RMSNorms, gated, no biases, rotary positions."""
    hidden, layers, inner = _sizes(f)
    f.ignore("image_size")
    return (*encoder("vision", hidden, layers, inner, bias=False, gated=True, norm=1),
            *small("vision.rest", hidden * _pixels(f) + hidden))


def qwen2_vl(f: Fields) -> Tower:
    """Qwen2-VL: patches of two frames, LayerNorms, a merger of 2 x 2 patches."""
    hidden, layers = f.size("embed_dim"), f.size("depth", high=512)
    out = f.size("hidden_size")
    inner = int(hidden * f.number("mlp_ratio", low=0.01, high=64))
    f.ignore("num_heads", "spatial_patch_size")
    rest = hidden * _pixels(f) * f.size("temporal_patch_size", high=64) + 2 * hidden
    return (*encoder("vision", hidden, layers, inner), *small("vision.rest", rest), *_merger(f, hidden, out))


def qwen25_vl(f: Fields) -> Tower:
    """Qwen2.5-VL: RMSNorms, gated feed-forward with biases."""
    hidden, layers, inner = f.size("hidden_size"), f.size("depth", high=512), f.size("intermediate_size")
    f.ignore("num_heads", "fullatt_block_indexes", "window_size", "spatial_patch_size")
    rest = hidden * _pixels(f) * f.size("temporal_patch_size", high=64) + hidden
    return (*encoder("vision", hidden, layers, inner, gated=True, norm=1), *small("vision.rest", rest),
            *_merger(f, hidden, f.size("out_hidden_size")))


def qwen3_vl(f: Fields) -> Tower:
    """Qwen3-VL and Qwen3.5: learned positions; one merger more for each deepstack level (none in Qwen3.5)."""
    hidden, layers, inner = f.size("hidden_size"), f.size("depth", high=512), f.size("intermediate_size")
    f.ignore("num_heads")
    out = f.size("out_hidden_size")
    levels = f.items("deepstack_visual_indexes", "int") or []
    if f.model_type.startswith("qwen3_5"):
        levels = []
    voxels = _pixels(f) * f.size("temporal_patch_size", high=64)
    rest = hidden * (voxels + 1 + f.size("num_position_embeddings")) + 2 * hidden
    wide = hidden * f.size("spatial_merge_size", high=64) ** 2
    more = len(levels)
    deep = (*linear("deepstack.fc1", wide, wide, True, more), *linear("deepstack.fc2", out, wide, True, more),
            *small("deepstack.norms", 2 * wide * more)) if more else ()
    return (*encoder("vision", hidden, layers, inner), *small("vision.rest", rest), *_merger(f, hidden, out), *deep)


def _merger(f: Fields, hidden: int, out: int) -> Tower:
    """Two projections over merged patches."""
    wide = hidden * f.size("spatial_merge_size", high=64) ** 2
    return (*linear("merger.fc1", wide, wide), *linear("merger.fc2", out, wide))


def llama4_vision(f: Fields) -> Tower:
    """Llama-4's encoder with its pixel-shuffle adapter."""
    hidden, layers, inner = _sizes(f)
    mid, out = f.size("projector_input_dim"), f.size("projector_output_dim")
    f.ignore("vision_output_dim", "pixel_shuffle_ratio", "multi_modal_projector_bias", "vision_feature_layer")
    rest = hidden * (_pixels(f) + _grid(f) + 2) + 4 * hidden
    return (*encoder("vision", hidden, layers, inner), *small("vision.rest", rest),
            *linear("adapter.fc1", mid, inner, False), *linear("adapter.fc2", out, out, False))


def whisper_encoder(f: Fields) -> Tower:
    """Whisper's encoder as Voxtral and Qwen-Audio have it: two convolutions, keys without bias."""
    hidden = f.size("hidden_size", "d_model")
    layers = f.size("encoder_layers" if f.has("encoder_layers") else "num_hidden_layers", high=512)
    inner = f.size("encoder_ffn_dim" if f.model_type in ("whisper", "qwen2_audio_encoder") else "intermediate_size")
    f.ignore("num_attention_heads", "encoder_attention_heads", "head_dim", "num_key_value_heads", "vocab_size")
    rest = hidden * (3 * f.size("num_mel_bins") + 1 + 3 * hidden + 1 + f.size("max_source_positions")) + 2 * hidden
    return encoder("audio", hidden, layers, inner, key_bias=False) + small("audio.rest", rest)


def moonvit(f: Fields) -> Tower:
    """Kimi's MoonViT."""
    hidden, layers, inner = _sizes(f)
    table = f.size("pos_emb_height", "init_pos_emb_height") * f.size("pos_emb_width", "init_pos_emb_width") * hidden
    return encoder("vision", hidden, layers, inner) + small("vision.rest",
                                                            hidden * (_pixels(f) + 1) + table + 2 * hidden)


def minimax_vision(f: Fields) -> Tower:
    """MiniMax-M3's encoder: CLIP blocks over patches of two frames with rotary positions."""
    hidden, layers, inner = _sizes(f)
    f.ignore("image_size", "img_token_compression_config", "vision_segment_max_frames", "rope_mode",
             "spatial_merge_size")
    old = f.get("img_token_compression_config")
    frames = old.get("temporal_patch_size") if isinstance(old, dict) else None
    frames = f.size("temporal_patch_size", high=64, derive=2) if frames is None else f.checked("temporal_patch_size",
                                                                                               frames)
    return encoder("vision", hidden, layers, inner) + small("vision.rest", hidden * _pixels(f) * frames + 2 * hidden)


def no_tower(f: Fields) -> Tower:
    """A tower that cannot be counted: nothing, and a note."""
    f.notes.append(f"the parameters of {f.path.rstrip('.')} ({f.model_type}) are not counted")
    f.ignore(*f.raw)
    return ()


def idefics(f: Fields) -> Tower:
    """Idefics3 and SmolVLM: SigLIP without a head."""
    hidden, layers, inner = _sizes(f)
    return encoder("vision", hidden, layers, inner) + small("vision.rest",
                                                            hidden * (_pixels(f) + 1 + _grid(f)) + 2 * hidden)


def internvl(f: Fields) -> Tower:
    """InternViT: layer scales, a class token, learned positions; q, k, v have biases only if `attention_bias`."""
    hidden, layers, inner = _sizes(f)
    norm = 1 if f.get("norm_type") == "rms_norm" else 2
    f.ignore("use_mean_pooling", "projection_dropout", "attention_bias", "layer_scale_init_value", "use_mask_token",
             "norm_type")
    qkv = linear("vision.qkv", hidden, hidden, f.flag("attention_bias"), 3 * layers)
    qk = small("vision.qk_norms", 2 * hidden * layers) if f.flag("use_qk_norm") else ()
    mask = hidden if f.flag("use_mask_token") else 0
    table = (_grid(f) + 1) * hidden if f.flag("use_absolute_position_embeddings", default=True) else 0
    rest = hidden * (_pixels(f) + 1 + 1) + table + mask + layers * hidden * (2 + 2 * norm)
    return (*qkv, *linear("vision.o", hidden, hidden, True, layers), *linear("vision.fc1", inner, hidden, True, layers),
            *linear("vision.fc2", hidden, inner, True, layers), *qk, *small("vision.rest", rest))


def glm4v(f: Fields) -> Tower:
    """GLM-4V: gated blocks as wide as the text model, downsampling and a gated merger."""
    hidden, layers, inner = f.size("hidden_size"), f.size("depth", high=512), f.size("intermediate_size")
    out, merge = f.size("out_hidden_size"), f.size("spatial_merge_size", high=64)
    f.ignore("num_heads")
    rest = hidden * (_grid(f) + _pixels(f) * f.size("temporal_patch_size", high=64) + 1 + 2)
    bias = f.flag("attention_bias")
    down = hidden * merge**2 * out + out
    return (*encoder("vision", hidden, layers, out, bias=False, attn_bias=bias, gated=True, norm=1, o_bias=False),
            *small("vision.rest", rest + down), *linear("merger.proj", out, out, False), *small("merger.norm", 2 * out),
            *linear("merger.gate", inner, out, False, 2), *linear("merger.down", out, inner, False))


def gemma4_vision(f: Fields) -> Tower:
    """Gemma-4's encoder: Gemma blocks (four norms, norms on q and k), a table of positions for each axis."""
    hidden, layers, inner = f.size("hidden_size"), layer_count(f), f.size("intermediate_size")
    heads, kv, dim = f.size("num_attention_heads"), f.size("num_key_value_heads"), f.size("head_dim")
    bias = f.flag("attention_bias")
    f.ignore("global_head_dim", "use_clipped_linears", "default_output_length", "pooling_kernel_size", "standardize")
    rest = 2 * f.size("position_embedding_size") * hidden + hidden * _pixels(f) + layers * (4 * hidden + 2 * dim)
    return (*linear("vision.q", heads * dim, hidden, bias, layers),
            *linear("vision.kv", kv * dim, hidden, bias, 2 * layers),
            *linear("vision.o", hidden, heads * dim, bias, layers),
            *linear("vision.gate_up", inner, hidden, False, 2 * layers),
            *linear("vision.down", hidden, inner, False, layers), *small("vision.rest", rest))


def gemma4_audio(f: Fields) -> Tower:
    """Gemma-4's audio encoder: conformer blocks after two strided convolutions."""
    hidden, layers = f.size("hidden_size"), layer_count(f)
    kernel, out = f.size("conv_kernel_size", high=1024), f.size("output_proj_dims")
    heads = f.size("num_attention_heads")
    channels = f.items("subsampling_conv_channels", "int") or [128, 32]
    if len(channels) != 2 or hidden % heads:
        raise f.fail("subsampling_conv_channels", "must be two, and heads must divide hidden_size")
    a, b = channels
    front = 9 * a + a + 9 * a * b + b
    block = 4 * 4 * hidden * hidden + 5 * hidden * hidden + 3 * hidden * hidden
    small_each = 4 * hidden + hidden // heads + hidden * kernel + 5 * hidden
    f.ignore(*f.raw)
    return (*small("audio.front", front), *linear("audio.in", hidden, 32 * b // 32, False),
            *small("audio.blocks", layers * (block + small_each)), *linear("audio.out", out, hidden))


def mllama_vision(f: Fields) -> Tower:
    """Llama-3.2-Vision's encoder: tiles with gated position tables, local and gated global blocks."""
    hidden, layers, inner = _sizes(f)
    more, tiles = f.size("num_global_layers", high=512, low=0), f.size("max_num_tiles", high=64)
    ratios = f.get("supported_aspect_ratios")
    kinds = len(ratios) if isinstance(ratios, list) else tiles * (tiles + 1) // 2
    f.ignore("intermediate_layers_indices", "supported_aspect_ratios", "vision_output_dim")
    patches = _grid(f) + 1
    tables = 3 + patches * hidden + (kinds + 1) * tiles * (patches + 2) * hidden
    both = encoder("vision", hidden, layers, inner, attn_bias=False)
    if more:
        both += encoder("vision.global", hidden, more, inner, attn_bias=False)
    return both + small("vision.rest", tables + hidden * (1 + _pixels(f)) + 4 * hidden + 2 * more)


def omni_audio(f: Fields) -> Tower:
    """Qwen2.5-Omni's audio encoder: Whisper's without position weights, projected to the text width."""
    hidden, out = f.size("d_model"), f.size("output_dim")
    layers, inner = f.size("encoder_layers", high=512), f.size("encoder_ffn_dim")
    f.ignore("encoder_attention_heads", "max_source_positions", "n_window", "num_hidden_layers")
    rest = hidden * (3 * f.size("num_mel_bins") + 1 + 3 * hidden + 1) + 2 * hidden + 2 * out
    return (*encoder("audio", hidden, layers, inner, key_bias=False), *small("audio.rest", rest),
            *linear("audio.proj", out, hidden))


TOWERS = {
    "internvl_vision": internvl,
    "gemma4_vision": gemma4_vision,
    "gemma4_audio": gemma4_audio,
    "clip_vision_model": clip,
    "siglip_vision_model": siglip,
    "siglip2_vision_model": siglip2,
    "pixtral": pixtral,
    "voxtral_encoder": whisper_encoder,
    "qwen2_audio_encoder": whisper_encoder,
}


def tower_of(f: Fields) -> Tower:
    """The tower of a `model_type`; one that is not known is left out with a note."""
    return TOWERS.get(f.model_type, no_tower)(f)
