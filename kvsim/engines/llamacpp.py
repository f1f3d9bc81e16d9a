"""KV memory as llama.cpp allocates it (llama-kv-cache*.cpp, llama-memory-recurrent.cpp), to the byte."""

from __future__ import annotations

from kvsim.engines.llamacpp_caches import (
    Setup,
    attention_caches,
    draft_caches,
    other_caches,
    padded,
    refusals,
    state_caches,
)
from kvsim.engines.llamacpp_flags import cache_types, realise
from kvsim.engines.llamacpp_layers import devices, plan
from kvsim.engines.llamacpp_types import checked
from kvsim.engines.llamacpp_version import Rules, rules
from kvsim.engines.result import Memory
from kvsim.errors import KvsimError
from kvsim.method import Method
from kvsim.model import ModelSpec
from kvsim.workload import whole

__all__ = ["ALIASES", "NAMES", "hold", "memory", "realise"]
NAMES = ("llama.cpp", "llamacpp", "llama-server", "llama-cpp")
ALIASES = {
    "c": "n_ctx", "ctx-size": "n_ctx", "ctx": "n_ctx", "ctk": "type_k", "cache-type-k": "type_k", "ctv": "type_v",
    "cache-type-v": "type_v", "np": "n_parallel", "parallel": "n_parallel", "n_seq_max": "n_parallel",
    "kvu": "kv_unified", "ub": "n_ubatch", "ubatch-size": "n_ubatch", "b": "n_batch", "batch-size": "n_batch",
    "fa": "flash_attn", "ngl": "n_gpu_layers", "gpu-layers": "n_gpu_layers", "ts": "tensor_split",
    "nkvo": "no_kv_offload", "ctkd": "type_k_draft", "cache-type-k-draft": "type_k_draft", "ctvd": "type_v_draft",
    "cache-type-v-draft": "type_v_draft",
}  # fmt: skip
MAX_SLOTS = 256


