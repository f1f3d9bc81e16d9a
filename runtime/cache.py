"""CompressedCache: a transformers cache whose layers hold what a method says, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvsim.configs import load_model
from kvsim.errors import KvsimError
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from kvsim.record import HeldBuffer
from runtime.hook import NAME, OURS, register
from runtime.layers import CompressedLayer
from runtime.rope import Rotation
from runtime.store import Geometry, Surroundings


class CompressedCache(Cache):
    """A cache for one model and one batch; pass it as `past_key_values` to `generate` or to the model.

    Args:
        method: the written form or a Method. hf_model: a decoder-only Hugging Face model whose attention goes through
            transformers' attention interface. calibration: a calibration, or the file that holds one.
        prompt_tokens: length of the prompt where it comes in several forward calls: it is compressed once, when complete.
        seed: of random matrices.

    While the cache is open the model's attention is `kvsim`'s; `close()` or leaving `with` restores it. Raises
    KvsimError for architectures and settings that cannot run.
    """

    def __init__(self, method: str | Method, hf_model: nn.Module, *, calibration: Any = None,
                 prompt_tokens: int | None = None, seed: int = 0) -> None:
        self.method = parse_method(method)
        self.model = hf_model
        self.spec = spec_of(hf_model)
        self.calibration = _tensors(calibration, hf_model)
        modules = attention_modules(hf_model, self.spec)
        parameter = next(hf_model.parameters())
        layers = []
        for index, module in enumerate(modules):
            own = self.method.at(index, self.spec.n_layers)
            geometry = geometry_of(self.spec, index)
            rotation = Rotation(hf_model, module, _layer_type(hf_model, index)) if own.k.before_rope else None
            around = Surroundings(parameter.dtype, parameter.device, rotation, _of_layer(self.calibration, index), {}, seed)
            layers.append(CompressedLayer(own, geometry, around, prompt_tokens))
        super().__init__(layers=layers)
        register()
        self._before: str | None = hf_model.config._attn_implementation
        hf_model.set_attn_implementation(NAME)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers asks; notes that the mask that follows is this cache's."""
        OURS.set(True)
        return super().get_mask_sizes(query_length, layer_idx)

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._before is not None:
            self.model.set_attn_implementation(self._before)
            self._before = None

    def __enter__(self) -> CompressedCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def set_scores(self, scores: list[Tensor]) -> None:
        """Give token policies scores from a pass outside (gradients), [B, H, T] for each layer."""
        for layer, one in zip(self.layers, scores, strict=True):
            layer.scores = one

    # -- accounting ----------------------------------------------------------------------------------------------

    def buffers(self) -> tuple[HeldBuffer, ...]:
        """Every tensor held: name, layer, shape and live bytes, named as a predicted record names them."""
        return tuple(HeldBuffer(name, index, shape, 0, live) for index, layer in enumerate(self.layers)
                     for name, shape, live, _ in layer.held())

    def nbytes(self) -> int:
        """Bytes of live rows and fixed buffers: equals the predicted `cache_bytes`."""
        return sum(live for layer in self.layers for _, _, live, _ in layer.held())

    def allocated_nbytes(self) -> int:
        """Bytes of the storages behind them: equals the predicted `allocated_bytes`."""
        return sum(held for layer in self.layers for _, _, _, held in layer.held())

    def rows(self) -> list[list[int] | None]:
        """Rows held by each layer, one number for each sequence and KV head: what `predict(case, rows=...)` takes."""
        return [layer.rows() for layer in self.layers]


def spec_of(hf_model: nn.Module) -> ModelSpec:
    """The model's numbers from its own config; refuses what the runtime cannot hold, naming it."""
    spec = load_model(json.loads(hf_model.config.to_json_string(use_diff=False)))
    if getattr(hf_model.config, "is_encoder_decoder", False):
        raise KvsimError(f"{spec.architecture} is an encoder-decoder: the runtime holds decoder-only models")
    for index, layer in enumerate(spec.layers):
        kind = layer.kind
        if kind not in ("full", "sliding"):
            raise KvsimError(f"layer {index} of {spec.architecture} is {kind}: the runtime holds full and sliding attention")
    return spec


def attention_modules(hf_model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The attention module of each layer, by its `layer_idx`."""
    found: dict[int, nn.Module] = {}
    for module in hf_model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__:
            found.setdefault(index, module)
    if sorted(found) != list(range(spec.n_layers)):
        raise KvsimError(f"{type(hf_model).__name__}: found {len(found)} attention modules for {spec.n_layers} layers; "
                         f"this architecture is not supported")
    return [found[i] for i in range(spec.n_layers)]


def geometry_of(spec: ModelSpec, index: int) -> Geometry:
    """One layer's cache in numbers."""
    attention = spec.layers[index].attention
    assert attention is not None
    return Geometry(attention.n_heads, attention.n_kv_heads, attention.k_dim, attention.v_dim, attention.window, index, spec.n_layers)


def _layer_type(hf_model: nn.Module, index: int) -> str | None:
    types = getattr(hf_model.config, "layer_types", None)
    return types[index] if types else None


def _tensors(calibration: Any, hf_model: nn.Module) -> Mapping[str, Tensor]:
    if calibration is None:
        return {}
    if isinstance(calibration, str | Path):
        from runtime.calibration import load

        calibration = load(calibration, hf_model)
    tensors: Mapping[str, Tensor] = getattr(calibration, "tensors", calibration)
    return tensors


def _of_layer(calibration: Mapping[str, Tensor], index: int) -> Mapping[str, Tensor]:
    prefix = f"layer.{index}."
    return {k.removeprefix(prefix): v for k, v in calibration.items() if k.startswith(prefix)}


def inference() -> Any:
    """No gradients: what generation runs under."""
    return torch.inference_mode()
