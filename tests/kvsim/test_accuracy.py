"""Predictions against a sample of public measurements; hostile tables end in one line."""

from pathlib import Path

import numpy as np
import pytest

from kvsim import crosscheck, families
from kvsim.accuracy import evaluate, evaluate_table, like_llm, summary, table_lines
from kvsim.coefficients import family_coefficients
from kvsim.errors import KvsimError
from kvsim.kernels import chosen, kernel_family
from kvsim.measured import device_of, read_table

DATA = Path(__file__).parent.parent / "data" / "measured"
HEADER = "gpu,kernel,kv_dtype,batch,seq,n_heads,n_kv_heads,head_dim,window,latency_us\n"
PHASED = HEADER.replace("\n", ",phase\n")
GOOD = "h100_sxm,sglang-0.5.14/fa3,bf16,8,4096,32,8,128,0,60.0\n"


@pytest.mark.parametrize(("file", "limit"), [
    ("decode_attention.csv", 0.08), ("prefill_attention.csv", 0.10), ("matrix_products.csv", 0.08)])
def test_median_error_over_groups_and_coverage(file: str, limit: float) -> None:
    rows = evaluate(DATA / file)
    total = summary(rows)
    assert total["error"] < limit
    assert 0.86 < np.average([r.coverage for r in rows], weights=[r.rows for r in rows]) < 0.94


