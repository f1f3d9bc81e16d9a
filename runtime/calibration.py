"""Calibration of a method on a model: run texts, let each part learn, keep it in a file that fits no other model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvsim
from kvsim.errors import KvsimError, shown
from kvsim.method import Method, parse_method
from runtime.cache import attention_modules, geometry_of, spec_of
from runtime.learning import Layer, learn, output_weight, rotation_of, wants_slopes
from runtime.parts import Tensors
from runtime.recording import record

FORMAT = "kvsim-calibration-1"
SKETCHED = 32
"""Weight matrices whose size goes into a model's sketch."""
NEAR = 0.02
"""How far sketches may differ: the same weights in another precision differ by less, other weights by more."""


@dataclass(frozen=True)
class Calibration:
    """What was learned, and from what.

    tensors: `layer.{i}.{k|v|tokens}.{name}`. metadata: format, method, model, sketch, text, tokens, seed, versions.
    """

    tensors: Tensors
    metadata: dict[str, str]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        from safetensors.torch import save_file

        if not Path(path).parent.is_dir():
            raise KvsimError(f"cannot save a calibration to {shown(str(path))}: no such folder")
        save_file({k: t.contiguous() for k, t in self.tensors.items()}, str(path), metadata=self.metadata)

    def check(self, model: nn.Module, name: str = "the calibration") -> None:
        """Raise KvsimError where it was made for another model than this."""
        shape, sketch = fingerprint(model)
        if self.metadata.get("model") != shape:
            made_for = self.metadata.get("architecture", "?")
            raise KvsimError(f"{name} was made for a {made_for} of other weight matrices than this "
                             f"{type(model).__name__}'s; calibrate this model")
        pairs = list(zip(self._sketch(name), sketch, strict=False))
        if len(pairs) != len(sketch) or not all(abs(a - b) <= NEAR * max(abs(a), abs(b)) for a, b in pairs):
            raise KvsimError(f"{name} was made for other weights of {type(model).__name__}; calibrate this model")

    def _sketch(self, name: str) -> list[float]:
        try:
            return [float(x) for x in json.loads(self.metadata.get("sketch", "[]"))]
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise KvsimError(f"{name} is damaged: it does not say of which weights it is; calibrate anew") from None

    def check_method(self, method: Method, n_layers: int, file: str | None = None) -> None:
        """Raise KvsimError where factors were trained, not calibrated, and for other ranks: they cannot be cut.

        file: the file that the bases in question name; None: those that name none.
        """
        if "trained" not in self.metadata:
            return
        own = parse_method(self.metadata.get("method", ""))
        for index in range(n_layers):
            asked, made = method.at(index, n_layers), own.at(index, n_layers)
            for a, b in ((asked.k.basis, made.k.basis), (asked.v.basis, made.v.basis)):
                here = getattr(a, "calibrated", False) and getattr(a, "calibration", None) == file
                if here and a.with_settings(calibration=None) != b:
                    raise KvsimError(f"the calibration was trained with {b} at layer {index}, and this method has {a} "
                                     f"there: use the method that its metadata names")


