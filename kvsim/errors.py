"""The one error that users see: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KvsimError(ValueError):
    """A question that cannot be answered as asked; its text is one line for a person."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or an empty string."""
    folded = {k.lower(): k for k in known}
    near = get_close_matches(str(name).lower()[:80], folded, n=1, cutoff=0.5)
    return f" (did you mean {folded[near[0]]!r}?)" if near else ""


def word(value: object, what: str) -> str:
    """Return `value` if it is a text; raise KvsimError naming `what` otherwise."""
    if not isinstance(value, str):
        raise KvsimError(f"{what} must be a text, got {shown(value)}")
    return value


def shown(value: object, limit: int = 60) -> str:
    """Quote a user's value in an error, shortened and without control characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
