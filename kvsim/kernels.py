"""Names of number formats and kernels, and which coefficients of a device answer for a kernel it has or has not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvsim.coefficients import Coefficient
from kvsim.errors import KvsimError, did_you_mean, shown, word

if TYPE_CHECKING:
    from kvsim.hardware import HardwareProfile


@dataclass(frozen=True)
class Format:
    """Bits a stored value takes (scales included), how it becomes a float, and which arithmetic a product uses.

    quantizes: whether a matrix product turns its activations into this format first.
    """

    bits: float
    conversion: str = "none"
    unit: str = "bf16"
    quantizes: bool = False


FORMATS = {
    "fp32": Format(32, unit="fp32"),
    "bf16": Format(16),
    "fp16": Format(16),
    "fp8": Format(8, "cast", "fp8", quantizes=True),
    "fp8_block": Format(8, "cast", "fp8", quantizes=True),
    "int8": Format(8.125, "scale", "int8", quantizes=True),
    "int8_wo": Format(8, "scale"),
    "int4_wo": Format(4.25, "unpack"),
    "int4": Format(4.5, "unpack"),
    "int3": Format(3.5, "unpack"),
    "int2": Format(2.5, "unpack"),
    "nvfp4": Format(4.5, "unpack", "fp4", quantizes=True),
    "mxfp4": Format(4.25, "unpack"),
    "mxfp8": Format(8.25, "cast"),
    "q8_0": Format(8.5, "scale"),
    "q6_0": Format(6.5, "unpack"),
    "q5_1": Format(6, "unpack"),
    "q5_0": Format(5.5, "unpack"),
    "q4_1": Format(5, "unpack"),
    "q4_0": Format(4.5, "unpack"),
    "iq4_nl": Format(4.5, "lookup"),
    "nf4": Format(4.5, "lookup"),
}
MATMUL_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8_block", "int8", "nvfp4", "int8_wo", "int4_wo")
RATE_OF_CLASS = {
    "none": (1.0, 0.0), "cast": (1.0, 0.0), "scale": (1.0, 0.2), "unpack": (0.55, 0.5), "lookup": (0.4, 0.7),
}  # fmt: skip
"""Values taken in per clock as a multiple of the cast (fp8) rate, and the log widening where it was not measured.

The multiple of `unpack` is int4 with group scales over int8 with row scales of one fused kernel: 1.8 of 3.4 ms.
"""
SIBLING_WIDENING = {"none": 0.16, "cast": 0.26}
"""Log widening where a family's coefficients serve a device they were not measured on (median error +10%, fp8 +16%)."""
ENGINES = ("vllm", "sglang", "trtllm", "tensorrt", "torch", "kvsim")
KERNELS = (
    (r"trtllm_?decode", "trtllm_decode"),
    (r"trtllm_?prefill", "trtllm_prefill"),
    (r"trtllm_?(gen|mha)", "trtllm_mha"),
    (r"fi_?decode", "fi_decode"),
    (r"fi_?prefill", "fi_prefill"),
    (r"flashinfer", "flashinfer"),
    (r"fa_?3|attn_?3|attention_?3", "fa3"),
    (r"fa_?2|attn_?2|attention_?2|flash_?att", "fa2"),
    (r"eager", "eager"),
    (r"sdpa", "sdpa"),
    (r"fused|native", "fused"),
    (r"torch_flow|trtllm", "trtllm"),
)
"""How engines and tables spell the kernel families, the most specific first."""
PART = "part"
"""Kernel family under which a device lists parts of the project's own runtime by name."""
COUSINS = (("fa2", "fa3"), ("flashinfer", "fi_decode", "fi_prefill"), ("trtllm_mha", "trtllm_decode", "trtllm_prefill"))
"""Kernels of one code base, which answer for each other before anything else does."""


