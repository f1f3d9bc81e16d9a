"""The report page: one file that needs nothing else, says the question and the answer, and is written whole or not."""

from __future__ import annotations

import re
import sys
from datetime import date
from html.parser import HTMLParser

import pytest

import kvsim
from kvsim.errors import KvsimError
from kvsim.plan import Limits

pytest.importorskip("matplotlib")

from kvsim import webreport
from kvsim.plot.style import rows
from kvsim.webpictures import WIDTHS, context_sweep, pictures, spread

MODEL, DEVICE = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Tags, ids and links of a page; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.ids, self.links = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.note(tag, attrs)

    def note(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [v for k, v in attrs if k == "id"]
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def plan():
    return kvsim.fit(MODEL, DEVICE, kvsim.Workload(1, 131072))


@pytest.fixture(scope="module")
def text(plan):
    return webreport.page(plan, "kvsim report --model llama-3.1-8b", date(2026, 1, 2))


def test_the_page_needs_nothing_else_and_is_well_formed(text):
    page = Page(text)
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links), "the page must not load anything"
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids)), "ids of different pictures must not collide"
    targets = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]*)\)", text))
    assert targets <= set(page.ids)
    assert page.tags.count("svg") == 12, "six for a desk and six for a phone"
    assert '<meta name="viewport"' in text
    assert "@media print" in text
    assert len(text) < 2**21


def test_the_page_says_question_answer_evidence_and_sources(plan, text):
    for words in ("The question", "The answer", "Pictures", "How sure this is", "Sources", "2026-01-02",
                  plan.why()[1:], "kvsim report --model llama-3.1-8b", plan.chosen.name,
                  f"{int(plan.chosen.record.cache_bytes):,} bytes", DEVICE.facts()[0][2]):  # fmt: skip
        assert words in text
    assert text == webreport.page(plan, "kvsim report --model llama-3.1-8b", date(2026, 1, 2)), "not reproducible"


def test_each_picture_has_its_table_and_words_for_those_who_do_not_see(text):
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 6
    for figure in figures:
        assert len(re.findall(r'<svg class="(?:desk|phone)" role="img" aria-label="[^"]{20,}"', figure)) == 2
        assert "<figcaption>" in figure
        assert figure.count("<tr>") > 3
        assert len(re.findall(r"<(path|use)", figure)) > 20


@pytest.mark.parametrize("screen", WIDTHS)
def test_no_word_of_a_picture_leaves_it(plan, screen):
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    for picture in pictures(plan):
        held = Figure(figsize=(WIDTHS[screen], picture.height + 0.5), layout="constrained")
        picture.draw(held.add_subplot())
        held.draw_without_rendering()
        ticks = {t for axes in held.axes for t in axes.get_xticklabels() + axes.get_yticklabels()}
        for text in held.findobj(Text):
            if text not in ticks and text.get_visible() and text.get_text().strip():
                box = text.get_window_extent()
                assert box.x0 >= -2, (picture.name, text.get_text())
                assert box.x1 <= held.bbox.x1 + 2, (picture.name, text.get_text())


def test_one_method_has_one_name_on_the_page(plan):
    # The policy's own way of writing drops defaults; the page calls each method as the plan does.
    drawn = {p.name: p for p in pictures(plan)}
    from matplotlib.figure import Figure

    for name in ("memory", "time"):
        axes = drawn[name].draw(Figure(figsize=(4.8, 4.2), layout="constrained").add_subplot())
        assert {row["method"] for row in rows(axes)} <= {c.name for c in plan.considered}


def test_a_page_says_what_to_install_before_it_computes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(KvsimError, match=r"pip install 'kvsim\[plot\]'"):
        webreport.check_page(tmp_path / "a.html")


def test_a_question_without_an_answer_is_a_page_too():
    plan = kvsim.fit(MODEL, DEVICE, kvsim.Workload(64, 131072), limits=Limits(max_tpot_ms=1.0))
    assert plan.chosen is None
    text = webreport.page(plan)
    Page(text)
    assert "Nothing fits. " in text
    assert "a step within" in text


@pytest.mark.parametrize(("model", "prompt"), [("gpt2", 1), ("gpt2", 1024), ("mamba-codestral-7b", 4096)])
def test_odd_models_and_shortest_prompts_have_pages(model, prompt):
    plan = kvsim.fit(kvsim.load_model(model), DEVICE, kvsim.Workload(2, prompt), methods=["int8", "kivi-4"])
    Page(webreport.page(plan))
    lengths = context_sweep(plan, [plan.baseline]).prompt_tokens
    assert prompt in lengths
    assert len(pictures(plan)) >= 5


def test_words_from_outside_are_escaped():
    spec = kvsim.ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=4, head_dim=64, name="<b>$x & co</b>")
    plan = kvsim.fit(spec, DEVICE, kvsim.Workload(1, 128), methods=["int8"])
    text = webreport.page(plan, "kvsim report --model '<b>'")
    assert "<b>$x" not in text
    assert "&lt;b&gt;$x &amp; co&lt;/b&gt;" in text


def test_written_whole_or_not_at_all(tmp_path, plan, monkeypatch):
    target = tmp_path / "r.html"
    target.write_text("old")
    monkeypatch.setattr(webreport, "page", lambda *_: "new")
    webreport.write_page(plan, target)
    assert target.read_text() == "new"
    monkeypatch.setattr(webreport.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(KvsimError, match="No space left"):
        webreport.write_page(plan, target)
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    assert target.read_text() == "new"


@pytest.mark.parametrize(("name", "says"), [("r.txt", "ends in .html"), ("no/r.html", "does not exist")])
def test_a_wrong_place_is_told_before_anything_is_computed(tmp_path, name, says):
    with pytest.raises(KvsimError, match=says):
        webreport.check_page(tmp_path / name)


def test_the_command(tmp_path, capsys):
    from kvsim.cli import main

    out = tmp_path / "r.html"
    ask = ["report", "--model", "gpt2", "--device", "rtx-4090", "--prompt", "512"]
    with pytest.raises(SystemExit) as ended:
        main([*ask, "--out", str(out)])
    assert ended.value.code == 0
    assert f"kvsim report --model gpt2 --device rtx-4090 --prompt 512 --out {out}" in out.read_text()
    for target, change, says, status in (("x.pdf", [], "ends in .html", 2), (out, ["--batch", "0"], "batch", 2),
                                         (out, ["--max-tpot", "0.0001"], "nothing fits", 1)):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*ask, "--out", str(target), *change])
        assert ended.value.code == status
        said = capsys.readouterr()
        assert says in said.out + said.err


def test_spread_keeps_both_ends():
    assert spread(list(range(10)), 4) == [0, 3, 6, 9]
    assert spread([1, 2], 4) == [1, 2]
