"""`kvsim calibrate`: measure the machine at hand and write its device profile, a new edition with coefficients."""

from __future__ import annotations

import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import click
import torch

from kvsim.coefficients import Coefficient
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.method import parse_method
from kvsim.op import Op
from kvsim.prediction import phase_ops
from kvsim.record import Case
from kvsim.workload import Workload
from runtime.cache import spec_of
from runtime.calibration_fits import (
    LAYERS,
    Origin,
    activation_rows,
    layer_rows,
    pace_row,
    prefill_rows,
    product_rows,
    stream_row,
)
from runtime.calibration_plan import FULL, GPU_PRODUCTS, QUICK, SHAPES, Plan
from runtime.device import Machine, edition_name, this_machine
from runtime.layer_runs import layer
from runtime.microbench import DTYPES, HF_DTYPES, Point, Shape, launch, prefill, products, streams
from runtime.pace import Pace
from runtime.profile_file import check_place, checked, facts_of, text_of, write
from runtime.random_model import random_model
from runtime.running_model import run
from runtime.timing import Bench, clock_name, pinned_threads
from runtime.watch import REST

PACKED = parse_method("int(bits=8)")
EAGER_SHAPES = 5
"""Shapes on which methods with a kernel of their own are measured without it too."""
DEPTHS = (2, 6)
"""Layers of the models whose difference shows what one layer costs."""
NEEDED, ENOUGH_S = 4, 240.0
"""Shapes that every method is measured on, the first ones, and seconds from the start after which others are left."""
AGAIN_UNTIL_S = 200.0
"""Seconds from the start after which nothing is measured again."""
STEADY = 1.05
"""How much slower than at its best the machine may be beside a measurement that is not taken again."""
Tell = Callable[[str], None]


class _Taken(NamedTuple):
    """Points of one method on one shape, and what the machine's pace was before and after."""

    points: list[Point]
    before: tuple[float, ...]
    after: tuple[float, ...]


