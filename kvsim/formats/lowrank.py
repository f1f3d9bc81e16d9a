"""A correction: the best rank-r approximation of each block's quantization error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Buffer, Correction, Place, per_tokens, setting
from kvsim.workload import Count

SWEEPS = 2
"""Subspace iterations after which the factors are taken."""


@dataclass(frozen=True)
class LowRank(Correction):
    """x - decode(encode(x)) of a flushed block is nearly A B with A (rows x r) and B (r x width), per head.

    A block needs more rows than the rank, or its factors would be larger than its rows: where a format flushes fewer
    (row by row, say) only the prompt's block is corrected. Written after other corrections, it approximates the error
    that they leave.
    """

    name: ClassVar[str] = "lowrank"
    summary: ClassVar[str] = "rank-r of each block's error"
    source: ClassVar[str] = "Kang et al., GEAR, arXiv 2403.05527"
    survey: ClassVar[str] = "5.2"

    rank: int = setting(4, low=1, high=4096, always=True, what="rank of the error that is kept")

    @property
    def row_addressable(self) -> bool:
        """A block's B cannot be freed while one of its rows lives."""
        return False

    @property
    def least_block_rows(self) -> int:
        """One row more than the rank."""
        return self.rank + 1

    def encode_row_flops(self, place: Place) -> float:
        """The error (2 a value), then two products with r columns a sweep and one more for the factors."""
        return (2.0 + 2.0 * self.rank * (2 * SWEEPS + 1)) * place.width

    def read_flops(self, place: Place) -> float:
        """A row's share of A B, added while it is decoded."""
        return 2.0 * self.rank * place.width

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """A grows with the rows, B with the blocks (in units as if a block had 64 rows); both in full precision."""
        grows = per_tokens(64) * self.rank
        return (
            Buffer("row_factors", place.heads, rows, self.rank, place.value_bits),
            Buffer("block_factors", place.heads, blocks * self.rank, place.width, place.value_bits, grows),
        )
