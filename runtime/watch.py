"""A stopwatch inside a running model: exclusive seconds of attention, writing, policies and matrix products by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

import runtime.attention
import runtime.kernels
import runtime.layers
import runtime.prompt
from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.model import ModelSpec
from kvsim.parts import Place, Rows, TokenPolicy
from runtime.parts import PolicyTwin
from runtime.prompt import Incoming
from runtime.store import Store
from runtime.timing import clock, synchronize

REST = "norms, rotation, activation"
"""The line that takes what no other one does: small kernels, Python, the plain writing of rows."""
RUNTIME = ATTENTION, WRITE, SELECT, STEP = "attention", "write", "select", "step"
HOOKS: tuple[tuple[Any, str, str], ...] = (
    (runtime.layers, "attend", ATTENTION),
    (Incoming, "attend", ATTENTION),
    (runtime.prompt, "observe", SELECT),
    (Store, "append", WRITE),
    (Store, "settle", WRITE),
    (Store, "take_prompt", WRITE),
    (Store, "after_step", WRITE),
    (Store, "_ask", STEP),
    (Store, "_expire", STEP),
)
"""Where time is spent in the runtime, and what it counts as."""
POLICY_HOOKS = (("select", SELECT), ("merge", SELECT), ("start", SELECT), ("step", STEP), ("fold", STEP),
                ("attended", STEP), ("bias", STEP))


class Watch:
    """Seconds by name; what runs inside another watched piece counts for itself alone.

    eager: keep attention from compiled kernels. fused: whether one did the last step.
    """

    def __init__(self, device: torch.device, eager: bool = False) -> None:
        self.device, self.now, self.eager = device, clock(device), eager
        self.on, self.fused = True, False
        self.clear()

    def note_kernel(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        """The entry to compiled kernels, which notes whether one was taken, or keeps from it."""

        @wraps(decode)
        def noted(*args: Any, **kwargs: Any) -> Any:
            found = None if self.eager else decode(*args, **kwargs)
            self.fused = found is not None
            return found

        return noted

    def clear(self) -> None:
        """Forget everything."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []

    def wrap(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same function, its time added to `name`."""

        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return work(*args, **kwargs)
            synchronize(self.device)
            start = self.now()
            self.inside.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                synchronize(self.device)
                took = self.now() - start
                self.seconds[name] += took - self.inside.pop()
                if self.inside:
                    self.inside[-1] += took

        return timed


def _policy_classes(root: type) -> Iterator[type]:
    yield root
    for one in root.__subclasses__():
        yield from _policy_classes(one)


def _places() -> Iterator[tuple[Any, str, str]]:
    """(owner, attribute, name) of everything to be timed in the runtime."""
    for owner, attribute, name in HOOKS:
        if not hasattr(owner, attribute):
            raise KvsimError(f"the runtime has no {owner.__name__}.{attribute} to be timed: this release is broken")
        yield owner, attribute, name
    for one in dict.fromkeys(_policy_classes(PolicyTwin)):
        yield from ((one, attribute, name) for attribute, name in POLICY_HOOKS if attribute in vars(one))


@contextmanager
def watching(watch: Watch, hf_model: nn.Module | None = None, spec: ModelSpec | None = None) -> Iterator[Watch]:
    """Time the runtime's pieces, and the model's matrix products, while the block runs."""
    before = [(owner, attribute, vars(owner)[attribute], name) for owner, attribute, name in _places()]
    decode = runtime.kernels.decode
    entries = [where for where in (runtime.kernels, runtime.attention) if vars(where).get("decode") is decode]
    linear = list(_products(hf_model, spec)) if hf_model is not None and spec is not None else []
    try:
        for owner, attribute, work, name in before:
            setattr(owner, attribute, watch.wrap(work, name))
        for where in entries:
            vars(where)["decode"] = watch.note_kernel(decode)
        for module, name in linear:
            module.forward = watch.wrap(module.forward, name)  # type: ignore[method-assign]
        yield watch
    finally:
        for owner, attribute, work, _ in before:
            setattr(owner, attribute, work)
        for where in entries:
            vars(where)["decode"] = decode
        for module, _ in linear:
            del module.forward


def _products(hf_model: nn.Module, spec: ModelSpec) -> Iterator[tuple[nn.Module, str]]:
    """Modules that multiply by a weight matrix, and the predicted line of each: by name, else by shape."""
    matrices = {m.name: (m.out_features, m.in_features) for layer in spec.layers for m in layer.matrices}
    by_shape = {shape: name for name, shape in matrices.items()}
    head = hf_model.get_output_embeddings() if hasattr(hf_model, "get_output_embeddings") else None
    for path, module in hf_model.named_modules():
        weight = getattr(module, "weight", None)
        if module is head:
            yield module, "head"
        elif weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            name = path.rpartition(".")[2]
            found = name if name in matrices else by_shape.get(tuple(weight.shape))
            if found is not None:
                yield module, found


def _steps(policy: TokenPolicy) -> bool:
    """Whether a policy has work at each step that predictions know."""
    place = Place("k", 1, 64, 1, 16, layer=8, n_layers=16)
    return policy.drops == "rows" or bool(policy.step_work(Rows(64, 64, 64), place))


def lines_of(seconds: dict[str, float], method: Method, phase: str) -> dict[str, float]:
    """What was watched under the names of predicted lines; `REST` holds the plain writing of rows."""
    plain = all(chain.is_full for chain in (method.k, method.v))
    policy = method.tokens.name
    write = "compress" if phase == "prefill" else "compress and append"
    names = {
        WRITE: REST if plain else write,
        SELECT: f"{policy} selection",
        STEP: f"{policy} step",
    }
    if policy == "keep":
        names |= {SELECT: names[WRITE], STEP: names[WRITE]}
    elif plain and phase == "prefill":
        names[WRITE] = names[SELECT]
    elif phase == "decode" and not _steps(method.tokens):
        names[STEP] = REST
    found: dict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        found[names.get(name, name)] += value
    return dict(found)
