"""Rows whose keys fall on the same side of random planes become one."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, log1p, sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from kvsim.budgets import larger, prompt_rows, running_rows, smaller
from kvsim.parts import Buffer, Place, Rows, TokenPolicy, Work, setting
from kvsim.scores import SCORES
from kvsim.workload import Count

ANGLES = (60.0, 75.0, 90.0)
"""Assumed angle, in degrees, between two mean-centred keys of a head: low, expected, high."""


@dataclass(frozen=True)
class LshMerge(TokenPolicy):
    """Merge rows, per KV head, whose mean-centred keys have the same signs on `planes` random planes.

    A merged row is the mean of its keys and of its values, plain or weighted by the attention of the prompt's last
    `window` queries; the log of the number of rows in it is added to its logit (proportional attention). Each further
    table hashes what the tables before it left. Sinks and the newest rows are left alone.
    when=prompt merges the prompt once; running also hashes each row that leaves the newest ones and merges it into the
    first table's row of equal hash, or keeps it.

    Counts depend on the data. Two rows at angle t agree on one plane with 1 - t / pi (Charikar 2002). If every plane
    splits the rows into shares s and 1 - s with s^2 + (1 - s)^2 = 1 - t / pi, independently of the others, then
    n rows fill sum_j C(planes, j) (1 - (1 - s^(planes - j) (1 - s)^j)^n) of 2^planes buckets: at 90 degrees the
    expectation for equally likely buckets, the most that any keys reach. Expected from 75 degrees, range from 60 to 90.
    """

    name: ClassVar[str] = "lsh_merge"
    summary: ClassVar[str] = "merges tokens whose keys hash alike"
    source: ClassVar[str] = "survey 4.3; Charikar, STOC 2002; log-size term of Bolya et al., ToMe, arXiv 2210.09461"
    survey: ClassVar[str] = "4.3"
    merges: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    planes: int = setting(12, low=1, high=48, always=True, what="random planes, the bits of a hash")
    tables: int = setting(1, low=1, high=64, what="hash tables, used one after the other")
    merge: str = setting("mean", choices=("mean", "weighted"), what="plain mean, or weighted by attention")
    recent: int = setting(32, low=0, what="newest rows left alone")
    sinks: int = setting(4, low=0, what="first rows left alone")
    window: int = setting(32, low=1, high=4096, what="queries whose attention weighs rows with merge=weighted")
    when: str = setting("prompt", choices=("prompt", "running"), what="once after the prompt, or at every step")

    @property
    def drops(self) -> Literal["none", "prefill", "rows", "pages"]:  # type: ignore[override]
        """Rows of the prompt, or rows at every step."""
        return "rows" if self.when == "running" else "prefill"

    @property
    def spared(self) -> int:
        """The rows left alone."""
        return self.recent

    def buckets(self, n: Any, degrees: float) -> Any:
        """Expected rows left of n after all tables, a whole number in [min(n, 1), n]."""
        share = (1.0 + sqrt(max(0.0, 1.0 - 2.0 * degrees / 180.0))) / 2.0
        agree = [share ** (self.planes - j) * (1.0 - share) ** j for j in range(self.planes + 1)]
        left: Any = 1.0 * n
        for _ in range(self.tables):
            left = sum(comb(self.planes, j) * -np.expm1(left * log1p(-p)) for j, p in enumerate(agree))
        whole = np.rint(left).astype(np.int64) if isinstance(n, np.ndarray) else int(np.rint(left))
        return smaller(n, larger(whole, smaller(n, 1)))

    def kept(self, n: Any, degrees: float) -> Any:
        """Expected rows held after n tokens: protected ones and buckets."""
        free = larger(0, n - self.recent - self.sinks)
        return n - free + self.buckets(free, degrees)

    def rows(self, prompt: Count, new: Count, place: Place) -> Rows:
        """The expected counts, with the range that the assumed angles span for `stored`."""
        low, found, high = (self._rows(prompt, new, degrees) for degrees in ANGLES)
        text = (f"rows left are estimated from an angle of {ANGLES[1]:g} degrees between mean-centred keys "
                f"({ANGLES[0]:g} to {ANGLES[2]:g}); measured rows replace the estimate")
        return Rows(found.prompt, found.stored, found.attended, text, low.stored, high.stored)

    def _rows(self, prompt: Count, new: Count, degrees: float) -> Rows:
        if self.when == "running":
            return running_rows(lambda n: self.kept(n, degrees), prompt, new)
        return prompt_rows(self.kept(prompt, degrees), new)

    def buffers(self, rows: Rows, seen: Count, place: Place) -> tuple[Buffer, ...]:
        """A log-count (fp32) a row; the planes, stored and shared by heads; hashes and the mean key while running."""
        found = [Buffer("log_count", place.heads, rows.stored, 1, 32),
                 Buffer("planes", 1, self.planes * self.tables, place.width, place.value_bits, 0, per_model=True)]
        if self.when == "running":
            found += [Buffer("hashes", place.heads, rows.stored, self.planes * self.tables, 1),
                      Buffer("mean_key", place.heads, 1, place.width, 32, 0)]
        return tuple(found)

    def prompt_work(self, prompt: Count, place: Place) -> Work:
        """Centre (2 d a row), hash (2 d planes a row and table), sort hashes (a pass a byte), add keys and values."""
        n, d, size = 1.0 * prompt, place.width, place.value_bits / 8
        values = place.heads * n * d
        passes = -(-self.planes // 8)
        hashing = Work(2 * values, 2 * values * size, 0.0, 2 * values * self.planes * self.tables)
        sorting = Work(passes * self.tables * place.heads * n, 16.0 * passes * self.tables * place.heads * n,
                       16.0 * passes * self.tables * place.heads * n)
        total = hashing + sorting + Work(2 * values, 2 * values * size, 0.0)
        return total + SCORES["window"].prompt_work(prompt, place, self.window) if self.merge == "weighted" else total

    def step_work(self, rows: Rows, place: Place) -> Work:
        """Running: hash one row, compare with the stored hashes, add it to one row (keys and values)."""
        if self.when != "running":
            return Work()
        d, size, bits = place.width, place.value_bits / 8, self.planes * self.tables
        one = 1.0 * place.heads * d
        compare = 1.0 * place.heads * rows.attended
        return Work(one * (2 + 2 * bits + 4) + compare * self.tables, one * 2 * size + compare * -(-bits // 8),
                    one * 2 * size)
