"""What a prompt's tokens are: classes by their text, segments by their place; labels by which portions are chosen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvsim.errors import KvsimError

CLASSES: Mapping[str, str] = {
    "entity": "names (capitals that begin no sentence) and whatever holds a digit",
    "function": "the commonest words, which carry grammar: the, of, is, ...",
    "code": "identifiers with underscores, dots or calls, and operators and brackets",
    "separator": "punctuation, spaces and line breaks",
    "word": "every other word",
}
"""Token classes and what is in them."""
SEGMENTS = ("system", "documents", "question", "answer")
"""Segments of a request; documents may be told apart into start, middle and end (`thirds`)."""
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about all also an and any are as at be because been but by can could did do does each for from had has "
        "have he her his how i if in into is it its may me more most must my no not of on one only or other our out "
        "over she should so some such than that the their them then there these they this those to up was we were "
        "what when where which who will with would you your ",
    )
)
_PIECES = re.compile(
    r"(?P<number>\w*\d[\w.,:]*\w|\w*\d\w*)"
    r"|(?P<code>\w*_\w+|\w+_\w*|\w+(?:\.\w+)+|\w+(?=\()|[-+*/=<>|&^%$#@~\\{}\[\]()]{1,})"
    r"|(?P<word>[^\W\d_]+)|(?P<separator>[\W_])"
)
_SENTENCE_END = re.compile(r"(^|[.!?:\n]\W*)$")


def classify(tokens: Sequence[str]) -> list[str]:
    """The class of each token, from the texts of all tokens in order: a token has the class of the word it belongs to.

    A token that spans several is that of its first character that is no space.
    """
    text = "".join(tokens)
    kinds: list[str] = ["separator"] * len(text)
    for found in _PIECES.finditer(text):
        kinds[found.start() : found.end()] = [_kind(found, text)] * (found.end() - found.start())
    labels, at = [], 0
    for token in tokens:
        inside = next((i for i, c in enumerate(token) if not c.isspace()), 0)
        labels.append(kinds[at + inside] if token else "separator")
        at += len(token)
    return labels


def _kind(found: re.Match[str], text: str) -> str:
    group = found.lastgroup
    if group == "number":
        return "entity"
    if group != "word":
        return str(group)
    word = found.group()
    if word.lower() in FUNCTION_WORDS:
        return "function"
    begins = _SENTENCE_END.search(text[max(0, found.start() - 8) : found.start()]) is not None
    return "entity" if word[0].isupper() and not begins else "word"


def in_segments(segments: Iterable[tuple[str, int]]) -> list[str]:
    """A label for each token of consecutive (name, tokens) segments; KvsimError for a negative count."""
    labels: list[str] = []
    for name, tokens in segments:
        if tokens < 0:
            raise KvsimError(f"segment {name} has {tokens} tokens")
        labels += [name] * tokens
    return labels


def thirds(tokens: int, first: str = "start", middle: str = "middle", last: str = "end") -> list[str]:
    """Documents told apart by place: a quarter at either end, and what lies between."""
    ends = tokens // 4
    return in_segments(((first, ends), (middle, tokens - 2 * ends), (last, ends)))


def counted(labels: Iterable[str]) -> dict[str, int]:
    """How many tokens have each label, in the order of first appearance."""
    found: dict[str, int] = {}
    for label in labels:
        found[label] = found.get(label, 0) + 1
    return found
