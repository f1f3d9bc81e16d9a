"""Bytes that vLLM stores for one token in one layer, by --kv-cache-dtype; refusals in the engine's own terms."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.model import DTYPE_BITS, Attention

SPELLINGS = {
    "auto": "auto", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "half": "float16",
    "float16": "float16", "fp32": "float32", "float": "float32", "float32": "float32", "fp8": "fp8",
    "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "fp8_inc": "fp8_inc",
    "float8_e4m3fn": "fp8_e4m3", "fp8_ds_mla": "fp8_ds_mla", "nvfp4": "nvfp4",
    "nvfp4_4over6": "nvfp4_4over6", "int8_per_token_head": "int8_per_token_head",
    "fp8_per_token_head": "fp8_per_token_head", "int4_per_token_head": "int4_per_token_head",
    "turboquant_k8v4": "turboquant_k8v4", "turboquant_4bit_nc": "turboquant_4bit_nc",
    "turboquant_k3v4_nc": "turboquant_k3v4_nc", "turboquant_3bit_nc": "turboquant_3bit_nc",
}  # fmt: skip
"""Every value of --kv-cache-dtype that is modelled, and short forms, -> the engine's own spelling."""

PLAIN = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}
TURBOQUANT = {"turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4),
              "turboquant_3bit_nc": (3, 3)}  # fmt: skip
MLA_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla")
SPARSE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
SKIPPED_EACH_END = 2
"""Layers that TurboQuant leaves in the model's dtype at either end of the model (its boundary protection)."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token in one layer on one rank: the two sides of attention and the indexer's keys."""

    k: int
    v: int = 0
    index: int = 0

    @property
    def attention(self) -> int:
        """Both sides."""
        return self.k + self.v


def spelled(kv_cache_dtype: str) -> str:
    """The engine's spelling of a dtype; KvsimError with the nearest one otherwise."""
    name = str(kv_cache_dtype).strip().lower().removeprefix("torch.")
    if name not in SPELLINGS:
        raise KvsimError(f"vLLM has no kv_cache_dtype {shown(kv_cache_dtype)}{did_you_mean(name, SPELLINGS)}: "
                         f"one of {', '.join(sorted(set(SPELLINGS.values())))}")
    return SPELLINGS[name]


def model_width(dtype: str) -> int:
    """Bytes of a value that `auto` stores: the model's activations; 8-bit checkpoints compute in 16 bits."""
    return max(2, DTYPE_BITS[dtype] // 8)


def token_bytes(attention: Attention, heads: int, dtype: str, width: int, sparse: bool = False) -> TokenBytes:
    """Bytes of one token.

    Args:
        attention: the layer's; heads: stored heads on this rank; dtype: from `spelled`; width: bytes of `auto`.
        sparse: whether the model has an indexer in any layer, as then every latent layer is stored for it.

    Sources: vLLM v1/kv_cache_interface.py (page sizes), flashmla_sparse (656 bytes), turboquant/config.py (slots).
    Raises KvsimError where no backend of the engine stores this shape in this dtype.
    """
    if attention.kind == "mla":
        return _latent(attention, dtype, width, sparse or attention.index_dim > 0)
    sides = (attention.k_dim, attention.v_dim)
    index = attention.index_dim * width
    if dtype == "auto" or dtype in PLAIN:
        size = width if dtype == "auto" else PLAIN[dtype]
        return TokenBytes(heads * sides[0] * size, heads * sides[1] * size, index)
    if dtype == "fp8_ds_mla":
        raise KvsimError("kv_cache_dtype fp8_ds_mla is a layout of DeepSeek's sparse latent attention; this model has "
                         "ordinary heads: use fp8")
    if dtype.startswith("nvfp4"):
        if any(d % 16 for d in sides):
            raise KvsimError(f"kv_cache_dtype {dtype} needs head_dim divisible by 16, this model has {sides[0]}")
        k, v = (heads * (d // 2 + d // 16) for d in sides)
        return TokenBytes(k, v, index)
    if dtype.endswith("per_token_head"):
        data = [d // 2 if dtype.startswith("int4") else d for d in sides]
        return TokenBytes(heads * (data[0] + 4), heads * (data[1] + 4), index)  # one fp32 scale a head and side
    key_bits, value_bits = TURBOQUANT[dtype]
    key = sides[0] if key_bits == 8 else -(-sides[0] * key_bits // 8) + 2  # fp8 without, codes with an fp16 norm
    value = -(-sides[1] * value_bits // 8) + 4  # codes, fp16 scale and zero
    return TokenBytes(heads * key, heads * (value + (key + value) % 2), index)  # the slot is made even


def _latent(attention: Attention, dtype: str, width: int, sparse: bool) -> TokenBytes:
    latent, rope = attention.k_dim, attention.v_dim
    allowed = SPARSE_DTYPES if sparse else MLA_DTYPES
    if dtype not in allowed or (dtype == "fp8_ds_mla" and not sparse):
        kinds = "sparse latent attention (DSA)" if sparse else "latent attention (MLA)"
        raise KvsimError(f"no vLLM backend stores {kinds} as {dtype}: use "
                         f"{', '.join(d for d in allowed if sparse or d != 'fp8_ds_mla')}")
    index = attention.index_dim + -(-attention.index_dim // 128) * 4  # fp8 keys, one fp32 scale per 128
    if sparse and dtype in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
        return TokenBytes(latent + -(-latent // 128) * 4 + 2 * rope, 0, index)  # 512 + 16 + 128 = 656
    size = width if dtype == "auto" else PLAIN[dtype]
    return TokenBytes((latent + rope) * size, 0, index)
