"""Wrong questions: one line on stderr that says what to do, status 2, never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.cli import main

ASK = ("--model", "llama-3.1-8b", "--device", "rtx-4090")
FIT = ("fit", *ASK, "--prompt", "4k", "--methods", "int(bits=4)")
PREDICT = ("predict", *ASK, "--prompt", "4k", "--method", "int(bits=4)")


def refused(*args):
    """The one line that a wrong question gets."""
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvsim: ")
    assert result.stderr.endswith("\n")
    line = result.stderr[:-1]
    assert line.isprintable()
    assert len(line) < 1200
    return line


def changed(args, option, value):
    """The same command with one option's value replaced, or added."""
    found = list(args)
    if option in found:
        found[found.index(option) + 1] = value
        return found
    return [*found, option, value]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--model", "llama-3.1-8x", "did you mean 'llama-3.1-8b'"),
        ("--model", "", "model"),
        ("--model", "no/such/config.json", "does not exist"),
        ("--device", "rtx-4091", "did you mean"),
        ("--device", "a100", "a100-sxm-80gb"),
        ("--device", "h100", "ambiguous"),
        ("--device", "./mine.toml", "does not exist"),
        ("--devices", "0", "devices"),
        ("--devices", "-1", "devices"),
        ("--devices", "two", "--devices"),
        ("--devices", "3", ""),
        ("--weights", "int5", "did you mean"),
        ("--kv-dtype", "bf61", "did you mean 'bf16'"),
        ("--reserve", "1.5", "--reserve"),
        ("--reserve", "lots", "512MiB"),
        ("--prompt", "-1", "--prompt"),
        ("--prompt", "nan", "--prompt"),
        ("--prompt", "1e30", "--prompt"),
        ("--prompt", "9" * 40, "--prompt"),
        ("--prompt", "1.5", "not a whole number"),
        ("--prompt", "200k", "context of 131072"),
        ("--prompt", "4096\n8192", "--prompt"),
        ("--new", "1m", "context of 131072"),
        ("--batch", "0", "batch"),
        ("--batch", "1:4:x2", "--batch"),
        ("--batch", "2000g", "--batch"),
        ("--max-ttft", "nan", "positive"),
        ("--max-ttft", "-5", "positive"),
        ("--max-tpot", "inf", "positive"),
        ("--max-tpot", "soon", "--max-tpot"),
        ("--min-context", "0", "positive"),
    ],
)
def test_impossible_options_are_refused_by_fit_and_predict(option, value, says):
    for command in (FIT, PREDICT):
        assert says in refused(*changed(command, option, value))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("", "empty"),
        ("kivi-44", "did you mean 'kivi-4'"),
        ("int(bits=99)", "bits"),
        ("int(bits=4", "does not close"),
        ("int(bit=4)", "did you mean 'bits'"),
        ("int(bits=nan)", "bits"),
        ("h2o(budget=0)", "budget"),
        ("h2o(budget=0.2) | int(bits=2,axis=channel)", "cannot leave alone"),
        ("k:int(bits=4)", "sides are written"),
        ("int(bits=4) | h2o(budget=0.2)", "cannot follow"),
        ("int(bits=4) @ sometimes", "protocol"),
        ("int(bits=4); layers=99: full", "layers"),
        ("int(group=4096)", "group"),
        ("\x1b[31mred", "cannot be printed"),
        ("(" * 4000, ""),
        ("int(bits=4)" * 1000, ""),
    ],
)
def test_methods_that_cannot_be_are_refused(method, says):
    assert says in refused(*changed(PREDICT, "--method", method))
    assert says in refused("sweep", *ASK, "--prompt", "4k", "--method", method) or not method
    refused(*changed(FIT, "--methods", method))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("fti",), "did you mean 'fit'"),
        (("compare-everything",), "the commands"),
        (("--nonsense",), "no option"),
        (("fit",), "fit needs --model"),
        (("fit", *ASK), "fit needs --prompt"),
        (("fit", "--model"), "--model"),
        ((*FIT, "--max-ttf", "3"), "did you mean '--max-ttft'"),
        ((*FIT, "stray"), "stray"),
        ((*FIT, "--objective", "speedy"), "did you mean 'speed'"),
        ((*FIT, "--engine", "vlm"), "did you mean 'vllm'"),
        ((*FIT, "--engine", "exllamav2"), "vllm"),
        (("fit", *ASK, "--prompt", "4k", "--methods", "int(bits=4),,full"), "empty"),
        (("predict", *ASK, "--prompt", "4k"), "predict needs --method"),
        (("predict", *ASK, "--prompt", "4k", "--method", "int4", "--method", "int8"), "twice"),
        (("sweep", *ASK, "--prompt", "4k", "--method", "int4", "--methods", "int8"), "twice"),
        (("sweep", *ASK, "--method", "full", "--prompt", "4k:1k:x2"), "backwards"),
        (("sweep", *ASK, "--method", "full", "--prompt", "1:100:x1"), "above 1"),
        (("sweep", *ASK, "--method", "full", "--prompt", "1:2"), "x2"),
        (("sweep", *ASK, "--method", "full", "--prompt", "1:131072:1", "--batch", "1:1000:1"), "take larger steps"),
        (("sweep", *ASK, "--method", "full", "--prompt", "4k", "--out", "here.xlsx"), ".csv or .json"),
        (("sweep", *ASK, "--method", "full", "--prompt", "4k", "--out", "no-such-folder/x.csv"), "folder"),
        (("memory", "--engine", "lama.cpp", "--model", "llama-3.1-8b"), "did you mean 'llama.cpp'"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "--n-ctz", "8192"), "did you mean"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "--n-ctx", "many"), "n_ctx"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "-c", "1", "-c", "2"), "twice"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "-c", "1", "--n-ctx", "2"), "twice"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "8192"), "no flag"),
        (("memory", "--engine", "llama.cpp", "--model", "llama-3.1-8b", "-c", "8192", "-ctv", "q4_9"), "q4_0"),
        (("explain",), "LOGFILE"),
        (("explain", "no-such.log"), "no-such.log"),
        (("show",), "NAME"),
        (("show", "kivi-44"), "did you mean 'kivi-4'"),
        (("show", "a100"), "ambiguous"),
        (("show", ""), "names no"),
        (("show", "int(bits=99)"), "bits"),
        (("validate", "--against", "no-such.csv"), "no-such.csv"),
        (("validate", "--against", "x.csv", "--jsn"), "no option"),
    ],
)
def test_wrong_questions_are_told_what_to_do(args, says):
    assert says in refused(*args)


