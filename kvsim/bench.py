"""`python -m kvsim.bench`, which is `make bench`: how long kvsim itself takes here, with medians and spread.

Processor time is what the work takes; the time waited is longer where others use the machine too.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

REPEATS = 7
POINTS = (1024, 1024)
"""Batches and prompts of the sweep: 1,048,576 points."""

FIT = ("fit", "--model", "llama-3.1-8b", "--device", "rtx-4090", "--prompt", "128k")
PROGRAM = (sys.executable, "-m", "kvsim")
IMPORT = (sys.executable, "-c", "import kvsim")
SWEEP = """
import resource, time
import numpy as np
import kvsim
model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
batch, prompt = np.arange(1, {0} + 1), np.arange(1, {1} + 1) * 64
kvsim.sweep(model, device, ["int(bits=4)"], prompt[:8], batch[:8])
start, began = time.perf_counter(), time.process_time()
found = kvsim.sweep(model, device, ["int(bits=4)"], prompt, batch)
took, worked = time.perf_counter() - start, time.process_time() - began
print(len(found) / worked, len(found) / took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def machine() -> str:
    """Processor, cores, load and Python: what the figures are worth."""
    found = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        names = [
            x.partition(":")[2].strip() for x in facts.read_text("utf-8").splitlines() if x.startswith("model name")
        ]
        found = names[0] if names else found
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{found}, {os.cpu_count()} cores{load}, Python {platform.python_version()}"


Times = list[tuple[float, float]]
"""(seconds of the processor, seconds waited), each repeat."""


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cold(command: tuple[str, ...]) -> Times:
    """A fresh process, each repeat; the interpreter's own start is in the times."""
    times = []
    for _ in range(REPEATS):
        start, began = time.perf_counter(), _children()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append((_children() - began, time.perf_counter() - start))
    return times


def warm_fit() -> Times:
    """A fit in a process that has made one before."""
    import kvsim

    model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
    work = kvsim.Workload(1, 131072)
    times = []
    for _ in range(REPEATS):
        start, began = time.perf_counter(), time.process_time()
        kvsim.fit(model, device, work)
        times.append((time.process_time() - began, time.perf_counter() - start))
    return times


def sweeps() -> tuple[Times, float]:
    """(points a second, each repeat in its own process; the most memory that one held)."""
    rates, most = [], 0.0
    for _ in range(3):
        code = SWEEP.format(*POINTS)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        rate, waited, held = map(float, done.stdout.split())
        rates.append((rate, waited))
        most = max(most, held)
    return rates, most


def row(label: str, values: Times, show: Callable[[float], str]) -> tuple[str, str, str, str, str]:
    """Label, median, lowest and highest by processor time, median by the clock."""
    used, waited = zip(*values, strict=True)
    return label, show(median(used)), f"{show(min(used))} - {show(max(used))}", show(median(waited)), str(len(values))


def main() -> None:
    """Measure and print."""
    from kvsim.report import Column, console, say, size, table

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms"

    bare = cold((sys.executable, "-c", "pass"))
    start = median(u for u, _ in bare), median(w for _, w in bare)
    rates, held = sweeps()
    rows = [
        row("python -c pass", bare, ms),
        row("import kvsim, less that", [(u - start[0], w - start[1]) for u, w in cold(IMPORT)], ms),
        row("kvsim --help", cold((*PROGRAM, "--help")), ms),
        row("kvsim fit, cold", cold((*PROGRAM, *FIT)), ms),
        row("kvsim.fit, warm", warm_fit(), ms),
        row("sweep, int(bits=4), 32 layers", rates, lambda r: f"{r / 1e6:.2f} M points/s"),
    ]
    out = console()
    say(out, machine())
    heads = ("processor, median", "spread", "by the clock", "runs")
    table(out, (Column("what"), *(Column(head, right=True) for head in heads)), rows)
    out.print()
    parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(out, f"a sweep of {POINTS[0] * POINTS[1]:,} points held {size(held)} at most; this process {size(parent)}")


if __name__ == "__main__":
    main()
