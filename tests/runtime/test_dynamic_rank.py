"""Dynamic ranks on a tiny model: bytes exact and within the share, decisions that follow the rows, learned ranks."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.adaptive_steps import DECIDED_CALLS, PROPOSED_CALLS
from kvsim.errors import KvsimError
from kvsim.ranks import cache_bytes, level, limit_bytes, lost, rounded_ranks
from runtime.cache import spec_of
from runtime.dynamic_rank import DynamicRankCache
from runtime.quality_reference import handed, reference
from runtime.rank_learning import Learned, RankNetwork, budget_shift, relaxed_loss, spectra_of, train
from runtime.step_time import timed_steps

T, M, WIDTH = 80, 24, 32


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=WIDTH, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 50, (2, T + M), generator=torch.Generator().manual_seed(1))


def generated(model, cache, tokens, check=lambda: None):
    with torch.no_grad():
        found = [model(tokens[:, :T], **handed(model, cache)).logits]
        for i in range(T, tokens.shape[1]):
            check()
            found.append(model(tokens[:, i : i + 1], **handed(model, cache)).logits)
    check()
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("mode", ["dynamic", "static", "uniform"])
def test_bytes_are_exact_and_within_the_share_at_every_step(model, tokens, mode, centre):
    with DynamicRankCache(model, 0.4, mode=mode, every=8, horizon=M, centre=centre) as cache:

        def check():
            assert cache.nbytes() == cache_bytes(cache.states(), 32)
            assert cache.nbytes() <= 2 * limit_bytes(spec_of(model), 0.4, cache.get_seq_length() if mode == "dynamic"
                                                     else T + M, 32)

        generated(model, cache, tokens, check)
        assert len(cache.decisions) == 2 * (1 + M // 8)
        if mode != "dynamic":
            assert (cache.decisions[-1] == cache.decisions[1]).all()
        if mode == "uniform":
            assert cache.decisions[0].min() == cache.decisions[0].max() > 0


def test_a_watched_step_tells_the_cache_and_its_decisions_apart(model, tokens):
    """24 rows decide three times at every=8; a decision counts in neither the steps nor the cache's part of them."""
    seen = []
    with DynamicRankCache(model, 0.4, mode="dynamic", every=8, horizon=M) as cache:
        with torch.no_grad():
            model(tokens[:, :T], **handed(model, cache))
        before = len(cache.decisions)
        took = timed_steps(model, cache, tokens[:, T:], before=seen.append)
        assert len(cache.decisions) - before == 2 * 3
    assert seen == list(range(M))
    assert len(took.decisions) == 3
    assert min(took.decisions) > 0
    assert 0 < took.cache < took.step


def test_energies_of_a_prompt_too_short_to_span_a_head_end_in_zeros(model, tokens):
    """4 rows are sinks; the other 16 about their mean span 15 of 32 directions."""
    found = spectra_of(reference(model, tokens, 20), torch.ones(2, 2, 2))
    assert found.shape == (2, 8, WIDTH)
    assert bool((found[..., :15] > 0).all())
    assert float((found[..., 16:]).max()) == 0.0


def test_everything_kept_is_the_uncompressed_model(model, tokens):
    with torch.no_grad():
        expected = model(tokens).logits
    full = torch.full((2, 2, 2), WIDTH)
    with DynamicRankCache(model, 1.0, mode="static", every=5, ranks=full) as cache:
        torch.testing.assert_close(generated(model, cache, tokens), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("mode", "said"), [("static", DECIDED_CALLS), ("dynamic", DECIDED_CALLS + PROPOSED_CALLS)])
def test_calls_of_a_decision_are_those_that_torch_is_asked_for(model, tokens, mode, said):
    found, calls = reference(model, tokens[:1], T), Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls["product" if "mm" in str(func) else "other"] += 1
            return func(*args, **(kwargs or {}))

    with DynamicRankCache(model, 0.5, mode=mode, every=8, horizon=M) as cache:
        cache.take(found)
        decide = cache._decide_for

        def counted(*args):
            with Calls():
                decide(*args)

        cache._decide_for = counted
        with torch.no_grad():
            model(found.scored[:, :8], **handed(model, cache))
    heads = len(cache.states())
    # three products, and three more where directions are proposed and some of them stay
    assert calls["product"] / heads == pytest.approx(6 if mode == "dynamic" else 5, abs=1)
    assert calls["other"] / heads == pytest.approx(said, rel=0.15)


def rows(spread, count, seed):
    return torch.randn((1, 2, count, WIDTH), generator=torch.Generator().manual_seed(seed)) * spread


