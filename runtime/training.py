"""Training of cache projections: distillation from the full model, a price on bytes, gates for ranks and bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.formats.int import Int
from kvsim.method import Chain, Method, parse_method
from runtime.cache import attention_modules, geometry_of, spec_of
from runtime.calibration import calibrate
from runtime.learning import wants_rotation
from runtime.parts import Tensors
from runtime.quality_reference import Reference, reference
from runtime.rope import Rotation
from runtime.training_gates import (
    Gate,
    Key,
    check,
    open_gate,
    rounded,
    row_bytes,
    schedule,
    trainable,
    whole_rank,
    with_choice,
)
from runtime.training_student import Rows, logits

MOMENTUM = 0.9
"""Of the gates: one text says little about a layer's bits."""


PIECES = 8
"""Pieces of text whose rows the first factors come from."""


Policy = tuple[tuple[tuple[float, int | None], tuple[float, int | None]], ...]


@dataclass(frozen=True)
class Recipe:
    """How training goes: `gates` steps with soft ranks and bits, then steps with whole ones up to `steps`.

    Lengths in tokens: a step scores `scored` after a prompt of `prompt`; at: tokens at which bytes are compared.
    texts: pieces of text that are gone over again and again. policy: (share of coefficients, bits) of keys, then of
    values, a layer, as another model ended with them: where its gates start here, and stay if there are no gate steps.
    """

    method: str
    steps: int = 400
    gates: int = 120
    prompt: int = 256
    scored: int = 256
    rate: float = 5e-5
    gate_rate: float = 0.1
    at: int = 1152
    seed: int = 0
    texts: int = 48
    policy: Policy = ()

    def __post_init__(self) -> None:
        least = min(self.prompt, self.scored, self.at, self.texts)
        if not 0 <= self.gates <= self.steps or least < 1:
            raise KvsimError("train: steps are 0 or more, gate steps among them, and lengths 1 or more")


Seen = Callable[[int, float, float], None]
"""(steps done, KL in nats a token of the last, soft bytes over the budget's)."""


@dataclass(eq=False)
class Lesson:
    """What the uncompressed model said of a piece: its prompt's rows, and the next token's distribution.

    likely: [B, m, vocabulary] in half precision, kept because every pass asks again; mass: its sum, [B, m].
    negentropy: mean sum p ln p.
    """

    found: Reference
    likely: Tensor
    mass: Tensor
    negentropy: float

    @classmethod
    def of(cls, found: Reference) -> Lesson:
        """From a reference, without what a student does not read."""
        likely = torch.softmax(found.logits.float(), -1).half()
        p = likely.float()
        nothing = found.tokens.new_empty(0)
        prompt = [replace(x, q=nothing, observed=None) for x in found.prompt]
        slim = replace(found, logits=nothing, outputs=[], prompt=prompt)
        return cls(slim, likely, p.sum(-1), float(torch.special.xlogy(p, p).sum(-1).mean()))

    def divergence(self, out: Tensor) -> Tensor:
        """Mean KL(full || student) over tokens, in nats, from the student's logits."""
        each = self.mass * torch.logsumexp(out, -1) - (self.likely.float() * out).sum(-1)
        return each.mean() + self.negentropy


