"""vLLM's command line: flags to a `Setup` with the engine's defaults, and a method to the flags that run it."""

from __future__ import annotations

from kvsim.engines.pool import GIB
from kvsim.engines.support import check_sizes, realised_format
from kvsim.engines.vllm_formats import model_width, spelled
from kvsim.engines.vllm_layout import Setup
from kvsim.engines.vllm_versions import release
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.hardware import load_device
from kvsim.method import Method
from kvsim.model import ModelSpec
from kvsim.workload import whole

BLOCKS = {"cuda": 16, "rocm": 16, "xpu": 64, "cpu": 16, "tpu": 256, "ascend": 128}
MLA_BLOCK = 64
SMALL_BLOCKS = (1, 8)
MODES = ("none", "align", "all")
SSM_BITS = {"auto": 0, "float32": 32, "fp32": 32, "float16": 16, "fp16": 16, "bfloat16": 16, "bf16": 16}
FLOAT32_STATES = ("qwen3_5", "kimi")
LARGE_DEVICE_BYTES = 70 * GIB
"""From this size vLLM batches 8192 tokens a step by default, below it 2048 (its table of defaults by device memory)."""

V0_HEAD_DIMS = (64, 80, 96, 112, 120, 128, 192, 256)


def server_setup(
    model: ModelSpec, *, device: object | None, max_model_len: int | None, block_size: int | None, kv_cache_dtype: str,
    tensor_parallel_size: int, pipeline_parallel_size: int, max_num_batched_tokens: int | None,
    enable_prefix_caching: bool | None, mamba_cache_mode: str | None, mamba_ssm_cache_dtype: str,
    num_speculative_tokens: int, disable_hybrid_kv_cache_manager: bool, decode_context_parallel_size: int,
    platform: str | None, version: str | None,
) -> tuple[Setup, list[str]]:  # fmt: skip
    """The setup that these flags mean for this model, and notes on what was assumed; KvsimError for bad values."""
    where = release(version)
    dtype = spelled(kv_cache_dtype)
    for name, value in (("max_model_len", max_model_len), ("block_size", block_size),
                        ("max_num_batched_tokens", max_num_batched_tokens)):
        if value is not None:
            whole(value, name, low=1)
    if block_size is not None and block_size not in SMALL_BLOCKS and block_size % 16:
        raise KvsimError(f"block_size {block_size} is no block of a vLLM attention backend: 1, 8 or a multiple of 16")
    drafted = int(whole(num_speculative_tokens, "num_speculative_tokens", high=64))
    context = int(whole(decode_context_parallel_size, "decode_context_parallel_size", low=1, high=2**16))
    if tensor_parallel_size % context:
        raise KvsimError(f"decode_context_parallel_size {context} must divide tensor_parallel_size "
                         f"{tensor_parallel_size}: it shares out the tokens over the same ranks")
    if context > 1 and any(x.attention and x.attention.window for x, _ in model.groups):
        raise KvsimError("vLLM's decode context parallelism does not support sliding windows")
    profile = load_device(device) if device is not None else None  # type: ignore[arg-type]
    place = _platform(platform, profile.kind if profile else None)
    latent = any(x.attention and x.attention.kind == "mla" for x, _ in model.groups)
    notes: list[str] = []
    block = block_size or (MLA_BLOCK if latent and place == "cuda" else BLOCKS[place])
    if latent and block_size is None and place == "cuda":
        notes.append(f"block_size {block} assumed for latent attention: its backends differ (16 to 128)")
    batched = max_num_batched_tokens
    if batched is None:
        batched = 2048 if profile is not None and profile.capacity_bytes < LARGE_DEVICE_BYTES else 8192
        if any(x.attention and x.attention.window for x, _ in model.groups) or profile is not None:
            notes.append(f"max_num_batched_tokens {batched} assumed, vLLM's default by device memory")
    mode = _mamba_mode(model, mamba_cache_mode, enable_prefix_caching)
    if where.v0:
        _check_v0(model, dtype)
    setup = Setup(
        release=where, dtype=dtype, width=model_width(model.dtype), block=block,
        max_len=max_model_len or model.max_context, batched=batched, ranks=tensor_parallel_size,
        pipeline=pipeline_parallel_size, hybrid=where.hybrid and not disable_hybrid_kv_cache_manager, mamba_mode=mode,
        ssm_bits=_ssm_bits(model, mamba_ssm_cache_dtype, notes), spec_tokens=drafted,
        context_ranks=context,
        sparse=any(x.attention and x.attention.index_dim for x, _ in model.groups),
    )  # fmt: skip
    return setup, notes


