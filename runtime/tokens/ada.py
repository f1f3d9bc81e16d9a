"""One prompt budget for all heads of a layer, running."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsim.tokens.ada import Ada
from runtime.budgets import ALWAYS, Smoothed, best, secured
from runtime.parts import Prompt, Step, Tensors


class AdaTwin(Smoothed):
    """Every head keeps its floor, then one selection over the layer's heads gives out the rest."""

    part_name = "ada"
    part: Ada
    ragged = True

    def select(self, prompt: Prompt) -> Tensor | None:
        """Rows [B, H, m] of the longest head, others padded with -1 behind; heads * B of them in a layer."""
        batch, heads, total = prompt.keys.shape[:3]
        even = self.kept(total)
        if even >= total:
            return None
        floor, _ = self.part.head_range(total, heads)
        newest, oldest = self.part.protected(even)
        ranking = secured(self.prompt_ranking(prompt).expand(batch, heads, total), newest, oldest)
        ranking = ranking.scatter(2, best(ranking, int(floor)), ALWAYS)
        chosen = best(ranking.flatten(1), heads * even)
        mask = torch.zeros((batch, heads * total), dtype=torch.bool, device=ranking.device)
        mask = mask.scatter(1, chosen, True).reshape(batch, heads, total)
        return ragged_rows(mask)

    def start(self, prompt: Prompt, kept: Tensor | None) -> Tensors:
        """How many rows each head holds."""
        batch, heads, total = prompt.keys.shape[:3]
        counts = torch.full((batch, heads), total, device=prompt.keys.device) if kept is None else (kept >= 0).sum(2)
        return {"head_rows": counts.to(torch.int32)[..., None, None]}

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """Later rows are added to every head."""
        return {"head_rows": state["head_rows"] + step.new}, None


def ragged_rows(mask: Tensor) -> Tensor:
    """The true places of mask [B, H, n] as ascending indices [B, H, m], m of the fullest head, -1 behind the others."""
    size = mask.shape[2]
    most = int(mask.sum(2).max()) if mask.numel() else 0
    rows = torch.arange(size, device=mask.device).expand(mask.shape)
    found = torch.where(mask, rows, size).sort(dim=2).values[:, :, :most]
    return torch.where(found < size, found, -1)
