"""What parts of a method learn from recorded rows of one layer: factors, codebooks, scales, spreads, estimators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvsim.bases.elitekv import EliteKv
from kvsim.errors import KvsimError
from kvsim.method import Chain, Method
from kvsim.parts import Place
from runtime.bases.elitekv import EliteKvTwin, choose_frequencies, joint_factors
from runtime.bases.learned_projection import LearnedProjectionTwin
from runtime.bases.palu import PaluTwin
from runtime.estimator import train_estimator
from runtime.parts import BasisTwin, CorrectionTwin, FormatTwin, Setting, Tensors, twins
from runtime.recording import Sample
from runtime.rope import Rotation, rotates

QUERIES = 256
"""Queries, and four times as many keys, between which rotated and unrotated scores are compared."""


def wants_slopes(method: Method) -> bool:
    """Whether a part weighs rows by gradients of the loss."""
    return any(getattr(p, "weighting", "") == "fisher" or getattr(p, "by", "") == "hessian" for p in method.parts())


def wants_rotation(method: Method) -> bool:
    """Whether keys, or a score's queries, are needed as they are before the rotation."""
    return _turns_back(method) or method.k.basis.both_sides or _looks_ahead(method)


def _turns_back(method: Method) -> bool:
    return method.k.before_rope or getattr(method.tokens, "rope", "post") == "pre"


def _looks_ahead(method: Method) -> bool:
    return getattr(method.tokens, "score", "") == "expected"


def rotation_of(method: Method, model: nn.Module, attention: nn.Module, layer_type: str | None) -> Rotation | None:
    """The rotation that a layer's method needs, or None; KvsimError, naming who needs it, where none can be undone.

    score=expected runs as it is on models that rotate nothing.
    """
    if _turns_back(method):
        return Rotation(model, attention, layer_type)
    if method.k.basis.both_sides:
        name = method.k.basis.name
        return Rotation(model, attention, layer_type, wanted_by=name, instead="take another basis")
    if _looks_ahead(method) and rotates(model, attention):
        return Rotation(model, attention, layer_type, wanted_by="score=expected", instead="take another score")
    return None


