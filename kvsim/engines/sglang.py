"""SGLang: rows of its token pool, recurrent slots and window pool, from tokens or bytes; prints "GB" and means GiB."""

from __future__ import annotations

from dataclasses import dataclass

from kvsim.engines.parallel import ParallelLayout, rank_attention, rank_states, stages
from kvsim.engines.pool import GIB, device_pool, fraction, positive_bytes, shared, too_long
from kvsim.engines.result import Cache, Memory
from kvsim.engines.support import check_sizes, realised_format
from kvsim.errors import KvsimError, did_you_mean, shown
from kvsim.method import Method
from kvsim.model import Attention, ModelSpec
from kvsim.workload import whole

NAMES = ("sglang",)
ALIASES = {
    "tp": "tp_size", "tensor_parallel_size": "tp_size", "tensor-parallel-size": "tp_size", "dp": "dp_size",
    "data-parallel-size": "dp_size", "pp": "pp_size", "max_total_tokens": "tokens", "max-total-tokens": "tokens",
    "dtype": "kv_cache_dtype", "kv": "kv_cache_dtype",
}  # fmt: skip
WIDTHS = {"auto": 2, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8": 1}
FP4 = ("fp4_e2m1", "fp4")
SPARSE_PAGE = 64
MAMBA_SHARE = 0.9
SWA_RATIO = 0.8


@dataclass(frozen=True)
class Row:
    """Bytes of one token over all layers of one kind: both sides and the indexer's keys."""

    layers: int
    k: int
    v: int
    index: int

    @property
    def bytes(self) -> int:
        """Everything a token stores in these layers."""
        return self.k + self.v + self.index


def memory(
    model: ModelSpec,
    *,
    tokens: int | None = None,
    pool_bytes: int | float | None = None,
    device: object | None = None,
    mem_fraction_static: float | None = None,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    tp_size: int = 1,
    dp_size: int = 1,
    enable_dp_attention: bool | None = None,
    pp_size: int = 1,
    max_mamba_cache_size: int | None = None,
    mamba_full_memory_ratio: float = MAMBA_SHARE,
    mamba_ssm_dtype: str = "float32",
    swa_full_tokens_ratio: float = SWA_RATIO,
    disable_hybrid_swa_memory: bool = False,
    context_length: int | None = None,
    max_running_requests: int | None = None,
    weights: str | None = None,
    version: str | None = None,
) -> Memory:
    """What each rank of an SGLang server allocates.

    Args:
        tokens: "#tokens" of the start-up print; or pool_bytes of one rank (states and cache together); or device and
            mem_fraction_static (default 0.88): the pool is then an estimate and says so.
        page_size: default 1 (64 for sparse latent attention). A pool of N tokens allocates N + page_size rows.
        kv_cache_dtype: auto, bf16, fp8_e4m3, fp8_e5m2, fp4_e2m1.
        dp_size: with data-parallel attention (default where dp_size > 1 divides tp_size) a rank attends its own
            requests, with tp_size / dp_size ranks on the heads.
        max_mamba_cache_size: recurrent slots; one more is allocated. Default: mamba_full_memory_ratio of the pool's
            cache share. mamba_ssm_dtype: SGLang keeps the recurrent state in float32 unless told otherwise.
        swa_full_tokens_ratio: window layers get this share of the full layers' tokens; disable_hybrid_swa_memory
            charges them in full, as SGLang does for architectures it does not know as hybrid (Gemma 2 and 3).
        context_length: beyond the pool it is warned of; max_running_requests allocates no rows.
        version: before 0.5.4 the print of sparse attention left the indexer out; only a warning depends on it.

    Raises KvsimError for heads that do not divide, an unknown dtype, or neither tokens, pool_bytes nor device.
    """
    split = dp_size > 1 and tp_size % dp_size == 0 if enable_dp_attention is None else enable_dp_attention
    layout = ParallelLayout(tp_size, pp_size, attention_data=dp_size if split else 1)
    layout.check(model)
    sparse = any(x.attention and x.attention.kind == "mla" and x.attention.index_dim for x, _ in model.groups)
    page = int(whole(page_size if page_size is not None else SPARSE_PAGE if sparse else 1, "page_size", low=1))
    run = max(stages(model.n_layers, pp_size), key=len)
    windows = not disable_hybrid_swa_memory
    full, window = (_rows(model, run, layout, kv_cache_dtype, w, windows) for w in (False, True))
    state_layers = sum(1 for i in run if model.layers[i].states)
    parts = _state_parts(model, run, layout, mamba_ssm_dtype)
    slot = sum(parts.values())
    if not full.layers and not slot and not window.layers:
        raise KvsimError(f"model {model.name!r} keeps no cache that SGLang would allocate")
    notes = _notes(model, sparse, version, dp_size, split)
    slots = None if max_mamba_cache_size is None else int(whole(max_mamba_cache_size, "max_mamba_cache_size", low=1))
    ratio = fraction(swa_full_tokens_ratio, "swa_full_tokens_ratio")
    refused, pool = "", None
    if tokens is None:
        pool, refused = _pool(model, layout, pool_bytes, device, mem_fraction_static, weights, notes)
        if slot and slots is None:
            share = mamba_full_memory_ratio / (1 + mamba_full_memory_ratio)
            slots = int(pool * share) // slot
        rest = pool - (slots or 0) * slot if slot else pool
        tokens = _tokens(rest, full, window, ratio, page)
    count = int(whole(tokens, "tokens"))
    if not count and pool is not None and full.layers and not refused:
        refused = f"SGLang would not start: {pool} bytes hold no token of {full.bytes + window.bytes} bytes"
    notes += too_long(count, context_length, "context_length")
    if max_running_requests is not None:
        whole(max_running_requests, "max_running_requests", low=1)
    caches = _caches(full, window, count, page, ratio)
    states: tuple[Cache, ...] = ()
    if slot and slots is not None:
        states = tuple(Cache(name, (slots + 1) * size, slots, state_layers) for name, size in parts.items() if size)
    elif slot:
        notes.append(f"recurrent state not counted: pass max_mamba_cache_size ({slot} bytes a slot, one more is kept)")
    return Memory(
        "sglang", kv_bytes=sum(c.bytes for c in caches), k_bytes=sum(c.k_bytes or 0 for c in caches),
        v_bytes=sum(c.v_bytes or 0 for c in caches), caches=caches, states=states,
        state_bytes=sum(c.bytes for c in states), tokens=count, blocks=count // page if page > 1 else None,
        block_tokens=page, warnings=((refused, *notes) if refused else tuple(notes)), refused=refused, pool_bytes=pool,
    )  # fmt: skip


def hold(method: Method, model: ModelSpec, *, tokens: int, sequences: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Bytes of the token pools and a state slot a request, for so many requests of that length, on one rank."""
    slots = sequences if any(x.states for x, _ in model.groups) else None
    found = memory(model, tokens=tokens * sequences, kv_cache_dtype=realised_format("sglang", method), tp_size=tensor,
                   pp_size=pipeline, max_mamba_cache_size=slots)  # fmt: skip
    return (found.kv_bytes or 0) + (found.state_bytes or 0)


def memory_share(*, weights: float, cache: float, peak: float, capacity: float) -> float:
    """The mem_fraction_static that holds weights and cache: what SGLang chooses by itself where that is enough."""
    return shared((weights + cache) / capacity, 0.88)


def realise(method: Method, *, max_model_len: int | None = None, gpu_memory_utilization: float | None = None,
            tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, max_num_seqs: int | None = None) -> str:
    """The flags with which `sglang.launch_server` runs a method; KvsimError with the reason where it cannot."""
    check_sizes(max_model_len, gpu_memory_utilization, tensor_parallel_size, pipeline_parallel_size, max_num_seqs)
    dtype = realised_format("sglang", method)
    pairs = (("kv-cache-dtype", None if dtype == "auto" else dtype), ("context-length", max_model_len),
             ("mem-fraction-static", gpu_memory_utilization), ("max-running-requests", max_num_seqs),
             ("tp-size", tensor_parallel_size if tensor_parallel_size > 1 else None),
             ("pp-size", pipeline_parallel_size if pipeline_parallel_size > 1 else None))  # fmt: skip
    return " ".join(f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
                    for name, value in pairs if value is not None)


def token_bytes(attention: Attention, heads: int, dtype: str, sparse: bool = False) -> tuple[int, int, int]:
    """(k, v, index) bytes of one token in one layer; MLA is one store, told as k. sparse: the model has an indexer.

    Sources: sglang mem_cache/memory_pool.py (MHATokenToKVPool, MLATokenToKVPool, NSATokenToKVPool and their FP4 forms:
    half a byte a value and one byte a 16 values).
    """
    name = dtype.strip().lower().removeprefix("torch.")
    if name not in WIDTHS and name not in FP4:
        known = (*WIDTHS, *FP4)
        raise KvsimError(f"SGLang has no kv_cache_dtype {shown(dtype)}{did_you_mean(name, known)}: "
                         "auto, bf16, fp8_e4m3, fp8_e5m2 or fp4_e2m1")
    width = WIDTHS.get(name)
    if attention.kind == "mla":
        values = attention.k_dim + attention.v_dim
        index = attention.index_dim + -(-attention.index_dim // 128) * 4  # fp8 keys with one fp32 scale per 128
        if (sparse or attention.index_dim) and width == 1:  # 512 + 16 + 128: fp8 latent, scales, 16-bit RoPE part
            return attention.k_dim + -(-attention.k_dim // 128) * 4 + 2 * attention.v_dim, 0, index
        return (values // 2 + values // 16 if width is None else values * width), 0, index
    sides = (heads * attention.k_dim, heads * attention.v_dim)
    k, v = (x // 2 + x // 16 if width is None else x * width for x in sides)
    return k, v, 0


def _rows(model: ModelSpec, run: range, layout: ParallelLayout, dtype: str, window: bool, hybrid: bool) -> Row:
    """Bytes of one token in the layers that hold a window (or not) on one rank of a stage.

    Layers that share another's rows have rows of their own here (Gemma 4 E4B: 79.94 GB over all 42 layers in a log).
    """
    layers = k = v = index = 0
    sparse = any(x.attention and x.attention.index_dim for x, _ in model.groups)
    for number in run:
        attention = model.layers[number].attention
        if attention is None:
            continue
        if attention.kind in ("csa", "hca", "cross"):
            raise KvsimError(f"SGLang's pools for {attention.kind} attention are not modelled here")
        windowed = attention.kind in ("sliding", "chunked") or (attention.kind == "shared" and attention.window > 0)
        if (hybrid and windowed) is not window:
            continue
        heads = rank_attention(attention, layout.attention_ranks)
        one = token_bytes(attention, heads, dtype, sparse)
        layers, k, v, index = layers + 1, k + one[0], v + one[1], index + one[2]
    return Row(layers, k, v, index)


def _state_parts(model: ModelSpec, run: range, layout: ParallelLayout, ssm_dtype: str) -> dict[str, int]:
    """Bytes of one slot over the stage's layers, by part: the convolution keeps kernel - 1 columns in 16 bits."""
    sizes = {"float32": 32, "fp32": 32, "bfloat16": 16, "bf16": 16, "float16": 16, "fp16": 16}
    if ssm_dtype not in sizes:
        raise KvsimError(f"mamba_ssm_dtype {shown(ssm_dtype)} is not one of {', '.join(sizes)}")
    parts = {"conv": 0, "ssm": 0}
    for number in run:
        for state in rank_states(model.layers[number].states, layout.attention_ranks):
            if state.name == "conv":
                parts["conv"] += state.shape[0] * (state.shape[1] - 1) * 2
            else:
                values = 1
                for axis in state.shape:
                    values *= axis
                parts["ssm"] += values * sizes[ssm_dtype] // 8
    return parts


def _pool(model: ModelSpec, layout: ParallelLayout, pool_bytes: float | None, device: object | None,
          share: float | None, weights: str | None, notes: list[str]) -> tuple[int, str]:
    """(bytes for the cache and the states, why the engine would not start with them)."""
    if pool_bytes is not None:
        return positive_bytes(pool_bytes, "pool_bytes"), ""
    if device is None:
        raise KvsimError("sglang memory needs tokens, pool_bytes or device (with mem_fraction_static)")
    used = fraction(0.88 if share is None else share, "mem_fraction_static")
    pools = device_pool(model, device, layout, used, batched_tokens=0, sequences=0, weights=weights,
                        graphs=False)  # fmt: skip
    tightest = min(pools, key=lambda pool: pool.left.mid)
    notes.append(f"estimated {tightest.describe()}; activations and graphs live in the {1 - used:.0%} outside "
                 "mem_fraction_static")
    if tightest.left.mid <= 0:
        return 0, ("SGLang would not start: not enough memory for the cache; raise mem_fraction_static, use more ranks "
                   "or smaller weights")  # fmt: skip
    return tightest.left.mid, ""


def _tokens(rest: int, full: Row, window: Row, ratio: float, page: int) -> int:
    """Tokens of the full layers: pool / bytes, or with windows full * (bytes_full + ratio * bytes_window) = pool."""
    if not full.layers and not window.layers:
        return 0  # recurrent layers only: the pool is slots
    if not full.layers:
        return rest // window.bytes // page * page
    if not window.layers:
        return rest // full.bytes // page * page
    whole_rows = rest // (full.bytes + window.bytes)  # SGLang first counts tokens as if every layer held all
    layers = full.layers + window.layers
    return int(whole_rows * layers / (full.layers + ratio * window.layers)) // page * page


def _caches(full: Row, window: Row, tokens: int, page: int, ratio: float) -> tuple[Cache, ...]:
    """The token pools: full layers, window layers with their share of the tokens, and the indexer's keys."""
    caches = []
    shared = int(tokens * ratio) // page * page if full.layers else tokens
    for name, row, count in (("attention", full, tokens), ("window", window, shared)):
        if not row.layers:
            continue
        rows = count + page
        caches.append(Cache(name, rows * (row.k + row.v), count, row.layers, rows * row.k, rows * row.v))
        if row.index:
            caches.append(Cache("indexer", rows * row.index, count, row.layers))
    return tuple(caches)


def _notes(model: ModelSpec, sparse: bool, version: str | None, dp_size: int, split: bool) -> list[str]:
    notes = []
    if sparse:
        notes.append("prints before the fix of 2025-10 (#11309) left the indexer's bytes out" + (
            f"; version {version} is given" if version else ""))  # fmt: skip
    if dp_size > 1 and split:
        notes.append("data-parallel attention: tokens are one rank's, the server holds dp_size times as many")
    if any(x.attention and x.attention.kind == "shared" for x, _ in model.groups):
        notes.append("SGLang allocates rows for layers that share another layer's rows too")
    if any(x.attention and x.attention.kind in ("sliding", "chunked") for x, _ in model.groups):
        notes.append("window layers hold swa_full_tokens_ratio of the tokens; where SGLang does not know the model as "
                     "hybrid (Gemma 2, Gemma 3) pass disable_hybrid_swa_memory")
    return notes


def printed_gb(size: int) -> str:
    """A size as SGLang prints it: GiB, called GB, two decimals."""
    return f"{size / GIB:.2f} GB"
