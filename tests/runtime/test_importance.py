"""Every score in every budgeted policy, running: bytes exact, the rows that the score puts first; the table's rows."""

import pytest
import torch

pytest.importorskip("transformers")
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import kvsim
from kvsim.allocation import within
from kvsim.budgets import SELECT_CALLS
from kvsim.errors import KvsimError
from kvsim.record import Case
from kvsim.scores import SCORES
from kvsim.tasks import TASKS
from kvsim.workload import Workload
from runtime import adapt, ranks
from runtime.attention import observe
from runtime.cache import CompressedCache, spec_of
from runtime.calibration import calibrate
from runtime.gradients import KINDS, gradient_scores
from runtime.importance import methods, report
from runtime.parts import Prompt
from runtime.quality_forced import take_prompt
from runtime.quality_reference import handed, reference
from runtime.quality_run import Bench, Sizes
from runtime.quality_subjects import Subject, Text, weights_hash
from runtime.requests import Request, outcome
from runtime.shipped import earlier, labelled, write
from runtime.store import Store

T, K = 70, 3
DEVICE = kvsim.load_device("epyc-9654")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 50, (2, T + K), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def bench(model):
    ids = torch.randint(0, 50, (3000,), generator=torch.Generator().manual_seed(2))
    return Bench(Subject("tiny", model, None, weights_hash(model)), Text("noise", ids, "h"), Sizes(2, 60, 8, 1))


@pytest.fixture(scope="module")
def learned(model):
    return calibrate(model, [torch.arange(200) % 50], "topk(score=auxiliary)")


@pytest.mark.parametrize("policy", ["snapkv", "pyramid", "ada"])
@pytest.mark.parametrize("score", SCORES)
def test_bytes_are_exact_with_every_score(model, tokens, learned, policy, score):
    method = kvsim.parse_method(f"{policy}(budget=0.4,window=6,score={score}) | int(bits=4,group=16)")
    with CompressedCache(method, model, calibration=learned if score == "auxiliary" else None) as cache:
        if score in KINDS:
            cache.set_scores(gradient_scores(model, tokens[:, :T], score))
        with torch.no_grad():
            model(tokens[:, :T], **handed(model, cache))
            for i in range(T, T + K):
                model(tokens[:, i : i + 1], **handed(model, cache))
        case = Case(spec_of(model), kvsim.load_device("rtx-4090"), method, Workload(2, T, K), kv_dtype="fp32")
        assert cache.nbytes() == kvsim.predict(case, rows=cache.rows()).cache_bytes


def test_snapkv_by_gradients_keeps_the_rows_of_largest_gradient(model, tokens):
    scores = gradient_scores(model, tokens[:, :T], "gradient")
    with CompressedCache("snapkv(budget=20,window=6,kernel=1,score=gradient)", model) as cache, torch.no_grad():
        cache.set_scores(scores)
        model(tokens[:, :T], **handed(model, cache))
        held, _ = cache.layers[1].pieces[0].store.read()
    with CompressedCache("full", model) as cache, torch.no_grad():
        model(tokens[:, :T], **handed(model, cache))
        keys, _ = cache.layers[1].pieces[0].store.read()
    first = scores[1][..., : T - 6].topk(14).indices.sort().values
    best = torch.cat([first, torch.arange(T - 6, T).expand(2, 2, 6)], dim=2)
    torch.testing.assert_close(held, keys.gather(2, best[..., None].expand(-1, -1, -1, 32)))


def test_the_table_has_every_score_and_exact_bytes(bench):
    asked = methods(0.5)
    assert {s.name for s, when, _ in asked if when == "prompt"} == set(SCORES)
    assert {s.name for s, when, _ in asked if when == "running"} == {n for n, s in SCORES.items() if s.running}
    names = ["gradient", "cumulative", "auxiliary", "persistence"]
    rows = list(report(bench, kvsim.load_device("rtx-4090"), 0.7, names, timed=False))
    assert [(r["score"], r["when"]) for r in rows][-1] == ("auxiliary", "running")
    for row in rows:
        assert row["held_bytes"] == row["cache_bytes"]
        assert row["predicted_flops"] > 0
        assert row["kl"] > 0
    own = {(r["score"], r["when"]): r["own_bytes"] for r in rows}
    # 2 layers x 2 heads: 42 rows of 4 bytes, or of 32 bits a row; a network of 32 x (32 + 2) fp16 a head
    assert own["cumulative", "running"] == 4 * 42 * 4
    assert own["persistence", "running"] == 4 * 42 * 4
    assert own["auxiliary", "prompt"] == 4 * 32 * 34 * 2
    assert own["gradient", "prompt"] == 0
    with pytest.raises(KvsimError, match="no score"):
        methods(0.5, ["gradients"])
    again = list(report(bench, kvsim.load_device("rtx-4090"), 0.7, [rows[0]["score"]], timed=False,
                        done=[rows[0] | {"kl": 7}]))[:1]
    assert [r["kl"] for r in again] == [7]  # what is there is not measured again


