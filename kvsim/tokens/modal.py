"""Tokens of pictures, films and sound pooled over their own neighbourhoods: patches, frames, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.budgets import prompt_rows
from kvsim.modality import Cells, cells
from kvsim.parts import Buffer, Place, Rows, TokenPolicy, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class Modal(TokenPolicy):
    """Merge the prompt's tokens that lie in one cell of their segment into their mean; text stays as it is.

    A cell is space x space patches of an image, time frames x space x space patches of a video, or `audio` frames of
    sound; those at the far edges are smaller. A prompt that ends inside a segment fills its cells in part. The merged
    row stands where the cell's first token stood, the log of the number of tokens in it is added to its logit. rope=pre
    averages keys before their rotation and turns the mean to the middle of its tokens; post averages them as they are.
    Rows: cells with a token among the first T, exactly; segments are part of the method, since bytes follow from them.
    """

    name: ClassVar[str] = "modal"
    summary: ClassVar[str] = "pools patches, frames and sound over their own grid"
    source: ClassVar[str] = "survey 7.5; Bolya et al., Token Merging, arXiv 2210.09461 (log-size term)"
    survey: ClassVar[str] = "7.5"
    drops: ClassVar[Literal["none", "prefill", "rows", "pages"]] = "prefill"
    per_head: ClassVar[bool] = False
    merges: ClassVar[bool] = True

    segments: str = setting("text", always=True, what="the prompt, such as text35-image24x24-text")
    space: int = setting(2, low=1, high=4096, what="patches pooled along each side of the grid")
    time: int = setting(2, low=1, high=4096, what="video frames pooled at one place")
    audio: int = setting(2, low=1, high=4096, what="audio frames pooled")
    rope: str = setting("post", choices=("post", "pre"), what="keys are averaged after or before the rotation")

    def check(self) -> None:
        """The segments must be readable."""
        _ = self.cells

    @property
    def cells(self) -> Cells:
        """What is merged into what."""
        return cells(self.segments, self.space, self.time, self.audio)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """Cells of the prompt and every later row."""
        return prompt_rows(self.cells.kept(prompt), new)

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """A log-count (fp32) a row, the same for all heads; none where nothing can merge."""
        return (Buffer("log_count", 1, rows.stored, 1, 32),) if self.cells.merges else ()

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Keys and values of all rows read and added up, the means written; rope=pre turns keys back and forth."""
        if not self.cells.merges:
            return Work()
        kept, size = self.cells.kept(prompt), place.value_bits / 8
        one = 1.0 * place.heads * place.width
        turned = 3.0 * one * (prompt + kept) if self.rope == "pre" else 0.0
        return Work(2 * one * (prompt + kept) + turned, 2 * one * prompt * size, 2 * one * kept * size)