def config(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    return file


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
         "intermediate_size": 128}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"   ",
        b"{}",
        b"[]",
        b"null",
        b"{" + json.dumps(LLAMA).encode()[1:-20],
        b"\xff\xfe\x00",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
        json.dumps(LLAMA | {"hidden_size": "64"}).encode(),
        json.dumps(LLAMA | {"hidden_size": -64}).encode(),
        json.dumps(LLAMA | {"num_hidden_layers": 10**12}).encode(),
        json.dumps(LLAMA | {"num_hidden_layers": None}).encode(),
        json.dumps(LLAMA | {"num_attention_heads": 0}).encode(),
        json.dumps(LLAMA | {"model_type": "no-such"}).encode(),
        json.dumps(LLAMA | {"kv_quantum_width": 7}).encode(),
        json.dumps(LLAMA).replace("64", "NaN").encode(),
        json.dumps(LLAMA).replace("64", "1e999").encode(),
        b'{"model_type": "llama", "model_type": "gpt2"}',
    ],
    ids=range(19),
)
def test_configs_that_cannot_be_read_exactly_are_refused(tmp_path, content):
    line = refused(*changed(PREDICT, "--model", config(tmp_path, content)))
    assert "config" in line or "model_type" in line


def test_a_config_of_200_mb_is_refused_unread(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as out:
        out.truncate(200 * 2**20)
    assert "bytes" in refused(*changed(PREDICT, "--model", file))


def test_a_folder_without_a_config_is_refused(tmp_path):
    assert "config.json" in refused(*changed(PREDICT, "--model", tmp_path))


PROFILE = """\
name = "mine"
vendor = "me"
"""


@pytest.mark.parametrize("content", ["", "nonsense", PROFILE, "x = " + "[" * 500, "\x00"])
def test_profiles_that_are_none_are_refused(tmp_path, content):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    assert "mine.toml" in refused(*changed(PREDICT, "--device", file))


def shipped_profile():
    from importlib import resources

    return resources.files("hardware_profiles").joinpath("rtx-4090.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('capacity = { value = 24564, unit = "MiB"', 'capacity = { value = 24564, unit = "GiB"'),
        ('capacity = { value = 24564, unit = "MiB"', 'capacity = { value = 24564, unit = "KiB"'),
        ("capacity = { value = 24564", "capacity = { value = -24564"),
        ("capacity = { value = 24564", "capacity = { value = nan"),
        ('bandwidth = { value = 1008, unit = "GB/s"', 'bandwidth = { value = 1008, unit = "TB/s"'),
        ('bandwidth = { value = 1008, unit = "GB/s"', 'bandwidth = { value = 1008, unit = "MB/s"'),
        ('fp32 = { value = 82.6, unit = "TFLOPS"', 'fp32 = { value = 82.6, unit = "PFLOPS"'),
        ('fp32 = { value = 82.6, unit = "TFLOPS"', 'fp32 = { value = 82.6, unit = "GFLOPS"'),
    ],
)
def test_a_profile_with_its_units_mixed_up_is_refused(tmp_path, right, wrong):
    text = shipped_profile()
    assert right in text
    file = tmp_path / "mine.toml"
    file.write_text(text)
    asked = changed(PREDICT, "--device", file)
    assert CliRunner().invoke(main, [str(a) for a in asked]).exit_code == 0
    file.write_text(text.replace(right, wrong, 1))
    assert "mine.toml" in refused(*asked)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_any_text_as_a_method_is_an_answer_or_one_line(text):
    result = CliRunner().invoke(main, [*changed(PREDICT, "--method", text)])
    assert result.exit_code in (0, 1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code == 2:
        assert result.stderr.count("\n") == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20))
