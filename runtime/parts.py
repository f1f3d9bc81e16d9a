"""What the running twin of a part owes: tensors in, tensors out; each takes the kvsim part itself as its settings.

Shapes everywhere: B sequences, H stored heads, n rows, d values. Packed buffers are [B, H', rows, w] with the rows,
widths and bits that the part's own `buffers()` declares, so that bytes agree by construction or an assertion fails.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.parts import Basis, Correction, Format, Part, Place, TokenPolicy

P = TypeVar("P", bound=Part)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """Where a twin runs: the place in the model, the dtype of full precision, the device, and calibrated tensors."""

    place: Place
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calibration: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    def generator(self) -> torch.Generator:
        """Random numbers of this place: others for each layer and side, the same on every device (made on the CPU)."""
        place = self.place
        return torch.Generator().manual_seed(self.seed * 1_000_003 + place.layer * 2 + (place.side == "v"))


class Twin(ABC, Generic[P]):
    """A part, running. `part` is the kvsim part: the only place where settings live."""

    part_name: ClassVar[str] = ""

    def __init__(self, part: P, setting: Setting) -> None:
        self.part = part
        self.setting = setting

    @property
    def place(self) -> Place:
        """Heads, width and side."""
        return self.setting.place


class FormatTwin(Twin[Format]):
    """Rows to packed buffers and back. Buffer names are those of `part.buffers()`."""

    def model_buffers(self) -> Tensors:
        """Per-model buffers (codebooks, signs, projections), each [1, H', rows, w]; made once, shared by sequences.

        The twin holds the same tensors; where `fixed` has a buffer of that name, that one is used instead.
        """
        return {}

    def start(self, x: Tensor) -> Tensors:
        """Fixed per-sequence buffers [B, H', rows, w] decided from the first rows encoded, x [B, H, n, d].

        A codebook that no calibration gave is learned here, once for the twin, into the tensor of `model_buffers`.
        """
        return {}

    def calibrate(self, x: Tensor, weights: Tensor | None = None) -> Tensors:
        """Tensors for `Setting.calibration` of this place, from rows x [B, H, n, d]; {} where nothing is calibrated.

        weights: how much each value counts, broadcasting with x (Fisher information, attention), or None.
        """
        return {}

    @abstractmethod
    def encode(self, x: Tensor, fixed: Tensors) -> Tensors:
        """Encode one flush of rows x [B, H, n, d] into buffers [B, H', rows, w] (codes packed to uint8).

        n is a multiple of the part's `unit`. Values that overflow a scale's dtype: an error or a wider
        scale, never inf.
        """

    @abstractmethod
    def decode(self, rows: Tensors, fixed: Tensors, blocks: Tensor) -> Tensor:
        """Rows back, [B, H, n, d] in the setting's dtype.

        rows: buffers of a run of encoded rows that starts at a unit's first row. blocks: [n] int64, for each row the
        index into block buffers (those with one row a flush) of its block.
        """

    def rows_per(self, name: str) -> int:
        """Token rows for one row of a buffer: 1, the unit for group scales, 0 for an entry a flushed block.

        Block buffers are handed to `decode` whole; an entry is one row, or as many as the part says (`lowrank`: rank).
        """
        return 1


class CorrectionTwin(Twin[Correction]):
    """A correction: split off what the format must not see, and add back what it lost."""

    def before(self, x: Tensor) -> tuple[Tensor, Tensors]:
        """What the format gets to encode, and buffers of what was taken out (outliers)."""
        return x, {}

    def after(self, x: Tensor, decoded: Tensor) -> Tensors:
        """Buffers that describe the error x - decoded of one flush (low rank)."""
        return {}

    @abstractmethod
    def restore(self, decoded: Tensor, rows: Tensors, blocks: Tensor) -> Tensor:
        """Decoded rows [B, H, n, d] with the correction applied."""

    def rows_per(self, name: str) -> int:
        """As FormatTwin.rows_per."""
        return 1


class BasisTwin(Twin[Basis]):
    """A linear change of coordinates, one map a head: row = coefficients @ map (+ offset).

    `fixed` holds the per-sequence buffers and may hold the per-model ones, which are then used. Where the part writes
    both sides (`both_sides`), a row's coefficients are the sum of what both twins project, and both twins' maps
    read it.
    """

    block_maps: ClassVar[bool] = False
    """Whether flushed blocks keep their coordinates and a map each into the present ones."""

    def model_buffers(self) -> Tensors:
        """Per-model buffers (random or calibrated matrices), each [1, H', rows, w]."""
        return {}

    def fit(self, x: Tensor) -> Tensors:
        """Fixed per-sequence buffers [B, H', rows, w] from rows x [B, H, n, d], n >= part.minimum_rows."""
        return {}

    @abstractmethod
    def project(self, x: Tensor, fixed: Tensors) -> Tensor:
        """Coefficients [B, Hl, n, r] of rows x [B, H, n, d]."""

    @abstractmethod
    def maps(self, fixed: Tensors) -> Tensor:
        """Maps [B, H, r, d]: head h of a row is coefficients @ maps[:, h]."""

    def offset(self, fixed: Tensors) -> Tensor | None:
        """A constant row [B, H, 1, d] added to every reconstruction, or None."""
        return None

    def extend(self, x: Tensor, coefficients: Tensor, fixed: Tensors) -> tuple[Tensor, Tensors] | None:
        """Online bases only: new (coefficients of all rows, fixed buffers) after rows x arrive; None: project them.

        coefficients: those in full precision. fixed: with `maps` [B, Hl, blocks * r, r] of the flushed blocks, if any.
        """
        return None

    def block_map(self, fixed: Tensors) -> Tensor:
        """With `block_maps`: the map [B, Hl, r, r] of a block that is flushed now."""
        raise KvsimError(f"{self.part.name} asked for `block_map`, which its twin does not have")

    def turned(self, coefficients: Tensor, maps: Tensor, blocks: Tensor) -> Tensor:
        """With `block_maps`: flushed coefficients [B, Hl, n, r] in the present basis; blocks: [n], each row's block."""
        raise KvsimError(f"{self.part.name} asked for `turned`, which its twin does not have")

    def mix(self, rotated: Tensor, unrotated: Tensor, fixed: Tensors) -> Tensor:
        """With `both_sides`: keys or queries [B, H or Hq, n, d] as this basis rotates them, from both forms."""
        raise KvsimError(f"{self.part.name} asked for `mix`, which its twin does not have")


class Rotates(Protocol):
    """A rotary embedding: rows [B, H, n, d] that stand at positions [B, n]."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows to their positions."""

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The inverse."""


@dataclass
class Prompt:
    """What a token policy may look at when the prompt ends; rows are after RoPE unless the method says otherwise.

    keys, values: [B, H, T, d]. queries: the last `queries` query rows [B, Hq, w, d]. mass: attention weights summed
    over all queries of the prompt and averaged over the query heads of a KV head, [B, H, T]; seen_by: how many queries
    could see each row, [T]; last: weights of the last query, [B, H, T]; hits: queries whose weight exceeded their mean,
    [B, H, T] (None where the policy does not ask for weights). scores: [B, H, T] from a pass outside (gradients), or
    None.
    rotation, positions [B, T]: the model's rotary embedding and where rows stand; None: unknown, and 0 to T - 1.
    """

    keys: Tensor
    values: Tensor
    scaling: float
    queries: Tensor | None = None
    mass: Tensor | None = None
    seen_by: Tensor | None = None
    last: Tensor | None = None
    hits: Tensor | None = None
    scores: Tensor | None = None
    rotation: Rotates | None = None
    positions: Tensor | None = None


@dataclass
class Step:
    """What a policy may look at after a step: weights of the step's queries over the rows held, newest last.

    weights: [B, H, m, n] averaged over the query heads of a KV head (None where not asked for); queries: [B, Hq, m, d];
    keys, values: the rows that `step_rows` asks for, the last m or all n; seen: tokens seen so far, these m included;
    rows: n, these m included. tail: newest rows that must not be dropped while older ones are left. new: m.
    """

    seen: int
    rows: int
    tail: int = 0
    weights: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    new: int = 1


@dataclass
class Merged:
    """Rows that a policy wrote anew: keys, values [B, H, m, d], and what stands in its buffers for them.

    rows: int64 [B, H], live rows of each head, the others of the m are padding behind them; None: all are live.
    """

    keys: Tensor
    values: Tensor
    state: Tensors
    rows: Tensor | None = None


@dataclass
class Fold:
    """What a merging policy does after a step: rows `at` become keys, values [B, H, m, d], then rows are dropped.

    at: int64 [B, H, m], -1 where a head writes fewer; may repeat a row with the same content. drop: ascending int64
    [B, H, k], -1 (first) where a head drops fewer; None: nothing. state: for all rows held, before the drop.
    """

    at: Tensor
    keys: Tensor
    values: Tensor
    drop: Tensor | None
    state: Tensors


class PolicyTwin(Twin[TokenPolicy]):
    """Which rows stay. State tensors are named as in `part.buffers()`: [B, H', rows, w]; rows keep their order."""

    ragged: ClassVar[bool] = False
    """Whether heads and sequences keep different numbers of rows."""
    prompt_weights: ClassVar[bool] = False
    step_weights: ClassVar[bool] = False
    step_queries: ClassVar[bool] = False
    step_rows: ClassVar[Literal["none", "new", "all"]] = "none"

    def model_buffers(self) -> Tensors:
        """Per-model buffers (planes, an estimator), each [1, H', rows, w]; the same tensors at every call."""
        return {}

    @property
    def prompt_queries(self) -> int:
        """Query rows at the prompt's end that `select` wants."""
        return 0

    def select(self, prompt: Prompt) -> Tensor | None:
        """Rows to keep, ascending int64 [B, H, m]; or None for all. Ragged policies pad with -1."""
        return None

    def merge(self, prompt: Prompt) -> Merged | None:
        """For policies that write new rows from the prompt's; None for those that only drop."""
        return None

    def start(self, prompt: Prompt, kept: Tensor | None) -> Tensors:
        """State for the kept rows."""
        return {}

    def step(self, state: Tensors, step: Step) -> tuple[Tensors, Tensor | None]:
        """New state (for all rows held, before any drop) and the rows to drop, ascending int64 [B, H, k], or None."""
        return state, None

    def fold(self, state: Tensors, step: Step) -> Fold | None:
        """In place of `step` where `part.merges` and rows leave while generating; None: no merge, `step` follows."""
        return None

    def attended(self, state: Tensors, queries: Tensor, rows: int) -> Tensor | None:
        """Rows that a step reads, int64 [B, H, m], or None for all (page selection)."""
        return None

    def bias(self, state: Tensors, seen: int = 0, rows: int = 0) -> Tensor | None:
        """Added to the logits of the rows held, float32 [B, H, rows] (log-counts of merged rows), or None.

        state, seen: as the prompt or the last step left them; rows: held now, this step's new ones included.
        """
        return None


@cache
def twins() -> Mapping[str, type[Twin[Part]]]:
    """Every twin by its part's name, found in runtime/formats, runtime/bases and runtime/tokens."""
    found: dict[str, type[Twin[Part]]] = {}
    for folder in ("formats", "bases", "tokens"):
        package = import_module(f"runtime.{folder}")
        for info in pkgutil.iter_modules(package.__path__):
            for value in vars(import_module(f"runtime.{folder}.{info.name}")).values():
                if isinstance(value, type) and issubclass(value, Twin) and value.part_name:
                    found[value.part_name] = value
    return found
