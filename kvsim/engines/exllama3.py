"""KV memory of ExLlamaV3 caches: pages of 256 tokens, fp16 or 2 to 8 bits a side with an fp16 scale per 32 values."""

from __future__ import annotations

import re

from kvsim.engines.exllama import cached_layers, length, notes, packed
from kvsim.engines.result import Cache, Memory
from kvsim.errors import KvsimError, shown
from kvsim.model import ModelSpec

NAMES = ("exllamav3", "exl3")
ALIASES = {"ctx": "tokens", "max_num_tokens": "tokens", "cache-size": "tokens", "cs": "tokens", "cq": "cache",
           "cache-quant": "cache", "cache-mode": "cache"}  # fmt: skip
PAGE = 256


def memory(model: ModelSpec, *, tokens: int = 0, cache: str = "fp16") -> Memory:
    """Bytes of the cache of `tokens` rows, rounded up to pages of 256 (0: the model's own context).

    cache: fp16, one number of bits for both sides (`q4`, `4`), or two (`6,4`: keys, values). Raises KvsimError for bits
    outside 2 to 8.
    """
    asked = length(model, tokens)
    rows = -(-asked // PAGE) * PAGE
    owned = cached_layers(model)
    k_block, v_block = _blocks(cache)
    k = sum(packed(a.n_kv_heads, a.k_dim, k_block, cache) for a in owned) * rows
    v = sum(packed(a.n_kv_heads, a.v_dim, v_block, cache) for a in owned) * rows
    said = notes(model)
    if rows != asked:
        said += (f"ExLlamaV3 wants whole pages of {PAGE}: {asked} tokens became {rows}",)
    held = (Cache("kv", k + v, rows, len(owned), k, v),)
    return Memory(engine="exllamav3", kv_bytes=k + v, k_bytes=k, v_bytes=v, caches=held, tokens=rows,
                  blocks=rows // PAGE, block_tokens=PAGE, warnings=said)  # fmt: skip


def _blocks(cache: str) -> tuple[int, int]:
    """Bytes of 32 values on each side: 4 a bit, and a scale of 2 (cache/quant.py)."""
    text = cache.strip().lower()
    if text in ("fp16", "f16"):
        return 64, 64
    found = re.fullmatch(r"q?([2-8])(?:[,_]q?([2-8]))?", text)
    if not found:
        raise KvsimError(f"cache {shown(cache)} must be fp16, bits from 2 to 8 (q4), or both sides' (6,4)")
    k_bits = int(found.group(1))
    return 4 * k_bits + 2, 4 * int(found.group(2) or k_bits) + 2
