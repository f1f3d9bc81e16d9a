"""A user's device file: every mistake named in one line; no bytes give anything but a profile or a KvsimError."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsim.coefficients import family_coefficients
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile, load_device
from kvsim.hardware_file import MAX_FILE_BYTES, MAX_PROBLEMS, UNITS, parse_toml, read_fields

GOOD = """
name = "My card"
vendor = "NVIDIA"
architecture = "Hopper GH100"
family = "hopper"
kind = "gpu"
topology = "switch"
vendor_capacity = "80 GB HBM3"
notes = ["in the lab"]
absent = ["fp4"]
capacity = { value = 81559, unit = "MiB", source = "nvidia-smi" }
bandwidth = { value = 3350, unit = "GB/s", source = "datasheet" }
measured_bandwidth = { value = 3.1, unit = "TB/s", source = "own run" }
last_level_cache = { value = 50, unit = "MiB", source = "datasheet" }
units = { value = 132, unit = "SM", source = "deviceQuery" }
clock = { value = 1.83, unit = "GHz", source = "datasheet" }
host_link = { value = 64, unit = "GB/s", source = "PCIe5 x16" }
interconnect = { value = 450, unit = "GB/s", source = "datasheet, half of 900" }
tdp = { value = 700, unit = "W", source = "datasheet" }
[peaks]
fp32 = { value = 66.9, unit = "TFLOPS", source = "datasheet" }
bf16 = { value = 989.4, unit = "TFLOPS", source = "datasheet" }
fp8 = { value = 1.9789, unit = "PFLOPS", source = "datasheet" }
int8 = { value = 1978.9, unit = "TOPS", source = "datasheet" }
"""

# The parts that many mistakes below replace.
CAPACITY = '81559, unit = "MiB"'
BANDWIDTH = '3350, unit = "GB/s"'
BF16 = '989.4, unit = "TFLOPS"'
CACHE = '50, unit = "MiB"'
TDP = '{ value = 700, unit = "W", source = "datasheet" }'


def problem(text: str | bytes, tmp_path: Path) -> str:
    """The one line that a file with these contents is refused with."""
    path = tmp_path / "device.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(KvsimError) as caught:
        load_device(str(path))
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def test_a_good_file_in_other_units(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    path.write_text(GOOD)
    device = load_device(path)
    assert device == load_device(str(path))
    assert device.name == "My card"
    # 81559 x 2^20 B; 3.1e12 B/s; 1.83e9 Hz; 1.9789e15 FLOP/s
    assert device.capacity_bytes == 85_520_809_984
    assert device.measured_bandwidth_bytes_per_s == 3.1e12
    assert device.clock_hz == 1.83e9
    assert device.peaks["fp8"] == 1.9789e15
    assert device.unit_name == "SM"
    assert device.notes == ("in the lab",)
    assert device.path == str(path)
    assert device.edition == ""
    assert device.sources["interconnect_bytes_per_s"] == "datasheet, half of 900"


def test_gb_and_gib_are_different_units(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    # 79.6 x 1073741824 = 85469849190.4; 0.0776 x 1099511627776 = 85322102315.4
    sizes = {"85.52 GB": 85_520_000_000, "79.6 GiB": 85_469_849_190, "0.0776 TiB": 85_322_102_315}
    for text, expected in sizes.items():
        value, unit = text.split()
        path.write_text(GOOD.replace(CAPACITY, f'{value}, unit = "{unit}"'))
        assert load_device(path).capacity_bytes == expected
    path.write_text(GOOD.replace(BANDWIDTH, '3120, unit = "GiB/s"'))
    assert load_device(path).bandwidth_bytes_per_s == 3120 * 2**30
    assert UNITS["size"]["GiB"] == 1024**3
    assert UNITS["size"]["GB"] == 10**9


def test_a_table_header_reads_like_an_inline_table(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    inline = 'tdp = { value = 700, unit = "W", source = "datasheet" }\n'
    path.write_text(GOOD.replace(inline, "") + '[tdp]\nvalue = 700\nunit = "W"\nsource = "datasheet"\n')
    assert load_device(path).tdp_w == 700


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # names of fields
        ("bandwidth = {", "bandwith = {", r"unknown field 'bandwith' \(did you mean 'bandwidth'\?\).*missing field"),
        ("[peaks]", "extra = 1\n[peaks]", "unknown field 'extra'"),
        ('name = "My card"\n', "", "missing field 'name'"),
        ('family = "hopper"\n', "", "missing field 'family'"),
        ("bf16 = {", "bf61 = {", r"unknown dtype in \[peaks\] 'bf61' \(did you mean 'bf16'\?\)"),
        ('unit = "W",', 'units = "W",', r"unknown key of tdp 'units' \(did you mean 'unit'\?\); unit None of tdp"),
        # words
        ('"hopper"', '"hoper"', r"family 'hoper' is not one of ampere-dc, .*did you mean 'hopper'"),
        ('kind = "gpu"', 'kind = "GPU"', "kind 'GPU' is not one of gpu, tpu, cpu, accelerator, unified"),
        ('"switch"', '"ring"', "topology 'ring' is not one of switch, mesh, pcie, none"),
        ('"My card"', '""', "name must be a text in quotes, got ''"),
        ('"My card"', "7", "name must be a text in quotes, got 7"),
        ('"My card"', '"a\\u001bb"', "name must be one printable line"),
        ('"My card"', f'"{"x" * 300}"', "name must be one printable line of at most 200"),
        ('["in the lab"]', '"in the lab"', "notes must be a list of texts"),
        ('["fp4"]', '["fp5"]', "unknown dtype in absent 'fp5'"),
        ('["fp4"]', '["fp8"]', r"fp8 is both in \[peaks\] and in absent"),
        ('"80 GB HBM3"', '"eighty"', "vendor_capacity 'eighty' must start with a size such as '80 GB'"),
        # types and values
        ("value = 700", 'value = "700"', "value of tdp must be a number, got '700'"),
        ("value = 700", "value = true", "value of tdp must be a number, got True"),
        ("value = 700", "value = 2026-11-29", "value of tdp must be a number"),
        ("value = 700", "value = nan", "value of tdp must be finite and above zero, got nan"),
        ("value = 700", "value = inf", "value of tdp must be finite and above zero, got inf"),
        ("value = 700", "value = 0", "value of tdp must be finite and above zero, got 0"),
        ("value = 700", "value = -700", "value of tdp must be finite and above zero, got -700"),
        ("value = 700", f"value = 1{'0' * 4000}", "tdp = 1000.* W is outside 1 to 1e.05 W"),
        (TDP, "700", r"tdp must be a table \{ value, unit, source \}, got 700"),
        ('unit = "W", source = "datasheet"', 'unit = "W"', "tdp has no source"),
        ('unit = "W", source = "datasheet"', 'unit = "W", source = " "', "tdp has no source"),
        # units
        (CAPACITY, '81559, unit = "Mib"', "unit 'Mib' of capacity is not one of B, KiB, MiB"),
        (BANDWIDTH, '3350, unit = "GB"', "unit 'GB' of bandwidth is not one of B/s, MiB/s"),
        (BANDWIDTH, '3350, unit = "Gb/s"', "unit 'Gb/s' of bandwidth is not one of"),
        (BANDWIDTH, "3350, unit = 8", "unit 8 of bandwidth is not one of"),
        ('66.9, unit = "TFLOPS"', '66.9, unit = "TFLOP/s"', "unit 'TFLOP/s' of peaks.fp32 is not one of GFLOPS"),
        # GB against GiB: 85.9 GB is the A100's 80 GiB; as GiB it is more than any 80 GB part has (85.9 / 80 = 1.074)
        (CAPACITY, '85.9, unit = "GiB"', "capacity is 1.074 x vendor_capacity 80 GB .*GB and GiB mixed up"),
        # 81559 MiB written as MB: 81.559 / 85.899 = 0.949; the vendor's 80 GB taken at its word: 80 / 85.899 = 0.931
        (CAPACITY, '81559, unit = "MB"', "capacity in MB is 0.949 x .* in MiB it would be 0.9956: are GB and GiB"),
        (CAPACITY, '80, unit = "GB"', "capacity in GB is 0.931 x .* in GiB it would be 1: are GB and GiB"),
        (CACHE, '50, unit = "GiB"', "last_level_cache = 50 GiB is outside"),
        (CAPACITY, '81559, unit = "GiB"', "capacity = 81559 GiB is outside .* GiB: is the unit or a factor"),
        (CAPACITY, '815, unit = "MiB"', "capacity is 0.009949 x vendor_capacity 80 GB"),
        # a factor of 1000
        (BF16, '989.4, unit = "GFLOPS"', "peaks.fp32 is 67.6 x peaks.bf16.*is 0.295 FLOP per byte"),
        (BF16, '989.4, unit = "PFLOPS"', r"peaks.bf16 = 989.4 PFLOPS is outside 1e-05 to 100 PFLOPS"),
        ('66.9, unit = "TFLOPS"', '66.9, unit = "GFLOPS"', "peaks.fp32 is 6.76e-05 x peaks.bf16"),
        (BANDWIDTH, '3350, unit = "MB/s"', "peaks.bf16 is 2.95e.05 FLOP per byte"),
        (BANDWIDTH, '3350, unit = "TB/s"', "bandwidth = 3350 TB/s is outside 0.001 to 100 TB/s"),
        ("value = 1.83,", "value = 1830,", "clock = 1830 GHz is outside 0.1 to 10 GHz"),
        # sparsity: 3958 dense FP8 would be 4 x BF16 (allowed: GB10-like); the sparse BF16 against dense FP8 is not
        ("value = 1.9789,", "value = 5.9,", "peaks.fp8 is 5.96 x peaks.bf16, outside 0.9 to 4.2: .*sparsity"),
        ("value = 1.9789,", "value = 0.5,", "peaks.fp8 is 0.505 x peaks.bf16"),
        # relations
        ("value = 50,", "value = 90000,", "last_level_cache = 90000 MiB is outside"),
        ("value = 3.1,", "value = 5.5,", "measured_bandwidth is 1.64 x bandwidth: above 1.05 it measured a cache"),
        ('"switch"', '"none"', "topology is 'none' but an interconnect is given"),
        ("interconnect = {", "#", "topology 'switch' needs an interconnect rate"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in GOOD
    line = problem(GOOD.replace(old, new, 1), tmp_path)
    assert re.search(said, line), line


def test_a_calibrated_edition_carries_its_own_coefficients(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    row = """
[[coefficients]]
op = "decode"
kernel = "mine/flash"
format = "bf16"
t0_s = 5e-6
bandwidth_share = 0.9
flops_share = 0.7
log_error = [-0.1, 0.0, 0.1]
source = "own run"
date = "2026-11-29"
"""
    path.write_text(GOOD + row)
    device = load_device(path)
    assert [c.kernel for c in device.coefficients] == ["mine/flash"]
    assert device.coefficients[0].bandwidth_share == 0.9
    hash(device)
    path.write_text(GOOD)
    assert load_device(path).coefficients == load_device("h100-sxm").coefficients == family_coefficients("hopper")
    for damage in (row.replace("0.9", "9"), row.replace("t0_s", "t0"), "coefficients = 3\n"):
        text = damage + GOOD if damage.startswith("coeff") else GOOD + damage
        assert "coefficients" in problem(text, tmp_path)


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("bandwidth = {", "bandwith = {", 1).replace('"hopper"', '"hoper"')
    line = problem(text.replace("value = 700", "value = -1").replace('unit = "GHz"', 'unit = "ghz"'), tmp_path)
    for part in ("'bandwith'", "'hoper'", "value of tdp", "unit 'ghz' of clock", "missing field 'bandwidth'"):
        assert part in line
    assert line.count("; ") >= 4


def test_a_file_full_of_mistakes_stays_readable(tmp_path: Path) -> None:
    line = problem("".join(f"k{i} = 1\n" for i in range(5000)) + GOOD, tmp_path)
    assert line.endswith(f"and {5000 - MAX_PROBLEMS} more")
    assert len(line) < 4000


def test_empty_and_bare_files_name_what_is_needed(tmp_path: Path) -> None:
    line = problem("", tmp_path)
    for needed in ("name", "vendor", "family", "kind", "topology", "capacity", "bandwidth", "units", "clock"):
        assert f"missing field {needed!r}" in line
    assert "missing table [peaks]" in line
    assert "write capacity = { value = ..., unit = 'MiB', source = '...' }" in line


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xff\xfe" + GOOD.encode("utf-16-le"), "is not UTF-8 text (byte 0)"),
        (GOOD.encode() + b"# caf\xe9", "is not UTF-8 text"),
        (b"name = ", "is not valid TOML: "),
        (b"name = \"a\"\nname = \"b\"\n", "is not valid TOML: "),
        (b"{\"name\": \"json\"}", "is not valid TOML: "),
        (b"\x00" * 100, "is not valid TOML: "),
        (b"a = " + b"[" * 100_000, "nested too deep"),
        (b"a = " + b"{a = " * 100_000, "nested too deep"),
        (b"a = " + b"9" * 10_000, "is not valid TOML: "),
        (b"#" * (MAX_FILE_BYTES + 1), f"is larger than {MAX_FILE_BYTES} bytes"),
    ],
    ids=["utf16", "latin1", "cut", "twice", "json", "zeros", "lists", "tables", "digits", "large"],
)
def test_files_that_are_no_toml(raw: bytes, said: str, tmp_path: Path) -> None:
    assert said in problem(raw, tmp_path)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    odd = (Path("/dev/zero"), Path("a\x00b.toml"), Path("x" * 5000 + ".toml"))
    for path in (tmp_path, tmp_path / "missing.toml", *odd):
        with pytest.raises(KvsimError, match=r"does not exist or is not a file|cannot be read"):
            load_device(path)
    for text in (f"{tmp_path}/", "./nowhere/at.toml", "missing.TOML", "../x"):
        with pytest.raises(KvsimError, match="does not exist or is not a file"):
            load_device(text)


def test_an_error_about_a_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KvsimError) as caught:
        load_device(tmp_path / "a\nb\x1b[31m.toml")
    assert str(caught.value).isprintable()


TABLE = tomllib.loads(GOOD)
LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("GB"), st.just("TFLOPS"),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["value", "unit", "source", "x"]), st.floats(), max_size=4),
)  # fmt: skip


def paths(table: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [(*before, key) for key in table]
    for key, value in table.items():
        if isinstance(value, dict):
            found += paths(value, (*before, key))
    return found


def changed(path: tuple[str, ...], change: Callable[[dict[str, Any], str], None]) -> dict[str, Any]:
    table = tomllib.loads(GOOD)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return table


def profile_or_error(read: Callable[[], HardwareProfile]) -> HardwareProfile | None:
    refused, device = "", None
    try:
        device = read()
    except KvsimError as error:
        refused = str(error)
    assert "\n" not in refused
    assert bool(refused) == (device is None)
    if device is not None:
        rates = (device.capacity_bytes, device.bandwidth_bytes_per_s, device.units, device.clock_hz)
        assert all(0 < value < float("inf") for value in (*rates, *device.peaks.values()))
    return device


@given(st.sampled_from(paths(TABLE)), LEAF)
def test_any_changed_value_is_a_profile_or_an_error(path: tuple[str, ...], value: object) -> None:
    table = changed(path, lambda inner, key: inner.__setitem__(key, value))
    profile_or_error(lambda: HardwareProfile(**read_fields(table, "device")))


@given(st.sampled_from(paths(TABLE)), st.text(max_size=12))
def test_any_renamed_or_removed_field_is_a_profile_or_an_error(path: tuple[str, ...], name: str) -> None:
    table = changed(path, lambda inner, key: inner.__setitem__(name, inner.pop(key)))
    device = profile_or_error(lambda: HardwareProfile(**read_fields(table, "device")))
    assert device is None or name == path[-1], "a misspelt field must not pass silently"
    table = changed(path, lambda inner, key: inner.pop(key))
    profile_or_error(lambda: HardwareProfile(**read_fields(table, "device")))


@given(st.sampled_from([p for p in paths(TABLE) if p[-1] == "value"]), st.sampled_from([1e-6, 1e-3, 1e3, 1e6]))
def test_a_factor_of_1000_never_passes(path: tuple[str, ...], factor: float) -> None:
    if path[0] in ("units", "tdp", "host_link", "interconnect", "last_level_cache"):
        return  # nothing in the file relates these closely enough to the rest
    table = changed(path, lambda inner, key: inner.__setitem__(key, inner[key] * factor))
    assert profile_or_error(lambda: HardwareProfile(**read_fields(table, "device"))) is None


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 40), st.binary(max_size=8))
def test_any_damaged_file_is_a_profile_or_an_error(tmp_path: Path, start: int, length: int, new: bytes) -> None:
    raw = GOOD.encode()
    path = tmp_path / "device.toml"
    path.write_bytes(raw[:start] + new + raw[start + length :])
    profile_or_error(lambda: load_device(path))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_an_error(raw: bytes) -> None:
    refused = ""
    try:
        assert isinstance(parse_toml(raw, "device"), dict)
    except KvsimError as error:
        refused = str(error)
    assert "\n" not in refused


@given(st.text(max_size=40))
def test_any_name_is_a_device_or_an_error(name: str) -> None:
    profile_or_error(lambda: load_device(name))
