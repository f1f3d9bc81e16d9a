"""Measured results of the survey's experiments (4.2, 7.1, 7.2), as shipped, and as tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError

FOLDER = Path(__file__).parent / "data" / "survey"


def shipped(name: str) -> dict[str, Any]:
    """The shipped result of an experiment; KvsimError where this release has none."""
    file = FOLDER / f"{name}.json"
    if not file.is_file():
        raise KvsimError(f"{name}: no measured result is shipped; --measure measures here")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def lines(found: Mapping[str, Any]) -> list[str]:
    """A result as plain text: what it was measured on, then its tables."""
    return [heading(found), *TABLES[found["kind"]](found)]


def heading(found: Mapping[str, Any]) -> str:
    """Model, text, seed and date in words."""
    text = f" on {found['text']} ({found['text_hash']})" if "text" in found else ""
    return f"{found['model']} ({found['model_hash']}){text}, seed {found['seed']}, {found['machine']}, {found['date']}"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell: text to the left, numbers to the right."""
    cells = [[_cell(x) for x in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(heads), *cells]) for i in range(len(heads))]
    right = [bool(rows) and all(isinstance(r[i], int | float) or r[i] is None for r in rows) for i in range(len(heads))]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in [list(heads), *cells]
    ]


def _cell(x: object) -> str:
    if x is None:
        return ""
    return f"{x:,}" if isinstance(x, int) else f"{x:.3g}" if isinstance(x, float) else str(x)


def importance_lines(found: Mapping[str, Any]) -> list[str]:
    """Scores by loss, those of the prompt first."""
    heads = ("when", "score", "needs", "own bytes", "GFLOP", "ms predicted", "ms measured", "backward s", "KL", "95%",
             "top-1")
    rows = []
    for when in ("prompt", "running"):
        step = "step_" if when == "running" else ""
        for r in sorted((r for r in found["rows"] if r["when"] == when), key=lambda r: r["kl"]):
            rows.append((
                when, r["score"], "+".join(r["needs"]), r["own_bytes"], r[f"{step}predicted_flops"] / 1e9,
                r[f"{step}predicted_seconds"] * 1e3, r.get(f"{step}measured_seconds", 0.0) * 1e3,
                r.get("backward_seconds") or None, r["kl"], f"{r['kl_low']:.2g}-{r['kl_high']:.2g}", r["top1"],
            ))
    exact = sum(r["cache_bytes"] == r["held_bytes"] for r in found["rows"])
    return [
        f"{found['budget']:.0%} of {found['prompt']} rows, {found['segments']} pieces, {found['scored']} tokens scored "
        f"after each; cost of ranking one prompt (prompt) or of one step (running) in all layers on {found['device']}",
        *table(heads, rows),
        f"bytes predicted and held agree exactly in {exact} of {len(found['rows'])}",
    ]


