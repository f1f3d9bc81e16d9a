"""How serving engines account for KV memory: `memory(engine, model, **flags)`; an engine is one module of this package.

An engine module states `NAMES` (how users call it), `ALIASES` (the engine's own flag spellings -> parameter names) and
`memory(model, *, flags with types and defaults) -> Memory`; where it can run methods, `realise(method, *, ...) -> str`
(its flags) and `hold(method, model, *, ...) -> int` (its bytes); where it takes a share of the device, `memory_share`.
It joins by being there; values given as text are read by the parameter's annotation.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from math import isfinite
from pkgutil import iter_modules
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvsim.engines.result import Cache, Memory
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec

__all__ = ["Cache", "Memory", "engine_module", "engines", "flag_names", "flags", "held_bytes", "memory", "memory_share"]

YES, NO = ("true", "on", "yes", "1"), ("false", "off", "no", "0")
SIZED = re.compile(r"(\d{1,15}(?:\.\d{0,9})?)\s{0,4}([kmgt])(i?)b")
SUFFIX = {"k": 2**10, "m": 2**20, "g": 2**30}


@cache
def engines() -> dict[str, ModuleType]:
    """Every engine by each of its names, the first name of a module being the one to print."""
    found: dict[str, ModuleType] = {}
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for name in getattr(module, "NAMES", ()):
            found[name] = module
    return found


def engine_module(engine: str) -> ModuleType:
    """The module of an engine; KvsimError with the nearest name for an unknown one."""
    known = engines()
    name = str(engine).strip().lower().replace("_", "-")
    for key, module in known.items():
        if name == key.replace("_", "-"):
            return module
    raise KvsimError(f"engine {shown(engine)} is unknown{did_you_mean(name, known)}: one of {', '.join(sorted(known))}")


def flag_names(engine: str) -> tuple[str, ...]:
    """The flags that `memory` takes for this engine, in the order of its signature."""
    parameters = inspect.signature(engine_module(engine).memory).parameters
    return tuple(p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY)


def memory(engine: str, model: ModelSpec, **flags: Any) -> Memory:
    """What `engine` allocates for `model` with these flags.

    Args:
        engine: llama.cpp, ollama, vllm, sglang, tensorrt-llm, exllamav2, ...
        model: the architecture.
        flags: the engine's flags by name, with dashes or underscores, or its own spellings (`c`, `ctk`, `np`); text
            is read by the flag's type (`128k` is 131072, `on`/`off`).

    Raises KvsimError for an unknown engine or flag (nearest name suggested), a value of the wrong type, or a
    combination that the engine refuses (with its reason).
    """
    module = engine_module(engine)
    if not isinstance(model, ModelSpec):
        raise KvsimError(f"memory needs a ModelSpec (kvsim.load_model or ModelSpec.from_numbers), got {shown(model)}")
    hints = get_type_hints(module.memory)
    known = flag_names(engine)
    given: dict[str, Any] = {}
    for key, value in flags.items():
        off = _switched_off(key, value, known, hints)
        name, text = (off, False) if off else (_flag(key, known, module.ALIASES, engine), value)
        if name in given:
            raise KvsimError(f"flag {name} is given twice (as {shown(key)} too)")
        given[name] = _value(text, hints[name], name)
    result: Memory = module.memory(model, **given)
    return result


def check_runs_methods(engine: str) -> ModuleType:
    """The engine's module where it can say how to run a method; KvsimError otherwise."""
    module = engine_module(engine)
    if not hasattr(module, "realise"):
        able = sorted({m.NAMES[0] for m in engines().values() if hasattr(m, "realise")})
        raise KvsimError(f"{engine} has no flags known here for running a method; these have: {', '.join(able)}")
    return module


