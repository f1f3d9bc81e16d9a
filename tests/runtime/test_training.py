"""Training of cache projections: the student is the cache, gates end within the budget, runs repeat and resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from families import model_of
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError
from kvsim.layout import layer_layout
from kvsim.method import parse_method
from kvsim.parts import Place
from runtime import CompressedCache
from runtime.calibration import calibrate, load
from runtime.quality_reference import reference
from runtime.quality_scoring import score
from runtime.train import command
from runtime.training import Recipe, Training
from runtime.training_file import calibration, policy_of, resume, save_checkpoint
from runtime.training_gates import open_gate, rounded, row_bytes, with_choice
from runtime.training_student import logits

METHOD = "palu(rank=16) | int(bits=4,group=8)"
RECIPE = Recipe(METHOD, steps=6, gates=3, prompt=24, scored=16, at=96, texts=4, gate_rate=2.0)


def tiny(seed=0, layers=3):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, head_dim=8,
                         num_attention_heads=8, num_key_value_heads=4, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def pieces(count=4, length=41, seed=5):
    return list(torch.randint(61, (count, length), generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module")
def done(model):
    training = Training(model, pieces(), RECIPE)
    training.run()
    return training


def test_the_student_answers_as_the_cache_does(model, done, tmp_path):
    """Same logits from the differentiable student and from packed rows: what is trained is what runs."""
    found = reference(model, pieces(2, seed=9)[0][None], 24)
    with torch.no_grad():
        got = logits(model, found, done.rows, done.geometries, done.rotations)
    made = calibration(done)
    made.save(tmp_path / "t.safetensors")
    scores = score(model, found, done.method, calibration=str(tmp_path / "t.safetensors"))
    q = torch.log_softmax(got, -1)
    p = torch.log_softmax(found.logits, -1)
    want = float((p.exp() * (p - q)).sum(-1).mean())
    assert float(scores.kl[0]) == pytest.approx(want, rel=2e-3)
    assert want > 1e-3


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt_oss", "gpt2"])
def test_students_of_other_families_answer_as_their_caches_do(family):
    """Windows, soft caps, sinks, norms of keys, rotations by kind of layer, and none; projections of each head too."""
    other = model_of(family)
    rope = "pre" if family.startswith("gemma") else "post"
    chain = "learned_projection(rank=14{}) | int(bits=5,group=7)"
    method = f"k:{chain.format(f',rope={rope}')} v:{chain.format('')}"
    texts = list(torch.randint(3, 97, (2, 57), generator=torch.Generator().manual_seed(4)))
    training = Training(other, texts, Recipe(method, steps=2, gates=1, prompt=40, scored=16, at=60))
    training.run()
    assert all(p.requires_grad for p in other.parameters())
    found = reference(other, texts[1][None], 40)
    with torch.no_grad():
        q = torch.log_softmax(logits(other, found, training.rows, training.geometries, training.rotations), -1)
    p = torch.log_softmax(found.logits, -1)
    scores = score(other, found, training.method, calibration=calibration(training))
    assert float(scores.kl[0]) == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=2e-3)


@pytest.mark.parametrize(
    "method", ["palu(rank=9)", "k:learned_projection(rank=5,rope=pre) v:learned_projection(rank=3)"]
)
def test_training_starts_from_what_calibration_gives(model, method):
    training = Training(model, pieces(), replace(RECIPE, method=method, gates=0))
    training.begin()
    want = calibrate(model, training.pieces, method, length=41).tensors
    got = calibration(training).tensors
    assert set(got) == set(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_differences(model):
    """In full precision nothing is rounded, so finite differences of the loss are the gradients."""
    training = Training(model, pieces(), replace(RECIPE, method="palu(rank=9)", gates=0))
    training.begin()
    lesson = training._lesson()
    rows = training.rows[(1, "k")]

    def loss():
        return lesson.divergence(logits(model, lesson.found, training.rows, training.geometries, training.rotations))

    for which in (rows.encoder, rows.decoder):
        slope, = torch.autograd.grad(loss(), which)
        way = slope / slope.norm()
        with torch.no_grad():
            which.add_(way, alpha=1e-2)
            up = float(loss().detach())
            which.add_(way, alpha=-2e-2)
            down = float(loss().detach())
            which.add_(way, alpha=1e-2)
        assert (up - down) / 2e-2 == pytest.approx(float(slope.norm()), rel=0.05)


def predicted(spec, method, tokens):
    """(all bytes, those of the sequence) of a cache in fp32."""
    layouts = [layer_layout(x, method.at(i, 3), tokens, 0, 32, i, 3) for i, x in enumerate(spec.layers)]
    held = [b for x in layouts for b in x.buffers]
    return sum(b.bytes for b in held), sum(b.bytes for b in held if not b.per_model)


def test_bytes_are_within_the_budget_and_exactly_those_predicted(model, done):
    base = parse_method(METHOD)
    assert done.method != base
    assert predicted(done.spec, done.method, 96)[1] <= predicted(done.spec, base, 96)[1]
    ids = pieces(1, 49, seed=3)[0][None]
    with CompressedCache(done.method, model, calibration=calibration(done)) as cache, torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        for i in range(40, 48):
            model(ids[:, i : i + 1], past_key_values=cache)
    assert cache.nbytes() == predicted(done.spec, done.method, 48)[0]


def gate(rank, bits):
    found = open_gate((0, "k"), Place("k", 4, 8, 8), parse_method(METHOD).k, 1, rank / 32, bits)
    with torch.no_grad():
        found.rank.fill_(rank)
    return found


def test_a_row_costs_what_kvsim_counts():
    # 16 coefficients of 4 bits are 8 bytes; two groups of 8 with a scale and a minimum of 2 bytes each are 8 more
    assert row_bytes(gate(16, 4).chain, Place("k", 4, 8, 8)) == 16
    # softly: 16 x (4/8 + 4/8)
    assert float(gate(16, 4.0).cost().detach()) == pytest.approx(16, rel=0.01)


def test_gates_are_rounded_to_the_nearest_within_the_budget():
    gates = {(i, "k"): gate(r, b) for i, (r, b) in enumerate([(20.2, 3.4), (11.9, 4.6)])}
    for key, one in gates.items():
        one.key = key
    # unit ranks (step 1): nearest are (20, 3) and (12, 5): 20*3/8 -> 8 bytes + 3 groups * 4 = 20; 12*5/8 -> 8 + 8 = 16
    ends = {k: (c.basis.rank, c.format.bits) for k, c in rounded(gates, 36).items()}
    assert ends == {(0, "k"): (20, 3), (1, "k"): (12, 5)}
    # one byte less: every other choice is farther, and the nearest of those that fit is found by trying all
    options = [(r, b, row_bytes(with_choice(gate(1, 2).chain, r, b), Place("k", 4, 8, 8)))
               for r in range(8, 33) for b in range(2, 9)]
    kept = [float(g.mask().detach().sum()) for g in gates.values()]
    best = min(((r - kept[0]) ** 2 + (b - 3.4) ** 2 + (s - kept[1]) ** 2 + (c - 4.6) ** 2, (r, b), (s, c))
               for r, b, x in options for s, c, y in options if x + y <= 35)
    ends = {k: (c.basis.rank, c.format.bits) for k, c in rounded(gates, 35).items()}
    assert ends == {(0, "k"): best[1], (1, "k"): best[2]}


def test_training_lowers_the_loss_on_its_text(model):
    # noise as text: nothing carries over to other text, so it is its own that is asked about
    training = Training(model, pieces(1), replace(RECIPE, method="palu(rank=8)", steps=30, gates=0, rate=5e-3))
    training.run()
    assert training.losses[-1] < 0.7 * training.losses[0]


def test_a_run_repeats_and_resumes_bit_by_bit(model, done, tmp_path):
    for stop in (2, 3, 5):  # with open gates, just after they closed, and later
        first = Training(model, pieces(), RECIPE)
        first.run(until=stop)
        save_checkpoint(first, tmp_path / "point")
        second = Training(model, pieces(), RECIPE)
        resume(second, tmp_path / "point")
        assert second.step == stop
        second.run()
        assert second.losses == done.losses
        assert second.method == done.method
        for name, tensor in calibration(done).tensors.items():
            assert torch.equal(calibration(second).tensors[name], tensor)


def test_a_checkpoint_of_another_run_is_refused(model, tmp_path):
    first = Training(model, pieces(), RECIPE)
    first.run(until=1)
    save_checkpoint(first, tmp_path / "point")
    with pytest.raises(KvsimError, match="begun with seed=0"):
        resume(Training(model, pieces(), replace(RECIPE, seed=1)), tmp_path / "point")
    with pytest.raises(KvsimError, match="another text"):
        resume(Training(model, pieces(seed=8), RECIPE), tmp_path / "point")
    with pytest.raises(KvsimError, match="other weights"):
        resume(Training(tiny(seed=3), pieces(), RECIPE), tmp_path / "point")
    with pytest.raises(KvsimError, match="gates are still open"):
        calibration(first)
    (tmp_path / "broken").write_bytes(b"no checkpoint")
    with pytest.raises(KvsimError, match="no checkpoint"):
        resume(Training(model, pieces(), RECIPE), tmp_path / "broken")


def test_a_file_fits_its_model_and_its_own_ranks_only(model, done, tmp_path):
    path = tmp_path / "trained.safetensors"
    calibration(done).save(path)
    with pytest.raises(KvsimError, match="other weights"):
        CompressedCache(done.method, tiny(seed=1), calibration=str(path))
    with pytest.raises(KvsimError, match="was trained with palu"):
        CompressedCache("palu(rank=2) | int(bits=4,group=2)", model, calibration=str(path))
    with pytest.raises(KvsimError, match="was trained with palu"):
        CompressedCache(f"palu(rank=2,calibration={path}) | int(bits=4,group=2)", model)
    CompressedCache(str(load(path).metadata["method"]), model, calibration=str(path)).close()


def test_a_policy_goes_to_a_model_of_another_depth(done, tmp_path):
    path = tmp_path / "trained.safetensors"
    calibration(done).save(path)
    policy = policy_of(path)
    assert [len(policy), len(policy[0])] == [3, 2]
    assert policy[1][0][0] == done.chains[(1, "k")].basis.rank / 32
    other = tiny(7, layers=5)
    training = Training(other, pieces(), replace(RECIPE, policy=policy, gates=0, steps=0))
    training.begin()
    assert calibration(training).metadata["steps"] == "0"
    # layer 4 of five stands where layer 2 of three does, layer 2 where layer 1 does
    for mine, theirs in ((0, 0), (2, 1), (4, 2)):
        ends = training.chains[(mine, "v")].basis.rank, training.chains[(mine, "v")].format.bits
        wanted = done.chains[(theirs, "v")].basis.rank, done.chains[(theirs, "v")].format.bits
        assert abs(ends[0] - wanted[0]) <= 4
        assert abs(ends[1] - wanted[1]) <= 1
    plain = tmp_path / "plain.safetensors"
    calibrate(other, pieces(), "palu(rank=8)").save(plain)
    with pytest.raises(KvsimError, match="kvsim train did not write it"):
        policy_of(plain)


@pytest.mark.parametrize(("method", "why"), [
    ("int(bits=4)", "palu"), ("svd(rank=8) | int(bits=4)", "none that stay"), ("full", "nothing to train"),
    ("palu(rank=8) | int(bits=4,residual=8)", "no residual"), ("palu(rank=8) | kivi-4", "along the row"),
    ("snapkv(budget=0.5) | palu(rank=8)", "keep all tokens"), ("palu(rank=8) @ on_write", "on_write"),
    ("palu(rank=8) | mxfp4", "not mxfp"),
])
def test_what_cannot_be_trained_is_refused_with_the_reason(model, method, why):
    with pytest.raises(KvsimError, match=why):
        Training(model, pieces(), replace(RECIPE, method=method))


def test_recipes_that_make_no_sense_and_texts_that_are_too_short(model):
    with pytest.raises(KvsimError, match="gate steps among them"):
        replace(RECIPE, gates=9)
    with pytest.raises(KvsimError, match="41 tokens"):
        Training(model, pieces(2, 40), RECIPE)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A model's folder with a tokenizer of letters, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    home = tmp_path_factory.mktemp("model")
    model.save_pretrained(home)
    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz .,?")}
    words = Tokenizer(models.WordLevel(letters, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(home)
    text = home / "text.txt"
    numbers = torch.randint(28, (9000,), generator=torch.Generator().manual_seed(2))
    text.write_text("".join("abcdefghijklmnopqrstuvwxyz ."[i] for i in numbers))
    return home


def test_the_command_trains_compares_and_writes(folder, tmp_path):
    out = tmp_path / "made.safetensors"
    args = ["--model", str(folder), "--text", str(folder / "text.txt"), "--method", METHOD, "--out", str(out),
            "--quick", "--held", "1", "--json"]
    found = CliRunner().invoke(command, args, catch_exceptions=False)
    report = json.loads(found.stdout)
    assert report["predicted_bytes"] == report["held_bytes"]
    rows = {r["name"]: r for r in report["rows"]}
    assert list(rows)[-1] == "trained"
    names = {"uniform, calibrated by SVD", "uniform, turned for rounding", "its ranks and bits, untrained", "no basis"}
    assert names <= set(rows)
    assert max(r["bits"] for r in report["rows"]) == rows["uniform, calibrated by SVD"]["bits"]
    assert load(out).metadata["method"] == report["method"]
    assert not out.with_name(out.name + ".checkpoint").exists()
    assert "8/8" in found.stderr


def test_the_commands_mistakes_are_one_line(folder, tmp_path):
    for more, why in ((["--resume"], "no checkpoint"), (["--policy", str(tmp_path / "none")], "no such file"),
                      (["--gates", "9"], "gate steps")):
        args = ["--model", str(folder), "--text", str(folder / "text.txt"), "--quick", "--method", METHOD, "--out",
                str(tmp_path / "x")]
        with pytest.raises(KvsimError, match=why):
            CliRunner().invoke(command, [*args, *more], catch_exceptions=False)


def test_the_page_tells_what_training_was_measured_to_buy():
    root = Path(__file__).parents[2]
    part = (root / "runtime/survey.md").read_text("utf-8").split("## 7.3 ")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")]
    told = {(r[0], r[1], r[2]) for r in rows if r[1] != "bits" and r[1] != "---"}
    measured = set()
    for file in sorted((root / "kvsim/data/evidence").glob("training-*.json")):
        found = json.loads(file.read_text("utf-8"))
        assert found["predicted_bytes"] == found["held_bytes"]
        limit = max(r["bits"] for r in found["rows"] if r["name"].startswith("uniform"))
        assert all(r["bits"] <= limit for r in found["rows"])
        assert all(found[k] for k in ("model_hash", "text_hash", "date", "machine"))
        measured |= {(r["name"], f"{r['bits']:.2f}", f"{r['kl']:.3f}") for r in found["rows"]}
    assert told == measured
