"""Pooled patches, films and sound running: means by hand, exact bytes on models, cross-attention by strides."""

import json
from dataclasses import replace
from math import log

import pytest
import torch
from policy_runs import Cache, Text, policy
from safetensors import safe_open

import kvsim
from kvsim.errors import KvsimError
from kvsim.modality import cells
from kvsim.multimodal import strided
from kvsim.parts import Place
from runtime import multimodal, senses
from runtime.parts import Prompt, Setting, twins

TEXT = "text2-image3x3-audio4-text"
METHOD = f"modal(segments={TEXT},space=2,audio=3)"


@pytest.mark.parametrize("prompt", [0, 1, 5, 11, 15, 19])
def test_cells_are_means_and_weigh_what_is_in_them(prompt):
    stream = Text.draw(prompt + 4, batch=2)
    cache, found = Cache(METHOD, stream, prompt), cells(TEXT, 2, 2, 3)
    tokens = {}
    for token, cell in enumerate(found.owners(prompt)):
        tokens.setdefault(cell, []).append(token)
    cache.step()
    run = cache.runs[0]
    held = [*tokens.values(), [prompt]]
    assert torch.allclose(run.bias, torch.tensor([log(len(t)) for t in held]).expand(2, 3, -1))
    for rows, kept in ((stream.k, run.k), (stream.v, run.v)):
        assert torch.allclose(kept, torch.stack([rows[:, :, t].mean(2) for t in held], 2), atol=1e-6)


def test_equal_patches_merged_change_nothing():
    """Neighbours that are alike, merged with the log of their number: the same output."""
    stream, owner = Text.draw(40, batch=2, width=16), torch.from_numpy(cells(TEXT, 2, 2, 3).owners(40))
    first = torch.tensor([owner.tolist().index(int(c)) for c in owner])
    for x in (stream.k, stream.v):
        x.copy_(x[:, :, first])
    full, merged = Cache("keep", stream, 30), Cache(METHOD, stream, 30)
    assert merged.counts().max() == 30 - (9 - 4) - (4 - 2)
    for _ in range(10):
        assert torch.allclose(full.step(), merged.step(), atol=2e-5)


class Turn:
    """A rotation by the position, in the plane of two channels."""

    def _turned(self, x, angles):
        a, b = x[..., 0], x[..., 1]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def rotate(self, x, positions):
        return self._turned(x, positions.double())

    def unrotate(self, x, positions):
        return self._turned(x, -positions.double())


def test_keys_before_rotation_keep_their_length():
    """Four equal keys at positions 0-3 cancel after the rotation; before it their mean is the key, at position 2."""
    place = Place("k", 1, 2, 1, 32)
    key = torch.tensor([3.0, 4.0]).expand(1, 1, 4, 2)
    at, turn = torch.arange(4)[None], Turn()
    prompt = Prompt(turn.rotate(key, at), key.clone(), 1.0, rotation=turn, positions=at)
    made = twins()["modal"]
    post, pre = (made(policy(f"modal(segments=audio4,audio=4,rope={r})"), Setting(place, torch.float32)) for r in
                 ("post", "pre"))  # fmt: skip
    assert float(post.merge(prompt).keys.norm()) < 0.6 * 5
    merged = pre.merge(prompt).keys
    assert float(merged.norm()) == pytest.approx(5.0)
    assert torch.allclose(merged, turn.rotate(key[:, :, :1], torch.tensor([[2]])), atol=1e-6)
    with pytest.raises(KvsimError, match="rotation is known"):
        pre.merge(replace(prompt, rotation=None))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return senses.Senses().eval()


@pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")
def test_bytes_on_a_model_that_sees_and_hears_are_those_predicted(model):
    found = multimodal.compared(model, prompts=2)
    assert len(found) == 3 + 8 * 2 + 8 * 4 + 7 * 3
    for r in found:
        assert r.held_bytes == r.predicted_bytes, r.method
    for kind in ("image", "video", "audio"):
        mine = [r for r in found if r.kind == kind]
        sizes = [r.held_bytes for r in mine if r.family == "modal"]
        assert len(sizes) == len(multimodal.POOLS[kind])
        assert all(r.held_bytes >= min(sizes) for r in mine)


