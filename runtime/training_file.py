"""What training writes: a calibration that `calibration=FILE` takes, and the checkpoint from which it goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvsim
from kvsim.errors import KvsimError, shown
from kvsim.method import parse_method
from runtime.calibration import FORMAT, Calibration, fingerprint
from runtime.parts import Tensors
from runtime.training import Recipe, Training
from runtime.training_gates import Key
from runtime.training_student import Rows

CHECKPOINT = "kvsim-training-1"


def name_of(key: Key) -> str:
    """As calibrations name a layer and side."""
    return f"layer.{key[0]}.{key[1]}"


def text_hash(training: Training) -> str:
    """A hash of the tokens that are learned from."""
    return hashlib.sha256(b"".join(p.to(torch.int64).numpy().tobytes() for p in training.pieces)).hexdigest()


def calibration(training: Training) -> Calibration:
    """The finished factors under the names that their twins ask for; only for whole ranks and bits."""
    if training.gates or not training.rows:
        raise KvsimError(f"training stands at step {training.step}, where gates are still open; go on to the end")
    tensors: Tensors = {}
    for key, rows in training.rows.items():
        frame = rows.basis.frame
        tensors[f"{name_of(key)}.{frame}.encoder"] = rows.encoder.detach()
        tensors[f"{name_of(key)}.{frame}.decoder"] = rows.decoder.detach()
    shape, sketch = fingerprint(training.model)
    metadata = {
        "format": FORMAT, "method": str(training.method), "trained": json.dumps(dataclasses.asdict(training.recipe)),
        "shares": json.dumps(training.shares()), "model": shape, "architecture": type(training.model).__name__,
        "sketch": json.dumps(sketch), "text": text_hash(training), "steps": str(training.step),
        "tokens": str(sum(len(p) for p in training.pieces)), "seed": str(training.recipe.seed),
        "kvsim": kvsim.__version__, "torch": torch.__version__,
    }
    return Calibration(tensors, metadata)


def policy_of(path: str | Path) -> Any:
    """Shares and bits by layer of a file that `kvsim train` wrote for any model."""
    from runtime.calibration import load

    found = load(path).metadata
    if "shares" not in found:
        raise KvsimError(f"--policy {shown(str(path))} holds no ranks and bits of layers: kvsim train did not write it")
    try:
        policy = tuple(tuple((float(s), None if b is None else int(b)) for s, b in layer)
                       for layer in json.loads(found["shares"]))
    except (ValueError, TypeError, RecursionError):
        policy = ()
    sides = [side for layer in policy for side in layer]
    if not sides or any(len(x) != 2 for x in policy) or not all(
            0 < s <= 1 and (b is None or 1 <= b <= 16) for s, b in sides):
        raise KvsimError(f"--policy {shown(str(path))}: its ranks and bits of layers are damaged")
    return policy


def save_checkpoint(training: Training, path: Path) -> None:
    """Everything that the next step depends on, put in place at once."""
    from safetensors.torch import save_file

    tensors: Tensors = {}
    for name, tensor in _parameters(training):
        tensors[name] = tensor.detach()
        state = training.optimizer.state.get(tensor, {}) if training.optimizer else {}
        tensors |= {f"adam.{name}.{k}": v for k, v in state.items()}
    shape, sketch = fingerprint(training.model)
    metadata = {
        "format": CHECKPOINT, "recipe": json.dumps(dataclasses.asdict(training.recipe)), "step": str(training.step),
        "price": repr(training.price), "losses": json.dumps(training.losses), "text": text_hash(training),
        "method": "" if training.gates else str(training.method), "model": shape, "sketch": json.dumps(sketch),
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, str(partial), metadata=metadata)
    partial.replace(path)


def _parameters(training: Training) -> list[tuple[str, Tensor]]:
    found = [(f"{name_of(key)}.{n}", t) for key, r in training.rows.items()
             for n, t in (("encoder", r.encoder), ("decoder", r.decoder))]
    for key, gate in training.gates.items():
        found.append((f"{name_of(key)}.rank", gate.rank))
        if gate.bits is not None:
            found.append((f"{name_of(key)}.bits", gate.bits))
        found += [(f"{name_of(key)}.rank_speed", gate.rank_speed), (f"{name_of(key)}.bits_speed", gate.bits_speed)]
    return found


def resume(training: Training, path: Path) -> None:
    """Put a new training where the checkpoint stands; KvsimError where it belongs to another run."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise KvsimError(f"--resume: {shown(str(path))} is no checkpoint: {error}") from None
    if metadata.get("format") != CHECKPOINT:
        raise KvsimError(f"--resume: {shown(str(path))} is no checkpoint of kvsim train")
    Calibration({}, metadata | {"architecture": "model"}).check(training.model, f"--resume: {shown(str(path))}")
    asked = json.loads(json.dumps(dataclasses.asdict(training.recipe)))
    try:
        before = dict(json.loads(metadata["recipe"]))
    except (LookupError, ValueError, TypeError, RecursionError):
        raise KvsimError(f"--resume: {shown(str(path))} is damaged: it does not say how it was begun") from None
    other = [k for k in asked if asked[k] != before.get(k)]
    if other or metadata.get("text") != text_hash(training):
        what = f"{other[0]}={shown(before.get(other[0]))}" if other else "another text"
        raise KvsimError(f"--resume: {shown(str(path))} was begun with {what}; give the same, or another --out")
    try:
        _put_back(training, metadata, tensors)
    except (LookupError, ValueError, TypeError, RuntimeError) as problem:
        raise KvsimError(f"--resume: {shown(str(path))} is damaged ({problem}); begin anew without --resume") from None


def _put_back(training: Training, metadata: dict[str, str], tensors: Tensors) -> None:
    if metadata["method"]:
        method = parse_method(metadata["method"])
        layers = training.spec.n_layers
        training.chains = {key: getattr(method.at(key[0], layers), key[1]) for key in training.sides()}
    else:
        training.open_gates()
    for key in training.sides():
        place = training.geometries[key[0]].place(key[1], 16)  # type: ignore[arg-type]
        found = [tensors[f"{name_of(key)}.{n}"].requires_grad_() for n in ("encoder", "decoder")]
        if key in training.chains:
            training.rows[key] = Rows(place, training.chains[key], *found)
            continue
        gate = training.gates[key]
        gate.rank = tensors[f"{name_of(key)}.rank"].requires_grad_()
        gate.bits = tensors[f"{name_of(key)}.bits"].requires_grad_() if gate.bits is not None else None
        gate.rank_speed, gate.bits_speed = (tensors[f"{name_of(key)}.{n}_speed"] for n in ("rank", "bits"))
        training.rows[key] = training.soft(gate, *found)
    training.step, training.price = int(metadata["step"]), float(metadata["price"])
    training.losses = json.loads(metadata["losses"])
    optimizer = training.ready()
    for name, tensor in _parameters(training):
        own = {k.rpartition(".")[2]: v for k, v in tensors.items() if k.startswith(f"adam.{name}.")}
        if own:
            optimizer.state[tensor] = own


def recipe_of(metadata: dict[str, str]) -> Recipe:
    """The recipe that a trained file was made by."""
    return Recipe(**json.loads(metadata["trained"]))