def realise(method: Method, *, max_model_len: int | None = None, gpu_memory_utilization: float | None = None,
            tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, max_num_seqs: int | None = None) -> str:
    """The flags with which `vllm serve` runs a method; KvsimError with the reason where it cannot."""
    check_sizes(max_model_len, gpu_memory_utilization, tensor_parallel_size, pipeline_parallel_size, max_num_seqs)
    dtype = realised_format("vllm", method)
    flags = [] if dtype == "auto" else [f"--kv-cache-dtype {dtype}"]
    pairs = (("max-model-len", max_model_len), ("max-num-seqs", max_num_seqs),
             ("gpu-memory-utilization", gpu_memory_utilization))  # fmt: skip
    flags += [f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
              for name, value in pairs if value is not None]
    for name, ranks in (("tensor", tensor_parallel_size), ("pipeline", pipeline_parallel_size)):
        if ranks > 1:
            flags.append(f"--{name}-parallel-size {ranks}")
    return " ".join(flags)


def _platform(asked: str | None, kind: str | None) -> str:
    if asked is None:
        return {"tpu": "tpu", "cpu": "cpu"}.get(kind or "", "cuda")
    name = asked.strip().lower()
    if name not in BLOCKS:
        raise KvsimError(f"platform {shown(asked)} is not one of {', '.join(BLOCKS)}{did_you_mean(name, BLOCKS)}")
    return name


def _mamba_mode(model: ModelSpec, asked: str | None, prefix: bool | None) -> str:
    if asked is not None:
        name = asked.strip().lower()
        if name not in MODES:
            near = did_you_mean(name, MODES)
            raise KvsimError(f"mamba_cache_mode {shown(asked)} is not one of {', '.join(MODES)}{near}")
        if name != "none" and prefix is False:
            raise KvsimError(f"mamba_cache_mode {name} needs prefix caching: drop enable_prefix_caching=off")
        return name
    return "align" if prefix and any(x.states for x, _ in model.groups) else "none"


def _ssm_bits(model: ModelSpec, asked: str, notes: list[str]) -> int:
    """Bits of the recurrent state, 0 for those of the model's own numbers."""
    name = asked.strip().lower().removeprefix("torch.")
    if name not in SSM_BITS:
        raise KvsimError(f"mamba_ssm_cache_dtype {shown(asked)} is not one of {', '.join(SSM_BITS)}")
    recurrent = [s for x, _ in model.groups for s in x.states if s.name != "conv"]
    if name != "auto" or not recurrent:
        return SSM_BITS[name]
    bits = recurrent[0].bits if model.architecture == "numbers" else _auto_bits(model)
    notes.append(f"recurrent state taken at {bits} bits: pass mamba_ssm_cache_dtype where the server has another")
    return bits


def _auto_bits(model: ModelSpec) -> int:
    """vLLM's `auto`: float32 where the config asks for it (Qwen3.5, Nemotron 3, Kimi), else the activations' dtype.

    Configs of Nemotron 3, all with experts, name float32; those of Nemotron Nano v2, without, name nothing.
    """
    routed = any(m.routed for x, _ in model.groups for m in x.matrices)
    named = model.architecture.startswith(FLOAT32_STATES) or (model.architecture == "nemotron_h" and routed)
    return 32 if named else 8 * model_width(model.dtype)


def _check_v0(model: ModelSpec, dtype: str) -> None:
    for layer, _ in model.groups:
        a = layer.attention
        if a and a.kind not in ("mla", "shared") and a.k_dim not in V0_HEAD_DIMS:
            raise KvsimError(f"head size {a.k_dim} is not supported by PagedAttention (vLLM V0); supported head sizes "
                             f"are {', '.join(map(str, V0_HEAD_DIMS))}")
    if dtype not in ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"):
        raise KvsimError(f"vLLM V0 has no kv_cache_dtype {dtype}: auto, fp8, fp8_e4m3 or fp8_e5m2")
