"""Lists, one thing in full, and an engine's memory, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from rich.console import Console

from kvsim.engines.result import Memory
from kvsim.report import Column, gib, parameters, peak_dtype, quantity, say, size, table, tokens


def print_methods(out: Console, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> None:
    """Parts by role, then presets."""
    heads = (
        Column("name"),
        Column("what it does", fold=True),
        Column("survey"),
        Column("source", fold=True, optional=True),
    )
    for kind, title in titles.items():
        some = [r for r in rows if r["kind"] == kind]
        if kind == "preset":
            columns = (
                Column("name"),
                Column("method", fold=True),
                Column("what it is", fold=True),
                Column("source", fold=True, optional=True),
            )
            table(out, columns, [(r["name"], r["method"], r["summary"], r["source"]) for r in some], title)
        else:
            table(out, heads, [(r["name"], r["summary"], r["survey"], r["source"]) for r in some], title)
    out.print()
    say(
        out,
        "A method is written [policy |] [basis |] format, for example h2o(budget=0.2) | int(bits=4); "
        "k:... v:... sets keys and values apart. `kvsim show NAME` tells the settings.",
    )


def print_devices(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a device."""
    columns = (
        Column("name"),
        Column("vendor"),
        Column("type"),
        Column("capacity", right=True),
        Column("bandwidth", right=True),
        Column("16-bit peak", right=True),
        Column("family", optional=True),
    )
    table(
        out,
        columns,
        [
            (
                r["name"],
                r["vendor"],
                r["type"],
                gib(r["capacity_bytes"]),
                quantity(r["bandwidth_bytes_per_s"], "B/s"),
                quantity(r["peaks"][peak_dtype(r["peaks"])], "FLOP/s"),
                r["family"],
            )
            for r in rows
        ],
    )


