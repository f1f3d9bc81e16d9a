"""A frozen model whose attention reads rows that pass through trained matrices, differentiably: training's student."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvsim.formats.int import Int
from kvsim.method import Chain
from kvsim.parts import Place
from runtime.attention import Rule, grouped, hidden
from runtime.formats.int import IntTwin
from runtime.latent import ModelBasis, rebuild
from runtime.parts import Setting, twins
from runtime.quality_reference import LayerPrompt, Reference
from runtime.rope import Rotation
from runtime.sharing import Geometry
from runtime.training_gates import WIDTHS, Gate, Key

NAME = "kvsim_training"


@dataclass(eq=False)
class Rows:
    """One side of one layer: rows in, what the cache gives back out, with gradients for encoder and decoder [H, r, d].

    gate: soft rank and bits, over all coefficients and turned by `turn` before rounding, so that all are of one size;
    None: the chain's own rank and bits, exactly what `CompressedCache` stores.
    """

    place: Place
    chain: Chain
    encoder: Tensor
    decoder: Tensor
    gate: Gate | None = None
    turn: Tensor | None = None

    def __post_init__(self) -> None:
        where = Setting(self.place, torch.float32)
        basis = twins()[self.chain.basis.name](self.chain.basis, where)
        assert isinstance(basis, ModelBasis)
        self.basis = basis

    def through(self, x: Tensor, newest: int) -> tuple[Tensor, Tensor]:
        """(rows [B, H, n, d] as they come back, the newest of them as they are before they are written)."""
        held = {"encoder": self.encoder[None], "decoder": self.decoder[None]}
        c = self.basis.project(x, held)
        if self.gate is not None:
            c = c * self.gate.mask()
        stored = c if not isinstance(self.chain.format, Int) else self._written(c)
        maps = self.basis.maps(held)
        return rebuild(stored, maps), rebuild(c[:, :, c.shape[2] - newest :], maps)

    def _written(self, c: Tensor) -> Tensor:
        """Coefficients rounded; gradients pass straight through."""
        if self.gate is None:
            return c + (self._codes(c.detach(), None) - c.detach())
        turned = c if self.turn is None else c @ self.turn.mT
        bits = self.gate.width()
        low = min(int(bits.detach()), WIDTHS[-1] - 1)
        few, many = (self._codes(turned.detach(), b) for b in (low, low + 1))
        found = turned + (few + (bits - low) * (many - few) - turned.detach())
        return found if self.turn is None else found @ self.turn

    def _codes(self, c: Tensor, bits: int | None) -> Tensor:
        """Encoded and decoded by the format's own twin."""
        part: Any = self.chain.format
        part = part if bits is None else replace(part, bits=bits)
        inner = replace(self.place, heads=c.shape[1], width=c.shape[3])
        twin = IntTwin(part, Setting(inner, torch.float32))
        with torch.no_grad():
            return twin.decode(twin.encode(c, {}), {}, torch.zeros(c.shape[2], dtype=torch.int64))


@dataclass(eq=False)
class Student:
    """What attention needs while text is scored after a prompt whose rows the uncompressed model left behind."""

    rows: Mapping[Key, Rows]
    geometries: list[Geometry]
    rotations: list[Rotation | None]
    prompt: list[LayerPrompt]
    prompt_positions: Tensor
    positions: Tensor

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Attention [B, Hq, m, dv] of new rows' queries over the prompt's rows and theirs, as a cache would answer.

        A step attends its own row before it is written (protocol after_prefill), all others as they come back.
        """
        m, window = q.shape[2], self.geometries[index].window
        keys, own_keys = self._side(index, "k", k, m)
        values, own_values = self._side(index, "v", v, m)
        scores = _products(q, keys)
        first = keys.shape[2] - m
        own = torch.arange(m)
        mine = (q * _repeat(own_keys, q)).sum(-1)
        at = torch.zeros((m, keys.shape[2]), dtype=torch.bool).index_put((own, first + own), torch.tensor(True))
        scores = torch.where(at, mine[..., None], scores)
        unseen = hidden(m, keys.shape[2], window, q.device)
        weights = rule.weights(rule.logits(scores).masked_fill(unseen, float("-inf")))
        out = (grouped(weights, values.shape[1]) @ values).reshape(*q.shape[:3], values.shape[3])
        share = weights[:, :, own, first + own]
        return out + share[..., None] * _repeat(own_values - values[:, :, first:], q)

    def _side(self, index: int, side: str, new: Tensor, m: int) -> tuple[Tensor, Tensor]:
        seen = self.prompt[index]
        rows = self.rows.get((index, side))
        old = seen.k if side == "k" else seen.v
        if rows is None:
            return torch.cat([old, new], dim=2), new
        turn = self.rotations[index] if side == "k" and rows.chain.before_rope else None
        everywhere = torch.cat([self.prompt_positions, self.positions], dim=1)
        x = torch.cat([old, new], dim=2)
        found, own = rows.through(x if turn is None else turn.unrotate(x, everywhere), m)
        if turn is None:
            return found, own
        return turn.rotate(found, everywhere), turn.rotate(own, self.positions)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """q k^T of each query head with its KV head, [B, Hq, m, n]."""
    return (grouped(q, keys.shape[1]) @ keys.mT).reshape(*q.shape[:3], keys.shape[2])


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


CURRENT: ContextVar[Student] = ContextVar("kvsim_student")


def logits(model: nn.Module, found: Reference, rows: Mapping[Key, Rows], geometries: list[Geometry],
           rotations: list[Rotation | None]) -> Tensor:
    """Logits [B, m, vocabulary] of the scored tokens, with gradients; the model's attention is left as it was."""
    student = Student(rows, geometries, rotations, found.prompt, found.prompt_positions, found.scored_positions)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    token = CURRENT.set(student)
    try:
        out = model(found.scored, position_ids=found.scored_positions, use_cache=False)
    finally:
        CURRENT.reset(token)
        model.set_attn_implementation(before)  # type: ignore[operator]
    result: Tensor = out.logits
    return result


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
               s_aux: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    index: int = module.layer_idx  # type: ignore[assignment]
    out = CURRENT.get().attend(index, query, key, value, Rule(scale, float(softcap or 0.0), s_aux))
    return out.transpose(1, 2).contiguous(), None


def _no_mask(**kwargs: Any) -> None:
    """Which rows a query sees is the student's business."""
    return None
