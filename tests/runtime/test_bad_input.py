"""Model folders that are none, damaged files and impossible settings: one line each, before anything is measured."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError
from runtime import adapt, converter, importance, multimodal, quality, ranks, train
from runtime.calibration import FORMAT
from runtime.files import write_whole
from runtime.quality_subjects import load_subject, load_text
from runtime.shipped import check_out, earlier, numbers, run_alone
from runtime.training_file import policy_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, head_dim=32)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_folders_that_hold_no_model_are_told_in_one_line(tmp_path, folder):
    def said(path):
        with pytest.raises(KvsimError) as problem:
            load_subject(str(path))
        assert "\n" not in str(problem.value)
        return str(problem.value)

    assert "no config.json" in said(tmp_path)
    assert "no folder of that name" in said("")
    config = tmp_path / "config.json"
    config.write_text("{bad")
    assert "config.json" in said(tmp_path)
    config.write_text('{"model_type": "nonesuch"}')
    assert "nonesuch" in said(tmp_path)
    config.write_text((folder / "config.json").read_text())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    assert "weights cannot be loaded" in said(tmp_path)
    assert "tokenizer cannot be loaded" in said(folder)


def test_a_text_without_words_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(KvsimError, match="holds no text"):
        load_text(None, str(tmp_path / "empty.txt"))


FOUND = {"kind": "ranks", "model": "tiny", "seed": 0}


@pytest.mark.parametrize("held", ["", "{", "[]", '{"kind": "ranks"}', '{"rows": 1}', "[" * 100_000])
def test_a_damaged_result_is_told_and_stays(tmp_path, held):
    file = tmp_path / "r.json"
    file.write_text(held)
    with pytest.raises(KvsimError, match="damaged"):
        earlier(FOUND, str(file))
    assert file.read_text() == held


def test_a_result_of_another_run_is_told(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps(FOUND | {"rows": [], "seed": 1}))
    with pytest.raises(KvsimError, match="seed 1 instead of 0"):
        earlier(FOUND, str(file))


def test_a_result_is_put_in_place_whole(tmp_path):
    file = tmp_path / "r.json"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "no such \ud800 character")
    assert file.read_text() == "before"
    write_whole(file, "after")
    assert [f.name for f in tmp_path.iterdir()] == ["r.json"]
    assert file.read_text() == "after"


def test_places_that_no_file_can_have(tmp_path):
    for out in ("", str(tmp_path), str(tmp_path / "none" / "r.json")):
        with pytest.raises(KvsimError, match="name a file in a folder that is there"):
            check_out(out)
    check_out(str(tmp_path / "r.json"))


def test_numbers_of_a_list():
    assert numbers("0.5,1", "--shares", 0, 1) == [0.5, 1.0]
    for text in ("", "x", "0", "nan", "0.5,,1", "1.5", "-1", "inf"):
        with pytest.raises(KvsimError, match=r"--shares: .* is no number above 0 and at most 1"):
            numbers(text, "--shares", 0, 1)


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        (adapt, "--lengths 256,x", "--lengths: cannot read 'x'"),
        (adapt, "--lengths 0", "--lengths is 1 or more"),
        (adapt, "--each 0", "--each is 1 or more"),
        (adapt, "--share nan", "--share: 'nan' is no number"),
        (importance, "--budget 0", "--budget: '0.0' is no number"),
        (importance, "--segments 0", "--segments is 1 or more"),
        (ranks, "--shares x", "--shares: 'x' is no number"),
        (ranks, "--every 0", "--every is 1 or more"),
        (ranks, "--out .", "name a file in a folder"),
        (quality, "--threads 0", "--threads 0: this machine runs 1 to"),
        (quality, "--threads 100000000000", "this machine runs 1 to"),
        (quality, "--quick --full", "contradict each other"),
        (quality, "--segments 0", "--segments is 1 or more"),
        (quality, "--tasks --out .", "name a file in a folder"),
        (quality, "--bounds --allocate --out x.json", "--out holds one report"),
        (train, "--out x --threads -1", "this machine runs 1 to"),
        (train, "--out x --rate nan", "--rate is a step size from 0 to 1000, got nan"),
        (train, "--out x --gate-rate -1", "--gate-rate is a step size"),
        (train, "--out x --held 9", "--held is 1 to 8 pieces, got 9"),
        (train, "--out .", "name a file in a folder"),
    ],
)
def test_settings_are_told_before_a_model_is_loaded(command, line, said):
    before = torch.get_num_threads()
    with pytest.raises(KvsimError, match=said):
        command.command.main([*line.split(), "--model", "no such model"], standalone_mode=False)
    torch.set_num_threads(before)


def test_a_run_without_a_row_is_no_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "load_subject", lambda name: type("Subject", (), {"tokenizer": None, "name": name}))
    monkeypatch.setattr(quality, "load_text", lambda tokenizer, path: None)
    spec = type("Spec", (), {"layers": [type("L", (), {"attention": type("A", (), {"k_dim": 32})})]})
    monkeypatch.setattr(quality, "Bench", lambda *_: type("Bench", (), {"spec": spec}))
    monkeypatch.setattr(quality, "run", lambda *_: iter(()))
    with pytest.raises(KvsimError, match="none of the 1 methods could be measured"):
        quality.command.main(["--methods", "int4", "--out", str(tmp_path / "q")], standalone_mode=False)


@pytest.mark.parametrize("shares", ["", "[", "[[[0.5, 4]]]", "[]", "5", "[[[NaN, 4], [1, 4]]]", '[[["x", 4], [1, 4]]]',
                                    "[[[1, 400], [1, 4]]]", "[[[0, 4], [1, 4]]]"])  # fmt: skip
def test_a_damaged_policy_is_told(tmp_path, shares):
    file = tmp_path / "p.safetensors"
    save_file({"x": torch.zeros(1)}, str(file), metadata={"format": FORMAT, "shares": shares})
    with pytest.raises(KvsimError, match="damaged"):
        policy_of(file)


@pytest.mark.parametrize("command", [adapt, importance, ranks])
def test_another_machines_profile_is_no_twin_of_what_runs_here(command, monkeypatch):
    """A CPU's figures beside predictions for a graphics card would be told as if they agreed or not."""
    subject = type("Subject", (), {"tokenizer": None, "model": None})
    monkeypatch.setattr("runtime.quality_subjects.load_subject", lambda name: subject)
    monkeypatch.setattr("runtime.quality_subjects.load_text", lambda tokenizer, path: None)
    monkeypatch.setattr("runtime.importance.Bench", lambda *_: None)
    with pytest.raises(KvsimError, match="is not this machine"):
        command.command.main(["--device", "rtx-4090"], standalone_mode=False)


