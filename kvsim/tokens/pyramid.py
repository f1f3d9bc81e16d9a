"""A prompt budget that falls linearly from the first layer to the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvsim.budgets import Windowed, half_even, prompt_rows, smaller
from kvsim.parts import Budget, Place, Rows, setting
from kvsim.scores import SCORES
from kvsim.workload import Count


@dataclass(frozen=True)
class Pyramid(Windowed):
    """SnapKV's selection with B rows a layer on average, more in early layers; the rule in whole numbers is `kept`.

    T prompt rows, p = window + sinks, B = min(T, max(p, ceil(budget * T))), L layers, this one l:
        low = B / beta, high = 2 B - low; where high >= T - p: high = T - p, low = 2 B - high
        where T >= high >= low >= p and L > 1: kept = high - l (high - low) / (L - 1), to the nearest whole number,
        halves to the even one; otherwise every layer keeps B.
    Layers l and L - 1 - l keep 2 B together, so all layers keep exactly L * B rows. This is kvpress's rule with B
    rounded up; `l` counts all layers of the model. A budget in rows is the average, which early layers exceed.
    """

    name: ClassVar[str] = "pyramid"
    summary: ClassVar[str] = "SnapKV with budgets that fall from layer to layer"
    source: ClassVar[str] = "Cai et al., PyramidKV, arXiv 2406.02069; kvpress PyramidKVPress"
    survey: ClassVar[str] = "4.2.1, 7.1"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "prefill"
    by_layer: ClassVar[bool] = True

    budget: Budget = setting(0.25, always=True, what="rows of the prompt kept on average over layers")
    beta: int = setting(20, low=1, high=256, what="the last layer gets budget / beta; larger is steeper")
    window: int = setting(32, low=1, high=4096, what="last queries of the prompt, whose rows stay")
    kernel: int = setting(5, low=1, high=1023, what="neighbours over which scores are averaged, odd")
    sinks: int = setting(0, low=0, what="first rows inside the budget")
    score: str = setting("window", choices=tuple(SCORES), what="the importance that ranks the other rows")

    def kept(self, prompt: Count, layer: int, n_layers: int) -> Any:
        """Rows of the prompt that `layer` of `n_layers` keeps (the rule above, everything times beta)."""
        safe = self.window + self.sinks
        even = self.even(prompt)
        if n_layers < 2:
            return even
        high = smaller((2 * self.beta - 1) * even, self.beta * (prompt - safe))
        low = 2 * self.beta * even - high
        slopes = (self.beta * prompt >= high) & (high >= low) & (low >= self.beta * safe)
        steps = n_layers - 1
        sloped = half_even(high * steps - layer * (high - low), self.beta * steps)
        return even + slopes * (sloped - even)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """The kept prompt of this layer and every later row."""
        return prompt_rows(self.kept(prompt, place.layer, place.n_layers), new)
