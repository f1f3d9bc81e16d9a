"""Gates of training: how many coefficients and bits each side of each layer keeps, softly, then as whole numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsim.allocation import exact, within
from kvsim.bases.identity import Identity
from kvsim.bases.learned_projection import LearnedProjection
from kvsim.bases.palu import Palu
from kvsim.errors import KvsimError
from kvsim.formats.full import Full
from kvsim.formats.int import Int
from kvsim.method import Chain, Method, parse_method
from kvsim.parts import Place

WIDTHS = tuple(range(2, 9))
"""Bits that a gate may end at; between them the two neighbours are mixed."""
RANKS = 24
"""A gate may end at about so many ranks, all multiples of one step."""
EXACT_CELLS = 2**22
Key = tuple[int, str]
"""A layer and a side."""


def trainable(chain: Chain) -> bool:
    """Whether a side has matrices to train; KvsimError where it can neither be trained nor left as it is."""
    if isinstance(chain.basis, Identity) and isinstance(chain.format, Full):
        return False
    if not isinstance(chain.basis, Palu | LearnedProjection):
        raise KvsimError(f"train learns the matrices of palu and learned_projection, and {chain.basis.name} has none "
                         f"that stay with the model; write palu(rank=...) | {chain.format}, or full for this side")
    part = chain.format
    rows_alone = isinstance(part, Full) or (isinstance(part, Int) and part.row_addressable and not part.residual)
    if not rows_alone or chain.corrections:
        raise KvsimError(f"train rounds straight through full and int (groups along the row, no residual, no "
                         f"correction), not {'+'.join(map(str, (part, *chain.corrections)))}")
    return True


def check(method: Method) -> Method:
    """The method, where it can be trained; otherwise KvsimError says what stands in the way."""
    if method.tokens.name != "keep" or method.protocol != "after_prefill":
        raise KvsimError("train takes methods that keep all tokens and compress after the prompt; leave "
                         f"{method.tokens.name if method.tokens.name != 'keep' else '@ on_write'} away")
    chains = [c for m in (method, *(x.method for x in method.clauses)) for c in (m.k, m.v)]
    if not any(trainable(c) for c in chains):
        raise KvsimError(f"{method} has nothing to train; write palu(rank=...) or learned_projection(rank=...)")
    return method


def with_choice(chain: Chain, rank: int, bits: int | None) -> Chain:
    """The chain with another rank and width."""
    basis: Any = chain.basis
    basis = replace(basis, rank=rank, ratio=0.5) if isinstance(basis, Palu) else replace(basis, rank=rank)
    part: Any = chain.format
    return replace(chain, basis=basis, format=part if bits is None else replace(part, bits=bits))


def whole_rank(chain: Chain, place: Place) -> int:
    """The rank at which nothing is left out."""
    basis = chain.basis
    return place.width * (basis.heads_together(place) if isinstance(basis, Palu) else 1)


def row_bytes(chain: Chain, place: Place) -> int:
    """Bytes of one row of this side, scales included, as kvsim counts them."""
    latent = chain.basis.latent(place)
    inner = replace(place, heads=latent.heads, width=latent.width)
    chain.format.check_place(inner)
    return int(sum(b.bytes for b in chain.format.buffers(1, 1, inner)))


@dataclass(eq=False)
class Gate:
    """One side of one layer: soft rank and bits (parameters; bits None in full precision), and what a row costs.

    rows: rows that this layer holds where bytes are compared.
    """

    key: Key
    place: Place
    chain: Chain
    whole: int
    rows: int
    rank: Tensor
    bits: Tensor | None
    rank_speed: Tensor = field(default_factory=lambda: torch.zeros(()))
    bits_speed: Tensor = field(default_factory=lambda: torch.zeros(()))

    def soft(self) -> list[Tensor]:
        """What is learned of it."""
        return [self.rank] if self.bits is None else [self.rank, self.bits]

    def speeds(self) -> list[Tensor]:
        """How each of those moves, in bits a step."""
        return [self.rank_speed, self.bits_speed][: len(self.soft())]

    def keep(self, moved: Tensor, speed: Tensor) -> None:
        """Within bounds after a step."""
        if moved is self.rank:
            moved.clamp_(self.step, self.whole + 2 * self.slope)
            self.rank_speed = speed.detach().clone()
        else:
            moved.clamp_(WIDTHS[0], WIDTHS[-1])
            self.bits_speed = speed.detach().clone()

    @property
    def step(self) -> int:
        """Ranks that the gate may end at are multiples of this power of two."""
        return 1 << max(0, (self.whole // RANKS).bit_length() - 1)

    @property
    def slope(self) -> float:
        """Coefficients over which the soft edge falls."""
        return max(0.5, self.whole / 32)

    def mask(self) -> Tensor:
        """Share of each coefficient that is kept, [whole], falling: coefficients come in order of what they carry."""
        return torch.sigmoid((self.rank - torch.arange(self.whole) - 0.5) / self.slope)

    def width(self) -> Tensor:
        """Bits, within what a gate may end at."""
        assert self.bits is not None
        return self.bits.clamp(WIDTHS[0], WIDTHS[-1])

    def cost(self) -> Tensor:
        """Soft bytes: kept coefficients x (bits + the scales' share)."""
        heads = self.chain.basis.latent(self.place).heads
        if self.bits is None:
            return self.mask().sum() * heads * self.rows * self.place.value_bits / 8
        # what scales cost a coefficient, from the exact count at full rank
        scales = row_bytes(with_choice(self.chain, self.whole, 8), self.place) / (heads * self.whole) - 1.0
        return self.mask().sum() * heads * self.rows * (self.width() / 8 + scales)

    def options(self) -> list[tuple[int, int | None]]:
        """(rank, bits) that the gate may end at."""
        own = self.chain.basis.latent(self.place).width
        ranks = sorted({*range(self.step, self.whole + 1, self.step), self.whole, own})
        widths: Sequence[int | None] = (None,)
        if self.bits is not None:
            widths = WIDTHS
        found = []
        for rank in ranks:
            for bits in widths:
                part = self.chain.format
                if not isinstance(part, Int) or part.axis == "row" or part.group is None or part.group <= rank:
                    found.append((rank, bits))
        return found


def open_gate(key: Key, place: Place, chain: Chain, rows: int, share: float | None = None,
              bits: float | None = None) -> Gate:
    """A gate that starts at the chain's own rank and bits, or at those given."""
    whole, own = whole_rank(chain, place), chain.basis.latent(place).width
    rank = float(own) if share is None else share * whole
    edge = 2 * max(0.5, whole / 32) if rank >= whole else 0.0  # all coefficients kept: the edge lies beyond the last
    part = chain.format
    first = None
    if isinstance(part, Int):
        first = torch.tensor(float(part.bits if bits is None else bits), requires_grad=True)
    return Gate(key, place, chain, whole, rows, torch.tensor(rank + edge, requires_grad=True), first)


def rounded(gates: Mapping[Key, Gate], budget: int) -> dict[Key, Chain]:
    """Whole ranks and bits nearest to the gates' within the budget of bytes: the least total distance, in steps.

    Exact where the table is small enough, otherwise off by one step of one gate at most (kvsim.allocation).
    Raises KvsimError where even the smallest options exceed the budget.
    """
    listed = list(gates.values())
    options = [g.options() for g in listed]
    most = max(map(len, options))
    loss = np.full((len(listed), most), 0.0)
    cost = np.zeros((len(listed), most), dtype=np.int64)
    for i, (gate, own) in enumerate(zip(listed, options, strict=True)):
        kept = float(gate.mask().detach().sum())
        for j in range(most):
            rank, bits = own[min(j, len(own) - 1)]  # shorter lists repeat their last
            far = ((rank - kept) / gate.step) ** 2
            if gate.bits is not None and bits is not None:
                far += (bits - float(gate.width().detach())) ** 2
            loss[i, j] = far
            cost[i, j] = gate.rows * row_bytes(with_choice(gate.chain, rank, bits), gate.place)
    unit = int(np.gcd.reduce(cost, axis=None))
    few = len(listed) * (budget // unit) <= EXACT_CELLS and most <= 256
    found = (exact if few else within)(loss, cost // unit, budget // unit)
    return {
        g.key: with_choice(g.chain, *own[min(int(c), len(own) - 1)])
        for g, own, c in zip(listed, options, found.choice, strict=True)
    }


def schedule(base: Method, chains: Mapping[Key, Chain], n_layers: int) -> Method:
    """The written form: the commonest layer's choice first, a clause for every other run of layers."""
    texts = []
    for index in range(n_layers):
        own = base.at(index, n_layers)
        texts.append(str(replace(own, k=chains.get((index, "k"), own.k), v=chains.get((index, "v"), own.v))))
    common = max(set(texts), key=lambda t: (texts.count(t), t))
    clauses, start = [], 0
    for i in range(1, n_layers + 1):
        if i == n_layers or texts[i] != texts[start]:
            if texts[start] != common:
                clauses.append(f"layers={start}-{i - 1}: {texts[start]}")
            start = i
    return parse_method("; ".join([common, *clauses]))