class Calibration:
    """Measurements of one machine, and the profile they make.

    Args:
        machine: what it is. plan: what to measure. tell: is told of every step, for a progress bar.
    """

    def __init__(self, machine: Machine, name: str, plan: Plan, tell: Tell) -> None:
        self.machine, self.name, self.plan, self.tell = machine, name, plan, tell
        self.device = torch.device("cuda" if machine.kind == "gpu" else "cpu")
        cache = machine.last_level_cache_bytes
        self.bench = Bench(self.device, min(max(2 * cache, 2**26), 2**29), plan.budget_s)
        # what models run in: full precision on a CPU, half of it on a GPU
        self.dtype = "bf16" if machine.kind == "gpu" else "fp32"
        self.points: list[Point] = []
        self.layers: list[Point] = []
        self.date = datetime.date.today().isoformat()

    def steps(self) -> int:
        """How many times `tell` will be called, disturbed measurements taken again aside."""
        return 5 + sum(count for _, count in self.plan.methods) + len(DEPTHS) * len(self.plan.models)

    def run(self) -> str:
        """Measure everything; the profile's text."""
        self.measure()
        return self._text(self.rows())

    def measure(self) -> None:
        """Take every measurement of the plan."""
        self.tell("kernels")
        self.started, self.pace = time.perf_counter(), Pace(self.device, seconds=0.01)
        if self.plan.methods:
            # what is compiled at first use, is now
            layer(self.bench, "int(bits=4)", SHAPES[0], self.dtype, LAYERS, eager=True)
        self._take("streams", streams(self.bench, self.plan.streams))
        self.tell("launches")
        self.floor = launch(self.bench)
        for dtype in ("fp32", "bf16"):
            shapes = self.plan.products + (GPU_PRODUCTS if self.machine.kind == "gpu" else ())
            self._take(f"matrix products {dtype}", products(self.bench, shapes, dtype))
        self.prompts = [*prefill(self.bench, self.plan.prompts, "fp32"),
                        *prefill(self.bench, self.plan.prompts[:4], "bf16")]
        self.layers = self._layers()
        self.models = list(self._models(checked(self._text([]))))

    def rows(self) -> list[Coefficient]:
        """The coefficients that the measurements give."""
        origin = Origin(checked(self._text([])), self._source(), self.date)
        prefills = prefill_rows(origin, self.prompts)
        rows = layer_rows(origin, self.layers, self.dtype, prefills)
        rows = [c for c in rows if c.op == "decode"] + prefills + [c for c in rows if c.op != "decode"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"draft-{time.time_ns()}.toml"
            file.write_text(self._text([]), encoding="utf-8")
            measured = [p for p in self.points if p.what == "matmul"]
            rows += [replace(c, devices=(self.name,)) for c in product_rows(origin, measured, str(file))]
        rows += activation_rows(origin, self.models)
        rows += [pace_row(origin, self.pace.step_s), stream_row(origin, self.points, self.floor)]
        return rows

    def _take(self, what: str, points: Iterator[Point]) -> None:
        self.tell(what)
        self.points += list(points)

    def _layers(self) -> list[Point]:
        """Every method of the plan on its shapes; what a method refuses is left out, and said.

        In an order that chance gave: what slows the machine down for a while spoils points here and there, not all
        methods on one shape or one method on all. What was disturbed most is measured again while there is time, and
        what the first shapes have shown is left where time runs out.
        """
        found: dict[tuple[str, Shape], _Taken] = {}
        refused: set[str] = set()
        looked = self.pace.look()
        cells = [(method, shape) for method, count in self.plan.methods for shape in SHAPES[:count]]
        Random(0).shuffle(cells)
        for method, shape in sorted(cells, key=lambda cell: SHAPES.index(cell[1]) >= NEEDED):
            self.tell(method)
            late = SHAPES.index(shape) >= NEEDED and time.perf_counter() - self.started > ENOUGH_S
            if method in refused or late:
                continue
            try:
                found[method, shape] = self._one(method, shape, looked)
                looked = found[method, shape].after
            except KvsimError as why:
                self.tell(f"{method} left out: {why}")
                refused.add(method)
        ratios = {key: self._slower(one) for key, one in found.items()}
        for key in sorted((k for k, ratio in ratios.items() if ratio > STEADY), key=lambda k: -ratios[k]):
            if time.perf_counter() - self.started > AGAIN_UNTIL_S:
                break
            self.tell(f"{key[0]} once more")
            found[key] = min(found[key], self._one(*key, looked), key=self._slower)
            looked = self.pace.looks[-1]
        return [p for key, one in found.items() if key[0] not in refused for p in one.points]

    def _one(self, method: str, shape: Shape, before: tuple[float, ...]) -> _Taken:
        """A method on a shape; on some without compiled kernels too, as what they do not take in whole is decoded."""
        points = layer(self.bench, method, shape, self.dtype, LAYERS, eager=shape in SHAPES[:EAGER_SHAPES])
        return _Taken(points, before, self.pace.look())

    def _slower(self, one: _Taken) -> float:
        return max(self.pace.ratio(one.before), self.pace.ratio(one.after))

    def _models(self, draft: HardwareProfile) -> Iterator[tuple[Op, Op, float]]:
        """The small kernels of models with few and with more layers, as predicted and as they were."""
        for config, batch, prompt in self.plan.models:
            for layers in DEPTHS:
                self.tell("small kernels")
                model = random_model(config, HF_DTYPES[self.dtype], layers).to(self.device)
                # not `full`, whose plain writing would count among the small kernels
                ran = run(model, PACKED, batch=batch, prompt=prompt, steps=10)
                case = Case(replace(spec_of(model), dtype=self.dtype), draft, PACKED, Workload(batch, prompt, 0))
                for phase, lines in (("prefill", ran.prefill_lines), ("decode", ran.decode_lines)):
                    ops = {op.keys[0][0]: op for op in phase_ops(case, phase) if op.name == REST}  # type: ignore[arg-type]
                    yield ops["activations"], ops["around layers"], lines[REST].seconds

    # -- the file ------------------------------------------------------------------------------------------------

    def _source(self) -> str:
        threads = torch.get_num_threads()
        return (f"kvsim calibrate {version('kvsim')} on {self.machine.name}, {threads} threads, torch "
                f"{self.machine.torch_version} ({self.machine.torch_build}), {clock_name(self.device)}")

    def _text(self, rows: list[Coefficient]) -> str:
        machine, units = self.machine, self._units()
        passes = [(dict(p.work)["bytes"], p.seconds) for p in self.points if p.what in ("read", "copy")]
        largest = max(size for size, _ in passes)
        bandwidth = max(size / seconds for size, seconds in passes if size == largest)
        best = {dtype: max((2.0 * w["m"] * w["n"] * w["k"] / p.seconds for p in self.points if p.what == "matmul"
                            and (w := dict(p.work))["dtype"] == dtype), default=0.0) for dtype in DTYPES}
        unit = "core" if machine.kind == "cpu" else "SM"
        numbers: dict[str, tuple[float, str, str]] = {
            "capacity": (machine.capacity_bytes, "B", "the system's or the driver's own figure"),
            "bandwidth": (bandwidth / 1e9, "GB/s", f"measured: read or copy of {largest / 2**20:.0f} MiB, the faster"),
            "units": (units, unit, "cores that torch used" if machine.kind == "cpu" else "driver"),
            "clock": (machine.clock_hz / 1e6, "MHz", "as the system reports it"),
        }
        if machine.last_level_cache_bytes:
            numbers["last_level_cache"] = (machine.last_level_cache_bytes, "B", "as the system reports it")
        peaks = {d: (rate / 1e12, "measured: the fastest matrix product") for d, rate in best.items() if rate}
        spreads = sorted(p.spread for p in (*self.points, *self.layers))
        notes = [f"{self._source()}; {self.date}", f"median spread of repeats {spreads[len(spreads) // 2]:.2f} "
                 f"(upper over lower quartile), {100 * self.clean():.0f}% of repeats undisturbed"]
        return text_of(facts_of(machine, self.name, self.date), notes, numbers, peaks, rows)

    def _units(self) -> int:
        return min(torch.get_num_threads(), self.machine.units) if self.machine.kind == "cpu" else self.machine.units

    def clean(self) -> float:
        """Share of repeats that nobody interrupted."""
        taken = [*self.points, *self.layers]
        return sum(p.clean for p in taken) / max(1, len(taken))


def draft(machine: Machine) -> HardwareProfile:
    """What a second tells about a machine: its memory's bandwidth and its fastest product; no coefficients."""
    plan = Plan((), ((256, 1024, 1024),), (), (), (2**27,), 0.1)
    one = Calibration(machine, edition_name(machine), plan, lambda text: None)
    one.points += [*streams(one.bench, plan.streams), *products(one.bench, plan.products, "fp32")]
    return checked(one._text([]))


@contextmanager
def progress(total: int, what: str) -> Iterator[Tell]:
    """A bar on a terminal's standard error; nothing where that is a file or a pipe."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=text[:40])


def calibrate(on: str = "cpu", name: str | None = None, quick: bool = False, tell: Tell | None = None) -> str:
    """Measure this machine with torch's present threads; the text of its profile, checked.

    Raises KvsimError where `name` means a shipped device that this is not.
    """
    machine = this_machine(on)
    one = Calibration(machine, edition_name(machine, name), QUICK if quick else FULL, tell or (lambda text: None))
    text = one.run()
    checked(text)
    return text


@click.command("calibrate")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The profile's file.  [NAME.toml]")
@click.option("--on", type=click.Choice(["cpu", "cuda"]), default="cpu", help="What to measure.  [cpu]")
@click.option("--name", help="Its name; a shipped device's only on that device.  [what the machine is]")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of torch.  [as torch has them]")
@click.option("--quick", is_flag=True, help="Fewer shapes and methods: under a minute, wider intervals.")
def command(out: Path | None, on: str, name: str | None, threads: int | None, quick: bool) -> None:
    """Measure this machine and write its profile, which every command takes as --device FILE.

    Streams, launches, matrix products, attention over packed caches by format, writing, token policies, small models.
    """
    start = time.perf_counter()
    with pinned_threads(threads) as used:
        machine = this_machine(on)
        one = Calibration(machine, edition_name(machine, name), QUICK if quick else FULL, lambda text: None)
        file = out or Path(f"{one.name}.toml")
        check_place(file)
        with progress(one.steps(), "calibrating") as tell:
            one.tell = tell
            text = one.run()
    profile = write(text, file)
    click.echo(f"{file}: {profile.name}, {used} threads, {profile.bandwidth_bytes_per_s / 1e9:.1f} GB/s, "
               f"{len(profile.coefficients)} coefficients, in {time.perf_counter() - start:.0f} s")
    busy = 1.0 - one.clean()
    if busy > 0.3:
        click.echo(f"note: {100 * busy:.0f}% of the repeats were disturbed by other work on this machine; "
                   "calibrate again when it is quiet", err=True)


class _Callable(ModuleType):
    """`from runtime import calibrate` gives this module: calling it calibrates a method on a model, from texts."""

    def __call__(self, model: Any, texts: Sequence[Any], method: Any, *, tokenizer: Any = None, length: int = 512,
                 rows: int = 4096, seed: int = 0) -> Any:
        from runtime.calibration import calibrate

        return calibrate(model, texts, method, tokenizer=tokenizer, length=length, rows=rows, seed=seed)


sys.modules[__name__].__class__ = _Callable
