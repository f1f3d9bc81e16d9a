"""Reading any file as a log: bounded, never a traceback, nothing of its text repeated."""

import json
import random
import time

import pytest
from rich.console import Console

from kvsim.engines.explain import MAX_BYTES, explain, parsers, written
from kvsim.errors import KvsimError

GOOD = """\
llama_model_load_internal: n_ctx      = 512
llama_model_load_internal: n_embd     = 5120
llama_model_load_internal: n_head     = 40
llama_model_load_internal: n_layer    = 40
llama_init_from_file: kv self size  =  400.00 MB
"""


def put(tmp_path, content):
    path = tmp_path / "server.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_an_empty_log_is_an_answer(tmp_path):
    found = explain(put(tmp_path, ""))
    assert found.findings == ()
    assert "no KV cache line" in found.notes[0]
    assert not found.ok


def test_a_missing_file_and_a_folder_are_one_line_each(tmp_path):
    for path in (tmp_path / "gone.log", tmp_path, tmp_path / ("x" * 5000)):
        with pytest.raises(KvsimError, match="cannot read the log"):
            explain(path)
    with pytest.raises(KvsimError, match="cannot read the log"):
        explain("a\0b")


@pytest.mark.parametrize("seed", range(5))
def test_binary_junk(tmp_path, seed):
    junk = random.Random(seed).randbytes(200_000)
    words = [word for parser in parsers() for word in parser.KEYWORDS]
    for word in words:  # junk right after each keyword
        at = random.Random(seed).randrange(len(junk))
        junk = junk[:at] + word + junk[at:]
    found = explain(put(tmp_path, junk))
    assert all(f.matches is not True for f in found.findings)


def test_colours_windows_ends_and_utf16(tmp_path):
    coloured = "".join(f"\x1b[32m{line}\x1b[0m\r\n" for line in GOOD.splitlines())
    for content in (coloured, "\ufeff" + GOOD, GOOD.encode("utf-16"), b"\xff\xfe" + GOOD.encode("utf-16-le") + b"\x00"):
        assert explain(put(tmp_path, content)).ok


def test_interleaved_processes_are_told_apart(tmp_path):
    other = GOOD.replace("5120", "4096").replace("40\n", "32\n").replace("400.00", "256.00")
    mixed = "".join(f"[1001] {a}\n[2002] {b}\n" for a, b in zip(GOOD.splitlines(), other.splitlines(), strict=True))
    found = explain(put(tmp_path, mixed))
    assert [f.printed for f in found.findings] == ["400.00", "256.00"]
    assert found.ok
    assert [f.server for f in found.findings] == [1, 2]


def test_nothing_of_the_text_is_repeated(tmp_path):
    secret = "sk-abcdef0123456789"
    log = "".join(f"{line} api_key={secret} /home/someone/model.gguf\n" for line in GOOD.splitlines())
    log += f"llama_context: n_ctx = {secret}\nllama_kv_cache: {secret} KV buffer size = 1.00 MiB\n"
    found = explain(put(tmp_path, log))
    text = json.dumps(found.to_json())
    assert secret not in text
    assert "someone" not in text
    assert "gguf" not in text


def test_a_large_log_is_read_quickly_and_to_a_bound(tmp_path):
    filler = b"0.00.000.000 I srv  update_slots: id  0 | task 12 | prompt processing progress, n_tokens = 2048\n"
    log = GOOD.encode() + filler * (50 * 2**20 // len(filler))
    started = time.perf_counter()
    assert explain(put(tmp_path, log)).ok
    assert time.perf_counter() - started < 60  # two seconds on an idle machine; here only a guard against hanging
    found = explain(put(tmp_path, log + filler * (20 * 2**20 // len(filler))))
    assert any(f"first {MAX_BYTES >> 20} MiB" in note for note in found.notes)


@pytest.mark.parametrize(
    "repeat", [b"llama_kv_cache", b"KV buffer size", b"\x1b[", b"n_slots = 1 ", b"print_info: n_a = ["]
)
def test_one_endless_line(tmp_path, repeat):
    content = put(tmp_path, repeat * (2**21 // len(repeat)))
    assert explain(content).ok is False


def test_keywords_everywhere_are_capped(tmp_path):
    found = explain(put(tmp_path, b"llama_context: n_ctx = 5\n" * 20_000))
    assert any("only the first" in note for note in found.notes)


def test_table_and_json(tmp_path):
    found = explain(put(tmp_path, GOOD.replace("400.00", "200.00")))
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(found.table())
    text = console.export_text()
    assert "200.00 MB" in text
    assert "400.00 MB" in text
    assert "could be" in text
    answer = found.to_json()
    assert (answer["mismatches"], answer["matches"], answer["ok"]) == (1, 0, False)
    assert answer["findings"][0]["hints"]


def test_digits_follow_the_print():
    assert (written(1.005, "1"), written(2.345678, "0.00"), written(7, "70")) == ("1", "2.35", "7")
