"""What changed between vLLM releases in how KV memory is laid out, budgeted and printed; a release is a parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsim.errors import KvsimError, shown

DEFAULT = "0.25"
"""Newest release whose prints were checked against logs; from 0.26 on, windows hold two batches (`Release.batches`)."""

DATES = (
    ("2023-06", (0, 1)), ("2023-09", (0, 2)), ("2024-01", (0, 3)), ("2024-04", (0, 4)), ("2024-06", (0, 5)),
    ("2024-09", (0, 6)), ("2025-01", (0, 7)), ("2025-03", (0, 8)), ("2025-05", (0, 9)), ("2025-07", (0, 10)),
    ("2025-10", (0, 11)), ("2025-12", (0, 13)), ("2026-01", (0, 15)), ("2026-02", (0, 16)), ("2026-03", (0, 18)),
    ("2026-04", (0, 19)), ("2026-05", (0, 21)), ("2026-06", (0, 23)), ("2026-07", (0, 25)), ("2026-08", (0, 27)),
    ("2026-09", (0, 29)),
)  # fmt: skip
"""First month of a release line: a log that only states its date is read by the newest line of that month."""


@dataclass(frozen=True)
class Release:
    """One release: `number` as (major, minor, patch); `v0`: the first engine, before the block manager of 2025."""

    number: tuple[int, int, int]
    v0: bool

    @property
    def text(self) -> str:
        """The release as users write it."""
        return ".".join(map(str, self.number)) + (" (V0)" if self.v0 else "")

    @property
    def hybrid(self) -> bool:
        """Sliding layers have groups and windows of their own (before: every layer holds the whole sequence)."""
        return not self.v0 and self.number >= (0, 10)

    @property
    def chunked_hybrid(self) -> bool:
        """Chunked layers hold only their chunk (VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE became on)."""
        return not self.v0 and self.number >= (0, 13)

    @property
    def group_slack(self) -> float:
        """Below this ratio of layer counts the larger count is the group size; 1.0: always the smaller."""
        return 1.5 if self.number >= (0, 19) else 1.25 if self.number >= (0, 11) else 1.0

    @property
    def pads_pages(self) -> bool:
        """Pages that do not divide each other are padded to the largest (before: refused)."""
        return self.number >= (0, 20)

    @property
    def prints_concurrency_tokens(self) -> bool:
        """"GPU KV cache size" is int(concurrency * max_model_len) instead of blocks // groups * block (#43308)."""
        return self.number >= (0, 21)

    def batches(self, pipeline: int) -> int:
        """Batches in flight that a window must hold beside itself: from 0.26 two with async scheduling (#47728)."""
        if self.number < (0, 26):
            return 1
        return max(2, pipeline)

    @property
    def utilization(self) -> float:
        """Default of gpu_memory_utilization."""
        return 0.92 if self.number >= (0, 21) else 0.9

    @property
    def counts_graphs(self) -> bool:
        """CUDA graphs are inside the budget (before: captured afterwards, from what utilization leaves)."""
        return self.number >= (0, 21)


def release(version: str | None) -> Release:
    """Read "0.11.2", "v0.6.x V0", "2025-09", "V1 2025-07", "2026" (mid-year); None is `DEFAULT`.

    Raises KvsimError for a text without a version or month.
    """
    text = DEFAULT if version is None else str(version)
    engine = re.search(r"\bV([01])\b(?!\.\w)", text, re.IGNORECASE)
    date = re.search(r"\b(20\d\d)(?:-(\d\d))?\b", text)
    number = re.search(r"(?<![\d.])v?(\d+)\.(\d+|x)(?:\.(\d+))?", text, re.IGNORECASE)
    if date and not (number and number.group(1) in ("0", "1")):
        found = _by_date(f"{date.group(1)}-{date.group(2) or '05'}")
    elif number:
        parts = [0 if p in (None, "x") else int(p) for p in number.groups()]
        found = (parts[0], parts[1], parts[2])
    else:
        raise KvsimError(f"vLLM version {shown(version)} is unknown: write it like 0.11.2 or as a month, 2025-09")
    v0 = engine.group(1) == "0" if engine else found < (0, 8)
    if v0 and found >= (0, 11):
        raise KvsimError(f"vLLM {shown(version)} has no V0 engine: it was removed in 0.11")
    return Release(found, v0)


def _by_date(month: str) -> tuple[int, int, int]:
    lines = [line for first, line in DATES if first <= month]
    if not lines:
        raise KvsimError(f"vLLM had no release by {month}: write the version like 0.5.2")
    return (*lines[-1], 0)
