"""A calibration in miniature: kvsim reads its file, it names no device that this is not, and is written whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import kvsim
from kvsim.errors import KvsimError
from runtime import calibrate, calibration_plan
from runtime.calibration_plan import SMALL, Plan
from runtime.device import edition_name, this_machine
from runtime.files import write_whole
from runtime.layer_runs import layer
from runtime.microbench import Shape
from runtime.profile_file import check_place, write
from runtime.timing import Bench, pinned_threads, summary

TINY_MODEL = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                      "num_hidden_layers": 2}
METHODS = ("full", "int(bits=4)", "snapkv(budget=0.5)", "h2o(budget=0.5)", "svd(rank=32)",
           "int(bits=4)+outliers(fraction=0.02)")
PRODUCTS = ((256, 1024, 1024), *((m, n, 64) for m in (1, 8, 64) for n in (64, 256)))
TINY = Plan(tuple((m, 3) for m in METHODS), PRODUCTS, (Shape(1, 2, 2, 64, 64), Shape(1, 2, 2, 64, 128)),
            ((TINY_MODEL, 1, 32), (TINY_MODEL, 2, 64)), (2**18, 2**27), 0.01)
SHAPES = (Shape(1, 2, 2, 64, 80), Shape(2, 2, 2, 64, 150), Shape(1, 2, 4, 128, 120))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(calibrate, "SHAPES", SHAPES)
    monkeypatch.setattr(calibrate, "QUICK", TINY)
    return monkeypatch


@pytest.mark.slow
def test_the_profile_is_read_and_predicts_by_its_own_rows(small, tmp_path):
    file = tmp_path / "here.toml"
    words = ["--quick", "--threads", "1", "--out", str(file), "--name", "bench-box"]
    result = CliRunner().invoke(calibrate.command, words)
    assert result.exit_code == 0, result.output
    profile = kvsim.load_device(file)
    assert (profile.name, profile.kind, profile.edition, profile.units) == ("bench-box", "cpu", "calibrated", 1)
    assert profile.capacity_bytes == this_machine().capacity_bytes
    known = {(c.op, c.format) for c in profile.coefficients}
    assert {("decode", "fp32"), ("decode", "int4"), ("elementwise", "int4 append"), ("elementwise", "int4 compress"),
            ("elementwise", "h2o step"), ("elementwise", "h2o selection"), ("elementwise", "outliers append"),
            ("elementwise", "activations"), ("prefill", "fp32"), ("matmul", "fp32"), ("matmul", "bf16")} <= known
    assert all(c.devices == ("bench-box",) and c.source and c.date for c in profile.coefficients)
    model = kvsim.ModelSpec.from_numbers(layers=2, n_heads=4, n_kv_heads=2, head_dim=64, dtype="fp32")
    case = kvsim.Case(model, profile, kvsim.parse_method("int(bits=4)"), kvsim.Workload(1, 100, 0))
    record = kvsim.predict(case)
    assert "int4 append" in record.coefficients
    assert "borrowed" not in record.coefficients
    assert 0.0 < record.decode.low <= record.decode.seconds <= record.decode.high < 10.0


def test_a_device_that_this_is_not_is_refused_before_anything_is_measured(tmp_path):
    file = tmp_path / "x.toml"
    with pytest.raises(KvsimError, match="means the shipped h200-sxm"):
        calibrate.command.main(["--name", "h200-sxm", "--out", str(file)], standalone_mode=False)
    assert not file.exists()


@pytest.mark.parametrize("name", ["", "  ", "a/b", "a\nb", "x" * 101])
def test_names_that_no_profile_may_have(name):
    with pytest.raises(KvsimError, match=r"^name .* must be words without slashes"):
        edition_name(this_machine(), name)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate.Calibration, "run", lambda self: pytest.fail("measured"))
    (tmp_path / "file").write_text("old")
    with pytest.raises(KvsimError, match=r"--out .* cannot be written: "):
        calibrate.command.main(["--out", str(tmp_path / "file" / "x.toml")], standalone_mode=False)
    with pytest.raises(KvsimError, match=r"--plot .*x.jpg'?: give a file that ends in .png or .svg"):
        check_place(tmp_path / "x.jpg", "--plot", (".png", ".svg"))


def test_a_run_that_is_stopped_while_it_writes_leaves_the_old_file(tmp_path, monkeypatch):
    def stopped(self, target):
        raise KeyboardInterrupt

    file = tmp_path / "record.json"
    file.write_text("old")
    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_text_that_is_no_profile_leaves_the_old_file(tmp_path):
    file = tmp_path / "here.toml"
    file.write_text("old")
    with pytest.raises(KvsimError, match="missing field"):
        write("name = 'x'\n", file)
    assert file.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["here.toml"]


def test_the_editions_measure_every_kind_of_part():
    from kvsim.parts import parts

    named = " ".join(m for m, _ in calibration_plan.FULL.methods)
    roles = {part.role for m, _ in calibration_plan.FULL.methods for part in kvsim.parse_method(m).parts()}
    assert roles == {"format", "tokens", "basis", "correction"}
    assert {n for n, p in parts().items() if p.role == "tokens"} - {"keep"} <= {w.split("(")[0] for w in named.split()}


def test_a_layer_reports_the_lines_that_predictions_have():
    bench = Bench(torch.device("cpu"), 0, 0.01)
    with pinned_threads(1):
        points = layer(bench, "h2o(budget=0.5) | int(bits=8)", SHAPES[0], "fp32", 4, steps=2)
    names = {p.what for p in points if not p.what.endswith("activation")}
    assert names == {"prefill h2o selection", "prefill compress", "decode attention", "decode compress and append",
                     "decode h2o step"}
    assert all(p.seconds > 0.0 for p in points)
    assert dict(points[-1].work)["path"] == "eager"  # h2o looks at the weights


def test_repeats_that_were_interrupted_do_not_count_where_others_are_left():
    timed = summary([1.0, 1.1, 0.9, 9.0, 8.0], [0, 0, 0, 3, 1])
    assert (timed.seconds, timed.clean, timed.repeats) == (1.0, 3, 5)
    assert summary([1.0, 9.0, 8.0, 7.0], [0, 1, 1, 1]).seconds == 7.5  # too few clean ones: all count
    assert not replace(timed, spread=2.0).quiet
