"""Full precision: rows as the model writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Format


@dataclass(frozen=True)
class Full(Format):
    """The identity: every value in the cache's own dtype."""

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "no compression"
    source: ClassVar[str] = "definition"
    survey: ClassVar[str] = "1.1"
