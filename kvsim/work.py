"""The work of one prefill or one decode step as kernel-sized pieces: bytes, values and arithmetic, not yet time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from kvsim.layout import Layout, Side, largest, smallest
from kvsim.method_work import SMALL, attention_adds, prompt_work, step_work, stores_of
from kvsim.model import Attention, Layer, Matrix, ModelSpec
from kvsim.op import Op

SMALL_KERNELS = 5
"""Kernels of a layer that only stream activations: two norms, rotation and cache write, activation, residual."""

LATENT_KERNELS = 6
"""What multi-head latent attention adds: norms of both latents, the split of rotary parts, queries into the latent's
basis, outputs out of it, and the concatenation between."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike, with what they hold."""

    layer: Layer
    indices: tuple[int, ...]
    cache: Layout | None
    cross: Layout | None
    reads: Layout | None
    """What attention reads: the layer's own cache, or for a shared layer that of the layer it shares with."""


TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj"))
"""Matrices of one input that servers keep as one (vLLM's and SGLang's qkv_proj, gate_up_proj, fused_qkv_a_proj)."""


def joint(layer: Layer, matrix: Matrix) -> float:
    """Outputs of the product that servers make of a matrix and its neighbours, as a multiple of the matrix's own."""
    prefix, _, name = matrix.name.rpartition(".")
    kin = next((names for names in TOGETHER if name in names), ())
    alike = [m for m in layer.matrices if m.name.rpartition(".")[0] == prefix and m.name.rpartition(".")[2] in kin
             and (m.in_features, m.active, m.copies) == (matrix.in_features, matrix.active, matrix.copies)]
    return sum(m.out_features for m in alike) / matrix.out_features if alike else 1.0


def matmul_op(matrix: Matrix, tokens: Any, count: int, dtype: str, wide: float = 1.0) -> Op:
    """A weight product for `tokens` tokens; routed experts become one product over the experts that are hit.

    wide: see `joint`. Of E experts with k chosen, `tokens` tokens hit E (1 - (1 - k/E)^tokens) under uniform routing.
    """
    if not matrix.routed:
        return Op(
            matrix.name,
            "matmul",
            count * matrix.active,
            m=tokens,
            n=matrix.out_features,
            k=matrix.in_features,
            dtype=dtype,
            joint=wide,
        )
    share = min(matrix.active / matrix.copies, 1 - 1e-12)
    hit = matrix.copies * -np.expm1(np.asarray(tokens, float) * np.log1p(-share))
    hit = np.maximum(hit, 1.0)
    m = np.maximum(1, np.rint(tokens * matrix.active / hit)).astype(np.int64)[()]
    n = np.maximum(1, np.rint(matrix.out_features * hit)).astype(np.int64)[()]
    return Op(matrix.name, "matmul", count, m=m, n=n, k=matrix.in_features, dtype=dtype, joint=wide)


def products(model: ModelSpec, groups: tuple[LayerGroup, ...], tokens: Any, dtype: str) -> Iterator[Op]:
    """Every layer's matrix products for `tokens` tokens in one pass, and the small kernels between them."""
    for group in groups:
        count = len(group.indices)
        for matrix in group.layer.matrices:
            yield matmul_op(matrix, tokens, count, dtype, joint(group.layer, matrix))
        values = 6 * model.hidden_size + sum(m.out_features * m.active for m in group.layer.matrices)
        attention = group.layer.attention
        kernels = SMALL_KERNELS + (LATENT_KERNELS if attention is not None and attention.kind == "mla" else 0)
        yield Op(
            SMALL,
            "elementwise",
            kernels * count,
            bytes=tokens * (2.0 * values / kernels),
            keys=(("activations", 1.0),),
        )


def around_layers(model: ModelSpec, tokens: Any) -> Op:
    """Embedding, masks and the last norm: once a pass, where a device has measured it."""
    moved = 6.0 * tokens * model.hidden_size
    return Op(SMALL, "elementwise", bytes=moved, keys=(("around layers", 1.0),), only_known=True)


def head(model: ModelSpec, rows: Any, dtype: str) -> Iterator[Op]:
    """The output projection, for the rows that are sampled from."""
    if model.head is not None:
        yield Op("head", "matmul", m=rows, n=model.head.out_features, k=model.head.in_features, dtype=dtype)


