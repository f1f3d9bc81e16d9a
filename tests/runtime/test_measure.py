"""A case really run: the record has the bytes of the cache, the lines of the prediction, and names no other machine."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import kvsim
from kvsim.errors import KvsimError
from runtime import measure as module
from runtime.cache import spec_of
from runtime.device import this_machine
from runtime.measure import measure
from runtime.random_model import config_of, random_model
from runtime.running_model import run
from runtime.watch import Watch, watching

CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
          "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def here():
    """A processor's profile with this machine's memory and one core: where its numbers come from does not matter."""
    machine = this_machine()
    return replace(kvsim.load_device("epyc-9654"), name="here", units=1, capacity_bytes=machine.capacity_bytes)


def case(model, here, method, batch=2, prompt=40, new=0):
    spec = replace(spec_of(model), dtype="fp32")
    return kvsim.Case(spec, here, kvsim.parse_method(method), kvsim.Workload(batch, prompt, new))


@pytest.mark.parametrize("method", ["full", "int(bits=4)", "h2o(budget=0.5) | int(bits=8)", "svd(rank=4)",
                                    "window(sinks=4,recent=12)", "int(bits=4,group=8,residual=16)",
                                    "int(bits=4) @ on_write"])
@pytest.mark.parametrize("new", [0, 5])
def test_bytes_are_those_of_the_prediction(model, here, method, new):
    question = case(model, here, method, new=new)
    predicted, record = kvsim.predict(question), measure(question, model, steps=2, repeats=1)
    # after K new tokens the cache of generate holds T + K - 1; here K steps are taken, as a prediction counts
    assert record.cache_bytes == predicted.cache_bytes
    assert record.allocated_bytes == predicted.allocated_bytes
    assert record.source == "measured"
    assert sum(b.bytes for b in record.buffers) == record.cache_bytes


def test_lines_have_the_predicted_names(model, here):
    question = case(model, here, "h2o(budget=0.5) | int(bits=8)")
    predicted, record = kvsim.predict(question), measure(question, model, steps=4, repeats=1)
    for phase in ("prefill", "decode"):
        wanted = {line.name for line in getattr(predicted, phase).lines}
        found = {line.name for line in getattr(record, phase).lines}
        assert wanted <= found
        assert found - wanted <= {"attention", "compress and append"}
    line = next(x for x in record.decode.lines if x.name == "gate_proj")
    assert line.flops == 2 * 3 * 2 * 64 * 128  # three layers, two sequences
    assert 0.0 < line.low <= line.seconds <= line.high


def test_lines_of_a_step_add_up_to_about_the_step(model):
    torch.set_num_threads(1)
    ran = run(model, kvsim.parse_method("int(bits=4)"), batch=1, prompt=64, steps=20)
    parts = sum(t.seconds for t in ran.decode_lines.values())
    assert 0.5 < parts / ran.decode.seconds < 2.0  # watched steps against unwatched ones: order of magnitude only


def test_the_model_is_left_as_it_was(model, here):
    before = {name: vars(m).get("forward") for name, m in model.named_modules()}
    attention = model.config._attn_implementation
    measure(case(model, here, "int(bits=4)"), model, steps=2, repeats=1)
    assert model.config._attn_implementation == attention
    assert {name: vars(m).get("forward") for name, m in model.named_modules()} == before


def test_what_runs_inside_counts_for_itself_alone():
    ticks = iter(range(100))
    watch = Watch(torch.device("cpu"))
    watch.now = lambda: float(next(ticks))
    inner = watch.wrap(lambda: None, "inner")
    watch.wrap(lambda: [inner(), inner()], "outer")()
    # outer 0 to 5, inner 1 to 2 and 3 to 4
    assert dict(watch.seconds) == {"inner": 2.0, "outer": 3.0}


def test_hooks_are_taken_away_when_something_fails(model):
    from runtime.store import Store

    before = Store.append

    def stopped():
        with watching(Watch(torch.device("cpu")), model, spec_of(model)):
            assert Store.append is not before
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert Store.append is before


def test_another_machine_or_model_is_refused(model, here):
    with pytest.raises(KvsimError, match="not this machine"):
        measure(case(model, kvsim.load_device("h200-sxm"), "full"), model)
    other = random_model(CONFIG, layers=2)
    with pytest.raises(KvsimError, match="n_layers 3"):
        measure(case(model, here, "full"), other)
    with pytest.raises(KvsimError, match="give numbers"):
        measure(case(model, here, "full", batch=[1, 2]), model)


def test_the_command_prints_the_fields_of_predict(model, here, tmp_path, monkeypatch):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(module, "here", lambda on: here)
    words = ["--model", str(folder), "--random-weights", "--method", "int(bits=4)", "--prompt", "32", "--new", "2",
             "--steps", "2", "--repeats", "1", "--threads", "1"]
    found = CliRunner().invoke(module.command, [*words, "--json"])
    assert found.exit_code == 0, found.exception
    answer = json.loads(found.output)
    predicted = kvsim.predict(case(model, here, "int(bits=4)", batch=1, prompt=32, new=2))
    assert answer["source"] == "measured"
    assert answer.keys() == predicted.to_json().keys()
    assert answer["cache_bytes"] == predicted.cache_bytes
    assert answer["max_context"] is None
    text = CliRunner().invoke(module.command, words).output
    assert "attention" in text
    assert "prefill" in text


def test_a_model_without_weights_here_says_how_to_go_on():
    with pytest.raises(KvsimError, match="--random-weights"):
        module.load_running("llama-3.1-8b", False, "fp32", None, "cpu")
    assert config_of("smollm2-135m")["num_hidden_layers"] == 30


def test_the_package_hands_out_the_function(model, here):
    from runtime import measure as handed

    record = handed(case(model, here, "full", batch=1, prompt=8), model, steps=2, repeats=1)
    assert record.source == "measured"
