"""Coefficient files: strict reading, shipped families complete and inside physics."""

import tomllib

import pytest

from kvsim.coefficients import FAMILIES, OPS, family_coefficients, parse_coefficients
from kvsim.errors import KvsimError
from kvsim.hardware import devices, load_device
from kvsim.kernels import chosen

GOOD = """
[[coefficients]]
op = "decode"
kernel = "vllm/fa3"
format = "bf16"
t0_s = 8e-6
bandwidth_share = 0.92
flops_share = 0.3
element_rates = { 256 = 9.0, 64 = 14.0 }
log_error = [-0.2, 0.01, 0.3]
rows = 700
devices = ["H100"]
source = "a table"
date = "2026-11-29"
"""


def read(text: str) -> tuple:
    return parse_coefficients(tomllib.loads(text), "x.toml")


def test_a_good_row_is_read_and_its_rates_ascend() -> None:
    (c,) = read(GOOD)
    assert c.key == ("decode", "vllm/fa3", "bf16")
    assert c.element_rates == ((64, 14.0), (256, 9.0))
    assert c.log_error == (-0.2, 0.01, 0.3)
    assert c.memory_log_error is None
    assert (c.rows, c.devices, c.borrowed) == (700, ("H100",), "")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("t0_s = 8e-6", "t0 = 8e-6", "unknown field 't0' (did you mean 't0_s'?)"),
    ("t0_s = 8e-6", "", "lacks t0_s"),
    ("t0_s = 8e-6", "t0_s = 8", "t0_s must lie between 0 and 0.01"),
    ("bandwidth_share = 0.92", "bandwidth_share = 92", "bandwidth_share must lie"),
    ("bandwidth_share = 0.92", "bandwidth_share = true", "must be a number"),
    ("bandwidth_share = 0.92", "bandwidth_share = nan", "must be a number"),
    ('op = "decode"', 'op = "decoding"', "op must be one of decode"),
    ("{ 256 = 9.0, 64 = 14.0 }", "{ wide = 9.0 }", "'wide' is not a head_dim"),
    ("{ 256 = 9.0, 64 = 14.0 }", "9.0", "must be a table of head_dim"),
    ("[-0.2, 0.01, 0.3]", "[0.3, 0.01, -0.2]", "must rise"),
    ("[-0.2, 0.01, 0.3]", "[0.1]", "5, 50 and 95% quantiles"),
    ('source = "a table"', 'source = ""', "source must be a text"),
    ('devices = ["H100"]', 'devices = "H100"', "devices must be a list"),
    ('date = "2026-11-29"', 'date = "2026-11-29"\nborrowed = "hoper"', "did you mean 'hopper'"),
])
def test_each_mistake_is_named(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(KvsimError) as caught:
        read(GOOD.replace(old, new))
    assert said in str(caught.value)
    assert str(caught.value).startswith("x.toml: coefficients[0]")
    assert "\n" not in str(caught.value)


def test_every_mistake_is_named_at_once() -> None:
    bad = GOOD.replace("t0_s = 8e-6", "t0_s = 8").replace('op = "decode"', 'op = "x"')
    with pytest.raises(KvsimError) as caught:
        read(bad + GOOD.replace("flops_share = 0.3", ""))
    for part in ("coefficients[0].t0_s", "coefficients[0].op", "coefficients[1] lacks flops_share"):
        assert part in str(caught.value)


@pytest.mark.parametrize("table", [None, 3, {}, {"coefficients": 3}, {"coefficients": {"op": 1}}])
def test_not_a_list_of_tables(table: object) -> None:
    with pytest.raises(KvsimError, match="array of tables"):
        parse_coefficients(table, "x.toml")


def test_two_rows_with_one_key() -> None:
    with pytest.raises(KvsimError, match=r"coefficients\[1\] repeats decode / vllm/fa3 / bf16"):
        read(GOOD + GOOD)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_ships_every_op_with_a_source(family: str) -> None:
    rows = family_coefficients(family)
    # no server was measured on a CPU
    assert {c.op for c in rows} == set(OPS) - ({"engine"} if family == "cpu" else set())
    for c in rows:
        assert c.source
        assert c.date
        assert c.rows > 0 or c.borrowed or "no " in c.source, c.key


def test_measured_families_are_not_borrowed_and_others_say_so() -> None:
    assert not any(c.borrowed for f in ("ampere-dc", "hopper", "blackwell-dc", "blackwell-gddr", "xe")
                   for c in family_coefficients(f) if c.op != "engine")
    assert all(c.borrowed == "blackwell-gddr" for c in family_coefficients("ada") if c.op != "engine")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"cpu"}))
def test_what_servers_add_was_measured_on_hoppers_and_is_lent(family: str) -> None:
    engines = [c for c in family_coefficients(family) if c.op == "engine"]
    assert sorted(c.kernel for c in engines) == ["*", "sglang/*", "trtllm/*", "vllm/*"]
    assert {c.borrowed for c in engines} == ({""} if family == "hopper" else {"hopper"})
    assert engines[0].kernel == "*"


def test_borrowed_rows_have_wider_intervals_than_the_lender() -> None:
    lender = {c.key: c for c in family_coefficients("hopper")}
    for c in family_coefficients("cdna"):
        if c.op in ("decode", "prefill"):
            assert c.memory_log_error
            assert lender[c.key].rows
            assert c.memory_log_error[2] - c.memory_log_error[0] > 0.5


def test_an_unknown_family() -> None:
    with pytest.raises(KvsimError, match="did you mean 'hopper'"):
        family_coefficients("hoper")


@pytest.mark.parametrize("device", devices())
def test_every_shipped_device_answers_for_every_op(device: str) -> None:
    profile = load_device(device)
    for op in set(OPS) - ({"engine"} if profile.family == "cpu" else set()):
        assert chosen(profile, op, None, "bf16").coefficient.op == op
