"""The survey's tables, computed: every cell and claim answered, families as it has them, scenarios that are asked."""

import json

import pytest
from click.testing import CliRunner

import kvsim
from kvsim import compare, scenarios
from kvsim.claims import claims
from kvsim.cli import main
from kvsim.evidence import shipped


@pytest.fixture(scope="module")
def members():
    return compare.members(shipped())


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("int4", "quantization"),
        ("kivi-2", "quantization"),
        ("h2o", "sparsification"),
        ("svd(rank=32)", "low rank"),
        ("h2o(budget=0.2) | int(bits=4)", ""),
        ("full", ""),
    ],
)
def test_families(text, family):
    assert compare.family(kvsim.parse_method(text)) == family


def test_every_cell_of_the_matrix_is_answered(members):
    cells = compare.matrix(members)
    assert {(c.row, c.family) for c in cells} == {(r, f) for r in compare.SURVEY for f in compare.FAMILIES}
    assert all(c.survey and c.here for c in cells)


def test_figures_are_those_of_the_evidence(members):
    ratio = next(c.here for c in compare.matrix(members) if (c.row, c.family) == ("ratio", "quantization"))
    own = [m.evidence for m in members if m.family == "quantization" and m.evidence]
    best = max(16 / e.bits for e in own if e.kl <= compare.USABLE_KL)
    assert f"up to {best:.1f}x" in ratio


def test_claims_have_verdicts_and_pairs_follow_the_figures(members):
    found = claims(members, shipped())
    assert len(found) == 7 + 6 + 6  # the survey's lists
    assert {c.verdict for c in found} <= {"holds", "partly", "fails", "not measured"}
    nothing = claims(members, ())
    assert sum(c.verdict == "not measured" for c in nothing) > sum(c.verdict == "not measured" for c in found)


def test_scenarios_choose_what_fits_and_say_where_they_disagree():
    for s in scenarios.SCENARIOS:
        found = scenarios.answer(s, shipped())
        assert found.note.startswith(("agrees", "disagrees", "nothing"))
        assert str(s.prompt // 1024) in found.question.replace(",", "") or f"{s.prompt:,}" in found.question
        assert found.chosen != "nothing"


def test_segments_share_a_budget():
    found = scenarios.multimodal(shipped())
    assert "assumed" in found.note
    assert scenarios.multimodal(()).chosen == "not measured"


def test_published_figures_have_sources():
    rows = compare.published()
    assert rows
    for r in rows:
        kvsim.parse_method(r["method"])
        assert r["source"]
        assert r["model"]
        assert r["benchmark"]
        assert r["others"] in ("agree", "disagree", "none known")


def test_the_command():
    done = CliRunner().invoke(main, ["compare", "--json"])
    found = json.loads(done.stdout)
    assert set(found) == {"matrix", "claims", "scenarios", "published"}
    assert len(found["scenarios"]) == 5
