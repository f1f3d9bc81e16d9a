"""Small measurements of the machine at hand: streams, launches, matrix products, attention of a whole prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.timing import Bench, Timed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What transformers calls them."""


@dataclass(frozen=True)
class Point:
    """One measurement: `work` says what was done (bytes; m, n, k; or a layer's shape), the time in seconds."""

    what: str
    work: tuple[tuple[str, Any], ...]
    seconds: float
    spread: float
    clean: float

    @classmethod
    def of(cls, what: str, work: dict[str, Any], timed: Timed) -> Point:
        """A timed piece of work."""
        return cls(what, tuple(work.items()), timed.seconds, timed.spread, timed.clean / timed.repeats)


@dataclass(frozen=True)
class Shape:
    """One layer's attention: sequences, KV heads, query heads of each, head_dim, rows in the cache."""

    batch: int
    heads: int
    group: int
    head_dim: int
    rows: int

    @property
    def work(self) -> dict[str, int]:
        """As columns of a table."""
        return {"batch": self.batch, "n_kv_heads": self.heads, "n_heads": self.heads * self.group,
                "head_dim": self.head_dim, "rows": self.rows}


def streams(bench: Bench, sizes: Sequence[int]) -> Iterator[Point]:
    """Reading (a sum) and copying working sets of so many bytes, repeated in place: the smaller stay in caches."""
    for size in sizes:
        x = torch.ones(size // 4, dtype=torch.float32, device=bench.device)
        loops = max(1, (1 << 22) // size)
        read = bench.time(x.sum, cold=False, loops=loops)
        yield Point.of("read", {"bytes": size}, read)
        half = x[: len(x) // 2]
        y = torch.empty_like(half)

        def copy(y: Tensor = y, half: Tensor = half) -> Tensor:
            return y.copy_(half)

        yield Point.of("copy", {"bytes": size}, bench.time(copy, cold=False, loops=loops))


def launch(bench: Bench) -> Point:
    """The least that one operation costs: one on a handful of values."""
    x = torch.ones(64, device=bench.device)
    return Point.of("launch", {}, bench.time(lambda: x.add_(1.0), cold=False, loops=200))


def products(bench: Bench, shapes: Sequence[tuple[int, int, int]], dtype: str) -> Iterator[Point]:
    """y[m, n] = x[m, k] w[n, k]^T as a model's linear layers do it: other weights at each call, the code warm."""
    kind = DTYPES[dtype]
    largest = max(n * k for _, n, k in shapes)
    pool = torch.randn(max(largest, bench.filler.numel()), device=bench.device).to(kind)
    for m, n, k in shapes:
        x = torch.randn(m, k, device=bench.device).to(kind)
        weights = cycle(pool[: len(pool) // (n * k) * n * k].view(-1, n, k))

        def product(x: Tensor = x, weights: Iterator[Tensor] = weights) -> Tensor:
            return functional.linear(x, next(weights))

        yield Point.of("matmul", {"m": m, "n": n, "k": k, "dtype": dtype}, bench.time(product, least=3, cold=False))


def prefill(bench: Bench, shapes: Sequence[Shape], dtype: str) -> Iterator[Point]:
    """Causal attention of a whole prompt in full precision."""
    for s in shapes:
        q = torch.randn(s.batch, s.heads * s.group, s.rows, s.head_dim, device=bench.device).to(DTYPES[dtype])
        k, v = (torch.randn(s.batch, s.heads, s.rows, s.head_dim, device=bench.device).to(q.dtype) for _ in "kv")

        def attention(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        yield Point.of("prefill", {**s.work, "format": dtype}, bench.time(attention, least=3))
