"""A method: which tokens are kept, in which basis and format each side is written, layer by layer; what composes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from kvsim.bases.identity import Identity
from kvsim.errors import KvsimError, shown, word
from kvsim.formats.full import Full
from kvsim.parts import Basis, Correction, Format, Part, Place, Quantizer, TokenPolicy
from kvsim.tokens.keep import Keep

Protocol = Literal["after_prefill", "on_write"]
PROTOCOLS: tuple[Protocol, ...] = ("after_prefill", "on_write")


@dataclass(frozen=True)
class Chain:
    """How one side is written: a basis, the format of its coefficients, and corrections of that format."""

    basis: Basis = field(default_factory=Identity)
    format: Format = field(default_factory=Full)
    corrections: tuple[Correction, ...] = ()

    @property
    def before_rope(self) -> bool:
        """Whether this side is written before the rotation."""
        return self.basis.before_rope or self.format.before_rope

    @property
    def row_addressable(self) -> bool:
        """Whether a single row can be dropped."""
        return self.format.row_addressable and all(c.row_addressable for c in self.corrections)

    @property
    def is_full(self) -> bool:
        """Whether nothing is compressed on this side."""
        return isinstance(self.format, Full) and isinstance(self.basis, Identity)

    def for_values(self) -> Chain:
        """The same chain without `rope=pre`, which values do not have."""
        parts: dict[str, Part] = {}
        if getattr(self.basis, "rope", "post") == "pre":
            parts["basis"] = self.basis.with_settings(rope="post")
        if getattr(self.format, "rope", "post") == "pre":
            parts["format"] = self.format.with_settings(rope="post")
        return replace(self, **parts) if parts else self  # type: ignore[arg-type]

    def check(self, side: str) -> None:
        """Raise KvsimError where the parts of this side cannot stand together."""
        if self.corrections and not isinstance(self.format, Quantizer):
            raise KvsimError(f"{self.corrections[0].name} corrects a quantized format, and {self.format.name} is none")
        for correction in self.corrections:
            correction.check_format(self.format)
        self.basis.check_format(self.format)
        names = [c.name for c in self.corrections]
        if len(set(names)) < len(names):
            raise KvsimError(f"a correction stands twice in {self}")
        if side == "v" and self.before_rope:
            raise KvsimError("rope=pre is for keys: values carry no rotation; set it in k:...")
        if side == "v" and self.format.keys_only:
            raise KvsimError(
                f"{self.format.name} estimates query-key products and cannot hold values; "
                f"use k:{self.format.name}(...) v:..."
            )
        if (
            self.basis.before_rope != self.format.before_rope
            and self.format.before_rope
            and not isinstance(self.basis, Identity)
        ):
            raise KvsimError(
                f"{self.format}: the basis decides where the rotation stands; set rope on {self.basis.name} instead"
            )

    def __str__(self) -> str:
        stages = [] if isinstance(self.basis, Identity) else [str(self.basis)]
        if not isinstance(self.format, Full) or not stages:
            stages.append("+".join([str(self.format), *map(str, self.corrections)]))
        return " | ".join(stages)


def _ties_heads(chain: Chain) -> bool:
    """Whether a format has a buffer that several heads share, other than the model's."""
    place = Place("k", 2, 64, 2)
    return any(b.heads < place.heads and not b.per_model for b in chain.format.buffers(1024, 1, place))


@dataclass(frozen=True)
class LayerRange:
    """Layers that a clause speaks of: `0-3`, `5`, `-2-` (the last two), `10-` or `all`."""

    text: str

    def __post_init__(self) -> None:
        if self.text != "all" and not re.fullmatch(r"\d{1,6}(-\d{1,6})?|\d{1,6}-|-\d{1,6}-", self.text):
            raise KvsimError(f"layers={shown(self.text)}: write 0-3, 5, 10-, -2- (the last two) or all")
        low, _, high = self.text.partition("-")
        if low and high and int(low) > int(high):
            raise KvsimError(f"layers={self.text} runs backwards; write the smaller layer first")

    def covers(self, layer: int, n_layers: int) -> bool:
        """Whether `layer` of `n_layers` lies inside; raise KvsimError where the model has no such layers."""
        if self.text == "all":
            return True
        if self.text.startswith("-"):
            return layer >= n_layers - int(self.text[1:-1])
        low, dash, high = self.text.partition("-")
        if int(low) >= n_layers or (high and int(high) >= n_layers):
            raise KvsimError(f"layers={self.text}: the model has layers 0 to {n_layers - 1}")
        return int(low) <= layer and (
            (not dash and layer == int(low)) or (dash == "-" and (not high or layer <= int(high)))
        )


@dataclass(frozen=True)
class Clause:
    """A method for some of the layers; later clauses win."""

    layers: LayerRange
    method: Method


