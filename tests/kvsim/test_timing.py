"""The interval of a sum of lines."""

import pytest

from kvsim.record import SHARED_ERROR, Line, Timing


def line(seconds, below, above):
    return Line("decode", "x", 0, 0, seconds, seconds - below, seconds + above, lambda: "memory")


def test_errors_of_lines_hang_together_in_part():
    found = Timing.of((line(10.0, 3.0, 1.0), line(20.0, 4.0, 0.0)))
    assert found.seconds == 30.0
    # 0.7 (9 + 16) + 0.3 * 49 = 32.2; 0.7 * 1 + 0.3 * 1 = 1
    assert SHARED_ERROR == 0.3
    assert found.low == pytest.approx(30.0 - 32.2**0.5)
    assert found.high == pytest.approx(31.0)


def test_one_line_keeps_its_interval_and_none_is_nothing():
    assert Timing.of((line(10.0, 3.0, 1.0),)).low == pytest.approx(7.0)
    assert (Timing.of(()).seconds, Timing.of(()).low, Timing.of(()).high) == (0, 0, 0)
