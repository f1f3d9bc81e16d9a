"""Any Hugging Face config.json, shipped name or hub id into a ModelSpec, or one clear refusal; nothing is executed."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsim.catalogue import Entry, catalogue, find
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.model import ModelSpec

__all__ = ["Entry", "catalogue", "find", "load_model", "read_config"]

CONFIG_BYTES_MAX = 8 * 2**20
"""Larger files are refused unread: the largest published config is under 1 MB."""
DEPTH_MAX, NODES_MAX = 64, 400_000
_LEAVES = frozenset((type(None), str, int, float, bool))
_HUB_TIMEOUT_S = 10.0
# Files whose model_type names another family than their architecture; the architecture is right.
_RENAMED = {("glm", "Glm4MoeForCausalLM"): "glm4_moe"}

Source = str | Path | Mapping[str, Any] | ModelSpec


def load_model(source: Source) -> ModelSpec:
    """The model that `source` describes: a shipped name, a path to a config.json or its folder, a hub id, or a dict.

    A ModelSpec is returned as it is. Raises KvsimError, one line naming the field or the file, on anything that
    cannot be read exactly. What was filled in as the transformers 5.24 classes do stands in `.warnings`.
    """
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, Mapping):
        config = _as_config(dict(source), "the config")
        return build(config, str(config.get("_name_or_path") or config.get("model_type") or "model"), "dict")
    if not isinstance(source, (str, Path)):
        raise KvsimError(f"a model is a name, a path, a dict or a ModelSpec, not {type(source).__name__}")
    text = str(source)
    if not text.strip() or "\0" in text or len(text) > 4096:
        raise KvsimError(f"{shown(text)} is neither a model name nor a path")
    path = Path(text).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise KvsimError(f"{shown(text)} cannot be opened: {error.strerror}") from None
    if isinstance(source, str) and not text.endswith(".json") and not text.startswith((".", "/", "~")):
        entry = find(text, must=not exists and "/" not in text)
        if entry is not None:
            return replace(build(entry.config(), entry.name, entry.source), name=entry.name)
    if exists:
        file = path / "config.json" if path.is_dir() else path
        name = file.stem if file.stem != "config" else file.resolve().parent.name
        return build(read_config(file), name, str(file))
    if isinstance(source, str) and _is_hub_id(text):
        return build(read_config(_from_hub(text)), text, f"hub:{text}")
    raise KvsimError(f"{shown(text)} does not exist; give a config.json, its folder, or a name from `kvsim models`")


def build(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """The spec of a parsed config; `name` and `source` go into it, and `source` in front of an error."""
    from kvsim.architectures.fields import Fields
    from kvsim.architectures.registry import families

    kind = config.get("model_type")
    label = "" if source == "dict" else f"{source}: "
    if kind is None:
        near = did_you_mean("model_type", config)
        raise KvsimError(f"{label}model_type is missing; kvsim reads configs by it{near}")
    if not isinstance(kind, str):
        raise KvsimError(f"{label}model_type must be a word, got {shown(kind)}")
    classes = config.get("architectures")
    if isinstance(classes, list) and len(classes) == 1 and isinstance(classes[0], str):
        kind = _RENAMED.get((kind, classes[0]), kind)
    builder = families().get(kind)
    if builder is None:
        raise KvsimError(f"{label}architecture {shown(kind)} is not known; "
                         "describe it with ModelSpec.from_numbers")
    fields = Fields(dict(config), kind)
    fields.ignore("model_type", "architectures", "quantization_config", "compression_config")
    if config.get("quantization_config") or config.get("compression_config"):
        fields.notes.append("quantization_config changes the bytes of weights, not their number: choose their format")
    try:
        spec = builder(fields)
        fields.leftovers()
    except KvsimError as error:
        raise KvsimError(f"{label}{error}") from None
    return replace(spec, name=name, source=source, warnings=tuple(dict.fromkeys((*spec.warnings, *fields.notes))))


def read_config(path: Path) -> dict[str, Any]:
    """Parse one JSON file: at most 8 MiB, UTF-8, an object, no repeated keys, bounded depth."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise KvsimError(f"{path} is not a regular file")
        if info.st_size > CONFIG_BYTES_MAX:
            raise KvsimError(f"{path} has {info.st_size} bytes; a config.json has at most {CONFIG_BYTES_MAX}")
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError:
        own = (path.parent / "params.json").exists()
        hint = "; params.json is Mistral's own format, use the config.json" if own else ""
        raise KvsimError(f"{path} does not exist{hint}") from None
    except OSError as error:
        raise KvsimError(f"{path} cannot be read: {error.strerror or error}") from None
    if not data.strip():
        raise KvsimError(f"{path} is empty")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise KvsimError(f"{path} is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise KvsimError(f"{path} is nested deeper than {DEPTH_MAX} levels") from None
    except UnicodeDecodeError:
        raise KvsimError(f"{path} is not UTF-8 text") from None
    except KvsimError as error:
        raise KvsimError(f"{path}: {error}") from None
    except ValueError:
        raise KvsimError(f"{path} holds a number too long to read") from None
    return _as_config(value, str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise KvsimError(f"field {shown(twice)} stands there twice")
    return found


def _as_config(value: Any, where: str) -> dict[str, Any]:
    """`value` if it is an object of plain JSON values with string keys, not too deep and not too large."""
    if not isinstance(value, dict):
        raise KvsimError(f"{where} must hold a JSON object, not {type(value).__name__}")
    if not value:
        raise KvsimError(f"{where} is an empty object")
    level: list[Any] = [value]
    nodes = 0
    for _ in range(DEPTH_MAX):
        level = [child for node in level for child in _children(node, where)]
        nodes += len(level)
        if nodes > NODES_MAX:
            raise KvsimError(f"{where} holds more than {NODES_MAX} values")
        if not level:
            return value
    raise KvsimError(f"{where} is nested deeper than {DEPTH_MAX} levels")


def _children(node: Any, where: str) -> Iterable[Any]:
    """What an object or list holds; KvsimError on keys and values that JSON does not have."""
    if type(node) in _LEAVES:
        return ()
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str):
                raise KvsimError(f"{where} has the key {shown(key)}; keys are words")
        return node.values()
    if isinstance(node, (list, tuple)):
        return node
    raise KvsimError(f"{where} holds a {type(node).__name__}, which JSON does not have")


def _is_hub_id(text: str) -> bool:
    """Whether the text looks like organisation/name."""
    parts = text.split("/")
    if len(parts) != 2 or text.endswith(".json"):
        return False
    return all(p and p[0] != "." and len(p) <= 96 and all(c.isalnum() or c in "-_." for c in p) for p in parts)


def _from_hub(repo: str) -> Path:
    """The config.json of a hub repository, from the local cache or downloaded; data only."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        raise KvsimError(f"{repo!r} is not in the catalogue{did_you_mean(repo, catalogue())}; to read hub ids, "
                         "`pip install huggingface_hub`, or give the path of its config.json") from None
    try:
        cached = try_to_load_from_cache(repo, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        _reach(ENDPOINT)
        return Path(hf_hub_download(repo, "config.json", etag_timeout=_HUB_TIMEOUT_S))
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise KvsimError(f"{repo!r} is not in the catalogue{did_you_mean(repo, catalogue())} and its config.json "
                         f"cannot be fetched from the hub ({type(error).__name__}: {reason})") from None


def _reach(endpoint: str) -> None:
    """OSError at once where the hub cannot be reached, instead of the client's many slow retries."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies():
        return
    host = urlsplit(endpoint)
    socket.create_connection((host.hostname or "", host.port or 443), timeout=_HUB_TIMEOUT_S).close()
