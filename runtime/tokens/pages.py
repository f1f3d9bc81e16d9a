"""Store everything, read the pages whose keys may matter, running."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.tokens.pages import Pages
from runtime.budgets import best
from runtime.parts import PolicyTwin, Prompt, Step, Tensors


class PagesTwin(PolicyTwin):
    """Least and largest key of each page; pages rank by the largest product that a query can have with them."""

    part_name = "pages"
    part: Pages
    step_rows = "new"

    @property
    def dense(self) -> bool:
        """Whether this layer reads everything and holds no bounds."""
        return self.part.dense(self.place)

    def start(self, prompt: Prompt, kept: Tensor | None) -> Tensors:
        """Bounds of the prompt's pages."""
        return {} if self.dense else self._bounds(prompt.keys)

    def _bounds(self, keys: Tensor) -> Tensors:
        """Bounds of whole pages and a partial newest one, [B, H, pages, d]."""
        size = self.part.size
        found = {}
        for name, filler in (("page_min", float("inf")), ("page_max", float("-inf"))):
            padded = torch.nn.functional.pad(keys, (0, 0, 0, -keys.shape[2] % size), value=filler)
            paged = padded.reshape(*keys.shape[:2], padded.shape[2] // size, size, keys.shape[3])
            found[name] = paged.amin(3) if name == "page_min" else paged.amax(3)
        return found

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """The newest page's bounds move; nothing is dropped."""
        if self.dense:
            return state, None
        if step.keys is None:
            raise KvsimError("pages needs the step's keys, which were not handed to the policy")
        keys, filled = step.keys[:, :, -step.new :], (step.rows - step.new) % self.part.size
        if not filled:
            return {k: torch.cat([state[k], v], dim=2) for k, v in self._bounds(keys).items()}, None
        # the old bounds stand for the rows that the newest page already has
        first = keys[:, :, : self.part.size - filled]
        later = self._bounds(keys[:, :, self.part.size - filled :])
        low = torch.minimum(state["page_min"][:, :, -1:], first.amin(2, keepdim=True))
        high = torch.maximum(state["page_max"][:, :, -1:], first.amax(2, keepdim=True))
        return {
            "page_min": torch.cat([state["page_min"][:, :, :-1], low, later["page_min"]], dim=2),
            "page_max": torch.cat([state["page_max"][:, :, :-1], high, later["page_max"]], dim=2),
        }, None

    def attended(self, state: Tensors, queries: Tensor, rows: int) -> Tensor | None:
        """Rows of the selected pages, ascending [B, H, m]; pages without bounds for all their rows are the newest."""
        if self.dense:
            return None
        size, pages, wanted = self.part.size, int(self.part.pages(rows)), int(self.part.selected(rows))
        if wanted == pages:
            return None
        low, high = state["page_min"].float(), state["page_max"].float()
        complete = min((rows - queries.shape[2]) // size, pages - 1)
        bounds = upper_bounds(queries.float(), low[:, :, :complete], high[:, :, :complete])
        newest = bounds.new_full((*bounds.shape[:2], pages - complete), float("inf"))
        chosen = best(torch.cat([bounds, newest], dim=2), wanted)
        inside = torch.arange(size, device=chosen.device)
        found = (chosen[..., None] * size + inside).flatten(2)
        return found[:, :, : wanted * size - (pages * size - rows)]


def upper_bounds(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """sum over channels of max(q * low, q * high), the largest over queries and query heads: [B, H, pages]."""
    batch, heads = low.shape[:2]
    grouped = queries.reshape(batch, heads, -1, queries.shape[3])
    bounds = grouped.clamp_min(0) @ high.transpose(2, 3) + grouped.clamp_max(0) @ low.transpose(2, 3)
    return bounds.amax(2)
