"""The answer of `kvsim.memory`: what a serving engine allocates, cache by cache; None where it has no such figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cache:
    """One allocation of the engine.

    `tokens` are the rows (llama.cpp: cells of one stream) and `layers` the layers it serves; `device` is set where the
    engine was asked to split by device. k_bytes and v_bytes where the engine keeps the sides apart.
    """

    name: str
    bytes: int
    tokens: int | None = None
    layers: int | None = None
    k_bytes: int | None = None
    v_bytes: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Memory:
    """What one device holds, in bytes, except where an engine's split says otherwise in `caches`.

    `kv_bytes` counts every growing cache (indexer and draft layers too); `k_bytes` and `v_bytes` the attention's own
    two sides. `state_bytes` is recurrent state, not in kv_bytes; `states` its parts where the engine shows them.
    `tokens` and `max_concurrency` are the server's.
    `refused`: why the engine would not start with these flags although the figures can be told (the pool is too small).
    `pool_bytes`: what the engine had or was estimated to have for it; `longest_request`: tokens of the longest single
    request that it holds; `tokens_range`: `tokens` at the ends of an estimated pool.
    """

    engine: str
    kv_bytes: int | None = None
    k_bytes: int | None = None
    v_bytes: int | None = None
    caches: tuple[Cache, ...] = ()
    state_bytes: int | None = None
    states: tuple[Cache, ...] = ()
    tokens: int | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    max_concurrency: float | None = None
    warnings: tuple[str, ...] = ()
    refused: str = ""
    pool_bytes: int | None = None
    longest_request: int | None = None
    tokens_range: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, the fields of `kvsim memory --json`."""
        found = asdict(self)
        lists = {"caches": list(found["caches"]), "states": list(found["states"]), "warnings": list(self.warnings)}
        return found | lists
