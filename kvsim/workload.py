"""What is asked of the server: how many sequences, how long a prompt, how many new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import KvsimError, shown

Count = int | NDArray[np.int64]
"""A whole number, or an array of them that broadcasts against the others."""

MAX_COUNT = 2**40
"""Sizes above this are refused: no product of them with a model's dims then leaves int64 or float64's exact range."""


def whole(value: Any, what: str, low: int = 0, high: int = MAX_COUNT) -> Count:
    """Return `value` as an int or int64 array in [low, high]; raise KvsimError naming `what` otherwise."""
    array = np.asarray(value)
    if array.dtype == bool or array.dtype.kind not in "iuf":
        raise KvsimError(f"{what} must be a whole number, got {shown(value)}")
    if array.dtype.kind == "f" and (not np.all(np.isfinite(array)) or np.any(array != np.floor(array))):
        raise KvsimError(f"{what} must be a whole number, got {shown(value)}")
    if array.size and (array.min() < low or array.max() > high):
        raise KvsimError(f"{what} must lie between {low} and {high}, got {shown(value)}")
    if array.ndim == 0:
        return int(array)
    result: NDArray[np.int64] = array.astype(np.int64)
    return result


def one_whole(value: Any, what: str, low: int = 0, high: int = MAX_COUNT) -> int:
    """`whole` for what is a single number; raise KvsimError for arrays."""
    found = whole(value, what, low, high)
    if not isinstance(found, int):
        raise KvsimError(f"{what} must be one whole number, got {shown(value)}")
    return found


@dataclass(frozen=True, eq=False)
class Workload:
    """Sequences in flight and their lengths.

    Args:
        batch: sequences served together, 1 or more.
        prompt_tokens: tokens of each prompt (T), 0 or more.
        new_tokens: tokens generated after it (K), 0 or more; counts are taken at N = T + K.

    Arrays broadcast against each other. Raises KvsimError on anything but whole numbers in range.
    """

    batch: Count = 1
    prompt_tokens: Count = 1
    new_tokens: Count = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", whole(self.batch, "batch", low=1))
        object.__setattr__(self, "prompt_tokens", whole(self.prompt_tokens, "prompt tokens"))
        object.__setattr__(self, "new_tokens", whole(self.new_tokens, "new tokens"))
        for name in ("batch", "prompt_tokens", "new_tokens"):
            if not np.size(getattr(self, name)):
                raise KvsimError(f"{name.replace('_', ' ')} must not be empty")
        try:
            np.broadcast_shapes(*(np.shape(x) for x in (self.batch, self.prompt_tokens, self.new_tokens)))
        except ValueError:
            raise KvsimError("batch, prompt_tokens and new_tokens have shapes that do not broadcast") from None

    @property
    def tokens(self) -> Count:
        """N = T + K, the tokens whose rows the cache has seen at the end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """The broadcast shape; () when everything is a single number."""
        return np.broadcast_shapes(*(np.shape(x) for x in (self.batch, self.prompt_tokens, self.new_tokens)))
