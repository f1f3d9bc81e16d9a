"""Prompts of typed segments (text, patches of images, frames of patches, frames of sound), and the cells of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError, did_you_mean, shown, word
from kvsim.workload import MAX_COUNT, Workload

if TYPE_CHECKING:
    from kvsim.model import ModelSpec

KINDS = {"text": 1, "image": 2, "video": 3, "audio": 1}
"""Sides of each kind of segment: tokens; rows x columns; frames x rows x columns; frames."""
MAX_TOKENS = 2**22
_ONE = re.compile(r"([a-z]+)([\d.]*(?:x\d+)*)(px|s|)")


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one kind; shape as in KINDS."""

    kind: str
    shape: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Rows that it puts into the cache."""
        return prod(self.shape)

    def cells(self, space: int, time: int, audio: int) -> NDArray[np.int64]:
        """For each token the cell that it falls into, counted from 0; cells at the far edges are smaller."""
        if self.kind == "text":
            return np.arange(self.tokens)
        steps = {"image": (space, space), "video": (time, space, space), "audio": (audio,)}[self.kind]
        cell: NDArray[np.int64] = np.zeros(self.shape, np.int64)
        for axis, (size, step) in enumerate(zip(self.shape, steps, strict=True)):
            at = np.arange(size) // step
            cell = cell * -(-size // step) + at.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return cell.ravel()

    def __str__(self) -> str:
        return self.kind + "x".join(map(str, self.shape))


@dataclass(frozen=True)
class Encoding:
    """How a model turns pictures and sound into tokens.

    pixels: side of the square that becomes one token (0: unknown); grid: tokens a side of every image, whatever its
    size (0: by size); frames: video frames in one row of the token grid; tokens_per_second: of audio.
    """

    pixels: int = 0
    grid: int = 0
    frames: int = 1
    tokens_per_second: float = 0.0
    source: str = ""


ENCODINGS = {
    "qwen2_vl": Encoding(28, frames=2, source="Qwen2-VL config: patch 14, spatial merge 2, temporal patch 2"),
    "qwen2_5_vl": Encoding(28, frames=2, source="Qwen2.5-VL config: patch 14, spatial merge 2, temporal patch 2"),
    "qwen3_vl": Encoding(32, frames=2, source="Qwen3-VL config: patch 16, spatial merge 2, temporal patch 2"),
    "qwen3_vl_moe": Encoding(32, frames=2, source="Qwen3-VL config: patch 16, spatial merge 2, temporal patch 2"),
    "llava": Encoding(grid=24, source="LLaVA-1.5: CLIP ViT-L/14 at 336 px, 24 x 24 patches"),
    "gemma3": Encoding(grid=16, source="Gemma 3 config: mm_tokens_per_image = 256"),
    "voxtral": Encoding(tokens_per_second=12.5, source="Voxtral: 1500 Whisper frames a 30 s, 4 of them a token"),
    "whisper": Encoding(tokens_per_second=50.0, source="Whisper: 1500 frames a 30 s, all in the cross-attention"),
}  # fmt: skip
"""By architecture; facts of the shipped configs."""


def _sides(text: str, kind: str, unit: str, encoding: Encoding) -> tuple[int, ...]:
    """A segment's shape in tokens from what was typed; KvsimError where the unit needs what is not known."""
    numbers = [float(x) for x in text.split("x")]
    if unit == "s":
        if kind != "audio" or not encoding.tokens_per_second:
            raise KvsimError(f"{kind}{text}s: seconds are for audio of a model whose rate is known; give token counts")
        return (max(1, int(np.ceil(numbers[0] * encoding.tokens_per_second))),)
    if any(n != int(n) for n in numbers):
        raise KvsimError(f"{kind}{text}: sides are whole numbers")
    sides = tuple(int(n) for n in numbers)
    if not unit:
        return sides
    if kind not in ("image", "video") or not (encoding.pixels or encoding.grid):
        raise KvsimError(f"{kind}{text}px: pixels are for images of a model whose patches are known; give patch counts")
    height, width = (encoding.grid or max(1, n // encoding.pixels) for n in sides[-2:])
    return (*(-(-n // encoding.frames) for n in sides[:-2]), height, width)


@lru_cache(maxsize=256)
def parse_segments(text: str, architecture: str = "") -> tuple[Segment, ...]:
    """Read `text35-image24x24-video8x16x16-audio375`; with an architecture also `image448x448px` and `audio30s`.

    A last `text` without a number is whatever follows. Raises KvsimError: an unknown kind (naming the nearest), a wrong
    number of sides, a side below 1, more than MAX_TOKENS tokens in all.
    """
    encoding, found = ENCODINGS.get(architecture, Encoding()), []
    pieces = word(text, "segments").split("-")
    for place, piece in enumerate(pieces):
        if piece == "text" and place == len(pieces) - 1:
            break
        match = _ONE.fullmatch(piece)
        if match is None:
            raise KvsimError(f"segments: {shown(piece)} is no segment; write text35-image24x24-video8x16x16-audio375")
        kind, sides, unit = match.groups()
        if kind not in KINDS:
            raise KvsimError(f"segments: unknown kind {shown(kind)}{did_you_mean(kind, KINDS)}; one of "
                             f"{', '.join(KINDS)}")
        if len(sides.split("x")) != KINDS[kind] or not all(re.fullmatch(r"\d+(\.\d+)?", n) for n in sides.split("x")):
            raise KvsimError(f"segments: {shown(piece)}: {kind} has {KINDS[kind]} side(s), joined by x")
        found.append(Segment(kind, _sides(sides, kind, unit, encoding)))
        if min(found[-1].shape) < 1 or sum(s.tokens for s in found) > MAX_TOKENS:
            raise KvsimError(f"segments: {shown(piece)}: sides are 1 or more and all tokens together {MAX_TOKENS}")
    return tuple(found)


@dataclass(frozen=True)
class Cells:
    """Cells of a prompt of segments. owner: the cell of each of the segments' tokens; first: each cell's first token.

    Cells are in the order of their first tokens; tokens behind the segments are text, a cell each.
    """

    owner: NDArray[np.int64]
    first: NDArray[np.int64]

    def kept(self, tokens: Any) -> Any:
        """Cells that the first `tokens` tokens fill, at least in part; a number or an array of them."""
        behind = np.maximum(tokens - len(self.owner), 0)
        found = np.searchsorted(self.first, np.minimum(tokens, len(self.owner)), side="left") + behind
        return found.astype(np.int64) if isinstance(tokens, np.ndarray) else int(found)

    def owners(self, tokens: int) -> NDArray[np.int64]:
        """The cell of each of the first `tokens` tokens."""
        more = np.arange(max(0, tokens - len(self.owner))) + len(self.first)
        return np.concatenate([self.owner[:tokens], more])

    @property
    def merges(self) -> bool:
        """Whether any cell has more than one token."""
        return len(self.first) < len(self.owner)


@lru_cache(maxsize=256)
def cells(text: str, space: int, time: int, audio: int) -> Cells:
    """The cells into which the segments `text` are pooled; KvsimError as from `parse_segments`."""
    owners, count = [np.zeros(0, np.int64)], 0
    for segment in parse_segments(text):
        owners.append(segment.cells(space, time, audio) + count)
        count = int(owners[-1].max()) + 1
    return Cells(owner := np.concatenate(owners), np.unique(owner, return_index=True)[1])


@dataclass(frozen=True)
class Multimodal:
    """A workload whose prompts are typed segments.

    Raises KvsimError as `parse_segments`. Example: Multimodal.of(model, "text40-video16x448x448px-text20").
    """

    segments: tuple[Segment, ...]
    batch: int = 1
    new_tokens: int = 0

    @classmethod
    def of(cls, model: ModelSpec, text: str, batch: int = 1, new_tokens: int = 0) -> Multimodal:
        """Segments in tokens, pixels or seconds, as the model encodes them."""
        found = parse_segments(text, model.architecture)
        if not found:
            raise KvsimError("segments: nothing to cache; write for example text40-image24x24")
        return cls(found, batch, new_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of a prompt."""
        return min(sum(s.tokens for s in self.segments), MAX_COUNT)

    @property
    def written(self) -> str:
        """The segments in tokens, as methods take them."""
        return "-".join(map(str, self.segments))

    @property
    def workload(self) -> Workload:
        """The same as plain counts."""
        return Workload(self.batch, self.tokens, self.new_tokens)

    def method(self, space: int = 2, time: int = 2, audio: int = 2) -> str:
        """The token policy that pools these segments."""
        return f"modal(segments={self.written},space={space},time={time},audio={audio})"
