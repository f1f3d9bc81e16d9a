"""The model as one tensor-parallel rank holds it: matrices cut by columns or rows, KV heads divided or replicated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvsim.engines.parallel import REPLICATED, VOCAB_PAD, ParallelLayout, core, kv_heads, rank_states
from kvsim.model import Attention, Layer, Matrix, ModelSpec

ROW_CUT = ("o", "down", "out", "fc2", "w2", "dense_4h_to_h", "c_proj")
"""Matrices whose input is already divided, so that each rank holds a slice of rows and their outputs are summed."""


MLP = ("gate", "up", "down", "gate_up", "fc1", "fc2", "w1", "w2", "w3", "router", "shared_expert_gate")
"""Matrices of feed-forward layers, which every tensor rank works on even where attention is data parallel."""


def is_mlp(matrix: Matrix) -> bool:
    """Whether the matrix belongs to a layer's feed-forward part, router included."""
    return matrix.routed or core(matrix.name) in MLP


def is_replicated(name: str) -> bool:
    """Whether every rank holds the matrix whole: routers, MLA's down-projections, indexers, norms."""
    own = core(name)
    return name.startswith("indexer") or any(own == w or own.startswith(w + "_") for w in REPLICATED)


def rank_matrix(matrix: Matrix, layer: Layer, layout: ParallelLayout) -> Matrix:
    """One rank's part; a cut that leaves a rest rounds up."""
    if is_replicated(matrix.name):
        return matrix
    own = core(matrix.name)
    if matrix.routed and layout.expert > 1:
        copies = -(-matrix.copies // layout.expert)
        matrix = replace(matrix, copies=copies, active=matrix.active * copies / matrix.copies)
        ranks = layout.tensor // layout.expert
    elif is_mlp(matrix):
        ranks = layout.tensor
    else:
        ranks = layout.attention_ranks
    if own in ROW_CUT:
        return replace(matrix, in_features=-(-matrix.in_features // ranks))
    if own in ("k", "v", "kv") and layer.attention is not None:
        ranks = min(ranks, layer.attention.n_kv_heads)
    return replace(matrix, out_features=-(-matrix.out_features // ranks))


def _rank_attention(attention: Attention | None, ranks: int) -> Attention | None:
    if attention is None:
        return None
    heads = attention.n_kv_heads
    if heads > 1 and attention.kind != "mla":
        heads = kv_heads(heads, ranks)
    return replace(attention, n_heads=-(-attention.n_heads // ranks), n_kv_heads=heads)


@lru_cache(maxsize=64)
def rank_model(model: ModelSpec, layout: ParallelLayout) -> ModelSpec:
    """The model of one rank of a single pipeline stage; every rank of it holds the same bytes.

    Raises KvsimError when the layout cannot cut the model, or has pipeline stages (their ranks differ).
    """
    layout.check(model)
    ranks = layout.attention_ranks
    cut: dict[Layer, Layer] = {}
    for layer, _ in model.groups:
        cut[layer] = replace(
            layer,
            attention=_rank_attention(layer.attention, ranks),
            cross=_rank_attention(layer.cross, ranks),
            states=rank_states(layer.states, ranks),
            matrices=tuple(rank_matrix(m, layer, layout) for m in layer.matrices),
        )
    return replace(
        model,
        layers=tuple(cut[layer] for layer in model.layers),
        embeddings=tuple(_vocabulary(m, layout) for m in model.embeddings),
        head=_vocabulary(model.head, layout) if model.head else None,
    )


def _vocabulary(matrix: Matrix, layout: ParallelLayout) -> Matrix:
    rows = -(-matrix.out_features // VOCAB_PAD) * VOCAB_PAD
    return replace(matrix, out_features=-(-rows // layout.tensor))