@dataclass(eq=False)
class Training:
    """A run: what it learns, how far it is, and what it saw."""

    model: Any
    pieces: Sequence[Tensor]
    recipe: Recipe
    rows: dict[Key, Rows] = field(default_factory=dict)
    gates: dict[Key, Gate] = field(default_factory=dict)
    chains: dict[Key, Chain] = field(default_factory=dict)
    step: int = 0
    price: float = 0.0
    losses: list[float] = field(default_factory=list)
    lessons: dict[int, Lesson] = field(default_factory=dict)
    optimizer: torch.optim.Adam | None = None
    factors: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = check(parse_method(self.recipe.method))
        self.spec = spec_of(self.model)
        self.geometries = [geometry_of(self.spec, i) for i in range(self.spec.n_layers)]
        types = getattr(self.model.config, "layer_types", None)
        self.rotations = [
            Rotation(self.model, m, types[i] if types else None) if wants_rotation(self.layer(i)) else None
            for i, m in enumerate(attention_modules(self.model, self.spec))
        ]
        short = self.recipe.prompt + self.recipe.scored + 1
        long = [p[:short] for p in self.pieces if len(p) >= short]
        self.pieces = long[:: max(1, len(long) // self.recipe.texts)][: self.recipe.texts]
        if not self.pieces:
            raise KvsimError(f"train: no piece of text has the {short} tokens that a step takes; give a longer text")

    def layer(self, index: int) -> Method:
        """The base method of one layer."""
        return self.base.at(index, self.spec.n_layers)

    def sides(self) -> list[Key]:
        """Sides that are trained."""
        chains = {(i, s): getattr(self.layer(i), s) for i in range(self.spec.n_layers) for s in ("k", "v")}
        return [key for key, chain in chains.items() if trainable(chain)]

    @property
    def budget(self) -> int:
        """Bytes of a sequence's trained sides under the base method, at the tokens of comparison."""
        return sum(self._held(i) * row_bytes(getattr(self.layer(i), s), self.geometries[i].place(s, 16))
                   for i, s in self.sides())

    def _held(self, index: int) -> int:
        window = self.geometries[index].window
        return min(self.recipe.at, window) if window else self.recipe.at

    # -- stages ------------------------------------------------------------------------------------------------------

    def open_gates(self) -> None:
        """Gates at the method's own rank and bits, or at the policy's."""
        for key in self.sides():
            index, side = key
            place = self.geometries[index].place(side, 16)  # type: ignore[arg-type]
            share, bits = self._policy(key) if self.recipe.policy else (None, None)
            self.gates[key] = open_gate(key, place, getattr(self.layer(index), side), self._held(index), share, bits)

    def begin(self, chains: dict[Key, Chain] | None = None) -> None:
        """Factors of all coefficients from the SVD of recorded rows, behind open gates; or cut to `chains` at once."""
        self.open_gates()
        made = self.svd()
        self.rows = {key: self.soft(gate, *self._matrices(made, key)) for key, gate in self.gates.items()}
        if self.recipe.gates == 0:
            self.harden(chains)

    def svd(self) -> Tensors:
        """Calibrated factors of all coefficients, in order of what they carry; computed once."""
        if not self.factors:
            chains = {(i, s): getattr(self.layer(i), s) for i, s in self.sides()}
            whole = {k: whole_rank(c, self.geometries[k[0]].place(k[1], 16)) for k, c in chains.items()}  # type: ignore[arg-type]
            chains = {k: with_choice(c, whole[k], None) for k, c in chains.items()}
            full = schedule(self.base, chains, self.spec.n_layers)
            few = self.pieces[:: max(1, len(self.pieces) // PIECES)][:PIECES]
            self.factors = calibrate(self.model, few, full, length=len(few[0]), seed=self.recipe.seed).tensors
        return self.factors

    def _whole(self, gate: Gate) -> Chain:
        return with_choice(gate.chain, gate.whole, None)

    def soft(self, gate: Gate, encoder: Tensor, decoder: Tensor) -> Rows:
        """A side behind an open gate."""
        turn = self._turn(gate.key, gate.whole) if gate.bits is not None else None
        return Rows(gate.place, self._whole(gate), encoder, decoder, gate, turn)

    def _matrices(self, made: Tensors, key: Key) -> tuple[Tensor, Tensor]:
        prefix = f"layer.{key[0]}.{key[1]}."
        own = {n.rpartition(".")[2]: t for n, t in made.items() if n.startswith(prefix)}
        return own["encoder"].clone().requires_grad_(), own["decoder"].clone().requires_grad_()

    def _policy(self, key: Key) -> tuple[float, float | None]:
        """Share of coefficients and bits that the policy's model gives the layer at the same relative depth."""
        layers, mine = len(self.recipe.policy), self.spec.n_layers
        depth = round(key[0] * (layers - 1) / max(1, mine - 1))
        return self.recipe.policy[depth][key[1] == "v"]

    def shares(self) -> Policy:
        """What the layers ended with, as a policy for another model; a side that is not trained keeps everything."""
        found: list[tuple[tuple[float, int | None], ...]] = []
        for index in range(self.spec.n_layers):
            layer: list[tuple[float, int | None]] = []
            for side in ("k", "v"):
                chain = self.chains.get((index, side))
                place = self.geometries[index].place(side, 16)  # type: ignore[arg-type]
                whole = whole_rank(chain, place) if chain else 1
                width = chain.basis.latent(place).width if chain else 1
                layer.append((width / whole, getattr(chain.format, "bits", None) if chain else None))
            found.append(tuple(layer))
        return tuple(found)  # type: ignore[arg-type]

    def _turn(self, key: Key, rank: int) -> Tensor:
        """A random rotation of coefficients: after it all have one size, which is what few bits hold best."""
        seed = (self.recipe.seed * 1009 + key[0]) * 2 + (key[1] == "v")
        random = torch.randn((rank, rank), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.linalg.qr(random).Q.float()

    def harden(self, chains: dict[Key, Chain] | None = None) -> None:
        """Gates become whole ranks and bits within the budget; factors are cut to them and turned for rounding."""
        self.chains = chains or rounded(self.gates, self.budget)
        for key, chain in self.chains.items():
            old = self.rows[key]
            rank = chain.basis.latent(old.place).width
            cut = [t.detach()[:, :rank] for t in (old.encoder, old.decoder)]
            if isinstance(chain.format, Int):
                cut = [self._turn(key, rank) @ t for t in cut]
            cut = [t.contiguous().requires_grad_() for t in cut]
            self.rows[key] = Rows(old.place, chain, cut[0], cut[1])
        self.gates, self.optimizer = {}, None

    @property
    def method(self) -> Method:
        """The written form of what is trained now: of whole ranks and bits."""
        chains = self.chains or rounded(self.gates, self.budget)
        return schedule(self.base, chains, self.spec.n_layers)

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, seen: Seen | None = None, until: int | None = None) -> None:
        """Go on to the end, or to step `until`."""
        if not self.rows:
            self.begin()
        asked = [(p, p.requires_grad) for p in self.model.parameters()]
        for p, _ in asked:
            p.requires_grad_(False)
        try:
            stop = self.recipe.steps if until is None else min(until, self.recipe.steps)
            while self.step < stop:
                kl, rate = self._one()
                if seen is not None:
                    seen(self.step, kl, rate)
        finally:
            for p, before in asked:
                p.requires_grad_(before)

    def _one(self) -> tuple[float, float]:
        optimizer = self.ready()
        lesson = self._lesson()
        with torch.enable_grad():
            out = logits(self.model, lesson.found, self.rows, self.geometries, self.rotations)
            kl = lesson.divergence(out)
            optimizer.zero_grad(set_to_none=True)
            kl.backward()
        optimizer.step()
        rate = self._move_gates() if self.gates else 1.0
        self.losses.append(float(kl.detach()))
        self.step += 1
        if self.gates and self.step == self.recipe.gates:
            self.harden()
        return self.losses[-1], rate

    def _move_gates(self) -> float:
        """One step of the gates along KL + price * bytes; soft bytes over the budget's are returned.

        All move in units of bits, by one common size, so that what the loss hardly sees hardly moves. The price is the
        multiplier that leaves bytes as they are: the part of KL's slope along that of bytes.
        """
        moving = [(g, t, self._span() if t is g.rank else 1.0) for g in self.gates.values() for t in g.soft()]
        with torch.enable_grad():
            over = torch.stack([g.cost() for g in self.gates.values()]).sum() / self.budget - 1
            costs = torch.autograd.grad(over, [t for _, t, _ in moving])
        unit = torch.tensor([u for *_, u in moving])
        slope = torch.stack([t.grad if t.grad is not None else torch.zeros(()) for _, t, _ in moving]) * unit
        cost, miss = torch.stack(costs) * unit, float(over.detach())
        self.price = float(-(slope @ cost) / (cost @ cost))
        way = slope + self.price * cost
        speed = torch.stack([t for g in self.gates.values() for t in g.speeds()])
        speed = MOMENTUM * speed + (1 - MOMENTUM) * way / way.square().mean().sqrt().clamp_min(1e-12)
        # along the slope of bytes, half of what the budget is missed by is made up at once
        step = self.recipe.gate_rate * self._fall() * speed + 0.5 * miss * cost / (cost @ cost)
        with torch.no_grad():
            for (gate, tensor, _), moved, fast in zip(moving, step * unit, speed, strict=True):
                tensor.sub_(moved)
                tensor.grad = None
                gate.keep(tensor, fast)
        return 1 + miss

    def _lesson(self) -> Lesson:
        """The text of a step: every pass over the pieces in an order of its own."""
        around, at = divmod(self.step, len(self.pieces))
        random = torch.Generator().manual_seed(self.recipe.seed + 7919 * around)
        piece = int(torch.randperm(len(self.pieces), generator=random)[at])
        if piece not in self.lessons:
            with torch.no_grad():
                found = reference(self.model, self.pieces[piece][None], self.recipe.prompt)
            self.lessons[piece] = Lesson.of(found)
        return self.lessons[piece]

    def ready(self) -> torch.optim.Adam:
        """The optimizer of the factors, with this step's rate."""
        if self.optimizer is None:
            factors = [t for r in self.rows.values() for t in (r.encoder, r.decoder)]
            self.optimizer = torch.optim.Adam(factors, betas=(0.9, 0.99))
        first = 0 if self.gates else self.recipe.gates
        rise = min(1.0, (self.step - first + 1) / 5)
        self.optimizer.param_groups[0]["lr"] = self.recipe.rate * rise * self._fall()
        return self.optimizer

    def _fall(self) -> float:
        """A cosine down to a tenth within each stage."""
        first, last = (0, self.recipe.gates) if self.gates else (self.recipe.gates, self.recipe.steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (self.step - first) / max(1, last - first)))

    def _span(self) -> float:
        """Coefficients for a bit: what a gate's rank moves while its bits move by one."""
        return max((g.whole for g in self.gates.values()), default=1) / 8
