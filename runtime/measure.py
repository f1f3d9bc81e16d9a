"""`kvsim measure`: the twin of predict: a case really run on this machine, its record of the same type."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from torch import nn

import kvsim
from kvsim.cli_options import Count, leave, print_json
from kvsim.errors import KvsimError, shown
from kvsim.hardware import HardwareProfile
from kvsim.method import parse_method
from kvsim.model import ModelSpec
from kvsim.record import Case, Line, Record, Timing
from kvsim.workload import Workload
from runtime.cache import spec_of
from runtime.device import check_here, this_machine
from runtime.microbench import HF_DTYPES as DTYPES
from runtime.running_model import Ran, run
from runtime.timing import Timed, pinned_threads

NO_PROMPT = "measure needs a prompt of at least one token"


def measure(case: Case, hf_model: nn.Module, *, steps: int = 12, repeats: int = 3, calibration: Any = None) -> Record:
    """Run a case on a model and give its record, `source="measured"`: lines have the names of predicted ones.

    Args:
        case: its hardware must be this machine, its model that of `hf_model`, its sizes plain numbers.
        steps: decode steps to time at least. repeats: prompts. calibration: for methods that need one.

    A line's low and high are the 5 and 95% quantiles of repeats. Figures that measuring does not give (the largest
    context and batch) are None. Raises KvsimError where the case is not what runs here.
    """
    work, parameter = case.workload, next(hf_model.parameters())
    if work.shape:
        raise KvsimError("measure runs one case: give numbers, not arrays")
    if case.devices != 1:
        raise KvsimError(f"measure runs on one device, the case says {case.devices}")
    check_here(case.hardware, this_machine(parameter.device))
    _check_model(case.model, spec_of(hf_model))
    batch, prompt, new = int(work.batch), int(work.prompt_tokens), int(work.new_tokens)
    if prompt < 1:
        raise KvsimError(NO_PROMPT)
    ran = run(hf_model, case.method, batch=batch, prompt=prompt, new=new, steps=steps, repeats=repeats,
              calibration=calibration)
    return _record(case, hf_model, ran)


def _check_model(asked: ModelSpec, here: ModelSpec) -> None:
    for name in ("n_layers", "hidden_size"):
        if getattr(asked, name) != getattr(here, name):
            raise KvsimError(f"the case's model {asked.name} has {name} {getattr(asked, name)}, the running one "
                             f"{getattr(here, name)}")
    if asked.cache_bytes(64, 1, 16) != here.cache_bytes(64, 1, 16):
        raise KvsimError(f"the case's model {asked.name} caches other rows than the running one")


def _record(case: Case, hf_model: nn.Module, ran: Ran) -> Record:
    predicted = kvsim.predict(case)
    weights = sum({p.data_ptr(): p.nbytes for p in hf_model.parameters()}.values())
    warnings = [*case.model.warnings]
    held = ran.extra_bytes
    if held is None:
        held = ran.allocated_bytes
        warnings.append("this system does not tell the highest memory use: the peak is weights and cache alone")
    if not (ran.decode.quiet and ran.prefill.quiet):
        warnings.append(f"the machine is busy: repeats of a step spread by {ran.decode.spread:.2f} (upper over lower "
                        "quartile), so these times are unreliable")
    limits, buffers, total = (None, None), ran.buffers, ran.generation_seconds
    return Record(
        case=case, source="measured", cache_bytes=ran.cache_bytes, allocated_bytes=ran.allocated_bytes,
        state_bytes=0, cross_bytes=0, full_bytes=predicted.full_bytes, weights_bytes=weights,
        total_bytes=weights + ran.cache_bytes, peak_bytes=weights + held,
        memory=(("weights", weights), ("cache", ran.cache_bytes), ("beside the weights at the peak", held)),
        prefill=_timing("prefill", ran.prefill, ran.prefill_lines, predicted.prefill),
        decode=_timing("decode", ran.decode, ran.decode_lines, predicted.decode),
        buffers_of=lambda: buffers, limits_of=lambda: limits, generation_of=lambda: total, reserve_bytes=0,
        warnings=tuple(warnings),
    )


def _timing(phase: Any, whole: Timed, lines: dict[str, Timed], predicted: Timing) -> Timing:
    """Measured lines with the predicted ones' bytes and flops; the whole is measured by itself, not summed."""
    known = {line.name: line for line in predicted.lines}
    found = []
    for name, took in lines.items():
        twin = known.get(name)
        moved, flops = (twin.bytes, twin.flops) if twin else (0.0, 0.0)
        found.append(Line(phase, name, moved, flops, took.seconds, took.low, took.high, lambda: "measured"))
    return Timing(tuple(found), whole.seconds, whole.low, whole.high)


# -- the command -------------------------------------------------------------------------------------------------


def load_running(model: str, random: bool, dtype: str, layers: int | None, on: str) -> nn.Module:
    """A model that runs: a folder or a packaged one with its weights, or any known architecture with random ones."""
    from runtime.quality_subjects import PACKAGES, load_subject
    from runtime.random_model import config_of, random_model

    if random or layers is not None:
        return random_model(config_of(model), DTYPES[dtype], layers).to(on)
    if model in PACKAGES or Path(model).is_dir():
        found: nn.Module = load_subject(model).model
        return found.to(getattr(torch, DTYPES[dtype])).to(on).eval()
    raise KvsimError(f"model {shown(model)} has no weights here; give a folder with weights, one of "
                     f"{', '.join(PACKAGES)}, or --random-weights for times alone")


