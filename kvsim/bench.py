"""`python -m kvsim.bench`, which is `make bench`: how long kvsim itself takes here, with medians and spread."""

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
start = time.perf_counter()
found = kvsim.sweep(model, device, ["int(bits=4)"], prompt, batch)
took = time.perf_counter() - start
print(len(found) / took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
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


def cold(command: tuple[str, ...]) -> list[float]:
    """Seconds of a fresh process, each repeat; the interpreter's own start is in them."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return times


def warm_fit() -> list[float]:
    """Seconds of a fit in a process that has made one before."""
    import kvsim

    model, device = kvsim.load_model("llama-3.1-8b"), kvsim.load_device("rtx-4090")
    work = kvsim.Workload(1, 131072)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        kvsim.fit(model, device, work)
        times.append(time.perf_counter() - start)
    return times


def sweeps() -> tuple[list[float], float]:
    """(points a second, each repeat in its own process; the most memory that one held)."""
    rates, most = [], 0.0
    for _ in range(3):
        code = SWEEP.format(*POINTS)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        rate, held = map(float, done.stdout.split())
        rates.append(rate)
        most = max(most, held)
    return rates, most


def row(label: str, values: list[float], show: Callable[[float], str]) -> tuple[str, str, str, str]:
    """Label, median, lowest and highest."""
    return label, show(median(values)), f"{show(min(values))} - {show(max(values))}", str(len(values))


def main() -> None:
    """Measure and print."""
    from kvsim.report import Column, console, say, size, table

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms"

    bare = cold((sys.executable, "-c", "pass"))
    rates, held = sweeps()
    rows = [
        row("python -c pass", bare, ms),
        row("import kvsim, less that", [t - median(bare) for t in cold(IMPORT)], ms),
        row("kvsim --help", cold((*PROGRAM, "--help")), ms),
        row("kvsim fit, cold", cold((*PROGRAM, *FIT)), ms),
        row("kvsim.fit, warm", warm_fit(), ms),
        row("sweep, int(bits=4), 32 layers", rates, lambda r: f"{r / 1e6:.2f} M points/s"),
    ]
    out = console()
    say(out, machine())
    table(
        out,
        (Column("what"), Column("median", right=True), Column("spread", right=True), Column("runs", right=True)),
        rows,
    )
    out.print()
    parent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(out, f"a sweep of {POINTS[0] * POINTS[1]:,} points held {size(held)} at most; this process {size(parent)}")


if __name__ == "__main__":
    main()