def adapt_lines(found: Mapping[str, Any]) -> list[str]:
    """By limit: fixed methods and those that adapt, text and retrieval apart; then the controller."""
    out = [f"{found['requests']} requests; learned weights of classes: "
           + ", ".join(f"{k} {v:.2g}" for k, v in found["class_weights"].items())]
    for limit in ("rows", "bits"):
        own = [r for r in found["rows"] if r["level"] == limit]
        out += ["", {"rows": "a quarter of the rows, in full precision", "bits": "about 4 bits a value"}[limit]]
        out += table(ADAPTED, adapted(own))
        out += step_table(own, ("way", "method"))
    control = found["controller"]
    out += ["", f"the controller, fitted on {control['fitted_on']} requests, run on {control['run_on']} others, at the "
            "bytes of each fixed method"]
    heads = ("fixed method", "KL", "KB", "right", "controller: KL", "KB", "right", "of", "uses")
    out += table(heads, [
        (r["method"], r["fixed"]["kl"], r["fixed"]["bytes"] // 1000, r["fixed"]["right"], r["controlled"]["kl"],
         r["controlled"]["bytes"] // 1000, r["controlled"]["right"], r["fixed"]["asked"], len(r["used"]))
        for r in control["equal_bytes"]
    ])
    free, fits = control["equal_memory"], [r for r in control["equal_bytes"] if r["fits"]]
    best = min(fits, key=lambda r: r["fixed"]["kl"], default=None)
    beside = f"the best fixed method that always fits, {best['method']}: {best['fixed']['kl']:.3g}" if best else "none"
    return [*out, f"with {control['free_bytes'] // 1000:,} KB a request: KL {free['kl']:.3g}, {free['right']} of "
            f"{free['asked']} right, {free['switches']} switches ({free['switches_without_patience']} if hasty); "
            f"{beside}"]


ADAPTED = ("way", "method", "KB a request", "KL on text", "KL on tasks", "answers right", "of")
"""Columns of `adapted`."""


def adapted(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """(way, method, KB a request, KL on text, KL on tasks, right, asked) of each method, least KL on text first."""
    found = []
    for way, method in dict.fromkeys((r["way"], r["method"]) for r in rows):
        own = [r for r in rows if r["method"] == method]
        by = [[r["kl"] for r in own if (r["kind"] == "text") == text] for text in (True, False)]
        asked = [r["right"] for r in own if r["right"] is not None]
        kl = [sum(x) / len(x) if x else None for x in by]
        found.append((way, method, sum(r["bytes"] for r in own) // len(own) // 1000, *kl, sum(asked), len(asked)))
    return sorted(found, key=lambda r: r[3] if r[3] is not None else 0.0)


STEP = ("ms a step, predicted", "90%", "measured", "of that in the cache, predicted", "90%", "measured")
"""Columns of `step_figures`."""


def step_figures(rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Milliseconds of a decode step, means over rows: predicted, interval, measured; then the cache's part alike."""
    found: list[Any] = []
    for what in ("step", "cache"):
        said, low, high, seen = (sum(r[f"{what}_{k}"] for r in rows) / len(rows) * 1e3
                                 for k in ("predicted_seconds", "low", "high", "measured_seconds"))
        found += [said, f"{low:.3g}-{high:.3g}", seen]
    return tuple(found)


def step_table(rows: Sequence[Mapping[str, Any]], by: tuple[str, ...]) -> list[str]:
    """A table of steps by those fields, and how many measured caches lie in their interval; none where not timed."""
    timed = [r for r in rows if "step_measured_seconds" in r]
    if not timed:
        return []
    kinds = dict.fromkeys(tuple(r[k] for k in by) for r in timed)
    told = [(*kind, *step_figures([r for r in timed if tuple(r[k] for k in by) == kind])) for kind in kinds]
    inside = [sum(r[f"{what}_low"] <= r[f"{what}_measured_seconds"] <= r[f"{what}_high"] for r in timed)
              for what in ("step", "cache")]
    return ["", *table((*by, *STEP), told), f"measured inside the 90% interval: {inside[0]} of {len(timed)} steps, "
            f"{inside[1]} of {len(timed)} of the cache's parts"]


def decision_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of decisions by way and share: predicted, interval, measured; none where not timed."""
    timed = [r for r in rows if "decision_measured_seconds" in r]
    if not timed:
        return []
    told = [(r["text"], r["share"], r["way"], r["decision_predicted_seconds"] * 1e3,
             f"{r['decision_low'] * 1e3:.3g}-{r['decision_high'] * 1e3:.3g}", r["decision_measured_seconds"] * 1e3)
            for r in timed]
    return ["", *table(("text", "share", "ranks", "ms a decision, predicted", "90%", "measured"), told)]


def ranks_lines(found: Mapping[str, Any]) -> list[str]:
    """Ways to decide ranks by text and share, then the learned ones."""
    heads = ("text", "share", "ranks", "KL", "95%", "top-1", "MB", "MB at most", "limit", "mean k", "mean v")
    rows = [
        (r["text"], r["share"], r["way"], r["kl"], f"{r['kl_low']:.2g}-{r['kl_high']:.2g}", r["top1"],
         r["bytes"] / 1e6, r["most_bytes"] / 1e6, r["limit"] / 1e6, r["rank_k"], r["rank_v"])
        for r in found["rows"]
    ]
    learned = found["learned"]
    exact = sum(r["bytes"] == r["predicted"] for r in found["rows"])
    return [
        f"{found['segments']} x {found['prompt']} + {found['scored']} tokens, decided every {found['every']} rows",
        *table(heads, rows), f"bytes predicted from the ranks and held agree exactly in {exact} of {len(rows)}",
        *step_table(found["rows"], ("text", "share", "way")), *decision_lines(found["rows"]), "",
        f"mean rank {learned['rank']}, {learned['directions']:,} directions; the network learned from "
        f"{learned['texts']} other texts, loss {learned['first_loss']:.3g} to {learned['last_loss']:.3g}",
        *table(("ranks", "energy lost", "KL", "top-1", "bytes"),
               [(r["ranks"], r["energy_lost"], r["kl"], r["top1"], r["bytes"]) for r in learned["rows"]]),
    ]


TABLES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "importance": importance_lines, "adapt": adapt_lines, "ranks": ranks_lines,
}
"""How each kind of result is told."""