def print_models(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a model."""
    columns = (
        Column("name"),
        Column("parameters", right=True),
        Column("active", right=True),
        Column("layers", fold=True),
        Column("context", right=True),
        Column("KV at 32k or less", right=True),
        Column("source", fold=True, optional=True),
    )
    table(
        out,
        columns,
        [
            (
                r["name"],
                parameters(r["parameters"]),
                "" if r["active_parameters"] == r["parameters"] else parameters(r["active_parameters"]),
                ", ".join(f"{n} {k}" for k, n in r["kinds"].items()),
                tokens(r["max_context"]) if r["max_context"] else "any",
                gib(r["cache_bytes"]),
                r["source"],
            )
            for r in rows
        ],
    )


def print_known(out: Console, found: Mapping[str, Any]) -> None:
    """One thing in full: its own line, then the tables that its kind has."""
    about = found.get("summary") or found.get("architecture") or found.get("method", "")
    say(out, f"{found['name']} ({found['kind']}): {about}", style="bold", indent=2)
    for label, key in (
        ("written", "written"),
        ("method", "method"),
        ("survey", "survey"),
        ("source", "source"),
        ("notes", "notes"),
        ("caution", "caution"),
        ("drops", "drops"),
        ("date", "date"),
    ):
        value = found.get(key)
        if value and not (key == "method" and value == found.get("written")):
            say(out, f"{label + ':':9} {'; '.join(value) if isinstance(value, list) else value}", indent=10)
    if "row_addressable" in found:
        rows = (
            "a single row can be dropped"
            if found["row_addressable"]
            else "rows share scales: none can be dropped alone"
        )
        say(out, f"rows:     {rows}", indent=10)
    if found["kind"] == "device":
        _facts(out, found)
    elif found["kind"] == "model":
        _layers(out, found)
    else:
        _settings_and_parts(out, found)


def _facts(out: Console, found: Mapping[str, Any]) -> None:
    columns = (Column("what"), Column("value", right=True), Column("source", fold=True))
    table(out, columns, [(f["what"], f["value"], f["source"]) for f in found["facts"]])


def _layers(out: Console, found: Mapping[str, Any]) -> None:
    context = tokens(found["max_context"]) if found["max_context"] else "any"
    say(
        out,
        f"numbers:  {found['parameters']:,} parameters ({found['active_parameters']:,} active), hidden "
        f"{found['hidden_size']}, vocabulary {tokens(found['vocab_size'])}, context {context}, {found['dtype']}",
        indent=10,
    )
    columns = (
        Column("layers", fold=True),
        Column("kind"),
        Column("heads", right=True),
        Column("KV heads", right=True),
        Column("key dim", right=True),
        Column("value dim", right=True),
        Column("window", right=True),
        Column("state", right=True),
        Column("parameters", right=True),
    )
    table(
        out,
        columns,
        [
            (
                spans(g["layers"]),
                g["kind"],
                g.get("n_heads", ""),
                g.get("n_kv_heads", ""),
                g.get("k_dim", ""),
                g.get("v_dim", ""),
                g.get("window") or "",
                size(g["state_bytes"]) if g["state_bytes"] else "",
                f"{g['parameters']:,}",
            )
            for g in found["groups"]
        ],
    )
    out.print()
    for warning in found["warnings"]:
        say(out, f"note: {warning}", indent=6)


def _settings_and_parts(out: Console, found: Mapping[str, Any]) -> None:
    if found.get("settings"):
        settings = (Column("setting"), Column("default"), Column("takes", fold=True), Column("what", fold=True))
        table(out, settings, [(s["name"], s["default"] or "(needed)", _takes(s), s["what"]) for s in found["settings"]])
    if found.get("parts"):
        parts = (Column("part", fold=True), Column("what it does", fold=True), Column("source", fold=True))
        table(out, parts, [(p["part"], p["summary"], p["source"]) for p in found["parts"]])
    if found.get("runs_in"):
        places = (
            Column("part"),
            Column("runs in"),
            Column("how", fold=True),
            Column("differs", fold=True),
            Column("source", fold=True, optional=True),
        )
        table(
            out,
            places,
            [(r["part"], r["where"], r["how"], r["differs"], r["source"]) for r in found["runs_in"]],
            "elsewhere",
        )


def _takes(setting: Mapping[str, Any]) -> str:
    if setting["choices"]:
        return ", ".join(setting["choices"])
    low, high = setting["low"], setting["high"]
    if low is None and high is None:
        return str(setting["type"]).replace("Budget", "fraction or rows")
    return f"{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}"


def spans(indices: Sequence[int]) -> str:
    """`0-3, 5, 7-9`; evenly spaced ones as `0, 6, .. 54`."""
    steps = {b - a for a, b in pairwise(indices)}
    if len(indices) > 3 and len(steps) == 1 and 1 not in steps:
        return f"{indices[0]}, {indices[1]}, .. {indices[-1]}"
    runs = []
    for _, some in groupby(enumerate(indices), lambda p: p[1] - p[0]):
        run = [x for _, x in some]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)


def print_memory(out: Console, found: Memory) -> None:
    """An engine's allocation, cache by cache."""
    if found.refused:
        say(out, f"would not start: {found.refused}", style="bold red", indent=2)
    columns = (
        Column("cache", fold=True),
        Column("bytes", right=True),
        Column("size", right=True),
        Column("tokens", right=True),
        Column("layers", right=True),
        Column("keys", right=True, optional=True),
        Column("values", right=True, optional=True),
        Column("device", optional=True),
    )
    rows = [
        (
            c.name,
            tokens(c.bytes),
            mib(c.bytes),
            "" if c.tokens is None else tokens(c.tokens),
            "" if c.layers is None else c.layers,
            "" if c.k_bytes is None else mib(c.k_bytes),
            "" if c.v_bytes is None else mib(c.v_bytes),
            c.device or "",
        )
        for c in (*found.caches, *found.states)
    ]
    if rows:
        table(out, columns, rows, found.engine)
    out.print()
    for label, value, text in (
        ("KV cache", found.kv_bytes, mib),
        ("keys", found.k_bytes, mib),
        ("values", found.v_bytes, mib),
        ("recurrent state", found.state_bytes, mib),
        ("tokens", found.tokens, tokens),
        ("blocks", found.blocks, tokens),
        ("tokens a block", found.block_tokens, tokens),
        ("max concurrency", found.max_concurrency, "{:.2f}x".format),
    ):
        if value is not None:
            exact = f"  ({tokens(value)} bytes)" if text is mib else ""
            say(out, f"{label + ':':16} {text(value)}{exact}")
    for warning in found.warnings:
        say(out, f"note: {warning}", indent=6)


def mib(value: Any) -> str:
    """Bytes in MiB with two decimals, as engines' logs print them."""
    return f"{float(value) / 2**20:,.2f} MiB"
