"""Keep every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import TokenPolicy


@dataclass(frozen=True)
class Keep(TokenPolicy):
    """The identity: all tokens are stored and attended."""

    name: ClassVar[str] = "keep"
    summary: ClassVar[str] = "all tokens"
    source: ClassVar[str] = "definition"
    survey: ClassVar[str] = "1.1"
    per_head: ClassVar[bool] = False
