"""ollama: what it asks of llama.cpp (num_ctx a request, times the requests in parallel) and where it differs."""

from __future__ import annotations

import re
from dataclasses import replace

from kvsim.engines import llamacpp
from kvsim.engines.result import Memory
from kvsim.errors import KvsimError, shown
from kvsim.model import ModelSpec
from kvsim.workload import whole

NAMES = ("ollama",)
ALIASES = {"n_ctx": "num_ctx", "context-length": "num_ctx", "n_parallel": "num_parallel", "np": "num_parallel",
           "parallel": "num_parallel", "kv-cache-type": "kv_cache_type", "num_batch": "n_batch"}  # fmt: skip
SWA_FROM = (0, 6, 2)
"""Sliding windows bound the cache from this release on; 0.6.0 and 0.6.1 charge Gemma 3 the full context everywhere."""


def memory(
    model: ModelSpec,
    *,
    num_ctx: int = 4096,
    num_parallel: int = 1,
    kv_cache_type: str = "f16",
    flash_attention: bool = False,
    n_batch: int = 512,
    version: str = "0.12",
) -> Memory:
    """Bytes of the cache for num_parallel requests of num_ctx tokens each; ollama multiplies, llama.cpp divides.

    kv_cache_type: f16, q8_0 or q4_0 for both sides (OLLAMA_KV_CACHE_TYPE); without flash attention ollama goes back to
    f16 and only logs it; flash attention is itself forced off where K and V heads differ in width. version: ollama's.
    """
    whole(num_ctx, "num_ctx", low=1, high=2**31)
    whole(num_parallel, "num_parallel", low=1, high=256)
    if kv_cache_type not in ("f16", "q8_0", "q4_0"):
        raise KvsimError(f"kv_cache_type {shown(kv_cache_type)} is not one of f16, q8_0, q4_0")
    notes: list[str] = []
    now = _release(version)
    if flash_attention and _mixed_heads(model):
        flash_attention = False
        notes.append("ollama forces flash attention off where K and V heads differ in width")
    if kv_cache_type != "f16" and not flash_attention:
        notes.append(f"kv_cache_type={kv_cache_type} needs flash attention: ollama falls back to f16 and only logs it")
        kv_cache_type = "f16"
    total = num_ctx * num_parallel
    result = llamacpp.memory(
        model, n_ctx=total, type_k=kv_cache_type, type_v=kv_cache_type, n_parallel=num_parallel, kv_unified=True,
        n_ubatch=n_batch, n_batch=n_batch, swa_full=now < SWA_FROM, flash_attn="on", mla=False,
    )  # fmt: skip
    if now < SWA_FROM and any(c.name == "SWA" for c in result.caches):
        notes.append("this release ignores sliding windows: every layer keeps the full context")
    return replace(result, engine="ollama", warnings=(*notes, *result.warnings))


def _release(version: str) -> tuple[int, ...]:
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?", str(version).strip())
    if not found:
        raise KvsimError(f"version {shown(version)} is not an ollama release like 0.6.0")
    return tuple(int(x or 0) for x in found.groups())


def _mixed_heads(model: ModelSpec) -> bool:
    wide = ((layer.attention.qk_dim, layer.attention.out_dim) for layer in model.layers if layer.attention)
    return any(k != v for k, v in wide)