def memory(
    model: ModelSpec,
    *,
    n_ctx: int = 0,
    type_k: str = "f16",
    type_v: str = "f16",
    n_parallel: int | None = None,
    kv_unified: bool | None = None,
    n_ubatch: int = 512,
    n_batch: int | None = None,
    swa_full: bool = False,
    flash_attn: bool | str = "auto",
    n_rs_seq: int = 0,
    mla: bool | None = None,
    mtp: bool = False,
    type_k_draft: str = "f16",
    type_v_draft: str = "f16",
    n_gpu_layers: int | None = None,
    tensor_split: tuple[float, ...] | None = None,
    no_kv_offload: bool = False,
    version: str | None = None,
) -> Memory:
    """Bytes of every cache for these flags; the flags have llama.cpp's meaning.

    n_ctx: total over the slots unless unified, 0 = the model's own; n_parallel: -1 is llama-server's automatic choice
    (4 unified slots), None one slot; n_batch: caps n_ubatch where given; n_rs_seq: states kept for speculative
    rollback; mla: whether the file has latent-attention tensors (None: as the version does); mtp: a draft context over
    the model's multi-token-prediction layers; n_gpu_layers, tensor_split: split `caches` by device; version: a build
    or a date. Raises KvsimError where llama.cpp refuses to start.
    """
    now = rules(version)
    notes: list[str] = []
    flash = _flash(flash_attn, now)
    slots, unified = _slots(n_parallel, kv_unified, now)
    pad = 256 if now.pad_always or (flash and now.flash_exists) else 32
    total = padded(_context(model, n_ctx, notes), pad)
    streams = 1 if unified or not now.streams else slots
    found = plan(model, now.mla if mla is None else mla and now.mla, now.mla_v, now.swa_cache)
    notes += found.notes
    where = devices(model.n_layers + model.next_n_layers, n_gpu_layers, tensor_split, now.output_first)
    setup = Setup(
        types=(checked(type_k, "type_k"), checked(type_v, "type_v")),
        draft_types=(checked(type_k_draft, "type_k_draft"), checked(type_v_draft, "type_v_draft")),
        cells=total if streams == 1 else padded(total // slots, pad),
        streams=streams,
        slots=slots,
        pad=pad,
        margin=_margin((n_ubatch, n_batch, n_rs_seq), total, now, notes),
        copies=slots * (1 + n_rs_seq),
        flash=flash,
        swa_full=swa_full,
        where=tuple("CPU" for _ in where) if where and no_kv_offload else where,
        now=now,
    )
    notes += refusals(found, setup)
    if n_parallel is None and (found.windowed or found.recurrent):
        notes.append("one slot assumed: llama-server's automatic choice is 4 unified slots (n_parallel=-1), "
                     "which multiplies recurrent state and sliding windows")  # fmt: skip
    attention = attention_caches(found, setup)
    others = other_caches(found, setup)
    if mtp:
        others += draft_caches(model, found, setup)
        if not model.next_n_layers:
            notes.append("mtp: the model does not say how many prediction layers it has, one is assumed")
    states = state_caches(found, setup)
    return Memory(
        engine="llama.cpp",
        kv_bytes=sum(c.bytes for c in (*attention, *others)),
        k_bytes=sum(c.k_bytes or 0 for c in attention),
        v_bytes=sum(c.v_bytes or 0 for c in attention),
        caches=(*attention, *others),
        state_bytes=sum(s.bytes for s in states),
        states=states,
        tokens=setup.cells * streams,
        warnings=tuple(dict.fromkeys(notes)),
    )


def hold(method: Method, model: ModelSpec, *, tokens: int, sequences: int, tensor: int = 1, pipeline: int = 1) -> int:
    """Bytes of cache and states on the fullest device with the flags of `realise`: a slot of its own a sequence."""
    k, v = cache_types(method)
    shares = (1.0,) * (tensor * pipeline)
    found = memory(model, n_ctx=padded(tokens, 256) * sequences, type_k=k, type_v=v, n_parallel=sequences,
                   kv_unified=False, tensor_split=shares if len(shares) > 1 else None)  # fmt: skip
    held: dict[str | None, int] = {}
    for part in (*found.caches, *found.states):
        held[part.device] = held.get(part.device, 0) + part.bytes
    return max(held.values(), default=0)


def _flash(value: bool | str, now: Rules) -> bool:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value).strip().lower()
    text = {"1": "on", "0": "off", "true": "on", "false": "off", "enabled": "on", "disabled": "off"}.get(text, text)
    if text not in ("on", "off", "auto"):
        raise KvsimError(f"flash_attn must be on, off or auto, got {value!r}")
    return text == "on" or (text == "auto" and now.auto_fa)


def _slots(n_parallel: int | None, unified: bool | None, now: Rules) -> tuple[int, bool]:
    if n_parallel is not None and n_parallel < 0:
        slots, automatic = (4, True) if now.auto_slots else (1, False)
    else:
        slots, automatic = 1 if n_parallel is None else n_parallel, False
    whole(slots, "n_parallel", low=1, high=MAX_SLOTS)
    return slots, automatic if unified is None else unified


def _context(model: ModelSpec, n_ctx: int, notes: list[str]) -> int:
    whole(n_ctx, "n_ctx", high=2**31)
    if n_ctx == 0:
        if not model.max_context:
            raise KvsimError("n_ctx=0 means the model's own context, which this model does not state: give n_ctx")
        notes.append(f"n_ctx is the model's {model.max_context}; llama.cpp lowers it by itself where memory is short")
        return model.max_context
    return n_ctx


def _margin(batches: tuple[int, int | None, int], total: int, now: Rules, notes: list[str]) -> int:
    """Cells that a sliding cache holds beyond its window: one micro-batch (a whole batch in the first builds)."""
    n_ubatch, n_batch, n_rs_seq = batches
    whole(n_ubatch, "n_ubatch", low=1, high=2**20)
    whole(n_rs_seq, "n_rs_seq", high=256)
    if n_batch is not None:
        whole(n_batch, "n_batch", low=1, high=2**20)
    if now.swa_batch:
        return min(n_batch or 2048, total)
    if n_batch is None and n_ubatch > 2048:
        notes.append(f"llama.cpp caps n_ubatch at n_batch (2048 unless given): {n_ubatch} needs -b {n_ubatch} too")
    return max(min(n_ubatch, n_batch or n_ubatch, total), n_rs_seq + 2 if n_rs_seq else 1)
