"""Building blocks that families share: projections, feed-forwards, experts, norms, and the final assembly of a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsim.architectures.fields import LAYERS_MAX, Fields
from kvsim.errors import KvsimError, shown
from kvsim.model import Attention, Layer, Matrix, ModelSpec, State

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "float8_e4m3fn": "fp8"}
_DTYPES |= {short: short for short in ("fp32", "fp16", "bf16")}
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
NORM = {"rms": 1, "layer": 2, "none": 0}
"""Learned vectors of one norm: RMSNorm has a weight, LayerNorm a weight and a bias."""


@dataclass(frozen=True)
class Part:
    """Some matrices and the number of small parameters beside them; parts add."""

    matrices: tuple[Matrix, ...] = ()
    small: int = 0

    def __add__(self, other: Part) -> Part:
        return Part(self.matrices + other.matrices, self.small + other.small)


def layer(attention: Attention | None, *parts: Part, states: tuple[State, ...] = (),
          cross: Attention | None = None) -> Layer:
    """A layer of these parts."""
    total = sum(parts, Part())
    return Layer(attention, cross, states, total.matrices, total.small)


def projections(hidden: int, heads: int, kv: int, dim: int, *, v_dim: int = 0, qkv_bias: bool = False,
                o_bias: bool = False, prefix: str = "", k_eq_v: bool = False, source: int = 0) -> Part:
    """q, k, v and o of grouped-query attention; keys and values read `source` features (default: hidden)."""
    v_dim, source = v_dim or dim, source or hidden
    found = [Matrix(prefix + "q_proj", heads * dim, hidden, bias=qkv_bias),
             Matrix(prefix + "k_proj", kv * dim, source, bias=qkv_bias)]
    if not k_eq_v:
        found.append(Matrix(prefix + "v_proj", kv * v_dim, source, bias=qkv_bias))
    return Part((*found, Matrix(prefix + "o_proj", hidden, heads * v_dim, bias=o_bias)))


def mlp(hidden: int, inner: int, *, gated: bool = True, bias: bool = False, prefix: str = "") -> Part:
    """A feed-forward: up, down and, where gated, gate."""
    gate = (Matrix(prefix + "gate_proj", inner, hidden, bias=bias),) if gated else ()
    return Part((*gate, Matrix(prefix + "up_proj", inner, hidden, bias=bias),
                 Matrix(prefix + "down_proj", hidden, inner, bias=bias)))


def experts(hidden: int, inner: int, count: int, top_k: int, *, gated: bool = True, bias: bool = False,
            router: bool = True, router_bias: bool = False, correction: bool = False) -> Part:
    """Routed experts and their router; `correction` is the per-expert score bias of DeepSeek-V3 style routers."""
    if top_k > count:
        raise KvsimError(f"a token cannot pass through {top_k} of {count} experts")
    one = mlp(hidden, inner, gated=gated, bias=bias, prefix="experts.")
    if count < 1:
        return Part()
    routed = tuple(Matrix(m.name, m.out_features, m.in_features, count, top_k, True, m.bias) for m in one.matrices)
    gate = (Matrix("router", count, hidden, bias=router_bias),) if router else ()
    return Part(gate + routed, count if correction else 0)


def head_sizes(f: Fields, hidden: int) -> tuple[int, int, int]:
    """(query heads, KV heads, head width) in the usual spelling; KV heads default to query heads."""
    heads = f.size("num_attention_heads", high=2**16)
    kv = f.size("num_key_value_heads", derive=heads, high=2**16)
    if heads % kv:
        raise f.fail("num_key_value_heads", f"= {kv} does not divide num_attention_heads = {heads}")
    return heads, kv, head_width(f, hidden, heads)


def head_width(f: Fields, hidden: int, heads: int, name: str = "head_dim") -> int:
    """head_dim, else hidden/heads, which must then be whole."""
    width = f.size(name, derive=hidden // heads or 1, high=2**16)
    if not f.has(name) and f.default(name) is None and hidden % heads:
        raise f.fail("hidden_size", f"= {hidden} is no multiple of num_attention_heads = {heads} and {name} is missing")
    return width


def layer_count(f: Fields, name: str = "num_hidden_layers", *others: str) -> int:
    """Number of decoder layers, bounded."""
    return f.size(name, *others, high=LAYERS_MAX)


def each(count: int, build: Callable[[int], Layer]) -> tuple[Layer, ...]:
    """One layer per index; equal ones become one object, so that large models stay cheap."""
    seen: dict[Layer, Layer] = {}
    return tuple(seen.setdefault(x, x) for x in map(build, range(count)))


def dtype_of(f: Fields) -> str:
    """The declared dtype of the weights, bf16 (noted) where the file says none."""
    for name in ("dtype", "torch_dtype"):
        value = f.get(name)
        if value is None or value == "auto":
            continue
        word = str(value).removeprefix("torch.")
        if not isinstance(value, str) or word not in _DTYPES:
            raise f.fail(name, f"= {shown(value)} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[word]
    f.notes.append(f"{f.where('dtype')} is missing: bf16 is assumed for bytes")
    return "bf16"


def context_of(f: Fields) -> int:
    """The longest context that the config declares, 0 where it says none."""
    for name in _CONTEXTS:
        value = f.get(name)
        if value is not None:
            return f.checked(name, value, high=2**40)
    return 0


def assemble(f: Fields, layers: Sequence[Layer], hidden: int, vocab: int, *, final: int = 0, tied: bool | None = None,
             head_bias: bool = False, extra: int = 0, embeddings: tuple[Matrix, ...] = (), width: int = 0) -> ModelSpec:
    """Put a spec together: token table, head, final norm, and what the config says of dtype, context and MTP layers.

    `final` counts final-norm parameters, `extra` other small ones, `embeddings` further tables (positions),
    `width` the embedding width where it is not `hidden`.
    """
    width = width or hidden
    tied = f.flag("tie_word_embeddings") if tied is None else tied
    next_n = f.get("num_nextn_predict_layers", "num_mtp_layers")
    next_n = f.get("num_mtp_modules") if next_n is None else next_n
    out = Matrix("lm_head", vocab, width, bias=head_bias)
    spare = vocab if head_bias and tied else 0  # the bias of a tied head is no part of the table
    return ModelSpec(
        name=f.model_type, architecture=f.model_type, layers=tuple(layers), hidden_size=hidden,
        vocab_size=vocab, embeddings=(Matrix("embed_tokens", vocab, width), *embeddings), head=out, tied=tied,
        other_parameters=final + extra + spare, dtype=dtype_of(f), max_context=context_of(f),
        next_n_layers=0 if next_n is None else f.checked("num_nextn_predict_layers", next_n, 0, LAYERS_MAX))