def held_bytes(
    engine: str, method: Method | str, model: ModelSpec, *, tokens: int, sequences: int, tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> int:
    """Bytes of cache and states that `engine` allocates on its fullest device for so many requests of that length.

    Blocks, padding, windows with their batch and replicated heads included. KvsimError where the engine refuses.
    """
    found: int = check_runs_methods(engine).hold(
        parse_method(method), model, tokens=tokens, sequences=sequences, tensor=tensor_parallel_size,
        pipeline=pipeline_parallel_size,
    )  # fmt: skip
    return found


def memory_share(engine: str, *, weights: float, cache: float, peak: float, capacity: float) -> float | None:
    """The share of memory to ask `engine` for so that these bytes fit on a device; None where it takes none."""
    module = engine_module(engine)
    if not hasattr(module, "memory_share"):
        return None
    found: float = module.memory_share(weights=weights, cache=cache, peak=peak, capacity=capacity)
    return found


def flags(
    engine: str,
    method: Method | str,
    *,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    max_num_seqs: int | None = None,
) -> str:
    """The command-line flags with which `engine` runs a method; KvsimError with the reason where it cannot."""
    module = check_runs_methods(engine)
    found: str = module.realise(
        parse_method(method), max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
        max_num_seqs=max_num_seqs,
    )  # fmt: skip
    return found


def _switched_off(key: str, value: Any, known: tuple[str, ...], hints: dict[str, Any]) -> str:
    """The switch that `--no-enable-prefix-caching`, as servers write it, turns off; "" for any other flag."""
    bare = key.strip().lstrip("-").replace("-", "_")
    name = bare.removeprefix("no_")
    if bare in known or name == bare or name not in known or bool not in (hints[name], *get_args(hints[name])):
        return ""
    return name if value in (True, "on") else ""


def _flag(key: str, known: tuple[str, ...], aliases: dict[str, str], engine: str) -> str:
    bare = key.strip().lstrip("-")
    for form in (bare, bare.replace("-", "_"), bare.replace("_", "-")):
        if form in known:
            return form
        if form in aliases:
            return aliases[form]
    spelled = {*known, *aliases}
    raise KvsimError(f"{engine} has no flag {shown(key)}{did_you_mean(bare, spelled)}: it knows {', '.join(known)}")


def _value(value: Any, hint: Any, name: str) -> Any:
    """Check a value against an annotation, reading text by it: unions try bool, int, float, tuple, then text."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        if NoneType in options:
            return None
        raise KvsimError(f"{name} needs a value")
    sized = SIZED.fullmatch(value.strip().lower()) if name.endswith("_bytes") and isinstance(value, str) else None
    if sized:  # 20GB, 10.12 GiB, as logs print them
        return int(float(sized[1]) * (1024 if sized[3] else 1000) ** (1 + "kmgt".index(sized[2])))
    for option in sorted((o for o in options if o is not NoneType), key=_rank):
        done, result = _read(value, option)
        if done:
            return result
    words = [_called(o) for o in options if o is not NoneType]
    wanted = " or ".join(w for w in words if w != "a whole number" or "a number" not in words)
    raise KvsimError(f"{name} must be {wanted}, got {shown(value)}")


def _rank(option: Any) -> int:
    order = (bool, int, float, tuple, str)
    base = get_origin(option) or option
    return order.index(base) if base in order else -1


def _called(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(str(c) for c in get_args(option))
    words = {bool: "on or off", int: "a whole number", float: "a number", str: "text", tuple: "a list like 3,1"}
    return words.get(get_origin(option) or option, getattr(option, "__name__", str(option)))


def _read(value: Any, option: Any) -> tuple[bool, Any]:
    """(whether `value` can be read as `option`, the value read)."""
    origin = get_origin(option)
    if origin is Literal:
        choices = {str(c).lower(): c for c in get_args(option)}
        text = str(value).strip().lower()
        text = {"true": "on", "false": "off"}.get(text, text) if text not in choices else text
        return text in choices, choices.get(text)
    if origin is tuple:
        return _read_tuple(value, get_args(option)[0])
    if option is bool:
        if isinstance(value, str):
            text = value.strip().lower()
            return text in YES + NO, text in YES
        return isinstance(value, bool), value
    if option in (int, float):
        return _read_number(value, option)
    return isinstance(value, option), value


def _read_tuple(value: Any, item: Any) -> tuple[bool, Any]:
    parts = value.replace("/", ",").split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        parts = (parts,)
    read = [_read(part, item) for part in parts]
    return bool(read) and all(ok for ok, _ in read), tuple(v for _, v in read)


def _read_number(value: Any, option: type) -> tuple[bool, Any]:
    if isinstance(value, str):
        text = value.strip().lower().replace("_", "")
        scale = SUFFIX.get(text[-1:], 1)
        try:
            number = float(text[:-1] if scale > 1 else text) * scale
        except ValueError:
            return False, None
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        return False, None
    else:
        number = value if isinstance(value, int) else float(value)
    if not isfinite(number):
        return False, None
    if option is float:
        return True, float(number)
    return number == int(number), int(number)
