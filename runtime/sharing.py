"""Twins of one layer, made once and shared by its stores, so that what belongs to the model is held once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.method import Chain, Method
from kvsim.parts import Basis, Correction, Format, Part, Place
from kvsim.tokens.keep import Keep
from runtime.parts import BasisTwin, CorrectionTwin, FormatTwin, PolicyTwin, Setting, Twin, twins
from runtime.rope import Rotation


@dataclass(frozen=True)
class Geometry:
    """One layer's cache in numbers: heads of a store, widths of both sides, window (0 = none), layer and depth."""

    n_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    layer: int = 0
    n_layers: int = 1

    def place(self, side: str, value_bits: int) -> Place:
        """Where a part works."""
        width = self.k_dim if side == "k" else self.v_dim
        name = "k" if side == "k" else "v"
        return Place(name, self.n_kv_heads, width, self.n_heads, value_bits, self.layer, self.n_layers)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    def alone(self) -> Geometry:
        """One KV head of it."""
        return replace(self, n_heads=self.group, n_kv_heads=1)


@dataclass(frozen=True)
class Surroundings:
    """What a layer's twins need of the model: dtype, device, rotation, calibrated tensors, seed."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rotation: Rotation | None = None
    calibration: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @property
    def bits(self) -> int:
        """Bits of a full-precision value."""
        return torch.finfo(self.dtype).bits

    def setting(self, place: Place, prefix: str) -> Setting:
        """The surroundings of one twin; calibration keys lose their prefix (`k.`, `v.`, `tokens.`)."""
        own = {k.removeprefix(prefix + "."): v for k, v in self.calibration.items() if k.startswith(prefix + ".")}
        return Setting(place, self.dtype, self.device, own, self.seed)


@dataclass(frozen=True)
class SideTwins:
    """Basis, format and corrections of one side, running; `inner` is the setting of what the basis writes."""

    chain: Chain
    setting: Setting
    inner: Setting
    basis: BasisTwin | None
    format: FormatTwin
    fixes: tuple[CorrectionTwin, ...]

    def model(self) -> list[tuple[str, Tensor]]:
        """Per-model buffers of basis and format, by the names of their parts' buffers (which may be the same)."""
        written = self.format.model_buffers() if self.inner.place.width else {}
        return [*(self.basis.model_buffers() if self.basis else {}).items(), *written.items()]


class LayerTwins:
    """All twins of a layer. Stores of one head (`head` given) share them too, but for what each head has its own of."""

    def __init__(self, method: Method, geometry: Geometry, around: Surroundings) -> None:
        self.method, self.geometry, self.around = method, geometry, around
        self._made: dict[tuple[str, Part, int], Twin[Part]] = {}
        if method.k.before_rope and around.rotation is None:
            raise KvsimError("rope=pre needs the model's rotary embedding")
        self._kind = twins()
        self.exempt = bool(geometry.window)
        runs = method.tokens.name != "keep" and not self.exempt
        self.ragged = runs and bool(getattr(self._kind[method.tokens.name], "ragged", False))
        self.sides(0 if self.ragged else None)  # so that what cannot stand here is refused before any row comes

    def sides(self, head: int | None = None) -> dict[str, SideTwins]:
        """Twins of the sides that have a width, for all heads or for one."""
        chains = {"k": self.method.k, "v": self.method.v}
        return {n: self._side(n, c, head) for n, c in chains.items() if self.geometry.place(n, 16).width}

    def _side(self, name: str, chain: Chain, head: int | None) -> SideTwins:
        setting = self._setting(name, head)
        latent = chain.basis.latent(setting.place)
        inner = replace(setting, place=replace(setting.place, heads=latent.heads, width=latent.width))
        chain.format.check_place(inner.place)
        basis = None if chain.basis.name == "identity" else self._twin(name, chain.basis, setting, head)
        fixes = tuple(self._twin(name, c, inner, head) for c in chain.corrections)
        return SideTwins(chain, setting, inner, basis, self._twin(name, chain.format, inner, head), fixes)  # type: ignore[arg-type]

    @cached_property
    def policy(self) -> PolicyTwin | None:
        """The token policy; that of a ragged layer works on one head as on all."""
        tokens = self.method.tokens
        if tokens.name == "keep" or self.exempt:
            return None
        alone = self.ragged and not self._by_head("tokens", tokens)
        found = self._kind[tokens.name](tokens, self._setting("tokens", 0 if alone else None))
        assert isinstance(found, PolicyTwin)
        return found

    def _setting(self, name: str, head: int | None) -> Setting:
        geometry = self.geometry if head is None else self.geometry.alone()
        return self.around.setting(geometry.place("k" if name == "tokens" else name, self.around.bits), name)

    def _twin(self, name: str, part: Part, setting: Setting, head: int | None) -> Twin[Part]:
        own = head if head is None or self._by_head(name, part) else 0
        key = (name, part, -1 if own is None else own)
        if key not in self._made:
            if own is not None:
                heads = self.geometry.n_kv_heads
                setting = replace(
                    setting, calibration={k: of_head(v, own, heads) for k, v in setting.calibration.items()}
                )
            self._made[key] = self._kind[part.name](part, setting)
        return self._made[key]

    def _by_head(self, name: str, part: Part) -> bool:
        """Whether heads have matrices of their own: calibrated, or declared with as many heads as the layer."""
        heads = self.geometry.n_kv_heads
        setting = self._setting(name, None)
        if any(of_head(t, 0, heads) is not t for t in setting.calibration.values()):
            return True
        declared = part.buffers(1, 1, setting.place) if isinstance(part, Basis | Format | Correction) else ()
        return any(b.per_model and b.heads == heads > 1 for b in declared)

    def formats_alone(self) -> LayerTwins:
        """The same twins without the policy and the window: how rows would be written."""
        found = LayerTwins(replace(self.method, tokens=Keep()), replace(self.geometry, window=0), self.around)
        if not self.ragged:  # whose heads may have matrices of their own
            found._made = self._made
        return found

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every per-model buffer, as kvsim.layout names them."""
        seen: set[int] = set()
        heads = range(self.geometry.n_kv_heads) if self.ragged else (None,)
        pairs = [(f"{n}.{k}", t) for h in heads for n, s in self.sides(h).items() for k, t in s.model()]
        pairs += list(self.policy.model_buffers().items()) if self.policy else []
        for name, tensor in pairs:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def of_head(tensor: Tensor, head: int, heads: int) -> Tensor:
    """One head's share of a calibrated tensor [H, ...] or [1, H, ...]; others as they are."""
    if heads > 1 and tensor.dim() > 1:
        if tensor.shape[0] == heads:
            return tensor[head : head + 1]
        if tensor.shape[0] == 1 and tensor.shape[1] == heads:
            return tensor[:, head : head + 1]
    return tensor
