"""The written form of a method, read: stages, sides, corrections, protocol, layer clauses, presets with arguments."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from kvsim.bases.identity import Identity
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.formats.full import Full
from kvsim.method import PROTOCOLS, Chain, Clause, LayerRange, Method
from kvsim.parts import Basis, Correction, Format, Part, TokenPolicy, parts
from kvsim.tokens.keep import Keep

MAX_TEXT = 4096
_STAGE = re.compile(r"\s*([A-Za-z0-9_][\w.\-]*)\s*(\(.*\))?\s*", re.DOTALL)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*([eE][+-]?[0-9]+)?|\.[0-9]+)")


@dataclass(frozen=True)
class Preset:
    """A name for a method, with where it comes from."""

    name: str
    method: str
    summary: str
    source: str
    notes: str = ""


@cache
def presets() -> Mapping[str, Preset]:
    """Every preset by name, read from kvsim/data/presets*.toml."""
    found: dict[str, Preset] = {}
    for entry in sorted(files("kvsim").joinpath("data").iterdir(), key=lambda e: e.name):
        if entry.name.startswith("presets") and entry.name.endswith(".toml"):
            for facts in tomllib.loads(entry.read_text("utf-8"))["preset"]:
                found[facts["name"]] = Preset(**facts)
    return MappingProxyType(found)


@lru_cache(maxsize=4096)
def parse(text: str) -> Method:
    """Read the whole form; raise KvsimError in one line where it cannot be read or composed."""
    if not isinstance(text, str) or not text.strip():
        raise KvsimError("a method is empty; write full, int(bits=4), h2o(budget=0.2) | int(bits=4) or a preset's name")
    if len(text) > MAX_TEXT:
        raise KvsimError(f"a method is longer than {MAX_TEXT} characters")
    if not text.isprintable():
        raise KvsimError(f"a method holds a character that cannot be printed: {shown(text)}")
    first, *rest = split(text, ";")
    method = _single(first)
    clauses = tuple(_clause(c) for c in rest)
    return replace(method, clauses=method.clauses + clauses) if clauses else method


def split(text: str, mark: str) -> list[str]:
    """Split at `mark` outside parentheses and quotes; raise KvsimError on ones that do not close."""
    pieces, start = [], 0
    for at, char in _outside(text):
        if char == mark:
            pieces.append(text[start:at])
            start = at + 1
    return [*pieces, text[start:]]


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """Characters at depth 0, outside quotes."""
    depth, quoted, escaped = 0, False, False
    for at, char in enumerate(text):
        if quoted:
            quoted, escaped = (char != '"' or escaped), char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth < 0:
                raise KvsimError(f"a ')' without '(' in {shown(text)}")
        elif depth == 0:
            yield at, char
    if depth or quoted:
        raise KvsimError(f"{'a quote' if quoted else 'a parenthesis'} does not close in {shown(text)}")


def _clause(text: str) -> Clause:
    found = re.fullmatch(r"\s*layers\s*=\s*([\w\-]+)\s*:(.*)", text, re.DOTALL)
    if not found:
        raise KvsimError(f"after ';' comes layers=RANGE: method, got {shown(text.strip())}")
    return Clause(LayerRange(found[1]), _single(found[2]))


def _single(text: str) -> Method:
    """One method without layer clauses: [policy |] sides [@ protocol]."""
    body, *protocol = split(text, "@")
    if len(protocol) > 1:
        raise KvsimError(f"more than one '@' in {shown(text)}")
    method = _body(body)
    if protocol:
        name = protocol[0].strip()
        if name not in PROTOCOLS:
            raise KvsimError(
                f"protocol {shown(name)} is not one of {', '.join(PROTOCOLS)}{did_you_mean(name, PROTOCOLS)}"
            )
        method = replace(method, protocol=name)
    return method


def _body(text: str) -> Method:
    marks = [at for at, char in _outside(text) if char == ":"]
    if not marks:
        return _stages(split(text, "|"))
    if len(marks) != 2 or text[marks[0] - 1 : marks[0]] != "k" or text[marks[1] - 1 : marks[1]] != "v":
        raise KvsimError(f"sides are written k:... v:..., in that order, got {shown(text.strip())}")
    head = text[: marks[0] - 1].rstrip()
    if head and not head.endswith("|"):
        raise KvsimError(f"a token policy ends with '|' before k:, got {shown(head)}")
    policy = _stages(split(head[:-1], "|")) if head else Method()
    if not (policy.k.is_full and policy.v.is_full):
        raise KvsimError(f"only a token policy stands before k:, got {shown(head)}")
    keys = _stages(split(text[marks[0] + 1 : marks[1] - 1], "|"))
    values = _stages(split(text[marks[1] + 1 :], "|"))
    if not (isinstance(keys.tokens, Keep) and isinstance(values.tokens, Keep)):
        raise KvsimError("a token policy holds for keys and values alike: write it before k:")
    written = re.sub(r"\s", "", text[marks[1] + 1 :])  # a part's default may be rope=pre: nobody asked for that
    if "rope=pre" in written and values.k.before_rope and values.k.for_values() == values.v:
        raise KvsimError("rope=pre is for keys: values carry no rotation; set it after k: alone")
    for stage in split(text[marks[1] + 1 :], "|"):
        kind = parts().get(_call(split(stage, "+")[0])[0])
        if kind is not None and getattr(kind, "keys_only", False):
            raise KvsimError(f"{kind.name} estimates query-key products and cannot hold values; use it after k:")
    return replace(policy, k=keys.k, v=values.v)


def _stages(stages: list[str]) -> Method:
    """[policy |] [basis |] format {+ correction}, presets in their slots."""
    tokens: TokenPolicy = Keep()
    k = v = Chain()
    filled = 0  # 1 a policy, 2 a basis, 3 a format stand: each may come once, in this order
    for stage in stages:
        fragment, slots = _stage(stage)
        if min(slots) <= filled:
            raise KvsimError(
                f"{shown(stage.strip())} cannot follow what stands before it: "
                "a policy, then a basis, then a format, each once"
            )
        filled = max(slots)
        tokens = fragment.tokens if 1 in slots else tokens
        k, v = (_joined(mine, theirs, slots) for mine, theirs in ((k, fragment.k), (v, fragment.v)))
    return Method(tokens, k, v.for_values() if k == v else v)


def _joined(mine: Chain, theirs: Chain, slots: set[int]) -> Chain:
    basis = theirs.basis if 2 in slots else mine.basis
    return Chain(basis, theirs.format, theirs.corrections) if 3 in slots else replace(mine, basis=basis)


def _stage(text: str) -> tuple[Method, set[int]]:
    """One stage as a fragment, and which slots (1 policy, 2 basis, 3 format) it fills."""
    first, *more = split(text, "+")
    name, arguments = _call(first)
    kind = parts().get(name)
    if kind is None and name in presets():
        fragment = _preset(name, arguments)
    elif kind is None:
        known = [*parts(), *presets()]
        raise KvsimError(f"method {shown(name)} is not known{did_you_mean(name, known)}; `kvsim methods` lists them")
    else:
        fragment = _fragment(_make(kind, arguments))
    if more:
        fixes = tuple(_correction(c) for c in more)
        k, v = (replace(c, corrections=c.corrections + fixes) for c in (fragment.k, fragment.v))
        fragment = replace(fragment, k=k, v=v)
    slots = set() if isinstance(fragment.tokens, Keep) else {1}
    slots |= {2} if any(not isinstance(c.basis, Identity) for c in (fragment.k, fragment.v)) else set()
    slots |= {3} if any(not isinstance(c.format, Full) for c in (fragment.k, fragment.v)) else set()
    return fragment, slots or {1 if name == "keep" else 2 if name == "identity" else 3}


def _fragment(part: Part) -> Method:
    if isinstance(part, TokenPolicy):
        return Method(tokens=part)
    if isinstance(part, Correction):
        raise KvsimError(f"{part.name} corrects a format: write int(bits=2)+{part}")
    chain = (
        Chain(basis=part) if isinstance(part, Basis) else Chain(format=part) if isinstance(part, Format) else Chain()
    )
    return Method(k=chain, v=chain.for_values()) if not chain.format.keys_only else Method(k=chain)


def _correction(text: str) -> Correction:
    name, arguments = _call(text)
    known = {n: p for n, p in parts().items() if issubclass(p, Correction)}
    if name not in known:
        raise KvsimError(f"correction {shown(name)} is not known: one of {', '.join(known)}{did_you_mean(name, known)}")
    made = _make(known[name], arguments)
    assert isinstance(made, Correction)
    return made


def _call(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Read `name(key=value, ...)`; positional values have an empty key."""
    found = _STAGE.fullmatch(text)
    if not found:
        raise KvsimError(f"cannot read {shown(text.strip())}: a stage is written name(key=value,...)")
    inner = (found[2] or "()")[1:-1]
    arguments: list[tuple[str, Any]] = []
    for piece in split(inner, ",") if inner.strip() else []:
        key, equals, value = piece.partition("=")
        if equals and re.fullmatch(r"\s*[A-Za-z_]\w*\s*", key):
            arguments.append((key.strip(), _value(value)))
        else:
            arguments.append(("", _value(piece)))
    return found[1], arguments


