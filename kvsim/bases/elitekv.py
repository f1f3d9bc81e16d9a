"""EliteKV: a few rotary frequencies of each head kept, all the rest in one latent that keys and values share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvsim.errors import KvsimError
from kvsim.latent import check_rank, row_bytes
from kvsim.parts import Basis, Buffer, Format, Latent, Place, Work, setting
from kvsim.workload import Count


@dataclass(frozen=True)
class EliteKv(Basis):
    """A row holds, for all heads together, 2 * frequencies rotated values a head and `rank` joint coefficients.

    The other dimensions of keys lose their rotation and are decomposed jointly with the values, so that neither needs
    one at the read. The row is stored with the keys; values store nothing of their own. Bases are calibrated and
    stay with the model. The authors train the model further after the change.
    """

    name: ClassVar[str] = "elitekv"
    summary: ClassVar[str] = "elite rotary frequencies and a joint K/V latent"
    source: ClassVar[str] = "Zhou et al., EliteKV, arXiv 2503.01586"
    survey: ClassVar[str] = "5.3.2"
    calibrated: ClassVar[bool] = True
    both_sides: ClassVar[bool] = True

    frequencies: int = setting(4, low=0, always=True, what="rotary frequencies kept a head, two values each")
    rank: int = setting(64, low=1, always=True, what="joint coefficients a row, keys and values of all heads together")
    calibration: str | None = setting(None, what="file with frequencies and bases; needed to run, not to predict")

    def check_format(self, part: Format) -> None:
        """What is stored with the keys is the values too."""
        if not part.reconstructs:
            raise KvsimError(f"elitekv keeps keys and values in one latent, and {part.name} cannot give values back")

    def plain(self, place: Place) -> int:
        """Values of a head that go into the latent: all but the elite ones of keys."""
        return place.width - (2 * self.frequencies if place.side == "k" else 0)

    @property
    def joins_heads(self) -> bool:
        """One row of coefficients stands for several heads."""
        return True

    def latent(self, place: Place) -> Latent:
        """One joint row beside the keys, nothing beside the values."""
        if self.plain(place) < 0:
            raise KvsimError(f"elitekv: {self.frequencies} frequencies exceed {place.width // 2} at {place.where}")
        check_rank("elitekv", self.rank, place.heads * place.width, place, "heads x width")
        return Latent(1, place.heads * 2 * self.frequencies + self.rank if place.side == "k" else 0)

    def buffers(self, rows: Count, blocks: Count, place: Place) -> tuple[Buffer, ...]:
        """This side's part of the joint basis, and which frequencies each head keeps."""
        width = place.heads * self.plain(place)
        basis = Buffer("basis", 1, self.rank, width, place.value_bits, rows_per_unit=0, per_model=True)
        if place.side == "v":
            return (basis,)
        index = 8 if place.width <= 512 else 16
        return (basis, Buffer("elite", place.heads, 1, self.frequencies, index, rows_per_unit=0, per_model=True))

    def fit_work(self, rows: Count, place: Place) -> Work:
        """Nothing is fitted: all rows are read, keys turned back (3 flops a value), and projected."""
        return Work(read_bytes=rows * row_bytes(place), products=1.0 * rows * self._row_flops(place))

    def write_work(self, place: Place) -> Work:
        """One product with this side's basis, which is read."""
        held = self.rank * place.heads * self.plain(place) * place.value_bits / 8.0
        return Work(read_bytes=held, products=self._row_flops(place))

    def _row_flops(self, place: Place) -> float:
        turned = 3.0 * place.heads * place.width if place.side == "k" else 0.0
        return turned + 2.0 * place.heads * self.plain(place) * self.rank

    def attend_flops(self, rows: Count, place: Place) -> Any:
        """Each query head enters (or its output leaves) the latent once and multiplies the joint coefficients."""
        kept = place.width - self.plain(place)
        once = 2.0 * self.plain(place) * self.rank
        return place.n_heads * (once + 2.0 * rows * (kept + self.rank - place.width))
