"""Importance scores: what they need, that every one of the survey's is there, and their work by hand."""

import numpy as np
import pytest

from kvsim import parse_method
from kvsim.buffers import Eager
from kvsim.parts import Place, Work
from kvsim.scores import SCORES

# 2 KV heads of 8 values, 4 query heads, 16-bit values
PLACE = Place("k", heads=2, width=8, n_heads=4, value_bits=16)


def test_survey_is_covered():
    attended = {n for n, s in SCORES.items() if "4.2.1" in s.survey}
    assert {"query_key", "cumulative", "loss_attention", "saliency"} <= attended
    predicted = {n for n, s in SCORES.items() if s.survey == "4.2.2"}
    assert predicted == {"gradient", "perturbation", "mutual_information", "expected"}
    assert {"knorm", "auxiliary", "online_average"} <= {n for n, s in SCORES.items() if s.survey == "4.2.3"}
    assert "2306.14048" in SCORES["cumulative"].source


@pytest.mark.parametrize("name", SCORES)
def test_every_score_ranks_a_prompt(name):
    score = SCORES[name]
    assert score.formula
    assert score.source
    assert parse_method(f"topk(score={name})").tokens.rows(1000, 0, PLACE).prompt == 250
    # costs rise with the prompt, but for a number drawn at random
    work = score.prompt_work(np.array([0, 10, 1000]), PLACE, 32)
    assert np.all(np.diff(np.broadcast_to(work.arithmetic, 3)) > 0) or name == "random"
    if score.running:
        assert parse_method(f"topk(score={name},when=running)").tokens.rows(1000, 1, PLACE).stored == 251


@pytest.mark.parametrize("policy", ["snapkv", "pyramid", "ada"])
@pytest.mark.parametrize("name", SCORES)
def test_every_budgeted_policy_takes_every_score(policy, name):
    part = parse_method(f"{policy}(budget=0.25,score={name})").tokens
    # the score changes which rows stay and what that takes, never how many
    assert part.rows(1000, 8, PLACE) == parse_method(f"{policy}(budget=0.25)").tokens.rows(1000, 8, PLACE)
    assert part.needs_weights == ("weights" in SCORES[name].needs)  # which fused attention does not write
    nets = [b for b in part.buffers(part.rows(1000, 8, PLACE), 1008, PLACE) if b.name == "estimator"]
    # 2 heads, 32 hidden units of 8 inputs, a bias and an output weight in fp16
    assert [b.bytes for b in nets] == ([2 * 32 * 10 * 2] if name == "auxiliary" else [])


def test_key_scores_by_hand():
    # norms: 100 rows * 2 heads * 2 * 8; keys read once, an fp32 score a row and head written
    assert SCORES["knorm"].prompt_work(100, PLACE, 1) == Work(3200, 3200, 800)
    # a new row's norm alone; the score is stored
    assert SCORES["knorm"].step_work(50, 2, PLACE, 1) == Work(32, 0, 8)
    # the mean moves, so every key is compared again: 50 * 2 heads * 2 products of 16
    assert SCORES["keydiff"].step_work(50, 2, PLACE, 1) == Work(3200, 50 * 2 * 8 * 2, 400)


def test_query_scores_by_hand():
    # one query: 4 * 100 pairs of 2 * 8 + 1; keys 3200, queries 4 * 8 * 2
    assert SCORES["query_key"].prompt_work(100, PLACE, 32) == Work(400, 3264, 800, 6400)
    assert SCORES["query_key"].prompt_work(0, PLACE, 32) == Work()
    # 10 queries: 4000 pairs of two products, 13 operations and 3 for each of 8 differences; keys, values, queries read
    assert SCORES["perturbation"].prompt_work(100, PLACE, 10) == Work(4000 * (13 + 24), 6400 + 640, 800, 4000 * 32)
    # 32 hidden units, each a product of 8 with every row of 2 heads
    assert SCORES["auxiliary"].prompt_work(100, PLACE, 1) == Work(0, 3200, 800, 2 * 8 * 32 * 200)


def test_what_torch_does_besides_by_hand():
    # 10 queries of 4 heads: 8 passes over 4000 pairs and 2 over 100 rows for each query head, 4 bytes a value
    found = SCORES["window"].prompt_eager(100, PLACE, 10, 12)
    assert found == Eager(25 + 12, Work(0, 4 * (8 * 4000 + 2 * 4 * 100 * 8)))
    # weights of all queries once more: 40,000 pairs of a product of 8 and a softmax, four passes
    found = SCORES["cumulative"].prompt_eager(100, PLACE, 1)
    assert found == Eager(36, Work(5 * 40000, 16 * 40000, 0, 16 * 40000))


def test_expected_by_hand():
    # covariance and form for each of 100 * 4 query rows: 4 * 64 + 2 * 8; norms of values 3200
    # read: keys and values 6400, 100 queries of 4 heads 6400
    assert SCORES["expected"].prompt_work(100, PLACE, 1) == Work(3200, 12800, 800, 400 * 272)


def test_gradient_sees_half_of_the_pairs():
    # 4 * 100 * 100 / 2 pairs, dO . v: 16 + 2; values 3200, queries and output gradients 2 * 6400
    assert SCORES["loss_attention"].prompt_work(100, PLACE, 1) == Work(20000 * 2, 3200 + 12800, 800, 20000 * 16)


def test_weights_are_read_where_attention_wrote_them():
    # 4 heads * 50 weights of 4 bytes and 100 scores in and out, against 200 pairs of 22 operations and the keys again
    assert SCORES["cumulative"].step_work(50, 2, PLACE, 1) == Work(200, 800 + 400, 400)
    assert SCORES["online_average"].step_work(50, 2, PLACE, 1) == Work(200 * 6, 1600 + 400, 400, 200 * 16)


def test_running_state():
    state = {n: sum(b.bytes for b in s.buffers(100, 2, PLACE, 20)) for n, s in SCORES.items() if s.running}
    assert state["cumulative"] == 100 * 2 * 4
    assert state["normalised"] == 2 * 100 * 2 * 4
    assert state["persistence"] == 100 * 2 * 3  # 20 bits are 3 bytes
    assert state["keydiff"] == 2 * 8 * 4
    assert state["query_key"] == state["last"] == 0
    assert all(s.buffers(None, 2, PLACE, 20) == () for s in SCORES.values() if "calibration" not in s.needs)
