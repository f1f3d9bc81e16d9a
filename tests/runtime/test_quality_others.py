"""Other libraries' caches beside methods here: equal bytes and losses where both do the same, reasons where absent."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError
from runtime import quality_others
from runtime.quality_others import _held_bytes, _paired, lines, report
from runtime.quality_run import Sizes
from runtime.quality_subjects import Subject, Text, weights_hash

SIZES = Sizes(segments=2, prompt=64, scored=8)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    return Subject("tiny", model, None, weights_hash(model))


@pytest.fixture(scope="module")
def text():
    return Text("noise", torch.randint(0, 50, (400,), generator=torch.Generator().manual_seed(2)), "h")


def without(monkeypatch, *absent):
    asked = importlib.metadata.version

    def version(name):
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return asked(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_what_is_not_installed_is_left_out_with_the_reason(subject, text, monkeypatch):
    without(monkeypatch, "optimum-quanto", "hqq", "kvpress")
    found = report(subject, text, SIZES, ["int4", "svd(rank=900)"])
    assert [r["name"] for r in found["rows"]] == ["int(bits=4)"]
    assert found["pairs"] == []
    reasons = {s["name"]: s["reason"] for s in found["skipped"]}
    assert reasons["kvpress"] == "not installed: pip install kvpress"
    assert "pip install hqq" in reasons["transformers hqq"]
    assert "svd(rank=900)" in reasons
    assert any("left out: kvpress: not installed" in line for line in lines(found))


def test_hqq_is_this_format_with_a_search_for_its_zero(subject, text, monkeypatch):
    """Both keep codes of 4 bits and two numbers a group of 64 channels; HQQ's axis 1 is a row's slice, as here."""
    pytest.importorskip("hqq")
    without(monkeypatch, "optimum-quanto", "kvpress")
    found = report(subject, text, SIZES, ["int4", "int(bits=2)"])
    rows = {r["name"]: r for r in found["rows"]}
    theirs = rows["QuantizedCache(hqq, nbits=4, axis=1)"]
    assert theirs["prompt_bits"] == rows["int(bits=4)"]["prompt_bits"] == 4.5  # 4 + 2 * 16 / 64
    assert rows["QuantizedCache(hqq, nbits=2, axis=1)"]["prompt_bits"] == 2.5
    assert 0.3 < theirs["kl"] / rows["int(bits=4)"]["kl"] < 3
    pair = next(p for p in found["pairs"] if p["other"] == "QuantizedCache(hqq, nbits=2, axis=1)")
    assert pair["ours"] == "int(bits=2)"  # int4 is larger: it is no answer at 2.5 bits
    assert any(line.startswith("QuantizedCache(hqq, nbits=4, axis=1): here int(bits=4") for line in lines(found))


@pytest.mark.slow
def test_presses_keep_a_quarter_of_the_prompt(subject, text, monkeypatch):
    pytest.importorskip("kvpress")
    without(monkeypatch, "optimum-quanto", "hqq")
    found = report(subject, text, Sizes(segments=2, prompt=160, scored=8), ["snapkv(budget=0.25,window=16)"])
    rows = {r["name"]: r for r in found["rows"]}
    assert set(rows) >= {"KnormPress(0.75)", "SnapKVPress(0.75)", "TOVAPress(0.75)"}
    assert all(r["prompt_bits"] == pytest.approx(4.0) for r in rows.values())  # 16 bits of 40 rows in 160
    assert all(r["kl"] > 0 for r in rows.values())
    assert not hasattr(subject.model.model.layers[0].self_attn, "rotary_emb")


def test_the_best_at_no_more_bytes_by_hand():
    other = {"name": "x", "prompt_bits": 4.5, "kl": 0.2, "segment_kl": [0.1, 0.3]}
    ours = [
        {"name": "a", "prompt_bits": 4.5, "kl": 0.1, "segment_kl": [0.12, 0.08]},
        {"name": "b", "prompt_bits": 5.0, "kl": 0.01, "segment_kl": [0.01, 0.01]},
    ]
    pair = _paired(other, ours)
    assert (pair["ours"], pair["ratio"], pair["at_least_as_good"], pair["segments_won"]) == ("a", 0.5, True, 1)
    assert not _paired(other | {"prompt_bits": 2.0}, ours)["at_least_as_good"]


def test_held_bytes_by_hand():
    codes = torch.zeros(64, dtype=torch.uint8)  # 128 codes of 4 bits, two to a byte
    assert _held_bytes((codes, {"scale": torch.zeros(2, 1), "zero": torch.zeros(2, 1)})) == 64 + 2 * 4
    quanto = SimpleNamespace(_data=SimpleNamespace(_data=codes), _scale=torch.zeros(2, 1), _shift=torch.zeros(2, 1))
    assert _held_bytes(quanto) == 64 + 2 * 4


def test_more_tokens_than_their_tail_are_refused(subject, text, monkeypatch):
    monkeypatch.setattr(quality_others, "TAIL", 4)
    with pytest.raises(KvsimError, match="at most 4 tokens"):
        report(subject, text, SIZES, ["int4"])
