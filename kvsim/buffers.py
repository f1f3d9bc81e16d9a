"""What parts hold and do, as numbers: stored tensors, the place where a part works, its work, the rows that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvsim.workload import Count

ALLOCATION_ROWS = 256
"""Tokens by which a growing buffer is enlarged (semantics: `allocated_bytes`)."""


@dataclass(frozen=True)
class Buffer:
    """One stored tensor: `heads` x `rows` rows of `width` values of `bits` bits, each row padded to whole bytes.

    rows_per_unit: rows by which it grows when tokens arrive (0: fixed size). per_model: one for all sequences.
    """

    name: str
    heads: int
    rows: Count
    width: int
    bits: int
    rows_per_unit: int = ALLOCATION_ROWS
    per_model: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return -(-self.width * self.bits // 8)

    @property
    def bytes(self) -> Count:
        """Live bytes for one sequence (or for the model when `per_model`)."""
        return self.heads * self.row_bytes * self.rows

    @property
    def allocated(self) -> Count:
        """Bytes with the rows rounded up to the allocation unit."""
        if not self.rows_per_unit:
            return self.bytes
        return self.heads * self.row_bytes * (-(-self.rows // self.rows_per_unit) * self.rows_per_unit)


def per_tokens(tokens: int) -> int:
    """The allocation unit, in rows, of a buffer that holds one row for every `tokens` tokens."""
    return -(-ALLOCATION_ROWS // tokens)


@dataclass(frozen=True)
class Place:
    """Where a part works: one side of one layer.

    heads: stored KV heads; width: values per head and row; n_heads: query heads; value_bits: bits of full precision.
    """

    side: Literal["k", "v"]
    heads: int
    width: int
    n_heads: int
    value_bits: int = 16
    layer: int = 0
    n_layers: int = 1
    mla: bool = False

    @property
    def where(self) -> str:
        """How errors name this place."""
        return f"{'keys' if self.side == 'k' else 'values'} of layer {self.layer} (width {self.width})"


@dataclass(frozen=True)
class Work:
    """Arithmetic and traffic for one sequence; arrays broadcast with the counts they came from.

    products: flops of matrix products, which run at the rate of matrix units; flops: all other arithmetic.
    """

    flops: Any = 0.0
    read_bytes: Any = 0.0
    write_bytes: Any = 0.0
    products: Any = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.write_bytes + other.write_bytes,
            self.products + other.products,
        )

    @property
    def arithmetic(self) -> Any:
        """All flops."""
        return self.flops + self.products

    def __bool__(self) -> bool:
        return any(np.any(x) for x in (self.flops, self.read_bytes, self.write_bytes, self.products))


Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Eager:
    """What torch does beyond counted work where no kernel was written for it: calls, and work between them."""

    calls: Any = 0.0
    work: Work = Work()


@dataclass(frozen=True)
class Rows:
    """What a token policy keeps for one layer and KV head.

    prompt: rows left after the prompt; stored: rows held after N tokens; attended: rows that the step which writes
    row N reads (before any eviction of that step). estimate: the assumption in words where data decide, with the
    range in low and high.
    """

    prompt: Count
    stored: Count
    attended: Count
    estimate: str = ""
    low: Count | None = None
    high: Count | None = None
