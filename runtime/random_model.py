"""A model of a known architecture with random weights: as fast as the real one, and it says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvsim.catalogue import find
from kvsim.errors import KvsimError, shown


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a shipped model, a file or a folder; KvsimError where there is none."""
    path = Path(model).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise KvsimError(f"{shown(str(file))} cannot be read as a config.json: {error}") from None
        return found
    entry = find(model)
    assert entry is not None
    return entry.config()


def random_model(config: dict[str, Any], dtype: str = "float32", layers: int | None = None, seed: int = 0) -> nn.Module:
    """The architecture that `config` describes with random weights, in eval mode; layers: only so many of them.

    Raises KvsimError where transformers does not know the architecture.
    """
    settings = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype", "dtype", "architectures")}
    if layers is not None:
        settings["num_hidden_layers"] = layers
        if isinstance(settings.get("layer_types"), list):
            settings["layer_types"] = settings["layer_types"][:layers]
    try:
        made = AutoConfig.for_model(config.get("model_type", ""), **settings)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
    except (ValueError, KeyError) as error:
        raise KvsimError(f"transformers cannot build this model: {str(error).splitlines()[0]}") from None
    return model.eval()