@dataclass
class Layer:
    """One layer in calibration: its places, its rows, its rotation and its output projection [out, Hq * dv]."""

    k: Place
    v: Place
    sample: Sample
    rotation: Rotation | None
    output: Tensor | None
    seed: int = 0

    def place(self, side: str) -> Place:
        """Where a side's parts work."""
        return self.k if side == "k" else self.v

    def unrotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows [H, N, d] turned back from their positions [N]."""
        assert self.rotation is not None
        return self.rotation.unrotate(x[None].float(), positions[None])[0]

    def rows(self, side: str, before_rope: bool, slopes: bool = False) -> Tensor:
        """Keys or values [1, H, N, d] (or gradients for them), where the chain writes them."""
        s = self.sample
        if side == "v":
            return (s.value_slopes if slopes else s.values)[None]
        keys = s.key_slopes if slopes else s.keys
        # a rotation is orthogonal: it turns gradients as it turns keys
        return (self.unrotated(keys, s.positions) if before_rope else keys)[None]


def learn(method: Method, layer: Layer) -> Tensors:
    """Calibrated tensors of one layer under `k.`, `v.` and `tokens.`; nothing for parts that need none."""
    found: Tensors = {}
    if isinstance(method.k.basis, EliteKv):
        found |= learn_elite(method.k.basis, layer)
    sides = ("k",) if method.k.basis.both_sides else ("k", "v")
    for side in sides:
        own = found if method.k.basis.both_sides else {}
        found |= {f"{side}.{name}": t for name, t in _learn_side(method, layer, side, own).items()}
    if getattr(method.tokens, "score", "") == "auxiliary":
        use = layer.sample.use * (int(layer.sample.positions.max()) + 1)
        found["tokens.estimator"] = train_estimator(layer.sample.keys[None], use[None], layer.seed)
    return found


def _learn_side(method: Method, layer: Layer, side: str, elite: Tensors) -> Tensors:
    chain = method.k if side == "k" else method.v
    where = Setting(layer.place(side), torch.float32, seed=layer.seed)
    found: Tensors = {}
    basis: BasisTwin = twins()[chain.basis.name](chain.basis, where)  # type: ignore[assignment]
    rows = layer.rows(side, chain.before_rope)
    if isinstance(basis, PaluTwin):
        found = basis.calibrate(rows)
    elif isinstance(basis, LearnedProjectionTwin):
        found = basis.calibrate(rows, _metric(layer, side, chain.before_rope))
    weighting = getattr(chain.format, "weighting", "") or getattr(chain.format, "by", "")
    coefficients, slopes = _coefficients(chain, layer, side, elite or found, weighting in ("fisher", "hessian"))
    latent = chain.basis.latent(where.place)
    inner = replace(where, place=replace(where.place, heads=latent.heads, width=latent.width))
    form: FormatTwin = twins()[chain.format.name](chain.format, inner)  # type: ignore[assignment]
    for part in chain.corrections:
        fix: CorrectionTwin = twins()[part.name](part, inner)  # type: ignore[assignment]
        coefficients, _ = fix.before(coefficients)
    weights = None if slopes is None else slopes.square()
    if weighting == "attention":
        heads = coefficients.shape[1]
        weights = layer.sample.use.unflatten(0, (heads, -1)).mean(1)[None, ..., None]
    return found | form.calibrate(coefficients, weights)


def _coefficients(chain: Chain, layer: Layer, side: str, made: Tensors, slopes: bool) -> tuple[Tensor, Tensor | None]:
    """What the format gets to write, [1, Hl, N, r], and gradients for it."""
    total: Tensor | None = None
    bent: Tensor | None = None
    for each in ("k", "v") if chain.basis.both_sides else (side,):
        own = {k.removeprefix(f"{each}."): t for k, t in made.items()}
        where = Setting(layer.place(each), torch.float32, calibration=own, seed=layer.seed)
        basis: BasisTwin = twins()[chain.basis.name](chain.basis, where)  # type: ignore[assignment]
        rows = _mixed(basis, layer, each, chain.before_rope, False)
        if rows.shape[2] < chain.basis.minimum_rows:
            raise KvsimError(f"{chain.basis.name} needs {chain.basis.minimum_rows} rows to calibrate its format, "
                             f"and the texts gave {rows.shape[2]}; give longer texts")
        fixed = basis.fit(rows)
        c = basis.project(rows, fixed)
        total = c if total is None else total + c
        if slopes:
            each_head = _mixed(basis, layer, each, chain.before_rope, True) @ basis.maps(fixed).float().mT
            g = each_head.unflatten(1, (c.shape[1], -1)).sum(2)
            bent = g if bent is None else bent + g
    assert total is not None
    return total, bent


def _mixed(basis: BasisTwin, layer: Layer, side: str, before_rope: bool, slopes: bool) -> Tensor:
    rows = layer.rows(side, before_rope, slopes)
    if isinstance(basis, EliteKvTwin) and side == "k":
        return basis.mix(rows, layer.rows(side, True, slopes), {})
    return rows


def _metric(layer: Layer, side: str, before_rope: bool) -> Tensor | None:
    """A A^T of each stored head: second moments of the queries that meet its keys, or of its values' way out."""
    heads = layer.k.heads
    if side == "v":
        if layer.output is None:
            return None
        out = layer.output.float().unflatten(1, (heads, -1, layer.v.width))
        return torch.einsum("ohgd,ohge->hde", out, out)
    q = layer.sample.queries
    if before_rope:
        # a key at position j meets q turned back by j: q R_j k with any j up to the query's own
        generator = torch.Generator().manual_seed(layer.seed)
        positions = layer.sample.positions
        q = layer.unrotated(q, (torch.rand(positions.shape, generator=generator) * (positions + 1)).long())
    q = q.unflatten(0, (heads, -1)).flatten(1, 2)
    return q.mT @ q / q.shape[1]


def learn_elite(part: EliteKv, layer: Layer) -> Tensors:
    """Frequencies of each head, and the joint basis of all else."""
    s = layer.sample
    keys = layer.unrotated(s.keys, s.positions)
    width = rotary_width(layer)
    total = len(s.positions)
    few, more = (torch.linspace(0, total - 1, min(n, total)).long() for n in (QUERIES, 4 * QUERIES))
    queries = layer.unrotated(s.queries, s.positions)
    visible = s.positions[more][None] <= s.positions[few][:, None]
    elite = choose_frequencies((s.queries[:, few], queries[:, few]), (s.keys[:, more], keys[:, more]), visible, width,
                               part.frequencies)
    return joint_factors(part, layer.k, elite, width, keys, s.values)


def rotary_width(layer: Layer) -> int:
    """Channels that turn; channel i must turn with channel i + width / 2, as Llama pairs them."""
    assert layer.rotation is not None
    eye = torch.eye(layer.k.width)[None, None]
    turned = sum(layer.rotation.rotate(eye, torch.full((1, layer.k.width), p))[0, 0].abs() for p in (1, 17, 1013))
    partners = (turned - turned * torch.eye(layer.k.width)).max(1)
    width = int((partners.values > 0).sum())
    want = torch.arange(width).roll(width // 2)
    if not torch.equal(partners.indices[:width], want) or bool((partners.values[width:] > 0).any()):
        raise KvsimError(f"elitekv: the rotary embedding at the {layer.k.where} does not pair channel i with i + half")
    return width


def output_weight(attention: nn.Module, columns: int) -> Tensor | None:
    """The output projection of an attention module, [out, Hq * dv], or None where it is not a plain matrix."""
    for name in ("o_proj", "out_proj", "dense"):
        weight = getattr(getattr(attention, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.shape[-1:] == (columns,):
            return weight.detach().float().cpu()
    return None