def here(on: str = "cpu") -> HardwareProfile:
    """A profile of this machine from a second of measuring: for what is asked without one."""
    from runtime.calibrate import draft

    return draft(this_machine(on))


def profile_here(device: str | None, on: str = "cpu") -> HardwareProfile:
    """The profile that is given; else the newest of this machine and of torch's present threads that lies in kvsim's
    cache folder (`kvsim calibrate --out ~/.cache/kvsim/NAME.toml`); else one from a second of measuring."""
    from runtime.quality_subjects import cache_home

    if device:
        profile = kvsim.load_device(device)
        check_here(profile, this_machine(on))  # what is measured here is told beside it
        return profile
    machine, found = this_machine(on), []
    for file in cache_home().glob("*.toml"):
        try:
            profile = kvsim.load_device(str(file))
            check_here(profile, machine)
        except KvsimError:
            continue  # of another machine, or of another release
        if machine.kind != "cpu" or profile.units == torch.get_num_threads():
            found.append((file.stat().st_mtime, str(file), profile))
    return max(found, key=lambda x: x[:2])[2] if found else here(on)


def named_spec(model: str, hf_model: nn.Module, dtype: str) -> ModelSpec:
    """The running model's numbers under the name that was asked for."""
    from dataclasses import replace

    return replace(spec_of(hf_model), name=Path(model).name, dtype=dtype)


@click.command("measure")
@click.option("--model", required=True, metavar="M", help="A folder with weights, smollm2-135m, or a shipped name.")
@click.option("--method", required=True, metavar="S", help="A method, as `kvsim methods` writes them.")
@click.option("--prompt", type=Count(), required=True, metavar="T", help="Tokens of each prompt.")
@click.option("--new", type=Count(), default=0, metavar="K", help="Tokens generated after it.  [0]")
@click.option("--batch", type=Count(), default=1, metavar="B", help="Sequences served together.  [1]")
@click.option("--device", metavar="FILE", help="A profile that `kvsim calibrate` wrote here.  [none: no prediction]")
@click.option("--on", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to run.  [cpu]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32", help="Of weights and full rows.  [fp32]")
@click.option("--random-weights", is_flag=True, help="Build the architecture without its weights: times are the same.")
@click.option("--layers", type=click.IntRange(1), metavar="N", help="Only so many layers, with random weights.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of torch.  [as torch has them]")
@click.option("--steps", type=click.IntRange(2, 1000), default=12, help="Decode steps to time at least.  [12]")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, help="Prompts to time.  [3]")
@click.option("--calibration", type=click.Path(exists=True), help="For methods that need one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(model: str, method: str, prompt: int, new: int, batch: int, device: str | None, on: str, dtype: str,
            random_weights: bool, layers: int | None, threads: int | None, steps: int, repeats: int,
            calibration: str | None, as_json: bool) -> None:
    """Run a method on a model here and measure it: exact bytes, times line by line, the peak."""
    parsed = parse_method(method)
    if prompt < 1:
        raise KvsimError(NO_PROMPT)  # before a model is made for it
    with pinned_threads(threads):
        profile = kvsim.load_device(device) if device else here(on)
        hf_model = load_running(model, random_weights, dtype, layers, on)
        case = Case(named_spec(model, hf_model, dtype), profile, parsed, Workload(batch, prompt, new))
        record = measure(case, hf_model, steps=steps, repeats=repeats, calibration=calibration)
    if as_json:
        print_json(record.to_json())
    else:
        print_measured(record, kvsim.predict(case) if device else None)
    leave(0)


def print_measured(record: Record, predicted: Record | None) -> None:
    """Lines of both phases, predicted beside measured where there is a prediction."""
    from rich.console import Console

    from kvsim.report import Column, duration, say, size, table

    out = Console()
    case = record.case
    say(out, f"{case.model.name} on {case.hardware.name}: {case.method}, {case.workload.batch} x "
             f"{case.workload.prompt_tokens} + {case.workload.new_tokens} tokens")
    rows: list[tuple[str, ...]] = []
    for phase in ("prefill", "decode"):
        timing: Timing = getattr(record, phase)
        twins = {line.name: line for line in getattr(predicted, phase).lines} if predicted else {}
        whole = getattr(predicted, phase) if predicted else None
        entries = [(line.name, line, twins.get(line.name)) for line in timing.lines]
        for name, mine, twin in [*entries, ("whole", timing, whole)]:
            said = duration(twin.seconds) if twin is not None else ""
            off = f"{100 * (twin.seconds / mine.seconds - 1):+.0f}%" if twin is not None and mine.seconds else ""
            rows.append((phase, name, duration(mine.seconds), f"{duration(mine.low)}-{duration(mine.high)}", said, off))
    table(out, (Column("phase"), Column("line"), Column("measured", right=True), Column("5-95%", right=True),
                Column("predicted", right=True), Column("off", right=True)), rows)
    for name, value in record.memory:
        say(out, f"{name}: {size(value)}")
    for warning in record.warnings:
        say(out, f"note: {warning}", style="yellow")


class _Callable(ModuleType):
    """`from runtime import measure` gives this module: calling it is calling the function of the same name."""

    def __call__(self, case: Case, hf_model: nn.Module, *, steps: int = 12, repeats: int = 3,
                 calibration: Any = None) -> Record:
        return measure(case, hf_model, steps=steps, repeats=repeats, calibration=calibration)


sys.modules[__name__].__class__ = _Callable
