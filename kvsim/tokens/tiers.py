"""Tiers by age: the older a row, the sparser what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from kvsim.budgets import larger, multiples, running_rows, smaller
from kvsim.errors import KvsimError
from kvsim.parts import Place, Rows, TokenPolicy, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Tiers(TokenPolicy):
    """The newest sizes[0] rows at strides[0], the next sizes[1] at strides[1] ...; older rows leave, sinks stay.

    Row i of tier t is kept where i divides by strides[t]. Each stride divides the next: what an older tier keeps is
    then still there when rows reach it, and the count has a closed form: multiples of the stride in each tier's span.
    """

    name: ClassVar[str] = "tiers"
    summary: ClassVar[str] = "retention that thins with age"
    source: ClassVar[str] = "survey 4.1.1, hierarchical dropping"
    survey: ClassVar[str] = "4.1.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "rows"
    per_head: ClassVar[bool] = False

    sizes: tuple[int, ...] = setting((256, 1024, 4096), low=1, always=True, what="tokens each tier spans, newest first")
    strides: tuple[int, ...] = setting((1, 4, 16), low=1, always=True, what="distance of kept rows in each tier")
    sinks: int = setting(4, low=0, what="first rows that always stay")

    @property
    def spared(self) -> int:
        """The newest tiers that skip nothing."""
        return sum(size for size, stride in zip(self.sizes, self.strides, strict=True) if stride == 1)

    def check(self) -> None:
        """One stride a tier, each dividing the next."""
        if len(self.sizes) != len(self.strides):
            raise KvsimError(f"tiers: {len(self.sizes)} sizes but {len(self.strides)} strides; give as many")
        for fine, coarse in pairwise(self.strides):
            if coarse % fine:
                raise KvsimError(f"tiers: stride {coarse} is not a multiple of {fine}, so its rows have left already")

    def kept(self, n: Any) -> Any:
        """Rows held after n tokens."""
        total = smaller(n, self.sinks)
        end, reach = n, 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            reach += size
            start = larger(0, n - reach)
            total = total + multiples(larger(start, self.sinks), end, stride)
            end = start
        return total

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Bounded by sinks + sum of sizes / strides; a step reads one row more, before it evicts."""
        return running_rows(self.kept, prompt, new)
