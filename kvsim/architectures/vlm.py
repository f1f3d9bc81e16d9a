"""Models with towers around a language model: where the text fields stand, which tower, how the head is tied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvsim.architectures import vision
from kvsim.architectures.fields import Fields, class_facts
from kvsim.architectures.registry import Builder, families
from kvsim.architectures.vision import Tower, linear, small
from kvsim.errors import shown
from kvsim.model import ModelSpec

Towers = Callable[[Fields, int], Tower]
"""From the outer fields and the text model's width to towers and projectors."""
Tie = Literal["outer", "either", "text", "never"]


@dataclass(frozen=True)
class Around:
    """How a multimodal config wraps its language model."""

    text: str
    towers: Towers
    tie: Tie = "outer"
    field: str = "text_config"
    flat: bool = False


def wrapped(f: Fields, around: Around) -> ModelSpec:
    """The language model of a multimodal config, with towers and the tie that the outer class decides."""
    if around.flat and not f.has(around.field):
        moved = {k: v for k, v in f.raw.items() if not k.endswith("_config")
                 and k not in ("architectures", "model_type")}
        f.raw[around.field] = moved | {"model_type": around.text}
        if around.field not in moved:
            f.notes.append(f"{around.field} is missing: the text fields stand at the top level")
    if not f.has(around.field):
        raise f.fail(around.field, f"is missing; {f.model_type!r} cannot be read without it")
    inner = f.child(around.field, around.text)
    if inner.model_type == f.model_type and around.text.startswith(f.model_type):  # some files repeat the outer name
        inner = f.child(around.field, around.text, around.text)
    builder = families().get(inner.model_type)
    if builder is None or builder is families()[f.model_type]:
        raise inner.fail("model_type", f"= {shown(inner.model_type)} is not a known language model")
    if f.model_type == "voxtral":  # its class also fills a partial text_config with these
        inner.defaults = {**inner.defaults, **class_facts()["voxtral"]["inside"]["text_config"]}
    for name in ("dtype", "torch_dtype"):
        if f.has(name) and not (inner.has("dtype") or inner.has("torch_dtype")):
            inner.raw[name] = f.get(name)
    spec = builder(inner)
    outer = f.flag("tie_word_embeddings")
    tied = {"outer": outer, "either": outer or inner.flag("tie_word_embeddings"), "text": spec.tied,
            "never": False}[around.tie]
    towers = around.towers(f, spec.hidden_size)
    f.ignore(*f.raw)  # what stands outside the text object cannot reach the cache
    for name in ("vision_config", "audio_config"):
        if f.has(name):
            outside = f.child(name, "-", "-")
            outside.ignore(*outside.raw)
    return replace(spec, architecture=f.model_type, towers=towers, tied=tied)


def _seen(f: Fields, kind: str, tower: Callable[[Fields], Tower] | None = None,
          field: str = "vision_config") -> tuple[Tower, Fields]:
    """The tower under `field` and its fields."""
    inner = f.child(field, kind)
    return (tower or vision.tower_of)(inner), inner


def _qwen(f: Fields, hidden: int, kind: str, tower: Callable[[Fields], Tower]) -> Tower:
    """Qwen's towers end at the text width by themselves."""
    inner = f.child("vision_config", kind, kind)
    return tower(inner)


def _llava(f: Fields, hidden: int, kind: str = "clip_vision_model", newline: bool = False) -> Tower:
    """Two projections; the encoder may give several layers at once."""
    tower, inner = _seen(f, kind)
    layers = f.get("vision_feature_layer")
    width = inner.size("hidden_size") * (len(layers) if isinstance(layers, list) else 1)
    bias = f.flag("multimodal_projector_bias", default=True)
    return (*tower, *linear("projector.0", hidden, width, bias), *linear("projector.1", hidden, hidden, bias),
            *small("image_newline", hidden if newline else 0))


def _gemma3(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "siglip_vision_model")
    width = inner.size("hidden_size")
    return (*tower, *linear("projector", hidden, width, False), *small("projector.norm", width))


