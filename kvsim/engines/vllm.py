"""vLLM: blocks, tokens and concurrency of a server, from its flags and its pool; refusals in the engine's own words."""

from __future__ import annotations

from dataclasses import replace

from kvsim.engines import vllm_layout
from kvsim.engines.parallel import ParallelLayout, stages
from kvsim.engines.pool import GIB, Pool, device_pool, fraction, positive_bytes, shared
from kvsim.engines.result import Cache, Memory
from kvsim.engines.support import realised_format
from kvsim.engines.vllm_flags import realise, server_setup
from kvsim.engines.vllm_layout import Plan, Setup
from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.model import ModelSpec
from kvsim.workload import whole

__all__ = ["ALIASES", "NAMES", "hold", "memory", "memory_share", "realise"]

NAMES = ("vllm",)
ALIASES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dcp": "decode_context_parallel_size",
    "kv_cache_memory_bytes": "pool_bytes", "kv-cache-memory": "pool_bytes", "kv_cache_memory": "pool_bytes",
    "swap_space": "swap_space_gib", "gpu_mem_util": "gpu_memory_utilization", "block": "block_size",
    "dtype": "kv_cache_dtype", "kv": "kv_cache_dtype",
}  # fmt: skip


def memory(
    model: ModelSpec,
    *,
    pool_bytes: int | float | None = None,
    device: object | None = None,
    gpu_memory_utilization: float | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    enable_prefix_caching: bool | None = None,
    mamba_cache_mode: str | None = None,
    mamba_ssm_cache_dtype: str = "auto",
    num_speculative_tokens: int = 0,
    disable_hybrid_kv_cache_manager: bool = False,
    decode_context_parallel_size: int = 1,
    num_gpu_blocks_override: int | None = None,
    swap_space_gib: float | None = None,
    weights: str | None = None,
    platform: str | None = None,
    version: str | None = None,
) -> Memory:
    """What each rank of a vLLM server holds, and what the server prints of it.

    Args:
        pool_bytes: "Available KV cache memory" of one rank (the smallest decides); or device and
            gpu_memory_utilization, from which the pool is estimated, with an interval in the warnings. With neither
            (and no num_gpu_blocks_override) kv_bytes is what one request of max_model_len needs.
        max_model_len: default the model's own context; where the pool cannot hold one such request `refused` says so,
            in the engine's words and with the longest that fits.
        block_size: default 16 (64 for latent attention; by platform: tpu 256, ascend 128).
        kv_cache_dtype: auto, bfloat16, fp8, nvfp4, turboquant_4bit_nc, ... (see vllm_formats).
        num_speculative_tokens: drafted tokens: states grow by so many columns and blocks, and the model's
            next_n_layers get a cache.
        mamba_cache_mode: none, align, all; default align where enable_prefix_caching is on, else none.
        decode_context_parallel_size: ranks that share out one sequence's tokens (DCP); divides tensor_parallel_size.
        swap_space_gib: V0 only, its CPU pool (default 4): a cache named "cpu".
        weights: their format (fp8, int4, ...), for a pool from a device.
        version: "0.11.2", "2025-09", "0.8 V0" ...; default `vllm_versions.DEFAULT`.

    Raises KvsimError for what cannot be laid out: heads that do not divide, a dtype that no backend stores.
    """
    setup, notes = server_setup(
        model, device=device, max_model_len=max_model_len, block_size=block_size, kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching,
        mamba_cache_mode=mamba_cache_mode, mamba_ssm_cache_dtype=mamba_ssm_cache_dtype,
        num_speculative_tokens=num_speculative_tokens, disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        decode_context_parallel_size=decode_context_parallel_size, platform=platform, version=version,
    )  # fmt: skip
    layout = ParallelLayout(tensor_parallel_size, pipeline_parallel_size)
    layout.check(model)
    setup = replace(setup, block=vllm_layout.aligned_block(model, setup))
    pages = vllm_layout.pages(model, setup)
    runs = list(stages(model.n_layers, pipeline_parallel_size))
    runs[-1] = range(runs[-1].start, len(pages))  # drafting layers live on the last stage
    plans = [vllm_layout.plan(pages, setup, run) for run in runs]
    notes += _layout_notes(plans, pages, setup, model)
    pools: tuple[Pool, ...] = ()
    sizes: list[int] | None = None
    if num_gpu_blocks_override is not None:
        blocks: int | None = int(whole(num_gpu_blocks_override, "num_gpu_blocks_override", low=1))
    else:
        if pool_bytes is not None:
            sizes = [positive_bytes(pool_bytes, "pool_bytes")] * len(plans)
        elif device is not None:
            share = setup.release.utilization if gpu_memory_utilization is None else gpu_memory_utilization
            pools = device_pool(
                model, device, layout, share, batched_tokens=setup.batched, sequences=max_num_seqs or 256,
                weights=weights, graphs=setup.release.counts_graphs,
            )  # fmt: skip
            sizes = [pool.left.mid for pool in pools]
        elif gpu_memory_utilization is not None:
            fraction(gpu_memory_utilization, "gpu_memory_utilization")
            raise KvsimError("gpu_memory_utilization needs device, the GPU of which it is a share")
        blocks = _blocks(plans, sizes) if sizes is not None else None
    if blocks is None:
        return _needed(plans, setup, notes)
    refused = _refusal(plans, setup, blocks, sizes)
    notes = [refused, *notes] if refused else notes
    ends = None
    if pools:
        notes += _interval_notes(pools, plans, setup)
        low, high = (_blocks(plans, [getattr(pool.left, end) for pool in pools]) for end in ("low", "high"))
        ends = (_tokens(plans, setup, low), _tokens(plans, setup, high))
    found = replace(_report(plans, setup, blocks, notes), refused=refused, tokens_range=ends)
    pool = max(0, min(sizes)) if sizes else None
    found = replace(found, pool_bytes=pool, longest_request=_longest(plans, setup, blocks))
    if setup.release.v0:
        found = _with_swap(found, plans, 4.0 if swap_space_gib is None else swap_space_gib)
    elif swap_space_gib is not None:
        found = replace(found, warnings=(*found.warnings, "swap_space_gib only makes CPU blocks in the V0 engine"))
    return found


