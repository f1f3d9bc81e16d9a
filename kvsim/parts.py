"""What a part of a method owes: its settings, the buffers it holds and the work it does; no part knows time."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from kvsim.buffers import ALLOCATION_ROWS, Buffer, Eager, Phase, Place, Rows, Work, per_tokens
from kvsim.errors import KvsimError
from kvsim.settings import Budget, Part, budget_rows, check_budget, setting, written
from kvsim.workload import Count

__all__ = [
    "ALLOCATION_ROWS",
    "Basis",
    "Budget",
    "Buffer",
    "Conversion",
    "Correction",
    "Format",
    "Latent",
    "Part",
    "Place",
    "Quantizer",
    "Rows",
    "TokenPolicy",
    "Work",
    "budget_rows",
    "check_budget",
    "parts",
    "per_tokens",
    "setting",
    "written",
]

Conversion = Literal["none", "cast", "scale", "unpack", "lookup"]


@dataclass(frozen=True)
class Format(Part):
    """How a row of `width` values is written as numbers."""

    role: ClassVar[str] = "format"
    keys_only: ClassVar[bool] = False
    reconstructs: ClassVar[bool] = True
    encode_flops: ClassVar[float] = 0.0

    @property
    def conversion(self) -> Conversion:
        """What reading a stored value takes: nothing, a cast, a scale, unpacking and scaling, or a table look-up."""
        return "none"

    @property
    def kernel_format(self) -> str:
        """The name under which measured kernels know this format."""
        return self.name

    @property
    def row_addressable(self) -> bool:
        """Whether a single row can be dropped without touching others."""
        return True

    @property
    def joins_heads(self) -> bool:
        """Whether one row of a buffer holds values of several heads."""
        return False

    @property
    def residual_rows(self) -> int:
        """Newest rows held in full precision."""
        return 0

    @property
    def before_rope(self) -> bool:
        """Whether keys are written before the rotation."""
        return False

    @property
    def block_rows(self) -> int:
        """Rows of each block that is flushed while decoding."""
        return 1

    def encode_row_flops(self, place: Place) -> float:
        """Arithmetic to encode one row of one head."""
        return self.encode_flops * place.width

    def read_flops(self, place: Place) -> float:
        """Arithmetic per row and head at each read beyond the conversion itself: rotations that must be redone."""
        return 0.0

    def step_flops(self, place: Place) -> float:
        """Arithmetic once a step, whatever the rows: what queries or outputs need (a rotation, a sketch)."""
        return 0.0

    def quantized(self, rows: Count) -> Count:
        """Of `rows` rows, those that are encoded; the others are the full-precision tail."""
        return rows

    def flushes(self, prompt_rows: Count, rows: Count) -> Count:
        """Blocks encoded so far: one for the prompt if it encoded anything, then one for each flush."""
        return 0 * rows

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Buffers for `rows` encoded rows in `blocks` flushed blocks (the tail is not theirs)."""
        return (Buffer("rows", place.heads, rows, place.width, place.value_bits),)

    def check_place(self, place: Place) -> None:
        """Raise KvsimError where this format cannot write rows of this width or side."""


@dataclass(frozen=True)
class Quantizer(Format):
    """A format that encodes rows once and may keep the newest in full precision."""

    residual: int = setting(0, low=0, what="newest rows kept in full precision")
    flush: str = setting(
        "oldest",
        choices=("oldest", "all"),
        what="oldest: rows beyond the residual; all: the whole tail when full (KIVI's keys)",
    )
    rope: str = setting("post", choices=("post", "pre"), what="keys are written after or before the rotation")

    encode_flops: ClassVar[float] = 6.0

    @property
    def unit(self) -> int:
        """Rows that are encoded together (u in semantics)."""
        return 1

    @property
    def residual_rows(self) -> int:
        """Newest rows held in full precision."""
        return self.residual

    @property
    def before_rope(self) -> bool:
        """Whether keys are written before the rotation."""
        return self.rope == "pre"

    @property
    def block_rows(self) -> int:
        """Rows of each block that is flushed while decoding."""
        return self.residual if self.flush == "all" else self.unit

    def read_flops(self, place: Place) -> float:
        """Keys stored before the rotation are rotated at each read: two products and a sum a value."""
        return 3.0 * place.width if self.before_rope else 0.0

    def check(self) -> None:
        """Refuse a flush of the whole tail that is not a multiple of the unit."""
        if self.flush == "all" and (self.residual < 1 or self.residual % self.unit):
            raise KvsimError(
                f"{self.name}: flush=all needs a residual that is a multiple of {self.unit}, "
                f"got residual={self.residual}"
            )

    def quantized(self, rows: Count) -> Count:
        """u * floor(max(0, n - R) / u), or R * floor(n / R) with flush=all."""
        if self.flush == "all":
            return rows // self.residual * self.residual
        spare = np.maximum(0, rows - self.residual) if isinstance(rows, np.ndarray) else max(0, rows - self.residual)
        return spare // self.unit * self.unit

    def flushes(self, prompt_rows: Count, rows: Count) -> Count:
        """One block for the prompt if it encoded anything, then one for each u (or R) rows encoded while decoding."""
        step = self.block_rows
        first, now = self.quantized(prompt_rows), self.quantized(rows)
        prompt_block = np.where(np.asarray(first) > 0, 1, 0) if isinstance(first, np.ndarray) else int(first > 0)
        return prompt_block + (now - first) // step

    def check_place(self, place: Place) -> None:
        """Values carry no rotation; MLA latents neither."""
        if self.rope == "pre" and place.side == "v":
            raise KvsimError(
                f"{self.name}: rope=pre is for keys; write k:{self.name}(...) v:... to set it on keys alone"
            )
        if self.rope == "pre" and place.mla:
            raise KvsimError(f"{self.name}: an MLA latent carries no rotation; leave rope=post")


