"""Which rows each layer of a model owns in llama.cpp, and on which device the layer sits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from kvsim.errors import KvsimError, shown
from kvsim.model import Attention, ModelSpec, State

IGNORED_WINDOWS = (
    "mistral", "mixtral", "ministral", "phi3", "phimoe", "qwen2", "qwen3", "starcoder2", "internlm", "minicpm", "llama",
)  # fmt: skip
"""Families whose configs state a window that their llama.cpp graphs do not use: every layer keeps the full context."""
LATENT_AS_HEADS = ("minicpm3",)
"""Families with latent attention whose llama.cpp graphs project to full heads and cache those."""
WINDOWED = ("sliding", "chunked", "csa", "hca")


@dataclass(frozen=True)
class Rows:
    """One layer's share of a cache: values a cell on each side, and the head widths that blocks must divide."""

    layer: int
    k: int
    v: int
    k_head: int
    v_head: int


@dataclass(frozen=True)
class Plan:
    """The layers of every cache that llama.cpp makes for a model; `compressed` is (ratio, cache) of DeepSeek-V4."""

    full: tuple[Rows, ...]
    windowed: tuple[Rows, ...]
    window: int
    indexer: tuple[Rows, ...]
    compressed: tuple[tuple[str, int, tuple[Rows, ...]], ...]
    recurrent: tuple[tuple[int, int, int], ...]
    last: Rows | None
    notes: tuple[str, ...]


def plan(model: ModelSpec, mla: bool, mla_v: bool, own_windows: bool) -> Plan:
    """Sort the layers into llama.cpp's caches.

    mla: the file has the tensors of latent attention; mla_v: its builds that kept V beside the latent;
    own_windows: sliding layers have a cache of their own.
    """
    full: list[Rows] = []
    windowed: list[Rows] = []
    indexer: list[Rows] = []
    recurrent: list[tuple[int, int, int]] = []
    squeezed: dict[tuple[str, int], list[Rows]] = {}
    notes: list[str] = []
    windows: set[int] = set()
    ignored = own_windows and _window_unused(model)
    for index, layer in enumerate(model.layers):
        a = layer.attention
        if layer.cross is not None:
            notes.append("cross-attention rows are computed by the encoder and are not part of llama.cpp's KV cache")
        if layer.states:
            recurrent.append((index, *_state_values(layer.states)))
        if a is None or a.kind in ("shared", "cross"):
            continue
        rows = _rows(a, index, mla and model.architecture not in LATENT_AS_HEADS, mla_v)
        if a.kind in WINDOWED and own_windows and not ignored:
            windowed.append(rows)
            windows.add(a.window)
        else:
            full.append(rows)
        if a.index_dim:
            key_only = a.kind in ("mla", "csa", "hca") or a.v_dim == 0
            extra = Rows(index, a.index_dim, 0 if key_only else a.v_dim, a.index_dim, a.v_dim)
            (squeezed.setdefault(("indexer", a.compress), []) if a.compress > 1 else indexer).append(extra)
        if a.kind in ("csa", "hca") and a.compress > 1:
            width = a.compressed_dim or a.k_dim
            squeezed.setdefault((a.kind, a.compress), []).append(Rows(index, width, 0, width, 0))
    if len(windows) > 1:
        notes.append(f"llama.cpp has one window for all sliding layers: {max(windows)} of {sorted(windows)} is used")
    if ignored and any(x.attention and x.attention.kind in WINDOWED for x in model.layers):
        notes.append("llama.cpp does not use the sliding window of this architecture: its layers keep the full context")
    attending = [*full, *windowed]
    return Plan(
        tuple(full), tuple(windowed), max(windows, default=0), tuple(indexer),
        tuple((name, ratio, tuple(found)) for (name, ratio), found in sorted(squeezed.items())),
        tuple(recurrent), max(attending, key=lambda r: r.layer, default=None), tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _window_unused(model: ModelSpec) -> bool:
    """Whether the model is of a family whose window llama.cpp ignores (none of those mixes kinds, except Ministral)."""
    name = model.architecture.lower()
    return any(name.startswith(family) for family in IGNORED_WINDOWS) and not name.startswith("llama4")


def _rows(a: Attention, index: int, mla: bool, mla_v: bool) -> Rows:
    if a.kind == "mla":
        if mla:
            width = a.k_dim + a.v_dim
            return Rows(index, width, a.k_dim if mla_v else 0, width, a.k_dim)
        if a.qk_dim == a.k_dim and a.out_dim == a.v_dim:
            raise KvsimError("mla=off needs the query heads and their widths (n_heads, head_dim_k, head_dim_v)")
        return Rows(index, a.n_heads * a.qk_dim, a.n_heads * a.out_dim, a.qk_dim, a.out_dim)
    if a.kind in ("csa", "hca"):
        return Rows(index, a.n_kv_heads * a.k_dim, 0, a.k_dim, 0)
    return Rows(index, a.n_kv_heads * a.k_dim, a.n_kv_heads * a.v_dim, a.k_dim, a.v_dim)


def _state_values(states: tuple[State, ...]) -> tuple[int, int]:
    """(R, S): convolution columns that are kept (kernel - 1) and recurrent values of a layer, for one sequence."""
    r = s = 0
    for state in states:
        if state.name == "conv":
            r += state.shape[0] * (state.shape[1] - 1)
        else:
            s += prod(state.shape)
    return r, s


def devices(layers: int, n_gpu_layers: int | None, tensor_split: tuple[float, ...] | None,
            output_first: bool) -> tuple[str, ...] | None:
    """The device of each layer, or None when no split was asked.

    layers: those of the file, draft layers included. n_gpu_layers: None or negative offloads all. The output layer
    counts as one more. float32 as in llama.cpp, so that exact shares fall on the same side.
    """
    if n_gpu_layers is None and tensor_split is None:
        return None
    shares = np.asarray(tensor_split or (1.0,), dtype=np.float32)
    if shares.min() < 0 or not np.isfinite(shares).all() or shares.sum() <= 0:
        raise KvsimError(f"tensor_split {shown(tensor_split)} must be shares of 0 or more that do not all vanish")
    asked = layers + 1 if n_gpu_layers is None or n_gpu_layers < 0 else n_gpu_layers
    start = max(layers + (1 if output_first else 0) - asked, 0)
    act = min(asked, layers + 1)
    edges = np.cumsum(shares, dtype=np.float32)
    edges /= edges[-1]
    found = []
    for index in range(layers):
        if index < start or index - start >= act:
            found.append("CPU")
        else:
            place = np.float32(index - start) / np.float32(act)
            found.append(f"GPU{int(np.searchsorted(edges, place, side='right'))}")
    return tuple(found)
