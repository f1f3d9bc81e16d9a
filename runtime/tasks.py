"""Retrieval tasks, made up and exact: a needle at a depth, a value by its key, a variable through assignments.

The context is the prompt that methods compress; the question comes after it, so no method knows what will be asked.
An answer is right where every one of its tokens is the likeliest, which is what greedy decoding would have written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.method import Method, parse_method
from runtime.cache import CompressedCache
from runtime.quality_forced import Forced, take_prompt
from runtime.quality_reference import Reference, handed, reference, watch
from runtime.quality_run import Sizes
from runtime.quality_subjects import Subject, Text

METHODS = (
    "full",
    "int8",
    "int4",
    "kivi-4",
    "kivi-2",
    "turboquant-4",
    "h2o(budget=0.5)",
    "h2o(budget=0.25)",
    "snapkv(budget=0.5)",
    "snapkv(budget=0.25)",
    "window(sinks=4,recent=252)",
    "pages(top=128)",
    "svd(rank=32)",
)
SOLVED = 0.5
"""Share of cases that the uncompressed model must solve for a task to say anything about methods."""
WORDS = (
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "hazel",
    "ivory",
    "jasper",
    "lotus",
    "maple",
    "olive",
    "pearl",
    "quartz",
    "raven",
    "slate",
    "topaz",
    "umber",
    "violet",
)


@dataclass(frozen=True)
class Item:
    """One case: a context to be compressed, a question after it, and the only right answer."""

    context: str
    question: str
    answer: str


def needle(draw: random.Random, filler: Sequence[str], depth: float) -> Item:
    """A number in a sentence of its own, at a share `depth` of other text."""
    name, number = draw.choice(WORDS), str(draw.randint(1000, 9999))
    at = round(depth * len(filler))
    sentence = f"The secret number of {name} is {number}."
    return Item(" ".join([*filler[:at], sentence, *filler[at:]]), f"\nThe secret number of {name} is", f" {number}")


def key_value(draw: random.Random, filler: Sequence[str], depth: float) -> Item:
    """Three words and their numbers in a row, after other text; one is asked for. More are beyond small models."""
    words = draw.sample(WORDS, 3)
    numbers = [str(draw.randint(100, 999)) for _ in words]
    at = min(len(words) - 1, int(depth * len(words)))
    pairs = [f"The number of {w} is {n}." for w, n in zip(words, numbers, strict=True)]
    return Item("\n".join([" ".join(filler), *pairs]), f"\nThe number of {words[at]} is", f" {numbers[at]}")


def variables(draw: random.Random, filler: Sequence[str], depth: float) -> Item:
    """A number handed on from one name to another, with other text between; the question names both."""
    first, second, other = draw.sample(WORDS, 3)
    number, wrong = draw.sample(range(100, 1000), 2)
    steps = [
        f"The value of {first} is {number}.",
        f"The value of {other} is {wrong}.",
        f"The value of {second} is the value of {first}.",
    ]
    at = sorted(round(x * len(filler)) for x in (depth, (depth + 0.2) % 1.0, (depth + 0.4) % 1.0))
    text = list(filler)
    for place, step in sorted(zip(at, steps, strict=True), reverse=True):
        text.insert(place, step)
    asked = f"\nThe value of {second} is the value of {first}, so the value of {second} is"
    return Item(" ".join(text), asked, f" {number}")


TASKS: dict[str, Callable[[random.Random, Sequence[str], float], Item]] = {
    "needle": needle,
    "key-value": key_value,
    "variables": variables,
}
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Prepared:
    """A case as the uncompressed model saw it, and whether it solved it."""

    task: str
    depth: float
    found: Reference
    answer: int
    solved: bool


def sentences(text: Text, tokenizer: Any, tokens: int) -> list[str]:
    """Real sentences of about so many tokens, without digits: nothing in them looks like an answer."""
    whole = " ".join(tokenizer.decode(text.ids[: 12 * tokens].tolist()).split())
    found, held = [], 0
    for piece in whole.split(". "):
        if piece and not any(c.isdigit() for c in piece) and 5 < len(piece.split()) < 60:
            found.append(piece + ".")
            held += len(tokenizer(piece, add_special_tokens=False)["input_ids"]) + 1
            if held >= tokens:
                return found
    raise KvsimError(f"{text.name} has too few plain sentences for contexts of {tokens} tokens; give a longer text")


def prepare(subject: Subject, item: Item, task: str, depth: float, start: int | None = None) -> Prepared:
    """Run the uncompressed model on a case; the question's first token starts what is scored."""
    ids = [
        subject.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (item.context, item.question, item.answer)
    ]
    ids[0] = [start, *ids[0]] if start is not None else ids[0]
    tokens = torch.tensor([[*ids[0], *ids[1], *ids[2]]])
    found = reference(subject.model, tokens, len(ids[0]))
    count = len(ids[2])
    return Prepared(task, depth, found, count, right(found.logits, found.targets, count))


