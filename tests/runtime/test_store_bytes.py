"""Bytes of a bare layer, buffer by buffer, live and allocated: every part, every pair of parts, at awkward lengths."""

import gc
from itertools import accumulate

import pytest
import torch
from rows import Shape, Stream, composes, differences, held, layer_of
from variants import of_role, pairs, singles, triples

from kvsim.errors import KvsimError
from kvsim.parts import parts
from runtime.parts import twins

AWKWARD = (0, 1, 7, 8, 9, 15, 16, 17)
"""Around the groups of 8 and the tails of 16 of the variants."""


def check(text, shape, prompt, steps, batch=1, dtype=torch.float32):
    """Feed a prompt and steps of several tokens; the bytes must be as predicted after each."""
    try:
        layer = layer_of(text, shape, dtype, prompt_tokens=sum(prompt))
    except KvsimError as error:
        pytest.skip(str(error))
    stream, bits = Stream(layer, shape, batch, dtype), torch.finfo(dtype).bits
    for size in prompt:
        stream.feed(size)
    by_rows = layer.twins.ragged
    for new in accumulate(steps, initial=0):
        if new:
            stream.feed(steps[list(accumulate(steps)).index(new)])
        assert not differences(layer, text, shape, batch, sum(prompt), new, bits, by_rows), (sum(prompt), new)


def written(texts):
    return [t for t in texts if composes(t) is not None]


def test_every_part_has_a_twin():
    assert set(twins()) == set(parts())


def test_every_part_is_in_the_battery():
    named = " ".join(singles())
    assert all(name in named for name in parts() if name not in ("keep", "identity", "full"))
    assert len(written(pairs())) > 900


@pytest.mark.parametrize("tokens", AWKWARD)
@pytest.mark.parametrize("text", ["full", *singles(), *triples()])
def test_parts_alone(text, tokens):
    check(text, Shape(), [tokens], [1, 5, 1, 17])


LENGTHS = (21, 0, 1, 7, 8, 9, 15, 16, 17, 33, 65)
"""Of these each pair gets one; their number shares no factor with the variants', so that every part meets them all."""


@pytest.mark.parametrize(
    ("text", "tokens", "batch"),
    [(text, LENGTHS[i % len(LENGTHS)], 1 + 2 * (i % 2)) for i, text in enumerate(written(pairs()))],
)
def test_pairs(text, tokens, batch):
    check(text, Shape(), [tokens], [1, 2, 8, 1, 9], batch=batch)


@pytest.mark.parametrize("text", singles())
def test_three_sequences_of_a_long_prompt_in_chunks(text):
    check(text, Shape(), [300, 1, 200], [1, 39], batch=3)


@pytest.mark.parametrize("text", ["full", *of_role("format"), *of_role("basis"), "h2o(budget=0.5)"])
def test_a_layer_with_a_window_is_exempt_from_policies(text):
    for window in (5, 24):
        check(text, Shape(window=window), [21], [1, 2, 8, 1, 9])


@pytest.mark.parametrize("shape", [Shape(8, 8, 32), Shape(8, 1, 96), Shape(6, 3, 80)], ids=["mha", "mqa", "80"])
@pytest.mark.parametrize("text", [*singles(), *triples()])
def test_other_heads_and_widths(text, shape):
    check(text, shape, [40], [1, 2, 8])


@pytest.mark.parametrize("text", [*singles(), *triples()])
def test_half_precision(text):
    check(text, Shape(), [21], [1, 2, 8], dtype=torch.bfloat16)


def spread(texts, every):
    """Every so-manieth, a prime step through a list that is ordered by parts, so that each part comes up again."""
    return texts[::every]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 8, 65])
@pytest.mark.parametrize("text", [*spread(written(pairs()), 23), *triples()])
def test_pairs_through_forty_steps(text, tokens):
    check(text, Shape(), [tokens], [1] * 20 + [3, 1, 16], batch=3)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1000, 1001])
@pytest.mark.parametrize("text", [*singles(), *spread(written(pairs()), 29), *triples()])
def test_a_thousand_tokens(text, tokens):
    check(text, Shape(), [tokens], [1, 38, 1], batch=1 if "|" in text else 3)


# -- what is held is what is counted -----------------------------------------------------------------------------------


def reachable(thing, seen=None):
    """Storages of the tensors that an object holds, but for the model's rotation, calibrations and batch indices."""
    seen = {} if seen is None else seen
    if id(thing) in seen or type(thing).__name__ in ("Rotation", "mappingproxy"):
        return {}
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        return (
            {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
            if thing.untyped_storage().nbytes()
            else {}
        )
    inner = []
    if isinstance(thing, dict):
        inner = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        inner = list(thing)
    elif type(thing).__module__.startswith("runtime"):
        inner = [v for k, v in vars(thing).items() if k not in ("calibration", "sequences")]
    return {k: v for x in inner for k, v in reachable(x, seen).items()}


@pytest.mark.parametrize("text", ["full", *singles(), *triples()])
def test_storages_are_those_that_are_counted(text):
    try:
        layer = layer_of(text, Shape())
    except KvsimError as error:
        pytest.skip(str(error))
    stream = Stream(layer, Shape(), 2)
    for size in (41, 1, 1, 9):
        stream.feed(size)
    counted = sum(held(layer)[1].values())
    assert sum(reachable(layer).values()) == counted


def tensors():
    """Every tensor that the interpreter knows."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


@pytest.mark.parametrize("text", ["int(bits=4,group=8)", "svd(rank=8) | int(bits=4,residual=8)",
                                  "h2o(budget=0.25) | int(bits=4) @ on_write"])  # fmt: skip
def test_no_full_precision_copy_survives_a_step(text):
    """Of all tensors that the interpreter knows, none that came is as large as an uncompressed side."""
    layer, tokens = layer_of(text, Shape()), 600
    before = {id(x) for x in tensors()}
    stream = Stream(layer, Shape())
    for size in (tokens, 1, 1):
        stream.feed(size)
    gc.collect()
    side = 2 * tokens * 32 * 4
    new = [x for x in tensors() if id(x) not in before]
    assert new
    assert [tuple(x.shape) for x in new if x.untyped_storage().nbytes() >= side] == []