@pytest.mark.filterwarnings("ignore:.past_key_values:FutureWarning")
def test_questions_one_by_one_answer_as_all_at_once(model):
    asked = senses.Examples(held_out=True, seed=3).draw("video", 3)
    found, _, rows = multimodal.answered(model, asked, "full")
    with torch.no_grad():
        assert torch.allclose(found, model(asked), atol=1e-4)
    assert rows == 65
    pooled, _, rows = multimodal.answered(model, asked, "modal(segments=text1-video4x4x4,space=1,time=4)")
    assert rows == 1 + 16
    assert not torch.allclose(found, pooled, atol=1e-4)


def test_patches_and_held_out_digits():
    frames = torch.arange(32.0).reshape(1, 2, 4, 4)
    found = senses.patches(frames) / 2 + 0.5
    assert found.shape == (1, 8, 4)
    assert found[0, 1].tolist() == [2, 3, 6, 7]
    assert found[0, 4].tolist() == [16, 17, 20, 21]
    one, other = senses.Examples(False, 0), senses.Examples(True, 0)
    assert (len(one.images), len(other.images)) == (1297, 500)
    film = other.draw("video", 50)
    assert film.content.shape == (50, 64, 4)
    assert ((film.answers >= 0) & (film.answers < 10)).all()
    tones = other.draw("audio", 50)
    loudest = tones.content[:, 0].argmax(-1) + 10
    first = tones.answers[tones.questions == senses.ASKED]
    assert (loudest == first).float().mean() > 0.6


def test_training_is_the_same_under_a_seed_and_other_files_are_refused(tmp_path):
    one, other = senses.trained(4, seed=5), senses.trained(4, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    senses.saved(one, tmp_path / "a.safetensors")
    again = senses.loaded(tmp_path / "a.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    keep = tmp_path / "run"
    pause, senses.PAUSE = senses.PAUSE, 3
    try:
        senses.trained(4, seed=5, keep=keep)  # kept after its third step: one is left to do
        with safe_open(keep, "pt") as file:
            assert json.loads(file.metadata()["run"])["done"] == 3
        again = senses.trained(4, seed=5, keep=keep)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
        with pytest.raises(KvsimError, match="4 steps with seed 5"):
            senses.trained(4, seed=6, keep=keep)
    finally:
        senses.PAUSE = pause
    keep.write_bytes(b"no run")
    with pytest.raises(KvsimError, match="keeps no run"):
        senses.trained(4, seed=5, keep=keep)
    (tmp_path / "b.safetensors").write_bytes(b"not weights")
    with pytest.raises(KvsimError, match="does not hold"):
        senses.loaded(tmp_path / "b.safetensors")


def test_whispers_cross_attention_holds_what_is_predicted():
    """A tiny Whisper of transformers, its encoder's output taken every second row: bytes of its cross-attention."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=60, num_mel_bins=8, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, d_model=16, max_source_positions=30,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        dtype="float32", suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    spec = kvsim.load_model({**config.to_dict(), "architectures": ["WhisperForConditionalGeneration"], "id2label": None,
                             "label2id": None})  # fmt: skip
    hf = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        sound = hf.model.encoder(torch.randn(1, 8, 60)).last_hidden_state
        for stride in (1, 2):
            rows = sound[:, ::stride]
            out = hf.model.decoder(input_ids=torch.tensor([[1, 3, 4]]), encoder_hidden_states=rows, use_cache=True)
            cross = out.past_key_values.cross_attention_cache
            held = sum(x.nbytes for layer in cross.layers for x in (layer.keys, layer.values))
            case = kvsim.Case(strided(spec, stride), kvsim.load_device("rtx-4090"), kvsim.parse_method("full"),
                              kvsim.Workload(1, 3, 0), kv_dtype="fp32")  # fmt: skip
            assert held == kvsim.predict(case).cross_bytes
