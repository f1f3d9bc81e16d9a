"""The hook into Hugging Face models: an attention function and a mask function that hand work to the compressed cache."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsim.errors import KvsimError
from runtime.attention import Rule
from runtime.layers import HANDLE, CompressedLayer

NAME = "kvsim"
OURS: ContextVar[bool] = ContextVar("kvsim_mask_is_ours", default=False)
"""Set while a compressed cache has just been asked for its mask sizes: the mask that follows is for it."""


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attention over the layer's store where `key` came from a compressed cache, torch's own otherwise."""
    layer: CompressedLayer | None = getattr(key, HANDLE, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if dropout:
        raise KvsimError("a compressed cache is for inference: put the model in eval mode")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = Rule(scale, float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux"))
    out = layer.attend(query, attention_mask, rule)
    return out.transpose(1, 2).contiguous(), None


def mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """For a compressed cache the 2-D padding mask as it is (rows and causality are the store's business), else sdpa's."""
    if OURS.get():
        OURS.set(False)
        return attention_mask
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def register() -> None:
    """Make the two functions known to transformers under `kvsim`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
