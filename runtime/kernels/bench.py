"""`python -m runtime.kernels.bench`: one step's attention by the kernels beside torch's own, in one run, as a table.

Every way is timed once in each round and rounds are many, so that a neighbour's load meets all alike; printed are the
median, the quartiles and the fastest. The roof is what a way reads over the bandwidth measured in the same run, or its
multiply-adds over their measured rate where that is longer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from kvsim.errors import KvsimError
from kvsim.method import parse_method
from runtime import kernels
from runtime.attention import Rule, attend
from runtime.kernels import bench_cuda
from runtime.kernels.load import Library, library
from runtime.kernels.pages import planned
from runtime.kernels.plans import Plan
from runtime.parts import Prompt
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.side import Side
from runtime.store import Store

METHODS = ("int(bits=8)", "int(bits=4)", "int(bits=2)", "kivi-4", "kivi-2", "q8_0", "q4_0", "float8", "kmeans(bits=4)")
STREAM_BYTES = 2**28


@dataclass(frozen=True)
class Way:
    """One way to attend: what to call, the bytes that it reads, and its multiply-adds of whole vectors."""

    name: str
    call: Callable[[], object]
    nbytes: int
    products: float = 0.0


@dataclass(frozen=True)
class Shape:
    """KV heads, queries of each, width and tokens."""

    heads: int
    queries: int
    width: int
    tokens: int

    def products(self, *per_vector: float) -> float:
        """Multiply-adds of vectors, from how many of a side's products one does: keys', values'."""
        side = self.heads * self.queries * self.width * self.tokens
        return sum(side / each for each in per_vector)


def ways(shape: Shape, methods: tuple[str, ...], eager: bool) -> list[Way]:
    """Torch's attention in fp32 and bf16, then the methods; random rows, the same for all."""
    generator = torch.Generator().manual_seed(0)
    size = (1, shape.heads, shape.tokens, shape.width)
    k, v = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    q = torch.randn(1, shape.heads * shape.queries, 1, shape.width, generator=generator)
    halves = [x.bfloat16() for x in (q, k, v)]
    lanes = _lanes()
    found = [_torch("sdpa fp32", q, k, v, shape.products(lanes, lanes)),
             _torch("sdpa bf16", *halves, shape.products(lanes, lanes))]  # fmt: skip
    for method in ("full", *methods):
        dtype = torch.bfloat16 if method == "full" else torch.float32
        store = _store(method, shape, k.to(dtype), v.to(dtype))
        held = sum(p.nbytes for _, p in store.pages())
        path = kernels.path(store)
        mine, rule = q.to(dtype), Rule(shape.width**-0.5)
        name = "full bf16" if method == "full" else method
        products = shape.products(*(_per_vector(side) for side in store.sides.values()))
        found.append(Way(f"{name}: {path}", lambda s=store, x=mine, r=rule: attend(s, x, r), held, products))
        if eager and method != "full":
            found.append(Way(f"{name}: eager", lambda s=store, x=mine, r=rule: _eager(s, x, r), held))
    return found


def _lanes() -> int:
    found = library()
    return found.lanes if isinstance(found, Library) else 8


def _per_vector(side: Side) -> float:
    """Products that one multiply-add does: a vector's floats, or its bytes over the three digits of an fp32 factor."""
    found = planned(side.format, side.setting.device)
    dots = isinstance(found, Plan) and found.dots
    return _lanes() * 4 / 3 if dots else _lanes()


def multiply_rate() -> float:
    """Multiply-adds of whole vectors a second, on one thread."""
    found, count, best = library(), 3_000_000, float("inf")
    if not isinstance(found, Library):
        return float("inf")
    for _ in range(20):
        start = time.perf_counter()
        found.multiply(count)
        best = min(best, time.perf_counter() - start)
    return count / best


def _torch(name: str, q: Tensor, k: Tensor, v: Tensor, products: float) -> Way:
    """Queries of a KV head as rows: several times faster here than torch's own grouped queries, which copy the keys."""
    rows = q.reshape(1, k.shape[1], -1, k.shape[3])
    held = 2 * k.numel() * k.element_size()
    return Way(name, lambda: functional.scaled_dot_product_attention(rows, k, v), held, products)


def _eager(store: Store, q: Tensor, rule: Rule) -> None:
    before = os.environ.get("KVSIM_KERNELS")
    os.environ["KVSIM_KERNELS"] = "eager"
    try:
        attend(store, q, rule)
    finally:
        if before is None:
            del os.environ["KVSIM_KERNELS"]
        else:
            os.environ["KVSIM_KERNELS"] = before


