"""`python -m runtime.kernels.bench_step`: a model's decode step with compressed caches beside transformers' own.

All caches hold the same random rows, as many as asked for, and take one token in each round; time depends on neither.
Weights are random too. Quantized caches of transformers are timed where their backend is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import DynamicCache, QuantizedCache

from runtime.cache import CompressedCache
from runtime.kernels.bench import Told, parsed
from runtime.prompt import Incoming
from runtime.random_model import config_of, random_model
from runtime.store import Store

BACKENDS = {"quanto": ("optimum.quanto", 0), "hqq": ("hqq", 1)}
"""Packages of transformers' 4-bit caches, and the axis that each takes."""
Rows = list[tuple[Tensor, Tensor]]


def installed(package: str) -> bool:
    """Whether a package, or a part of a namespace, can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def random_rows(cache: CompressedCache, tokens: int) -> Rows:
    """Keys and values [1, H, tokens, d] of each layer."""
    generator, dtype = torch.Generator().manual_seed(0), cache.layers[0].around.dtype
    geometries = [layer.geometry for layer in cache.layers]
    return [tuple(torch.randn(1, g.n_kv_heads, tokens, d, generator=generator).to(dtype)
                  for d in (g.k_dim, g.v_dim)) for g in geometries]  # type: ignore[misc]  # fmt: skip


def compressed(method: str, model: nn.Module, rows: Rows | None, tokens: int) -> tuple[CompressedCache, Rows]:
    """A cache whose layers took the rows in as a prompt; attention over the prompt itself is left out."""
    cache = CompressedCache(method, model)
    rows = random_rows(cache, tokens) if rows is None else rows
    for layer, (k, v) in zip(cache.layers, rows, strict=True):
        layer.update(k, v)
        positions, layer.pending = layer.pending[2], None
        layer.incoming = Incoming(layer.twins, layer.batch_size)
        layer.incoming.add(k, v, k.repeat_interleave(layer.geometry.group, dim=1), positions)
        layer.seen += k.shape[2]
        layer._take_if_complete()
    return cache, rows


def of_transformers(model: nn.Module, rows: Rows) -> Iterator[tuple[str, Any]]:
    """DynamicCache, and 4-bit QuantizedCache with the backends that are here."""
    config = model.config
    caches: list[tuple[str, Any]] = [("DynamicCache", DynamicCache(config=config))]
    for backend, (package, axis) in BACKENDS.items():
        if installed(package):
            cache = QuantizedCache(backend, config, 4, axis, axis, 64, 128)
            caches.append((f"QuantizedCache {backend} 4 bits", cache))
    for name, cache in caches:
        for i, (k, v) in enumerate(rows):
            cache.update(k.clone(), v.clone(), i)
        yield name, cache


@contextmanager
def writing(spent: list[float]) -> Iterator[None]:
    """Seconds in which stores append, let rows go and encode, added to spent[0]."""
    before = {name: getattr(Store, name) for name in ("append", "after_step")}

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def timer(*args: Any, **settings: Any) -> None:
            start = time.perf_counter()
            call(*args, **settings)
            spent[0] += time.perf_counter() - start

        return timer

    try:
        for name, call in before.items():
            setattr(Store, name, timed(call))
        yield
    finally:
        for name, call in before.items():
            setattr(Store, name, call)


def step(model: nn.Module, cache: Any, mine: bool) -> float:
    """Seconds of one step."""
    attention = "kvsim" if mine else "sdpa"
    model.config._attn_implementation = attention
    token = torch.ones((1, 1), dtype=torch.int64)
    start = time.perf_counter()
    model(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


@click.command(cls=Told)
@click.option("--model", "name", default="smollm2-135m", help="Whose shapes the random model has.")
@click.option("--tokens", type=click.IntRange(1), default=8000, help="Tokens held.")
@click.option("--rounds", type=click.IntRange(2), default=9, help="Steps of every cache, alternating.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, help="Threads.")
@click.option("--methods", default="int(bits=4);kivi-4;full", help="Methods, split at semicolons.")
def main(name: str, tokens: int, rounds: int, threads: int, methods: str) -> None:
    """Time decode steps with several caches in one run."""
    chosen = parsed(methods)
    torch.set_num_threads(threads)
    with torch.no_grad():
        caches, model = prepared(name, tokens, chosen)
        show(caches, timed(model, caches, rounds), f"{name}, {tokens:,} tokens, {threads} threads, {rounds} rounds")


def prepared(name: str, tokens: int, methods: Sequence[str]) -> tuple[dict[str, Any], nn.Module]:
    """The model and its caches by name, transformers' first."""
    model = random_model(config_of(name))
    mine, rows = {}, None
    for method in methods:
        mine[method], rows = compressed(method, model, rows, tokens)
    assert rows is not None
    return dict(of_transformers(model, rows)) | mine, model


def timed(model: nn.Module, caches: dict[str, Any], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each cache's steps, and of writing in them; the first round warms up."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in caches}
    for _ in range(rounds + 1):
        for name, cache in caches.items():
            spent = [0.0]
            with writing(spent):
                found[name][0].append(step(model, cache, isinstance(cache, CompressedCache)))
            found[name][1].append(spent[0])
    return {name: (steps[1:], writes[1:]) for name, (steps, writes) in found.items()}


def show(caches: dict[str, Any], found: dict[str, tuple[list[float], list[float]]], title: str) -> None:
    """The medians as a table."""
    table = Table(title=title)
    for column in ("cache", "ms", "fastest", "x DynamicCache", "writing", "path of the first layer"):
        table.add_column(column, justify="left" if column.startswith(("cache", "path")) else "right")
    base = statistics.median(found["DynamicCache"][0])
    for name, (steps, writes) in found.items():
        middle, cache = statistics.median(steps), caches[name]
        mine = isinstance(cache, CompressedCache)
        table.add_row(name, f"{middle * 1e3:.1f}", f"{min(steps) * 1e3:.1f}", f"{base / middle:.2f}",
                      f"{statistics.median(writes) / middle:.1%}" if mine else "",
                      cache.paths()[0] if mine else "")  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
