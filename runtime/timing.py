"""Time a piece of work: repeats, those that the system interrupted set apart, the spread said; knows no kernels.

Where torch works on one CPU thread, its processor time is taken: on an idle machine the same as time on the wall, and
on a busy one what an idle one would have shown, but for the caches and the memory that neighbours use up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

try:
    import resource
except ImportError:  # not a POSIX system: no count of interruptions, every repeat passes as clean
    resource = None  # type: ignore[assignment]

TRIMMED = 0.15
"""Share of the repeats at either end that a mean leaves out."""
ENOUGH = 3
"""Clean repeats that are preferred to many disturbed ones."""
QUIET_SPREAD, QUIET_SHARE = 1.25, 0.5
"""A machine is quiet where the upper over the lower quartile of repeats, and the share of clean ones, allow it."""


@dataclass(frozen=True)
class Timed:
    """Seconds of one piece of work: the median of repeats and their 5 and 95% quantiles.

    repeats: how many; clean: of those, how many ran without losing the processor. spread: upper over lower quartile of
    the repeats behind the median.
    """

    seconds: float
    low: float
    high: float
    repeats: int
    clean: int
    spread: float

    @property
    def quiet(self) -> bool:
        """Whether the figure can be relied on."""
        return self.spread <= QUIET_SPREAD and self.clean >= QUIET_SHARE * self.repeats


def switches() -> int:
    """How often the system took the processor away from this process so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def clock(device: torch.device) -> Callable[[], float]:
    """The clock that suits a device and torch's threads: seconds of the thread, or of the wall."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def clock_name(device: torch.device) -> str:
    """What `clock` counts, for a record."""
    return "processor time of one thread" if clock(device) is time.thread_time else "wall time"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(seconds: Sequence[float], interrupted: Sequence[int]) -> Timed:
    """The median of clean repeats; of all of them where too few are clean."""
    times, lost = np.asarray(seconds, float), np.asarray(interrupted)
    clean = times[lost == 0]
    used = clean if len(clean) >= min(ENOUGH, len(times)) else times
    low, quarter, middle, three, high = np.quantile(used, (0.05, 0.25, 0.5, 0.75, 0.95))
    return Timed(float(middle), float(low), float(high), len(times), len(clean), float(three / max(quarter, 1e-12)))


def steady(seconds: Sequence[float], interrupted: Sequence[int]) -> Timed:
    """As `summary`, but the mean without the extremes: steps of some methods take turns, and a median picks a side."""
    found = summary(seconds, interrupted)
    times, lost = np.asarray(seconds, float), np.asarray(interrupted)
    used = np.sort(times[lost == 0] if found.clean >= min(2 * ENOUGH, len(times)) else times)
    cut = max(1, round(TRIMMED * len(used))) if len(used) > 2 else 0
    return replace(found, seconds=float(np.mean(used[cut : len(used) - cut])))


class Bench:
    """Repeats work on one device with cold caches, as between two layers of a model.

    eviction: bytes read before each repeat, so that what it works on comes from memory; 0: repeats find a warm cache.
    """

    def __init__(self, device: torch.device, eviction: int, seconds: float = 0.15) -> None:
        self.device, self.budget = device, seconds
        # ones, not zeros: untouched zero pages all share one page of memory
        self.filler = torch.ones(max(eviction // 4, 1), dtype=torch.float32, device=device)

    def evict(self) -> None:
        """Read what nobody needs."""
        if self.filler.numel() > 1:
            self.filler.sum()

    def time(
        self, work: Callable[[], object], least: int = 5, most: int = 40, cold: bool = True, loops: int = 1
    ) -> Timed:
        """Seconds of one call; repeats until the budget is spent. loops: calls between two looks at the clock."""
        for _ in range(2):
            work()
        seconds: list[float] = []
        lost: list[int] = []
        now, end = clock(self.device), time.perf_counter() + self.budget
        while len(seconds) < least or (len(seconds) < most and time.perf_counter() < end):
            if cold:
                self.evict()
            synchronize(self.device)
            before, start = switches(), now()
            for _ in range(loops):
                work()
            synchronize(self.device)
            seconds.append((now() - start) / loops)
            lost.append(switches() - before)
        return summary(seconds, lost)


@contextmanager
def pinned_threads(count: int | None) -> Iterator[int]:
    """torch on `count` threads of as many processors (None: as it is); gives the count, and undoes it after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
