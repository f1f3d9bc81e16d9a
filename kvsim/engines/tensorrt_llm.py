"""TensorRT-LLM: blocks of its KV pool from the memory free after the weights; blocks are rounded up."""

from __future__ import annotations

from kvsim.engines.parallel import ParallelLayout, rank_attention, stages
from kvsim.engines.pool import device_pool, fraction, positive_bytes, shared, too_long
from kvsim.engines.result import Cache, Memory
from kvsim.engines.support import check_sizes, realised_format
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.method import Method
from kvsim.model import Attention, ModelSpec
from kvsim.workload import whole

NAMES = ("tensorrt-llm", "trtllm", "tensorrt_llm", "trt-llm")
ALIASES = {
    "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction", "tp": "tp_size", "tensor_parallel_size": "tp_size",
    "pp": "pp_size", "pipeline_parallel_size": "pp_size", "max_tokens_in_paged_kv_cache": "max_tokens",
    "dtype": "kv_cache_dtype", "kv": "kv_cache_dtype", "available": "free_bytes",
}  # fmt: skip
WIDTHS = {"auto": 2, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "int8": 1, "fp32": 4}
BLOCK = 32


def memory(
    model: ModelSpec,
    *,
    free_bytes: int | float | None = None,
    free_gpu_memory_fraction: float = 0.9,
    max_tokens: int | None = None,
    device: object | None = None,
    tokens_per_block: int | None = None,
    kv_cache_dtype: str = "auto",
    tp_size: int = 1,
    pp_size: int = 1,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    weights: str | None = None,
    version: str | None = None,
) -> Memory:
    """What each rank of a TensorRT-LLM server allocates.

    Args:
        free_bytes: "available" when it sizes the pool: free memory after weights and workspaces; or a device, from
            which it is estimated. free_gpu_memory_fraction: share of it for the cache.
        max_tokens: a limit on tokens (also alone, where the pool is not known); the smaller of the two holds.
        tokens_per_block: default 32 (64 in engines of 0.10 to 0.16 and 128 before: version).
        kv_cache_dtype: auto, fp16, fp8, int8, nvfp4.
        max_seq_len: beyond the pool it is warned of; max_batch_size allocates no blocks.

    Blocks are ceil(share / block bytes), so a pool can exceed the share by up to one block.
    Raises KvsimError for heads that do not divide, an unknown dtype, or neither free_bytes, device nor max_tokens.
    """
    layout = ParallelLayout(tp_size, pp_size)
    layout.check(model)
    block = int(whole(tokens_per_block if tokens_per_block is not None else _block(version), "tokens_per_block", low=1))
    share = fraction(free_gpu_memory_fraction, "free_gpu_memory_fraction")
    notes: list[str] = []
    k = v = layers = 0
    for run in stages(model.n_layers, pp_size):
        sides = [_token_bytes(a, layout, kv_cache_dtype) for a in _stored(model, run)]
        if sum(map(sum, sides)) > k + v:
            k, v, layers = sum(s[0] for s in sides), sum(s[1] for s in sides), len(sides)
    if not k:
        raise KvsimError(f"model {model.name!r} has no attention layer whose keys TensorRT-LLM would store")
    limits = []
    refused = ""
    if free_bytes is None and device is not None:
        pools = device_pool(model, device, layout, 1.0, batched_tokens=8192, sequences=256, weights=weights,
                            graphs=False)  # fmt: skip
        tightest = min(pools, key=lambda pool: pool.left.mid)
        notes.append(f"free memory is estimated: {tightest.describe()}")
        free_bytes = tightest.left.mid
        if free_bytes <= 0:
            refused = ("TensorRT-LLM would not start: no memory is free after the weights; use more ranks or smaller "
                       "weights")  # fmt: skip
            free_bytes, limits = None, [0]
    if free_bytes is not None:
        limits.append(-(-int(positive_bytes(free_bytes, "free_bytes") * share) // ((k + v) * block)))
    if max_tokens is not None:
        limits.append(-(-int(whole(max_tokens, "max_tokens", low=1)) // block))
    if not limits:
        raise KvsimError("tensorrt-llm memory needs free_bytes, device or max_tokens")
    blocks = min(limits)
    rows = blocks * block
    notes += [*_notes(model), *too_long(rows, max_seq_len, "max_seq_len")]
    if max_batch_size is not None:
        whole(max_batch_size, "max_batch_size", low=1)
    stateful = any(x.states for x, _ in model.groups)
    return Memory(
        "tensorrt-llm", kv_bytes=rows * (k + v), k_bytes=rows * k, v_bytes=rows * v,
        state_bytes=None if stateful else 0, tokens=rows, blocks=blocks, block_tokens=block,
        caches=(Cache("attention", rows * (k + v), rows, layers, rows * k, rows * v),),
        warnings=((refused, *notes) if refused else tuple(notes)), refused=refused,
        pool_bytes=None if free_bytes is None and not refused else int((free_bytes or 0) * share),
    )  # fmt: skip


def hold(method: Method, model: ModelSpec, *, tokens: int, sequences: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Bytes of the blocks for so many requests of that length on the fullest rank."""
    length = -(-tokens // BLOCK) * BLOCK * sequences
    dtype = realised_format("tensorrt-llm", method)
    return memory(model, max_tokens=length, kv_cache_dtype=dtype, tp_size=tensor, pp_size=pipeline).kv_bytes or 0


def memory_share(*, weights: float, cache: float, peak: float, capacity: float) -> float:
    """The free_gpu_memory_fraction, of what weights and activations leave, that holds the cache."""
    return shared(cache / max(1.0, capacity - (peak - cache)), 0.9)


def realise(method: Method, *, max_model_len: int | None = None, gpu_memory_utilization: float | None = None,
            tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, max_num_seqs: int | None = None) -> str:
    """The flags with which `trtllm-serve` runs a method; KvsimError with the reason where it cannot.

    gpu_memory_utilization becomes kv_cache_free_gpu_memory_fraction: a share of what is free after the weights. A dtype
    goes in the YAML that --extra_llm_api_options names.
    """
    check_sizes(max_model_len, gpu_memory_utilization, tensor_parallel_size, pipeline_parallel_size, max_num_seqs)
    dtype = realised_format("tensorrt-llm", method)
    pairs = (("max_seq_len", max_model_len), ("max_batch_size", max_num_seqs),
             ("kv_cache_free_gpu_memory_fraction", gpu_memory_utilization),
             ("tp_size", tensor_parallel_size if tensor_parallel_size > 1 else None),
             ("pp_size", pipeline_parallel_size if pipeline_parallel_size > 1 else None))  # fmt: skip
    flags = [f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
             for name, value in pairs if value is not None]
    if dtype != "auto":
        flags.append(f"--extra_llm_api_options kv.yaml  # kv.yaml: kv_cache_config: {{dtype: {dtype}}}")
    return " ".join(flags)


def _block(version: str | None) -> int:
    if version is None:
        return BLOCK
    parts = version.strip().lower().lstrip("v").split(".")
    if not parts[0].isdigit() or (len(parts) > 1 and not parts[1].isdigit()):
        raise KvsimError(f"TensorRT-LLM version {shown(version)} is unknown: write it like 0.8 or 1.2.0")
    number = (int(parts[0]), int(parts[1]) if len(parts) > 1 else 0)
    return 128 if number < (0, 10) else 64 if number < (0, 17) else BLOCK


def _stored(model: ModelSpec, run: range) -> list[Attention]:
    """Attention modules of a stage that own rows; kinds without a rule here are refused."""
    found = [a for a in (model.layers[i].attention for i in run) if a is not None and a.kind != "shared"]
    for attention in found:
        if attention.kind in ("csa", "hca", "cross"):
            raise KvsimError(f"TensorRT-LLM's pools for {attention.kind} attention are not modelled here")
    return found


def _token_bytes(attention: Attention, layout: ParallelLayout, dtype: str) -> tuple[int, int]:
    """(k, v) bytes of one token in one layer on one rank; a latent is one store, told as k."""
    name = dtype.strip().lower()
    if name not in WIDTHS and name not in ("nvfp4", "fp4"):
        raise KvsimError(f"TensorRT-LLM has no kv_cache_dtype {shown(dtype)}{did_you_mean(name, (*WIDTHS, 'nvfp4'))}: "
                         "auto, fp16, bf16, fp8, int8 or nvfp4")
    heads = rank_attention(attention, layout.attention_ranks)
    latent = attention.kind == "mla"
    values = (attention.k_dim + attention.v_dim, 0) if latent else (heads * attention.k_dim, heads * attention.v_dim)
    if name in WIDTHS:
        return values[0] * WIDTHS[name], values[1] * WIDTHS[name]
    return values[0] // 2 + values[0] // 16, values[1] // 2 + values[1] // 16


def _notes(model: ModelSpec) -> list[str]:
    notes = []
    kinds = {x.attention.kind for x, _ in model.groups if x.attention}
    if kinds & {"sliding", "chunked"}:
        notes.append("windowed layers are charged for the whole sequence, as without max_attention_window")
    if any(x.states for x, _ in model.groups):
        notes.append("recurrent state lives in a pool of its own, sized by max_batch_size, and is not counted here")
    if any(x.attention and x.attention.index_dim for x, _ in model.groups):
        notes.append("the indexer's key cache is not counted here")
    return notes
