"""The program through click's runner: every command's figures against the library's, JSON against the contract."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import kvsim
from kvsim.cli import main
from kvsim.plan import OBJECTIVES

ASK = ("--model", "llama-3.1-8b", "--device", "rtx-4090")
COUNT = int
SECONDS = {"seconds": float, "low": float, "high": float}
PREDICT = {
    "case": dict, "source": str, "cache_bytes": COUNT, "peak_bytes": COUNT, "weights_bytes": COUNT,
    "total_bytes": COUNT, "fits": bool, "max_context": COUNT, "max_batch": COUNT, "prefill": dict, "decode": dict,
    "lines": list, "memory": list, "buffers": list, "allocated_bytes": COUNT, "state_bytes": COUNT,
    "cross_bytes": COUNT, "coefficients": str, "warnings": list,
}  # fmt: skip
LINE = {"phase": str, "name": str, "bytes": COUNT, "flops": float, **SECONDS, "term": str}
BUFFER = {"name": str, "layer": COUNT, "shape": list, "bits": COUNT, "bytes": COUNT}
MEMORY = {
    "engine": str, "kv_bytes": COUNT, "k_bytes": COUNT, "v_bytes": COUNT, "caches": list, "state_bytes": COUNT,
    "tokens": COUNT, "blocks": COUNT, "block_tokens": COUNT, "max_concurrency": float, "warnings": list,
}  # fmt: skip


def run(*args, status=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == status, result.output
    return result


def ask(*args, status=0):
    return json.loads(run(*args, "--json", status=status).stdout)


def check_fields(found, contract, null=False):
    """Each field of the contract is there and of its type; bool is no whole number."""
    for name, kind in contract.items():
        value = found[name]
        if null and value is None:
            continue
        assert isinstance(value, (int, float) if kind is float else kind), f"{name}: {value!r} is no {kind.__name__}"
        assert kind is bool or not isinstance(value, bool), f"{name}: {value!r} is no {kind.__name__}"


def check_answer(found):
    check_fields(found, PREDICT)
    for phase in ("prefill", "decode"):
        check_fields(found[phase], {**SECONDS, "dominant": str})
    for row in found["lines"]:
        check_fields(row, LINE)
    for row in found["buffers"]:
        check_fields(row, BUFFER)
    for row in found["memory"]:
        check_fields(row, {"name": str, "bytes": COUNT})
    for phase in ("prefill", "decode"):
        total = sum(row["seconds"] for row in found["lines"] if row["phase"] == phase)
        assert found[phase]["seconds"] == pytest.approx(total)
        assert found[phase]["low"] <= found[phase]["seconds"] <= found[phase]["high"]
    assert found["cache_bytes"] == sum(row["bytes"] for row in found["buffers"])


def test_predict_json_is_the_contract_and_the_librarys_answer():
    found = ask("predict", *ASK, "--method", "kivi-4", "--prompt", "8k", "--new", 16, "--batch", 2)
    check_answer(found)
    model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
    case = kvsim.Case(model, device, kvsim.parse_method("kivi-4"), kvsim.Workload(2, 8192, 16))
    assert found == json.loads(json.dumps(kvsim.predict(case).to_json()))
    assert found["case"]["prompt_tokens"] == 8192


def test_the_full_cache_by_hand():
    # llama-3.1-8b: 32 layers x 8 KV heads x 128 x 2 sides x 2 bytes = 131,072 bytes a token; x 131,072 tokens = 2^34.
    found = ask("predict", *ASK, "--method", "full", "--prompt", "128k", status=1)
    assert found["cache_bytes"] == 2**34
    assert not found["fits"]


def test_fit_json_is_the_contract():
    found = ask("fit", *ASK, "--prompt", "128k", "--batch", 1)
    assert set(found) >= {"chosen", "frontier", "rejected", "question"}
    for answer in [found["chosen"], *found["frontier"]]:
        check_answer(answer)
        check_fields(answer, {"method": str, "compression": float})
        if answer["quality"] is not None:  # since evidence exists; what was not measured keeps null
            check_fields(answer["quality"], {"kl": float, "top1": float, "ppl_ratio": float, "evidence": str})
        assert answer["engine_flags"] is None
        assert str(kvsim.parse_method(answer["method"])) == answer["method"]
    for row in found["rejected"]:
        check_fields(row, {"method": str, "reason": str, "short_by_bytes": COUNT})
    assert found["question"]["prompt_tokens"] == 131072


def test_fit_with_an_engine_gives_its_flags_and_only_what_it_runs():
    found = ask("fit", *ASK, "--prompt", "128k", "--engine", "llama.cpp")
    assert "-ctk " in found["chosen"]["engine_flags"]
    reasons = {r["method"]: r["reason"] for r in found["rejected"]}
    assert "llama.cpp cannot run h2o" in reasons["h2o(budget=0.2)"]
    text = run("fit", *ASK, "--prompt", "128k", "--engine", "llama.cpp").stdout
    assert found["chosen"]["engine_flags"] in text


def test_fit_says_when_nothing_fits():
    found = ask("fit", *ASK, "--prompt", "128k", "--methods", "full", status=1)
    assert found["chosen"] is None
    assert found["rejected"][0]["short_by_bytes"] > 0
    assert "nothing fits" in run("fit", *ASK, "--prompt", "128k", "--methods", "full", status=1).stdout


def test_methods_split_outside_parentheses():
    asked = "int(bits=4,group=32),snapkv(budget=0.5,window=16)"
    found = ask("fit", *ASK, "--prompt", "4k", "--methods", asked)
    methods = {found["chosen"]["method"], *(p["method"] for p in found["frontier"])}
    assert methods <= {"full", "int(bits=4,group=32)", "snapkv(budget=0.5,window=16)"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_answers(objective):
    found = ask("fit", *ASK, "--prompt", "64k", "--objective", objective, "--methods", "int(bits=8),int(bits=4)")
    assert found["question"]["objective"] == objective
    assert found["chosen"]


def test_limits_that_are_not_met_are_status_1():
    for limit in (("--max-ttft", 1), ("--max-tpot", 0.01), ("--min-context", "100k")):
        args = ("predict", *ASK, "--method", "full", "--prompt", "4k", *limit)
        assert "limit not met" in run(*args, status=1).stdout
        reasons = {
            r["reason"] for r in ask("fit", *ASK, "--prompt", "4k", "--methods", "full", *limit, status=1)["rejected"]
        }
        assert reasons


def test_options_of_a_case_reach_it():
    base = ask("predict", *ASK, "--method", "full", "--prompt", "4k")
    other = ask("predict", *ASK, "--method", "full", "--prompt", "4k", "--weights", "int4", "--kv-dtype", "fp32",
                "--reserve", "2GiB")  # fmt: skip
    assert other["weights_bytes"] < base["weights_bytes"]
    assert other["cache_bytes"] == 2 * base["cache_bytes"]
    assert {m["name"]: m["bytes"] for m in other["memory"]}["runtime reserve"] == 2 * 2**30
    halved = ask("predict", *ASK, "--method", "full", "--prompt", "4k", "--devices", 2)
    assert halved["cache_bytes"] * 2 == base["cache_bytes"]
    named = ask("predict", *ASK, "--method", "full", "--prompt", "4k", "--kernel", "no-such-kernel")
    assert named["coefficients"]


def test_sweep_prints_writes_and_agrees_with_predict(tmp_path):
    args = ("sweep", *ASK, "--method", "int(bits=4),full", "--prompt", "4096:131072:x2", "--batch", "1,4")
    rows = ask(*args)
    assert [r["prompt_tokens"] for r in rows[:6]] == [4096, 8192, 16384, 32768, 65536, 131072]
    assert len(rows) == 2 * 2 * 6
    one = ask("predict", *ASK, "--method", "int(bits=4)", "--prompt", 8192, "--batch", 4)
    (same,) = [r for r in rows if (r["method"], r["batch"], r["prompt_tokens"]) == ("int(bits=4)", 4, 8192)]
    assert (same["cache_bytes"], same["peak_bytes"]) == (one["cache_bytes"], one["peak_bytes"])
    assert same["tpot_s"] == pytest.approx(one["decode"]["seconds"])
    run(*args, "--out", tmp_path / "out.csv")
    head, *lines = (tmp_path / "out.csv").read_text().splitlines()
    assert head.startswith("model,device,method,batch,prompt_tokens")
    assert len(lines) == 24
    run(*args, "--out", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == rows
    assert "131,072" in run(*args).stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.json"]


def test_a_sweep_where_nothing_fits_is_status_1():
    run("sweep", *ASK, "--method", "full", "--prompt", "128k", status=1)


def test_memory_json_is_the_contract_and_takes_the_engines_spellings():
    found = ask(
        "memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "-c", 8192, "-ctk", "q8_0", "-ctv", "q4_0", "-fa"
    )
    check_fields(found, MEMORY, null=True)
    # 32 layers x 8192 cells x 1024 values: keys 34 bytes per 32 values, values 18.
    assert found["k_bytes"] == 32 * 8192 * 1024 // 32 * 34
    assert found["v_bytes"] == 32 * 8192 * 1024 // 32 * 18
    same = ask("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "--n-ctx=8k", "--type-k", "q8_0",
               "--type-v", "q4_0", "--flash-attn", "on")  # fmt: skip
    assert same == found
    for row in found["caches"]:
        check_fields(row, {"name": str, "bytes": COUNT})
    text = run("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "-c", 8192).stdout
    assert "1,024.00 MiB" in text  # 8192 tokens x 128 KiB
    for engine in ("vllm", "sglang"):
        check_fields(
            ask("memory", "--engine", engine, "--model", "llama-3.1-8b", "--pool-bytes", "40e9"), MEMORY, null=True
        )


def test_memory_lists_the_flags_of_an_engine():
    assert "--n-ctx" in run("memory", "--engine", "llama.cpp", "--model", "x", "--flags").stdout.split()


def test_explain_prints_found_beside_predicted(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "llama_kv_cache: size = 1024.00 MiB (  8192 cells,  32 layers,  1/1 seqs), "
        "K (f16):  512.00 MiB, V (f16):  512.00 MiB\n"
    )
    found = ask("explain", log, "--model", "llama-3.1-8b")
    assert found["findings"]
    assert "1024.00" in run("explain", log, "--model", "llama-3.1-8b").stdout
    (tmp_path / "empty.log").write_text("")
    assert "note: " in run("explain", tmp_path / "empty.log").stdout


def test_lists_hold_everything_that_is_known():
    names = {r["name"] for r in ask("methods")}
    assert {"int", "h2o", "svd", "kivi-4", "outliers"} <= names
    assert {r["name"] for r in ask("devices")} >= {"rtx-4090", "h100-sxm"}
    assert {r["name"] for r in ask("models")} >= {"llama-3.1-8b"}
    for command in ("methods", "devices", "models"):
        text = run(command).stdout
        for row in ask(command)[:5]:
            assert row["name"] in text


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("int", "format", "bits a code"),
        ("h2o", "tokens", "2306.14048"),
        ("kivi-4", "preset", "2402.02750"),
        ("h100-sxm", "device", "81559 MiB"),
        ("NVIDIA GeForce RTX 4090", "device", "RTX-4090"),
        ("llama-3.1-8b", "model", "8,030,261,248"),
        ("h2o(budget=0.3) | int(bits=4)", "method", "h2o(budget=0.3) | int(bits=4)"),
    ],
)
def test_show_tells_what_is_known_with_its_source(name, kind, says):
    assert ask("show", name)["kind"] == kind
    assert says in run("show", name).stdout


def test_show_tells_every_part_preset_device_and_model():
    for command in ("methods", "devices", "models"):
        for row in ask(command):
            assert ask("show", row["name"])["kind"] == row["kind"]


def test_validate_against_a_file_needs_no_torch(tmp_path):
    table = tmp_path / "decode_attention.csv"
    table.write_text(
        "gpu,kernel,kv_dtype,batch,seq,n_heads,n_kv_heads,head_dim,window,latency_us\n"
        "h100_sxm,vllm_flash_attn,bfloat16,1,4096,32,8,128,0,20.0\n"
        "h100_sxm,vllm_flash_attn,bfloat16,8,8192,32,8,128,0,110.0\n"
    )
    found = ask("validate", "--against", table)
    (file,) = found["files"]
    assert file["rows"][0]["rows"] == 2
    assert "median over groups" in run("validate", "--against", table).stdout


@pytest.mark.parametrize("command", ["calibrate", "measure", "quality", "train", "validate"])
def test_commands_of_the_runtime_say_in_one_line_what_they_need(command, monkeypatch):
    import kvsim.cli_runtime

    monkeypatch.setattr(kvsim.cli_runtime, "find_spec", lambda name: None)
    error = run(command, "--model", "x", status=2).stderr
    assert error.count("\n") == 1
    assert "pip install 'kvsim[runtime]'" in error
    monkeypatch.setattr(kvsim.cli_runtime, "find_spec", lambda name: None if name.startswith("runtime.") else True)
    error = run(command, status=2).stderr
    assert error.count("\n") == 1
    assert "later" in error


def test_names_of_two_words_need_no_quotes():
    assert run("show", "RTX", "4090").stdout == run("show", "rtx-4090").stdout


def test_batches_are_shown_where_they_are_asked_for():
    text = run("fit", *ASK, "--prompt", "8k", "--methods", "int4", "--objective", "batch").stdout
    assert "batch    TTFT" in text
    assert "context" not in text


def test_help_names_every_command_and_option():
    text = run("--help").stdout
    for command in main.commands.values():
        assert command.name in text
        assert command.help
    assert "..." not in text.partition("Commands:")[2]
    assert run().stdout == text
    assert "--max-ttft" in run("fit", "--help").stdout
