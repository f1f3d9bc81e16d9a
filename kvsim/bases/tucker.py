"""Tucker: tokens, heads and channels each in their own subspace, joined by a core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.errors import KvsimError
from kvsim.latent import Projection, check_rank, ready, row_bytes, svd_flops
from kvsim.parts import Buffer, Latent, Place, Work, setting, written
from kvsim.workload import Count


@dataclass(frozen=True)
class Tucker(Projection):
    """K (tokens x heads x channels) = core x1 U1 x2 U2 x3 U3, fitted by higher-order orthogonal iteration.

    U1 grows by one row of rt coefficients a token, by least squares on the fixed core unfolding; the core
    (rt x rh x rd), U2 (heads x rh) and U3 (width x rd) are fixed for the sequence.
    """

    name: ClassVar[str] = "tucker"
    summary: ClassVar[str] = "Tucker decomposition over tokens, heads, channels"
    source: ClassVar[str] = "survey 5.4; De Lathauwer et al., 2000 (HOOI); OpenReview aQ6RiOijal"
    survey: ClassVar[str] = "5.4"

    ranks: tuple[int, ...] = setting((64, 0, 32), low=0, always=True, what="ranks of tokens, heads, channels; 0 is all")
    iterations: int = setting(10, low=1, high=1000, what="sweeps of the orthogonal iteration")

    def check(self) -> None:
        """Three ranks, and a token has coefficients."""
        if len(self.ranks) != 3 or self.ranks[0] < 1:
            raise KvsimError(f"tucker: ranks are (tokens,heads,channels), the first above 0; got {written(self.ranks)}")

    @property
    def minimum_rows(self) -> int:
        """The token rank: fewer rows stay full."""
        return self.ranks[0]

    def sizes(self, place: Place) -> tuple[int, int, int]:
        """Ranks at this place, `0` resolved; KvsimError where one exceeds its mode or the token rank the core."""
        tokens, heads, channels = self.ranks
        heads, channels = heads or place.heads, channels or place.width
        check_rank("tucker", heads, place.heads, place, "the heads")
        check_rank("tucker", channels, place.width, place)
        check_rank("tucker", tokens, heads * channels, place, "head rank x channel rank")
        return tokens, heads, channels

    @property
    def joins_heads(self) -> bool:
        """One row of coefficients stands for several heads."""
        return True

    def latent(self, place: Place) -> Latent:
        """A row of U1 for all heads together."""
        return Latent(1, self.sizes(place)[0])

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Core and the fixed factors."""
        (rt, rh, rd), there, bits = self.sizes(place), ready(rows, self.ranks[0]), place.value_bits
        return (
            Buffer("core", 1, rt * there, rh * rd, bits, rows_per_unit=0),
            Buffer("head_factor", 1, place.heads * there, rh, bits, rows_per_unit=0),
            Buffer("channel_factor", 1, place.width * there, rd, bits, rows_per_unit=0),
        )

    def head_flops(self, place: Place) -> float:
        """A query through U3, its head's row of U2 and the core (or an output the other way)."""
        rt, rh, rd = self.sizes(place)
        return 2.0 * place.width * rd + rh * rd + 2.0 * rt * rh * rd

    def rebuild_flops(self, place: Place) -> float:
        """A row through core, U2 and U3."""
        rt, rh, rd = self.sizes(place)
        return 2.0 * rt * rh * rd + 2.0 * rh * rd * place.heads + 2.0 * place.heads * rd * place.width

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Each sweep contracts the rows three times and takes the SVD of what is left; the rows are read each time."""
        (rt, rh, rd), h, w = self.sizes(place), place.heads, place.width
        n: Any = 1.0 * rows
        products = 2 * n * h * w * (2 * rd + rh) + 2 * n * (h * rd * (rh + rt) + rh * w * rt)
        shapes = ((rows, rh * rd), (h, rt * rd), (w, rt * rh))
        small, wide = (sum(one[i] for one in (svd_flops(*s) for s in shapes)) for i in (0, 1))
        there = ready(rows, rt)
        fixed = sum(b.bytes for b in self.buffers(rows, 0, place))
        read = there * 3.0 * self.iterations * rows * row_bytes(place)
        sweeps = there * self.iterations
        return Work(sweeps * small, read, 1.0 * fixed, sweeps * (products + wide))

    def write_work(self, place: Place) -> Work:
        """A row through U3, U2 and the core, then a solve with its factored rt x rt normal matrix."""
        rt, rh, rd = self.sizes(place)
        flops = 2.0 * place.heads * rd * (place.width + rh) + 2.0 * rh * rd * rt + 2.0 * rt * rt
        fixed = sum(int(b.bytes) for b in self.buffers(rt, 0, place))
        return Work(flops, float(fixed))
