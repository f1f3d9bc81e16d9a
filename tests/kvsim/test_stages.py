"""Cases over tensor, pipeline, expert and attention-data ranks."""

import pytest

from kvsim import Case, KvsimError, ModelSpec, fit, load_device, load_model, parse_method, predict
from kvsim.engines.parallel import ParallelLayout, cache_bytes, stages, weight_bytes
from kvsim.prediction import phase_ops
from kvsim.workload import Workload

NODE = load_device("h100-sxm")
SMALL = ModelSpec.from_numbers(layers=5, n_heads=8, n_kv_heads=2, head_dim=16, hidden_size=128, intermediate_size=256,
                               vocab_size=1024)
WORK = Workload(batch=3, prompt_tokens=100, new_tokens=20)


def case(model=SMALL, method="full", work=WORK, **options):
    return Case(model, NODE, parse_method(method), work, **options)


def test_devices_are_tensor_ranks():
    by_devices, by_layout = predict(case(devices=2)), predict(case(layout=ParallelLayout(tensor=2)))
    assert by_devices.peak_bytes == by_layout.peak_bytes
    assert by_devices.decode.seconds == by_layout.decode.seconds
    assert by_layout.case.devices == 2


@pytest.mark.parametrize("pipeline", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [None, "llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "qwen3.5-122b-a10b",
                                  "nemotron-3-nano-30b-a3b"])
def test_the_fullest_stage_decides_the_bytes(name, pipeline):
    model = load_model(name) if name else SMALL
    layout = ParallelLayout(tensor=2, pipeline=pipeline)
    record = predict(case(model, layout=layout, weights="bf16"))
    weights, cache = weight_bytes(model, layout), cache_bytes(model, layout, 120, 3)
    # vocabulary rows padded to 64 are the engines' own, and so are not in a prediction
    own = max(range(pipeline), key=lambda i: weights[i] + cache[i])
    assert record.weights_bytes == pytest.approx(weights[own], rel=2e-3)
    if not any(x.attention and x.attention.window for x in model.layers):
        assert record.cache_bytes == cache[own]


def test_time_is_that_of_all_stages_and_the_hand_over():
    alone, parts = predict(case()), predict(case(layout=ParallelLayout(pipeline=3)))
    named = {line.name: line for line in parts.decode.lines}
    handed = named.pop("stage hand-over")
    assert handed.seconds > 0
    assert parts.decode.seconds == pytest.approx(sum(x.seconds for x in named.values()) + handed.seconds)
    assert {line.name for line in alone.decode.lines} == set(named)
    assert sum(x.seconds for x in named.values()) == pytest.approx(alone.decode.seconds, rel=1e-6)
    assert parts.generation_seconds == pytest.approx(alone.generation_seconds + 20 * handed.seconds, rel=1e-6)
    assert parts.peak_bytes < alone.peak_bytes
    assert any("stage" in warning for warning in parts.warnings)


def test_stages_keep_the_layers_that_a_clause_names():
    method = "int8; layers=0: full"
    whole = predict(case(method=method))
    runs = stages(5, 5)
    assert len(runs) == 5
    first = predict(case(method=method, layout=ParallelLayout(pipeline=5)))
    full, int8 = (predict(case(method=m)).cache_bytes / 5 for m in ("full", "int8"))
    assert whole.cache_bytes == full + 4 * int8
    assert first.cache_bytes in (full, int8)


def test_limits_are_those_of_the_stage_that_is_full_first():
    model = load_model("llama-3.1-8b")
    alone = predict(case(model)).limits
    parts = predict(case(model, layout=ParallelLayout(pipeline=2))).limits
    assert parts[0] >= alone[0]
    assert parts[1] > 2 * alone[1]


def test_experts_are_dealt_whole():
    model = load_model("qwen3-30b-a3b")
    cut, dealt = (predict(case(model, layout=ParallelLayout(tensor=4, expert=e))) for e in (1, 4))
    assert cut.cache_bytes == dealt.cache_bytes
    assert dealt.weights_bytes == pytest.approx(cut.weights_bytes, rel=0.01)


def test_attention_data_ranks_hold_their_own_sequences_of_a_latent():
    model = load_model("deepseek-v3")
    work = Workload(batch=16, prompt_tokens=1000)
    tensor, data = (predict(case(model, work=work, layout=ParallelLayout(tensor=8, attention_data=d))) for d in (1, 8))
    assert tensor.cache_bytes == 8 * data.cache_bytes  # a latent is whole on each tensor rank
    assert data.weights_bytes > tensor.weights_bytes
    ops = {op.name: op for op in phase_ops(data.case, "decode")}
    assert next(op for name, op in ops.items() if "router" in name).m == 16
    assert next(op for name, op in ops.items() if "q_a" in name or "kv_a" in name).m == 2


def test_a_phase_lists_the_pieces_of_every_stage():
    alone, parts = (phase_ops(case(layout=ParallelLayout(pipeline=p)), "decode") for p in (1, 5))
    for name in {op.name for op in alone if op.kind in ("matmul", "decode")}:  # others may come once a pass
        assert sum(op.count for op in alone if op.name == name) == sum(op.count for op in parts if op.name == name)


@pytest.mark.parametrize(("layout", "reason"), [
    (ParallelLayout(tensor=3), "must be divisible by it"),
    (ParallelLayout(pipeline=6), "more than the model's 5 layers"),
])  # fmt: skip
def test_layouts_that_cannot_cut_the_model(layout, reason):
    with pytest.raises(KvsimError, match=reason):
        predict(case(layout=layout))


def test_devices_that_contradict_the_layout():
    with pytest.raises(KvsimError, match="devices 3 and a layout of 4 ranks"):
        case(devices=3, layout=ParallelLayout(tensor=2, pipeline=2))
    with pytest.raises(KvsimError, match="layout is a ParallelLayout, got 'tp=2'"):
        case(layout="tp=2")


def test_the_question_in_json_says_the_layout():
    asked = predict(case(layout=ParallelLayout(tensor=2, pipeline=2))).to_json()["case"]
    assert asked["devices"] == 4
    assert asked["layout"] == {"tensor": 2, "pipeline": 2, "expert": 1, "attention_data": 1}


def test_fit_gives_the_flags_of_stages():
    model = load_model("llama-3.1-70b")
    plan = fit(model, NODE, Workload(batch=4, prompt_tokens=8000), engine="vllm",
               layout=ParallelLayout(tensor=2, pipeline=2))  # fmt: skip
    assert plan.chosen is not None
    assert "--tensor-parallel-size 2" in plan.chosen.engine_flags
    assert "--pipeline-parallel-size 2" in plan.chosen.engine_flags
    with pytest.raises(KvsimError, match="attention_data ranks are not modelled"):
        fit(model, NODE, WORK, engine="vllm", layout=ParallelLayout(tensor=2, attention_data=2))


def test_fit_refuses_devices_that_cannot_cut_the_model():
    with pytest.raises(KvsimError, match="tensor parallel size 3 is impossible"):
        fit(load_model("llama-3.1-8b"), NODE, WORK, devices=3)
