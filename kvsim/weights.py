"""Formats of a model's weights: bits a value with scales included, and which matrix products they mean."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.model import DTYPE_BITS, ModelSpec


@dataclass(frozen=True)
class WeightFormat:
    """Bits a value of the layers' matrices, `embedding_bits` of embeddings and head; `matmul`: the product's dtype."""

    bits: float
    embedding_bits: float
    matmul: str
    source: str


_HUB = "compressed-tensors / AutoAWQ layouts: embeddings, head and norms stay in 16 bits"
_GGUF = "llama.cpp quantize: mean over a Llama-class model, embeddings and head included"

WEIGHTS = {
    "fp32": WeightFormat(32, 32, "fp32", "definition"),
    "bf16": WeightFormat(16, 16, "bf16", "definition"),
    "fp16": WeightFormat(16, 16, "fp16", "definition"),
    "fp8": WeightFormat(8, 16, "fp8", _HUB + "; one scale a channel"),
    "int8": WeightFormat(8, 16, "int8_wo", _HUB + "; one scale a channel"),
    "int4": WeightFormat(4.15625, 16, "int4_wo", _HUB + "; groups of 128: fp16 scale and 4-bit zero, 4 + 20/128 bits"),
    "nvfp4": WeightFormat(4.5, 16, "nvfp4", _HUB + "; e4m3 scale per 16"),
    "mxfp4": WeightFormat(4.25, 16, "int4_wo", _HUB + "; e8m0 scale per 32"),
    "q8_0": WeightFormat(8.5, 8.5, "int8_wo", "ggml: 34 bytes per 32 values"),
    "q6_k": WeightFormat(6.5625, 6.5625, "int8_wo", "ggml: 210 bytes per 256 values"),
    "q5_k_m": WeightFormat(5.67, 5.67, "int4_wo", _GGUF),
    "q4_k_m": WeightFormat(4.85, 4.85, "int4_wo", _GGUF),
    "q4_1": WeightFormat(5.0, 5.0, "int4_wo", "ggml: 20 bytes per 32 values"),
    "q4_0": WeightFormat(4.5, 4.5, "int4_wo", "ggml: 18 bytes per 32 values"),
}


def weight_format(name: str) -> WeightFormat:
    """The facts of a weight format; KvsimError with the nearest name otherwise."""
    key = str(name).lower()
    if key not in WEIGHTS:
        raise KvsimError(f"weights {shown(name)} is not one of {', '.join(WEIGHTS)}{did_you_mean(key, WEIGHTS)}")
    return WEIGHTS[key]


def default_weights(model: ModelSpec) -> str:
    """The weight format that a model's own dtype means."""
    return model.dtype if model.dtype in WEIGHTS else "bf16"


def weights_bytes(model: ModelSpec, name: str) -> int:
    """Resident bytes of all weights: layers' matrices in the format, the rest (norms, towers) in 16 bits or wider."""
    fmt = weight_format(name)
    plain = max(16, DTYPE_BITS[model.dtype] if fmt.bits >= 16 else 16) if fmt.bits != 32 else 32
    in_layers = sum(m.parameters * len(where) for layer, where in model.groups for m in layer.matrices)
    tables = sum(m.parameters for m in model.embeddings)
    tables += 0 if model.head is None or model.tied else model.head.parameters
    rest = model.parameters - in_layers - tables
    return round((in_layers * fmt.bits + tables * fmt.embedding_bits + rest * min(plain, 32)) / 8)
