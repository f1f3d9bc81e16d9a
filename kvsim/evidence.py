"""Measured quality: rows of what methods cost models, where that was measured, and which rows speak for a question."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.errors import KvsimError, shown
from kvsim.layout import Layout, layer_keys, layer_layout
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from kvsim.workload import Workload

OWN = "evidence.jsonl"
WIDEN = 4.0
"""Factor by which borrowed losses may be off where no two models were measured with the same methods."""
SMALLEST, LARGEST = 1e-300, 1e300
BEGINS = '{"model": "'
"""How every row begins in a file; what begins otherwise is no row that was cut off, but somebody's own text."""
REACH = 0.9
"""Evidence speaks for a workload where the method keeps at least this share of what it kept when measured."""


@dataclass(frozen=True)
class Evidence:
    """One method on one model and text. Losses are means over segments with the ends of a 95% interval.

    kl: nats a token, KL(full || method). top1: share of tokens whose likeliest successor stays. ppl_ratio: perplexity
    over that of the uncompressed model, ppl_full. attention_error: relative error of each layer's attention output,
    errors of layers below included. kept: share of rows that a step attends, at prompt + scored tokens. bits: stored
    for each value of the full cache, there. seconds: of processor time that measuring took. A sentence in `where` says
    what was measured.
    """

    model: str
    method: str
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    top1_low: float
    top1_high: float
    ppl_ratio: float
    ppl_low: float
    ppl_high: float
    ppl_full: float
    segments: int
    prompt: int
    scored: int
    kept: float
    bits: float
    text: str
    text_hash: str
    model_hash: str
    seed: int
    machine: str
    date: str
    versions: Mapping[str, str]
    calibrated: bool = False
    seconds: float = 0.0
    segment_kl: tuple[float, ...] = ()
    attention_error: tuple[float, ...] = ()
    borrowed_from: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two rows the same measurement."""
        sizes = (self.segments, self.prompt, self.scored, self.seed)
        return (self.method, self.model_hash, self.text_hash, *map(str, sizes))

    @property
    def where(self) -> str:
        """Model, text, size and date in words."""
        what = f"{self.model}, {self.text}, {self.segments} x {self.prompt}+{self.scored} tokens, {self.date}"
        return f"borrowed from {what}, widened" if self.borrowed_from else what

    def to_json(self) -> dict[str, Any]:
        """The row as a file keeps it; fields that may be left out are, where they are empty."""
        optional = {f.name for f in fields(self) if f.default is not MISSING}
        return {k: v for k, v in asdict(self).items() if v or k not in optional}

    def quality(self) -> dict[str, Any]:
        """What `fit --json` says of a method's quality."""
        return {
            "kl": self.kl,
            "top1": self.top1,
            "ppl_ratio": self.ppl_ratio,
            "kl_interval": [self.kl_low, self.kl_high],
            "top1_interval": [self.top1_low, self.top1_high],
            "ppl_interval": [self.ppl_low, self.ppl_high],
            "borrowed": bool(self.borrowed_from),
            "evidence": self.where,
        }

    def widened(self, factor: float, model: str) -> Evidence:
        """The row as evidence for another model: intervals of all losses wider by `factor` either way."""
        drop, ppl = 1 - self.top1, np.log(self.ppl_ratio)
        return replace(
            self,
            kl_low=self.kl_low / factor,
            kl_high=self.kl_high * factor,
            top1_low=max(0.0, 1 - (1 - self.top1_low) * factor),
            top1_high=1 - (1 - self.top1_high) / factor if drop else 1.0,
            ppl_low=float(np.exp(min(np.log(self.ppl_low), ppl / factor))),
            ppl_high=float(np.exp(max(np.log(self.ppl_high), 0.0) * factor)),
            borrowed_from=model,
        )


def from_json(row: Mapping[str, Any], where: str) -> Evidence:
    """A row of a file; KvsimError where a field is missing, unknown or of a wrong type."""
    known = {f.name: f for f in fields(Evidence)}
    unknown = set(row) - set(known)
    needed = [n for n, f in known.items() if f.default is MISSING and n not in row]
    if unknown or needed:
        what = f"unknown field {shown(min(unknown))}" if unknown else f"no field {needed[0]}"
        raise KvsimError(f"{where}: {what}; `kvsim quality` writes such files")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    for name, value in values.items():
        what, right = _RIGHT[str(known[name].type)]
        if not right(value):
            raise KvsimError(f"{where}: {name} is {what}, got {shown(value)}")
    wrong = next((n for n, (low, high) in _RANGES.items() if not low <= values[n] <= high), None)
    if wrong is not None:
        low, high = _RANGES[wrong]
        raise KvsimError(f"{where}: {wrong} lies between {low:g} and {high:g}, got {shown(values[wrong])}")
    return Evidence(**values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


_RIGHT: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a finite number", _number),
    "int": ("a whole number", lambda x: isinstance(x, int) and _number(x)),
    "str": ("text", lambda x: isinstance(x, str)),
    "bool": ("true or false", lambda x: isinstance(x, bool)),
    "Mapping[str, str]": ("an object", lambda x: isinstance(x, dict)),
    "tuple[float, ...]": ("a list of finite numbers", lambda x: isinstance(x, tuple) and all(map(_number, x))),
}
"""What each type of a row's fields is called, and whether a value of a file is one."""
_RANGES = {
    **dict.fromkeys(("kl", "kl_low", "kl_high"), (0.0, LARGEST)),
    **dict.fromkeys(("top1", "top1_low", "top1_high", "kept"), (0.0, 1.0)),
    **dict.fromkeys(("ppl_ratio", "ppl_low", "ppl_high"), (SMALLEST, LARGEST)),
    **dict.fromkeys(("segments", "prompt", "scored"), (1, 2**40)),
}
"""Between which numbers a field lies, both ends included: a ratio of perplexities is above 0."""


