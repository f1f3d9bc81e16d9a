"""Typed segments: tokens and cells by hand, exact rows, and what real vision and audio models hold."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.cli import main
from kvsim.errors import KvsimError
from kvsim.modality import Multimodal, cells, parse_segments
from kvsim.multimodal import answers, pooled, strided

LLAVA, QWEN, WHISPER = (kvsim.load_model(m) for m in ("llava-v1.5-7b", "qwen2-vl-2b", "whisper-tiny"))
DEVICE = kvsim.load_device("rtx-4090")


@pytest.mark.parametrize(("text", "told"), [
    ("text5-vidio2x3x4", "did you mean 'video'"),
    ("image24", "2 side(s)"),
    ("video8x8", "3 side(s)"),
    ("text0", "1 or more"),
    ("image5000x5000", "all tokens together"),
    ("text3--image2x2", "is no segment"),
    ("audio30s", "seconds are for audio of a model"),
    ("image336x336px", "pixels are for images of a model"),
    ("text-image2x2", "1 side(s)"),
    ("text2.5", "whole numbers"),
])  # fmt: skip
def test_wrong_segments_are_told(text, told):
    with pytest.raises(KvsimError) as wrong:
        parse_segments(text)
    assert told in str(wrong.value)
    assert "\n" not in str(wrong.value)
    with pytest.raises(KvsimError):
        kvsim.parse_method(f"modal(segments={text})")


def test_cells_by_hand():
    # a 3 x 3 grid by 2: corners of 4, 2, 2 and 1; behind one token of text, before two of audio pooled by 2
    found = cells("text1-image3x3-audio3", 2, 1, 2)
    assert found.owner.tolist() == [0, 1, 1, 2, 1, 1, 2, 3, 3, 4, 5, 5, 6]
    assert found.first.tolist() == [0, 1, 3, 7, 9, 10, 12]
    # after 4 tokens the text, the cell at the left and, with its first token, that at the right
    assert [found.kept(n) for n in (0, 1, 2, 3, 4, 5, 13, 20)] == [0, 1, 2, 2, 3, 3, 7, 14]
    # two frames of 2 x 2 pooled over time and space: one cell
    assert cells("video2x2x2", 2, 2, 1).owner.tolist() == [0] * 8


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 130))
def test_kept_counts_cells_that_have_begun(space, time, audio, tokens):
    found = cells("text2-video3x4x5-audio7-image3x5", space, time, audio)
    owners = found.owners(tokens)
    assert len(owners) == tokens
    assert found.kept(tokens) == len(set(owners.tolist()))
    assert found.kept(np.array([tokens]))[0] == found.kept(tokens)
    firsts = [owners.tolist().index(c) for c in range(len(set(owners.tolist())))]
    assert firsts == sorted(firsts)


def test_models_encode_pixels_and_seconds():
    def told(model, text):
        return [str(s) for s in Multimodal.of(model, text).segments]

    # 448 / 28 = 16 patches a side, 16 frames in pairs; LLaVA-1.5 always 24 x 24; Voxtral 12.5 tokens a second
    assert told(QWEN, "text4-video16x448x448px") == ["text4", "video8x16x16"]
    assert told(LLAVA, "image1000x500px-text3") == ["image24x24", "text3"]
    assert told(kvsim.load_model("gemma-3-4b"), "image896x896px") == ["image16x16"]
    assert told(kvsim.load_model("voxtral-mini-3b"), "audio30s-text2") == ["audio375", "text2"]
    assert Multimodal.of(QWEN, "text4-video16x448x448px").tokens == 4 + 8 * 16 * 16


def test_bytes_of_a_film_in_qwen2_vl():
    # 28 layers, 2 KV heads of 128, 16 bit: 28 x 2 x 2 x 128 x 2 = 28,672 bytes a row; 4 more a row and layer for counts
    work = Multimodal.of(QWEN, "text40-video16x448x448px-text30", 3)
    record = kvsim.predict(kvsim.Case(QWEN, DEVICE, kvsim.parse_method(work.method(2, 2)), work.workload))
    rows = 40 + 4 * 8 * 8 + 30
    assert record.cache_bytes == 3 * rows * (28_672 + 28 * 4)
    full = kvsim.predict(kvsim.Case(QWEN, DEVICE, kvsim.parse_method("full"), work.workload))
    assert full.cache_bytes == 3 * (70 + 2048) * 28_672
    assert record.decode.seconds < full.decode.seconds


def test_llavas_image_and_rivals_of_as_many_rows():
    found = answers(LLAVA, DEVICE, pooled(LLAVA, "text35-image336x336px-text60"), (2, 2, 2))
    by_name = {a.method.split("(")[0]: a for a in reversed(found)}
    assert by_name["full"].rows == 35 + 576 + 60
    assert by_name["modal"].rows == by_name["snapkv"].rows == 35 + 144 + 60
    # 32 layers x 32 heads x 128 x 2 sides x 2 bytes = 524,288 bytes a row
    assert by_name["full"].cache_bytes == 671 * 524_288
    assert by_name["modal"].cache_bytes == 239 * (524_288 + 32 * 4)


def test_whispers_cross_attention_by_stride_and_format():
    # 4 layers x 1500 rows x 6 heads x 64 x 2 sides in fp32; every second row: 750
    work = pooled(WHISPER, "audio30s-text50")
    assert [str(s) for s in work.segments] == ["text50"]
    full = kvsim.predict(kvsim.Case(WHISPER, DEVICE, kvsim.parse_method("full"), work.workload))
    half = kvsim.predict(kvsim.Case(strided(WHISPER, 2), DEVICE, kvsim.parse_method("full"), work.workload))
    assert full.cross_bytes == 4 * 1500 * 6 * 64 * 2 * 4
    assert half.cross_bytes == full.cross_bytes // 2
    assert (half.cache_bytes, half.decode.seconds < full.decode.seconds) == (full.cache_bytes, True)
    with pytest.raises(KvsimError, match="text too"):
        pooled(WHISPER, "audio30s")


def test_command(capsys):
    ask = ["multimodal", "--model", "qwen2-vl-2b", "--device", "rtx-4090", "--segments"]
    with pytest.raises(SystemExit) as left:
        main([*ask, "text40-video16x448x448px", "--json", "--methods", "kivi-4"])
    found = json.loads(capsys.readouterr().out)
    assert (left.value.code, found["tokens"]) == (0, 2088)
    assert [a["name"] for a in found["answers"]][-1] == "kivi-4"
    with pytest.raises(SystemExit) as left:
        main([*ask, "text40-film2x2x2"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
