"""Time of portions and of ranks that move: what is counted, by hand; how it relates to what `predict` says."""

from dataclasses import replace

import pytest

import kvsim
from kvsim.adaptive_steps import cache_part, decision, portioned_step, ranked_step, timed
from kvsim.errors import KvsimError
from kvsim.hardware import load_device
from kvsim.method import parse_method
from kvsim.model import ModelSpec
from kvsim.op import Op
from kvsim.portions import parse_portions
from kvsim.ranks import HeadState
from kvsim.record import Case
from kvsim.workload import Workload

DEVICE = load_device("epyc-9654")
MODEL = replace(ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=2, head_dim=32), dtype="fp32")


def line(timing, name):
    (found,) = [x for x in timing.lines if x.name == name]
    return found


def test_plain_portions_move_the_bytes_counted_by_hand():
    step = portioned_step(MODEL, parse_portions("* = full"), ["a"] * 30 + ["b"] * 50, 4, DEVICE)
    # a row of a layer: 2 sides * 2 heads * 32 values * 4 bytes = 512; 84 rows are read out of three stores and written
    # (2 * 84 * 512), put together (again), and attended: 84 rows and 4 bytes * 4 heads * 32 beside them; 2 layers
    assert line(step, "rows put together").bytes == 2 * 2 * 84 * 512
    assert line(step, "attention").bytes == 2 * (2 * 84 * 512 + 84 * 512 + 4 * 4 * 32)
    # 4 heads * 84 rows * 32 * 2 operations, keys and values
    assert line(step, "attention").flops == 2 * 2 * 2 * 4 * 84 * 32


def test_a_portion_is_read_as_its_method_reads_it():
    # 40 rows in 4 bits, groups of 32: 2 sides * 2 heads * (16 + 2 * 2) bytes = 80 a row; 40 + 40 rows attended
    labels = ["a"] * 40 + ["b"] * 40
    plain, packed = (portioned_step(MODEL, parse_portions(text), labels, 0, DEVICE)
                     for text in ("* = full", "a = int(bits=4,group=32)"))
    gone = 2 * (2 * 40 * 512) - 2 * (40 * 80 + 4 * 4 * 32)
    assert line(plain, "attention").bytes - line(packed, "attention").bytes == gone
    assert line(plain, "rows put together").bytes == line(packed, "rows put together").bytes
    written = portioned_step(MODEL, parse_portions("new = int(bits=4,group=32)"), labels, 5, DEVICE)
    alone = kvsim.predict(Case(MODEL, DEVICE, parse_method("int(bits=4,group=32)"), Workload(1, 80, 5))).decode
    assert line(written, "compress and append").seconds == line(alone, "compress and append").seconds


def test_the_models_own_time_is_that_of_predict():
    alone = kvsim.predict(Case(MODEL, DEVICE, parse_method("full"), Workload(1, 80, 4))).decode
    step = portioned_step(MODEL, parse_portions("a = topk(budget=0.25,recent=0,sinks=0)"), ["a"] * 80, 4, DEVICE)
    names = {x.name for x in cache_part(MODEL, step).lines}
    assert names == {"attention", "rows put together"}
    for found in step.lines:
        if found.name not in names:
            assert found.seconds == pytest.approx(line(alone, found.name).seconds, rel=1e-6)
    # a quarter of 80 rows and 4 new ones
    assert line(step, "rows put together").bytes == 2 * 2 * 24 * 512
    assert step.low < step.seconds < step.high


def states(births, rows=100, tail=8):
    return [HeadState(32, births, rows, tail, True)] * 8


def test_ranks_cost_what_their_products_cost():
    one, two = (ranked_step(MODEL, states(b), DEVICE) for b in ((0,) * 8, (0,) * 6 + (60,) * 2))
    # a product of [100 x 8] with [8 x 32] in each of 8 heads; in two births 6 directions of 100 rows and 2 of 40
    assert line(one, "rows read back").flops == 8 * 2 * 100 * 8 * 32
    assert line(two, "rows read back").flops == 8 * 2 * 32 * (100 * 6 + 40 * 2)
    assert line(two, "rows read back").seconds > line(one, "rows read back").seconds
    assert line(one, "rows put together").bytes == 2 * 2 * 108 * 512
    none = ranked_step(MODEL, states(()), DEVICE)
    assert line(none, "rows read back").flops == 0


def test_proposals_are_most_of_a_decision_and_only_of_those_that_propose():
    fixed, moves = (decision(MODEL, states((0,) * 8), DEVICE, proposes) for proposes in (False, True))
    # products of the 8 tail rows in each of 8 heads: 3 (6 where directions are proposed) of 8 x 8 x 32
    assert line(fixed, "ranks decided").flops == 8 * 3 * 2 * 8 * 8 * 32
    # an SVD of 8 x 32: 4 * 32 * 8^2 + 8 * 8^3, and one look at 8 + 8 directions a head
    assert line(moves, "ranks decided").flops == 8 * (6 * 2 * 8 * 8 * 32 + 4 * 32 * 64 + 8 * 512) + 8 * 16
    assert moves.seconds > fixed.seconds


def test_wrong_questions():
    with pytest.raises(KvsimError, match="states of 4 heads"):
        ranked_step(MODEL, states((0,))[:4], DEVICE)
    gemma = kvsim.load_model("gemma3-270m")
    with pytest.raises(KvsimError, match="a layer of kind sliding"):
        portioned_step(gemma, parse_portions("* = full"), ["a"] * 8, 1, DEVICE)


def test_ops_of_one_name_are_one_line():
    ops = [Op("x", "elementwise", 2, bytes=1e6), Op("y", "elementwise", bytes=1e6), Op("x", "elementwise", bytes=2e6)]
    found = timed(DEVICE, ops)
    assert [x.name for x in found.lines] == ["x", "y"]
    assert line(found, "x").bytes == 4e6
