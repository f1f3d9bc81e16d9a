"""What people hand in wrongly: one clear KvsimError each, before any row comes; and calibrations by every door."""

import pytest
import torch
import transformers as hf
from families import generate, logits, model_of, prompt
from torch import nn

from kvsim import parse_method
from kvsim.errors import KvsimError
from kvsim.parts import Place
from runtime import CompressedCache
from runtime.calibration import Calibration, calibrate
from runtime.parts import Prompt, Setting, twins
from runtime.rope import Rotation


def texts(count=3, length=150):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(3, 97, (count, length), generator=generator))


NO_MODELS = [None, "smollm2", 5, nn.Linear(3, 3), hf.LlamaConfig()]


@pytest.mark.parametrize("model", NO_MODELS, ids=lambda x: type(x).__name__)
def test_what_is_no_model(model):
    with pytest.raises(KvsimError, match="is for a Hugging Face model, got"):
        CompressedCache("full", model)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens is a count"),
        ({"prompt_tokens": "40"}, "prompt_tokens is a count"),
        ({"prompt_tokens": 3.5}, "prompt_tokens is a count"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"seed": 2**70}, "seed is a whole number"),
        ({"calibration": 5}, "calibration is a calibration"),
        ({"calibration": {"layer.0.k.x": 5}}, "calibration is a calibration"),
        ({"calibration": "nowhere.safetensors"}, "no such file"),
        ({"calibration": __file__}, "not a safetensors file"),
    ],
)
def test_wrong_arguments(given, why):
    with pytest.raises(KvsimError, match=why) as caught:
        CompressedCache("random_projection(rank=8)", model_of("llama"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (None, "must be a text"),
        (b"full", "must be a text"),
        ("full\x00", "cannot be printed"),
        ("\u202efull", "cannot be printed"),
        ("a" * 5000, "longer than 4096"),
        ("(" * 2000, "does not close"),
        ("svd(rank=17)", "rank 17 exceeds 16"),
        ("palu(rank=8,group=3)", "does not divide the 2 heads"),
        ("int(bits=4,group=17)", "longer than the row"),
        ("q8_0", "blocks of 32 values"),
        ("full; layers=9: int", "layers 0 to 3"),
        ("palu(rank=8)", "only with calibrated matrices"),
        ("elitekv(frequencies=2,rank=8)", "only with calibrated matrices"),
        ("kvquant-3", "needs calibration"),
        ("kmeans(bits=4,weighting=attention)", "needs calibration"),
        ("topk(score=auxiliary)", "needs a trained estimator"),
        ("float8(scale=tensor)", "with calibration only"),
        ("palu(rank=8,calibration=nowhere.safetensors)", "no such file"),
    ],
)
def test_methods_that_cannot_stand_here_are_refused_before_any_row_comes(method, why):
    before = model_of("llama").config._attn_implementation
    with pytest.raises(KvsimError, match=why) as caught:
        CompressedCache(method, model_of("llama"))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert model_of("llama").config._attn_implementation == before


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("palu(rank=8)", "rope=pre: GPT2Attention has no rotary embedding to undo; leave rope=post"),
        ("elitekv(frequencies=2,rank=8)", "elitekv: GPT2Attention has no rotary embedding to undo; take another basis"),
    ],
)
def test_who_wants_a_rotation_says_so(method, why):
    for attempt in (CompressedCache, lambda m, model: calibrate(model, texts(), m)):
        with pytest.raises(KvsimError, match=why):
            attempt(method, model_of("gpt2"))


