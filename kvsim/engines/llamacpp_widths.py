"""Widths of a llama.cpp cache from the facts of a log, and which other inputs would explain a size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvsim.engines.llamacpp_log import Context, Value
from kvsim.engines.llamacpp_types import BLOCKS

MIB = 2**20


@dataclass(frozen=True)
class Widths:
    """Values a token of all the cache's layers together on each side, and where that came from."""

    k: int
    v: int
    layers: int
    why: str


def bytes_of(values: int, kind: str) -> float:
    """Bytes of that many values in a cache type."""
    block, size = BLOCKS[kind]
    return values * size / block


def cuda_tail(width: int, kind: str) -> float:
    """Bytes that the CUDA backend adds to a quantized tensor whose rows are not whole blocks of 512 values."""
    return bytes_of(-width % 512, kind) if BLOCKS[kind][0] > 1 else 0


def a_value(kind: str) -> str:
    """Bytes a value, written as bytes of a block over its values."""
    block, size = BLOCKS[kind]
    return f"{size} bytes" if block == 1 else f"{size}/{block} bytes"


def side_widths(facts: dict[str, Value]) -> tuple[Value | None, Value | None]:
    """Widths a layer of K and V: printed, or KV heads times head width, or 2023's embedding width."""
    if "n_embd_k_gqa" in facts and "n_embd_v_gqa" in facts:
        return facts["n_embd_k_gqa"], facts["n_embd_v_gqa"]
    heads = facts.get("n_head_kv", facts.get("n_head"))
    queries, embd = facts.get("n_head"), facts.get("n_embd")
    default = embd // queries if isinstance(embd, int) and isinstance(queries, int) and queries else None
    k, v = facts.get("n_embd_head_k", default), facts.get("n_embd_head_v", default)
    if heads is None or not isinstance(k, int) or not isinstance(v, int):
        return None, None
    if isinstance(heads, int):
        return heads * k, heads * v
    return tuple(h * k for h in heads), tuple(h * v for h in heads)


def layer_widths(k: Value, v: Value, layers: int, total: int) -> list[Widths]:
    """The widths of `layers` layers out of the model's (0: all that store something)."""
    if isinstance(k, int) and isinstance(v, int):
        count = layers or total
        return [Widths(k * count, v * count, count, f"{count} layers x ({k} + {v}) values")] if count else []
    size = max(len(x) for x in (k, v) if isinstance(x, tuple))
    pairs = list(zip(*(x if isinstance(x, tuple) else (x,) * size for x in (k, v)), strict=False))
    owning = [p for p in pairs if p[0]]
    if layers in (0, len(owning)):
        why = f"the {len(owning)} of {len(pairs)} layers that store K and V"
        return [Widths(sum(p[0] for p in owning), sum(p[1] for p in owning), len(owning), why)]
    return [Widths(p[0] * layers, p[1] * layers, layers, f"{layers} layers x ({p[0]} + {p[1]}) values")
            for p, count in sorted(Counter(owning).items(), key=lambda item: abs(item[1] - layers))]  # fmt: skip


def recurrent_layers(context: Context) -> int | None:
    """How many layers keep a state: those without KV heads, or what the attention interval leaves."""
    total, heads = context.get("n_layer"), context.model.get("n_head_kv", context.model.get("n_embd_k_gqa"))
    if isinstance(heads, tuple):
        return sum(1 for h in heads if h == 0)
    interval = context.get("full_interval")
    if total and interval:
        return total - total // interval
    return None


def explanations(printed: float, w: Widths, rows: int, types: tuple[str, str], context: Context) -> tuple[str, ...]:
    """Inputs that would make the printed size: other types, other layer counts, other cells, query heads."""
    hints = []
    for k in BLOCKS:
        for v in sorted({k, types[1]}):
            if (k, v) != types and abs((bytes_of(w.k, k) + bytes_of(w.v, v)) * rows / MIB - printed) < 0.006:
                hints.append(f"types K {k}, V {v}")
    whole = (bytes_of(w.k, types[0]) + bytes_of(w.v, types[1])) * rows / MIB
    if whole <= 0 or printed <= 0:
        return tuple(hints[:2])
    count = printed / whole * w.layers
    if abs(count - round(count)) < 1e-3 and round(count) != w.layers:
        why = "others slide, share or are recurrent"
        hints.append(f"{round(count)} layers that own a cache instead of {w.layers} ({why})")
    cells = printed / whole * rows
    if abs(cells - round(cells)) < 1e-2 and round(cells) % 32 == 0:
        hints.append(f"{round(cells)} cells instead of {rows}")
    heads, kv = context.get("n_head"), context.get("n_head_kv")
    if heads and kv and heads != kv and abs(printed / whole - heads / kv) < 1e-3:
        hints.append("all query heads stored instead of the KV heads")
    return tuple(hints[:4]) or ("none of another type, layer count, cell count or head count gives it: another build?",)
