"""Sensitivities against finite differences, allocations against brute force, methods that say what was allocated."""

import itertools
import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

import kvsim
from kvsim.errors import KvsimError
from kvsim.layout import layer_layout
from runtime.allocate import GRAINS, Table, bits_table, rank_table, token_table
from runtime.cache import CompressedCache
from runtime.quality_forced import take_prompt
from runtime.quality_reference import reference
from runtime.sensitivity import KINDS, _passed, by_layer, curvature, loss, losses, weights


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 40, (2, 81), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_curvature_is_the_diagonal_of_the_hessian(model, tokens):
    """Against second differences value by value: gradients at the ends of a step of one value at a time."""
    prompt, step = tokens[:1, :5], 1e-2
    taps, _ = _passed(model, prompt)
    shape = taps.values[1].shape  # [1, 1, 5, 64]
    exact = torch.zeros(shape)
    for at in itertools.product(*map(range, shape)):
        ends = []
        for sign in (step, -step):
            e = torch.zeros(shape)
            e[at] = sign
            ends.append(_passed(model, prompt, {1: (torch.zeros(shape), e)})[1][1][1][at])
        exact[at] = (ends[0] - ends[1]) / (2 * step)
    draws = torch.stack([curvature(model, prompt, 1, seed)[1][1].sum() * shape[2] for seed in range(60)])
    spread = float(draws.std()) / 60**0.5
    assert float(draws.mean()) == pytest.approx(float(exact.sum()), abs=4 * spread + 1e-4)


def test_kinds(model, tokens):
    for kind in KINDS:
        found = weights(model, tokens[:, :40], kind, probes=1)
        assert len(found) == 2
        assert all(min(pair) >= 0 for pair in by_layer(found))
    use = weights(model, tokens[:, :40], "attention")[0][0]
    assert float(use.sum()) == pytest.approx(2 * 40, rel=1e-4)  # every query gives away a weight of one
    with pytest.raises(KvsimError, match="variance"):
        weights(model, tokens, "taste")


def test_loss_by_hand():
    x, y = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[1.5, 1.0]]]])
    assert loss(torch.tensor([2.0, 3.0]), x, y) == pytest.approx(2 * 0.25 + 3 * 1.0)


def test_losses_of_heads_and_groups_by_hand():
    x, y = torch.tensor([[[[1.0, 2.0]], [[0.0, 4.0]]]]), torch.tensor([[[[1.5, 1.0]], [[0.0, 1.0]]]])
    # head 0: 2 * 0.5^2 and 3 * 1^2; head 1: nothing and 3 * 3^2
    assert losses(torch.tensor([2.0, 3.0]), x, y, 1).tolist() == [[0.5, 3.0], [0.0, 27.0]]
    assert losses(torch.tensor([2.0, 3.0]), x, y, 2).tolist() == [[3.5], [27.0]]


def test_tables_fall_with_bits_and_ranks_and_the_choice_is_exact(model, tokens):
    found = reference(model, tokens, 70)
    weigh = weights(model, tokens[:, :70], "gradient")
    for table in (bits_table(model, found, weigh), rank_table(model, found, weigh, 32)):
        assert bool((np.diff(table.losses.sum(0)) < 0).all())
        choice = table.chosen()
        best = min(
            sum(table.losses[g, o] for g, o in enumerate(options))
            for options in itertools.product(range(len(table.options)), repeat=len(table.losses))
            if sum(table.costs[g, o] for g, o in enumerate(options)) <= table.budget
        )
        assert choice.loss == pytest.approx(best)
        assert choice.loss <= table.losses[:, table.uniform].sum()


def one_layer():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40, hidden_size=96, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("grain", "groups"), [("layer", 2), ("head", 4), ("group", 8)])
def test_bits_by_layer_head_and_group_are_the_integer_programmes_and_hold_no_more_bytes(tokens, grain, groups):
    """Two heads of 48 channels: groups of 32 and 16. Bytes held are those predicted, and at most the uniform ones."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    model = one_layer()
    found = reference(model, tokens, 70)
    table = bits_table(model, found, weights(model, tokens[:, :70], "gradient"), 4, grain)
    choice, n, m = table.chosen(), len(table.losses), len(table.options)
    assert n == groups
    one_each = LinearConstraint(np.kron(np.eye(n), np.ones(m)), 1, 1)
    within = LinearConstraint(table.costs.reshape(1, -1), 0, table.budget)
    best = milp(table.losses.ravel(), integrality=np.ones(n * m), bounds=Bounds(0, 1), constraints=[one_each, within])
    assert choice.optimal
    assert choice.loss == pytest.approx(best.fun, rel=1e-6)
    method, held = table.method(choice.choice.tolist()), {}
    for name, each in (("own", method), ("uniform", table.method([table.uniform] * n))):
        with CompressedCache(each, model) as cache:
            take_prompt(cache, found)
            held[name] = cache.nbytes()
        spec = kvsim.load_model(json.loads(model.config.to_json_string(False)))
        assert held[name] == layer_layout(spec.layers[0], each, 70, 0, 32).bytes(2)
    assert held["own"] <= held["uniform"]


def test_finer_grains_never_lose_more_by_their_own_measure(tokens):
    model = one_layer()
    found = reference(model, tokens, 70)
    weigh = weights(model, tokens[:, :70], "gradient")
    by = [bits_table(model, found, weigh, 4, grain).chosen().loss for grain in GRAINS]
    assert by[0] >= by[1] >= by[2]
    assert by[0] > by[2]


def test_token_budgets(model, tokens):
    found = reference(model, tokens, 70)
    table = token_table(model, found, 200)
    assert table.budget == 2 * 50  # a quarter of 200 rows in two layers
    assert table.losses.shape[0] == 2
    assert table.losses[:, 0].sum() > table.losses[:, -1].sum()
    assert "snapkv" in str(table.method(table.chosen().choice))


def test_a_choice_becomes_clauses():
    where = tuple((n, side) for n in range(3) for side in "kv")
    table = Table(("int(bits=4)", "int(bits=8)"), np.zeros((6, 2)), np.tile([4, 8], (6, 1)), where, 0)
    assert str(table.method([0, 0, 0, 0, 0, 0])) == "int(bits=4)"
    written = str(table.method([0, 0, 1, 0, 0, 0]))
    assert written == "int(bits=4); layers=1-1: k:int(bits=8) v:int(bits=4)"
    heads = tuple((n, side) for n in range(2) for side in "kv" for _ in range(2))
    table = Table(("int(bits=4,group=32)", "int(bits=8,group=32)"), np.zeros((8, 2)), np.tile([4, 8], (8, 1)), heads, 0)
    written = str(table.method([0, 1, 0, 0, 1, 1, 0, 0]))
    assert "k:widths(bits=(4,8),group=32) v:int(bits=4,group=32)" in written
    assert "k:int(bits=8,group=32) v:int(bits=4,group=32)" in written
