"""Token mixers with a state of fixed size: Mamba 1 and 2, delta nets, short convolutions; matrices and states."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.architectures.parts import Part
from kvsim.model import Matrix, State

FP32 = 32
"""transformers keeps recurrent states of Mamba and delta nets in float32, convolution states in the model's dtype."""


@dataclass(frozen=True)
class Mixer:
    """A mixer's parameters and what it keeps between tokens."""

    part: Part
    states: tuple[State, ...]


def mamba1(hidden: int, inner: int, state: int, kernel: int, rank: int, *, bias: bool, conv_bias: bool,
           norms: bool = False, heads: int = 1) -> Mixer:
    """Mamba-1 (arXiv:2312.00752); `norms`: Jamba's on dt, B and C; `heads`: Zamba's split of the inner width."""
    matrices = (Matrix("in_proj", 2 * inner, hidden, bias=bias),
                Matrix("x_proj", rank + 2 * state, inner // heads, heads, heads),
                Matrix("dt_proj", inner // heads, rank, heads, heads, bias=True),
                Matrix("out_proj", hidden, inner, bias=bias))
    small = inner * (kernel + conv_bias) + inner * state + inner + (rank + 2 * state if norms else 0)
    shape = (inner, state) if heads == 1 else (heads, inner // heads, state)
    return Mixer(Part(matrices, small), (State("conv", (inner, kernel)), State("recurrent", shape, FP32)))


def mamba2(hidden: int, heads: int, head_dim: int, state: int, groups: int, kernel: int, *, bias: bool, conv_bias: bool,
           norm: bool = True) -> Mixer:
    """Mamba-2 (arXiv:2405.21060): B and C are shared by groups of heads; a norm before the output where `norm`."""
    inner = heads * head_dim
    conv = inner + 2 * groups * state
    matrices = (Matrix("in_proj", inner + conv + heads, hidden, bias=bias),
                Matrix("out_proj", hidden, inner, bias=bias))
    small = conv * (kernel + conv_bias) + 3 * heads + (inner if norm else 0)
    return Mixer(Part(matrices, small),
                 (State("conv", (conv, kernel)), State("recurrent", (heads, head_dim, state), FP32)))


def delta_net(hidden: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, kernel: int) -> Mixer:
    """Gated delta net (arXiv:2412.06464) as Qwen3-Next has it: q, k, v and a gate z, two scalars a value head."""
    keys, values = k_heads * k_dim, v_heads * v_dim
    conv = 2 * keys + values
    matrices = (Matrix("in_proj_qkv", conv, hidden), Matrix("in_proj_z", values, hidden),
                Matrix("in_proj_ba", 2 * v_heads, hidden), Matrix("out_proj", hidden, values))
    states = (State("conv", (conv, kernel)), State("recurrent", (v_heads, k_dim, v_dim), FP32))
    return Mixer(Part(matrices, conv * kernel + 2 * v_heads + v_dim), states)


def kimi_delta(hidden: int, heads: int, dim: int, kernel: int) -> Mixer:
    """Kimi delta attention (arXiv:2510.26692): per-channel decay, low-rank forget and output gates."""
    width = heads * dim
    matrices = (*(Matrix(f"{x}_proj", width, hidden) for x in "qkv"), Matrix("b_proj", heads, hidden),
                Matrix("f_a_proj", dim, hidden), Matrix("f_b_proj", width, dim), Matrix("g_a_proj", dim, hidden),
                Matrix("g_b_proj", width, dim), Matrix("o_proj", hidden, width))
    small = 3 * width * kernel + width + heads + dim
    return Mixer(Part(matrices, small),
                 (State("conv", (3 * width, kernel)), State("recurrent", (heads, dim, dim), FP32)))


def short_conv(hidden: int, kernel: int, bias: bool) -> Mixer:
    """LFM2's gated short convolution."""
    matrices = (Matrix("in_proj", 3 * hidden, hidden, bias=bias), Matrix("out_proj", hidden, hidden, bias=bias))
    return Mixer(Part(matrices, hidden * (kernel + bias)), (State("conv", (hidden, kernel)),))


def lightning(hidden: int, heads: int, dim: int) -> Mixer:
    """MiniMax's lightning attention (arXiv:2501.08313): a key-value product a head, kept in the model's dtype."""
    width = heads * dim
    matrices = (Matrix("qkv_proj", 3 * width, hidden), Matrix("output_gate", width, hidden),
                Matrix("out_proj", hidden, width))
    return Mixer(Part(matrices, width), (State("recurrent", (heads, dim, dim)),))


def gated_lru(hidden: int, width: int, heads: int, kernel: int) -> Mixer:
    """RecurrentGemma's RG-LRU block (arXiv:2402.19427): block-diagonal gates, all projections with bias."""
    block = width // heads
    matrices = (Matrix("linear_y", width, hidden, bias=True), Matrix("linear_x", width, hidden, bias=True),
                Matrix("linear_out", hidden, width, bias=True),
                Matrix("lru.input_gate", block, block, heads, heads, bias=True),
                Matrix("lru.recurrent_gate", block, block, heads, heads, bias=True))
    states = (State("conv", (width, kernel - 1)), State("recurrent", (width,), FP32))
    return Mixer(Part(matrices, width * (kernel + 1) + width), states)
