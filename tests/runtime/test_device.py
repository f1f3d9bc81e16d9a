"""Which machine this is: names that it may and may not carry."""

from dataclasses import replace

import pytest

from kvsim.errors import KvsimError
from kvsim.hardware import load_device
from runtime import device
from runtime.device import Machine, check_here, edition_name, identify, this_machine

H200 = Machine("gpu", "NVIDIA H200", "NVIDIA", "9.0", 132, 1.98e9, 150_754_820_096, 52_428_800, 8, "2.13", "cuda")
BOX = Machine("cpu", "AMD EPYC", "AMD", "x86_64", 2, 2.6e9, 25_276_502_016, 33_554_432, 2, "2.13", "AVX512")


def test_a_gpu_is_known_by_name_units_and_memory():
    assert identify(H200) == "h200-sxm"
    assert identify(replace(H200, units=16)) is None  # a MIG slice of it
    assert identify(replace(H200, capacity_bytes=75_000_000_000)) is None


def test_memory_tells_two_sizes_of_one_name_apart():
    # driver names carry the memory here; without it the capacity decides
    a100 = replace(H200, name="NVIDIA A100-SXM4", units=108, capacity_bytes=42_400_000_000)
    assert identify(a100) == "a100-sxm-40gb"
    assert identify(replace(a100, capacity_bytes=84_900_000_000)) == "a100-sxm-80gb"


def test_two_cores_of_a_large_processor_are_not_that_processor():
    whole = replace(BOX, name="AMD EPYC 9654 96-Core Processor", units=96)
    assert identify(whole) == "epyc-9654"
    assert identify(replace(whole, units=2)) is None


@pytest.mark.parametrize("name", ["h200-sxm", "NVIDIA H200", "a100", "epyc-9654", "RTX 4090"])
def test_a_cpu_cannot_be_named_after_a_device_that_it_is_not(name):
    with pytest.raises(KvsimError, match="this is AMD EPYC with 2 cores"):
        edition_name(BOX, name)


def test_names_that_mean_no_shipped_device_are_free():
    assert edition_name(BOX, "my-box") == "my-box"
    assert edition_name(BOX) == "AMD-EPYC-2core-24gib"  # 25276502016 / 2^30 = 23.54
    assert edition_name(H200, "h200") == "h200"


def test_a_run_here_cannot_pass_for_another_device():
    with pytest.raises(KvsimError, match="not this machine"):
        check_here(load_device("h200-sxm"), BOX)
    with pytest.raises(KvsimError, match="not this machine"):
        check_here(load_device("epyc-9654"), BOX)  # 96 cores
    check_here(load_device("h200-sxm"), H200)
    here = replace(load_device("epyc-9654"), units=1, capacity_bytes=BOX.capacity_bytes)
    check_here(here, BOX)  # calibrated with fewer threads than there are cores


def test_the_system_is_read(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(
        "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R)  Xeon(R) CPU\ncpu MHz : 2100.5\n")
    (tmp_path / "meminfo").write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n")
    for index, size in (("index0", "48K"), ("index3", "107520K")):
        (tmp_path / index).mkdir()
        (tmp_path / index / "size").write_text(size + "\n")
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "CACHES", tmp_path)
    found = this_machine()
    assert (found.name, found.vendor, found.clock_hz) == ("Intel(R) Xeon(R) CPU", "Intel", 2.1005e9)
    assert found.capacity_bytes == 16384 * 1024
    assert found.last_level_cache_bytes == 107520 * 1024


def test_what_cannot_be_measured_says_so():
    with pytest.raises(KvsimError, match="give cpu or cuda"):
        this_machine("meta")