def calibrate(model: PreTrainedModel, texts: Sequence[str | Sequence[int] | Tensor], method: str | Method, *,
              tokenizer: Any = None, length: int = 512, rows: int = 4096, seed: int = 0) -> Calibration:
    """Learn what `method` needs of `model` from texts, or from token ids, cut into pieces of `length` tokens.

    Args:
        model: a decoder-only Hugging Face model that `CompressedCache` takes.
        texts: strings (with a tokenizer) or sequences of token ids, longer than one token.
        method: the written form; its calibrated bases, codebooks, scales, sensitivities and estimators are learned.
        rows: rows a layer that are learned from, drawn evenly from all pieces.

    Raises KvsimError where the texts are too short or the architecture cannot be calibrated for this method.
    """
    method = parse_method(method)
    spec, pieces = spec_of(model), _pieces(texts, tokenizer, length)
    _check_ids(model, pieces)
    if rows < 1:
        raise KvsimError(f"calibrate learns from one row a layer at least, got rows={rows}")
    samples = record(model, pieces, max(1, rows // len(pieces)), wants_slopes(method), seed)
    tensors: Tensors = {}
    for index, module in enumerate(attention_modules(model, spec)):
        own, geometry = method.at(index, spec.n_layers), geometry_of(spec, index)
        types = getattr(model.config, "layer_types", None)
        rotation = rotation_of(own, model, module, types[index] if types else None)
        output = output_weight(module, geometry.n_heads * geometry.v_dim)
        layer = Layer(geometry.place("k", 32), geometry.place("v", 32), samples[index], rotation, output, seed)
        tensors |= {f"layer.{index}.{name}": t.cpu() for name, t in learn(own, layer).items()}
    if not tensors:
        raise KvsimError(f"{method} has no part that calibration would change")
    shape, sketch = fingerprint(model)
    ids = hashlib.sha256(b"".join(p.to(torch.int64).numpy().tobytes() for p in pieces)).hexdigest()
    metadata = {
        "format": FORMAT, "method": str(method), "model": shape, "architecture": type(model).__name__,
        "sketch": json.dumps(sketch), "text": ids, "tokens": str(sum(len(p) for p in pieces)), "rows": str(rows),
        "length": str(length), "seed": str(seed), "kvsim": kvsim.__version__, "torch": torch.__version__,
    }
    return Calibration(tensors, metadata)


def load(path: str | Path, model: nn.Module | None = None) -> Calibration:
    """Read a calibration; with a model, refuse one that was made for another. Nothing is unpickled.

    Raises KvsimError where the file is missing, no calibration, or another model's.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise KvsimError(f"calibration={shown(str(path))}: no such file; runtime.calibration.calibrate makes one")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise KvsimError(f"calibration={shown(str(path))} is not a safetensors file: {error}") from None
    if metadata.get("format") != FORMAT:
        raise KvsimError(f"calibration={shown(str(path))} says format {shown(metadata.get('format'))}, not {FORMAT}")
    found = Calibration(tensors, metadata)
    if model is not None:
        found.check(model, f"calibration={shown(str(path))}")
    return found


def fingerprint(model: nn.Module) -> tuple[str, list[float]]:
    """A hash of the names and shapes of all weights, and mean sizes of some, the same to 2% in every precision."""
    weights = sorted(model.named_parameters())
    shapes = hashlib.sha256(repr([(n, tuple(p.shape)) for n, p in weights]).encode()).hexdigest()
    matrices = [p for _, p in weights if p.dim() == 2]
    chosen = matrices[:: max(1, -(-len(matrices) // SKETCHED))]
    return shapes, [float(p.detach().flatten()[:4096].float().abs().mean()) for p in chosen]


def _check_ids(model: PreTrainedModel, pieces: list[Tensor]) -> None:
    known = model.get_input_embeddings().num_embeddings
    low, high = min(int(p.min()) for p in pieces), max(int(p.max()) for p in pieces)
    if low < 0 or high >= known:
        raise KvsimError(f"token ids reach from {low} to {high}, and {type(model).__name__} knows 0 to {known - 1}; "
                         f"is the tokenizer another model's?")


def _pieces(texts: Sequence[str | Sequence[int] | Tensor], tokenizer: Any, length: int) -> list[Tensor]:
    """Token ids [T], 2 <= T <= length."""
    if isinstance(texts, str):
        texts = [texts]
    if length < 2:
        raise KvsimError(f"calibrate cuts texts into pieces of 2 tokens or more, got length={length}")
    if not isinstance(texts, Iterable):
        raise KvsimError(f"calibrate takes a list of texts, or of lists of token ids, got {shown(texts)}")
    pieces = []
    for text in texts:
        if isinstance(text, str) and tokenizer is None:
            raise KvsimError("calibrate needs a tokenizer for texts; give one, or give token ids")
        try:
            ids = torch.as_tensor(tokenizer(text)["input_ids"] if isinstance(text, str) else text, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise KvsimError(f"calibrate takes a list of texts, or of lists of token ids; {shown(text)} is neither"
                             ) from None
        pieces += [p for p in ids.reshape(-1).split(length) if len(p) > 1]
    if not pieces:
        raise KvsimError("calibrate got no text of two tokens or more")
    return pieces