def test_a_run_goes_on_where_it_stopped_and_never_in_anothers_file(bench, tmp_path):
    out = str(tmp_path / "importance.json")
    found = labelled("importance", bench.subject, bench.text, 0) | {"prompt": 60}
    assert earlier(found, out) == []
    write(found | {"rows": [{"score": "knorm"}]}, out)
    assert earlier(found | {"date": "2031-01-01"}, out) == [{"score": "knorm"}]
    with pytest.raises(KvsimError, match="a run with prompt 60 instead of 61"):
        earlier(found | {"prompt": 61}, out)


def test_bits_by_class_are_the_best_within_the_limit(model, tokens):
    found = reference(model, torch.cat([tokens[:1], tokens[:1, :1]], dim=1), T)
    request = Request("text", found, ["The ", "cat "] * (T // 2))
    assert 0 < request.entropy < 1
    assert float(request.use.sum()) == pytest.approx(1, abs=1e-4)
    spec = spec_of(model)
    # 4 sinks in full; codebooks of other widths: 1000 bytes are less than a bit for 33 rows (33 * 8 * 4)
    limit = adapt.fixed_bytes(spec, "rotated(bits=4)", request) + 4 * 2 * 2 * 2 * 32 * 4 + 1000
    labels = ["a", "b"] * (T // 2)
    own = adapt.bits_by(spec, request, labels, {"a": 64.0, "b": 1.0}, limit, "x")
    assert own.labels[:4] == ["sink"] * 4
    widths = {n: getattr(own.portions.at(n).k.format, "bits", 32) for n in ("a", "b")}
    # 33 rows each; losses 64 * 4^-b and 4^-b: the best pair of widths whose mean is at most 4
    best = within([[64 * 4.0**-b for b in adapt.WIDTHS], [4.0**-b for b in adapt.WIDTHS]], list(adapt.WIDTHS), 8)
    assert [widths["a"], widths["b"]] == [adapt.WIDTHS[i] for i in best.choice]
    assert own.portions.cache_bytes(spec, [own.labels], request.new, "fp32") <= limit
    done = outcome(Subject("tiny", model, None, ""), request, own.portions, own.labels)
    assert done.held == own.portions.cache_bytes(spec, [own.labels], request.new, "fp32")
    assert done.kl > 0


def test_requests_are_compared_once_and_within_their_limits(model):
    long = torch.randint(0, 50, (2, 1, 184), generator=torch.Generator().manual_seed(4))
    found = [reference(model, x, 180) for x in long]
    requests = [Request("text", f, ["The ", "cat ", "1 ", ", ", "x_y "] * 36) for f in found]
    subject = Subject("tiny", model, None, "")
    weigh = {"entity": 4.0, "word": 2.0, "function": 1.0, "separator": 1.0, "code": 2.0}
    rows = [r for rows in adapt.compare(subject, requests, weigh, DEVICE) for r in rows]
    names = {r["method"] for r in rows if r["way"] == "adapted"}
    assert names == {*(f"task {n}" for n in TASKS), "bits by class", "bits by use"}
    assert all(r["bytes"] <= r["limit"] for r in rows if r["way"] == "adapted")
    for row in rows:  # every step is predicted and measured, and the cache's part is less than the step
        assert all(0 < row[f"{what}_low"] < row[f"{what}_predicted_seconds"] < row[f"{what}_high"]
                   for what in ("step", "cache"))
        assert 0 < row["cache_measured_seconds"] < row["step_measured_seconds"]
        assert row["cache_predicted_seconds"] < row["step_predicted_seconds"]
    again = adapt.compare(subject, requests, weigh, DEVICE, [r | {"kl": 7.0} for r in rows if r["request"] == 0])
    assert {r["kl"] for r in next(again)} == {7.0}  # a request that is done is not run again
    assert adapt.controlled(rows, spec_of(model), 1.0)["run_on"] == 1


def test_a_controller_over_recorded_requests_spends_no_more_than_the_fixed_method(model):
    rows = []
    for i in range(8):
        for j, method in enumerate(adapt.POOL):
            # one method is best for short requests, another for long ones
            kl = 0.01 * (1 + j) * (1 + 3 * ((i % 4 > 1) == (j % 2 == 0)))
            rows.append({"level": "pool", "request": i, "method": method, "prompt": 100 * (1 + i % 4), "entropy": 0.5,
                         "kl": kl, "bytes": (len(adapt.POOL) - j) * 1000 * (1 + i % 4), "right": None})  # fmt: skip
    found = adapt.controlled(rows, spec_of(model), 1.0)
    for row in found["equal_bytes"]:
        assert row["controlled"]["bytes"] <= row["fixed"]["bytes"]
    assert found["equal_memory"]["kl"] <= min(r["fixed"]["kl"] for r in found["equal_bytes"])


def test_the_ranks_table_on_a_tiny_model(bench):
    model = bench.subject.model
    found, pieces = bench.reference, bench.text.ids[2000:2128].reshape(2, 64)
    weigh = ranks.head_weights(model, pieces)
    assert weigh.shape == (2, 2, 2)
    assert float(weigh.max()) == 1
    rows = list(ranks.decoding(bench.subject, found, 0.6, weigh, 4, "noise", DEVICE))
    assert all(r["bytes"] == r["predicted"] <= r["limit"] for r in rows)
    assert all(r["most_bytes"] <= r["limit"] for r in rows)
    assert all((r["moved"] > 0) == r["way"].startswith("dynamic") for r in rows)
    for row in rows:  # 8 tokens, a decision at every fourth
        assert 0 < row["cache_measured_seconds"] < row["step_measured_seconds"]
        assert row["decision_measured_seconds"] > 0
        assert row["decision_low"] < row["decision_predicted_seconds"] < row["decision_high"]
    done = [r | {"kl": 7.0} for r in rows[:2]]
    again = ranks.decoding(bench.subject, found, 0.6, weigh, 4, "noise", DEVICE, done)
    assert [next(again)["kl"] for _ in done] == [7.0, 7.0]
    learned = ranks.learned(bench.subject, found, pieces, weigh, 12, 4, 0)
    lost = {r["ranks"]: r["energy_lost"] for r in learned["rows"]}
    assert lost["water-filling"] <= min(lost.values())
    assert len({r["bytes"] for r in learned["rows"]}) == 1


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n, s in SCORES.items() if "gradients" not in s.needs])
def test_calls_are_those_that_torch_is_asked_for(bench, learned, name):
    found = bench.reference.of(slice(0, 1))
    with CompressedCache(f"topk(budget=0.4,score={name})", bench.subject.model, calibration=learned) as cache:
        layer, seen = cache.layers[0], found.prompt[0]
        layer.lazy_initialization(seen.k, seen.v)
        policy = layer.twins.policy
        prompt = Prompt(seen.k, seen.v, seen.rule.scaling, queries=seen.q, rotation=layer.twins.around.rotation,
                        positions=found.prompt_positions)  # fmt: skip
        with torch.no_grad(), Calls() as calls:
            if policy.prompt_weights:
                observe(prompt, seen.q, seen.rule)
            policy.start(prompt, policy.select(prompt))
    said = SCORES[name].calls + SELECT_CALLS
    assert abs(calls.count - said) <= 3


@pytest.mark.parametrize("name", [n for n, s in SCORES.items() if s.running])
def test_calls_of_a_step_are_those_that_torch_is_asked_for(bench, learned, monkeypatch, name):
    found, ask, counts = bench.reference.of(slice(0, 1)), Store._ask, []

    def counted(self, *args, **kwargs):
        with Calls() as calls:
            ask(self, *args, **kwargs)
        counts.append(calls.count)

    with CompressedCache(f"topk(budget=0.5,recent=4,score={name},when=running)", bench.subject.model,
                         calibration=learned) as cache, torch.no_grad():  # fmt: skip
        take_prompt(cache, found)
        monkeypatch.setattr(Store, "_ask", counted)
        for i in range(4):
            bench.subject.model(found.scored[:, i : i + 1], **handed(bench.subject.model, cache))
    said = SCORES[name].step_calls
    # at every other token a row leaves, which takes most of them
    assert abs(max(counts) - said) <= 3
