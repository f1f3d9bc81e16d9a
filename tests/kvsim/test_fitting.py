"""Fitting: known numbers come back, unseen shapes are predicted, distrusted rows stay out, files read back."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsim.accuracy import summary
from kvsim.coefficients import BOUNDS, Coefficient, family_coefficients, parse_coefficients
from kvsim.crosscheck import BLOCK, carried, held_out, unseen_shapes
from kvsim.families import UNKNOWN, carried_errors, fit_family, lent, spread_of, to_lend, written
from kvsim.fitting import fit, predictor, quantiles, trusted
from kvsim.hardware import load_device
from kvsim.lending import LENDERS
from kvsim.measured import Table, device_of, read_table

DATA = Path(__file__).parent.parent / "data" / "measured"


def group(table: Table, gpu: str, kernel: str, format: str) -> Table:
    names = np.array([kernel in str(k) for k in table.kernel])
    return table.where((table.gpu == gpu) & names & (table.format == format))


def errors(table: Table, c: Coefficient) -> np.ndarray:
    return np.abs(predictor(table)(c)[0] / table.seconds - 1)


def blocks(table: Table, *names: str) -> np.ndarray:
    """A number for each block of shapes, so that whole blocks can be held out."""
    key = sum(table.sizes[n] * prime for n, prime in zip(names, (7919, 104729, 15485863), strict=False))
    return key % 997 % 3 == 0


def test_known_numbers_come_back() -> None:
    rows = group(read_table(DATA / "decode_attention.csv"), "h100_sxm", "fa3", "bf16")
    true = Coefficient("decode", "x/x", "bf16", t0_s=9e-6, bandwidth_share=0.8, flops_share=0.2, wave_s=2e-6,
                       element_rates=((64, 8.0), (128, 8.0), (256, 8.0)), slots=1.5, max_splits=64.0, split_s=2e-6)
    made = replace(rows, seconds=predictor(rows)(true)[0])
    found = fit(made, "x/x", "bf16")
    assert np.median(errors(made, found)) < 0.01
    assert found.t0_s == pytest.approx(9e-6, rel=0.05)
    assert found.bandwidth_share == pytest.approx(0.8, rel=0.05)
    assert found.wave_s == pytest.approx(2e-6, rel=0.2)
    assert found.devices == ("H100-SXM5-80GB",)
    assert found.rows == len(rows)


def test_a_tenth_of_nonsense_hardly_moves_a_fit() -> None:
    rows = group(read_table(DATA / "matrix_products.csv"), "h100_sxm", "nn.functional.linear", "bf16")
    clean = fit(rows, "*", "bf16")
    wrong = rows.seconds.copy()
    wrong[::10] *= 20
    spoilt = fit(replace(rows, seconds=wrong), "*", "bf16")
    assert np.median(np.abs(np.log(predictor(rows)(spoilt)[0] / predictor(rows)(clean)[0]))) < 0.05


@pytest.mark.parametrize(("file", "who", "names", "limit"), [
    ("decode_attention.csv", ("h100_sxm", "fa3", "bf16"), ("n_heads", "n_kv_heads", "batch"), 0.12),
    ("prefill_attention.csv", ("gb300", "trtllm_mha", "bf16"), ("n_heads", "n_kv_heads", "batch"), 0.12),
    ("matrix_products.csv", ("h100_sxm", "nn.functional.linear", "bf16"), ("n", "m"), 0.12),
])
def test_held_out_blocks_of_shapes(file: str, who: tuple, names: tuple, limit: float) -> None:
    rows = group(read_table(DATA / file), *who)
    out = blocks(rows, *names)
    assert 20 < out.sum() < len(rows) / 2
    c = fit(rows.where(~out), "x/x", "bf16")
    assert np.median(errors(rows.where(out), c)) < limit


def test_fitted_numbers_stay_inside_physics() -> None:
    for family in ("ampere-dc", "hopper", "blackwell-dc", "blackwell-gddr", "xe"):
        for c in family_coefficients(family):
            for name, (low, high) in BOUNDS.items():
                assert low <= getattr(c, name) <= high, (c.key, name)
            assert c.bandwidth_share <= 1.0


def test_rows_to_distrust() -> None:
    table = read_table(DATA / "decode_attention.csv")
    row = table.where((table.gpu == "a100_sxm") & (table.sizes["batch"] * table.sizes["seq"] > 200_000)).where([0])
    impossible = replace(row, seconds=row.seconds / 100)
    trt = replace(row, kernel=np.array(["trtllm-1.0.0/torch_flow"]))
    assert trusted(row).tolist() == [True]
    assert trusted(impossible).tolist() == [False]
    assert trusted(trt).tolist() == [False]
    assert trusted(replace(impossible, op="prefill")).tolist() == [True]


def test_quantiles_leave_room() -> None:
    assert quantiles(np.zeros(10)) == (-0.02, 0.0, 0.02)
    low, mid, high = quantiles(np.linspace(-1, 1, 201))
    assert (low, mid, high) == pytest.approx((-0.9, 0.0, 0.9))


def test_what_is_written_reads_back() -> None:
    for family in ("hopper", "ada", "cpu"):
        rows = list(family_coefficients(family))
        assert list(parse_coefficients(tomllib.loads(written(family, rows)), family)) == rows


@pytest.mark.slow
def test_a_family_from_rows_to_file_and_to_the_families_that_borrow() -> None:
    tables = []
    for file in ("decode_attention.csv", "prefill_attention.csv", "matrix_products.csv"):
        table = read_table(DATA / file)
        tables.append(table.where(np.isin(table.gpu, ["h100_sxm", "rtx_pro_6000_server"])))
    measured = {family: fit_family(tables, family) for family in ("hopper", "blackwell-gddr")}
    keys = {c.key for c in measured["hopper"]}
    assert ("decode", "vllm/fa3", "fp8") in keys
    assert ("matmul", "*", "bf16") in keys
    assert ("matmul", "trtllm/*", "fp8") in keys
    assert next(c for c in measured["hopper"] if c.op == "decode").kernel == "vllm/fa3"
    apart = {table.op: carried_errors(table, measured) for table in tables}
    spreads = {op: spread_of(found) for op, found in apart.items()}
    # between two families each is only carried to and from the other: without one of them nothing is known
    assert all(spread_of(found, "hopper") == UNKNOWN for found in apart.values())
    for c in lent(measured["blackwell-gddr"], LENDERS["ada"], "ada", spreads):
        assert c.borrowed == "blackwell-gddr"
        assert c.log_error[0] <= -0.1
        assert c.log_error[2] >= 0.1
    assert device_of("b60").name == "Arc-Pro-B60"


def test_a_loan_keeps_attention_s_cache_by_unit_and_products_by_memory() -> None:
    rows = [replace(c, cache_rate=0.0, cache_multiple=3.0) for c in family_coefficients("hopper") if c.devices]
    device = load_device(rows[0].devices[0])
    for before, after in zip(rows, to_lend(rows), strict=True):
        if before.op == "matmul":
            assert after == before
        else:
            assert after.cache_multiple == 0.0
            cached = after.cache_rate * device.units * device.clock_hz
            assert cached == pytest.approx(3.0 * device.bandwidth_bytes_per_s)


def test_element_wise_kernels_know_the_reach_of_attention_s_cache() -> None:
    for family in ("hopper", "ampere-dc", "xe"):
        rows = family_coefficients(family)
        attention = next(c for c in rows if c.op == "decode" and c.format == "bf16")
        assert next(c for c in rows if c.op == "elementwise").cache_reach == attention.cache_reach != 1.0


def test_a_family_of_another_maker_than_its_lender_is_known_less() -> None:
    for op in ("decode", "prefill", "matmul"):
        near, far = (next(c for c in family_coefficients(f) if c.op == op) for f in ("ada", "rdna"))
        assert near.borrowed == far.borrowed == "blackwell-gddr"
        assert far.log_error[2] > near.log_error[2]


def test_held_out_blocks_are_whole_and_about_a_quarter() -> None:
    for file in ("decode_attention.csv", "prefill_attention.csv", "matrix_products.csv"):
        table = read_table(DATA / file)
        out = held_out(table)
        assert 0.15 < out.mean() < 0.35
        columns = np.stack([table.sizes[name] for name in BLOCK[table.op]], axis=1)
        assert not {tuple(r) for r in columns[out]} & {tuple(r) for r in columns[~out]}


@pytest.mark.slow
def test_unseen_shapes_of_every_kernel_in_the_sample() -> None:
    table = read_table(DATA / "matrix_products.csv")
    total = summary(unseen_shapes(table.where(np.isin(table.gpu, ["h100_sxm", "gb300"]))))
    assert total["error"] is not None
    assert total["error"] < 0.15


@pytest.mark.slow
def test_carrying_to_another_family_costs_accuracy() -> None:
    table = read_table(DATA / "matrix_products.csv")
    lender = {"hopper": list(family_coefficients("hopper"))}
    found = carried(table, lender)
    assert ("gb300", "hopper") not in found
    assert 0.02 < summary(found["blackwell-dc", "hopper"])["error"] < 0.3
