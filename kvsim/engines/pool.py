"""What a server has left for its cache on a device: budget less weights, activations, graphs, rest; with intervals.

These are estimates of what an engine measures when it starts (a dummy pass), so every term is (low, mid, high) and so
is the pool. Constants come from start-up prints of public logs, named beside them. What is left is exact only in a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvsim.engines.parallel import ParallelLayout, core, weight_bytes
from kvsim.errors import KvsimError, shown
from kvsim.hardware import HardwareProfile, load_device
from kvsim.model import ModelSpec
from kvsim.weights import default_weights, weight_format
from kvsim.workload import whole

GIB = 2**30
DRIVER_BYTES, DRIVER_SHARE = int(0.36 * GIB), 0.002
"""CUDA reports this less than the driver; GiB in logs: H100 79.65 -> 79.14, B200 179.06 -> 178.36, T4 15 -> 14.56."""

SAMPLER_BYTES = (10, 25, 40)
"""Bytes a logit of the profiled batch. 39 in vLLM 0.6 (Llama 3.1 8B, 1.19 GiB) and 0.8; 40 in 0.29, 12 in 0.10."""

NON_TORCH_GIB = (0.05, 0.12, 0.5)
COLLECTIVE_GIB = (0.1, 0.4, 1.5)
GRAPHS_GIB = (0.2, 0.5, 1.2)
TOWER_GIB = (0.0, 1.0, 5.0)
"""Non-torch 0.06 to 0.39 GiB on one GPU in six logs; graphs 0.04 to 0.65; profiling of images up to 5 GiB more."""


@dataclass(frozen=True)
class Interval:
    """Bytes with their plausible range."""

    low: int
    mid: int
    high: int

    def __str__(self) -> str:
        return f"{self.mid / GIB:.2f} GiB ({self.low / GIB:.2f} to {self.high / GIB:.2f})"


@dataclass(frozen=True)
class Pool:
    """The cache's share of one rank: `budget` less the terms; the terms name what they are."""

    budget: int
    terms: tuple[tuple[str, Interval], ...]

    @property
    def left(self) -> Interval:
        """Budget less terms: low when every term is high."""
        low, mid, high = (self.budget - sum(getattr(t, k) for _, t in self.terms) for k in ("high", "mid", "low"))
        return Interval(low, mid, high)

    def describe(self) -> str:
        """One line: the budget and every term in GiB."""
        parts = ", ".join(f"{name} {term.mid / GIB:.2f}" for name, term in self.terms)
        return f"pool {self.left} of a budget of {self.budget / GIB:.2f} GiB less {parts}"


def positive_bytes(value: float, what: str) -> int:
    """A size in bytes as an int; KvsimError for NaN, infinity, zero or less."""
    if not 0 < value < 2**60:
        raise KvsimError(f"{what} must be a positive number of bytes, got {shown(value)}")
    return int(value)


def fraction(value: float, what: str) -> float:
    """A share in (0, 1]; KvsimError otherwise."""
    if not 0 < value <= 1:
        raise KvsimError(f"{what} must lie in (0, 1], got {shown(value)}: 0.9 means 90% of the device")
    return float(value)


def shared(need: float, default: float) -> float:
    """The smallest share in whole per cents that is not below the need or the engine's default, at most 0.98."""
    return min(0.98, max(default, ceil(need * 100 - 1e-9) / 100))


def usable_bytes(device: HardwareProfile) -> int:
    """Bytes that an engine sees as the device's total: the driver's capacity less what the context takes."""
    if device.kind != "gpu":
        return device.capacity_bytes
    return device.capacity_bytes - DRIVER_BYTES - int(DRIVER_SHARE * device.capacity_bytes)


def activation_bytes(model: ModelSpec, layout: ParallelLayout, batched_tokens: int, sequences: int) -> Interval:
    """Peak of the profiling pass: the widest layer over `batched_tokens` rows, or the sampler over `sequences` rows.

    A layer holds about four hidden rows (residual, normed, input, output) beside its widest intermediate: gate, up and
    their product for an MLP (checked: Qwen2.5 1.5B, 32768 tokens: 2.01 GiB here, 2.02 printed); for routed experts
    top-k rows of them; logits are gathered whole on every rank.
    """
    widest = max((_widest(model, index, layout) for index in range(len(model.groups))), default=0)
    layer = 2 * batched_tokens * (4 * model.hidden_size + widest)
    logits = sequences * model.vocab_size
    low, mid, high = (max(layer, logits * size) for size in SAMPLER_BYTES)
    return Interval(int(0.7 * low), mid, int(1.3 * high))


def device_pool(model: ModelSpec, device: object, layout: ParallelLayout, utilization: float, *, batched_tokens: int,
                sequences: int, weights: str | None = None, graphs: bool = True) -> tuple[Pool, ...]:
    """The pool of one rank of each pipeline stage.

    Args:
        device: a profile, a shipped name or a path. utilization: share of the device in (0, 1].
        weights: their format (kvsim.weights), the model's dtype unless said.
        graphs: whether CUDA graphs come out of the budget.

    Raises KvsimError when the model has no matrices (their bytes are needed) or the layout cannot cut it.
    """
    profile = load_device(device)  # type: ignore[arg-type]
    if not any(layer.matrices for layer, _ in model.groups):
        raise KvsimError("a pool from a device needs the model's weights: give its config, hidden_size with the "
                         "architecture numbers, or pool_bytes")
    budget = int(usable_bytes(profile) * fraction(utilization, "gpu_memory_utilization"))
    activation = activation_bytes(model, layout, batched_tokens, sequences)
    shared = [("activations", activation), ("non-torch", _gib(NON_TORCH_GIB))]
    if layout.tensor > 1:
        shared.append(("collectives", _gib(COLLECTIVE_GIB)))
    if graphs:
        shared.append(("CUDA graphs", _gib(GRAPHS_GIB)))
    if model.towers:
        shared.append(("image profiling", _gib(TOWER_GIB)))
    pools = []
    form = weight_format(weights or default_weights(model))
    for held in weight_bytes(model, layout, form.bits, form.embedding_bits):
        resident = Interval(held, held, int(1.02 * held))  # engines pad and keep small copies
        pools.append(Pool(budget, (("weights", resident), *shared)))
    return tuple(pools)


def _gib(values: tuple[float, float, float]) -> Interval:
    low, mid, high = (int(v * GIB) for v in values)
    return Interval(low, mid, high)


def _widest(model: ModelSpec, group: int, layout: ParallelLayout) -> int:
    """Values of the widest intermediate that one token has in a layer on one rank."""
    layer = model.groups[group][0]
    routed = sum(m.active * m.out_features for m in layer.matrices if m.routed and core(m.name) != "down")
    if routed:
        top_k = max(m.active for m in layer.matrices if m.routed)
        return int(1.5 * routed / layout.tensor + top_k * model.hidden_size)
    inner = sum(m.out_features for m in layer.matrices if core(m.name) in ("gate", "up", "gate_up", "fc1", "w1", "w3"))
    mixers = ("q", "k", "v", "q_b", "kv_b", "in_proj", "qkv")
    projections = sum(m.out_features for m in layer.matrices if core(m.name) in mixers)
    return max(-(-3 * inner // (2 * layout.tensor)), -(-projections // layout.attention_ranks))


def too_long(tokens: int, length: int | None, flag: str) -> list[str]:
    """A note where one request of the length that a server is told to take exceeds its pool."""
    if length is None or int(whole(length, flag, low=1)) <= tokens:
        return []
    return [f"the pool of {tokens} tokens is shorter than {flag} {length}: longer requests are turned away"]