def test_any_text_as_a_size_is_an_answer_or_one_line(text):
    for option in ("--prompt", "--batch", "--reserve"):
        result = CliRunner().invoke(main, [*changed(PREDICT, option, text)])
        assert result.exit_code in (0, 1, 2)
        assert result.exception is None or isinstance(result.exception, SystemExit)


def process(*args, **more):
    return subprocess.run([sys.executable, "-m", "kvsim", *args], capture_output=True, text=True, check=False, **more)


def test_statuses_of_the_real_program():
    assert process(*PREDICT).returncode == 0
    assert process("predict", *ASK, "--method", "full", "--prompt", "128k").returncode == 1
    wrong = process("predict", *ASK, "--method", "full", "--prompt", "-1")
    assert wrong.returncode == 2
    assert (wrong.stdout, wrong.stderr.count("\n")) == ("", 1)
    assert "Traceback" not in wrong.stderr


def test_a_pipe_gets_plain_text_and_nothing_is_cut():
    out = process(*FIT, env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}).stdout
    assert "\x1b" not in out
    assert "\u2026" not in out
    assert "int4" in out


@pytest.mark.parametrize("columns", ["40", "60", "80", "120", "200"])
def test_every_width_holds_its_lines_and_cuts_nothing(columns):
    out = process(*FIT, env={**os.environ, "COLUMNS": columns}).stdout
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "\u2026" not in out


@pytest.mark.parametrize("columns", ["0", "1", "20", "-5", "abc", "\u00b2", "9" * 5000])
def test_columns_that_are_no_width_do_not_matter(columns):
    done = process(*FIT, env={**os.environ, "COLUMNS": columns})
    assert (done.returncode, done.stderr) == (0, "")
    assert "int4" in done.stdout


@pytest.mark.parametrize("what", [("devices", "--json"), ("devices",), FIT])
def test_a_reader_that_leaves_ends_the_program_quietly(what):
    command = f"{sys.executable} -m kvsim {shlex.join(what)} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_mistake(closed):
    command = f"{sys.executable} -m kvsim {shlex.join(FIT)} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode_gets_its_answer():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    done = process(*FIT, env={**env, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_an_interrupt_is_one_line_and_130():
    args = ("sweep", *ASK, "--method", "full", "--prompt", "1:100000:1", "--batch", "1:100:1")
    # A shell that runs this test in the background has its children ignore interrupts; this one must not.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", start + "from kvsim.cli import main; main(sys.argv[1:])", *args]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        running.wait(2)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
    else:
        pytest.skip("ten million points were predicted before they could be interrupted")
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert error.strip() == "kvsim: interrupted"


def test_a_file_that_may_not_be_written_is_one_line(tmp_path):
    target = tmp_path / "out.csv"
    target.mkdir()
    assert "out.csv" in refused("sweep", *ASK, "--method", "full", "--prompt", "4k", "--out", target)
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]
