"""Block formats of a llama.cpp cache row and what refuses them; bytes only, no quality."""

from __future__ import annotations

from kvsim.errors import KvsimError, did_you_mean, shown

BLOCKS = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22),
    "q4_1": (32, 20), "q4_0": (32, 18), "iq4_nl": (32, 18),
}  # fmt: skip
"""Values and bytes of a block: q8_0 is 32 codes of 8 bits and an fp16 scale (ggml-common.h)."""


def checked(kind: str, flag: str) -> str:
    """The type by its own name; KvsimError for one that llama.cpp does not take for a cache."""
    name = str(kind).strip().lower()
    if name not in BLOCKS:
        raise KvsimError(
            f"{flag} {shown(kind)} is not a cache type of llama.cpp{did_you_mean(name, BLOCKS)}: {', '.join(BLOCKS)}"
        )
    return name


def quantized(kind: str) -> bool:
    """Whether values share a block."""
    return BLOCKS[kind][0] > 1


def row_bytes(kind: str, width: int, flag: str) -> int:
    """Bytes of one cell of `width` values; the width must hold whole blocks."""
    values, size = BLOCKS[kind]
    if width % values:
        raise KvsimError(f"{flag}={kind}: a row of {width} values is not divisible by the block of {values}; use f16")
    return width // values * size


def check_head(kind: str, head: int, flag: str) -> None:
    """llama.cpp refuses at start-up a block that straddles heads."""
    if head % BLOCKS[kind][0]:
        raise KvsimError(
            f"{flag}={kind}: heads of {head} values are not divisible by the block of {BLOCKS[kind][0]}, "
            f"llama.cpp refuses to start; use f16, bf16 or f32 for this side"
        )
