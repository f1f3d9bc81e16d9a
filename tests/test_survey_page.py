"""The page "the survey, checked" speaks only of what exists."""

import json
import re
from pathlib import Path

import pytest

import kvsim
from kvsim.errors import KvsimError
from kvsim.evidence import shipped

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "runtime/survey.md").read_text("utf-8")
CODE = re.findall(r"`([^`]+)`", PAGE)
TESTS = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("path", sorted({c for c in CODE if c.endswith(".py")}))
def test_files_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", sorted({c for c in CODE if c.startswith("test_")}))
def test_tests_exist(name):
    assert re.search(rf"def {name}\b", TESTS)


def test_methods_parse_and_commands_are_known():
    named = [c for c in CODE if not re.match(r"test_|kvsim|[A-Z.]|.*\.py$|dequantize$|\.weight$", c)]
    assert len(named) > 25
    for text in named:
        if text != "code":
            assert kvsim.parse_method(text.replace("\\|", "|"))
    with pytest.raises(KvsimError):
        kvsim.parse_method("not-a-method")


def test_every_section_with_a_method_has_its_line():
    for section in (
        "1.1",
        "1.2",
        "1.3",
        "3.1.1",
        "3.1.2",
        "3.2",
        "3.3",
        "3.4",
        "4.1.1",
        "4.1.2",
        "4.2",
        "4.3",
        "4.4",
        "5.2",
        "5.2.1",
        "5.3.1",
        "5.3.2",
        "5.4",
        "5.5",
        "5.6",
        "6",
        "7.6",
    ):
        assert f"| {section} |" in PAGE


def part_of(title):
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


def test_every_section_of_the_survey_has_its_line():
    numbers = ("1.1 1.2 1.3 2 2.1 2.2 2.3 3.1 3.1.1 3.1.2 3.2 3.2.1 3.2.2 3.3 3.3.1 3.3.2 3.4 3.5 4.1 4.1.1 4.1.2 4.2 "
               "4.2.1 4.2.2 4.2.3 4.3 4.3.1 4.3.2 4.4 4.5 5.1 5.2 5.2.1 5.3 5.3.1 5.3.2 5.4 5.5 5.6 6 6.1 6.2 6.3 7.4 "
               "7.5 7.6 8")  # fmt: skip
    table = part_of("Sections and code")
    assert [n for n in numbers.split() if f"| {n} |" not in table] == []


def test_every_direction_has_its_lines():
    rows = [line for line in part_of("Directions").splitlines() if line.startswith("| 7.")]
    found = [row.split("|")[1].strip() for row in rows]
    assert all(found.count(f"7.{i}") == 3 for i in range(1, 7))
    assert all(re.search(r"`kvsim \w+", row) and re.search(r"`(kvsim|runtime)/[\w/]+\.py`", row) for row in rows)


def test_commands_of_the_page_exist():
    from kvsim.cli import main

    named = {m for code in CODE for m in re.findall(r"^kvsim (\w+)", code)}
    assert {"codesign", "multimodal", "compare", "quality"} <= named <= set(main.commands)