@dataclass(frozen=True)
class Correction(Part):
    """A small addition to a format: buffers for the encoded rows plus work per flushed block."""

    role: ClassVar[str] = "correction"
    encode_flops: ClassVar[float] = 0.0

    @property
    def row_addressable(self) -> bool:
        """Whether a single row can be dropped without touching others."""
        return True

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Buffers for `rows` encoded rows in `blocks` blocks."""
        return ()

    @property
    def least_block_rows(self) -> int:
        """Rows a flushed block must have to be corrected; smaller ones go without (only the prompt's is larger)."""
        return 0

    def encode_row_flops(self, place: Place) -> float:
        """Arithmetic to correct one row of one head when it is encoded."""
        return self.encode_flops * place.width

    def read_flops(self, place: Place) -> float:
        """Arithmetic per row and head at each read."""
        return 0.0

    def check_format(self, part: Format) -> None:
        """Raise KvsimError where the correction cannot stand on this format."""
        if not part.reconstructs:
            raise KvsimError(
                f"{self.name} corrects reconstructed values, and {part.name} only estimates products with them"
            )


@dataclass(frozen=True)
class Latent:
    """What a basis writes for one side: `heads` x `width` coefficients a row (heads 1 where the basis is joint)."""

    heads: int
    width: int


@dataclass(frozen=True)
class Basis(Part):
    """The coordinates in which a row is written."""

    role: ClassVar[str] = "basis"
    calibrated: ClassVar[bool] = False
    rewrites_rows: ClassVar[bool] = False
    both_sides: ClassVar[bool] = False

    @property
    def before_rope(self) -> bool:
        """Whether keys are projected before the rotation."""
        return False

    @property
    def joins_heads(self) -> bool:
        """Whether one row of coefficients stands for several heads."""
        return False

    @property
    def minimum_rows(self) -> int:
        """Rows below which everything stays full (semantics: while n < rank)."""
        return 0

    def check_format(self, part: Format) -> None:
        """Raise KvsimError where coefficients cannot be written in this format."""
        if self.before_rope and not part.reconstructs:
            raise KvsimError(
                f"{self.name}(rope=pre) rebuilds keys to rotate them, and {part.name} only estimates products; "
                "use rope=post"
            )

    def latent(self, place: Place) -> Latent:
        """Coefficients a row; raises KvsimError where the rank exceeds what this place has."""
        return Latent(place.heads, place.width)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """Fixed buffers (bases, cores) once there are `minimum_rows` rows, and any beside the coefficients."""
        return ()

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Work at the end of the prompt, reading and writing of the rows included."""
        return Work()

    def write_work(self, place: Place) -> Work:
        """Work to add one row."""
        return Work()

    def rewrite_work(self, rows: Count, place: Place) -> Work:
        """Work that adding one row costs on `rows` full-precision coefficients already stored."""
        return Work()

    def attend_flops(self, rows: Count, place: Place) -> Any:
        """Arithmetic of one step beyond attention itself on full-width rows (negative where the latent saves)."""
        return 0.0


@dataclass(frozen=True)
class TokenPolicy(Part):
    """Which tokens stay and which of them a step reads."""

    role: ClassVar[str] = "tokens"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "none"
    positional: ClassVar[bool] = False
    per_head: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    @property
    def spared(self) -> int | None:
        """Newest rows that never leave while generating; None: as many as a format keeps in full precision."""
        return None

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Counts for one KV head after `prompt` and `new` tokens."""
        total = prompt + new
        return Rows(prompt, total, total)

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """Bookkeeping of one layer (place is the key side)."""
        return ()

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Work of one layer when the prompt ends."""
        return Work()

    def step_work(self, rows: Rows, place: Place) -> Work:
        """Work of one layer at each step, beyond reading the attended rows."""
        return Work()

    def eager(self, phase: Phase, rows: Count, place: Place) -> Eager:
        """What torch does besides: when a prompt of so many rows ends, or at a step that attends so many."""
        return Eager()


_ROLES: dict[str, type[Part]] = {"format": Format, "correction": Correction, "basis": Basis, "tokens": TokenPolicy}


@cache
def parts() -> Mapping[str, type[Part]]:
    """Every part by name, found in kvsim/formats, kvsim/bases and kvsim/tokens: one file a part, no list to edit."""
    found: dict[str, type[Part]] = {}
    for folder in ("formats", "bases", "tokens"):
        package = import_module(f"kvsim.{folder}")
        for info in pkgutil.iter_modules(package.__path__):
            module = import_module(f"kvsim.{folder}.{info.name}")
            for value in vars(module).values():
                if (
                    isinstance(value, type)
                    and issubclass(value, Part)
                    and value.__module__ == module.__name__
                    and value.name
                ):
                    found[value.name] = value
    return MappingProxyType(dict(sorted(found.items(), key=lambda kv: (list(_ROLES).index(kv[1].role), kv[0]))))