def read(path: str | Path) -> tuple[Evidence, ...]:
    """Rows of a JSON-lines file; KvsimError with the line where one is broken. An unfinished last line is left out."""
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError:
        raise KvsimError(f"evidence {shown(str(path))}: no such file; `kvsim quality --out FILE` writes one") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise KvsimError(f"evidence {shown(str(path))} cannot be read: {problem}") from None
    return _rows(text, str(path))


def _rows(text: str, name: str) -> tuple[Evidence, ...]:
    found = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and BEGINS.startswith(line[: len(BEGINS)]):  # a run that was killed while it wrote
                break
            raise KvsimError(f"{name}:{number} is no JSON") from None
        if not isinstance(row, dict):
            raise KvsimError(f"{name}:{number} is no JSON object")
        found.append(from_json(row, f"{name}:{number}"))
    return tuple(found)


@cache
def shipped() -> tuple[Evidence, ...]:
    """The table that comes with kvsim."""
    folder = files("kvsim.data").joinpath("evidence")
    if not folder.is_dir():
        return ()
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".jsonl"))
    return tuple(row for name in names for row in _rows(folder.joinpath(name).read_text("utf-8"), name))


def bare(name: str) -> str:
    """A model's name as it is compared: gemma-3-270m and gemma3-270m are one."""
    return "".join(c for c in name.lower() if c.isalnum())


def most_measured(rows: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """Rows of the model with most segments of text under them: figures that are compared must be of one model."""
    count: dict[str, int] = {}
    for row in rows:
        count[row.model] = count.get(row.model, 0) + row.segments
    name = max(count, key=lambda m: (count[m], m), default="")
    return tuple(r for r in rows if r.model == name)


def own_path() -> Path:
    """Where a user's own evidence lies."""
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "kvsim" / OWN


def gathered(path: str | None = None) -> tuple[Evidence, ...]:
    """The user's own rows, from `path` or the usual place, before those that come with kvsim."""
    if path is not None:
        return read(path) + shipped()
    own = own_path()
    return (read(own) if own.is_file() else ()) + shipped()


class Table:
    """Rows by method, for one model: its own where there are any, otherwise another model's, widened."""

    def __init__(self, rows: Iterable[Evidence], model: ModelSpec) -> None:
        rows = tuple(rows)
        names = {bare(model.name), bare(Path(model.name).name)}
        self.own = _by_method(r for r in rows if bare(r.model) in names)
        lent = most_measured([r for r in rows if bare(r.model) not in names])
        self.lender = lent[0].model if lent else ""
        self.factor, self.widened_by = spread(rows)
        self.lent = _by_method(lent)

    def of(self, method: Method, work: Workload, model: ModelSpec) -> tuple[Evidence | None, str]:
        """(the evidence that speaks for a method at a workload, why there is none)."""
        reason = "not measured"
        for rows, own in ((self.own, True), (self.lent, False)):
            for row in rows.get(method, ()):
                now = kept(method, int(work.prompt_tokens), int(work.new_tokens), model)
                then = min(row.kept, kept(method, row.prompt, 0, model))  # prompt policies keep all that came later
                if now < REACH * then:
                    reason = (
                        f"measured where the method keeps {then:.0%} of {row.prompt + row.scored} tokens; here it "
                        f"keeps {now:.0%}"
                    )
                    continue
                return (row if own else row.widened(self.factor, model.name)), ""
        return None, reason


def _by_method(rows: Iterable[Evidence]) -> dict[Method, list[Evidence]]:
    """A user's own rows stay before those that come with kvsim; among rows of one file more text counts first."""
    found: dict[Method, list[Evidence]] = {}
    for row in rows:
        try:
            found.setdefault(parse_method(row.method), []).append(row)
        except KvsimError:  # a part of another release: the row speaks for no method of this one
            continue
    return found


def spread(rows: Sequence[Evidence]) -> tuple[float, str]:
    """(factor that covers 90% of the ratios of KL between two models, where it comes from)."""
    table: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.kl > 1e-4:
            table.setdefault(r.method, {}).setdefault(r.model, r.kl)
    ratios = [abs(np.log(a / b)) for row in table.values() for m, a in row.items() for n, b in row.items() if m < n]
    if len(ratios) < 10:
        return WIDEN, "assumed: too few methods were measured on two models"
    return float(np.exp(np.quantile(ratios, 0.9))), f"{len(ratios)} methods measured on two models"


def kept(method: Method, prompt: int, new: int, model: ModelSpec) -> float:
    """Share of the rows of a full cache that a step attends, mean over attention layers."""
    shares = []
    for layout in _layouts(method, prompt, new, model):
        window = layout.attention.window
        whole = max(1, min(prompt + new, window) if window else prompt + new)
        shares.append(min(1.0, float(layout.rows.attended) / whole))
    return float(np.mean(shares)) if shares else 1.0


def stored_bits(method: Method, prompt: int, new: int, model: ModelSpec) -> float:
    """Bits held for each value of a sequence's full cache; what belongs to the model is left out."""
    mine, full = (
        sum(b.bytes for x in _layouts(m, prompt, new, model) for b in x.buffers if not b.per_model)
        for m in (method, Method())
    )
    return 16.0 * float(mine) / float(full) if full else 16.0


def _layouts(method: Method, prompt: int, new: int, model: ModelSpec) -> list[Layout]:
    """Every layer's layout; layers that are alike share one."""
    found: list[Layout] = []
    for (layer, own, _), indices in layer_keys(model, method).items():
        layout = layer_layout(layer, own, prompt, new, 16, indices[0], model.n_layers)
        found += [layout] * len(indices) if layout is not None else []
    return found