def test_decode_rows_like_a_language_model() -> None:
    table = read_table(DATA / "decode_attention.csv")
    llm = table.where(like_llm(table))
    assert len(llm) > 80
    s = llm.sizes
    assert (s["window"] == 0).all()
    assert (s["head_dim"] == 128).all()
    assert (s["n_heads"] // s["n_kv_heads"]).min() >= 4
    assert summary(evaluate_table(llm))["error"] < 0.08


def test_another_familys_coefficients_are_worse() -> None:
    table = read_table(DATA / "decode_attention.csv")
    hopper = table.where(table.gpu == "h100_sxm")
    own = summary(evaluate_table(hopper))["error"]
    lent = summary(evaluate_table(hopper, family_coefficients("blackwell-dc")))["error"]
    assert own < 0.5 * lent
    assert lent < 0.45


def test_the_table_for_people() -> None:
    lines = table_lines(evaluate(DATA / "decode_attention.csv"))
    assert lines[0].split()[:3] == ["device", "kernel", "format"]
    assert lines[-1].startswith("median over groups")
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("gpu", ["a100_pcie", "a100_sxm", "a30", "b200_sxm", "b300_sxm", "b60", "gb200", "gb300",
                                 "h100_pcie", "h100_sxm", "h200_sxm", "l4", "l40s", "rtx_pro_6000_server"])
def test_names_of_public_tables_are_devices(gpu: str) -> None:
    assert device_of(gpu).bandwidth_bytes_per_s > 1e11


@pytest.mark.parametrize(("name", "family"), [
    ("vllm-0.24.0/vllm_flash_attn_fa3", ("vllm", "0.24", "fa3")),
    ("vllm-0.14.0/vllm_flash_attn", ("vllm", "0.14", "fa2")),
    ("vllm-0.24.0/vllm_flashinfer_trtllmdecode", ("vllm", "0.24", "trtllm_decode")),
    ("vllm-0.24.0/vllm_flashinfer_fiprefill", ("vllm", "0.24", "fi_prefill")),
    ("sglang-0.5.14/trtllm_mha", ("sglang", "0.5", "trtllm_mha")),
    ("sglang-0.5.10/flash_attention", ("sglang", "0.5", "fa2")),
    ("trtllm-1.3.0rc20/torch_flow", ("trtllm", "1.3", "trtllm")),
    ("trtllm-1.3.0rc20/torch_flow_flashinfer", ("trtllm", "1.3", "flashinfer")),
    ("vllm", ("vllm", "", "")), ("tensorrt-llm", ("trtllm", "", "")), ("FA3", ("", "", "fa3")),
    ("flashinfer", ("", "", "flashinfer")), ("trtllm_mha", ("trtllm", "", "trtllm_mha")), ("odd", ("", "", "odd")),
])
def test_kernel_names(name: str, family: tuple[str, str, str]) -> None:
    assert kernel_family(name) == family


@pytest.mark.parametrize(("gpu", "kernel", "format", "row"), [
    ("h100_sxm", None, "bf16", "vllm/fa3"), ("h100_sxm", "sglang", "fp8", "sglang/fa3"),
    ("h100_sxm", "trtllm", "bf16", "trtllm/trtllm"), ("h100_sxm", "fa2", "bf16", "vllm/fa3"),
    ("gb300", "trtllm_mha", "fp8", "sglang/trtllm_mha"), ("gb300", "flashinfer", "bf16", "sglang/flashinfer"),
    ("gb300", "vllm", "fp8", "vllm/trtllm_decode"), ("rtx_pro_6000_server", "fa2", "fp8", "vllm/fi_decode"),
    ("b60", "vllm-0.20.0/vllm_flash_attn", "fp8", "vllm-0.20/fa2"), ("b60", "vllm", "fp8", "vllm/fa2"),
])
def test_kernels_resolve(gpu: str, kernel: str | None, format: str, row: str) -> None:
    assert chosen(device_of(gpu), "decode", kernel, format).coefficient.kernel == row


def test_an_unknown_kernel_falls_back_and_says_so() -> None:
    choice = chosen(device_of("h100_sxm"), "decode", "wonder", "bf16")
    assert choice.coefficient.kernel == "vllm/fa3"
    assert "kernel 'wonder' unknown for hopper, its default is used" in choice.said


def test_formats_beyond_the_measured_borrow_and_widen() -> None:
    h100 = device_of("h100_sxm")
    fp8, int8, int4, nf4 = (chosen(h100, "decode", None, f) for f in ("fp8", "int8", "int4", "nf4"))
    assert fp8.widen == 0.0 < int8.widen < int4.widen < nf4.widen
    assert fp8.rate_factor == int8.rate_factor > int4.rate_factor > nf4.rate_factor
    assert "int4 by analogy with fp8" in int4.said
    assert chosen(h100, "decode", None, "a codebook of mine", "lookup").widen == nf4.widen


def _write(folder: Path, text: str, name: str = "decode.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_a_small_table(tmp_path: Path) -> None:
    (row,) = evaluate(_write(tmp_path, HEADER + GOOD + "\n" + GOOD.replace("60.0", "5e1")))
    assert (row.device, row.kernel, row.format) == ("h100_sxm", "sglang-0.5.14/fa3", "bf16")
    assert (row.op, row.rows, row.trusted) == ("decode", 2, True)
    assert read_table(_write(tmp_path, HEADER + GOOD, "prefill.csv")).op == "prefill"


@pytest.mark.parametrize(("text", "said"), [
    ("", "no column 'gpu'"),
    (HEADER, "holds no rows"),
    (HEADER.replace("window", "windw") + GOOD, "no column 'window' (did you mean 'windw'?)"),
    (HEADER + GOOD.replace(",60.0", ""), "line 2: 9 fields where the header has 10"),
    (HEADER + GOOD + GOOD.replace("4096", "-4"), "line 3: seq must lie between 1 and"),
    (HEADER + GOOD.replace("4096", "nan"), "line 2: seq must be a whole number"),
    (HEADER + GOOD.replace("4096", "9" * 400), "line 2: seq must be"),
    (HEADER + GOOD.replace("4096", "1e400"), "line 2: seq must be a whole number"),
    (HEADER + GOOD.replace("60.0", "0"), "latency_us must be a positive number"),
    (HEADER + GOOD.replace("60.0", "inf"), "latency_us must be a positive number"),
    (HEADER + GOOD.replace("60.0", "soon"), "latency_us must be a positive number"),
    (HEADER + GOOD.replace("h100_sxm", "h1000"), "decode.csv: unknown device 'h1000'"),
    (HEADER + GOOD.replace("bf16", "bf61"), "decode.csv: unknown format 'bf61'"),
    (HEADER + GOOD.replace("32,8", "8,32"), "decode.csv line 2: n_heads must be a multiple of n_kv_heads, got 8"),
    (HEADER + GOOD.replace("32,8", "33,8"), "line 2: n_heads must be a multiple of n_kv_heads, got 33 and 8"),
    (HEADER.replace("window", "gpu"), "has two columns 'gpu'"),
    (PHASED + GOOD.replace("60.0", "60.0,training"), "line 2: phase must be decode or prefill, got 'training'"),
    (PHASED + GOOD.replace("60.0", "60.0,decode") + GOOD.replace("60.0", "60.0,prefill"),
     "line 3: phase is prefill where the rows before are decode"),
    (HEADER + "x" * 5000 + "\n", "line 2: lines hold at most"),
    (HEADER + '"' + GOOD, "line 2:"),
])
def test_hostile_tables(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(KvsimError) as caught:
        evaluate(_write(tmp_path, text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_says_the_phase_and_else_the_name(tmp_path: Path) -> None:
    phased = PHASED + GOOD.replace("60.0", "60.0, Prefill")
    assert read_table(_write(tmp_path, phased, "decode.csv")).op == "prefill"
    assert read_table(_write(tmp_path, phased.replace("Prefill", "decode"), "prefill.csv")).op == "decode"


def test_a_spreadsheets_utf8(tmp_path: Path) -> None:
    plain, marked = (evaluate(_write(tmp_path, mark + HEADER + GOOD, "decode.csv")) for mark in ("", "\ufeff"))
    assert marked == plain


def test_rows_that_contradict_the_datasheet_are_reported_apart(tmp_path: Path) -> None:
    # 256 sequences of 16,384 tokens, 8 * 128 * 2 values of 2 bytes: 17 GB in 1 ms would be 17 TB/s on 3.35
    rows = evaluate(_write(tmp_path, HEADER + GOOD + GOOD.replace("8,4096", "256,16384").replace("60.0", "1000")))
    assert [(r.rows, r.trusted) for r in rows] == [(1, True), (1, False)]
    assert summary(rows)["error"] == rows[0].error
    assert "not trusted" in table_lines(rows)[2]
    assert summary(rows[1:])["error"] is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00gpu")
    for path in (tmp_path / "missing.csv", tmp_path, tmp_path / "bytes.csv"):
        with pytest.raises(KvsimError, match="cannot be read"):
            evaluate(path)


@pytest.mark.parametrize(("main", "more"), [(crosscheck.main, []), (families.main, ["--out", "x"])])
def test_a_folder_without_tables_is_one_line(main, more, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["prog", str(tmp_path), *more])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: no measured tables (*.csv) in {tmp_path}\n"
