"""Task presets (survey 7.1): which part of a request a task leans on, as weights of budgets by segment or class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvsim.content import classify, in_segments, thirds
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.method import parse_method
from kvsim.model import ModelSpec
from kvsim.portions import LATER, Portions, shared_out

RANKED = "topk(budget={budget:.6f},score={score},recent=0,sinks=0,window={window})"
"""How rows are chosen inside a portion."""


@dataclass(frozen=True)
class Task:
    """Weights of budgets by label, the labels' kind, and the score that ranks rows inside a portion."""

    name: str
    summary: str
    by: str
    weights: Mapping[str, float]
    score: str = "window"


TASKS: Mapping[str, Task] = {
    t.name: t
    for t in (
        Task("summarisation", "both ends of the documents count (survey 7.1)", "place",
             {"system": 4, "start": 3, "middle": 1, "end": 3, "question": 4}),
        Task("retrieval", "the middle counts as much as the ends do (survey 7.1)", "place",
             {"system": 4, "start": 1, "middle": 2, "end": 1, "question": 4}),
        Task("facts", "names and numbers stay, function words and separators go first", "class",
             {"entity": 8, "code": 2, "word": 2, "function": 1, "separator": 1}),
        Task("coding", "identifiers, operators and line breaks stay", "class",
             {"entity": 2, "code": 4, "word": 2, "function": 1, "separator": 2}),
    )
}


def task(name: str) -> Task:
    """A preset by name; KvsimError with the nearest."""
    if name not in TASKS:
        raise KvsimError(f"task {shown(name)} is not known{did_you_mean(name, TASKS)}; the tasks: {', '.join(TASKS)}")
    return TASKS[name]


def labels_for(preset: Task, tokens: list[str], system: int = 0, question: int = 0) -> list[str]:
    """Labels of a prompt's tokens (their texts): classes, or segments with the documents in three."""
    if preset.by == "class":
        return classify(tokens)
    documents = len(tokens) - system - question
    if documents < 0:
        raise KvsimError(f"task {preset.name}: {system} + {question} tokens of system prompt and question exceed "
                         f"{len(tokens)}")
    return [*in_segments((("system", system),)), *thirds(documents), *in_segments((("question", question),))]


def portions_for(preset: Task, labels: list[str], model: ModelSpec, limit: int, chain: str = "full", new: int = 0,
                 window: int = 32, recent: int = 32, kv_dtype: str = "") -> tuple[Portions, list[str]]:
    """Budgets in the task's proportion that hold at most `limit` bytes, and the labels with the newest rows apart.

    chain: the format of all portions. The newest `recent` tokens are a portion of their own (`recent`), kept whole.
    """
    apart = [*labels[: max(0, len(labels) - recent)], *["recent"] * min(recent, len(labels))]
    present = {n: preset.weights.get(n, 1.0) for n in dict.fromkeys(apart) if n != "recent"}

    def make(budgets: Mapping[str, float]) -> Portions:
        policy = {n: RANKED.format(budget=b, score=preset.score, window=window) for n, b in budgets.items()}
        ranked = [(n, parse_method(f"{p} | {chain}" if budgets[n] < 1 else chain)) for n, p in policy.items()]
        return Portions((*ranked, ("recent", parse_method(chain)), (LATER, parse_method(chain))))

    return shared_out(present, make, model, apart, limit, new, kv_dtype), apart
