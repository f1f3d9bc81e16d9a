"""Whole servers: what they add to kernels, how requests wait for prompts, and tables of measured ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvsim
from kvsim.accuracy import compared, table_lines
from kvsim.coefficients import Coefficient
from kvsim.errors import KvsimError
from kvsim.kernels import tidy
from kvsim.server import engine_seconds, routed_layers, token_seconds
from kvsim.serving_steps import fit_engine, is_serving, predicted, read_steps, unseen_blocks

DATA = Path(__file__).parent.parent / "data" / "measured" / "serving_steps.csv"
HEADER = "system,backend,model_path,gemm_quant_mode,isl,osl,concurrency,tp_size,tpot_ms\n"
GOOD = "h100_sxm,vllm,meta-llama/Llama-3.1-8B-Instruct,,1024,512,16,1,9.0\n"
ENGINE = Coefficient("engine", "*", "*", 0.0, 1.0, 1.0, layer_s=10e-6, experts_s=20e-6, prefill_share=0.5,
                     log_error=(-0.1, 0.0, 0.2), source="test", date="2026-01-01")
BOX = replace(kvsim.load_device("h100-sxm"), own_coefficients=(ENGINE,))


@pytest.fixture(scope="module")
def steps():
    return read_steps(DATA)[0]


def test_a_server_adds_to_each_layer_and_more_where_experts_are():
    dense, experts = kvsim.load_model("llama-3.1-8b"), kvsim.load_model("deepseek-v3")
    # 32 layers of 10 us; 61 of 10 us, 58 of them with experts for 20 us more
    assert engine_seconds(BOX, dense).seconds == pytest.approx(320e-6)
    assert routed_layers(experts) == 58
    assert engine_seconds(BOX, experts).seconds == pytest.approx(610e-6 + 1160e-6)
    assert engine_seconds(kvsim.load_device("epyc-9654"), dense) is None


def test_requests_wait_for_the_prompts_of_others():
    # 15 others, each replaced once in 100 steps, prompts of 40 ms, half of which is waited for: 0.5 * 15 / 100 * 40 ms
    found = token_seconds(BOX, 8e-3, 40e-3, concurrency=16, new_tokens=100)
    assert found.seconds == pytest.approx(8e-3 + 3e-3)
    assert found.low == pytest.approx(11e-3 * np.exp(-0.1))
    assert token_seconds(BOX, 8e-3, 40e-3, concurrency=1, new_tokens=100).seconds == 8e-3
    with pytest.raises(KvsimError, match="no engine coefficients for device"):
        token_seconds(kvsim.load_device("epyc-9654"), 1.0, 1.0, concurrency=1, new_tokens=1)


def test_predictions_hold_the_servers_line_and_say_whose_it_is():
    case = kvsim.Case(kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090"), kvsim.parse_method("full"),
                      kvsim.Workload(1, 1000, 1), kernel="vllm")
    record = kvsim.predict(case)
    line = next(line for line in record.decode.lines if line.name == "engine")
    assert 0 < line.low < line.seconds < line.high
    assert "ada engine vllm/* * (borrowed from hopper)" in record.coefficients
    assert record.coefficients.count("borrowed from blackwell-gddr") == 1


def test_coefficients_are_named_once_under_what_they_share():
    both = "ada matmul * bf16 (borrowed from x); ada decode a bf16 (borrowed from x)"
    said = ["ada decode a bf16 (borrowed from x)", both, "ada prefill b bf16", ""]
    assert tidy(said) == "ada decode a bf16, matmul * bf16 (borrowed from x); ada prefill b bf16"


def test_servers_of_dense_models_in_the_sample(steps):
    found = compared(DATA)
    assert found.summary["dense_rows_error"] < 0.09
    assert 0.8 < found.summary["dense_rows_coverage"] < 0.99
    assert not found.left_out
    errors, dense = unseen_blocks(steps)
    assert np.median(errors[dense]) < 0.10
    lines = table_lines(found.rows, found.summary)
    assert any(line.startswith("dense rows error") for line in lines)


def test_known_numbers_come_back(steps):
    truth = replace(ENGINE, layer_s=12e-6, experts_s=25e-6, prefill_share=0.8)
    made = [replace(s, measured=predicted(s, truth).seconds) for s in steps]
    found = fit_engine(made, "*")
    assert found.layer_s == pytest.approx(12e-6, rel=0.15)
    assert found.prefill_share == pytest.approx(0.8, rel=0.05)
    # few rows have experts: where those of a fold are left out, their number hardly moves from where it began
    assert max(-found.log_error[0], found.log_error[2]) < 0.12


@pytest.mark.parametrize(("text", "said"), [
    (HEADER, "holds no rows"),
    (HEADER.replace("backend", "backnd") + GOOD, "no column 'backend' (did you mean 'backnd'?)"),
    (HEADER + GOOD.replace("9.0", "0"), "line 2: tpot_ms must be a positive number"),
    (HEADER + GOOD.replace("9.0", "nan"), "line 2: tpot_ms must be a positive number"),
    (HEADER + GOOD.replace("1024", "-1"), "line 2: isl must be a whole number, 1 or more"),
    (HEADER + GOOD.replace("16,1", "16,x"), "line 2: tp_size must be a whole number"),
    (HEADER + GOOD.replace("Instruct,,", "Instruct,fp9,"), "unknown gemm_quant_mode 'fp9' (did you mean 'fp8'?)"),
    (HEADER + GOOD.replace("9.0", "9.0,1"), "line 2: 10 fields where the header has 9"),
    (HEADER + GOOD + GOOD.replace("vllm", "v" * 5000), "line 3: lines hold at most"),
    (HEADER + GOOD.replace("h100_sxm", "h1000"), "holds no row that can be predicted: llama-3.1-8b on 1 h1000"),
    (HEADER + GOOD.replace("h100_sxm", "xeon-8480"), "no engine coefficients for device"),
])
def test_hostile_tables(text, said, tmp_path):
    path = tmp_path / "serving.csv"
    path.write_text(text)
    assert is_serving(path)
    with pytest.raises(KvsimError) as caught:
        compared(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_predicted_are_left_out_and_counted(tmp_path):
    path = tmp_path / "serving.csv"
    path.write_text(HEADER + GOOD + GOOD.replace("16,1", "16,3") + GOOD.replace("h100_sxm", "h1000"))
    found = compared(path)
    assert len(found.rows) == 1
    assert sorted(found.left_out.values()) == [1, 1]
    assert "must be divisible by it" in "".join(found.left_out)
    # a machine for which no server was measured is left out as well, and a pipeline
    path.write_text(HEADER.replace("\n", ",pp_size\n") + "".join(
        GOOD.replace("h100_sxm", gpu).replace("9.0", f"9.0,{stages}")
        for gpu, stages in (("h100_sxm", 1.0), ("h100_sxm", ""), ("xeon-8480", 1), ("h100_sxm", 2))))
    found = compared(path)
    assert [r.rows for r in found.rows] == [2]
    said = "".join(found.left_out)
    assert "no engine coefficients" in said
    assert "a pipeline of 2 stages" in said


def test_headers_as_spreadsheets_write_them(tmp_path):
    path = tmp_path / "serving.csv"
    names = HEADER.strip().split(",")
    for header in ("\ufeff" + HEADER, ", ".join(names) + "\n", ",".join(f'"{n}"' for n in names) + "\n"):
        path.write_text(header + GOOD, encoding="utf-8")
        assert is_serving(path)
        assert compared(path).rows[0].rows == 1