def test_every_formula_has_its_test():
    rows = [line for line in part_of("Formulas").splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 21
    assert all(re.search(r"`test_\w+`", row) and re.search(r"`(kvsim|runtime)/[\w/]+\.py`", row) for row in rows)


def test_measured_figures_are_those_of_the_evidence():
    evidence = {str(kvsim.parse_method(row.method)): row for row in shipped() if row.model == "smollm2-135m"}
    rows = re.findall(r"\| `(.+)` \| ([\d.]+) \| ([\d.]+) \|", part_of("What was measured"))
    assert len(rows) >= 30
    for method, bits, kl in rows:
        found = evidence[str(kvsim.parse_method(method.replace("\\|", "|")))]
        assert float(bits) == pytest.approx(found.bits, abs=0.4)
        # measured anew on other pieces, a figure may move within its interval
        near = abs(float(kl) - found.kl) <= 0.5 * found.kl + 1e-5
        assert near or found.kl_low <= float(kl) <= found.kl_high, (method, kl, found.kl)


CLASSES = ("GroupInt8Quantizer", "KVCacheQuantizer", "H2OKVCache", "StreamingAttention", "LowRankProjection",
           "OnlineSVDCache", "AdaptiveRankCache")  # fmt: skip
WRONG = {"1.1": 1, "1.2": 1, "3.1.2": 2, "3.2.2": 1, "3.5": 6, "4.5": 7, "5.3.1": 1, "5.6": 5, "6.1": 2}
"""Sections that are wrong, and in how many ways."""


def test_every_class_has_its_line():
    table = PAGE.split("## The survey's classes")[1].split("##")[0]
    assert all(f"| `{name}` |" in table for name in CLASSES)


def test_every_error_has_its_test():
    rows = [line for line in PAGE.split("## Where it is wrong")[1].splitlines() if line.startswith("| ")][1:]
    assert all(re.search(r"`test_\w+`", row) for row in rows if "---" not in row)
    found = [row.split("|")[1].strip() for row in rows]
    assert all(found.count(section) >= count for section, count in WRONG.items())


def test_codesign_figures_are_those_computed():
    from kvsim.codesign import codesign

    work = kvsim.Workload(16, 32_768, 0)
    found = codesign(kvsim.Case(kvsim.load_model("llama-3.1-8b"), kvsim.load_device("h100-sxm"),
                                kvsim.parse_method("int(bits=4)"), work), ("int4",))  # fmt: skip
    text = part_of("7.4 Hardware co-design")
    for one in found.added:
        row = next(line for line in text.splitlines() if line.startswith(f"| {one.name} "))
        step, limit = (float(x) for x in re.findall(r"([\d.]+) ms", row))
        # coefficients fitted anew may move a figure a little
        assert step == pytest.approx(one.step_s * 1e3, rel=0.2)
        assert limit == pytest.approx(one.limit_s * 1e3, rel=0.2)
        assert (one.least is None) == ("nothing to gain" in row)
    rate = float(re.search(r"Break-even with bf16 is ([\d.]+) T", text)[1])
    assert rate == pytest.approx(found.formats[0].even / 1e12, rel=0.2)


def test_the_converters_are_those_measured():
    found = json.loads((ROOT / "tests/data/measured/converter.json").read_text("utf-8"))
    text = part_of("7.4 Hardware co-design")
    rows = re.findall(r"\| (none|\d+ pairs) \| ([\d.]+) G \| ([\d.]+) ms \| ([\d.]+) ms \|", text)
    assert len(rows) == len(found["converters"])
    for (_, rate, predicted, measured), one in zip(rows, found["converters"], strict=True):
        assert float(rate) == pytest.approx(one["rate"] / 1e9, rel=0.01)
        assert float(predicted) == pytest.approx(one["predicted_s"] * 1e3, rel=0.01)
        assert float(measured) == pytest.approx(one["measured_s"] * 1e3, rel=0.01)
        assert one["predicted_s"] == pytest.approx(one["measured_s"], rel=0.25)  # what the page claims
    assert f"median error is {found['error']:.0%}" in text


def test_modal_figures_are_those_measured():
    found = json.loads((ROOT / "tests/data/measured/multimodal.json").read_text("utf-8"))
    assert all(r["held_bytes"] == r["predicted_bytes"] for r in found)
    rows = re.findall(r"\| (image|video|audio) \| (\d+)% \| ([^|]+) \| ([\d.]+) \| ([\d.]+)% \|",
                      part_of("7.5 Multimodal"))  # fmt: skip
    assert len(rows) >= 20
    for kind, share, family, kl, right in rows:
        mine = [r for r in found if (r["kind"], r["family"]) == (kind, family)]
        near = [r for r in mine if abs(r["share"] * 100 - int(share)) < 1]
        assert any(f"{r['kl']:.3f}" == kl and f"{r['right']:.1%}" == f"{right}%" for r in near), (kind, family, share)


EVIDENCE = ROOT / "kvsim/data/evidence"


def rows_of(part, first):
    """Cells of the table rows whose first cell matches."""
    found = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines() if line[:2] == "| "]
    return [row for row in found if re.match(first, row[0])]


def test_allocations_are_those_measured():
    found = json.loads((EVIDENCE / "allocation-smollm2-135m.json").read_text("utf-8"))["rows"]
    rows = rows_of(part_of("3.3 Sensitivity and allocation"), r".*(bits|ranks|tokens), ")
    assert len(rows) == 7
    for by, bits, *kl in rows:
        mine = {r["what"]: r for r in found if r["by"] == by}
        assert bits == f"{mine['uniform']['bits']:.2f}"
        for what, told in zip(("uniform", "allocated", "by head", "by group"), kl, strict=True):
            assert told == (f"{mine[what]['kl']:.3f}" if what in mine else ""), (by, what)


def test_bounds_are_those_measured():
    found = json.loads((EVIDENCE / "bounds-smollm2-135m.json").read_text("utf-8"))["methods"]
    rows = rows_of(part_of("7.6 Provable bounds"), "`")
    assert len(rows) == len(found)
    for (method, *told), row in zip(rows, found, strict=True):
        assert kvsim.parse_method(method.strip("`").replace("\\|", "|")) == kvsim.parse_method(row["method"])
        sides = [f"{row[s][n]:.{d}f}" if s in row else "" for s in "kv" for n, d in (("gap_db", 1), ("gap_bits", 2))]
        tight = [f"{row['attention'][n]:.3g}" for n in ("bound_over_actual", "norm_bound_over_actual")]
        assert told == [*sides, *tight]
        assert row["attention"]["broken"] == 0
        assert all([len(heads) for heads in row[s]["layer_head_db"]] == [3] * 30 for s in "kv" if s in row)
    assert f"{sum(r['attention']['cases'] for r in found):,} cases" in part_of("7.6 Provable bounds")
    second = json.loads((EVIDENCE / "bounds-gemma3-270m.json").read_text("utf-8"))["methods"]
    attended = [r["attention"] for r in second]
    broken, cases = (sum(a[n] for a in attended) for n in ("broken", "cases"))
    assert broken == 0
    assert f"{broken} of {cases:,} cases" in part_of("7.6 Provable bounds")


def test_retrieval_is_as_measured():
    found = [json.loads(f.read_text("utf-8")) for f in sorted(EVIDENCE.glob("tasks-*.json"), reverse=True)]
    assert found[0]["model"] == "smollm2-135m"
    rows = rows_of(PAGE.split("### 6.2: retrieval")[1].split("\n## ")[0], "`")
    assert len(rows) == len(found[0]["methods"])
    for at, (method, *told) in enumerate(rows):
        mine = [report["methods"][at] for report in found]
        assert {row["method"] for row in mine} == {method.strip("`").replace("\\|", "|")}
        shares = [f"{row[n]['share']:.0%}" for row in mine for n in ("needle", "key-value", "variables") if n in row]
        assert told == shares
