"""The written form: what it means, that it round-trips, and what it refuses with which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from kvsim.grammar import presets, split
from kvsim.method import Chain, LayerRange, Method, parse_method, preset_name
from kvsim.parts import parts

INTERFACE = "snapkv(budget=0.25) | int(bits=4,group=64)"


def test_the_interface_example_comes_back_to_the_letter():
    assert str(parse_method(INTERFACE)) == INTERFACE


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("full", "full"),
        ("  int( bits = 4 , group=64 ) ", "int(bits=4,group=64)"),
        ("int(4)", "int(bits=4)"),
        ("int(bits=4,axis=token)", "int(bits=4)"),
        ("k:int(bits=4,axis=channel) v:int(bits=2)", "k:int(bits=4,axis=channel) v:int(bits=2)"),
        ("k:int(bits=4) v:int(bits=4)", "int(bits=4)"),
        ("h2o(budget=0.2) | k:int(bits=4) v:full", "h2o(budget=0.2) | k:int(bits=4) v:full"),
        ("svd(rank=64) | int(bits=4) @ on_write", "svd(rank=64) | int(bits=4) @ on_write"),
        ("int(bits=4); layers=0-1: full", "int(bits=4); layers=0-1: full"),
        ("int(bits=2)+outliers(0.02)", "int(bits=2)+outliers(fraction=0.02)"),
        ("kivi-2", "k:int(bits=2,group=32,axis=channel,residual=128,flush=all) v:int(bits=2,group=32,residual=128)"),
        (
            "kivi-2(residual=64)",
            "k:int(bits=2,group=32,axis=channel,residual=64,flush=all) v:int(bits=2,group=32,residual=64)",
        ),
        ("q8_0", "gguf(type=q8_0)"),
    ],
)
def test_canonical_form(written, canonical):
    assert str(parse_method(written)) == canonical
    assert parse_method(canonical) == parse_method(written)


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_parse_round_trip_and_are_found_again(name):
    method = parse_method(name)
    assert parse_method(str(method)) == method
    assert parse_method(preset_name(method)) == method
    assert presets()[name].source


def test_rope_pre_without_sides_is_for_keys_alone():
    method = parse_method("int(bits=4,rope=pre)")
    assert method.k.before_rope
    assert not method.v.before_rope
    assert parse_method(str(method)) == method
    with pytest.raises(KvsimError, match="values carry no rotation"):
        parse_method("k:full v:int(bits=4,rope=pre)")


def test_presets_fill_their_slot():
    assert parse_method("svd(rank=64) | kivi-4").k.basis.name == "svd"
    assert str(parse_method("k:kivi-2 v:full").k) == str(parse_method("kivi-2").k)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("intt(bits=4)", "did you mean 'int'"),
        ("kivi2", "did you mean 'kivi-2'"),
        ("int(bit=4)", "did you mean 'bits'"),
        ("int(bits=9)", "at most 8"),
        ("int(bits=0)", "at least 1"),
        ("int(bits=-4)", "at least 1"),
        ("int(bits=2.5)", "whole number"),
        ("int(bits=four)", "whole number"),
        ("int(bits=nan)", "whole number"),
        ("int(bits=1e999)", "whole number"),
        ("int(bits=4,bits=3)", "twice"),
        ("int(bits=4", "does not close"),
        ("int)bits=4(", "'\\)' without"),
        ("int(bits=4) | int(bits=2)", "cannot follow"),
        ("int(bits=4) | h2o", "cannot follow"),
        ("h2o | snapkv", "cannot follow"),
        ("v:full k:full", "in that order"),
        ("k:h2o v:full", "before k:"),
        ("int(bits=4) | k:full v:full", "only a token policy"),
        ("int(bits=4)+nothing", "not known"),
        ("int(bits=4)+outliers(0.1)+outliers(0.1)", "twice"),
        ("outliers(0.1)", "corrects a format"),
        ("int(bits=4) @ later", "after_prefill, on_write"),
        ("int(bits=4) @ on_write @ on_write", "more than one"),
        ("int(bits=4); layer=0: full", "layers=RANGE"),
        ("int(bits=4); layers=3-1: full", "backwards"),
        ("h2o(budget=0)", "fraction in"),
        ("h2o(budget=1.5)", "fraction in"),
        ("h2o(budget=true)", "fraction in"),
        ("k:full v:sketch", "cannot hold values"),
        ("h2o | kivi-2", "cannot leave alone"),
        ("h2o | cp", "one row for several heads"),
        ("h2o | online_svd(rank=8) | int(bits=4,residual=64,flush=all)", "a map for each block"),
        ("hierarchy | int(bits=4,rope=pre)", "leave rope=post"),
        ("int(bits=1,symmetric=true)", "2 or more"),
        ("int(bits=4,flush=all)", "residual"),
        ("int(bits=4)\x00", "cannot be printed"),
        ("x" * 5000, "longer than"),
    ],
)
def test_refusals_are_one_clear_line(text, words):
    with pytest.raises(KvsimError, match=words) as caught:
        parse_method(text)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60) | st.text(alphabet="int(bs=4,)|k:v@;+ layers-0.", max_size=60))
def test_any_text_is_a_method_or_one_line(text):
    try:
        method = parse_method(text)
    except KvsimError as error:
        told = str(error)
        assert "\n" not in told
    else:
        assert parse_method(str(method)) == method


def test_layer_ranges():
    covers = {text: [i for i in range(6) if LayerRange(text).covers(i, 6)] for text in ("0-3", "5", "2-", "-2-", "all")}
    assert covers == {"0-3": [0, 1, 2, 3], "5": [5], "2-": [2, 3, 4, 5], "-2-": [4, 5], "all": [0, 1, 2, 3, 4, 5]}
    with pytest.raises(KvsimError, match="layers 0 to 5"):
        LayerRange("4-9").covers(0, 6)


def test_later_clauses_win():
    method = parse_method("int(bits=4); layers=0-3: int(bits=8); layers=2: full")
    assert [str(method.at(i, 6)) for i in range(6)] == ["int(bits=8)"] * 2 + ["full", "int(bits=8)"] + [
        "int(bits=4)"
    ] * 2


def test_lists_split_outside_parentheses():
    assert split("int(bits=4,group=64),kivi-2", ",") == ["int(bits=4,group=64)", "kivi-2"]


def test_methods_are_values():
    assert {parse_method("int(bits=4)"), parse_method("int(4)"), Method()} == {parse_method("int"), Method()}
    assert Chain() == Chain()
    assert Method().is_full
    assert not parse_method("int(bits=4); layers=all: full").is_full


@pytest.mark.parametrize("name", sorted(parts()))
def test_every_part_states_what_it_is(name):
    part = parts()[name]
    assert part.summary
    assert part.source
    assert part.survey
    assert all(f.metadata.get("what") for f in part.settings())


def test_a_preset_needs_its_settings_named():
    with pytest.raises(KvsimError, match=r"fp8 is a preset, whose settings need their names \(.*\): 'e4m3' has none"):
        parse_method("fp8(e4m3)")
