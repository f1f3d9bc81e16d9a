"""Pictures at the width of a phone, and maps whose letters are in their table."""

from __future__ import annotations

import itertools

import pytest

import kvsim

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

from kvsim import plot
from kvsim.plot import labels

MODEL, DEVICE = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")


def test_a_narrow_picture_has_names_above_its_bars():
    plan = kvsim.fit(MODEL, DEVICE, kvsim.Workload(1, 131072), methods=["kivi-4"])
    from matplotlib.figure import Figure

    for width, beside in ((7.2, True), (3.5, False)):
        axes = Figure(figsize=(width, 4), layout="constrained").add_subplot()
        plot.waterfall(plan.chosen.record, axes)
        written = [t.get_text() for t in axes.texts]
        assert ("weights" in [t.get_text() for t in axes.get_yticklabels()]) is beside
        assert ("weights" in written) is not beside
        axes.figure.draw_without_rendering()
        assert not collisions_of_names(axes)
        assert axes._left_title.get_window_extent().x1 <= axes.figure.bbox.x1


def collisions_of_names(ax):
    held = [(t.get_text(), labels.box_of(t)) for t in ax.texts if t.get_text()]
    return [(a, b) for (a, x), (b, y) in itertools.combinations(held, 2) if x.meets(y)]


def test_the_map_of_methods_has_its_letters_in_the_table():
    grid = kvsim.sweep(MODEL, DEVICE, ["full"], [1024, 131072], [1, 64])
    held = plot.data(plot.best_method(grid))
    assert dict(zip(held.method, held.letter, strict=True)) == {"full": "A", "nothing fits": ""}