def right(logits: Tensor, targets: Tensor, answer: int) -> bool:
    """Whether each of the last `answer` targets [1, m] is its logits' [1, m, vocabulary] likeliest token."""
    return bool((logits[:, -answer:].argmax(-1) == targets[:, -answer:]).all())


def solves(subject: Subject, case: Prepared, method: Method, seed: int = 0) -> bool:
    """Whether the model still answers with the context compressed."""
    with CompressedCache(method, subject.model, seed=seed) as cache, torch.no_grad():
        take_prompt(cache, case.found)
        watch(cache, Forced)
        logits = subject.model(case.found.scored, **handed(subject.model, cache)).logits
    return right(logits, case.found.targets, case.answer)


def report(subject: Subject, text: Text, sizes: Sizes, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """Share of cases solved by each method, of those that the uncompressed model solves; and how many those are."""
    filler = sentences(text, subject.tokenizer, sizes.prompt)
    draw = random.Random(sizes.seed)
    cases = [
        prepare(subject, make(draw, filler, depth), name, depth, text.start)
        for name, make in TASKS.items()
        for depth in DEPTHS
        for _ in range(max(1, sizes.segments // 4))
    ]
    full = {n: _share([c.solved for c in cases if c.task == n]) for n in TASKS}
    solved = [c for c in cases if c.solved]
    rows = []
    for method in [parse_method(m) for m in methods or METHODS]:
        held = [(c, solves(subject, c, method, sizes.seed)) for c in solved]
        row: dict[str, Any] = {"method": str(method)}
        row |= {n: _share([ok for c, ok in held if c.task == n]) for n in TASKS if full[n]["share"] >= SOLVED}
        row["by_depth"] = {str(d): _share([ok for c, ok in held if c.depth == d])["share"] for d in DEPTHS}
        rows.append(row)
    return {
        "model": subject.name,
        "model_hash": subject.hash,
        "context_tokens": sizes.prompt,
        "seed": sizes.seed,
        "full": full,
        "methods": rows,
        "not_solved": [n for n in TASKS if full[n]["share"] < SOLVED],
    }


def _share(outcomes: list[bool]) -> dict[str, Any]:
    return {"share": sum(outcomes) / len(outcomes) if outcomes else 0.0, "of": len(outcomes)}


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table."""
    out = [
        f"{found['model']}, contexts of about {found['context_tokens']} tokens, the question comes after compression"
    ]
    for name, full in found["full"].items():
        useless = f": below {SOLVED:.0%}, so nothing is said of methods" if name in found["not_solved"] else ""
        out.append(f"the uncompressed model solves {full['share']:.0%} of {full['of']} {name}{useless}")
    tasks = [n for n in TASKS if n not in found["not_solved"]]
    out.append(
        f"{'method':40} "
        + " ".join(f"{n:>10}" for n in tasks)
        + "   needle etc. by depth "
        + " ".join(map(str, DEPTHS))
    )
    for row in found["methods"]:
        cells = " ".join(f"{row[n]['share']:10.0%}" for n in tasks)
        out.append(f"{row['method'][:40]:40} {cells}   " + " ".join(f"{x:.0%}" for x in row["by_depth"].values()))
    return out
