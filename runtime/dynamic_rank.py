"""DynamicRankCache: heads keep the directions that carry most, decided again while decoding, for all of them at once.

A head's rows are coefficients on an orthonormal dictionary. New rows wait in full precision; every so many, their
energy is added to the directions' running spectra, the rest of them proposes new directions, and one choice over all
layers, sides and heads keeps what carries most a byte. A direction that goes takes its coefficients along; one that
comes has coefficients from its rows on. The prompt's mean row is held apart: in keys it changes no softmax, in values
it passes through, and a direction spent on it would be lost. So are the first rows, in full precision: attention rests
on them, and their keys are unlike all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from kvsim.errors import KvsimError
from kvsim.method import parse_method
from kvsim.ragged import LayerRows
from kvsim.ranks import HeadState, direction_bytes, fill, limit_bytes
from runtime.attention import Rule, attend_rows
from runtime.cache import CompressedCache
from runtime.latent import right_vectors, wide
from runtime.layers import CompressedLayer
from runtime.quality_reference import Reference
from runtime.sharing import Geometry, Surroundings

SOUND = 0.9
"""Length of a new direction that must be left once those held are taken out; less is rounding, not a direction."""

Mode = Literal["uniform", "static", "dynamic"]


@dataclass
class Head:
    """Directions [r, d], their running energies [r] and births [r], and coefficients of the rows since: one tensor a
    birth, [rows - birth, directions born then], in the directions' order."""

    basis: Tensor
    energy: Tensor
    births: Tensor
    columns: list[Tensor] = field(default_factory=list)
    mean: Tensor | None = None
    rows: int = 0

    def groups(self) -> list[tuple[int, Tensor]]:
        """(birth, its directions), oldest first."""
        starts, counts = self.births.unique_consecutive(return_counts=True)
        return list(zip(starts.tolist(), self.basis.split(counts.tolist()), strict=True))

    def read(self) -> Tensor:
        """All encoded rows, [rows, d] float32."""
        out = torch.zeros((self.rows, self.basis.shape[1]), device=self.basis.device)
        for (birth, basis), column in zip(self.groups(), self.columns, strict=True):
            out[birth:] += column.float() @ basis.float()
        return out if self.mean is None else out + self.mean.float()

    def keep(self, kept: Tensor) -> None:
        """Only the directions `kept` [r]."""
        left = []
        for (birth, _), column in zip(self.groups(), self.columns, strict=True):
            own = kept[self.births == birth]
            left += [column if bool(own.all()) else column[:, own].contiguous()] if bool(own.any()) else []
        self.basis, self.energy, self.births = (x[kept].contiguous() for x in (self.basis, self.energy, self.births))
        self.columns = left

    def extend(self, new: Tensor, added: Tensor, energy: Tensor) -> None:
        """Encode rows `new` [m, d] on the directions held and on `added` [a, d], orthogonal to them, of this energy."""
        dtype = self.basis.dtype
        self.columns = [torch.cat([column, (new @ basis.float().mT).to(dtype)])
                        for (_, basis), column in zip(self.groups(), self.columns, strict=True)]
        if len(added):
            self.columns.append((new @ added.mT).to(dtype))
            self.basis = torch.cat([self.basis, added.to(dtype)])
            self.energy = torch.cat([self.energy, energy.float()])
            born = torch.full((len(added),), self.rows, dtype=torch.int32, device=self.births.device)
            self.births = torch.cat([self.births, born])
        self.rows += len(new)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything held."""
        yield from (("basis", self.basis), ("energy", self.energy), ("births", self.births))
        yield from (("rows", column) for column in self.columns)
        yield from () if self.mean is None else (("mean", self.mean),)


@dataclass
class Proposal:
    """What one head could keep: gains and new directions [a, d] with their energies."""

    head: Head
    new: Tensor
    gain: Tensor
    added: Tensor
    energy: Tensor


class DynamicLayer(CompressedLayer):
    """Heads of one layer, and a tail of full rows [B, H, t, d] a side that waits for the next decision."""

    is_croppable = False

    def __init__(self, geometry: Geometry, around: Surroundings, decided: Callable[[], None]) -> None:
        if geometry.window:
            raise KvsimError(f"dynamic ranks: layer {geometry.layer} sees a window, whose rows leave by position")
        self.decided = decided
        super().__init__(parse_method("full"), geometry, around)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.heads: dict[str, list[Head]] = {}
        self.tails: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}

    def attend(self, query: Tensor, padding: Tensor | None, rule: Rule) -> Tensor:
        """Attention of the pending rows' queries; later rows join the tail."""
        if self.pending is None:
            raise KvsimError("attention was asked for rows that no update brought")
        if padding is not None and not bool(padding.all()):
            raise KvsimError("dynamic ranks: give prompts of one length; left padding would become directions")
        (k, v, _), self.pending = self.pending, None
        with torch.inference_mode(False), torch.no_grad():
            self.add(k, v)
            out = attend_rows(query, *(self.read(side).to(query.dtype) for side in ("k", "v")), rule, 0)
            self.decided()
        return out

    def add(self, k: Tensor, v: Tensor) -> None:
        """Rows [B, H, m, d] behind the tail."""
        for side, x in (("k", k), ("v", v)):
            self.tails[side] = torch.cat([self.tails[side], x], dim=2) if side in self.tails else x.clone()
            if side not in self.heads:
                self.heads[side] = [_empty(x) for _ in range(x.shape[0] * x.shape[1])]
        self.seen += k.shape[2]

    def read(self, side: str) -> Tensor:
        """All rows [B, H, n, d]."""
        tail, heads = self.tails[side], self.heads[side]
        first = self.first[side] if side in self.first else tail[:, :, :0]
        if not heads[0].rows:
            return torch.cat([first, tail], dim=2)
        old = torch.stack([h.read() for h in heads]).unflatten(0, tail.shape[:2])
        return torch.cat([first, old.to(tail.dtype), tail], dim=2)

    def split_first(self, count: int) -> None:
        """Take the first rows out of the tail for good."""
        self.first = {side: x[:, :, :count].clone() for side, x in self.tails.items()}
        self.tails = {side: x[:, :, count:].clone() for side, x in self.tails.items()}

    def states(self) -> list[HeadState]:
        """What each head of both sides holds, sequence by sequence."""
        full = {side: x.shape[2] + (self.first[side].shape[2] if self.first else 0) for side, x in self.tails.items()}
        return [HeadState(h.basis.shape[1], tuple(h.births.tolist()), h.rows, full[side], h.mean is not None)
                for side in self.heads for h in self.heads[side]]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Nothing is dropped: rows stand where they stood."""
        return self.seen + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Ranks belong to their sequences."""
        raise KvsimError("dynamic ranks: sequences cannot be reordered or repeated (beams)")

    def activate_past_recording(self) -> None:
        """A decision cannot be taken back."""
        raise KvsimError("dynamic ranks: assisted generation needs a cache that can be cropped")

    def rows(self) -> LayerRows | None:
        """Every row is held."""
        return LayerRows([self.seen] * (self.batch_size * self.geometry.n_kv_heads), []) if self.heads else None

    def held(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, live bytes, bytes of the storage) of every tensor."""
        for side, heads in self.heads.items():
            apart = [("first", self.first[side])] if self.first else []
            found = [("tail", self.tails[side]), *apart, *(pair for h in heads for pair in h.tensors())]
            for name, x in found:
                yield f"{side}.{name}", tuple(x.shape), x.nbytes, x.untyped_storage().nbytes()


def _empty(like: Tensor) -> Head:
    device = like.device
    none = torch.zeros(0, device=device)
    return Head(like.new_zeros((0, like.shape[3])), none, none.to(torch.int32))


class DynamicRankCache(CompressedCache):
    """A cache that holds at most `share` of the uncompressed bytes once the prompt is taken in, the tail included.

    Args:
        weights: importance of a squared error in (layer, side, head), [layers, 2, heads]; None: all alike.
        mode: dynamic decides again whenever `every` rows wait; static decides once, after the prompt, so that
            `horizon` more tokens fit; uniform gives every head of both sides the same rank, as static otherwise.
        centre: hold the prompt's mean row apart; False: directions must carry it, as in `svd`.
        sinks: first rows that stay in full precision.
        ranks: [layers, 2, heads] directions to be kept after the prompt instead of deciding, with mode static.

    `nbytes()` equals `kvsim.ranks.cache_bytes(cache.states(), bits)` and, fed at most `every` tokens at a time, never
    exceeds the share (dynamic; the others up to `horizon` tokens). No beams, no assisted generation, no padding.
    """

    def __init__(self, hf_model: nn.Module, share: float, *, weights: Tensor | None = None, mode: Mode = "dynamic",
                 every: int = 32, horizon: int = 0, ranks: Any = None, centre: bool = True, sinks: int = 4) -> None:
        super().__init__("full", hf_model)
        self.centre, self.sinks = centre, sinks
        self.share, self.mode, self.every, self.horizon, self.ranks = share, mode, every, horizon, ranks
        limit_bytes(self.spec, share, 1, 16)
        count = len(self.layers)
        self.layers = [DynamicLayer(x.geometry, x.around, self._decide if i == count - 1 else _nothing)
                       for i, x in enumerate(self.layers)]
        shape = (count, 2, self.layers[0].geometry.n_kv_heads)
        self.weights = torch.ones(shape) if weights is None else weights.float()
        if tuple(self.weights.shape) != shape or bool((self.weights < 0).any()):
            given = tuple(self.weights.shape)
            raise KvsimError(f"dynamic ranks: weights are {shape} numbers of 0 or more, got {given}")
        self.decisions: list[np.ndarray] = []

    def states(self) -> list[HeadState]:
        """Every head's directions, for `kvsim.ranks.cache_bytes`."""
        return [s for layer in self.layers for s in layer.states()]

    def take(self, found: Reference) -> None:
        """Fill with a prompt that a full-precision forward left behind, and decide."""
        for layer, seen in zip(self.layers, found.prompt, strict=True):
            layer.lazy_initialization(seen.k, seen.v)
            layer.add(seen.k, seen.v)
        with torch.no_grad():
            self._decide()

    @property
    def bits(self) -> int:
        """Bits of a full value."""
        return torch.finfo(self.layers[0].tails["k"].dtype).bits

    def _decide(self) -> None:
        waiting = self.layers[0].tails["k"].shape[2]
        first = not self.layers[0].heads["k"][0].rows
        if not waiting or (not first and waiting < self.every):
            return
        if first:
            for layer in self.layers:
                layer.split_first(min(self.sinks, max(0, waiting - 1)))
            waiting = self.layers[0].tails["k"].shape[2]
        for b in range(self.layers[0].batch_size):
            self._decide_for(b, first, waiting)
        for layer in self.layers:
            layer.tails = {side: x[:, :, :0].clone() for side, x in layer.tails.items()}

    def _decide_for(self, b: int, first: bool, waiting: int) -> None:
        heads = self.layers[0].geometry.n_kv_heads
        places = [(n, s, h) for n in range(len(self.layers)) for s in (0, 1) for h in range(heads)]
        proposals = [self._proposal(n, "kv"[s], b * heads + h, first) for n, s, h in places]
        if self.mode != "dynamic" and not first:
            kept = [torch.arange(len(p.gain)) < len(p.head.basis) for p in proposals]
        elif self.ranks is not None:
            given = [int(self.ranks[place]) for place in places]
            kept = [torch.arange(len(p.gain)) < rank for p, rank in zip(proposals, given, strict=True)]
        else:
            kept = self._chosen(proposals, waiting)
        for p, keep in zip(proposals, kept, strict=True):
            old, kept_new = keep[: len(p.head.basis)], keep[len(p.head.basis) :]
            p.head.energy = p.gain[: len(p.head.basis)].float()
            p.head.keep(old)
            p.head.extend(p.new, p.added[kept_new], p.energy[kept_new])
        self.decisions.append(np.array([len(p.head.basis) for p in proposals]).reshape(len(self.layers), 2, heads))

    def _reserve(self) -> int:
        """What the next tail needs beyond its own share, so that the share holds at every moment, not only now."""
        row = self.spec.cache_bytes(1, 1, self.bits)
        return int((1 - self.share) * row * self.every)

    def _proposal(self, layer: int, side: str, at: int, first: bool) -> Proposal:
        head, tail = self.layers[layer].heads[side][at], self.layers[layer].tails[side]
        new = wide(tail.flatten(0, 1)[at])
        if self.centre:
            head.mean = new.mean(0).to(tail.dtype) if head.mean is None else head.mean
            new = new - head.mean.float()
        basis = head.basis.float()
        inside = new @ basis.mT
        running = head.energy + inside.square().sum(0)
        rest = new - inside @ basis
        count = min(len(new), basis.shape[1] - len(basis)) if first or self.mode == "dynamic" else 0
        # heads whose directions stay as they are propose none: no decomposition
        vectors, values = right_vectors(rest, count) if count else (rest[:0], rest.new_zeros(0))
        # what rounding left of the directions held must not come again
        vectors = vectors - (vectors @ basis.mT) @ basis
        lengths = vectors.norm(dim=1, keepdim=True)
        energy = values.square() * (lengths[:, 0] > SOUND)
        return Proposal(head, new, torch.cat([running, energy]), vectors / lengths.clamp_min(SOUND), energy)

    def _chosen(self, proposals: list[Proposal], waiting: int) -> list[Tensor]:
        width = proposals[0].added.shape[1]
        before = proposals[0].head.rows
        total = before + waiting + (self.horizon if self.mode != "dynamic" else 0)
        apart = self.layers[0].first["k"].shape[2]
        limit = limit_bytes(self.spec, self.share, total + apart, self.bits) - self._reserve()
        limit -= self.spec.cache_bytes(apart, 1, self.bits)
        limit -= self.centre * len(proposals) * width * self.bits // 8
        if self.mode == "uniform":
            rank = limit // (direction_bytes(width, total, self.bits) * len(proposals))
            return [torch.arange(len(p.gain)) < rank for p in proposals]
        births = [torch.cat([p.head.births.long(), torch.full((len(p.added),), before)]) for p in proposals]
        rows = total - torch.cat(births)
        gain = torch.cat([p.gain * w for p, w in zip(proposals, self.weights.flatten(), strict=True)])
        cost = (width + rows).double() * self.bits / 8 + 8
        kept, _ = fill(gain.double().numpy(), cost.numpy(), limit)
        return list(torch.from_numpy(kept).split([len(p.gain) for p in proposals]))


def _nothing() -> None:
    """Layers before the last one do not decide."""
