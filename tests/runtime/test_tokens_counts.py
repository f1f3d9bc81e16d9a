"""Every policy's twin holds as many rows and bytes as the analytic part says, whatever the lengths."""

import pytest
import torch
from policy_runs import Cache, Text, policy

from kvsim.parts import parts
from kvsim.scores import SCORES
from runtime.parts import twins

EXACT = [
    "keep",
    "window(sinks=4,recent=16)",
    "window(sinks=0,recent=7)",
    "stride(every=3,recent=5,sinks=2)",
    "stride(every=1)",
    "stride(every=5,recent=0,sinks=0)",
    "tiers(sizes=(4,8,12),strides=(1,2,6),sinks=3)",
    "tiers(sizes=(5,),strides=(2,),sinks=0)",
    "multiscale(windows=(5,17,40),strides=(2,3,5),sinks=1)",
    "h2o(budget=0.2)",
    "h2o(budget=9,recent=3,sinks=2,score=normalised)",
    "h2o(budget=1)",
    "h2o(budget=1.0)",
    "tova(budget=0.3,sinks=2)",
    "tova(budget=1)",
    "tova(budget=0.3,score=online_average)",
    "scissorhands(budget=0.1,recent=4,window=11)",
    "scissorhands(budget=12,sinks=1)",
    "snapkv(budget=0.25,window=6)",
    "snapkv(budget=12,window=6,sinks=2,kernel=3)",
    "snapkv(budget=1.0)",
    "topk(budget=0.5,recent=3,sinks=2)",
    "topk(budget=0.37,when=running,recent=2,sinks=1)",
    "topk(budget=9,when=running,recent=2,sinks=1,score=query_key)",
    "topk(budget=0.4,when=running,recent=2,sinks=1,score=keydiff)",
    "topk(budget=0.4,when=running,recent=2,sinks=1,score=normalised)",
    "topk(budget=0.4,when=running,recent=0,sinks=0,score=last)",
    "topk(budget=0.4,when=running,recent=2,score=persistence,window=20)",
    "topk(budget=0.4,when=running,recent=2,score=online_average)",
    "topk(budget=0.4,when=running,recent=2,score=random)",
    "pyramid(budget=0.3,window=4,beta=3)",
    "pyramid(budget=20,window=4)",
    "hierarchy(recent=6,block=3,summaries=2,sinks=2)",
    "hierarchy(recent=0,block=2,sinks=0,summaries=2)",
    "modal(segments=text)",
    "modal(segments=text3-image3x5-video3x3x2-audio7-text,space=2,time=2,audio=3)",
    "pages(size=4,top=0.3,dense_layers=0)",
    "pages(size=4,top=9,dense_layers=0,least_pages=1)",
    "pages(size=16,top=0.5,dense_layers=0)",
    "pages(size=4,top=0.3,dense_layers=4)",
]
PROMPT_RAGGED = ["ada(budget=0.3,window=4)", "ada(budget=12,window=4,sinks=2,floor=0.0)", "ada(budget=1.0)"]
DATA = ["lsh_merge(planes=4,recent=3,sinks=1)", "lsh_merge(planes=2,tables=2,when=running,recent=2)",
        "lsh_merge(planes=3,merge=weighted,window=5,recent=0,sinks=0)"]
PROMPTS = [0, 1, 5, 33, 64]


def test_every_policy_has_its_twin():
    names = {name for name, part in parts().items() if part.role == "tokens"}
    assert {f.split("(")[0] for f in EXACT + PROMPT_RAGGED + DATA} == names <= set(twins())


def sized(bytes_by_name):
    return {name: size for name, size in bytes_by_name.items() if size}


@pytest.mark.parametrize("text", EXACT)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_counts_and_bytes(text, prompt):
    part, stream = policy(text), Text.draw(prompt + 22, batch=2, seed=prompt)
    cache = Cache(part, stream, prompt)
    place = stream.place()
    assert cache.runs[0].rows == part.rows(prompt, 0, place).prompt
    assert sized(cache.state_bytes()) == sized(cache.declared_bytes())
    for new in range(1, 23):
        before = cache.runs[0].rows + 1
        cache.step()
        rows, run = part.rows(prompt, new, place), cache.runs[0]
        assert run.rows == rows.stored
        read = before if run.attended is None else run.attended.shape[2]
        assert read == rows.attended
        assert sized(cache.state_bytes()) == sized(cache.declared_bytes())
    assert [list(cache.held(1, 2))] == [sorted(cache.held(1, 2))]