def _mistral3(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "pixtral")
    width, merge = inner.size("hidden_size"), f.size("spatial_merge_size", high=64)
    layers = f.get("vision_feature_layer")
    count, bias = (len(layers) if isinstance(layers, list) else 1), f.flag("multimodal_projector_bias")
    return (*tower, *small("projector.norm", width), *linear("projector.merge", width, width * merge**2, False),
            *linear("projector.0", hidden, width * count, bias), *linear("projector.1", hidden, hidden, bias))


def _voxtral(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "voxtral_encoder", field="audio_config")
    return (*tower, *linear("projector.0", hidden, inner.size("intermediate_size"), False),
            *linear("projector.1", hidden, hidden, False))


def _llama4(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "llama4_vision_model", vision.llama4_vision)
    return (*tower, *linear("projector", hidden, inner.size("vision_output_dim"), False))


def _kimi(f: Fields, hidden: int) -> Tower:
    inner = f.child("vision_config", "kimi_k25_vision", "kimi_k25_vision")
    merge = inner.items("merge_kernel_size", "int") or [2, 2]
    width = inner.size("hidden_size") * merge[0] * merge[-1]
    return (*vision.moonvit(inner), *small("projector.norm", 2 * f.size("projection_hidden_size")),
            *linear("projector.0", width, width), *linear("projector.1", hidden, width))


def _minimax(f: Fields, hidden: int) -> Tower:
    inner = f.child("vision_config", "minimax_m3_vl_vision", "minimax_m3_vl_vision")
    old = inner.get("img_token_compression_config")
    merge = old.get("spatial_merge_size") if isinstance(old, dict) else None
    merge = inner.size("spatial_merge_size", high=64) if merge is None else inner.checked("spatial_merge_size", merge,
                                                                                          high=64)
    tower, mid = vision.minimax_vision(inner), f.size("projector_hidden_size")
    return (*tower, *linear("projector.0", mid, inner.size("hidden_size")), *linear("projector.1", hidden, mid),
            *linear("merge.0", mid, hidden * merge**2), *linear("merge.1", hidden, mid))


def _lfm2(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "siglip2_vision_model")
    width = inner.size("hidden_size") * f.size("downsample_factor", high=64) ** 2
    mid, bias = f.size("projector_hidden_size"), f.flag("projector_bias")
    norm = 2 * width if f.flag("projector_use_layernorm") else 0
    return (*tower, *small("projector.norm", norm), *linear("projector.0", mid, width, bias),
            *linear("projector.1", hidden, mid, bias))


def _gemma4(f: Fields, hidden: int) -> Tower:
    """Either tower may be absent (null)."""
    found: Tower = ()
    if f.has("vision_config"):
        tower, inner = _seen(f, "gemma4_vision")
        found += (*tower, *linear("embed_vision", hidden, inner.size("hidden_size"), False))
    if f.has("audio_config"):
        tower, inner = _seen(f, "gemma4_audio", field="audio_config")
        found += (*tower, *linear("embed_audio", hidden, inner.size("output_proj_dims"), False))
    return found


def _mllama(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "mllama_vision_model", vision.mllama_vision)
    return (*tower, *linear("projector", hidden, inner.size("vision_output_dim")))


def _idefics(f: Fields, hidden: int) -> Tower:
    kind = "idefics3_vision" if f.model_type == "idefics3" else "smolvlm_vision"
    tower, inner = _seen(f, kind, vision.idefics)
    width = inner.size("hidden_size") * f.size("scale_factor", high=64) ** 2
    return (*tower, *linear("connector", hidden, width, False))


def _paligemma(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "siglip_vision_model")
    return (*tower, *linear("projector", f.size("projection_dim"), inner.size("hidden_size")))


def _internvl(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "internvl_vision")
    width = int(inner.size("hidden_size") * (1 / f.number("downsample_ratio", low=0.01, high=1)) ** 2)
    return (*tower, *small("projector.norm", 2 * width), *linear("projector.0", hidden, width),
            *linear("projector.1", hidden, hidden))