@dataclass(frozen=True)
class Method:
    """The three choices, per side and per layer. Raises KvsimError where they cannot compose, with the reason."""

    tokens: TokenPolicy = field(default_factory=Keep)
    k: Chain = field(default_factory=Chain)
    v: Chain = field(default_factory=Chain)
    protocol: Protocol = "after_prefill"
    clauses: tuple[Clause, ...] = ()

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise KvsimError(f"protocol {shown(self.protocol)} is not one of {', '.join(PROTOCOLS)}")
        self.k.check("k")
        self.v.check("v")
        for side, chain in (("keys", self.k), ("values", self.v)):
            self._check_rows(side, chain)
            if self.tokens.merges and chain.before_rope:
                raise KvsimError(
                    f"{self.tokens.name} merges rows of several positions, and rope=pre must rotate each row to one; "
                    f"leave rope=post with it"
                )
            if chain.basis.both_sides and self.k.basis != self.v.basis:
                raise KvsimError(
                    f"{chain.basis.name} writes keys and values together: use it on both sides with the same settings"
                )

    def _check_rows(self, side: str, chain: Chain) -> None:
        policy = self.tokens
        if policy.drops == "rows" and not policy.positional and not chain.row_addressable:
            tied = next((c for c in chain.corrections if not c.row_addressable), chain.format)
            raise KvsimError(
                f"{policy.name} drops single rows while generating, but {tied} ties {side} of several rows together, "
                "so a row cannot leave alone; use groups along the row (axis=token, scale=row) or a prompt policy such "
                "as snapkv"
            )
        quantized = not isinstance(chain.format, Full)
        if policy.drops == "rows" and not policy.positional and chain.basis.rewrites_rows and quantized:
            raise KvsimError(
                f"{policy.name} drops single rows while generating, but {chain.basis.name} keeps a map for each block "
                f"of quantized rows; use it in full precision, or a prompt policy such as snapkv"
            )
        spared = policy.spared if policy.drops == "rows" else None
        if spared is not None and chain.format.block_rows - 1 > spared:
            raise KvsimError(
                f"{policy.name} drops rows older than the newest {spared}, and {chain.format} still holds up to "
                f"{chain.format.block_rows - 1} {side} in full precision; spare as many rows, or use a smaller residual"
            )
        if policy.ragged and (chain.basis.joins_heads or _ties_heads(chain)):
            together: Part = chain.basis if chain.basis.joins_heads else chain.format
            raise KvsimError(
                f"heads of {policy.name} hold different numbers of rows, but {together} writes {side} of several heads "
                f"together; use parts that write each head by itself"
            )
        if policy.drops == "rows" and policy.per_head and (chain.basis.joins_heads or chain.format.joins_heads):
            tight: Part = chain.basis if chain.basis.joins_heads else chain.format
            raise KvsimError(
                f"{policy.name} drops other rows in each head, but {tight.name} writes one row for several heads; "
                f"use {'a basis for each head (svd)' if tight is chain.basis else 'int'} or a prompt policy such as "
                "snapkv"
            )

    @property
    def is_full(self) -> bool:
        """Whether this is the uncompressed baseline for every layer."""
        plain = isinstance(self.tokens, Keep) and self.k.is_full and self.v.is_full
        return plain and all(c.method.is_full for c in self.clauses)

    def at(self, layer: int, n_layers: int) -> Method:
        """The method of one layer, clauses resolved."""
        chosen = self
        for clause in self.clauses:
            if clause.layers.covers(layer, n_layers):
                chosen = clause.method
        return replace(chosen, clauses=(), protocol=self.protocol) if chosen.clauses or chosen is not self else chosen

    def parts(self) -> tuple[Part, ...]:
        """Every part of the method that is not the identity, clauses included."""
        chains = (self.k, self.v)
        own: list[Part] = [self.tokens, *(c.basis for c in chains), *(c.format for c in chains)]
        own += [x for c in chains for x in c.corrections]
        for clause in self.clauses:
            own += clause.method.parts()
        return tuple(p for p in dict.fromkeys(own) if not isinstance(p, Keep | Identity | Full))

    def __str__(self) -> str:
        if self.k == self.v or (self.k.before_rope and self.k.for_values() == self.v):
            sides = str(self.k)
        else:
            sides = f"k:{self.k} v:{self.v}"
        stages = [] if isinstance(self.tokens, Keep) else [str(self.tokens)]
        if sides != "full" or not stages:
            stages.append(sides)
        text = " | ".join(stages)
        if self.protocol != "after_prefill":
            text += f" @ {self.protocol}"
        return "; ".join([text, *(f"layers={c.layers.text}: {c.method}" for c in self.clauses)])


def parse_method(text: str | Method) -> Method:
    """Read the written form (semantics: grammar) or a preset's name; raise KvsimError with the nearest name.

    A Method is returned as it is; `str` of the result gives the canonical form back.
    """
    if isinstance(text, Method):
        return text
    from kvsim.grammar import parse

    return parse(word(text, "a method"))


def parse_methods(methods: Iterable[str | Method]) -> list[Method]:
    """Each of a list of methods; raise KvsimError where it is no list."""
    try:
        listed = None if isinstance(methods, str) else list(methods)
    except TypeError:
        listed = None
    if listed is None:
        raise KvsimError(f"methods are a list such as ['int(bits=4)', 'kivi-4'], got {shown(methods)}")
    return [parse_method(m) for m in listed]


@cache
def _names() -> dict[Method, str]:
    from kvsim.grammar import presets

    found: dict[Method, str] = {}
    for name in presets():
        found.setdefault(parse_method(name), name)
    return found


def preset_name(method: Method) -> str | None:
    """The preset that this method is, or None."""
    return _names().get(method)