@pytest.mark.parametrize("text", PROMPT_RAGGED)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_layers_total_is_exact(text, heads, prompt):
    part, stream = policy(text), Text.draw(prompt + 3, batch=2, heads=heads, seed=prompt)
    cache = Cache(part, stream, prompt)
    low, high = part.head_range(prompt, heads)
    for new in range(4):
        counts = cache.counts()
        assert counts.sum(1).tolist() == [heads * part.rows(prompt, new, stream.place()).stored] * 2
        assert low + new <= counts.min() <= counts.max() <= high + new
        assert sized(cache.state_bytes()) == sized(cache.declared_bytes())
        assert [r.state["head_rows"].item() for r in cache.runs] == [r.rows for r in cache.runs]
        if new < 3:
            cache.step()


@pytest.mark.parametrize("text", DATA)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_bytes_of_what_data_decide(text, prompt):
    cache = Cache(text, Text.draw(prompt + 20, batch=2, seed=prompt), prompt)
    for _ in range(20):
        assert sized(cache.state_bytes()) == sized(cache.declared_bytes())
        assert all(run.rows <= cache.seen for run in cache.runs)
        cache.step()


@pytest.mark.parametrize("text", ["h2o(budget=0.3)", "tova(budget=9)", "scissorhands(budget=0.4,window=8)",
                                  "stride(every=3,recent=5)", "window(recent=9)",
                                  "pages(size=4,top=0.3,dense_layers=0)", "hierarchy(recent=6,block=3,summaries=2)",
                                  "topk(budget=0.5,when=running,score=keydiff)",
                                  "topk(budget=0.5,when=running,score=normalised,recent=1)"])
@pytest.mark.parametrize("chunks", [(7, 1, 12, 3), (1, 1, 25), (9,)])
def test_several_tokens_at_once(text, chunks):
    part, stream = policy(text), Text.draw(60, batch=3)
    cache = Cache(part, stream, 20)
    for m in chunks:
        cache.step(m)
        assert cache.runs[0].rows == part.rows(20, cache.seen - 20, stream.place()).stored
        assert sized(cache.state_bytes()) == sized(cache.declared_bytes())


@pytest.mark.parametrize("name", SCORES)
def test_every_score_keeps_the_budget(name):
    stream = Text.draw(40, batch=2)
    outside = torch.rand(2, 3, 35) if "gradients" in SCORES[name].needs else None
    calibration = {"estimator": torch.randn(1, 3, 32, 10).half()} if name == "auxiliary" else {}
    for when in ("prompt", "running") if SCORES[name].running else ("prompt",):
        part = policy(f"topk(budget=0.3,score={name},recent=2,sinks=1,when={when})")
        cache = Cache(part, stream, 35, calibration=calibration, scores=outside)
        for new in range(1, 6):
            cache.step()
            assert cache.runs[0].rows == part.rows(35, new, stream.place()).stored
            assert sized(cache.state_bytes()) == sized(cache.declared_bytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [*EXACT, *PROMPT_RAGGED, *DATA])
def test_the_same_seed_gives_the_same_rows(text, dtype):
    found = []
    for _ in range(2):
        cache = Cache(text, Text.draw(50, dtype=dtype), 40, seed=7)
        outputs = [cache.step() for _ in range(10)]
        assert all(torch.isfinite(o).all() for o in outputs)
        found.append(([cache.held(0, h) for h in range(3)], torch.cat(outputs, 2)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("text", ["h2o(budget=1.0)", "tova(budget=60)", "scissorhands(budget=1.0)",
                                  "snapkv(budget=1.0)", "topk(budget=64)", "pyramid(budget=1.0)",
                                  "ada(budget=1.0)", "window(recent=64)",
                                  "stride(every=1)", "tiers(sizes=(64,),strides=(1,))", "pages(top=1.0,dense_layers=0)",
                                  "multiscale(windows=(64,),strides=(1,))", "hierarchy(recent=64)",
                                  "lsh_merge(recent=64)", "lsh_merge(planes=48,when=running,recent=64)"])
def test_everything_kept_is_exact(text):
    full, kept = (Cache(t, Text.draw(50, batch=3), 30) for t in ("keep", text))
    for _ in range(20):
        assert torch.equal(full.step(), kept.step())
        assert torch.equal(full.runs[0].k[0, 0], kept.runs[0].k[0, 0])
