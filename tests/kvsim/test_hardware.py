"""Shipped devices: hand-checked numbers, a source for each, arithmetic that repeats, names that never guess."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from importlib import resources
from math import inf, nan, prod

import pytest

import kvsim
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile, devices, load_device
from kvsim.hardware_file import DTYPES, FAMILIES, KINDS, TOPOLOGIES, UNITS

ALL = devices()
MIB = 2**20


def numbers(stem: str) -> dict[str, dict[str, object]]:
    """Every `{ value, unit, source }` of a shipped file, peaks included."""
    table = tomllib.loads(resources.files("hardware_profiles").joinpath(f"{stem}.toml").read_text())
    return {k: v for k, v in table.items() if isinstance(v, dict) and k != "peaks"} | {
        f"peaks.{k}": v for k, v in table["peaks"].items()
    }


def test_there_are_enough_devices_of_every_sort() -> None:
    profiles = [load_device(d) for d in ALL]
    assert len(ALL) >= 69
    assert {p.vendor for p in profiles} == {"NVIDIA", "AMD", "Intel", "Google", "AWS", "Apple"}
    assert {p.kind for p in profiles} == set(KINDS)
    assert {p.family for p in profiles} == set(FAMILIES)


@pytest.mark.parametrize("stem", ALL)
def test_every_number_has_a_source_and_every_field_is_sane(stem: str) -> None:
    profile = load_device(stem)
    assert profile.family in FAMILIES
    assert profile.topology in TOPOLOGIES
    assert profile.date == "2026-11-29"
    assert set(profile.peaks) <= set(DTYPES)
    assert not set(profile.peaks) & set(profile.absent)
    for field, value in asdict(profile).items():
        if isinstance(value, int | float) and value and not isinstance(value, bool):
            assert len(profile.sources[field]) > 3, f"{field} has no source"
    for dtype in profile.peaks:
        assert len(profile.sources[f"peaks.{dtype}"]) > 3
    assert len(profile.facts()) >= 6
    assert all(source for _, _, source in profile.facts())
    assert load_device(profile.name) == profile, "the printed name must lead back to the device"
    assert stem == stem.lower()
    assert re.fullmatch(r"[a-z0-9-]+", stem)


def evaluate(expression: str) -> tuple[float, bool]:
    """Value of `12 x 4800 MHz / 2 T`, left to right, and whether it is in base units (it names T or MHz)."""
    factors = re.findall(r"([x/]?) ?([\d.]+)( MHz| T)?", expression)
    scale = {"": 1.0, " MHz": 1e6, " T": 1e12}
    terms = [(float(n) * scale[u]) ** (-1 if op == "/" else 1) for op, n, u in factors]
    return prod(terms), any(u for _, _, u in factors)


def test_evaluate_itself() -> None:
    assert evaluate("12 x 4800 MHz x 8") == (12 * 4800e6 * 8, True)
    assert evaluate("1200 / 2") == (600.0, False)


@pytest.mark.parametrize("stem", ALL)
def test_derived_numbers_are_their_arithmetic(stem: str) -> None:
    for key, entry in numbers(stem).items():
        source = str(entry["source"])
        if not source.startswith("derived: "):
            assert "derived" not in source
            continue
        expression = source.removeprefix("derived: ").split(";")[0]
        assert re.fullmatch(r"[\d. x/MHzT]+", expression), f"{key}: {expression}"
        result, base = evaluate(expression)
        unit = next(u[str(entry["unit"])] for u in UNITS.values() if str(entry["unit"]) in u)
        assert result / (unit if base else 1) == pytest.approx(float(str(entry["value"])), rel=5e-3), f"{stem} {key}"


# nvidia-smi totals as public logs print them (MiB); never the vendor's GB x 2^30 where the driver says less.
@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("h100-sxm", 81559), ("h200-sxm", 143771), ("b200-sxm", 183359), ("b300-sxm", 275040), ("gb200", 189471),
        ("a100-sxm-80gb", 81920), ("a100-sxm-40gb", 40960), ("rtx-4090", 24564), ("rtx-5090", 32607), ("l4", 23034),
        ("l40s", 46068), ("t4", 15360), ("rtx-3090", 24576), ("a10", 23028), ("h100-nvl", 95830), ("rtx-4080", 16376),
    ],
)  # fmt: skip
def test_capacity_is_what_the_driver_reports(name: str, mib: int) -> None:
    assert load_device(name).capacity_bytes == mib * MIB


def test_vendor_gb_has_no_single_meaning() -> None:
    # 81559 MiB = 85.52e9 B: more than 80e9, less than 80 x 2^30 = 85.90e9.
    assert 80e9 < load_device("h100-sxm").capacity_bytes < 80 * 2**30
    # H200: 143771 MiB = 150.75e9 B, so "141 GB" is nearly GiB (141 x 2^30 = 151.40e9).
    assert load_device("h200-sxm").capacity_bytes == 150_754_820_096
    # B300: 275040 MiB = 288.40e9 B, so here "288 GB" is 10^9 (288 x 2^30 would be 309.2e9).
    assert load_device("b300-sxm").capacity_bytes == 288_400_343_040
    # rocm-smi: MI300X 206141652992 B = 8 x 25767706624 B; MI355X 309220868096 B; 7900 XTX 25753026560 B.
    assert load_device("mi300x").capacity_bytes == 206_141_652_992 == 8 * 25_767_706_624
    assert load_device("mi355x").capacity_bytes == 309_220_868_096
    assert load_device("7900 xtx").capacity_bytes == 25_753_026_560
    assert load_device("mi250x-gcd").capacity_bytes == 68_702_699_520
    # XLA: 15.75 GiB of TPU v5e's 16, 31.25 of v6e's 32.
    assert load_device("tpu-v5e").capacity_bytes == 15.75 * 2**30
    assert load_device("tpu-v6e").capacity_bytes == 31.25 * 2**30
    # Apple: three quarters of the memory is the default GPU working set: 0.75 x 128 GiB = 96 GiB.
    assert load_device("m3-max").capacity_bytes == 96 * 2**30


def test_bandwidth_by_bus_width() -> None:
    # B200: 7680 bit / 8 x 3996 MHz x 2 = 7672.32 GB/s; "8 TB/s" is the marketing figure.
    assert load_device("b200").bandwidth_bytes_per_s == pytest.approx(7680 / 8 * 3996e6 * 2, rel=1e-4)
    # RTX 4090: 384 bit / 8 x 21 Gb/s = 1008 GB/s. RTX 5090: 512 / 8 x 28 = 1792. L4: 192 / 8 x 12.5 = 300.
    assert load_device("rtx-4090").bandwidth_bytes_per_s == 384 / 8 * 21e9
    assert load_device("rtx-5090").bandwidth_bytes_per_s == 512 / 8 * 28e9
    assert load_device("l4").bandwidth_bytes_per_s == 192 / 8 * 12.5e9
    # EPYC 9654: 12 channels x 4800 MT/s x 8 B = 460.8 GB/s.
    assert load_device("epyc-9654").bandwidth_bytes_per_s == 12 * 4.8e9 * 8
    # MI300X: 8192 bit / 8 x 5.2 Gb/s = 5325 GB/s, sold as 5.3 TB/s.
    assert load_device("mi300x").bandwidth_bytes_per_s == pytest.approx(8192 / 8 * 5.2e9, rel=0.01)


# SMs x clock x operations per SM and clock, dense, FP32 accumulate.
@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("h100-sxm", "bf16", 132 * 1830e6 * 4096),  # 989.4 T; 1979 is the sparse figure
        ("h100-sxm", "fp8", 132 * 1830e6 * 8192),  # 1978.9 T; 3958 is the sparse figure
        ("a100-sxm-80gb", "bf16", 108 * 1410e6 * 2048),  # 311.9 T
        ("a100-sxm-80gb", "int8", 108 * 1410e6 * 4096),  # 623.7 T
        ("rtx-4090", "bf16", 128 * 2520e6 * 512),  # 165.2 T: half of the FP16-accumulate 330
        ("rtx-4090", "fp8", 128 * 2520e6 * 1024),  # 330.3 T, not 660.6
        ("rtx-5090", "bf16", 170 * 2407e6 * 512),  # 209.5 T, not 419 or 838
        ("rtx-3090", "bf16", 82 * 1695e6 * 512),  # 71.2 T, not 142
        ("l40s", "bf16", 142 * 2520e6 * 1024),  # 366 T: professional cards run at full rate
        ("rtx-a6000", "bf16", 84 * 1800e6 * 1024),  # 154.8 T
        ("t4", "fp16", 40 * 1590e6 * 1024),  # 65.1 T
        ("v100-sxm-32gb", "fp16", 80 * 1530e6 * 1024),  # 125.3 T
        ("mi300x", "bf16", 304 * 2100e6 * 2048),  # 1307.4 T; 2615 is the sparse figure
        ("mi355x", "fp8", 256 * 2400e6 * 8192),  # 5033 T; 10.1 P is the sparse figure
        ("xeon-8480", "bf16", 56 * 2000e6 * 2048),  # 229 T: "1024 operations" of AMX are multiply-adds
        ("epyc-9654", "bf16", 96 * 2400e6 * 64),  # 14.7 T
    ],
)
def test_peaks_are_units_x_clock_x_operations(name: str, dtype: str, flops: float) -> None:
    assert load_device(name).peak(dtype) == pytest.approx(flops, rel=0.015)


def test_int8_is_nearly_gone_on_blackwell_ultra() -> None:
    assert load_device("b300-sxm").peak("int8") == 153.5e12
    assert load_device("gb300").peak("int8") == 165e12
    assert load_device("b200-sxm").peak("int8") == 4500e12


def test_links_are_one_direction() -> None:
    # NVLink is sold bidirectional: H100 900 -> 450, B200 1800 -> 900, A100 600 -> 300; TPU v5p 1200 -> 600.
    assert [load_device(d).interconnect_bytes_per_s for d in ("h100-sxm", "b200", "a100-sxm-80gb", "tpu-v5p")] == [
        450e9, 900e9, 300e9, 600e9,
    ]  # fmt: skip
    assert load_device("mi300x").interconnect_bytes_per_s == 7 * 64e9
    assert load_device("mi300x").topology == "mesh"
    assert load_device("h100-sxm").topology == "switch"


def test_without_a_link_peers_use_the_host_link() -> None:
    card = load_device("rtx-4090")
    assert card.topology == "pcie"
    assert card.interconnect_bytes_per_s == card.host_link_bytes_per_s == 32e9
    # x8 cards have half: 4060 Ti and B580 on Gen4 x8.
    assert load_device("rtx-4060-ti-16gb").host_link_bytes_per_s == 16e9
    assert load_device("arc-b580").host_link_bytes_per_s == 16e9
    assert load_device("m3-max").interconnect_bytes_per_s is None


def test_half_a_card_is_half_of_everything() -> None:
    whole, half = load_device("mi250x"), load_device("mi250x-gcd")
    for field in ("capacity_bytes", "bandwidth_bytes_per_s", "units", "last_level_cache_bytes", "tdp_w"):
        assert getattr(whole, field) == 2 * getattr(half, field)
    assert {d: p / 2 for d, p in whole.peaks.items()} == half.peaks


@pytest.mark.parametrize("stem", ALL)
def test_measured_bandwidth_stays_below_the_datasheet(stem: str) -> None:
    profile = load_device(stem)
    if profile.measured_bandwidth_bytes_per_s is not None:
        assert 0.4 < profile.measured_bandwidth_bytes_per_s / profile.bandwidth_bytes_per_s < 1


def test_best_peak_says_what_does_the_work() -> None:
    assert load_device("t4").best_peak("bf16") == (65.13e12, "fp16")  # Turing has no bf16
    assert load_device("v100-sxm-16gb").best_peak("bf16") == (125e12, "fp16")
    assert load_device("a100-sxm-80gb").best_peak("fp8") == (312e12, "bf16")  # Ampere has no fp8
    assert load_device("h100-sxm").best_peak("fp4") == (989.4e12, "bf16")
    assert load_device("h100-sxm").best_peak("fp8") == (1978.9e12, "fp8")
    assert load_device("tpu-v5e").best_peak("fp32") == (197e12, "bf16")
    for stem in ALL:
        for dtype in DTYPES:
            flops, used = load_device(stem).best_peak(dtype)
            assert flops == load_device(stem).peaks[used]


def test_peak_names_the_alternatives() -> None:
    with pytest.raises(KvsimError, match=r"T4 has no matrix unit for bf16: it has fp32, fp16, int8$"):
        load_device("t4").peak("bf16")
    with pytest.raises(KvsimError, match=r"Gaudi2 lists no peak for fp16"):
        load_device("gaudi2").peak("fp16")
    for ask in (load_device("t4").peak, load_device("t4").best_peak):
        with pytest.raises(KvsimError, match=r"'bf61' is not one of .*did you mean 'bf16'"):
            ask("bf61")


@pytest.mark.parametrize(
    ("said", "stem"),
    [
        ("h100-sxm", "h100-sxm"), ("h100_sxm", "h100-sxm"), ("H100-SXM5-80GB", "h100-sxm"), ("H100 SXM", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("rtx 4090", "rtx-4090"), ("RTX4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"), ("RTX 4090 24 GB", "rtx-4090"), ("rtx4070tisuper", "rtx-4070-ti-super"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"), ("Tesla T4", "t4"), ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-ws"), ("NVIDIA GB10", "gb10"),
        ("dgx-spark", "gb10"), ("AMD Instinct MI300X OAM", "mi300x"), ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("Intel(R) Arc(TM) B580 Graphics", "arc-b580"), ("Apple M3 Max", "m3-max-128gb"), ("tpu v5e", "tpu-v5e"),
        ("TPU-v7", "tpu7x"), ("Gaudi 3", "gaudi3"), ("trn2", "trainium2"), ("Xeon-8480+", "xeon-8480"),
        ("AMD EPYC 9654 96-Core Processor", "epyc-9654"), ("Intel Xeon Platinum 8480+", "xeon-8480"),
    ],
)  # fmt: skip
def test_names_people_and_drivers_use(said: str, stem: str) -> None:
    assert load_device(said).path.endswith(f"/{stem}.toml")


@pytest.mark.parametrize(
    ("said", "choices"),
    [
        ("a100", ["a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb"]),
        ("A100-SXM", ["a100-sxm-40gb", "a100-sxm-80gb"]),
        ("h100", ["h100-nvl", "h100-pcie", "h100-sxm"]),
        ("gh200", ["gh200-144gb", "gh200-96gb"]),
        ("rtx pro 6000", ["rtx-pro-6000-server", "rtx-pro-6000-ws"]),
    ],
)
def test_ambiguous_names_list_the_choices(said: str, choices: list[str]) -> None:
    with pytest.raises(KvsimError, match="is ambiguous: choose one of " + ", ".join(choices) + "$"):
        load_device(said)


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ("rtx 4070", "rtx-4"), ("rtx 5070", "rtx-5070-ti"), ("l40", "l40s"), ("a10g", "a10"), ("mi300", "mi300x"),
        ("mi300a", "mi300x"), ("h10", "h100"), ("rtx 6000", "rtx-6000-ada"), ("m3-max-64gb", "m3-max-128gb"),
        ("7900 xt", "rx-7900-xtx"), ("3060 8gb", "rtx-3060-12gb"), ("h200 nvl", "h200-sxm"),
        ("jetson orin nano", "orin"), ("rtx 4080 super", "rtx-4080"), ("rtx4090ti", "rtx-4090"),
        ("H800", "h"), ("a1000", "a"),
    ],
)  # fmt: skip
def test_a_sibling_is_never_taken_for_the_device(said: str, near: str) -> None:
    with pytest.raises(KvsimError, match=f"^unknown device .*did you mean .*{near}"):
        load_device(said)


def test_another_memory_size_is_refused() -> None:
    with pytest.raises(KvsimError, match=r"rtx-4090 has 24 GB GDDR6X, not 48 GB"):
        load_device("RTX 4090 48GB")
    with pytest.raises(KvsimError, match=r"h200-sxm has 141 GB HBM3e, not 96 GB"):
        load_device("h200 96gb")


@pytest.mark.parametrize("said", ["", "  ", "gpu", "nvidia", "x" * 5000, "\x00", "é", "nvidia" * 200, 7, None, 1.5, []])
def test_what_is_no_name_is_one_clear_line(said: object) -> None:
    with pytest.raises(KvsimError) as caught:
        load_device(said)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_profile_passes_through_and_behaves_as_a_value() -> None:
    device = load_device("h100-sxm")
    assert load_device(device) is device
    assert isinstance(device, HardwareProfile)
    assert pickle.loads(pickle.dumps(device)) == device
    assert hash(device) == hash(load_device("H100-SXM5-80GB"))
    assert replace(device, capacity_bytes=10**11) != device
    assert json.loads(json.dumps(asdict(device)))["peaks"]["bf16"] == 989.4e12
    assert kvsim.load_device("l4").name == "L4"


@pytest.mark.parametrize("value", [0, -1.0, nan, inf, "1"])
@pytest.mark.parametrize("field", ["capacity_bytes", "bandwidth_bytes_per_s", "units", "clock_hz"])
def test_a_profile_made_by_hand_is_checked(field: str, value: object) -> None:
    with pytest.raises(KvsimError, match=rf"{field} of device 'L4' must be finite and above zero"):
        replace(load_device("l4"), **{field: value})


def test_a_profile_without_peaks_is_refused() -> None:
    with pytest.raises(KvsimError, match="has no peak"):
        replace(load_device("l4"), peaks={})


def test_loading_one_device_reads_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    parse = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: read.append(len(text)) or parse(text))
    load_device("NVIDIA GeForce RTX 4090")
    assert len(read) == 1


def test_devices_load_without_torch_or_scipy() -> None:
    code = "import sys, kvsim; kvsim.load_device('l4'); print({'torch', 'scipy', 'pandas', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