def test_rows_that_cannot_be():
    zeros = torch.zeros
    with CompressedCache("int(bits=4)", model_of("llama")) as cache:
        for k, v, why in (
            (zeros(1, 2, 3, 16), zeros(1, 2, 4, 16), "as many rows each"),
            (zeros(2, 3, 16), zeros(2, 3, 16), r"\[B, H, n, d\]"),
            (zeros(1, 3, 3, 16), zeros(1, 3, 3, 16), "3 heads"),
            (zeros(1, 2, 3, 8), zeros(1, 2, 3, 8), r"widths \(8, 8\)"),
        ):
            with pytest.raises(KvsimError, match=why):
                cache.update(k, v, 0)
            cache.reset()
        logits(model_of("llama"), prompt(), cache)
        with pytest.raises(KvsimError, match="no sequence 9"):
            cache.batch_select_indices(torch.tensor([0, 9]))
        assert torch.isfinite(logits(model_of("llama"), prompt(2, 1), cache)).all()
        with pytest.raises(KvsimError, match="4 layers, got 1"):
            cache.set_scores([zeros(1)])


# -- calibrations --------------------------------------------------------------------------------------------------


def out(method, calibration=None):
    with CompressedCache(method, model_of("llama"), calibration=calibration) as cache:
        logits(model_of("llama"), prompt(), cache)
        return logits(model_of("llama"), prompt(2, 1), cache)


def test_a_file_that_the_method_names_is_used(tmp_path):
    """`palu(calibration=FILE)` runs as with the same calibration handed in, each side from its own file."""
    found = [calibrate(model_of("llama"), texts(length=n), "palu(rank=8)", length=n) for n in (150, 60)]
    for name, one in zip("ab", found, strict=True):
        one.save(tmp_path / name)
    a, b = (out("palu(rank=8)", one) for one in found)
    assert torch.equal(out(f"palu(rank=8,calibration={tmp_path}/a)"), a)
    assert torch.equal(out(f"palu(rank=8,calibration={tmp_path}/b)", found[0]), b)
    mixed = {k: (found[0] if ".k." in k else found[1]).tensors[k] for k in found[0].tensors}
    both = f"k:palu(rank=8,calibration={tmp_path}/a) v:palu(rank=8,calibration={tmp_path}/b)"
    assert torch.equal(out(both), out("palu(rank=8)", mixed))
    assert not torch.equal(a, out("palu(rank=8)", mixed))


def test_the_package_hands_it_out():
    from runtime import calibrate as handed

    assert torch.equal(out("palu(rank=8)", handed(model_of("llama"), texts(), "palu(rank=8)")),
                       out("palu(rank=8)", calibrate(model_of("llama"), texts(), "palu(rank=8)")))  # fmt: skip


def test_a_calibration_of_another_model_is_refused_by_every_door(tmp_path):
    found, file = calibrate(model_of("llama"), texts(), "palu(rank=8)"), tmp_path / "own"
    found.save(file)
    torch.manual_seed(5)
    other = hf.LlamaForCausalLM(model_of("llama").config).eval()
    doors = (("palu(rank=8)", found), ("palu(rank=8)", file), (f"palu(rank=8,calibration={file})", None))
    for model, why in ((other, "other weights of"), (model_of("qwen3"), "other weight matrices")):
        for method, given in doors:
            with pytest.raises(KvsimError, match=why):
                CompressedCache(method, model, calibration=given)


def test_a_calibration_for_other_settings_is_refused():
    found = calibrate(model_of("llama"), texts(), "palu(rank=8)")
    for method, why in (("palu(rank=16)", r"holds \(2, 8, 16\)"), ("learned_projection(rank=8)", "runs only with"),
                        ("palu(rank=8,rope=post)", "calibrated are palu.pre")):  # fmt: skip
        with pytest.raises(KvsimError, match=why):
            CompressedCache(method, model_of("llama"), calibration=found)


