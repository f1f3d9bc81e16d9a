"""Predict what a way of compressing the KV cache costs on a device, and say which fits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.configs import load_model as load_model
    from kvsim.errors import KvsimError as KvsimError
    from kvsim.hardware import HardwareProfile as HardwareProfile
    from kvsim.model import ModelSpec as ModelSpec
    from kvsim.workload import Workload as Workload

_HOMES = {
    "KvsimError": "errors",
    "ModelSpec": "model",
    "load_model": "configs",
    "HardwareProfile": "hardware",
    "load_device": "hardware",
    "Workload": "workload",
    "Method": "method",
    "parse_method": "method",
    "Case": "record",
    "Record": "record",
    "predict": "prediction",
    "fit": "plan",
    "sweep": "grid",
    "attention_seconds": "cost",
    "matmul_seconds": "cost",
    "memory": "engines",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, at first use, so that `import kvsim` stays cheap."""
    if name == "plot":  # a package of functions; it imports matplotlib only when it draws
        return import_module("kvsim.plot")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    return getattr(import_module(f"kvsim.{_HOMES[name]}"), name)
