"""The kernels on a GPU beside torch's own attention: `python -m runtime.kernels.bench --on cuda`.

Every way is captured in a CUDA graph, so that launches cost the device alone, and replayed in rounds between events;
beside it stands a call as Python makes it. Bandwidth is that of a copy on the same device, reading and writing counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from kvsim.errors import KvsimError
from kvsim.method import parse_method
from runtime import kernels
from runtime.attention import Rule, attend
from runtime.parts import Prompt
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.store import Store

COPY_BYTES = 2**31
CALLS = 20


@dataclass(frozen=True)
class Way:
    """One way to attend: what to call, the bytes that it reads."""

    name: str
    call: Callable[[], object]
    nbytes: int


def ways(sizes: tuple[int, int, int, int, int], methods: tuple[str, ...], device: torch.device) -> list[Way]:
    """Torch's attention in bf16, then the methods; sizes: batch, KV heads, queries of each, width, tokens."""
    batch, heads, queries, width, tokens = sizes
    generator = torch.Generator(device).manual_seed(0)
    size = (batch, heads, tokens, width)
    k, v = (torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads * queries, 1, width, generator=generator, device=device, dtype=torch.bfloat16)
    rows = q.reshape(batch, heads, queries, width)  # a KV head's queries as rows: its keys are read once
    found = [Way("sdpa bf16", lambda: functional.scaled_dot_product_attention(rows, k, v), 2 * k.nbytes)]
    for method in ("full", *methods):
        store, rule = _store(method, sizes, k, v), Rule(width**-0.5)
        held = sum(p.nbytes for _, p in store.pages())
        found.append(Way(f"{method}: {kernels.path(store)}", lambda s=store, r=rule: attend(s, q, r)[0], held))
    return found


def _store(method: str, sizes: tuple[int, int, int, int, int], k: Tensor, v: Tensor) -> Store:
    _, heads, queries, width, tokens = sizes
    geometry = Geometry(heads * queries, heads, width, width)
    store = Store(LayerTwins(parse_method(method), geometry, Surroundings(k.dtype, k.device)))
    at = torch.arange(tokens, device=k.device)[None].expand(k.shape[0], -1)
    store.take_prompt(Prompt(k, v, width**-0.5), at)
    return store


def replayed(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of the device for each call, its launches captured once."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return between(graph.replay, rounds)


def between(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds between events around each call."""
    found = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found[3:]


def launched(call: Callable[[], object]) -> float:
    """Seconds of a call as Python makes it, one behind the other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS


def copy_rate(rounds: int) -> float:
    """Bytes a second that a copy reads and writes, in the median."""
    a = torch.ones(COPY_BYTES // 4, device="cuda")
    b = torch.empty_like(a)
    return 2 * COPY_BYTES / statistics.median(between(lambda: b.copy_(a), rounds))


def table(sizes: tuple[int, int, int, int, int], methods: tuple[str, ...], rounds: int) -> Table:
    """All ways timed, their bytes against the copy's rate. Raises KvsimError where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise KvsimError("torch sees no CUDA device here: leave --on cuda away to time the CPU's kernels")
    batch, heads, queries, width, tokens = sizes
    rate = copy_rate(rounds)
    name = torch.cuda.get_device_name()
    found = Table(title=f"{name}: batch {batch}, {heads} KV heads x {queries} queries x {width}, "
                        f"{tokens:,} tokens, {rounds} rounds; a copy moves {rate / 1e9:.0f} GB/s")  # fmt: skip
    for column in ("way", "ms", "fastest", "x sdpa bf16", "GB/s", "of the copy", "ms with launches"):
        found.add_column(column, justify="left" if column == "way" else "right")
    base = 0.0
    for way in ways(sizes, methods, torch.device("cuda")):
        seconds = replayed(way.call, rounds)
        middle = statistics.median(seconds)
        base = base or middle
        found.add_row(way.name, f"{middle * 1e3:.3f}", f"{min(seconds) * 1e3:.3f}", f"{base / middle:.2f}",
                      f"{way.nbytes / middle / 1e9:.0f}", f"{way.nbytes / middle / rate:.0%}",
                      f"{launched(way.call) * 1e3:.3f}")  # fmt: skip
    return found
