"""What every token policy promises: bounds, arrays like scalars, refused settings, presets with sources."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim import KvsimError, parse_method
from kvsim.grammar import presets
from kvsim.parts import Place, TokenPolicy, parts

PLACE = Place("k", heads=4, width=8, n_heads=8, value_bits=16, layer=3, n_layers=8)
ALL = sorted(name for name, part in parts().items() if part.role == "tokens")
FORMS = [
    "keep",
    "window(sinks=4,recent=16)",
    "window(sinks=0,recent=7)",
    "stride(every=3,recent=5,sinks=2)",
    "stride(every=1)",
    "stride(every=5,recent=0,sinks=0)",
    "tiers(sizes=(4,8,12),strides=(1,2,6),sinks=3)",
    "tiers(sizes=(5,),strides=(2,),sinks=0)",
    "multiscale(windows=(5,17,40),strides=(2,3,5),sinks=1)",
    "multiscale(windows=(4,9),strides=(1,1))",
    "h2o(budget=0.2)",
    "h2o(budget=9,recent=3,sinks=2)",
    "h2o(budget=1)",
    "h2o(budget=1.0)",
    "tova(budget=0.3)",
    "scissorhands(budget=0.1,recent=4)",
    "snapkv(budget=0.25,window=6)",
    "snapkv(budget=12,window=6,sinks=2)",
    "snapkv(budget=1.0)",
    "topk(budget=0.5,recent=3,sinks=2)",
    "topk(budget=0.37,when=running)",
    "topk(budget=8,recent=2,sinks=1,score=gradient)",
    "pyramid(budget=0.3,window=4,beta=3)",
    "pyramid(budget=40,window=4)",
    "ada(budget=0.3,window=4)",
    "hierarchy(recent=6,block=3,summaries=2,sinks=2)",
    "hierarchy(recent=0,block=2,sinks=0)",
    "modal(segments=text)",
    "modal(segments=text3-image3x5-video3x3x2-audio7-text,time=3)",
    "pages(size=4,top=0.3,dense_layers=0)",
    "pages(size=4,top=9)",
    "pages(top=1.0)",
    "lsh_merge(planes=4,recent=3,sinks=1)",
    "lsh_merge(planes=5,tables=2,when=running,recent=2)",
]
RIPPLING = [
    "tiers(sizes=(5,),strides=(2,),sinks=0)",
    "multiscale(windows=(5,17,40),strides=(2,3,5),sinks=1)",
]
GROWING = [f for f in FORMS if f not in RIPPLING and not f.startswith(("hierarchy", "pyramid"))]
lengths = st.integers(0, 300)


def policy(text) -> TokenPolicy:
    return parse_method(text).tokens


@pytest.mark.parametrize("text", FORMS)
@given(data=st.data())
def test_invariants(text, data):
    p = policy(text)
    prompt, new = data.draw(lengths), data.draw(lengths)
    rows = p.rows(prompt, new, PLACE)
    assert 0 <= rows.prompt <= prompt
    assert 0 <= rows.stored <= prompt + new
    assert (rows.attended >= 1) == (prompt + new >= 1)
    assert rows.attended <= prompt + new
    assert all(isinstance(x, int) for x in (rows.prompt, rows.stored, rows.attended))
    if rows.low is not None:
        assert rows.low <= rows.stored <= rows.high
        assert rows.estimate


@pytest.mark.parametrize("text", GROWING)
def test_monotone_in_the_prompt(text):
    kept = policy(text).rows(np.arange(400), 0, PLACE).prompt
    assert np.all(np.diff(kept) >= 0)


@pytest.mark.parametrize("text", RIPPLING)
def test_spans_that_strides_do_not_divide_ripple_by_a_row_each(text):
    p = policy(text)
    steps = np.diff(p.rows(np.arange(400), 0, PLACE).prompt)
    assert -len(p.strides) <= steps.min() < 0


@pytest.mark.parametrize("text", FORMS)
def test_arrays_equal_scalars(text):
    p = policy(text)
    prompt, new = np.arange(0, 130, 3)[:, None], np.array([0, 1, 5, 64])
    rows = p.rows(prompt, new, PLACE)
    one = [[p.rows(int(t), int(k), PLACE) for k in new] for t in prompt[:, 0]]
    for field in ("prompt", "stored", "attended", "low", "high"):
        if getattr(rows, field) is None:
            continue
        got = getattr(rows, field)
        assert got.dtype == np.int64
        expected = [[getattr(r, field) for r in line] for line in one]
        assert np.array_equal(np.broadcast_to(got, (len(prompt), 4)), expected)


@pytest.mark.parametrize("text", FORMS)
def test_prompt_shorter_than_what_is_protected_stays_whole(text):
    p = policy(text)
    if p.drops == "prefill" and p.name != "modal":  # which protects by kind, not by age
        protected = p.recent + p.sinks if hasattr(p, "recent") else p.window + p.sinks
        assert p.rows(protected, 0, PLACE).prompt == protected
        assert p.rows(protected - 1, 3, PLACE).stored == protected + 2


def test_every_policy_is_in_the_battery():
    assert {f.split("(")[0] for f in FORMS} == set(ALL)


@pytest.mark.parametrize(("text", "word"), [
    ("h2o(budget=8,recent=6,sinks=4)", "inside which they count"),
    ("snapkv(budget=16)", "give 32"),
    ("h2o(budget=0)", "fraction"),
    ("h2o(budget=1.5)", "fraction"),
    ("h2o(score=window)", "cumulative"),
    ("snapkv(kernel=4)", "use 5"),
    ("topk(score=gradient,when=running)", "computed for a prompt"),
    ("topk(score=cumulativ)", "cumulative"),
    ("tiers(sizes=(4,8),strides=(2,3))", "not a multiple"),
    ("tiers(sizes=(4,8),strides=(2,))", "as many"),
    ("multiscale(windows=(8,8),strides=(1,2))", "rise"),
    ("multiscale(windows=(8,),strides=(1,2))", "as many"),
    ("window(recent=0)", "at least 1"),
    ("pages(size=0)", "at least 1"),
    ("lsh_merge(planes=0)", "at least 1"),
    ("hierarchy(block=1)", "at least 2"),
    ("pyramid(beta=0)", "at least 1"),
    ("ada(floor=1.5)", "at most 1"),
    ("multiscale(windows=(1,2,3,4,5,6,7,8,9),strides=(1,1,1,1,1,1,1,1,1))", "at most 8"),
])
def test_refused(text, word):
    with pytest.raises(KvsimError, match=word) as caught:
        parse_method(text)
    assert "\n" not in str(caught.value)


def test_presets_are_policies_with_sources():
    mine = {n: p for n, p in presets().items() if p.method.split("(")[0] in ALL and "|" not in p.method}
    known = {"streaming-llm", "sliding-window", "pyramidkv", "adakv", "quest", "lsh-merge", "knorm", "keydiff"}
    assert known <= set(mine)
    assert not set(mine) & set(ALL)
    for name, preset in mine.items():
        assert preset.source
        assert str(parse_method(str(parse_method(name)))) == str(parse_method(name))
    assert str(parse_method("pyramidkv(budget=0.5)")) == "pyramid(budget=0.5)"
