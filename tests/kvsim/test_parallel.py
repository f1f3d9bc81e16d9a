"""Ranks: weights, KV heads, stages and traffic by hand arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import KvsimError, ModelSpec, load_model
from kvsim.engines.parallel import (
    ParallelLayout,
    Traffic,
    allreduce_traffic,
    cache_bytes,
    core,
    kv_heads,
    rank_states,
    stages,
    weight_bytes,
)
from kvsim.engines.sharding import rank_model
from kvsim.model import State

SMALL = ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_size=32, intermediate_size=64,
                               vocab_size=128)


@pytest.mark.parametrize(
    ("total", "ranks", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (2, 4, 1), (6, 3, 2)]
)
def test_heads_are_divided_or_replicated(total, ranks, each):
    assert kv_heads(total, ranks) == each


@pytest.mark.parametrize(("total", "ranks"), [(8, 3), (6, 4), (2, 3)])
def test_heads_that_do_neither(total, ranks):
    with pytest.raises(KvsimError, match=f"{total} KV heads can be neither divided over nor replicated on {ranks}"):
        kv_heads(total, ranks)


@pytest.mark.parametrize(("layers", "stage", "counts"), [
    (32, 2, [16, 16]), (30, 4, [7, 8, 8, 7]), (5, 2, [3, 2]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]), (7, 4, [2, 2, 2, 1]),
])  # fmt: skip
def test_stages(layers, stage, counts):
    found = stages(layers, stage)
    assert [len(run) for run in found] == counts
    assert [i for run in found for i in run] == list(range(layers))


def test_weights_of_one_rank_are_the_models():
    # layer: q 32*32, k and v 16*32 each, o 32*32, gate/up/down 64*32 each = 9216; two layers, embedding and head 128*32
    assert weight_bytes(SMALL, ParallelLayout()) == (2 * (2 * 9216 + 2 * 4096),)
    assert SMALL.parameters == 2 * 9216 + 2 * 4096


def test_weights_of_two_ranks_are_half():
    assert weight_bytes(SMALL, ParallelLayout(2)) == (9216 * 2 + 4096 * 2,)


def test_more_ranks_than_kv_heads_replicate_k_and_v():
    # over 4 ranks: q, o, mlp 8192 / 4 = 2048; k and v keep one head of two: 512 / 2 each = 256
    layer = 2048 + 2 * 256
    assert weight_bytes(SMALL, ParallelLayout(4)) == (2 * (2 * layer + 2 * 1024),)


def test_stages_hold_embedding_first_and_head_last():
    first, last = weight_bytes(SMALL, ParallelLayout(pipeline=2))
    assert (first, last) == (2 * (9216 + 4096), 2 * (9216 + 4096))


def test_narrow_weights_leave_embeddings_alone():
    assert weight_bytes(SMALL, ParallelLayout(), bits=4) == (2 * 9216 // 2 + 2 * 4096 * 2,)


def test_experts_whole_or_cut():
    moe = ModelSpec.from_numbers(layers=1, n_heads=4, n_kv_heads=4, head_dim=8, hidden_size=32, n_experts=8, top_k=2,
                                 expert_intermediate_size=16)
    # attention 4 * 1024, router 256 (whole everywhere), experts 8 * 3 * 512 = 12288
    assert weight_bytes(moe, ParallelLayout(4)) == (2 * (1024 + 256 + 3072),)
    assert weight_bytes(moe, ParallelLayout(4, expert=4)) == (2 * (1024 + 256 + 3072),)
    # data-parallel attention: attention whole on each rank, experts dealt out
    assert weight_bytes(moe, ParallelLayout(4, expert=4, attention_data=4)) == (2 * (4096 + 256 + 3072),)


def test_real_model():
    # 70,553,706,496 parameters, 2 bytes each, over 2 ranks: half, but for norms (kept whole)
    model = load_model("llama-3.1-70b")
    one, = weight_bytes(model, ParallelLayout(2))
    assert model.parameters <= one <= model.parameters * 1.0001
    assert weight_bytes(model, ParallelLayout()) == (2 * model.parameters,)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_weights_are_those_of_the_rank_model(ranks):
    for name in ("llama-3.1-8b", "qwen3-8b"):
        model = load_model(name)
        one, = weight_bytes(model, ParallelLayout(ranks))
        assert one == 2 * rank_model(model, ParallelLayout(ranks)).parameters


def test_latent_projections():
    mla = ModelSpec.from_numbers(layers=1, n_heads=4, mla_kv_lora_rank=16, mla_rope_dim=8, head_dim=24, q_lora_rank=12,
                                 hidden_size=32)
    # whole: q_a 12*32 = 384, kv_a 24*32 = 768; cut: q_b 96*12 = 1152, kv_b 4*(16+24)*16 = 2560, o 32*96 = 3072
    assert weight_bytes(mla, ParallelLayout(4)) == (2 * (384 + 768 + 288 + 640 + 768),)


@pytest.mark.parametrize(("name", "word"), [
    ("experts.gate_proj", "gate"), ("shared_experts.down_proj", "down"), ("q_proj", "q"), ("q_a_proj", "q_a"),
    ("expert_up", "up"), ("shared_gate", "gate"),
    ("shared_expert_gate", "shared_expert_gate"), ("indexer.wq_b", "wq_b"),
])  # fmt: skip
def test_what_a_matrix_does(name, word):
    assert core(name) == word


def test_cache_of_a_rank():
    # 2 layers * 2 sides * 1 head (2 heads over 2 ranks) * 8 dims * 2 bytes * 10 tokens * 3 sequences
    assert cache_bytes(SMALL, ParallelLayout(2), tokens=10, batch=3) == (2 * 2 * 8 * 2 * 10 * 3,)
    assert cache_bytes(SMALL, ParallelLayout(4), tokens=10, batch=3) == cache_bytes(SMALL, ParallelLayout(2), 10, 3)
    # data-parallel attention over 2 groups of 1 rank: both heads, ceil(3 / 2) sequences
    assert cache_bytes(SMALL, ParallelLayout(2, attention_data=2), tokens=10, batch=3) == (2 * 2 * 2 * 8 * 2 * 10 * 2,)
    assert cache_bytes(SMALL, ParallelLayout(), 10, 3) == (SMALL.cache_bytes(10, 3),)


def test_traffic():
    # two all-reduces a layer of tokens * hidden * 2 bytes
    assert allreduce_traffic(SMALL, ParallelLayout(2), tokens=5) == Traffic(4, 5 * 32 * 2, 2)
    assert allreduce_traffic(SMALL, ParallelLayout(), tokens=5).count == 0
    assert allreduce_traffic(SMALL, ParallelLayout(2, attention_data=2), tokens=5).count == 2


def test_mamba_groups_fewer_than_ranks():
    # 8 heads * 4 + 2 * 1 group * 16 = 64 channels; over 4 ranks each keeps a group: (32 + 2 * 4 * 16) / 4 = 40
    states = (State("conv", (64, 4)), State("recurrent", (8, 4, 16)))
    assert [s.shape for s in rank_states(states, 4)] == [(40, 4), (2, 4, 16)]
    with pytest.raises(KvsimError, match=r"state of \d+ \w+ cannot be divided over 3"):
        rank_states(states, 3)


@pytest.mark.parametrize(("layout", "message"), [
    ({"tensor": 0}, "tensor parallel size must lie between 1"),
    ({"tensor": 4, "expert": 3}, "expert parallel size 3 does not divide the 4 tensor ranks"),
    ({"tensor": 4, "attention_data": 8}, "attention_data parallel size 8 does not divide"),
    ({"pipeline": float("nan")}, "pipeline parallel size must be a whole number"),
])  # fmt: skip
def test_layouts_that_cannot_be(layout, message):
    with pytest.raises(KvsimError, match=message):
        ParallelLayout(**layout)


def test_models_that_cannot_be_cut():
    model = load_model("llama-3.1-8b")
    with pytest.raises(KvsimError, match=r"size 7 is impossible: .*\(32\) must be divisible by it; use one of 1, 2"):
        ParallelLayout(7).check(model)
    with pytest.raises(KvsimError, match="pipeline parallel size 33 is more"):
        ParallelLayout(pipeline=33).check(model)


@given(st.integers(1, 200), st.integers(1, 32))
def test_stages_cover_every_layer_evenly(layers, count):
    if count > layers:
        with pytest.raises(KvsimError):
            stages(layers, count)
        return
    sizes = [len(run) for run in stages(layers, count)]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_never_hold_less_than_their_share(ranks, heads):
    model = ModelSpec.from_numbers(layers=2, n_heads=32, n_kv_heads=heads, head_dim=8, hidden_size=64,
                                   intermediate_size=128, vocab_size=64)
    one, = weight_bytes(model, ParallelLayout(ranks))
    assert 2 * model.parameters / ranks <= one <= 2 * model.parameters
    kv, = cache_bytes(model, ParallelLayout(ranks), tokens=100)
    assert kv == model.cache_bytes(100) // min(ranks, heads)