def _omni(f: Fields, hidden: int) -> Tower:
    audio, _ = _seen(f, "qwen2_5_omni_audio_encoder", vision.omni_audio, "audio_config")
    return audio + _qwen(f, hidden, "qwen2_5_omni_vision_encoder", vision.qwen25_vl)


def _qwen2_audio(f: Fields, hidden: int) -> Tower:
    tower, inner = _seen(f, "qwen2_audio_encoder", field="audio_config")
    return (*tower, *linear("projector", hidden, inner.size("d_model")))


def _not_counted(f: Fields, hidden: int) -> Tower:
    """Towers that are left out, and said so."""
    f.notes.append(f"the towers of {f.model_type!r} are not counted")
    return ()


_AROUND = {
    "qwen2_vl": Around("qwen2_vl_text", partial(_qwen, kind="qwen2_vl_vision", tower=vision.qwen2_vl), "either",
                       flat=True),
    "qwen2_5_vl": Around("qwen2_5_vl_text", partial(_qwen, kind="qwen2_5_vl_vision", tower=vision.qwen25_vl), "either",
                         flat=True),
    "qwen3_vl": Around("qwen3_vl_text", partial(_qwen, kind="qwen3_vl_vision", tower=vision.qwen3_vl)),
    "qwen3_vl_moe": Around("qwen3_vl_moe_text", partial(_qwen, kind="qwen3_vl_moe_vision", tower=vision.qwen3_vl)),
    "qwen3_5": Around("qwen3_5_text", partial(_qwen, kind="qwen3_5_vision", tower=vision.qwen3_vl)),
    "qwen3_5_moe": Around("qwen3_5_moe_text", partial(_qwen, kind="qwen3_5_moe_vision", tower=vision.qwen3_vl)),
    "qwen2_5_omni_thinker": Around("qwen2_5_omni_text", _omni),
    "qwen3_omni_moe_thinker": Around("qwen3_omni_moe_text", _not_counted),
    "qwen2_audio": Around("qwen2", _qwen2_audio, "either"),
    "llama4": Around("llama4_text", _llama4, "text"),
    "gemma3": Around("gemma3_text", _gemma3),
    "gemma3n": Around("gemma3n_text", _not_counted),
    "gemma4": Around("gemma4_text", _gemma4),
    "gemma4_unified": Around("gemma4_unified_text", _not_counted),
    "llava_next": Around("llama", partial(_llava, newline=True)),
    "llava_onevision": Around("qwen2", partial(_llava, kind="siglip_vision_model", newline=True), "either"),
    "mllama": Around("mllama_text_model", _mllama, "never"),
    "mistral3": Around("mistral", _mistral3),
    "voxtral": Around("llama", _voxtral, "never"),
    "kimi_k25": Around("deepseek_v3", _kimi),
    "minimax_m3_vl": Around("minimax_m3_vl_text", _minimax, "either"),
    "lfm2_vl": Around("lfm2", _lfm2),
    "idefics3": Around("llama", _idefics),
    "smolvlm": Around("llama", _idefics),
    "paligemma": Around("gemma", _paligemma),
    "internvl": Around("qwen2", _internvl),
    "glm4v": Around("glm4v_text", partial(_qwen, kind="glm4v_vision", tower=vision.glm4v), "either"),
    "glm4v_moe": Around("glm4v_moe_text", partial(_qwen, kind="glm4v_moe_vision", tower=vision.glm4v), "either"),
    "aya_vision": Around("cohere2", _not_counted),
    "cohere2_vision": Around("cohere2", _not_counted),
}
FAMILIES: dict[str, Builder] = {name: partial(wrapped, around=around) for name, around in _AROUND.items()}


def _llava_any(f: Fields) -> ModelSpec:
    """LLaVA: nested as transformers writes it, or flat as the original repository did (tower then not counted)."""
    if f.has("text_config"):
        return wrapped(f, Around("llama", _llava, "either"))
    return families()["llava_llama"](f)


FAMILIES["llava"] = _llava_any