def _value(text: str) -> Any:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        inner = [p for p in split(text[1:-1], ",") if p.strip()]
        return tuple(_value(p) for p in inner)
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) and len(text) < 20 else float(text)
    if not re.fullmatch(r"[\w./\\~:\-]+", text):
        raise KvsimError(f"cannot read the value {shown(text)}; quote text that is not a plain name")
    return text


def _make(kind: type[Part], arguments: list[tuple[str, Any]]) -> Part:
    names = [f.name for f in kind.settings()]
    given = dict(_named(kind.name, names, arguments))
    missing = [f.name for f in kind.settings() if f.default is MISSING and f.name not in given]
    if missing:
        raise KvsimError(f"{kind.name} needs {', '.join(missing)}: write {kind.name}({missing[0]}=...)")
    return kind(**given)


def _named(owner: str, names: list[str], arguments: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Give positional values their names, in declaration order; refuse unknown and repeated ones."""
    seen: set[str] = set()
    for position, (key, value) in enumerate(arguments):
        if not key and (position >= len(names) or any(k for k, _ in arguments[:position])):
            nearest = names[min(position, len(names) - 1)] if names else "nothing"
            raise KvsimError(f"{owner}: value {shown(value)} has no name; write {nearest}=...")
        name = key or names[position]
        if name not in names:
            takes = f"it takes {', '.join(names)}" if names else "it takes no settings"
            raise KvsimError(f"{owner} has no setting {shown(name)}{did_you_mean(name, names)}; {takes}")
        if name in seen:
            raise KvsimError(f"{owner}: {name} is given twice")
        seen.add(name)
        yield name, value


def _preset(name: str, arguments: list[tuple[str, Any]]) -> Method:
    """Expand a preset; an argument replaces that setting in every part of the expansion that has it."""
    method = _single(presets()[name].method)
    if not arguments:
        return method
    own = method.parts()
    names = list(dict.fromkeys(f.name for p in own for f in p.settings()))
    bare = next((v for k, v in arguments if not k), None)
    if bare is not None:
        known = ", ".join(names)
        raise KvsimError(f"{name} is a preset, whose settings need their names ({known}): {shown(bare)} has none")
    for key, value in _named(name, names, arguments):
        tokens = _changed(method.tokens, key, value)
        k, v = (
            Chain(
                _changed(c.basis, key, value),
                _changed(c.format, key, value),
                tuple(_changed(x, key, value) for x in c.corrections),
            )
            for c in (method.k, method.v)
        )
        method = replace(method, tokens=tokens, k=k, v=v)
    return method


def _changed(part: Any, key: str, value: Any) -> Any:
    return part.with_settings(**{key: value}) if any(f.name == key for f in part.settings()) else part
