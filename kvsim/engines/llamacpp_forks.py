"""ik_llama.cpp: llama.cpp's cache without streams or sliding caches, and its own ways of latent attention."""

from __future__ import annotations

from kvsim.engines import llamacpp
from kvsim.engines.result import Memory
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

NAMES = ("ik_llama.cpp", "ik_llama", "ik-llama")
FLAGS = ("n_ctx", "type_k", "type_v", "n_parallel", "flash_attn", "n_gpu_layers", "tensor_split")
ALIASES = {spelled: flag for spelled, flag in llamacpp.ALIASES.items() if flag in FLAGS}


def memory(
    model: ModelSpec,
    *,
    n_ctx: int = 0,
    type_k: str = "f16",
    type_v: str = "f16",
    n_parallel: int = 1,
    flash_attn: bool = True,
    mla: int = 3,
    n_gpu_layers: int | None = None,
    tensor_split: tuple[float, ...] | None = None,
) -> Memory:
    """Bytes of the one cache that ik_llama.cpp makes: n_ctx cells for all slots, the full context in every layer.

    mla: its -mla mode. 0 stores full heads, 1 without flash attention a transposed V beside the latent, else K only.
    """
    if mla not in (0, 1, 2, 3):
        raise KvsimError(f"mla must be 0, 1, 2 or 3, got {mla}")
    keeps_v = mla == 1 and not flash_attn
    result = llamacpp.memory(
        model, n_ctx=n_ctx, type_k=type_k, type_v=type_v, n_parallel=n_parallel, kv_unified=True, swa_full=True,
        flash_attn="on" if flash_attn else "off", mla=mla > 0, n_gpu_layers=n_gpu_layers, tensor_split=tensor_split,
        version="2025-06-30" if keeps_v else "2026-01-31",
    )  # fmt: skip
    windowed = any(c.name == "SWA" for c in result.caches)
    notes = result.warnings
    if windowed:
        notes += ("ik_llama.cpp keeps the full context in sliding layers",)
    return Memory(
        engine="ik_llama.cpp", kv_bytes=result.kv_bytes, k_bytes=result.k_bytes, v_bytes=result.v_bytes,
        caches=result.caches, state_bytes=result.state_bytes, states=result.states, tokens=result.tokens,
        warnings=notes,
    )  # fmt: skip
