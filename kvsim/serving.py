"""What a serving engine makes of a predicted method: its flags, its bytes, its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.record import Case, Record

if TYPE_CHECKING:
    from kvsim.engines.parallel import ParallelLayout

GIB = 2**30


@dataclass(frozen=True)
class Served:
    """The flags for a method and a workload, the engine's own bytes on the fullest device, and why it cannot."""

    flags: str | None = None
    bytes: int | None = None
    refusal: str = ""
    short_by_bytes: int = 0


def check_layout(engine: str, layout: ParallelLayout | None) -> None:
    """Raise KvsimError for ranks whose share of a server's cache is not modelled."""
    for name in ("expert", "attention_data"):
        if layout is not None and getattr(layout, name) > 1:
            raise KvsimError(f"the flags and bytes of {engine} with {name} ranks are not modelled:"
                             " leave out engine, or use tensor and pipeline ranks")  # fmt: skip


def refusal(engine: str, method: Method, case: Case) -> str:
    """Why the engine cannot run the method at all; "" where it can or none is asked for."""
    return _flags(engine, method, case, None)[1] if engine else ""


def serve(engine: str, record: Record) -> Served:
    """Flags and bytes of a record's method in the engine: blocks, padding, windows and replicated heads as it has them.

    A refusal says the engine's reason, or how far its own allocation goes beyond the device.
    """
    if not engine:
        return Served()
    from kvsim.engines import held_bytes, memory_share
    from kvsim.engines.pool import usable_bytes

    case = record.case
    try:
        held = held_bytes(
            engine, case.method, case.model, tokens=max(1, int(case.workload.tokens)),
            sequences=max(1, int(case.workload.batch)), tensor_parallel_size=case.parallel.tensor,
            pipeline_parallel_size=case.parallel.pipeline,
        )  # fmt: skip
    except KvsimError as reason:
        return Served(refusal=str(reason))
    counted = int(record.cache_bytes + record.state_bytes)
    peak = int(record.peak_bytes) + held - counted
    short = peak + record.reserve_bytes - case.hardware.capacity_bytes
    share = memory_share(engine, weights=record.weights_bytes, cache=held, peak=peak,
                         capacity=usable_bytes(case.hardware))  # fmt: skip
    flags, problem = _flags(engine, case.method, case, share)
    if not problem and short > 0 and record.fits:
        more = (held - counted) / GIB
        problem = f"{engine} allocates {held / GIB:.2f} GiB for it, {more:.2f} more than the rows need"
    return Served(flags, held, problem, max(0, int(short)))


def _flags(engine: str, method: Method, case: Case, share: float | None) -> tuple[str | None, str]:
    """(flags with which the engine runs the method for this workload, its reason where it cannot)."""
    from kvsim.engines import flags

    work = case.workload
    try:
        return flags(
            engine, method, max_model_len=max(1, int(work.tokens)), max_num_seqs=max(1, int(work.batch)),
            gpu_memory_utilization=share, tensor_parallel_size=case.parallel.tensor,
            pipeline_parallel_size=case.parallel.pipeline,
        ), ""  # fmt: skip
    except KvsimError as reason:
        return None, str(reason)
