"""Small measurements of the machine at hand: streams, launches, matrix products, one layer under a method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvsim.method import parse_method
from runtime.attention import Rule
from runtime.layers import CompressedLayer
from runtime.random_model import random_model
from runtime.sharing import Geometry, Surroundings
from runtime.timing import Bench, Timed, steady, switches
from runtime.watch import Watch, lines_of, watching

WARM = 150
"""Rows of the layer that keeps the code warm."""
BETWEEN = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1,
           "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 64, "max_position_embeddings": 4096,
           "tie_word_embeddings": True}
"""A layer that passes by between two layers' attentions."""
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


def layer(
    bench: Bench, method: str, shape: Shape, dtype: str, layers: int, steps: int = 8, eager: bool = False
) -> list[Point]:
    """The last of `layers` layers of a compressed cache: its lines in prefill (without attention) and in decode steps.

    The same code runs as in a model, on random rows, with caches emptied before each step. eager: no compiled kernels.
    """
    parsed = parse_method(method)
    kind, where = DTYPES[dtype], bench.device
    geometry = Geometry(shape.heads * shape.group, shape.heads, shape.head_dim, shape.head_dim, 0, layers - 1, layers)
    own = parsed.at(layers - 1, layers)
    one, other = (CompressedLayer(own, geometry, Surroundings(kind, where)) for _ in "ab")
    rule, watch = Rule(shape.head_dim**-0.5), Watch(where, eager)
    small = Shape(1, shape.heads, shape.group, shape.head_dim, WARM)
    with torch.no_grad(), watching(watch):
        _feed(other, small, WARM, rule)
        watch.clear()
        lost = switches()
        _feed(one, shape, shape.rows, rule)
        took, clean = lines_of(watch.seconds, parsed, "prefill"), float(switches() == lost)
        laps: list[tuple[dict[str, float], int]] = []
        for _ in range(steps + 1):
            # rows come from memory and the code from a cache, as between two layers of a model: another layer ran it,
            # then what stands between them
            bench.evict()
            _feed(other, small, 1, rule)
            _pass_by(where, dtype)
            watch.clear()
            lost = switches()
            _feed(one, shape, 1, rule)
            laps.append((lines_of(watch.seconds, parsed, "decode"), switches() - lost))
    said = {**shape.work, "prompt": shape.rows, "method": method, "path": "fused" if watch.fused else "eager"}
    found = [Point(f"prefill {name}", tuple(said.items()), seconds, 1.0, clean)
             for name, seconds in took.items() if name != "attention"]
    said["rows"] = shape.rows + (steps + 1) // 2
    for name in laps[-1][0]:
        timed = steady([lap.get(name, 0.0) for lap, _ in laps[1:]], [n for _, n in laps[1:]])
        found.append(Point.of(f"decode {name}", said, timed))
    return found


@lru_cache(maxsize=4)
def _between(device: torch.device, dtype: str) -> nn.Module:
    """A small model of one layer: its weights, its kernels and the Python around them."""
    return random_model(BETWEEN, HF_DTYPES[dtype], 1).to(device)


def _pass_by(device: torch.device, dtype: str) -> None:
    """What lies between the attentions of two layers, as transformers runs it for one token.

    Products alone in its place left the code too warm: attention of a short cache took 10 to 20% longer in a model.
    """
    _between(device, dtype)(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)


def _feed(one: CompressedLayer, shape: Shape, count: int, rule: Rule) -> None:
    """Hand `count` new rows and their queries to the layer, as a model does."""
    kind, where = one.around.dtype, one.around.device
    k, v = (torch.randn(shape.batch, shape.heads, count, shape.head_dim, device=where).to(kind) for _ in "kv")
    q = torch.randn(shape.batch, shape.heads * shape.group, count, shape.head_dim, device=where).to(kind)
    one.update(k, v)
    # `update` gives handles to attention; the layer itself knows what is pending
    one.attend(q, None, rule)