@pytest.mark.parametrize(
    ("given", "more", "why"),
    [
        (None, {}, "list of texts"),
        ([], {}, "no text of two tokens"),
        (["words"], {}, "needs a tokenizer"),
        ([{"a": 1}], {}, "is neither"),
        ([[1, 2, 97]], {}, "knows 0 to 96"),
        ([[1, -2]], {}, "reach from -2"),
        ([[1, 5]], {}, "rank=8 needs as many rows"),
        ([[1, 5, 3]], {"length": 1}, "pieces of 2 tokens"),
        ([[1, 5, 3]], {"rows": 0}, "rows=0"),
    ],
)
@pytest.mark.parametrize("method", ["palu(rank=8)", "learned_projection(rank=8)"])
def test_texts_that_teach_nothing(method, given, more, why):
    with pytest.raises(KvsimError, match=why):
        calibrate(model_of("llama"), given, method, **more)


def test_nowhere_to_save():
    with pytest.raises(KvsimError, match="no such folder"):
        Calibration({}, {}).save("nowhere/at/all")


# -- what needs the rotation gets it -----------------------------------------------------------------------------------


def test_expected_attention_turns_queries_on():
    """On a model, score=expected looks at the positions behind the prompt, as its text says, not at its own."""
    model, ids, method = model_of("llama"), prompt(1, 60), "topk(budget=0.5,score=expected,recent=0)"
    seen = {}

    def note(module, args, kwargs):
        seen["x"], seen["at"] = kwargs["hidden_states"], kwargs["position_ids"]

    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(note, with_kwargs=True)
    with CompressedCache(method, model) as cache:
        logits(model, ids, cache)
        held = cache.layers[0].pieces[0].store.keys.read()
    handle.remove()
    rotation, kept = Rotation(model, attention), {}
    with torch.no_grad():
        q, k, v = (
            p(seen["x"]).unflatten(-1, (-1, 16)).transpose(1, 2)
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
    q, k = rotation.rotate(q, seen["at"]), rotation.rotate(k, seen["at"])
    part = parse_method(method).tokens
    twin = twins()["topk"](part, Setting(Place("k", 2, 16, 4, 32), torch.float32))
    for turned in (rotation, None):
        rows = twin.select(Prompt(k, v, 0.25, queries=q, rotation=turned, positions=seen["at"]))
        kept[turned is not None] = k.gather(2, rows[..., None].expand(-1, -1, -1, 16))
    torch.testing.assert_close(held, kept[True], atol=1e-5, rtol=1e-5)
    assert float((held - kept[False]).abs().max()) > 0.1


def test_expected_attention_without_a_rotation():
    """Where nothing is rotated queries stand still; where it is rotated in an unknown way, nothing is guessed."""
    with CompressedCache("expected-attention", model_of("gpt2")) as cache:
        generate(model_of("gpt2"), prompt(), cache, new=3)
    with pytest.raises(KvsimError, match=r"score=expected: GPTJAttention .*; take another score"):
        CompressedCache("expected-attention", model_of("gptj"))


@pytest.mark.parametrize(
    "method",
    [
        "elitekv(frequencies=2,rank=16)",
        "elitekv(frequencies=2,rank=16) | int(bits=8)",
        "palu(rank=8,group=2)",
        "palu(rank=8,group=2,rope=post)",
        "learned_projection(rank=8)",
        "random_projection(rank=12)",
        "int(bits=4,group=8)",
        "float8",
    ],
)
def test_on_write_a_prompt_is_its_tokens_one_by_one(method):
    """What is attended is what is stored: a prompt attends through rebuilt rows, a step in the latent; both agree."""
    model, ids, written = model_of("llama"), prompt(2, 24), f"{method} @ on_write"
    learns = method.split("(")[0] in ("elitekv", "palu", "learned_projection")
    made = calibrate(model, texts(), written) if learns else None
    with CompressedCache(written, model, calibration=made) as cache:
        whole = logits(model, ids, cache)
    with CompressedCache(written, model, calibration=made) as cache:
        steps = torch.cat([logits(model, ids[:, i : i + 1], cache) for i in range(24)], dim=1)
    torch.testing.assert_close(whole, steps, atol=1e-3, rtol=1e-3)
    assert float((whole - logits(model, ids)).abs().max()) > 0.1  # and it is not full precision
