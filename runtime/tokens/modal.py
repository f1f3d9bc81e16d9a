"""Tokens of pictures, films and sound pooled over their own neighbourhoods, running."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.tokens.modal import Modal
from runtime.parts import Merged, PolicyTwin, Prompt, Step, Tensors


class ModalTwin(PolicyTwin):
    """The prompt's cells become their means once; what comes later stands for itself."""

    part_name = "modal"
    part: Modal

    def merge(self, prompt: Prompt) -> Merged | None:
        """Means of cells, with the log of their sizes; None where the segments have nothing to merge."""
        if not self.part.cells.merges:
            return None
        owners = self.part.cells.owners(prompt.keys.shape[2])
        sizes = np.bincount(owners, minlength=1 if len(owners) else 0)
        owner = torch.from_numpy(owners).to(prompt.keys.device)
        count = torch.from_numpy(sizes).to(prompt.keys.device)
        keys = self._keys(prompt, owner, count)
        log_count = count.float().log().reshape(1, 1, -1, 1).repeat(keys.shape[0], 1, 1, 1)
        return Merged(keys, means(prompt.values, owner, count), {"log_count": log_count})

    def _keys(self, prompt: Prompt, owner: Tensor, count: Tensor) -> Tensor:
        """Mean keys of cells; rope=pre: of unrotated ones, turned to the middle of the cell's tokens."""
        if self.part.rope == "post" or not len(owner):
            return means(prompt.keys, owner, count)
        if prompt.rotation is None:
            raise KvsimError("modal: rope=pre needs a model whose rotation is known; leave rope=post")
        at = torch.arange(len(owner), device=owner.device)[None] if prompt.positions is None else prompt.positions
        flat = means(prompt.rotation.unrotate(prompt.keys, at), owner, count)
        middle = means(at[:, None, :, None].double(), owner, count)[:, 0, :, 0].round().long()
        turned = prompt.rotation.rotate(flat, middle).to(prompt.keys.dtype)
        # a row that stands for itself stays exactly as it was
        first = torch.full_like(count, len(owner)).scatter_reduce(0, owner, torch.arange(len(owner)).to(owner), "amin")
        return torch.where((count == 1)[:, None], prompt.keys.index_select(2, first), turned)

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """Later rows stand for one token each."""
        if "log_count" not in state:
            return state, None
        more = step.rows - state["log_count"].shape[2]
        return {"log_count": torch.nn.functional.pad(state["log_count"], (0, 0, 0, more))}, None

    def bias(self, state: Tensors, seen: int = 0, rows: int = 0) -> Tensor | None:
        """Log-counts of the rows held; rows of the step in flight have 0."""
        if "log_count" not in state:
            return None
        held = state["log_count"][..., 0].expand(-1, self.place.heads, -1)
        return torch.nn.functional.pad(held, (0, max(rows - held.shape[2], 0)))


def means(x: Tensor, owner: Tensor, count: Tensor) -> Tensor:
    """Rows x [B, H, n, d] averaged over the cells owner [n], in float32 (float64 stays): [B, H, cells, d]."""
    kind = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((*x.shape[:2], len(count), x.shape[3]), dtype=kind).index_add(2, owner, x.to(kind))
    return (total / count[:, None]).to(x.dtype)
