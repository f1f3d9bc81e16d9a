"""KV memory of ExLlamaV2 caches: every layer at full length, packed codes with an fp16 scale per 32 values."""

from __future__ import annotations

from kvsim.engines.result import Cache, Memory
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.model import Attention, ModelSpec
from kvsim.workload import whole

NAMES = ("exllamav2", "exllama", "exl2")
ALIASES = {"ctx": "tokens", "l": "tokens", "max_seq_len": "tokens", "cache-size": "tokens", "cache-mode": "cache"}
BLOCKS = {"fp16": (64, 64), "fp8": (32, 32), "q8": (34, 34), "q6": (34, 18), "q4": (18, 18)}
"""Bytes of 32 values of K and of V (cache.py): q6 has keys of 8 bits and values of 4; fp8 has no scales."""
SPELLINGS = {"f16": "fp16", "16bit": "fp16", "8bit": "fp8", "cache_8bit": "fp8", "4bit": "q4", "cache_4bit": "q4"}


def memory(model: ModelSpec, *, tokens: int = 0, cache: str = "fp16", batch_size: int = 1) -> Memory:
    """Bytes of the cache for `batch_size` rows of `tokens` tokens (0: the model's own context).

    cache: fp16, q8, q6, q4, or fp8 (`cache_8bit`, the older one). All but fp16 unpack one layer at a time into an fp16
    scratch on each device, counted here once. Sliding windows do not bound these caches. Raises KvsimError for an
    unknown format or heads that do not divide by 32.
    """
    name = SPELLINGS.get(cache.lower(), cache.lower())
    if name not in BLOCKS:
        raise KvsimError(f"cache {shown(cache)} is unknown{did_you_mean(name, BLOCKS)}: {', '.join(BLOCKS)}")
    rows = length(model, tokens) * int(whole(batch_size, "batch_size", low=1, high=2**20))
    owned = cached_layers(model)
    k = sum(packed(a.n_kv_heads, a.k_dim, BLOCKS[name][0], name) for a in owned) * rows
    v = sum(packed(a.n_kv_heads, a.v_dim, BLOCKS[name][1], name) for a in owned) * rows
    caches = [Cache("kv", k + v, rows, len(owned), k, v)]
    if name != "fp16":
        widest = max((a.n_kv_heads * (a.k_dim + a.v_dim) for a in owned), default=0)
        caches.append(Cache("fp16 scratch of one layer", 2 * widest * rows, rows, 1))
    return Memory(engine="exllamav2", kv_bytes=sum(c.bytes for c in caches), k_bytes=k, v_bytes=v,
                  caches=tuple(caches), tokens=rows, warnings=notes(model))  # fmt: skip


def length(model: ModelSpec, tokens: int) -> int:
    """The rows asked for, or the model's context."""
    rows = int(whole(tokens, "tokens", high=2**40)) or model.max_context
    if not rows:
        raise KvsimError("tokens is needed: this model does not state its context")
    return rows


def cached_layers(model: ModelSpec) -> list[Attention]:
    """The attention of every layer that stores rows; latent attention is stored as full heads by these engines."""
    found = []
    for layer in model.layers:
        a = layer.attention
        if a is None or a.kind in ("shared", "cross"):
            continue
        if a.kind not in ("full", "sliding", "chunked"):
            raise KvsimError(f"ExLlama has no cache for {a.kind} layers")
        found.append(a)
    return found


def packed(heads: int, dim: int, block: int, name: str) -> int:
    """Bytes of one row of one layer and side."""
    if block != 64 and dim % 32:
        raise KvsimError(f"cache={name}: heads of {dim} values are not divisible by 32; use fp16")
    return heads * dim * block // 32


def notes(model: ModelSpec) -> tuple[str, ...]:
    """What the figure leaves out."""
    return ("recurrent state is not counted",) if any(layer.states for layer in model.layers) else ()