def decode_ops(
    model: ModelSpec, groups: tuple[LayerGroup, ...], batch: Any, dtype: str, value_bits: int
) -> Iterator[Op]:
    """One step of the whole batch: the step that writes row N."""
    yield from products(model, groups, batch, dtype)
    yield around_layers(model, batch)
    for group in groups:
        count = len(group.indices)
        for layout, name in ((group.reads, "attention"), (group.cross, "cross-attention")):
            if layout is not None:
                yield attend_op(layout, batch, count, name, value_bits)
        if group.cache is not None:
            yield from step_work(group.cache, batch, count)
        yield from _state_op(group, batch, count, 1)
    yield from head(model, batch, dtype)


def prefill_ops(
    model: ModelSpec,
    groups: tuple[LayerGroup, ...],
    batch: Any,
    prompt: Any,
    dtype: str,
    value_bits: int,
    head_dtype: str,
) -> Iterator[Op]:
    """The whole prompt in one pass; the head sees the last token of each sequence."""
    yield from products(model, groups, batch * prompt, dtype)
    yield around_layers(model, batch * prompt)
    for group in groups:
        count = len(group.indices)
        if group.layer.attention is not None:
            yield _prefill_attention(group, batch, prompt, count, value_bits)
        if group.cross is not None:
            yield _cross_prefill(group.cross, batch, prompt, count, value_bits)
        if group.cache is not None:
            yield from prompt_work(group.cache, batch, prompt, count, value_bits)
        yield from _state_op(group, batch, count, prompt)
    yield from head(model, batch, head_dtype)


def native(value_bits: int) -> tuple[str, str]:
    """Format and conversion of full-precision rows."""
    return ("fp32" if value_bits >= 32 else "fp8" if value_bits == 8 else "bf16"), "none"


def _formats(sides: tuple[Side, ...], value_bits: int) -> tuple[tuple[str, str], ...]:
    full = native(value_bits)
    forms = (side.chain.format for side in sides)
    return tuple(dict.fromkeys(full if f.name == "full" else (f.kernel_format, f.conversion) for f in forms))


def attend_op(layout: Layout, batch: Any, count: int, name: str, value_bits: int) -> Op:
    """Attention of one new token: the bytes of attended rows, their values, and the basis's arithmetic."""
    attention, rows = layout.attention, layout.rows
    attended = rows.attended
    if attention.selected and attention.kind not in ("csa", "hca"):
        attended = smallest(attended, attention.selected)
    share = attended / np.maximum(rows.stored, 1)
    moved: Any = 4.0 * batch * attention.n_heads * max(attention.qk_dim, attention.out_dim)
    flops: Any = 0.0
    elements: Any = 0.0
    read = smallest(share, 1.0)
    for side in layout.sides:
        for b in side.buffers:
            part = b.bytes * (read if b.rows_per_unit else 1.0)
            moved = moved + (part if b.per_model else batch * part)
        elements = elements + batch * side.latent.heads * attended * float(side.latent.width)
        flops = flops + batch * (
            2.0 * attention.n_heads * attended * side.place.width + side.chain.basis.attend_flops(attended, side.place)
        )
        form = side.chain.format
        again = form.read_flops(side.latent) + sum(c.read_flops(side.latent) for c in side.chain.corrections)
        flops = flops + batch * side.latent.heads * (attended * again + form.step_flops(side.latent))
    if attention.kind == "mla":
        flops = flops + 2.0 * batch * attention.n_heads * attended * attention.k_dim
    for b in layout.plain_buffers:
        chosen = (
            smallest(1.0, attention.selected / np.maximum(b.rows, 1))
            if b.name == "compressed" and attention.selected
            else 1.0
        )
        moved = moved + batch * b.bytes * chosen
    return Op(
        name,
        "decode",
        count,
        bytes=moved,
        flops=flops,
        elements=elements,
        blocks=1.0 * batch * attention.n_kv_heads,
        rows=largest(1.0 * attended, 1.0),
        head_dim=min(attention.qk_dim, 256),
        q_per_kv=attention.n_heads / attention.n_kv_heads,
        windowed=bool(attention.window),
        formats=_formats(layout.sides, value_bits),
        kernels=_kernels(layout),
        adds=attention_adds(layout),
        pieces=stores_of(layout, batch),
        held=1.0 if attention.selected else np.maximum(rows.stored, 1) / np.maximum(attended, 1),
    )


def _kernels(layout: Layout) -> tuple[str, ...]:
    """Families beside the default: fused ones, eager where a part moves scores by a step's weights, adds to logits,
    or corrects, turns or rotates what was decoded.
    """
    method = layout.method
    if method.is_full and not layout.attention.window:
        return ("fused",)
    policy, chains = method.tokens, [side.chain for side in layout.sides]
    ranking = getattr(policy, "ranking", None)
    weighs = policy.needs_weights or (ranking is not None and ranking.update == "weights")
    corrected = any(c.corrections or c.before_rope or c.basis.both_sides for c in chains)
    turned = any(c.basis.rewrites_rows and c.format.name != "full" for c in chains)
    looks = policy.merges or (policy.drops == "rows" and weighs)
    return ("eager",) if looks or corrected or turned else ("fused", "eager")


