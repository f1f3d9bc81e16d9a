"""Portions: a method for each class or segment of tokens, what they hold to the byte, and budgets that share bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvsim.content import counted
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.layout import layer_keys, layer_layout
from kvsim.method import Method, parse_method
from kvsim.model import DTYPE_BITS, ModelSpec

REST, LATER = "*", "new"
"""Names of the portion of all labels that no other names, and of the tokens after the prompt."""


@dataclass(frozen=True)
class Portions:
    """Methods by label: `entity = int(bits=8) // function = topk(...) | int(bits=2) // * = full`.

    `*` is for every other label (default: full), `new` for tokens after the prompt (default: that of `*` without its
    policy). Raises KvsimError where a method cannot hold a portion: rows that leave while generating, merged rows,
    ragged heads, keys before the rotation, a basis of both sides, clauses for layers are not told apart and allowed.
    """

    methods: tuple[tuple[str, Method], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.methods]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None or not names:
            raise KvsimError(f"portion {shown(twice)} is given twice" if twice else "portions: give one at least")
        for name, method in self.methods:
            _check(name, method)

    def at(self, label: str) -> Method:
        """The method of a label."""
        known = dict(self.methods)
        if label == LATER and LATER not in known:
            rest = known.get(REST, parse_method("full"))
            return Method(k=rest.k, v=rest.v)
        return known.get(label) or known.get(REST) or parse_method("full")

    def check_labels(self, labels: Sequence[str]) -> None:
        """Raise KvsimError where a portion is named that no token has: a slip of the pen would change nothing."""
        have = set(labels)
        for name, _ in self.methods:
            if name not in have and name not in (REST, LATER):
                near = did_you_mean(name, have)
                raise KvsimError(f"portion {shown(name)}: no token has that label{near}; those here "
                                 f"are {', '.join(sorted(have))}")

    def cache_bytes(self, model: ModelSpec, requests: Sequence[Sequence[str]], new: int = 0, kv_dtype: str = "") -> int:
        """Bytes held after each request's labelled prompt and `new` tokens, exactly; model buffers once a method."""
        bits = DTYPE_BITS[kv_dtype or model.dtype]
        total, shared = 0, {}
        for labels in requests:
            counts = [(self.at(n), c, 0) for n, c in counted(labels).items()] + [(self.at(LATER), 0, new)]
            for method, prompt, later in counts:
                own, models = _bytes(model, method, prompt, later, bits)
                total += own
                shared[method] = models
        return total + sum(shared.values())

    def __str__(self) -> str:
        return " // ".join(f"{name} = {method}" for name, method in self.methods)


def _check(name: str, method: Method) -> None:
    for each in (method, *(c.method for c in method.clauses)):
        tokens = each.tokens
        if tokens.name != "keep" and (tokens.drops != "prefill" or tokens.merges or tokens.ragged or name == LATER):
            raise KvsimError(f"portion {name}: {tokens.name} cannot choose inside a portion; use a prompt policy with "
                             f"one number of rows for all heads (topk, snapkv, pyramid), and none for new tokens")
        if each.k.before_rope or each.k.basis.both_sides or each.protocol != "after_prefill":
            raise KvsimError(f"portion {name}: {each} needs consecutive positions or its own attention; use rope=post, "
                             "one basis a side and the protocol after_prefill")


def parse_portions(text: str | Portions) -> Portions:
    """Read the written form; KvsimError with what is wrong."""
    if isinstance(text, Portions):
        return text
    found = []
    for part in text.split("//"):
        names, equals, method = part.partition("=")
        if not equals or not names.strip():
            raise KvsimError(f"portions: {shown(part.strip())} is not NAME = METHOD; write entity = int(bits=8) // * = "
                             "int(bits=4)")
        found += [(name.strip(), parse_method(method.strip())) for name in names.split(",")]
    return Portions(tuple(found))


def _bytes(model: ModelSpec, method: Method, prompt: int, new: int, bits: int) -> tuple[int, int]:
    """(bytes of one sequence, bytes of the model) of all layers."""
    own = shared = 0
    for (layer, each, _), indices in layer_keys(model, method).items():
        layout = layer_layout(layer, each, prompt, new, bits, indices[0], model.n_layers)
        for b in layout.buffers if layout else ():
            size = len(indices) * int(b.bytes)
            own, shared = (own, shared + size) if b.per_model else (own + size, shared)
    return own, shared


def shared_out(weights: Mapping[str, float], make: Callable[[Mapping[str, float]], Portions], model: ModelSpec,
               labels: Sequence[str], limit: int, new: int = 0, kv_dtype: str = "") -> Portions:
    """The largest budgets min(1, x * weight) of each label, in that proportion, whose bytes stay within `limit`.

    make: portions from budgets in (0, 1]. Bisection over x to one part in 2^20; bytes rise with budgets. Raises
    KvsimError where even the least does not fit.
    """
    if any(w <= 0 for w in weights.values()):
        raise KvsimError("portions: weights of budgets are above 0")

    def at(x: float) -> Portions:
        return make({name: max(1e-6, min(1.0, x * w)) for name, w in weights.items()})

    low, high = 0.0, 1.0 / min(weights.values())
    if at(low).cache_bytes(model, [labels], new, kv_dtype) > limit:
        raise KvsimError(f"portions: {limit} bytes are too few for {len(labels)} tokens even with one row each")
    if at(high).cache_bytes(model, [labels], new, kv_dtype) <= limit:
        return at(high)
    for _ in range(20):
        middle = (low + high) / 2
        fits = at(middle).cache_bytes(model, [labels], new, kv_dtype) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return at(low)
