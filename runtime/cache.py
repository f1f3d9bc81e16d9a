"""CompressedCache: a transformers cache whose layers hold what a method says, and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvsim.configs import load_model
from kvsim.errors import KvsimError, shown
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from kvsim.parts import Part
from kvsim.ragged import LayerRows
from kvsim.record import HeldBuffer
from runtime.hook import NAME, HeldRows, close_on, open_on
from runtime.kernels import path
from runtime.layers import CompressedLayer
from runtime.learning import rotation_of
from runtime.sharing import Geometry, Surroundings

SEEDS = 2**40
"""Seeds are below it: layers and sides make others of them, which torch must be able to take."""


class CompressedCache(Cache):
    """A cache for one model and one batch; pass it as `cache` to `generate` or to the model.

    Args:
        method: the written form or a Method. hf_model: a decoder-only Hugging Face model whose attention goes through
            transformers' attention interface. calibration: a calibration, or the file that holds one; a part's own
            `calibration=FILE` comes before it.
        prompt_tokens: length of a prompt that comes in several forward calls: it is compressed once, when complete.
        seed: of random matrices.

    While the cache is open the model's attention is `kvsim`'s; `close()` or leaving `with` restores it (the last of
    several caches on a model does). Forwards without this cache compute what they always did. Raises KvsimError for
    architectures and settings that cannot run.
    """

    def __init__(
        self,
        method: str | Method,
        hf_model: nn.Module,
        *,
        calibration: Any = None,
        prompt_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_arguments(hf_model, prompt_tokens, seed)
        self.method = parse_method(method)
        self.model = hf_model
        self.spec = spec_of(hf_model)
        self.calibration = _tensors(calibration, hf_model, self.method)
        files = _files(self.method, hf_model, self.spec.n_layers)
        self.modules = attention_modules(hf_model, self.spec)
        layers = []
        for index, module in enumerate(self.modules):
            own = self.method.at(index, self.spec.n_layers)
            rotation = rotation_of(own, hf_model, module, _layer_type(hf_model, index))
            dtype, device = _place_of(module)
            known = _of_layer(self.calibration, index) | _named(own, files, index)
            around = Surroundings(dtype, device, rotation, known, seed)
            layers.append(CompressedLayer(own, geometry_of(self.spec, index), around, prompt_tokens))
        super().__init__(layers=layers)
        self._open = False
        open_on(hf_model)
        self._open = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As transformers calls it; refuses to go on from a forward that did not finish."""
        if not self._open or self.modules[layer_idx].config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise KvsimError("this cache is closed, or the model's attention was changed: make a new CompressedCache")
        layer, behind = self.layers[layer_idx], self.layers[layer_idx - 1]
        expected = self.layers[0].seen - (key_states.shape[2] if layer_idx else 0)
        if layer.pending is not None or behind.pending is not None or layer.seen != expected:
            raise KvsimError(
                "attention did not pass through kvsim (another model's forward, or an architecture without the "
                "attention interface), or the last forward stopped midway: reset() the cache"
            )
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers asks; the type of the length tells the mask function that the mask is this cache's."""
        if not query_length:
            raise KvsimError("a forward of no tokens: give the model one at least (a start token, for an empty prompt)")
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return HeldRows(length), offset

    def close(self) -> None:
        """Give the model its own attention back; the cache takes no more tokens. Closing twice is closing once."""
        if self._open:
            self._open = False
            close_on(self.model)

    def __enter__(self) -> CompressedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """The same rows in a cache of its own, on the same model: one prompt's rows for several continuations."""
        if not self._open:
            raise KvsimError("this cache is closed: copy it while it is open")
        found = type(self).__new__(type(self))
        found.__dict__ = dict(self.__dict__)
        found.layers = [layer.copied() for layer in self.layers]
        open_on(self.model)
        return found

    def __copy__(self) -> CompressedCache:
        return self.__deepcopy__({})

    def __del__(self) -> None:
        # while Python ends, modules may be gone already, `sys` among them
        if getattr(self, "_open", False) and sys is not None and not sys.is_finalizing():
            self.close()

    def set_scores(self, scores: list[Tensor]) -> None:
        """Give token policies scores from a pass outside (gradients), [B, H, T] for each layer."""
        if len(scores) != len(self.layers):
            raise KvsimError(f"set_scores takes a tensor for each of {len(self.layers)} layers, got {len(scores)}")
        for layer, one in zip(self.layers, scores, strict=True):
            layer.scores = one

    # -- accounting ----------------------------------------------------------------------------------------------

    def buffers(self) -> tuple[HeldBuffer, ...]:
        """Every tensor held: name, layer, shape and live bytes, named as a predicted record names them."""
        return tuple(
            HeldBuffer(name, index, shape, 0, live)
            for index, layer in enumerate(self.layers)
            for name, shape, live, _ in layer.held()
        )

    def nbytes(self) -> int:
        """Bytes of live rows and fixed buffers: equals the predicted `cache_bytes`."""
        return sum(live for layer in self.layers for _, _, live, _ in layer.held())

    def allocated_nbytes(self) -> int:
        """Bytes of the storages behind them: equals the predicted `allocated_bytes`."""
        return sum(held for layer in self.layers for _, _, _, held in layer.held())

    def rows(self) -> list[LayerRows | None]:
        """Rows held by each layer, one number for each sequence and KV head: what `predict(case, rows=...)` takes."""
        return [layer.rows() for layer in self.layers]

    def paths(self) -> list[str]:
        """Which way each layer's steps attend: "fused cpu int4 | int4" or "eager: why"; empty before the prompt."""
        return [" / ".join(sorted({path(piece.store) for piece in layer.pieces})) for layer in self.layers]