def _pairs(attention: Attention, prompt: Any) -> Any:
    """Query-key pairs of a causal pass over the prompt, windows and selections included."""
    window = attention.window or attention.selected
    if attention.kind == "cross":
        return 1.0 * prompt * attention.cross_tokens
    whole = 0.5 * prompt * (prompt + 1.0)
    if not window:
        return whole
    seen = smallest(prompt, window)
    pairs = prompt * 1.0 * seen - 0.5 * seen * (seen - 1.0)
    if attention.kind in ("csa", "hca"):
        pairs = pairs + whole / attention.compress
    return pairs


def _prefill_attention(group: LayerGroup, batch: Any, prompt: Any, count: int, value_bits: int) -> Op:
    attention = group.layer.attention
    assert attention is not None
    size = value_bits / 8.0
    kv = attention.n_kv_heads * (attention.k_dim + attention.v_dim)
    moved = batch * prompt * size * (kv + attention.n_heads * (attention.qk_dim + attention.out_dim))
    flops = 2.0 * batch * attention.n_heads * (attention.qk_dim + attention.out_dim) * _pairs(attention, prompt)
    formats: tuple[tuple[str, str], ...] = (native(value_bits),)
    if group.cache is not None and group.cache.method.protocol == "on_write":
        formats = _formats(group.cache.sides, value_bits)
    return Op(
        "attention",
        "prefill",
        count,
        bytes=moved,
        flops=flops,
        elements=1.0 * batch * prompt * kv,
        formats=formats,
        blocks=1.0 * batch * attention.n_heads * -(-prompt // 128),
        rows=largest(1.0 * prompt, 1.0),
        head_dim=min(attention.qk_dim, 256),
        q_per_kv=attention.n_heads / attention.n_kv_heads,
        windowed=bool(attention.window),
    )


def _cross_prefill(layout: Layout, batch: Any, prompt: Any, count: int, value_bits: int) -> Op:
    a = layout.attention
    moved = batch * (layout.bytes(1) + prompt * (value_bits / 8.0) * a.n_heads * (a.qk_dim + a.out_dim))
    return Op(
        "cross-attention",
        "prefill",
        count,
        bytes=moved,
        head_dim=min(a.qk_dim, 256),
        formats=(native(value_bits),),
        flops=2.0 * batch * a.n_heads * (a.qk_dim + a.out_dim) * _pairs(a, prompt),
        blocks=1.0 * batch * a.n_heads * -(-prompt // 128),
    )


def _state_op(group: LayerGroup, batch: Any, count: int, tokens: Any) -> Iterator[Op]:
    """Recurrent and convolution states: read and written once a pass, about 6 flops per value and token.

    Each row of a state is a recurrence of its own, so that all of them can run at once.
    """
    held = sum(s.bytes for s in group.layer.states)
    if held:
        values = sum(s.bytes * 8 // s.bits for s in group.layer.states)
        rows = max(prod(s.shape[:-1]) for s in group.layer.states)
        moved, flops = 2.0 * batch * held, 6.0 * batch * tokens * values
        yield Op("state update", "elementwise", count, bytes=moved, flops=flops, blocks=1.0 * batch * rows)


def reading(layer: Layer) -> Layer:
    """For a layer that shares another's cache: the layer as if it held those rows itself."""
    a = layer.attention
    if a is None or a.kind != "shared":
        return layer
    return replace(layer, attention=replace(a, kind="sliding" if a.window else "full"))


def activation_values(model: ModelSpec) -> float:
    """Values alive for one token inside the widest layer: residual stream, inputs and outputs of its products."""
    widest = max((sum(m.out_features * m.active for m in layer.matrices) for layer, _ in model.groups), default=0.0)
    return 3.0 * model.hidden_size + widest


def largest_layer(groups: tuple[LayerGroup, ...], prompt: Any, batch: Any, value_bits: int) -> Any:
    """Bytes of the largest layer in full precision after the prompt, where a method compresses it only then."""
    most: Any = 0
    for group in groups:
        layout = group.cache
        if layout is None or (layout.method.is_full and layout.method.protocol == "after_prefill"):
            continue
        if layout.method.protocol == "after_prefill":
            rows = layout.attention.rows(prompt)
            width = sum(s.place.heads * -(-s.place.width * value_bits // 8) for s in layout.sides)
            most = largest(most, batch * rows * width)
    return most
