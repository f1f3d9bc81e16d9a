"""A layer of a compressed cache driven with random rows, and the bytes that kvsim predicts for it, buffer by buffer."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim import parse_method
from kvsim.errors import KvsimError
from kvsim.layout import layer_layout
from kvsim.model import Attention, Layer
from kvsim.ragged import running_layout
from runtime.attention import Rule
from runtime.calibration import calibrate
from runtime.layers import CompressedLayer
from runtime.learning import wants_rotation
from runtime.rope import Rotation
from runtime.sharing import Geometry, Surroundings

LAYER, DEPTH = 3, 6
"""Where the layer stands: behind the layers that some policies leave whole."""


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one layer."""

    n_heads: int = 4
    n_kv_heads: int = 2
    width: int = 32
    window: int = 0

    @property
    def geometry(self):
        return Geometry(self.n_heads, self.n_kv_heads, self.width, self.width, self.window, LAYER, DEPTH)

    @property
    def analytic(self):
        kind = "sliding" if self.window else "full"
        return Layer(
            attention=Attention(kind, self.n_heads, self.n_kv_heads, self.width, self.width, window=self.window)
        )


@cache
def tiny(shape):
    """A one-layer Llama of this shape: it lends its rotary embedding and calibrates parts."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=61, hidden_size=48, intermediate_size=32, num_hidden_layers=1, head_dim=shape.width,
                         num_attention_heads=shape.n_heads, num_key_value_heads=shape.n_kv_heads)  # fmt: skip
    return LlamaForCausalLM(config).eval()


@cache
def calibration(text, shape):
    """Tensors of the method's calibrated parts for this layer; {} where nothing is calibrated."""
    ids = torch.randint(61, (2, 96), generator=torch.Generator().manual_seed(0))
    found = calibrate(tiny(replace(shape, window=0)), list(ids), text, length=96)
    return {k.removeprefix("layer.0."): v for k, v in found.tensors.items()}


CALIBRATED = ("elitekv", "palu", "learned_projection", "auxiliary", "fisher", "scale=tensor", "by=", "gradient")


def layer_of(text, shape, dtype=torch.float32, prompt_tokens=None):
    """A fresh layer under a method; KvsimError where the method cannot stand there."""
    method = parse_method(text)
    layer_layout(shape.analytic, method, 1, 0, 32, LAYER, DEPTH)
    model = tiny(shape)
    rotation = Rotation(model, model.model.layers[0].self_attn) if wants_rotation(method) else None
    own = calibration(text, shape) if any(word in str(method) for word in CALIBRATED) else {}
    around = Surroundings(dtype, torch.device("cpu"), rotation, own, 0)
    return CompressedLayer(method, shape.geometry, around, prompt_tokens)


class Stream:
    """Random rows fed to a layer, token by token or in chunks."""

    def __init__(self, layer, shape, batch=1, dtype=torch.float32, seed=0):
        self.layer, self.shape, self.batch, self.dtype = layer, shape, batch, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def _draw(self, heads, count):
        # small, so that scales calibrated on the tiny model reach them
        shape = (self.batch, heads, count, self.shape.width)
        return torch.randn(shape, generator=self.generator).mul(0.05).to(self.dtype)

    def feed(self, count):
        """The next rows through `update` and `attend`; the output [B, Hq, count, d]."""
        q, k, v = (self._draw(n, count) for n in (self.shape.n_heads, self.shape.n_kv_heads, self.shape.n_kv_heads))
        seen = self.layer.get_seq_length()
        at = torch.arange(seen, seen + count)[None]
        self.layer.update(k, v, kwargs={"position_ids": at})
        return self.layer.attend(q, None, Rule(self.shape.width**-0.5))


def held(layer):
    """Live bytes and storage bytes by buffer name."""
    live, stored = Counter(), Counter()
    for name, _, size, storage in layer.held():
        live[name] += size
        stored[name] += storage
    return +live, +stored


def predicted(text, shape, batch, prompt, new, bits=32, rows=None):
    """The same from kvsim.layout; rows [B * H]: what a running layer holds, where data decide it."""
    method = parse_method(text)
    live, stored = Counter(), Counter()
    where = (shape.analytic, method, prompt, new, bits, LAYER, DEPTH)
    layout = layer_layout(*where) if rows is None else running_layout(*where, rows)
    for b in layout.buffers:
        live[b.name] += int(layout.copies(b, batch) * b.bytes)
        stored[b.name] += int(layout.copies(b, batch) * b.allocated)
    return +live, +stored


def differences(layer, text, shape, batch, prompt, new, bits=32, by_rows=False):
    """Buffers whose bytes are not as predicted: {name: (held, predicted)}; empty where all agree."""
    rows = layer.rows() if by_rows else None
    found = {}
    for kind, mine, theirs in zip(
        ("live", "stored"), held(layer), predicted(text, shape, batch, prompt, new, bits, rows), strict=True
    ):
        found |= {f"{kind} {n}": (mine[n], theirs[n]) for n in mine.keys() | theirs.keys() if mine[n] != theirs[n]}
    return found


def composes(text):
    """The method, or None where it is refused at parse time."""
    try:
        return parse_method(text)
    except KvsimError:
        return None