def test_ranks_follow_the_spectra(model):
    # the prompt lives in 4 directions of head 0; then rows arrive in 4 others: they must come, at the old ones' cost
    first, second = torch.zeros(WIDTH), torch.zeros(WIDTH)
    first[:4], second[8:12] = 1.0, 3.0
    noise = 0.01
    with DynamicRankCache(model, 0.25, every=16) as cache:
        for layer in cache.layers:
            for side in ("k", "v"):
                layer.tails[side] = rows(first + noise, 64, 1)
            layer.lazy_initialization(layer.tails["k"], layer.tails["v"])
            layer.add(rows(first, 0, 2), rows(first, 0, 2))
        cache._decide()
        before = cache.layers[0].heads["k"][0].basis
        for seed in range(6):
            for layer in cache.layers:
                layer.add(rows(second + noise, 16, 3 + seed), rows(second + noise, 16, 30 + seed))
            cache._decide()
        head = cache.layers[0].heads["k"][0]
        assert cache.layers[0].first["k"].shape[2] == 4
        new = rows(second, 16, 99)[0, 0]
        gone = [(new - new @ b.T @ b).square().sum() / new.square().sum() for b in (before, head.basis)]
        assert gone[0] > 0.5
        assert gone[1] < 1e-3
        assert head.births.max() > 0
        torch.testing.assert_close(head.basis @ head.basis.T, torch.eye(len(head.basis)), atol=1e-4, rtol=0)


def test_a_mean_row_costs_no_direction(model):
    with DynamicRankCache(model, 0.5, every=8) as cache:
        for layer in cache.layers:
            x = rows(torch.ones(WIDTH) * 0.01, 40, 5) + 100 * torch.arange(WIDTH)
            layer.lazy_initialization(x, x)
            layer.add(x, x)
        cache._decide()
        head = cache.layers[1].heads["k"][1]
        assert float(head.energy.max()) < 1  # of rows of length 100 * sqrt(sum of squares), nothing of it is left
        torch.testing.assert_close(cache.layers[1].read("k"), x, rtol=1e-4, atol=0.05)


def test_running_energy_is_that_of_the_coefficients(model, tokens):
    with DynamicRankCache(model, 0.5, every=8) as cache:
        generated(model, cache, tokens)
        for head in cache.layers[1].heads["v"]:
            energy = torch.cat([c.square().sum(0) for c in head.columns])  # without the mean
            torch.testing.assert_close(head.energy, energy, rtol=1e-3, atol=1e-3)


def test_weights_move_directions_to_where_they_count(model, tokens):
    weights = torch.ones(2, 2, 2)
    weights[1, 0] = 1e4
    found = []
    for w in (None, weights):
        with DynamicRankCache(model, 0.5, weights=w, every=8) as cache:
            generated(model, cache, tokens[:1, : T + 1])
            found.append(cache.decisions[0])
    assert found[1][1, 0].sum() > found[0][1, 0].sum()
    assert found[1][1, 0].min() == WIDTH  # all of it before anything else
    with pytest.raises(KvsimError, match="weights are"):
        DynamicRankCache(model, 0.3, weights=torch.ones(3))


def test_the_relaxation_meets_its_budget_and_passes_gradients():
    z = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    s = budget_shift(z, 3.0)
    assert float(torch.sigmoid(z + s).detach().sum()) == pytest.approx(3.0, abs=1e-9)
    # the shift undoes a common move of all z: its gradient sums to -1
    assert float(torch.autograd.grad(s, z)[0].sum()) == pytest.approx(-1.0)
    energies = torch.tensor([[4.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    # closed gates behind rank 1 and rank 2: (2 + 1 + 1) of 10
    assert float(relaxed_loss(energies, torch.tensor([1.0, 2.0]), 1e-3)) == pytest.approx(0.4, abs=1e-6)


def test_a_trained_network_comes_near_the_exact_ranks_on_other_texts():
    generator = torch.Generator().manual_seed(3)
    decay = torch.linspace(0.05, 1.5, 12)[:, None] * torch.arange(16)
    texts = torch.exp(-decay - 0.1 * torch.rand((6, 12, 16), generator=generator)).sort(2, descending=True).values
    network, losses = train(texts[:4], 48, steps=300)
    assert losses[-1] < losses[0]
    again, _ = train(texts[:4], 48, steps=300)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters(), strict=True))
    for text in texts[4:]:
        e = text.double().numpy()
        learned, best, even = Learned(network).ranks(text, 48), level(e, 48), rounded_ranks([4.0] * 12, 48, 16)
        untrained = Learned(RankNetwork(12, 16)).ranks(text, 48)
        assert learned.sum() == best.sum() == 48
        assert lost(e, best) <= lost(e, learned) < lost(e, untrained)
        assert lost(e, learned) - lost(e, best) < 0.1 * (lost(e, even) - lost(e, best))
