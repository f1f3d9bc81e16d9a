"""One layer's lines under a method: prefill of a lone layer, steps of layers like it inside a small running model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from kvsim.method import Method, parse_method
from runtime.attention import Rule
from runtime.cache import CompressedCache
from runtime.microbench import DTYPES, HF_DTYPES, Point, Shape
from runtime.random_model import random_model
from runtime.running_model import one_pass
from runtime.timing import Bench, steady, switches
from runtime.watch import RUNTIME, Watch, lines_of, watching

WARM = 150
"""Rows of the layers that warm the code up."""
HIDDEN = 576
"""As wide as SmolLM2, or the nearest width that query heads share out evenly."""
Lap = tuple[dict[str, float], int]
"""Seconds by line of one layer in one step, and interruptions meanwhile."""


@lru_cache(maxsize=8)
def carrier(heads: int, group: int, head_dim: int, dtype: str, layers: int, device: torch.device) -> nn.Module:
    """A small model with such attention, whose layers have about as many weights as SmolLM2's (14 MB in fp32)."""
    queries = heads * group
    config = {"model_type": "llama", "hidden_size": queries * round(HIDDEN / queries), "num_attention_heads": queries,
              "num_key_value_heads": heads, "head_dim": head_dim, "vocab_size": 64, "max_position_embeddings": 8192,
              "intermediate_size": 1536 if queries * head_dim < 1024 else 512, "tie_word_embeddings": True}
    return random_model(config, HF_DTYPES[dtype], layers).to(device)


def layer(bench: Bench, method: str, shape: Shape, dtype: str, layers: int, steps: int = 8,
          eager: bool = False) -> list[Point]:
    """Lines of one layer under a method: in prefill (without attention), and in steps of a model of such layers.

    A lone layer takes a prompt of random rows, and every layer of the model gets a copy of it, as the last of `layers`.
    Then the model steps through the code that `measure` runs, with caches emptied where a real one has its head.
    eager: after steps with compiled kernels, as many without, for attention alone; `path` tells the points apart.
    """
    parsed, device = parse_method(method), bench.device
    model = carrier(shape.heads, shape.group, shape.head_dim, dtype, layers, device)
    found: list[Point] = []
    with CompressedCache(parsed, model) as warm, CompressedCache(parsed, model) as cache:
        watch = Watch(device)
        with torch.inference_mode(), watching(watch, model, cache.spec):
            _fill(warm, Shape(1, shape.heads, shape.group, shape.head_dim, WARM), dtype)
            _step(model, warm, 1, watch)
            watch.clear()
            lost = switches()
            _fill(cache, shape, dtype)
            took, clean = lines_of(watch.seconds, parsed, "prefill"), float(switches() == lost)
            said = {**shape.work, "prompt": shape.rows, "method": method}
            for turn, watch.eager in enumerate((False, True) if eager else (False,)):
                laps = list(_laps(bench, model, cache, watch, parsed, steps))
                middle = shape.rows + turn * (steps + 1) + (steps + 1) // 2
                points = _points(said | {"rows": middle, "path": "fused" if watch.fused else "eager"}, laps)
                found += [p for p in points if not turn or p.what == "decode attention"]
                if not watch.fused:
                    break
    said["path"] = dict(found[0].work)["path"]
    return [Point(f"prefill {name}", tuple(said.items()), seconds, 1.0, clean)
            for name, seconds in took.items() if name != "attention"] + found


def _points(said: dict[str, Any], laps: list[Lap]) -> Iterator[Point]:
    names = dict.fromkeys(name for lines, _ in laps for name in lines)
    for name in names:
        timed = steady([lines.get(name, 0.0) for lines, _ in laps], [lost for _, lost in laps])
        yield Point.of(f"decode {name}", said, timed)


def _fill(cache: CompressedCache, shape: Shape, dtype: str) -> None:
    """The last layer takes the prompt, the others become copies of it: alike, also where a policy spares first ones."""
    last: Any = cache.layers[-1]
    kind, where = DTYPES[dtype], last.around.device
    with torch.inference_mode(False), torch.no_grad():
        k, v = (torch.randn(shape.batch, shape.heads, shape.rows, shape.head_dim, device=where).to(kind) for _ in "kv")
        q = torch.randn(shape.batch, shape.heads * shape.group, shape.rows, shape.head_dim, device=where).to(kind)
        last.update(k, v)
        # `update` gives handles to attention; the layer itself knows what is pending
        last.attend(q, None, Rule(shape.head_dim**-0.5))
        for index in range(len(cache.layers) - 1):
            cache.layers[index] = last.copied()


def _step(model: nn.Module, cache: CompressedCache, batch: int, watch: Watch) -> None:
    one_pass(model, cache, torch.zeros(batch, 1, dtype=torch.long, device=watch.device), watch)


def _laps(bench: Bench, model: nn.Module, cache: CompressedCache, watch: Watch, method: Method,
          steps: int) -> Iterator[Lap]:
    """Each layer's lines in each step but the first."""
    for step in range(steps + 1):
        found: list[Lap] = []
        bench.evict()
        with _by_layer(model, watch, method, found):
            _step(model, cache, cache.layers[-1].batch_size, watch)
        if step:
            yield from found


@contextmanager
def _by_layer(model: nn.Module, watch: Watch, method: Method, found: list[Lap]) -> Iterator[None]:
    """Note what the watch saw of the runtime in each layer of the block's forward passes."""
    lost = 0

    def begin(*_: Any) -> None:
        nonlocal lost
        watch.clear()
        lost = switches()

    def end(*_: Any) -> None:
        seen = {name: seconds for name, seconds in watch.seconds.items() if name in RUNTIME}
        found.append((lines_of(seen, method, "decode"), switches() - lost))

    hooks = [hook for one in model.model.layers  # type: ignore[union-attr]
             for hook in (one.register_forward_pre_hook(begin), one.register_forward_hook(end))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
