"""The hook into Hugging Face models: attention and mask functions that hand work to the compressed cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim.errors import KvsimError
from runtime.attention import Rule
from runtime.layers import HANDLE, CompressedLayer

NAME = "kvsim"


class HeldRows(int):
    """The mask length that a compressed cache reports: by its type the mask function knows for whom the mask is."""


@dataclass
class Lease:
    """A model whose attention is kvsim's: what it was before, and how many caches are open on it."""

    config: Any
    before: str
    caches: int = 0


_LEASES: dict[int, Lease] = {}
"""By id of the model's config; a lease holds the config, so that the id stays its own."""


def text_config(model: nn.Module) -> Any:
    """The config that the decoder's layers look at."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]


def open_on(model: nn.Module) -> None:
    """Give the model kvsim's attention; the last of as many `close_on` gives it its own back."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    config = text_config(model)
    lease = _LEASES.get(id(config))
    if lease is None:
        lease = Lease(config, config._attn_implementation)
        model.set_attn_implementation(NAME)  # type: ignore[operator]
        if config._attn_implementation != NAME:
            raise KvsimError(
                f"{type(model).__name__} does not use transformers' attention interface, so its cache cannot "
                f"be compressed; models written like Llama, Qwen, Mistral, Gemma, Phi or GPT-2 can"
            )
        _LEASES[id(config)] = lease
    lease.caches += 1


def close_on(model: nn.Module) -> None:
    """One cache less on this model."""
    config = text_config(model)
    lease = _LEASES[id(config)]
    lease.caches -= 1
    if not lease.caches:
        del _LEASES[id(config)]
        model.set_attn_implementation(lease.before)  # type: ignore[operator]


def before(config: Any) -> str:
    """The attention that a model has of its own."""
    lease = _LEASES.get(id(config))
    return "sdpa" if lease is None or lease.before == NAME else lease.before


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over the layer's store where `key` came from a compressed cache, the model's own otherwise."""
    layer: CompressedLayer | None = getattr(key, HANDLE, None)
    if layer is None:
        given = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window, "is_causal": is_causal}
        own = ALL_ATTENTION_FUNCTIONS.get_interface(before(module.config), eager(module))
        more = kwargs | {k: v for k, v in given.items() if v is not None}
        result: tuple[Tensor, Tensor | None] = own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more
        )
        return result
    if dropout:
        raise KvsimError("a compressed cache is for inference: put the model in eval mode")
    if is_causal is False:
        raise KvsimError("this attention is not causal: a compressed cache holds decoders only")
    if sliding_window is not None and sliding_window != layer.geometry.window:
        raise KvsimError(
            f"layer {layer.geometry.layer} attends a window of {sliding_window} where its config was read as "
            f"{layer.geometry.window or 'none'}: this architecture is not supported"
        )
    if kwargs.get("output_attentions"):
        raise KvsimError("attention over a compressed cache hands out no weights: leave output_attentions off")
    unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in HARMLESS]
    if unknown:
        raise KvsimError(f"this attention takes {', '.join(unknown)}, which a compressed cache does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = layer.attend(query, attention_mask, Rule(scale, float(softcap or 0.0), s_aux))
    return out.transpose(1, 2).contiguous(), None


HARMLESS = {"position_ids", "cache_position", "input_ids", "token_type_ids", "mm_token_type_ids", "rope_positions"}
"""Tensors that models hand through to attention without changing what it computes there."""


def eager(module: nn.Module) -> Any:
    """The model file's own eager attention."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def mask(
    *,
    config: Any = None,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """For a compressed cache the 2-D padding mask (rows and causality are the store's business), else the own."""
    if not isinstance(kv_length, HeldRows):
        own = ALL_MASK_ATTENTION_FUNCTIONS[before(config)]
        found: Tensor | None = own(
            config=config,
            kv_length=kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
        return found
    if not allow_is_causal_skip:
        raise KvsimError(
            "this forward wants more than a causal mask (images or blocks that see each other, packed "
            "sequences): a compressed cache holds causal text only"
        )
    return attention_mask
