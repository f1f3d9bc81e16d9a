"""Which builder reads which `model_type`: each family file lists its own in FAMILIES; a new file is found by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from kvsim.architectures.fields import Fields
from kvsim.model import ModelSpec

Builder = Callable[[Fields], ModelSpec]
_FRAME = {"fields", "mixers", "vision", "parts", "decoder", "windows", "registry"}


@cache
def families() -> dict[str, Builder]:
    """All known model types, gathered from the modules of this package."""
    import kvsim.architectures as package

    found: dict[str, Builder] = {}
    for module in iter_modules(package.__path__):
        if module.name not in _FRAME:
            more: dict[str, Builder] = getattr(import_module(f"kvsim.architectures.{module.name}"), "FAMILIES", {})
            clash = found.keys() & more.keys()
            if clash:
                raise RuntimeError(f"model types {sorted(clash)} are claimed twice, again in {module.name}")
            found.update(more)
    return found
