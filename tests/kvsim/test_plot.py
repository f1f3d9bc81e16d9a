"""Pictures by their properties: what they show is in their tables, names do not collide, limits stand right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.errors import KvsimError
from kvsim.frames import called, family, plan_rows, record_rows

mpl = pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
mpl.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex, to_rgb  # noqa: E402

from kvsim import plot  # noqa: E402
from kvsim.plot import context, frontier, labels, measured, memory, roof, style  # noqa: E402

GIB = 2**30
METHODS = ("full", "fp8", "kivi-4", "snapkv(budget=0.25) | int(bits=4)", "svd(rank=64) | int(bits=4)")


@pytest.fixture(scope="module")
def plan():
    return kvsim.fit(kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090"), kvsim.Workload(1, 131072))


@pytest.fixture(scope="module")
def grid():
    model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
    return kvsim.sweep(model, device, METHODS, [2**k for k in range(10, 18)], [1, 8, 64])


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def boxes(ax):
    """Boxes of every text in the axes and of its title, as drawn."""
    ax.figure.canvas.draw()
    return [(t.get_text(), labels.box_of(t)) for t in [*ax.texts, ax.title] if t.get_text()]


def collisions(ax):
    return [(a, b) for (a, x), (b, y) in itertools.combinations(boxes(ax), 2) if x.meets(y)]


def pictures(plan, grid):
    rows = [
        {"predicted_s": s, "low_s": s / 1.3, "high_s": s * 1.3, "measured_s": m, "name": str(i), "group": str(i % 2)}
        for i, (s, m) in enumerate([(1e-3, 1.1e-3), (2e-3, 1.9e-3), (5e-3, 9e-3), (1e-2, 1e-2)])
    ]
    loss = [{"method": f"int{b}", "family": "format", "bits_per_value": b + 0.5, "relative_error": 4.0**-b}
            for b in (2, 3, 4, 8)]  # fmt: skip
    yield "waterfall", lambda ax=None: plot.waterfall(plan.chosen.record, ax)
    yield "bars", lambda ax=None: plot.memory_bars([c.record for c in plan.considered[:9]], ax)
    yield "context memory", lambda ax=None: plot.context_memory(grid, batch=8, ax=ax)
    yield "context time", lambda ax=None: plot.context_time(grid, batch=8, ax=ax)
    yield "best", lambda ax=None: plot.best_method(grid, ax=ax)
    yield "pareto", lambda ax=None: plot.pareto(plan, ax=ax)
    yield "roofline", lambda ax=None: plot.roofline([c.record for c in plan.considered[:6]], ax=ax)
    yield "measured", lambda ax=None: plot.predicted_measured(rows, "group", ax=ax)
    yield "quality", lambda ax=None: plot.quality_bytes(loss, ax=ax)


NAMES = ("waterfall", "bars", "context memory", "context time", "best", "pareto", "roofline", "measured", "quality")


@pytest.fixture
def draw(plan, grid, request):
    return dict(pictures(plan, grid))[request.param]


@pytest.mark.parametrize("draw", NAMES, indirect=True)
def test_units_stand_on_axes_names_do_not_collide_and_the_table_is_there(draw):
    ax = draw()
    assert not collisions(ax)
    named = [axis.get_label_text() for axis in (ax.xaxis, ax.yaxis)]
    ticks = [t.get_text() for t in ax.get_yticklabels()]
    assert "(" in named[0]
    assert "(" in named[1] or all(any(c.isalpha() for c in t) for t in ticks)  # a unit, or named bars
    assert len(plot.data(ax))
    # Something is drawn: the canvas is not of one colour, and no text is larger than the picture.
    held = np.asarray(ax.figure.canvas.buffer_rgba())[:, :, :3]
    assert len(np.unique(held.reshape(-1, 3), axis=0)) > 20
    page = ax.figure.bbox
    for words, box in boxes(ax):
        assert box.left >= 0, words
        assert box.right <= page.width, words


@pytest.mark.parametrize("draw", NAMES, indirect=True)
@pytest.mark.parametrize("width", [4.8, 9.0])
def test_given_axes_are_used_at_any_width(draw, width):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    mine = figure.add_subplot()
    assert draw(mine) is mine
    assert not collisions(mine)
    assert not plt.get_fignums(), "a picture on given axes opens no figure of its own"


@pytest.mark.parametrize("draw", NAMES, indirect=True)
def test_the_house_look_stays_in_the_house(draw):
    before = dict(mpl.rcParams)
    draw()
    assert dict(mpl.rcParams) == before


def test_colours_are_told_apart_by_colour_blind_people():
    # Vienot, Brettel, Mollon 1999: linear RGB as a protanope and as a deuteranope sees it.
    simulated = {
        "protan": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        "deutan": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    }
    for matrix in ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], *simulated.values()):
        seen = [np.array(matrix) @ (np.array(to_rgb(c)) ** 2.2) for c in style.SERIES]
        for a, b in itertools.combinations(seen, 2):
            assert np.linalg.norm(np.clip(a, 0, 1) ** (1 / 2.2) - np.clip(b, 0, 1) ** (1 / 2.2)) > 0.14
    # Colour is never alone: each family and each line has a mark of its own too.
    assert len({m for _, m, _ in style.FAMILIES.values()}) == len(style.FAMILIES)
    assert len(set(style.MARKERS)) == len(style.SERIES) == len(style.DASHES)


def test_the_waterfall_adds_up_and_its_bars_are_the_table(plan):
    record = plan.chosen.record
    ax = plot.waterfall(record)
    *steps, total, capacity = memory.waterfall_rows(record)
    assert sum(s["bytes"] for s in steps) == total["bytes"] == int(record.peak_bytes) + record.reserve_bytes
    assert [s["start_bytes"] for s in steps] == [0, *np.cumsum([s["bytes"] for s in steps])[:-1].tolist()]
    assert sum(s["bytes"] for s in steps if s["step"].startswith("cache: ")) == record.cache_bytes
    drawn = [(p.get_x() * GIB, p.get_width() * GIB) for p in ax.patches]
    assert np.array(drawn) == pytest.approx(np.array([(s["start_bytes"], s["bytes"]) for s in (*steps, total)]))
    (limit,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert limit.get_xdata()[0] * GIB == capacity["bytes"] == record.case.hardware.capacity_bytes
    assert plot.data(ax)["bytes"].tolist() == [r["bytes"] for r in (*steps, total, capacity)]


def test_a_waterfall_that_does_not_fit_says_so_without_colour(plan):
    ax = plot.waterfall(plan.baseline.record)
    assert "short" in ax.get_title(loc="left")
    assert ax.patches[-1].get_hatch()
    assert "left" in plot.waterfall(plan.chosen.record).get_title(loc="left")


def test_stacked_bars_end_at_peak_and_reserve(plan):
    some = [c.record for c in plan.considered[:5]]
    rows = plot.data(plot.memory_bars(some))
    parts = rows[["weights", "cache_bytes", "state_bytes", "rest_bytes", "reserve_bytes"]]
    assert parts.min().min() >= 0
    assert parts.sum(axis=1).tolist() == [int(r.peak_bytes) + r.reserve_bytes for r in some]


def test_context_lines_are_the_sweep_and_hollow_points_do_not_fit(grid):
    ax = plot.context_memory(grid, batch=8)
    for i, name in enumerate(METHODS):
        (line,) = [x for x in ax.lines if x.get_label() == called(kvsim.parse_method(name))]
        assert line.get_ydata() == pytest.approx((grid["peak_bytes"][i, 1] + grid.reserve_bytes) / GIB)
        assert line.get_xdata() == pytest.approx(grid.prompt_tokens)
    hollow = [x for x in ax.lines if x.get_markerfacecolor() == "white" and x.get_linestyle() == "None"]
    assert sum(len(x.get_xdata()) for x in hollow) == (~grid["fits"][:, 1]).sum() > 0
    limit = next(x for x in ax.lines if "capacity" in str(x.get_label()))
    assert limit.get_ydata()[0] * GIB == grid.capacity_bytes
    time = plot.context_time(grid, batch=1)
    (line,) = [x for x in time.lines if x.get_label() == "full"]
    assert line.get_ydata() == pytest.approx(grid["tpot_s"][0, 0] * 1e3)


def test_frames_and_arrays_draw_what_the_sweep_draws(grid):
    pytest.importorskip("xarray")
    for source in (grid.to_frame(), grid.to_xarray()):
        ax, same = plot.context_memory(source, batch=1), plot.context_memory(grid, batch=1)
        assert plot.data(ax)["needed_bytes"].tolist() == plot.data(same)["needed_bytes"].tolist()
        assert any("capacity" in str(x.get_label()) for x in ax.lines)


@pytest.mark.parametrize("objective", ["speed", "gentle", "memory"])
def test_the_best_method_of_each_cell_is_the_best_that_fits(grid, objective):
    rows = context.best_rows(grid, objective)
    key = {"speed": grid["tpot_s"], "gentle": -grid["cache_bytes"], "memory": grid["peak_bytes"]}[objective]
    cost = np.where(grid["fits"], key.astype(float), np.inf)
    names = np.array([called(kvsim.parse_method(m)) for m in METHODS], dtype=object)
    want = np.where(np.isinf(cost).all(axis=0), "nothing fits", names[cost.argmin(axis=0)])
    assert (context.grid_of(rows) == want).all()
    ax = plot.best_method(grid, objective)
    assert len(ax.patches) == want.size
    letters = {t.get_text() for t in ax.texts}
    assert len(letters) == len(set(want.ravel()) - {"nothing fits"})


points = st.lists(st.tuples(*[st.integers(0, 20).map(float)] * 3), min_size=1, max_size=40)


@given(points)
def test_nobody_beats_the_frontier_and_everybody_else_is_beaten(held):
    best = frontier.best_of(held)
    beats = lambda a, b: all(x <= y for x, y in zip(a, b, strict=True))  # noqa: E731
    assert not [(i, j) for i in best for j in best if i != j and beats(held[i], held[j])]
    assert all(any(beats(held[i], p) for i in best) for p in held)


def test_the_pareto_picture_joins_no_method_that_does_not_fit(plan):
    rows = plot.data(plot.pareto(plan))
    assert len(rows) == len(plan.considered)
    front = rows[rows.on_frontier]
    assert front.fits.all()
    assert front.allowed.all()
    assert set(front.method) == {c.name for c in plan.frontier}  # fit and the picture agree on who is beaten
    ax = plot.pareto(plan)
    names = {t.get_text() for t in ax.texts}
    assert {plan.chosen.name, "full"} <= names
    two = plot.data(plot.pareto(plan, x="bits_per_value", y="tpot_s"))
    assert 0 < two.on_frontier.sum() < len(front)


def test_roofline_points_are_the_lines_of_the_records(plan):
    some = [c.record for c in plan.considered[:4]]
    for row, record in zip(plot.data(plot.roofline(some)).to_dict("records"), some, strict=True):
        line = next(x for x in record.decode.lines if x.name == "attention")
        assert row["intensity"] == line.flops / line.bytes
        assert row["flops_per_s"] * line.seconds == pytest.approx(line.flops)
        assert row["flops_per_s_low"] < row["flops_per_s"] < row["flops_per_s_high"]
    whole = roof.roofline_rows(some[0], line="all")[0]
    assert whole["flops"] == sum(x.flops for x in some[0].decode.lines)


def test_the_worst_miss_is_named_and_intervals_are_counted():
    rows = [{"predicted_s": 2.0, "low_s": 1.0, "high_s": 3.0, "measured_s": m, "name": n}
            for m, n in ((2.0, "good"), (8.0, "bad"), (0.4, "worse"))]  # fmt: skip
    ax = plot.predicted_measured(rows)
    # 2 / 2 = 1, 2 / 8 = 1/4, 2 / 0.4 = 5: the last is the largest factor; errors 0, 3/4, 4: median 75%; 1 of 3 inside.
    assert [t.get_text() for t in ax.texts if t.get_text()] == ["worst: worse, 5x too slow"]
    assert "median error 75%, 33% inside" in ax.get_title(loc="left").replace("\n", " ")
    assert measured.worst(rows)["name"] == "worse"


def test_a_long_name_of_the_worst_miss_is_wrapped_not_lost():
    row = {"predicted_s": 1e-3, "low_s": 1e-4, "high_s": 2e-3, "measured_s": 1e-1, "name": "gpu engine/kernel " * 4}
    ax = plot.predicted_measured([row, {**row, "measured_s": 1e-3}])
    assert [t for t in ax.texts if t.get_text().startswith("worst: ") and "\n" in t.get_text()]


def test_logarithmic_axes_say_what_they_leave_out(plan):
    rows = [{**r, "kl": k} for r, k in zip(plan_rows(plan), (0.0, 1e-3, 1e-2, 0.5), strict=False)]
    ax = plot.pareto(rows, y="kl", log="y")
    assert "1 at zero not shown" in ax.get_title(loc="left").replace("\n", " ")
    assert ax.get_yscale() == "log"
    assert ax.get_xscale() == "linear"
    loss = [{"method": "a", "family": "format", "bits_per_value": b, "kl": k} for b, k in ((16, 1e-9), (4, 0.1))]
    assert "1 below 1e-06 not shown" in plot.quality_bytes(loss, y="kl").get_title(loc="left")


words = st.text("abcdefgh |=(),0123456789", min_size=1, max_size=34).filter(str.strip)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), words), min_size=1, max_size=25, unique_by=lambda p: p[2]))
def test_labels_collide_with_nothing_wherever_the_points_are(held):
    figure, ax = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    ax.set(xlim=(-0.1, 1.1), ylim=(-0.1, 1.1))
    made, missing = labels.label(ax, held)
    figure.canvas.draw()
    frame = ax.get_window_extent()
    found = [labels.box_of(t) for t in made]
    assert not [1 for a, b in itertools.combinations(found, 2) if a.meets(b)]
    assert all(b.inside(labels.Box(frame.x0, frame.y0, frame.x1, frame.y1)) for b in found)
    assert len(made) + len(missing) == len(held)
    plt.close(figure)


def test_segments_and_boxes_meet_where_they_do():
    box = labels.Box(0, 0, 2, 1)
    assert box.crossed((-1, 0.5), (3, 0.5))
    assert box.crossed((1, -1), (1, 3))
    assert not box.crossed((-1, 2), (3, 2))
    assert not box.crossed((-1, 0.5), (-0.1, 0.5))
    assert box.meets(labels.Box(2.5, 0, 3, 1), gap=1)
    assert not box.meets(labels.Box(2.5, 0, 3, 1))


@pytest.mark.parametrize(("ask", "says"), [
    (lambda plan, grid: plot.context_memory(grid), "say which one to draw, batch=1"),
    (lambda plan, grid: plot.context_memory(grid, batch=3), "batch 3 is not in the sweep; it has 1, 8, 64"),
    (lambda plan, grid: plot.best_method(grid, "sped"), "did you mean 'speed'"),
    (lambda plan, grid: plot.pareto(plan, y="tpot"), "did you mean 'tpot_s'"),
    (lambda plan, grid: plot.pareto(42), "got a int"),
    (lambda plan, grid: plot.roofline(plan.chosen.record, line="atention"), "did you mean 'attention'"),
    (lambda plan, grid: plot.memory_bars([c.record for c in plan.considered]), "more than the 16"),
    (lambda plan, grid: plot.predicted_measured([{"predicted_s": 1.0}]), "a row has no 'low_s'"),
    (lambda plan, grid: plot.data(plt.figure().add_subplot()), "no picture of kvsim.plot"),
])  # fmt: skip
def test_wrong_questions_end_in_one_line(plan, grid, ask, says):
    with pytest.raises(KvsimError) as caught:
        ask(plan, grid)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_explore_without_a_live_notebook_draws_the_first_choices():
    seen = []
    found = plot.explore(lambda **chosen: seen.append(chosen) or "table", {"batch": [4, 8], "method": ["full"]})
    assert found == "table"
    assert seen == [{"batch": 4, "method": "full"}]
    with pytest.raises(KvsimError, match="at least one control"):
        plot.explore(lambda: None, {})


def test_kinds_of_methods_and_short_names():
    for text, kind in (("full", "full"), ("kivi-4", "format"), ("gear-4", "format"), ("snapkv(budget=0.25)", "tokens"),
                       ("svd(rank=64)", "basis"), ("svd(rank=64) | int(bits=4)", "hybrid")):  # fmt: skip
        assert family(kvsim.parse_method(text)) == kind
    for text in ("kivi-4", "pages(top=2048) | kivi-4", "svd(rank=64) | int(bits=4)"):
        assert kvsim.parse_method(called(kvsim.parse_method(text))) == kvsim.parse_method(text)
    assert called(kvsim.parse_method("pages(top=2048) | kivi-4")) == "pages(top=2048) | kivi-4"


def test_counts_and_palette():
    assert [style.count(n) for n in (512, 4096, 131072, 2**20, 1536)] == ["512", "4k", "128k", "1M", "1.5k"]
    assert all(to_hex(c).upper() == c for c in style.SERIES)
    rows = plan_rows(kvsim.fit(kvsim.load_model("gpt2"), kvsim.load_device("rtx-4090"), kvsim.Workload(1, 512)))
    assert all(math.isfinite(r["bits_per_value"]) for r in rows)
    assert record_rows  # the same columns for a record alone are tested in test_frames
