"""When llama.cpp's memory rules changed: a build number or a date becomes a day, a day says which rules hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import pairwise

from kvsim.errors import KvsimError, shown

TAGS = (
    (1, date(2023, 3, 10)), (623, date(2023, 6, 5)), (1607, date(2023, 12, 7)), (2775, date(2024, 4, 30)),
    (3500, date(2024, 8, 1)), (4000, date(2024, 10, 31)), (5000, date(2025, 3, 31)), (5427, date(2025, 5, 20)),
    (6325, date(2025, 8, 30)), (6490, date(2025, 9, 16)), (7079, date(2025, 11, 16)), (7343, date(2025, 12, 10)),
    (8467, date(2026, 3, 21)), (9265, date(2026, 5, 22)), (11549, date(2026, 10, 15)),
)  # fmt: skip
"""Build tags and the days they were cut; days between are interpolated (unsure within days of a change)."""


@dataclass(frozen=True)
class Rules:
    """Which of llama.cpp's memory rules hold at a version.

    swa_cache: sliding layers have their own cache (PR 13194). swa_batch: its margin is n_batch, not yet n_ubatch
    (PR 13833). streams: one cache a slot unless unified (PR 14363). pad_always: n_ctx and sliding caches are padded to
    256 whatever flash attention is (PR 17046). auto_slots: llama-server starts 4 unified slots by itself (PR 16736).
    output_first: -ngl counts the output layer first (PR 18148). mla: latent caches exist (PR 12801). mla_v: they still
    hold a V copy of the latent (until PR 19067). swa_f16: sliding caches stay f16 (PR 21277, reverted by 21332).
    mixed_heads: flash attention works where K and V heads differ in width (PR 13306). auto_fa: flash attention is on
    by itself where it is supported (PR 15434).
    """

    swa_cache: bool
    swa_batch: bool
    streams: bool
    pad_always: bool
    auto_slots: bool
    output_first: bool
    mla: bool
    mla_v: bool
    swa_f16: bool
    mixed_heads: bool
    auto_fa: bool
    flash_exists: bool


def rules(version: str | None = None) -> Rules:
    """The rules at `version`: `b8467`, `7343`, `2025-07`, `2025-07-16`, a bare year (its last day), None for today."""
    day = when(version)
    return Rules(
        swa_cache=day >= date(2025, 5, 20),
        swa_batch=day < date(2025, 5, 31),
        streams=day >= date(2025, 7, 16),
        pad_always=day >= date(2025, 11, 7),
        auto_slots=day >= date(2025, 11, 2),
        output_first=day >= date(2025, 12, 27),
        mla=day >= date(2025, 4, 15),
        mla_v=date(2025, 4, 15) <= day < date(2026, 1, 25),
        swa_f16=day == date(2026, 4, 1),
        mixed_heads=day >= date(2025, 5, 9),
        auto_fa=day >= date(2025, 8, 30),
        flash_exists=day >= date(2024, 4, 30),
    )


def when(version: str | None) -> date:
    """The day of a version; KvsimError when it is neither a build nor a date."""
    if version is None:
        return date.max
    text = str(version).strip().lower()
    if text in ("latest", "master", "current"):
        return date.max
    found = re.fullmatch(r"(20\d\d)(?:[-.](\d{1,2}))?(?:[-.](\d{1,2}))?", text)
    if found:
        year, month, day = (int(x) if x else 0 for x in found.groups())
        try:
            date(year, month or 12, 1)
            start = date(year + (month or 12) // 12, (month or 12) % 12 + 1, 1)
            return date(year, month, day) if day else start - timedelta(days=1)
        except ValueError:
            raise KvsimError(f"version {shown(version)} is not a date") from None
    found = re.fullmatch(r"(?:build\s*)?b?(\d{1,6})", text)
    if not found:
        raise KvsimError(f"version {shown(version)} is neither a llama.cpp build (b8467) nor a date (2025-07)")
    return _cut(int(found.group(1)))


def _cut(build: int) -> date:
    """The day on which a build was cut, between the tags around it."""
    for (low, first), (high, last) in pairwise(TAGS):
        if build <= high:
            return first + (last - first) * max(0, build - low) / (high - low)
    return date.max
