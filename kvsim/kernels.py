"""Names of number formats and kernels, and which coefficients of a device answer for a kernel it has or has not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from kvsim.coefficients import Coefficient, family_coefficients
from kvsim.errors import KvsimError, did_you_mean, shown

if TYPE_CHECKING:
    from kvsim.hardware import HardwareProfile


@dataclass(frozen=True)
class Format:
    """Bits a stored value takes (scales included), how it becomes a float, and whose arithmetic it may use."""

    bits: float
    conversion: str
    arithmetic: tuple[str, ...] = ("bf16", "fp16", "fp32")


FORMATS = {
    "fp32": Format(32, "none", ("fp32",)),
    "bf16": Format(16, "none"),
    "fp16": Format(16, "none"),
    "fp8": Format(8, "cast"),
    "fp8_block": Format(8, "cast", ("fp8", "bf16", "fp16", "fp32")),
    "int8": Format(8.125, "scale"),
    "int8_wo": Format(8, "scale"),
    "int4_wo": Format(4, "unpack"),
    "int4": Format(4.5, "unpack"),
    "int3": Format(3.5, "unpack"),
    "int2": Format(2.5, "unpack"),
    "nvfp4": Format(4.5, "unpack", ("fp4", "fp8", "bf16", "fp16", "fp32")),
    "mxfp4": Format(4.25, "unpack", ("fp4", "fp8", "bf16", "fp16", "fp32")),
    "mxfp8": Format(8.25, "cast"),
    "q8_0": Format(8.5, "scale"),
    "q6_0": Format(6.5, "unpack"),
    "q5_1": Format(6, "unpack"),
    "q5_0": Format(5.5, "unpack"),
    "q4_1": Format(5, "unpack"),
    "q4_0": Format(4.5, "unpack"),
    "iq4_nl": Format(4.5, "lookup"),
    "nf4": Format(4.5, "lookup"),
    "none": Format(16, "none"),
    "cast": Format(8, "cast"),
    "scale": Format(8, "scale"),
    "unpack": Format(4, "unpack"),
    "lookup": Format(4, "lookup"),
}
MATMUL_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8_block", "nvfp4", "int8_wo", "int4_wo")
CONVERSION = {"none": (1.0, 0.0), "cast": (1.0, 0.0), "scale": (1.0, 0.1), "unpack": (0.7, 0.3), "lookup": (0.5, 0.5)}
"""Element rate of a conversion class as a multiple of the fp8 one, and what the interval gains in log terms."""


def known_format(name: str) -> Format:
    """The facts of a stored format; KvsimError with the nearest name otherwise."""
    if name not in FORMATS:
        raise KvsimError(f"unknown format {shown(name)}{did_you_mean(str(name), FORMATS)}; one of {', '.join(FORMATS)}")
    return FORMATS[name]


def known_dtype(name: str) -> Format:
    """The facts of a matrix product's dtype; KvsimError with the nearest name otherwise."""
    if name not in MATMUL_DTYPES:
        raise KvsimError(f"unknown matrix dtype {shown(name)}{did_you_mean(str(name), MATMUL_DTYPES)}; "
                         f"one of {', '.join(MATMUL_DTYPES)}")
    return FORMATS[name]


@lru_cache(maxsize=1024)
def kernel_family(name: str) -> str:
    """`engine/kernel` of a name as engines and tables spell it: vllm-0.24.0/vllm_flash_attn_fa3 -> vllm/fa3."""
    text = name.lower().replace("-", "_")
    engine = next((e for e in ("vllm", "sglang", "trtllm", "tensorrt") if text.startswith(e)), "")
    engine = "trtllm" if engine == "tensorrt" else engine
    rest = text.split("/", 1)[1] if "/" in text else "" if engine and "mha" not in text else text
    for pattern, kernel in ((r"trtllm_?(decode|prefill|mha)", "trtllm_mha"), (r"fa_?3|attention_?3", "fa3"),
                            (r"fa_?2|attention_?2", "fa2"), (r"flashinfer|fidecode|fiprefill", "flashinfer"),
                            (r"torch_flow|^trtllm", "trtllm"), (r"flash_?att", "fa2"), (r"eager", "eager"),
                            (r"sdpa", "sdpa"), (r"fused", "fused"), (r"mla", "mla")):
        if re.search(pattern, rest):
            return f"{engine or '*'}/{kernel}"
    return f"{engine or '*'}/{'*' if engine else rest}"


def _score(wanted: str, have: str) -> int:
    (engine, kernel), (own_engine, own_kernel) = wanted.split("/", 1), have.split("/", 1)
    same_kernel = kernel == own_kernel
    cousin = kernel[:2] == own_kernel[:2] == "fa" and kernel != "*"
    return 4 * same_kernel + 2 * (engine == own_engine) + (cousin and not same_kernel)


def chosen(device: HardwareProfile, op: str, kernel: str | None, format: str) -> tuple[Coefficient, float, float, str]:
    """The coefficients for (op, kernel, format): the row, a factor on its element rate, log widening, and words."""
    rows = tuple(c for c in (*device.coefficients, *family_coefficients(device.family)) if c.op == op)
    if not rows:
        raise KvsimError(f"no {op} coefficients for device {device.name} (family {device.family})")
    said = ""
    family = rows[0].kernel
    if kernel is not None:
        wanted = kernel_family(kernel)
        best = max(rows, key=lambda c: _score(wanted, c.kernel) if "/" in c.kernel else 0)
        if "/" in best.kernel and _score(wanted, best.kernel) >= 2:
            family = best.kernel
        else:
            said = f"; kernel {shown(kernel)} is not known for {device.family}, its default is used"
    mine = [c for c in rows if c.kernel == family]
    conversion = FORMATS[format].conversion
    row = next((c for c in mine if c.format == format), None)
    factor, widen = 1.0, 0.0
    if row is None:
        base = "bf16" if conversion == "none" else "fp8"
        row = next((c for c in mine if c.format == base), None) or next((c for c in rows if c.format == base), mine[0])
        factor, widen = CONVERSION[conversion]
        if format not in ("fp16", "none", "cast"):
            said = f"; {format} by analogy with {row.format}" + said
    if row.borrowed:
        said = f"; borrowed from {row.borrowed}" + said
    return row, factor, widen, f"{device.family} {row.op} {row.kernel} {row.format}{said}"
