"""Run a model under a method and time it: a prompt, then steps, half of them with a stopwatch inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvsim.method import Method
from kvsim.record import HeldBuffer
from runtime.cache import CompressedCache
from runtime.timing import Timed, clock, steady, summary, switches, synchronize
from runtime.watch import REST, Watch, lines_of, watching

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Ran:
    """What was seen: both phases with their lines, and what the cache held after `prompt + new` tokens."""

    prefill: Timed
    decode: Timed
    prefill_lines: dict[str, Timed]
    decode_lines: dict[str, Timed]
    cache_bytes: int
    allocated_bytes: int
    rows: list[list[int] | None]
    buffers: tuple[HeldBuffer, ...]
    extra_bytes: int | None
    generation_seconds: float


def run(
    hf_model: nn.Module,
    method: Method,
    *,
    batch: int,
    prompt: int,
    new: int = 0,
    steps: int = 12,
    repeats: int = 1,
    calibration: Any = None,
    seed: int = 0,
) -> Ran:
    """Time `repeats` prompts of `batch` sequences and at least `steps` decode steps after the last one.

    The cache is counted after `prompt + new` tokens. Tokens are random: time does not depend on them. Runs are warmed
    up by a short prompt, which also compiles what is compiled at first use.
    """
    device = next(hf_model.parameters()).device
    spec = CompressedCache(method, hf_model, calibration=calibration, seed=seed)
    spec.close()
    torch.manual_seed(seed)
    vocabulary = int(hf_model.config.get_text_config().vocab_size)
    tokens = torch.randint(0, vocabulary, (batch, prompt + max(new, steps) + 1), device=device)
    watch = Watch(device)
    prefills: list[tuple[float, int, dict[str, float]]] = []
    laps: list[tuple[float, int, dict[str, float] | None]] = []
    held: tuple[int, int, list[list[int] | None], tuple[HeldBuffer, ...]] | None = None
    with torch.inference_mode(), watching(watch, hf_model, spec.spec):
        with CompressedCache(method, hf_model, calibration=calibration, seed=seed) as cache:
            one_pass(hf_model, cache, tokens[:, : min(prompt, 64)], watch)
            one_pass(hf_model, cache, tokens[:, :1], watch)
        base = _reset_peak(device)
        for turn in range(repeats):
            with CompressedCache(method, hf_model, calibration=calibration, seed=seed) as cache:
                watch.on = True
                prefills.append(one_pass(hf_model, cache, tokens[:, :prompt], watch))
                last = turn == repeats - 1
                for step in range(max(new, steps) if last else 0):
                    if step == new:
                        held = _held(cache)
                    watch.on = step.bit_count() % 2 == 1  # what happens every 2, 3 or 4 steps is in both halves
                    at = prompt + step
                    took, lost, lines = one_pass(hf_model, cache, tokens[:, at : at + 1], watch)
                    laps.append((took, lost, lines if watch.on else None))
                if last:
                    held = held or _held(cache)
        extra = _peak(device, base)
    assert held is not None
    kept = laps[max(0, new - steps) : max(new, steps)] if new else laps
    return Ran(
        summary([p[0] for p in prefills], [p[1] for p in prefills]),
        _whole([lap for lap in kept if lap[2] is None], kept),
        _lines([(p[2], p[0], p[1]) for p in prefills], method, "prefill"),
        _lines([(lines, took, lost) for took, lost, lines in kept if lines is not None], method, "decode"),
        *held,
        extra,
        sum(lap[0] for lap in laps[:new]),
    )


Lap = tuple[float, int, dict[str, float]]
"""Seconds, interruptions and watched seconds of one forward pass."""


def one_pass(hf_model: nn.Module, cache: CompressedCache, ids: torch.Tensor, watch: Watch) -> Lap:
    """One forward pass."""
    watch.clear()
    # the name changed in transformers 5; the old one costs a warning at each call
    named = "cache" if "cache" in signature(hf_model.forward).parameters else "past_key_values"
    now = clock(ids.device)
    synchronize(ids.device)
    lost, start = switches(), now()
    hf_model(input_ids=ids, use_cache=True, logits_to_keep=1, **{named: cache})
    synchronize(ids.device)
    return now() - start, switches() - lost, dict(watch.seconds)


def _whole(unwatched: Sequence[tuple[float, int, Any]], laps: Sequence[tuple[float, int, Any]]) -> Timed:
    used = unwatched or laps
    return steady([lap[0] for lap in used], [lap[1] for lap in used])


def _lines(laps: Sequence[tuple[dict[str, float], float, int]], method: Method, phase: str) -> dict[str, Timed]:
    """The predicted lines' names with their seconds; what no line claims goes to the small kernels."""
    named = []
    for watched, took, _ in laps:
        lines = lines_of(watched, method, phase)
        lines[REST] = lines.get(REST, 0.0) + max(0.0, took - sum(watched.values()))
        named.append(lines)
    names = dict.fromkeys(name for lines in named for name in lines)
    return {name: steady([lines.get(name, 0.0) for lines in named], [lap[2] for lap in laps]) for name in names}


def _held(cache: CompressedCache) -> tuple[int, int, list[list[int] | None], tuple[HeldBuffer, ...]]:
    return cache.nbytes(), cache.allocated_nbytes(), cache.rows(), cache.buffers()


def _reset_peak(device: torch.device) -> int | None:
    """Start counting the highest memory anew; bytes in use now, None where the system does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        RESET.write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _peak(device: torch.device, base: int | None) -> int | None:
    """Bytes that came on top of `base` at the highest."""
    if base is None:
        return None
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - base
    highest = _status("VmHWM")
    return None if highest is None else max(0, highest - base)


def _status(name: str) -> int | None:
    try:
        text = STATUS.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), None)
