"""Which engine or library runs which part of a method, and how to ask for it there (data/engines/support.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvsim.errors import KvsimError, did_you_mean
from kvsim.method import Method, parse_method
from kvsim.parts import Format
from kvsim.workload import whole

FULL_ROW = 128
"""Group from which a row of the usual head dims has one scale, as engines' per-token formats do."""


@dataclass(frozen=True)
class Support:
    """One place where a part runs: what to type there, how it differs from the part here, and who says so."""

    part: str
    where: str
    how: str
    differs: str
    source: str


def support(name: str) -> tuple[Support, ...]:
    """Where a part, or each part of a preset or written method, runs outside this project; () where none is known."""
    table = _table()
    wanted = {name} if any(row["name"] == name for row in table["part"]) else _part_names(name)
    return tuple(
        Support(row["name"], table["engines"][row["where"]]["label"], row["how"], row.get("differs", ""),
                table["engines"][row["where"]]["source"])
        for row in table["part"] if row["name"] in wanted
    )  # fmt: skip


def realised_format(engine: str, method: Method | str) -> str:
    """The engine's own dtype word for a method; KvsimError naming the part that it cannot run.

    Only whole-model formats exist in servers: no token policy, no basis, no corrections, no clauses by layer.
    """
    chosen = parse_method(method)
    about = _table()["engines"].get(engine)
    if about is None or "formats" not in about:
        raise KvsimError(f"no format table for engine {engine!r}{did_you_mean(engine, _table()['engines'])}")
    label: str = about["label"]
    if chosen.clauses:
        where = chosen.clauses[0].layers.text
        raise KvsimError(f"{label} stores all layers in one format: the clause for layers={where} cannot be run")
    if chosen.tokens.name != "keep":
        raise KvsimError(f"{label} cannot run {chosen.tokens.name}: {about['tokens']}")
    for chain in (chosen.k, chosen.v):
        if chain.basis.name != "identity":
            raise KvsimError(f"{label} cannot run {chain.basis.name}: {about['basis']}")
        if chain.corrections:
            raise KvsimError(f"{label} cannot run {chain.corrections[0].name}: {about['correction']}")
    k, v = format_key(chosen.k.format), format_key(chosen.v.format)
    known: dict[str, str] = about["formats"]
    word = known.get(k if k == v else f"{k}|{v}")
    if word is None:
        raise KvsimError(f"{label} cannot store keys as {chosen.k.format} with values as {chosen.v.format}; "
                         f"its formats: {', '.join(dict.fromkeys(known.values()))}")
    return word


def check_sizes(max_model_len: int | None, share: float | None, tensor: int, pipeline: int, seqs: int | None) -> None:
    """Raise KvsimError for numbers that no server takes: lengths, ranks and sequences below 1, a share over 1."""
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", seqs), ("tensor_parallel_size", tensor),
                        ("pipeline_parallel_size", pipeline)):  # fmt: skip
        if value is not None:
            whole(value, name, low=1, high=2**31)
    if share is not None and not 0 < share <= 1:
        raise KvsimError(f"gpu_memory_utilization must lie in (0, 1], got {share}: 0.9 means 90% of the device")


def format_key(part: Format) -> str:
    """The word by which the table knows a format: its name, and what tells it from others of that name.

    A full-precision tail (residual) is none of an engine's formats and is said in the word.
    """
    return _kind(part) + ("+tail" if getattr(part, "residual", 0) else "")


def _kind(part: Format) -> str:
    name = part.name
    if name == "float8":
        own_scale = getattr(part, "scale", "none") == "row"
        return f"float8-{getattr(part, 'kind', 'e4m3')}{'-row' if own_scale else ''}"
    if name == "int":
        axis, group = getattr(part, "axis", ""), getattr(part, "group", None)
        row = axis == "row" or (axis == "token" and group is not None and group >= FULL_ROW)
        return f"int{getattr(part, 'bits', 0)}-{'row' if row else 'grouped'}"
    if name in ("rotated", "mxfp"):
        return f"{name}{getattr(part, 'bits', 0)}"
    return name


def _part_names(name: str) -> set[str]:
    method = parse_method(name)
    return {part.name for part in method.parts()} or {"full"}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("kvsim").joinpath("data/engines/support.toml").read_text(encoding="utf-8"))
