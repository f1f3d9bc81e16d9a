"""Random damage to real configs: each either loads or is refused, never anything else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.configs import load_model
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

DATA = Path(__file__).parents[1] / "data" / "configs"
TRUTH = json.loads((DATA / "truth.json").read_text(encoding="utf-8"))["models"]
CONFIGS = [row["config"] for row in TRUTH]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from([10**6, 10**9, 10**30, 2**31, -(10**9)]),
    st.sampled_from([0.0, 1.5, 4096.0, float("nan"), float("inf")]), st.text(max_size=6),
    st.lists(st.one_of(st.integers(-2, 3), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything that can be damaged."""
    if isinstance(node, dict):
        return [p for key, value in node.items() for p in ((*path, key), *places(value, (*path, key)))]
    if isinstance(node, list):
        return [(*path, index) for index in range(min(len(node), 3))]
    return []


def load_or_refuse(config: dict[str, Any]) -> ModelSpec | None:
    try:
        model = load_model(config)
    except KvsimError:
        return None
    assert model.cache_bytes(131072) >= 0
    assert model.active_parameters <= model.parameters
    assert model.state_bytes() >= 0
    return model


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_configs_load_or_are_refused(data: st.DataObject) -> None:
    config = copy.deepcopy(data.draw(st.sampled_from(CONFIGS)))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(config) or [("model_type",)]))
        node = config
        for key in path[:-1]:
            node = node[key]
        if isinstance(node, dict) and data.draw(st.booleans()):
            node.pop(path[-1], None)
        else:
            node[path[-1]] = data.draw(JUNK)
    load_or_refuse(config)


@pytest.mark.parametrize("row", TRUTH, ids=lambda row: row["name"])
def test_each_field_missing_or_null(row: dict[str, Any]) -> None:
    for path in places(row["config"]):
        for missing in (True, False):
            config = copy.deepcopy(row["config"])
            node = config
            for key in path[:-1]:
                node = node[key]
            if missing:
                del node[path[-1]]
            else:
                node[path[-1]] = None
            load_or_refuse(config)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=20), JUNK, max_size=8))
def test_arbitrary_objects_are_refused(config: dict[str, Any]) -> None:
    assert load_or_refuse(config) is None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CONFIGS), st.integers(0, 200_000), st.integers(1, 64))
def test_caches_grow_with_tokens_and_are_affine_in_batch(config: dict[str, Any], tokens: int, batch: int) -> None:
    model = load_model(config)
    one = model.cache_bytes(tokens)
    assert model.cache_bytes(tokens + 1) >= one
    assert model.cache_bytes(tokens, batch=batch) == batch * one
    assert model.cache_bytes(tokens, bits=32) == 2 * one
