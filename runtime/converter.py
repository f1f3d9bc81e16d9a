"""`python -m runtime.converter`: the CPU kernel with a slower converter, its time beside what a what-if predicts.

The kernels' own sources are compiled once more with every shift that unpacks codes followed by pairs of rotations that
undo each other: the same results, a converter that is slower by a known number of instructions. Its rate is measured on
rows that stay in the core's cache; from that rate alone, and the bandwidth measured in the same run, the time over rows
in memory is predicted and then measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import click
import torch

from kvsim.cli_options import Counts
from kvsim.codesign import attention_at
from kvsim.coefficients import Coefficient
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile, load_device
from kvsim.method import parse_method
from kvsim.whatif import VALUE_BYTES
from runtime import kernels
from runtime.attention import Rule
from runtime.kernels import load
from runtime.parts import Prompt
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.shipped import run_alone
from runtime.store import Store

HEADS, QUERIES, WIDTH = 4, 4, 128
HOT, COLD = (512, 1024), 131_072
"""Rows that stay in a core's second-level cache, and rows of which every read comes from memory."""
STREAM_BYTES = 2**28
HEADER = """
#include <immintrin.h>
static inline __attribute__((always_inline)) __m512i kvsim_turned(__m512i x) {
  for (int i = 0; i < KVSIM_PAIRS; i++) asm volatile("vprold $16, %0, %0\\n\\tvprold $16, %0, %0" : "+v"(x));
  return x;
}
#define _mm512_srli_epi32(x, n) kvsim_turned(_mm512_srli_epi32(x, n))
"""


@cache
def slower(pairs: int) -> load.Library:
    """The kernels with so many pairs of rotations at each unpacking shift; 0: as they are.

    Raises KvsimError where there are no kernels that unpack by integer shifts of 512 bits.
    """
    plain = load.library()
    if isinstance(plain, str) or not plain.dots:
        raise KvsimError("the converter is slowed in the AVX-512 kernels with integer products, which do not run here")
    if not pairs:
        return plain
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    name = f"kvsim_slower{pairs}_{load._fingerprint(compiler)}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    path = root / f"{name}.so"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder, contextlib.redirect_stdout(io.StringIO()):
            header = Path(folder) / "slower.h"
            header.write_text(HEADER)
            with load._searching():
                cpp_extension.load(
                    name,
                    [str(load.SOURCES / source) for source in ("attend.cpp", "encode.cpp")],
                    extra_cflags=["-O3", "-fopenmp", *load.machine_flags(), f"-DKVSIM_PAIRS={pairs}", "-include",
                                  str(header)],
                    extra_ldflags=["-fopenmp"],
                    build_directory=folder,
                    is_python_module=False,
                )  # fmt: skip
            os.replace(Path(folder) / path.name, path)
    return load.Library(path)


@contextlib.contextmanager
def converting(pairs: int) -> Iterator[None]:
    """Attention runs on the slowed kernels inside."""
    before, found = vars(kernels)["library"], slower(pairs)
    vars(kernels)["library"] = lambda: found
    try:
        yield
    finally:
        vars(kernels)["library"] = before


def step(method: str, rows: int) -> Callable[[], torch.Tensor]:
    """One step's attention over `rows` random rows under a method, ready to be called."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn((1, HEADS, rows, WIDTH), generator=generator) for _ in "kv")
    kind = torch.bfloat16 if method == "full" else torch.float32
    q = torch.randn((1, HEADS * QUERIES, 1, WIDTH), generator=generator).to(kind)
    store = Store(LayerTwins(parse_method(method), Geometry(HEADS * QUERIES, HEADS, WIDTH, WIDTH), Surroundings(kind)))
    store.take_prompt(Prompt(k.to(kind), v.to(kind), WIDTH**-0.5), torch.arange(rows)[None])
    rule = Rule(WIDTH**-0.5)

    def call() -> torch.Tensor:
        found = kernels.decode(store, q, rule)
        if found is None:
            raise KvsimError(f"{method}: {kernels.path(store)}")
        return found

    return call


def values(rows: int) -> float:
    """Stored values that a step takes in."""
    return 2.0 * HEADS * rows * WIDTH


def timed(calls: dict[str, tuple[int, Callable[[], torch.Tensor]]], rounds: int, loops: int = 1) -> dict[str, float]:
    """Median seconds of each call (with its pairs), all alternating."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (pairs, call) in calls.items():
            with converting(pairs):
                start = time.perf_counter()
                for _ in range(loops):
                    call()
                if turn:
                    seconds[name].append((time.perf_counter() - start) / loops)
    return {name: statistics.median(s) for name, s in seconds.items()}


