"""The plain decoder: grouped-query attention, a feed-forward, norms; families differ by the facts in `Traits`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsim.architectures import windows
from kvsim.architectures.fields import Fields
from kvsim.architectures.parts import (
    NORM,
    Part,
    assemble,
    each,
    head_sizes,
    layer,
    layer_count,
    mlp,
    projections,
)
from kvsim.model import Attention, Layer, ModelSpec

FeedForward = Callable[[int], Part]
"""From a layer's index to its feed-forward."""


@dataclass(frozen=True)
class Traits:
    """Facts by which plain decoders differ.

    A bias is True, False or the name of the flag that decides. `norm` is the kind of norm, `norms` how many a layer
    has. `qk_norm`: "head" (one vector of head width for q, one for k), "width" (over all heads) or "" (none), `qk_flag`
    the flag that switches it. `window` resolves the windows; `inner` names the feed-forward's width. `extra` counts
    what else a layer learns (sinks, scalars, further norms).
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    norm: str = "rms"
    norms: int = 2
    final_norm: bool = True
    qk_norm: str = ""
    qk_flag: str = ""
    window: windows.Rule = windows.full
    inner: str = "intermediate_size"
    head_bias: bool | str = False
    extra: Callable[[Fields], int] | None = None


def switch(f: Fields, value: bool | str) -> bool:
    """A trait that is a fact or the name of a flag."""
    return f.flag(value) if isinstance(value, str) else value


def attention_of(kv: int, heads: int, dim: int, window: int, v_dim: int = 0) -> Attention:
    """Grouped-query attention with or without a window."""
    return Attention("sliding" if window else "full", heads, kv, dim, v_dim or dim, window)


def qk_norm_size(kind: str, heads: int, kv: int, dim: int, norm: str) -> int:
    """Parameters of the norms on queries and keys."""
    return {"": 0, "head": 2 * dim, "width": (heads + kv) * dim}[kind] * NORM[norm]


def decoder(f: Fields, traits: Traits, *, feed: Feed | None = None) -> ModelSpec:
    """A plain decoder with `traits`; `feed` builds the feed-forwards of families with experts."""
    hidden, count = f.size("hidden_size"), layer_count(f)
    heads, kv, dim = head_sizes(f, hidden)
    attn = projections(hidden, heads, kv, dim, qkv_bias=switch(f, traits.qkv_bias), o_bias=switch(f, traits.o_bias))
    qk_kind = traits.qk_norm if not traits.qk_flag or f.flag(traits.qk_flag) else ""
    norms = traits.norms * NORM[traits.norm] * hidden + qk_norm_size(qk_kind, heads, kv, dim, traits.norm)
    norms += traits.extra(f) if traits.extra else 0
    ffn = (feed or dense_feed)(f, hidden, traits)
    spans = traits.window(f, count)

    def one(i: int) -> Layer:
        return layer(attention_of(kv, heads, dim, spans[i]), attn, Part((), norms), ffn(i))

    final = NORM[traits.norm] * hidden * traits.final_norm
    return assemble(f, each(count, one), hidden, f.size("vocab_size"), final=final,
                    head_bias=switch(f, traits.head_bias))


def dense_feed(f: Fields, hidden: int, traits: Traits) -> FeedForward:
    """The same dense feed-forward in every layer."""
    part = mlp(hidden, f.size(traits.inner), gated=traits.gated, bias=switch(f, traits.mlp_bias))
    return lambda i: part


Feed = Callable[[Fields, int, Traits], FeedForward]
"""From fields, hidden size and traits to the feed-forward of each layer."""