def known_format(name: str) -> Format:
    """The facts of a stored format; KvsimError with the nearest name otherwise."""
    if not isinstance(name, str) or name not in FORMATS:
        raise KvsimError(f"unknown format {shown(name)}{did_you_mean(str(name), FORMATS)}; one of {', '.join(FORMATS)}")
    return FORMATS[name]


def known_dtype(name: str) -> Format:
    """The facts of a matrix product's dtype; KvsimError with the nearest name otherwise."""
    if not isinstance(name, str) or name not in MATMUL_DTYPES:
        raise KvsimError(f"unknown matrix dtype {shown(name)}{did_you_mean(str(name), MATMUL_DTYPES)}; "
                         f"one of {', '.join(MATMUL_DTYPES)}")
    return FORMATS[name]


def unit_of(device: HardwareProfile, dtype: str) -> float:
    """Dense FLOP/s with which the device multiplies `dtype`: its own unit, or the one that stands in for it."""
    unit = FORMATS[dtype].unit
    if unit == "fp4" and unit not in device.peaks:
        unit = "bf16"
    return device.best_peak(unit)[0]


@lru_cache(maxsize=1024)
def kernel_family(name: str) -> tuple[str, str, str]:
    """(engine, version, kernel) of a name, "" for what it leaves out: vllm-0.24.0/..._fa3 gives (vllm, 0.24, fa3)."""
    text = name.lower().strip()[:200]
    engine = next((e for e in ENGINES if text.startswith(e)), "")
    version = re.match(r"[a-z_]+-(\d+\.\d+)", text)
    only_engine = bool(engine) and re.fullmatch(r"[a-z]+(-[\d.a-z]*)?", text) is not None
    rest = "" if only_engine else text.rsplit("/", 1)[-1].replace("-", "_")
    kernel = next((kernel for pattern, kernel in KERNELS if re.search(pattern, rest)), "")
    if not kernel and not engine:
        kernel = rest
    return "trtllm" if engine == "tensorrt" else engine, version[1] if version else "", kernel


def _score(wanted: str, have: str) -> int:
    """How well the kernel `have` answers for `wanted`; 0: not at all."""
    engine, version, kernel = kernel_family(wanted)
    own_engine, own_version, own_kernel = kernel_family(have)
    if own_version and own_version != version:
        return 0
    same = bool(kernel) and kernel == own_kernel
    cousin = not same and any(kernel in group and own_kernel in group for group in COUSINS)
    score = 8 * same + 4 * (bool(engine) and engine == own_engine) + 2 * cousin
    return score + (1 if score and own_version else 0)


@dataclass(frozen=True)
class Choice:
    """The coefficients that answer a question, and how far they were stretched.

    rate_factor multiplies the conversion rate; widen adds to the interval in quadrature, in log terms; said: in words.
    """

    coefficient: Coefficient
    rate_factor: float
    widen: float
    said: str


def chosen(device: HardwareProfile, op: str, kernel: str | None, format: str, conversion: str | None = None) -> Choice:
    """The coefficients for (op, kernel, format) on a device, or the nearest ones.

    Raises KvsimError: no coefficients for the op at all; a format that is unknown and has no (known) conversion.
    """
    if kernel is not None:
        word(kernel, "kernel")
    return _chosen(device, op, kernel, format, conversion)