@dataclass(frozen=True)
class Turned:
    """One converter: its rate on cached rows (values a second), the predicted and measured seconds from memory."""

    pairs: int
    rate: float
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Checked:
    """A run: read bandwidth, full precision's time, each converter, and where int4 breaks even with full precision."""

    bandwidth: float
    full_s: float
    full_predicted_s: float
    converters: tuple[Turned, ...]
    even_predicted: float
    even_measured: float | None

    @property
    def error(self) -> float:
        """Median of |predicted / measured - 1| over the slowed converters."""
        return statistics.median(abs(t.predicted_s / t.measured_s - 1) for t in self.converters if t.pairs)


def machine(bandwidth: float, launch: float) -> HardwareProfile:
    """This machine as one core of a what-if device: the bandwidth measured here, no conversion limit of its own."""
    base = load_device("epyc-9654")
    plain = Coefficient("decode", "kvsim/fused", "bf16", launch, bandwidth_share=1.0, flops_share=1.3)
    rows = (plain, replace(plain, format="int4", element_rates=((WIDTH, 1e5),)))
    return replace(base, bandwidth_bytes_per_s=bandwidth, units=1, last_level_cache_bytes=0,
                   own_coefficients=rows)  # fmt: skip


def checked(pairs: tuple[int, ...], cold: int = COLD, rounds: int = 9) -> Checked:
    """Measure the converters on cached rows, predict them from memory, measure that too."""
    torch.set_num_threads(1)
    hot = {(n, p): (p, step("int(bits=4)", n)) for n in HOT for p in pairs}
    at = timed({f"{n} {p}": c for (n, p), c in hot.items()}, 2 * rounds, loops=20)
    rates = {p: (values(HOT[1]) - values(HOT[0])) / (at[f"{HOT[1]} {p}"] - at[f"{HOT[0]} {p}"]) for p in pairs}
    launch = max(0.0, at[f"{HOT[0]} {pairs[0]}"] - values(HOT[0]) / rates[pairs[0]])
    stream, four = torch.ones(STREAM_BYTES // 4), step("int(bits=4)", cold)
    calls: dict[str, tuple[int, Callable[[], torch.Tensor]]]
    calls = {"read": (0, stream.sum), "full": (0, step("full", cold)), **{str(p): (p, four) for p in pairs}}
    found = timed(calls, rounds)
    bandwidth = STREAM_BYTES / found["read"]
    device = machine(bandwidth, launch)

    def predicted(form: str, rate: float | None) -> float:
        return attention_at(device, form, rate, batch=1, tokens=cold, n_heads=HEADS * QUERIES, n_kv_heads=HEADS,
                            head_dim=WIDTH)  # fmt: skip

    turned = tuple(Turned(p, rates[p], predicted("int4", rates[p]), found[str(p)]) for p in pairs)
    full = predicted("bf16", None)
    even = values(cold) / (found["full"] - launch)
    return Checked(bandwidth, found["full"], full, turned, even, _crossing(turned, found["full"]))


def _crossing(turned: tuple[Turned, ...], full: float) -> float | None:
    """The rate at which the measured times cross `full`, between two converters; None where they do not."""
    for fast, slow in pairwise(turned):
        if fast.measured_s <= full <= slow.measured_s:
            share = (full - fast.measured_s) / (slow.measured_s - fast.measured_s)
            return 1.0 / (1.0 / fast.rate + share * (1.0 / slow.rate - 1.0 / fast.rate))
    return None


@click.command()
@click.option("--pairs", type=Counts(), default="0,2,6,16", help="Pairs of rotations at each shift.")
@click.option("--rows", type=click.IntRange(1), default=COLD, help="Rows in memory.")
@click.option("--rounds", type=click.IntRange(1), default=9, help="Repetitions, all alternating.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(pairs: tuple[int, ...], rows: int, rounds: int, as_json: bool) -> None:
    """Check a what-if's predictions against kernels whose converter is slower."""
    with torch.inference_mode():
        found = checked(pairs, rows, rounds)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"error": found.error}))
        return
    click.echo(f"{rows:,} rows, one thread, reading {found.bandwidth / 1e9:.1f} GB/s; full precision (bf16) "
               f"{found.full_s * 1e3:.2f} ms, predicted {found.full_predicted_s * 1e3:.2f}")  # fmt: skip
    for t in found.converters:
        click.echo(f"int4, {t.pairs:2d} pairs: {t.rate / 1e9:6.2f} G values/s ({t.rate * VALUE_BYTES / 1e9:.1f} GB/s "
                   f"out)  predicted {t.predicted_s * 1e3:6.2f} ms  measured {t.measured_s * 1e3:6.2f} ms")  # fmt: skip
    measured = "-" if found.even_measured is None else f"{found.even_measured / 1e9:.2f}"
    click.echo(f"break-even with bf16: predicted {found.even_predicted / 1e9:.2f}, measured {measured} G values/s; "
               f"median error {found.error:.0%}")  # fmt: skip


if __name__ == "__main__":
    run_alone(main)