def hold(method: Method, model: ModelSpec, *, tokens: int, sequences: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Bytes of the blocks, states included, for so many requests of that length on the fullest rank.

    One of them is in its prefill, with a whole batch beside its windows; the others decode.
    """
    dtype = realised_format("vllm", method)

    def need(batched: int | None, blocks: int | None = None) -> Memory:
        return memory(model, max_model_len=tokens, kv_cache_dtype=dtype, tensor_parallel_size=tensor,
                      pipeline_parallel_size=pipeline, max_num_batched_tokens=batched,
                      num_gpu_blocks_override=blocks)  # fmt: skip

    blocks = (need(None).blocks or 0) + (need(1).blocks or 0) * (sequences - 1)
    return sum(c.bytes for c in need(None, max(1, blocks)).caches if not c.name.endswith("one request"))


def memory_share(*, weights: float, cache: float, peak: float, capacity: float) -> float:
    """The gpu_memory_utilization with which everything counted fits: its old default where that is enough."""
    return shared(peak / capacity, 0.9)


def _blocks(plans: list[Plan], sizes: list[int]) -> int:
    """floor(pool / block bytes), the smallest over the stages."""
    return min((max(size, 0) // plan.block_bytes for plan, size in zip(plans, sizes, strict=True) if plan.block_bytes),
               default=0)


def _needed(plans: list[Plan], setup: Setup, notes: list[str]) -> Memory:
    """Without a pool: what the check at start-up asks for, one request of max_model_len on the fullest stage."""
    if not setup.max_len:
        raise KvsimError("vllm memory needs pool_bytes, device, num_gpu_blocks_override or max_model_len")
    need = plans[0].blocks_per_request(setup, setup.max_len)
    notes = [f"no pool given: these are the {need} blocks that one request of {setup.max_len} tokens needs", *notes]
    return _report(plans, setup, need, notes)


def _refusal(plans: list[Plan], setup: Setup, blocks: int, sizes: list[int] | None) -> str:
    """Why the engine would not start with this many blocks, in its words; "" when it would."""
    if blocks < 1:
        return ("vLLM would not start: no available memory for the cache blocks; raise gpu_memory_utilization, use "
                "more ranks or smaller weights")
    need = plans[0].blocks_per_request(setup, setup.max_len) if setup.max_len else 0
    if need <= blocks:
        return ""
    longest = plans[0].longest(setup, blocks, setup.max_len)
    full = max(plans, key=lambda p: p.block_bytes)
    have = min(sizes) if sizes else blocks * full.block_bytes
    return (f"vLLM would not start: to serve at least one request with max seq len {setup.max_len}, "
            f"{need * full.block_bytes / GIB:.2f} GiB KV cache is needed, larger than the available {have / GIB:.2f} "
            f"GiB; the estimated maximum model length is {longest}: lower max_model_len, raise gpu_memory_utilization")


def _report(plans: list[Plan], setup: Setup, blocks: int, notes: list[str]) -> Memory:
    full = max(plans, key=lambda p: p.block_bytes)
    caches = _caches(full, setup, blocks)
    one_group = len(full.groups) == 1
    attention = any(p.kind not in ("state", "cross") for g in full.groups for p in g.pages)
    block = _block_tokens(full, setup)
    concurrency = None
    if setup.max_len:
        concurrency = blocks / plans[0].blocks_per_request(setup, setup.max_len)
        if setup.release.v0 and attention:
            concurrency = blocks * block / setup.max_len
    state = None if _has_state(full) and not one_group else sum(c.bytes for c in caches if c.name == "state")
    return Memory(
        "vllm", kv_bytes=full.block_bytes * blocks if attention else 0,
        k_bytes=sum(c.k_bytes or 0 for c in caches) if one_group else None,
        v_bytes=sum(c.v_bytes or 0 for c in caches) if one_group else None,
        caches=caches, state_bytes=state,
        tokens=_tokens(plans, setup, blocks), blocks=blocks, block_tokens=block, max_concurrency=concurrency,
        warnings=tuple(notes),
    )  # fmt: skip


def _block_tokens(plan: Plan, setup: Setup) -> int:
    """Tokens of the smallest attention block; a model of states only counts requests."""
    tokens = [p.tokens for g in plan.groups for p in g.pages if p.kind not in ("state", "cross")]
    return min(tokens, default=setup.max_len or setup.block)


def _tokens(plans: list[Plan], setup: Setup, blocks: int) -> int:
    """"GPU KV cache size" as the release prints it."""
    if setup.release.prints_concurrency_tokens and setup.max_len:
        return int(blocks / plans[0].blocks_per_request(setup, setup.max_len) * setup.max_len)
    size = _block_tokens(max(plans, key=lambda p: p.block_bytes), setup)
    return blocks // max(1, len(plans[0].groups)) * size * setup.context_ranks


def _longest(plans: list[Plan], setup: Setup, blocks: int) -> int:
    """The longest single request that the blocks hold, bounded where states alone would hold any."""
    return plans[0].longest(setup, blocks, 2**24) if blocks else 0


def _has_state(plan: Plan) -> bool:
    return any(page.kind == "state" for group in plan.groups for page in group.pages)


def _caches(plan: Plan, setup: Setup, blocks: int) -> tuple[Cache, ...]:
    """Caches by kind. In one group the bytes are its own; groups of a hybrid share one pool, named once."""
    if len(plan.groups) == 1:
        pages = plan.groups[0].pages
        found = []
        for name in ("attention", "indexer", "state"):
            own = [p for p in pages if name == p.shelf]
            if own:
                k, v = sum(p.k for p in own), sum(p.v for p in own)
                found.append(Cache(name, blocks * sum(p.bytes for p in own), blocks * own[0].tokens or None, len(own),
                                   blocks * k if k else None, blocks * v if v else None))
        return tuple(found)
    shared = Cache("shared pool", blocks * plan.block_bytes, None, plan.pools)
    need = [Cache(f"{g.page.kind} group, one request", plan.pools * g.page.bytes * g.page.blocks(setup, setup.max_len),
                  setup.max_len, len(g.pages)) for g in plan.groups] if setup.max_len else []
    return (shared, *need)


def _with_swap(found: Memory, plans: list[Plan], swap_gib: float) -> Memory:
    """V0 also kept CPU blocks: floor(swap space / block bytes)."""
    if not 0 <= swap_gib < 2**20:
        raise KvsimError(f"swap_space_gib must be a number of GiB from 0, got {swap_gib}")
    size = max(plan.block_bytes for plan in plans)
    count = int(swap_gib * GIB) // size
    cpu = Cache("cpu", count * size, count * (found.block_tokens or 0), device="cpu")
    return replace(found, caches=(*found.caches, cpu), warnings=(*found.warnings, f"# CPU blocks: {count}"))


def _layout_notes(plans: list[Plan], pages: list[list[vllm_layout.Page]], setup: Setup, model: ModelSpec) -> list[str]:
    notes = []
    kinds = {p.kind for found in pages for p in found}
    padding = plans[0].padding
    if padding:
        largest = max(sum(1 for f in pages for p in f if p.kind == k) for k in kinds)
        notes.append(f"{padding} padding layers, may waste at most {padding / largest * 100:.2f}% of the pool")
    if "state" in kinds and len(plans[0].groups) > 1 and setup.block > 16:
        notes.append(f"attention blocks grew to {setup.block} tokens so that a page holds a recurrent state")
    if kinds & {"sliding", "chunked"} and setup.release.batches(1) == 1:
        notes.append("from 0.26 vLLM reserves two batches of max_num_batched_tokens beside each window (async "
                     "scheduling): pass version for those")
    if any(x.attention and x.attention.kind in ("sliding", "chunked") for x in model.layers) and kinds == {"full"}:
        notes.append(f"vLLM {setup.release.text} charges the windowed layers for the whole sequence")
    return notes


def _interval_notes(pools: tuple[Pool, ...], plans: list[Plan], setup: Setup) -> list[str]:
    ends = []
    for end in ("low", "mid", "high"):
        blocks = _blocks(plans, [getattr(pool.left, end) for pool in pools])
        ends.append((blocks, _longest(plans, setup, blocks)))
    tightest = min(pools, key=lambda pool: pool.left.mid)
    return [f"estimated {tightest.describe()}",
            f"blocks {ends[1][0]} ({ends[0][0]} to {ends[2][0]}), longest request {ends[1][1]} tokens "
            f"({ends[0][1]} to {ends[2][1]})"]  # fmt: skip