@lru_cache(maxsize=4096)
def _chosen(device: HardwareProfile, op: str, kernel: str | None, format: str, conversion: str | None) -> Choice:
    if conversion is None:
        conversion = known_format(format).conversion
    elif conversion not in RATE_OF_CLASS:
        raise KvsimError(f"unknown conversion {shown(conversion)}; one of {', '.join(RATE_OF_CLASS)}")
    rows = _rows(device, op)
    if not rows:
        raise KvsimError(f"no {shown(op)} coefficients for device {device.name} (family {device.family}): a profile "
                         "with coefficients of its own gives every op's, one with none takes its family's")
    notes = []
    # parts of the project's own runtime answer to their names alone, never for work without one
    family = next((c.kernel for c in rows if kernel_family(c.kernel)[2] != PART), rows[0].kernel)
    if kernel is not None:
        best = max(rows, key=lambda c: _score(kernel, c.kernel))
        if _score(kernel, best.kernel):
            family = best.kernel
        elif op != "engine" and any(c.kernel != "*" for c in rows):
            notes.append(f"kernel {shown(kernel)} unknown for {device.family}, its default is used")
    row, factor, widen = _row_of(rows, family, format, conversion)
    if row.format not in (format, "*") and (conversion != "none" or format == "fp32"):
        notes.append(f"{format} by analogy with {row.format}")
    if row.borrowed:
        notes.append(f"borrowed from {row.borrowed}")
    elif row.devices and device.name not in row.devices:
        notes.append(f"measured on {', '.join(row.devices)}")
        widen = (widen**2 + SIBLING_WIDENING.get(conversion, 0.26) ** 2) ** 0.5
    words = f"{device.family} {op} {row.kernel} {row.format}" + (f" ({', '.join(notes)})" if notes else "")
    return Choice(row, factor, widen, words)


@lru_cache(maxsize=512)
def _rows(device: HardwareProfile, op: str) -> tuple[Coefficient, ...]:
    return tuple(c for c in device.coefficients if c.op == op)


def engine_choice(device: HardwareProfile, engine: str | None) -> Choice | None:
    """The coefficients of a serving engine on a device, or of all engines; None where the device knows of none."""
    return chosen(device, "engine", engine, "bf16") if _rows(device, "engine") else None


def tidy(said: Iterable[str]) -> str:
    """Coefficients of many lines in one: each once, those of one family with the same note together.

    `ada decode vllm/fa2 bf16, matmul * bf16 (borrowed from blackwell-gddr); ...`
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for one in dict.fromkeys(part for text in said for part in text.split("; ") if part):
        words, _, note = one.partition(" (")
        family, _, row = words.partition(" ")
        groups.setdefault((family, note.removesuffix(")")), []).append(row)
    return "; ".join(f"{family} {', '.join(rows)}" + (f" ({note})" if note else "")
                     for (family, note), rows in groups.items())


NEAREST = {
    "none": ("bf16", "fp16"),
    "cast": ("fp8",),
    "scale": ("int8", "int8_wo", "fp8"),
    "unpack": ("int4", "int4_wo", "int8", "int8_wo", "fp8"),
    "lookup": ("int4", "int4_wo", "int8", "int8_wo", "fp8"),
}
"""Measured formats whose rate stands in for a conversion class, the nearest first."""


def _row_of(rows: Sequence[Coefficient], family: str, format: str, conversion: str) -> tuple[Coefficient, float, float]:
    """The row of a kernel for a format, or of the nearest format, with rate factor and widening.

    A kernel that knows any converted format answers by analogy with it; for one that knows none, others answer.
    """
    mine = [c for c in rows if c.kernel == family]
    others = sorted((c for c in rows if c.kernel != family), key=lambda c: -_score(family, c.kernel))
    converts = any(c.format in FORMATS and FORMATS[c.format].conversion != "none" for c in mine)
    pools = [mine] if converts or conversion == "none" else [mine, others]
    for pool in pools:
        exact = next((c for c in pool if c.format in (format, "*")), None)
        if exact is not None:
            return exact, 1.0, 0.0
    if format == "fp32":
        return next((c for c in mine if c.format == "bf16"), mine[0]), 0.5, 0.3
    factor, widen = RATE_OF_CLASS[conversion]
    for pool in (mine, others):
        for near in NEAREST[conversion]:
            found = next((c for c in pool if c.format == near), None)
            if found is not None:
                return found, factor / RATE_OF_CLASS[FORMATS[near].conversion][0], widen
    return mine[0], factor, (widen**2 + 0.3**2) ** 0.5