def _store(method: str, shape: Shape, k: Tensor, v: Tensor) -> Store:
    geometry = Geometry(shape.heads * shape.queries, shape.heads, shape.width, shape.width)
    store = Store(LayerTwins(parse_method(method), geometry, Surroundings(k.dtype)))
    store.take_prompt(Prompt(k, v, shape.width**-0.5), torch.arange(shape.tokens)[None])
    return store


def timed(found: list[Way], rounds: int) -> list[list[float]]:
    """Seconds of every way in every round."""
    seconds: list[list[float]] = [[] for _ in found]
    for way in found:
        way.call()
    for _ in range(rounds):
        for way, taken in zip(found, seconds, strict=True):
            start = time.perf_counter()
            way.call()
            taken.append(time.perf_counter() - start)
    return seconds


class Told(click.Command):
    """What is wrong with a question is one line and exit status 2, as everywhere in kvsim."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except KvsimError as error:
            said = click.ClickException(str(error))
            said.exit_code = 2
            raise said from None


@click.command(cls=Told)
@click.option("--on", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Whose kernels.  [cpu]")
@click.option("--batch", type=click.IntRange(1), default=8, help="Sequences, with --on cuda.")
@click.option("--heads", type=click.IntRange(1), default=8, help="KV heads.")
@click.option("--queries", type=click.IntRange(1), default=4, help="Query heads of each.")
@click.option("--width", type=click.IntRange(1), default=128, help="Width of a head.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens held.  [16384; with --on cuda 32768]")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, help="Threads.")
@click.option("--rounds", type=click.IntRange(2), default=40, help="Repetitions, all ways alternating.")
@click.option("--methods", default=";".join(METHODS), help="Methods, split at semicolons.")
@click.option("--eager", is_flag=True, help="Time the eager versions too.")
def main(
    on: str, batch: int, heads: int, queries: int, width: int, tokens: int | None, threads: int, rounds: int,
    methods: str, eager: bool,
) -> None:  # fmt: skip
    """Time one step's attention over a packed cache."""
    chosen = parsed(methods)
    if on == "cuda":
        with torch.inference_mode():
            sizes = (batch, heads, queries, width, tokens or 32_768)
            found_table = bench_cuda.table(sizes, chosen, rounds)
        Console(width=140).print(found_table)
        return
    on_cpu(Shape(heads, queries, width, tokens or 16_384), threads, rounds, chosen, eager)


def parsed(methods: str) -> tuple[str, ...]:
    """The methods of a list with semicolons; KvsimError at once where one is none."""
    found = tuple(methods.split(";"))
    for method in found:
        parse_method(method)
    return found


def on_cpu(shape: Shape, threads: int, rounds: int, methods: tuple[str, ...], eager: bool) -> None:
    """Print the table of the CPU's kernels."""
    torch.set_num_threads(threads)
    stream = torch.ones(STREAM_BYTES // 4)
    with torch.inference_mode():
        found = [*ways(shape, methods, eager), Way("read", stream.sum, STREAM_BYTES)]
        seconds = timed(found, rounds)
    read, reads = found.pop(), seconds.pop()
    bandwidth = read.nbytes / min(reads)
    rate = multiply_rate() * threads
    table = Table(title=f"{shape.heads} KV heads x {shape.queries} queries x {shape.width}, {shape.tokens:,} tokens, "
                        f"{threads} threads, "
                        f"{rounds} rounds; reading {bandwidth / 1e9:.1f} GB/s at best, "
                        f"{read.nbytes / statistics.median(reads) / 1e9:.1f} in the median; "
                        f"{rate / 1e9:.1f} G vector products/s")  # fmt: skip
    for column in ("way", "ms", "quartiles", "fastest", "x sdpa fp32", "of fastest", "GB/s", "limit ms", "roof"):
        table.add_column(column, justify="left" if column == "way" else "right")
    base = seconds[0]
    for way, taken in zip(found, seconds, strict=True):
        middle, quick = statistics.median(taken), min(taken)
        low, _, high = statistics.quantiles(taken, n=4)
        limit = max(way.nbytes / bandwidth, way.products / rate)
        table.add_row(way.name, f"{middle * 1e3:.2f}", f"{low * 1e3:.2f}-{high * 1e3:.2f}", f"{quick * 1e3:.2f}",
                      f"{statistics.median(base) / middle:.2f}", f"{min(base) / quick:.2f}",
                      f"{way.nbytes / quick / 1e9:.1f}", f"{limit * 1e3:.2f}", f"{limit / quick:.0%}")  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
