"""Sizes and ranges as people type them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from kvsim.sizes import MAX_POINTS, parse_bytes, parse_count, parse_counts


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4_096", 4096),
        ("128k", 131072),  # 128 * 1024
        ("128K", 131072),
        ("1.5k", 1536),  # 1.5 * 1024
        (" 8k ", 8192),
        ("1m", 1048576),
        ("2g", 2147483648),
        ("1.0", 1),
    ],
)
def test_counts(text, value):
    assert parse_count(text) == value


BAD_COUNTS = ["", " ", "-1", "+1", "nan", "inf", "1e6", "1.5", "0.1k", "128kb", "12q", "0x10", "1 2", "９", "9" * 200,
              "9" * 30, "1t", "k", "_1", "2000000000000", "\x1b[31m", "4096\n8192"]  # fmt: skip


@pytest.mark.parametrize("text", BAD_COUNTS)
def test_what_is_no_count_is_refused_in_one_line(text):
    with pytest.raises(KvsimError) as problem:
        parse_count(text, "--prompt")
    assert str(problem.value).startswith("--prompt: ")
    assert str(problem.value).isprintable()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("512MiB", 536870912),  # 512 * 2^20
        ("512m", 536870912),
        ("1GB", 1000000000),
        ("1GiB", 1073741824),
        ("1.5GB", 1500000000),
        ("2kb", 2000),
        ("2kib", 2048),
        ("0b", 0),
        ("1t", 1099511627776),
    ],
)
def test_bytes_keep_gb_and_gib_apart(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1GiBs", "GiB", "1.5", "nan", "1e9", "1 G B", "2t"])
def test_what_is_no_byte_count_is_refused(text):
    with pytest.raises(KvsimError, match="--reserve"):
        parse_bytes(text, "--reserve")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("7", (7,)),
        ("1,4,16", (1, 4, 16)),
        ("4,4,1", (4, 1)),
        ("4096:131072:x2", (4096, 8192, 16384, 32768, 65536, 131072)),
        ("4k:128k:x2", (4096, 8192, 16384, 32768, 65536, 131072)),
        ("4096:100000:x2", (4096, 8192, 16384, 32768, 65536)),  # the next, 131072, is beyond
        ("0:4096:1024", (0, 1024, 2048, 3072, 4096)),
        ("0:4k:1k", (0, 1024, 2048, 3072, 4096)),
        ("1:10:4", (1, 5, 9)),
        ("8:27:x1.5", (8, 12, 18, 27)),  # 8 * 1.5 = 12, * 1.5 = 18, * 1.5 = 27
        ("1:5:x1.5", (1, 2, 3)),  # whole parts of 1, 1.5, 2.25, 3.375; the next, 5.06, is beyond 5
        ("5:5:x2", (5,)),
        ("5:5:1", (5,)),
        ("1,4:16:x2,100", (1, 4, 8, 16, 100)),
    ],
)
def test_lists_and_ranges(text, values):
    assert parse_counts(text) == values


@pytest.mark.parametrize(
    "text",
    ["1:2", "1:2:3:4", "8:4:x2", "8:4:1", "1:8:x1", "1:8:x0.5", "1:8:x", "1:8:xx2", "1:8:0", "1:8:-1", "0:8:x2",
     ":8:x2", "1::x2", "1,,2", ",", "1:nan:x2", "1:8:xnan", "0:4000000:1", "1:1000000000000:x1.000001"],
)  # fmt: skip
def test_what_is_no_range_is_refused(text):
    with pytest.raises(KvsimError, match=r"^--batch"):
        parse_counts(text, "--batch")


@given(st.integers(1, 2**20), st.integers(1, 2**30), st.integers(2, 9))
def test_a_geometric_range_multiplies_and_ends_before_passing_its_last(first, last, factor):
    last = max(first, last)
    values = parse_counts(f"{first}:{last}:x{factor}")
    assert values[0] == first
    assert all(b == a * factor for a, b in pairwise(values))
    assert values[-1] <= last < values[-1] * factor


@settings(deadline=None)
@given(st.integers(0, 2**20), st.integers(0, 2**20), st.integers(1, 2**12))
def test_a_linear_range_is_pythons_with_its_last_included(first, span, step):
    assert parse_counts(f"{first}:{first + span}:{step}") == tuple(range(first, first + span + 1, step))
    assert span // step < MAX_POINTS


@given(st.integers(0, 2**40))
def test_every_count_reads_back(value):
    assert parse_count(str(value)) == value
    assert parse_count(f"{value:_}") == value
