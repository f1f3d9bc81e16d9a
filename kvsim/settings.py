"""Settings of a part: how they are declared, checked and written; budgets in rows or fractions."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.workload import Count

MAX_SETTING = 2**24
PLAIN = re.compile(r"[A-Za-z_][\w.\-]*")


Budget = int | float
_SELF = TypeVar("_SELF", bound="Part")


def setting(
    default: Any = MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    always: bool = False,
    what: str = "",
) -> Any:
    """Declare a setting of a part: its default, the range or choices it accepts, and what it means.

    `always` writes it even at its default: the figure that people look for in a method's name (bits, rank, budget).
    """
    facts = MappingProxyType({"low": low, "high": high, "choices": choices, "always": always, "what": what})
    return field(metadata=facts) if default is MISSING else field(default=default, metadata=facts)


@dataclass(frozen=True)
class Part:
    """One choice of a method. Subclasses declare settings as dataclass fields and their facts as class variables."""

    name: ClassVar[str] = ""
    role: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    survey: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for spec in self.settings():
            object.__setattr__(self, spec.name, _same_form(spec, getattr(self, spec.name)))
            _check(self, spec, getattr(self, spec.name))
        self.check()

    @property
    def caution(self) -> str:
        """Why `fit` never chooses this part unless it was asked for by name; empty where nothing speaks against it."""
        return ""

    def check(self) -> None:
        """Raise KvsimError where settings contradict each other."""

    @classmethod
    def settings(cls) -> tuple[Field[Any], ...]:
        """Fields in declaration order, the part's own before inherited ones."""
        depth = {
            name: i for i, base in enumerate(reversed(cls.__mro__)) for name in vars(base).get("__annotations__", {})
        }
        return tuple(sorted(fields(cls), key=lambda f: -depth[f.name]))

    def with_settings(self: _SELF, **changes: Any) -> _SELF:
        """The same part with other settings, checked again."""
        return replace(self, **changes)

    def __str__(self) -> str:
        pairs = [(f, getattr(self, f.name)) for f in self.settings()]
        told = [f"{f.name}={written(v)}" for f, v in pairs if f.metadata.get("always") or not _same(v, f.default)]
        return f"{self.name}({','.join(told)})" if told else self.name


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def written(value: Any) -> str:
    """A setting's value in the written form."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "(" + ",".join(written(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    text = str(value)
    plain = not isinstance(value, str) or PLAIN.fullmatch(text)
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _same_form(spec: Field[Any], value: Any) -> Any:
    """One form for one meaning: a whole number given for a float setting, and `none` where it is one of the choices."""
    if value is None and "none" in (spec.metadata.get("choices") or ()):
        return "none"
    return float(value) if spec.type == "float" and type(value) is int and abs(value) <= MAX_SETTING else value


def _check(part: Part, spec: Field[Any], value: Any) -> None:
    """Refuse a setting of the wrong type, outside its range or not among its choices."""
    low, high, choices = (spec.metadata.get(k) for k in ("low", "high", "choices"))
    where = f"{part.name}: {spec.name}"
    if choices:
        if value not in choices or isinstance(value, bool):
            hint = did_you_mean(str(value), choices)
            raise KvsimError(f"{where} is one of {', '.join(choices)}, got {shown(value)}{hint}")
        return
    kinds = str(spec.type)
    if value is None and "None" in kinds:
        return
    for one in value if isinstance(value, tuple) else (value,):
        _check_number(where, kinds, one, low, high)
    if isinstance(value, tuple) != kinds.startswith("tuple") or value == ():
        raise KvsimError(
            f"{where} takes {'a list like (2,4,8)' if kinds.startswith('tuple') else 'one value'}, got {shown(value)}"
        )


def _check_number(where: str, kinds: str, value: Any, low: float | None, high: float | None) -> None:
    if "bool" in kinds:
        if not isinstance(value, bool):
            raise KvsimError(f"{where} is true or false, got {shown(value)}")
        return
    if "str" in kinds:
        if not isinstance(value, str) or not value.strip() or len(value) > 4096:
            raise KvsimError(f"{where} is a name, got {shown(value)}")
        return
    if kinds.startswith("Budget"):
        check_budget(where, value)
        return
    number = isinstance(value, int) or (isinstance(value, float) and "float" in kinds)
    if not number or isinstance(value, bool) or not np.isfinite(value):
        raise KvsimError(f"{where} is a {'number' if 'float' in kinds else 'whole number'}, got {shown(value)}")
    top = MAX_SETTING if high is None else high
    if value > top or (low is not None and value < low):
        raise KvsimError(
            f"{where} must be {'at least ' + str(low) + ' and ' if low is not None else ''}at most {top}, "
            f"got {shown(value)}"
        )


def check_budget(where: str, value: Any) -> None:
    """A budget is a fraction (float in (0, 1]) or a number of rows (int of 1 or more)."""
    if isinstance(value, float) and 0 < value <= 1:
        return
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SETTING:
        return
    raise KvsimError(f"{where} is a fraction in (0, 1] such as 0.25, or whole rows such as 1024, got {shown(value)}")


def budget_rows(budget: Budget, tokens: Count) -> Count:
    """Rows that a budget grants of `tokens`: ceil(b * tokens) for a fraction, min(tokens, b) for rows.

    The fraction is taken as the decimal that was written (0.2 of 10 rows is 2, whatever 0.2 is in binary).
    """
    if isinstance(budget, int):
        return np.minimum(tokens, budget) if isinstance(tokens, np.ndarray) else min(tokens, budget)
    from fractions import Fraction

    share = Fraction(str(budget))
    if share.denominator > 10**6:
        share = max(share.limit_denominator(10**6), Fraction(1, 10**6))
    return -(-tokens * share.numerator // share.denominator)
