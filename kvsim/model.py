"""A language model as numbers: one entry a layer, what it caches and multiplies; not how to read a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

from kvsim.errors import KvsimError, shown
from kvsim.workload import Count, one_whole, whole

AttentionKind = Literal["full", "sliding", "chunked", "mla", "csa", "hca", "shared", "cross"]
KINDS: tuple[str, ...] = ("full", "sliding", "chunked", "mla", "csa", "hca", "shared", "cross")
DTYPE_BITS = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8}


@dataclass(frozen=True)
class Matrix:
    """A weight matrix y = x W^T and how often it exists.

    `copies` matrices are resident (experts), each token passes through `active` of them (top-k).
    `routed` marks routed experts, whose idle copies do not count as active parameters.
    `bias` says whether each copy has `out_features` bias values.
    """

    name: str
    out_features: int
    in_features: int
    copies: int = 1
    active: float = 1
    routed: bool = False
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Values of all copies, biases included."""
        return self.copies * (self.out_features * self.in_features + (self.out_features if self.bias else 0))

    @property
    def active_parameters(self) -> int:
        """Values that one token uses; for routed experts the top-k share, everything otherwise."""
        return round(self.parameters * self.active / self.copies) if self.routed else self.parameters


@dataclass(frozen=True)
class State:
    """A state of fixed size for each sequence, `bits` a value.

    name `conv`: shape (channels, kernel) as transformers stores it (engines hold kernel - 1 columns);
    name `recurrent`: shape (heads, head_dim, d_state) or whatever the layer keeps between tokens.
    """

    name: str
    shape: tuple[int, ...]
    bits: int = 16

    @property
    def bytes(self) -> int:
        """Bytes for one sequence."""
        return -(-prod(self.shape) * self.bits // 8)


@dataclass(frozen=True)
class Store:
    """One growing array of the cache: `rows` rows of `width` values for each of `heads` heads, for one sequence."""

    name: str
    heads: int
    rows: Count
    width: int


@dataclass(frozen=True)
class Attention:
    """One attention module and what it caches for each token.

    Args:
        kind: full; sliding or chunked (at most `window` rows); mla (k = latent, v = RoPE part, shared by all heads);
            csa/hca (a window of rows plus one compressed row per `compress` tokens, DeepSeek-V4);
            shared (reads another layer's rows, stores none); cross (rows of `cross_tokens` encoder tokens, constant).
        n_heads: query heads. n_kv_heads: stored heads.
        k_dim, v_dim: stored values per head and token on each side.
        qk_dim, out_dim: widths of query-key products and of the output per head in prefill, where they differ (MLA).
        index_dim: values per token of an indexer's key cache (DSA).
        selected: tokens that the indexer lets attend, 0 = all.
    """

    kind: AttentionKind
    n_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    qk_dim: int = 0
    out_dim: int = 0
    index_dim: int = 0
    selected: int = 0
    compress: int = 1
    compressed_dim: int = 0
    cross_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KvsimError(f"attention kind {shown(self.kind)} is not one of {', '.join(KINDS)}")
        for name in ("n_heads", "n_kv_heads"):
            whole(getattr(self, name), name, low=1, high=2**20)
        for name in ("k_dim", "v_dim", "window", "index_dim", "compressed_dim", "cross_tokens", "qk_dim", "out_dim"):
            whole(getattr(self, name), name, high=2**31)
        if self.kind in ("sliding", "chunked", "csa", "hca") and self.window < 1:
            raise KvsimError(f"a {self.kind} layer needs a window of 1 or more")
        object.__setattr__(self, "qk_dim", self.qk_dim or self.k_dim)
        object.__setattr__(self, "out_dim", self.out_dim or self.v_dim or self.k_dim)

    def rows(self, tokens: Count) -> Count:
        """Rows that k and v hold after `tokens` tokens: min(tokens, window) where there is a window, 0 where shared."""
        if self.kind == "shared":
            return 0 * tokens
        if self.kind == "cross":
            return 0 * tokens + self.cross_tokens
        return np.minimum(tokens, self.window) if self.window else tokens

    def attended(self, tokens: Count) -> Count:
        """Rows that one new query can see once `tokens` tokens are there (itself included), before any selection."""
        if self.kind == "cross":
            return 0 * tokens + self.cross_tokens
        seen = np.minimum(tokens, self.window) if self.window else tokens
        if self.kind in ("csa", "hca"):
            extra = tokens // self.compress
            seen = seen + (np.minimum(extra, self.selected) if self.selected else extra)
        elif self.selected:
            seen = np.minimum(seen, self.selected)
        return seen

    def stores(self, tokens: Count) -> tuple[Store, ...]:
        """The arrays held for one sequence; k and v first, then what methods do not touch (index, compressed)."""
        rows = self.rows(tokens)
        found = [Store("k", self.n_kv_heads, rows, self.k_dim)]
        if self.v_dim:
            found.append(Store("v", self.n_kv_heads, rows, self.v_dim))
        if self.kind in ("csa", "hca"):
            found.append(Store("compressed", 1, tokens // self.compress, self.compressed_dim))
            if self.index_dim:
                found.append(Store("index", 1, tokens // self.compress, self.index_dim))
        elif self.index_dim:
            found.append(Store("index", 1, rows, self.index_dim))
        return tuple(found)


@dataclass(frozen=True)
class Layer:
    """One decoder layer: at most one self-attention, one cross-attention, any states, matrices and small vectors."""

    attention: Attention | None = None
    cross: Attention | None = None
    states: tuple[State, ...] = ()
    matrices: tuple[Matrix, ...] = ()
    other_parameters: int = 0

    @property
    def kind(self) -> str:
        """The word that tables print: the attention's kind, `+state` for hybrids, else `state` or `none`."""
        if self.attention is None:
            return "cross" if self.cross else "state" if self.states else "none"
        return self.attention.kind + ("+state" if self.states else "")

    @property
    def parameters(self) -> int:
        """Resident values of the layer."""
        return self.other_parameters + sum(m.parameters for m in self.matrices)


@dataclass(frozen=True)
class ModelSpec:
    """A model: everything that memory and time depend on, and where the facts came from.

    `embeddings` are tables that are looked up (no product); `head` is the output projection, `tied` when it is the
    first embedding table (then it adds no parameters). `towers` are vision and audio encoders: resident, not run here.
    `next_n_layers` counts multi-token-prediction layers of the checkpoint, which neither parameters nor cache include.
    """

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    embeddings: tuple[Matrix, ...] = ()
    head: Matrix | None = None
    tied: bool = False
    towers: tuple[Matrix, ...] = ()
    other_parameters: int = 0
    dtype: str = "bf16"
    max_context: int = 0
    next_n_layers: int = 0
    source: str = ""
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise KvsimError(f"model {self.name!r} has no layers")
        if self.dtype not in DTYPE_BITS:
            raise KvsimError(f"dtype {shown(self.dtype)} of model {self.name!r} is not one of {', '.join(DTYPE_BITS)}")

    @property
    def n_layers(self) -> int:
        """Number of decoder layers, those without attention included."""
        return len(self.layers)

    @cached_property
    def groups(self) -> tuple[tuple[Layer, tuple[int, ...]], ...]:
        """Distinct layers with the indices where each stands: the unit of every computation."""
        found: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.layers):
            found.setdefault(layer, []).append(index)
        return tuple((layer, tuple(where)) for layer, where in found.items())

    @cached_property
    def parameters(self) -> int:
        """Unique resident values, towers included, a tied head counted once."""
        head = 0 if self.head is None or self.tied else self.head.parameters
        small = self.other_parameters + head + sum(m.parameters for m in self.embeddings + self.towers)
        return small + sum(layer.parameters * len(where) for layer, where in self.groups)

    @property
    def tower_parameters(self) -> int:
        """Values of vision and audio towers, already inside `parameters`."""
        return sum(m.parameters for m in self.towers)

    @cached_property
    def active_parameters(self) -> int:
        """Values less the routed experts that a token does not use (embeddings, head and towers stay in)."""
        idle = 0
        for layer, where in self.groups:
            idle += len(where) * sum(m.parameters - m.active_parameters for m in layer.matrices)
        return self.parameters - idle

    def cache_bytes(self, tokens: Count, batch: Count = 1, bits: int = 16) -> Count:
        """Uncompressed KV bytes of `batch` sequences of `tokens` tokens, `bits` a value (arrays broadcast).

        Counts every growing array (indexer and compressed rows too); neither recurrent state nor cross-attention.
        """
        tokens, batch = whole(tokens, "tokens"), whole(batch, "batch", low=1)
        bits = one_whole(bits, "bits", low=1, high=64)
        total: Count = 0 * tokens
        for layer, where in self.groups:
            if layer.attention is not None:
                for store in layer.attention.stores(tokens):
                    total = total + len(where) * store.heads * store.rows * -(-store.width * bits // 8)
        return total * batch

    def state_bytes(self, batch: Count = 1) -> Count:
        """Bytes of recurrent and convolution states, constant in tokens."""
        return batch * sum(s.bytes for layer in self.layers for s in layer.states)

    def cross_bytes(self, batch: Count = 1, bits: int = 16) -> Count:
        """Bytes of cross-attention caches for the declared number of encoder tokens."""
        values = sum(c.n_kv_heads * c.cross_tokens * (c.k_dim + c.v_dim) for c in (x.cross for x in self.layers) if c)
        return batch * -(-values * bits // 8)

    def kinds(self) -> Counter[str]:
        """How many layers of each kind."""
        return Counter(layer.kind for layer in self.layers)

    @classmethod
    def from_numbers(
        cls,
        layers: int,
        n_heads: int | Sequence[int] | None = None,
        n_kv_heads: int | Sequence[int] | None = None,
        head_dim: int | None = None,
        **more: Any,
    ) -> ModelSpec:
        """Build a spec from architecture numbers when there is no config file; see `kvsim.numbers.from_numbers`."""
        from kvsim.numbers import from_numbers

        return from_numbers(layers, n_heads, n_kv_heads, head_dim, **more)

    def with_layers(self, layers: Sequence[Layer]) -> ModelSpec:
        """The same model with other layers."""
        return replace(self, layers=tuple(layers))
