"""Which formats the kernels read, and how their rows then lie in memory; it knows no store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.parts import FormatTwin

ROWS, INT, GGUF, FLOAT8, TABLE = range(5)
"""Forms of the encoding, as csrc/common.h numbers them."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the dtypes of rows and scales."""
FLOAT8_KINDS = {"e4m3": 3, "e5m2": 4}
SCALES = {"fp32": 0, "bf16": 1, "fp16": 2}
WIDEST = 512
"""Channels of a row whose queries fit the kernels' words."""
TOKENS = 16
"""Tokens of a tile whose lanes are tokens."""


@dataclass(frozen=True)
class Plan:
    """How one side is read. Layouts are (rows, elements): so many rows lie interleaved, element by element.

    group: channels that share a scale; unit: tokens that do (0: scales by token). dots: integer dot products.
    table: makes the table of values (and, for 8-bit floats, the scale) from the twin's model buffers. triton: read by
    the Triton kernels, not by those of the CPU.
    """

    form: int
    bits: int = 0
    group: int = 0
    unit: int = 0
    symmetric: bool = False
    scale_type: int = 2
    dots: bool = False
    lows: bool = False
    names: tuple[str, str, str] = ("codes", "scale", "min")
    codes: tuple[int, int] | None = None
    scales: tuple[int, int] | None = None
    table: Callable[[FormatTwin], Tensor] | None = None
    triton: bool = False

    def layout(self, name: str) -> tuple[int, int] | None:
        """How a buffer's rows are interleaved; None: they lie one after another."""
        if name == self.names[0]:
            return self.codes
        return self.scales if name in self.names[1:] else None


def plan(twin: FormatTwin, dots: bool) -> Plan | str:
    """The plan for a format at its place, or why there is none. dots: whether the machine has integer dot products."""
    make = _PLANS.get(twin.part_name)
    if make is None:
        return f"no kernel reads {twin.part_name}"
    return make(twin, dots)


def _full(twin: FormatTwin, dots: bool) -> Plan | str:
    return Plan(ROWS, group=twin.place.width)


def _int(twin: FormatTwin, dots: bool) -> Plan | str:
    part, width, keys = twin.part, twin.place.width, twin.place.side == "k"
    if part.axis not in ("token", "row", "channel"):
        return f"no kernel reads int with axis={part.axis}"
    unit = part.unit if part.axis == "channel" else 0
    if unit % TOKENS:
        return f"int: groups of {unit} tokens are no multiple of {TOKENS}"
    group = width if unit else part.width_group(width)
    whole = (32 if keys else 8) // part.bits if part.bits in (8, 4, 2) else 0
    dots = dots and bool(whole) and group % whole == 0 and width % whole == 0 and width <= WIDEST
    if not (dots and not keys) and width * part.bits % 32:
        return f"int: rows of {width} codes of {part.bits} bits are no whole 32-bit words"
    codes = (TOKENS, 4) if keys or not dots else (4, 1)
    return Plan(INT, part.bits, group, unit, part.symmetric, SCALES[part.scale_dtype], dots, codes=codes,
                scales=None if unit else (TOKENS, 1))


def _gguf(twin: FormatTwin, dots: bool) -> Plan | str:
    kind = twin.part.type
    if kind not in ("q8_0", "q4_0", "q4_1"):
        return f"no kernel reads gguf type {kind}"
    dots = dots and twin.place.width <= WIDEST
    codes = (4, 1) if dots and twin.place.side != "k" else (TOKENS, 2)
    return Plan(GGUF, int(kind[1]), 32, dots=dots, lows=kind.endswith("_1"), names=("blocks", "", ""), codes=codes)


def _float8(twin: FormatTwin, dots: bool) -> Plan | str:
    one = twin.part.scale == "tensor"
    return Plan(FLOAT8, FLOAT8_KINDS[twin.part.kind], twin.place.width,
                table=(lambda t: t.model_buffers()["scale"].float().reshape(1, 1, 1)) if one else None)


def _kmeans(twin: FormatTwin, dots: bool) -> Plan | str:
    bits, width = twin.part.bits, twin.place.width
    if bits > 4:
        return f"kmeans: tables of {2**bits} values do not fit a vector; bits of 4 or less do"
    if width * bits % 32:
        return f"kmeans: rows of {width} codes of {bits} bits are no whole 32-bit words"
    return Plan(TABLE, bits, width, names=("codes", "scale", "middle"), codes=(TOKENS, 4), scales=(TOKENS, 1),
                table=_codebook)


def _codebook(twin: FormatTwin) -> Tensor:
    """[heads or 1, width or 1, 16] fp32."""
    book = twin.model_buffers()["codebook"][0].float()
    return book.repeat(1, 1, 16 // book.shape[-1]).contiguous()


_PLANS: dict[str, Callable[[FormatTwin, bool], Plan | str]] = {
    "full": _full, "int": _int, "gguf": _gguf, "float8": _float8, "kmeans": _kmeans,
}