def test_a_share_that_cannot_be_kept_is_refused(monkeypatch):
    """A limit of bytes that is passed makes every comparison at equal bytes a false one."""
    class Cache:
        def __init__(self, *_, **__):
            pass

    spec = type("Spec", (), {"cache_bytes": lambda self, tokens, batch, bits: 1000 * tokens})()
    found = type("Found", (), {"scored": torch.zeros(1, 2), "prompt_tokens": 2, "tokens": [0]})
    monkeypatch.setattr(ranks, "spec_of", lambda model: spec)
    monkeypatch.setattr(ranks, "DynamicRankCache", Cache)
    monkeypatch.setattr(ranks, "scored", lambda *_: {"most_bytes": 401})
    monkeypatch.setattr(ranks, "step_times", lambda *_: {})
    subject = type("Subject", (), {"model": None})
    with pytest.raises(KvsimError, match="400 bytes are fewer than the 401"):  # 0.1 x 1000 x (2 + 2)
        list(ranks.decoding(subject, found, 0.1, None, 1, "t", None))
    monkeypatch.setattr(ranks, "scored", lambda *_: {"most_bytes": 400})
    assert len(list(ranks.decoding(subject, found, 0.1, None, 1, "t", None))) == 6


@pytest.mark.parametrize(
    ("command", "line"),
    [(converter, "--pairs x"), (converter, "--rows 0"), (converter, "--rounds -1"), (multimodal, "--steps -1"),
     (multimodal, "--prompts 0"), (multimodal, "--weights {file}")],
)  # fmt: skip
def test_modules_of_their_own_end_with_status_2(command, line, tmp_path, capsys):
    (tmp_path / "w").write_text("no weights")
    with pytest.raises(SystemExit) as end:
        run_alone(command.main, line.format(file=tmp_path / "w").split())
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