def spec_of(hf_model: nn.Module) -> ModelSpec:
    """The model's numbers from its own config; refuses what the runtime cannot hold, naming it."""
    spec = load_model(json.loads(hf_model.config.to_json_string(use_diff=False)))
    if getattr(hf_model.config, "is_encoder_decoder", False):
        raise KvsimError(f"{spec.architecture} is an encoder-decoder: the runtime holds decoder-only models")
    for index, layer in enumerate(spec.layers):
        kind = layer.kind
        if kind not in ("full", "sliding"):
            raise KvsimError(
                f"layer {index} of {spec.architecture} is {kind}: the runtime holds full and sliding attention"
            )
    return spec


def attention_modules(hf_model: nn.Module, spec: ModelSpec) -> list[nn.Module]:
    """The attention module of each layer, by its `layer_idx`."""
    found: dict[int, nn.Module] = {}
    for module in hf_model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__:
            found.setdefault(index, module)
    if sorted(found) != list(range(spec.n_layers)):
        raise KvsimError(
            f"{type(hf_model).__name__}: found {len(found)} attention modules for {spec.n_layers} layers; "
            f"this architecture is not supported"
        )
    return [found[i] for i in range(spec.n_layers)]


def geometry_of(spec: ModelSpec, index: int) -> Geometry:
    """One layer's cache in numbers."""
    attention = spec.layers[index].attention
    assert attention is not None
    return Geometry(
        attention.n_heads,
        attention.n_kv_heads,
        attention.k_dim,
        attention.v_dim,
        attention.window,
        index,
        spec.n_layers,
    )


def _layer_type(hf_model: nn.Module, index: int) -> str | None:
    types = getattr(hf_model.config, "layer_types", None)
    return types[index] if types else None


def _check_arguments(hf_model: Any, prompt_tokens: Any, seed: Any) -> None:
    if not isinstance(hf_model, nn.Module) or not hasattr(getattr(hf_model, "config", None), "to_json_string"):
        raise KvsimError(f"a compressed cache is for a Hugging Face model, got {type(hf_model).__name__}")
    if prompt_tokens is not None and (type(prompt_tokens) is not int or prompt_tokens < 0):
        raise KvsimError(f"prompt_tokens is a count of tokens or None, got {shown(prompt_tokens)}")
    if type(seed) is not int or abs(seed) >= SEEDS:
        raise KvsimError(f"seed is a whole number below {SEEDS}, got {shown(seed)}")


def _tensors(calibration: Any, hf_model: nn.Module, method: Method, file: str | None = None) -> Mapping[str, Tensor]:
    if calibration is None:
        return {}
    if isinstance(calibration, str | Path):
        from runtime.calibration import load

        calibration = load(calibration, hf_model)
    elif hasattr(calibration, "check"):
        calibration.check(hf_model)
    if hasattr(calibration, "check_method"):
        calibration.check_method(method, spec_of(hf_model).n_layers, file)
    tensors = getattr(calibration, "tensors", calibration)
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        kind = type(calibration).__name__
        raise KvsimError(f"calibration is a calibration, its tensors by name, or a file that holds one, got {kind}")
    return tensors


def _files(method: Method, hf_model: nn.Module, layers: int) -> dict[str, Mapping[str, Tensor]]:
    """Tensors of the files that the method's parts name themselves, `calibration=FILE`, by name."""
    parts = [p for index in range(layers) for side, p in _sided(method.at(index, layers))]
    names = {name for p in parts if (name := getattr(p, "calibration", None)) is not None}
    return {name: _tensors(name, hf_model, method, name) for name in names}


def _sided(method: Method) -> Iterator[tuple[str, Part]]:
    for side, chain in (("k", method.k), ("v", method.v)):
        yield from ((side, part) for part in (chain.basis, chain.format, *chain.corrections))


def _named(method: Method, files: Mapping[str, Mapping[str, Tensor]], index: int) -> dict[str, Tensor]:
    """What the files that a layer's parts name hold for it: each part's for its own side."""
    found: dict[str, Tensor] = {}
    for side, part in _sided(method):
        own = _of_layer(files.get(getattr(part, "calibration", None) or "", {}), index)
        found |= {k: t for k, t in own.items() if k.startswith(f"{side}.")}
    return found


def _of_layer(calibration: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"layer.{index}."
    return {k.removeprefix(prefix): v for k, v in calibration.items() if k.startswith(prefix)}


def _place_of(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Dtype and device that a layer's keys will have, as its parameters have them; the first rows correct it."""
    found = [p for p in module.parameters() if p.is_floating_point()]
    dtype = next((p.dtype for p in found if p.dtype in (torch.float32, torch.bfloat16, torch.float16)), torch.float32)
    return dtype, found[0].device if found else torch.device("cpu")
