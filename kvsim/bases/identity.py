"""The channels as the model writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsim.parts import Basis


@dataclass(frozen=True)
class Identity(Basis):
    """No change of basis."""

    name: ClassVar[str] = "identity"
    summary: ClassVar[str] = "the model's own channels"
    source: ClassVar[str] = "definition"
    survey: ClassVar[str] = "1.1"
