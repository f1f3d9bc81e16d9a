"""The methods of kvsim, really running in torch with packed storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.cache import CompressedCache as CompressedCache

_HOMES = {"CompressedCache": "runtime.cache"}
__all__ = ["CompressedCache"]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
