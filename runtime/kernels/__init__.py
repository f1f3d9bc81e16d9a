"""Attention of one step over packed rows by compiled kernels, where they apply; the eager version is the oracle."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.kernels.describe import CProblem, reading
from runtime.kernels.load import Library, library
from runtime.kernels.pages import planned
from runtime.kernels.plans import TYPES, Plan
from runtime.kernels.spans import Spans, read_by, rows_apart, spans_of
from runtime.parts import PolicyTwin

if TYPE_CHECKING:
    from runtime.attention import Rule
    from runtime.side import Side
    from runtime.store import Store

CHUNK = 256
"""Chunks of tokens, which threads take one by one, are multiples of it."""
AT_ONCE = 4
"""Query heads of a KV head that are handled together; more of them read the rows again."""
TASKS = 8
"""Tasks a thread at least, where there are rows enough."""
ALONE = 16_384
"""Rows times query heads that one thread attends before another has woken up."""
PLAIN = 256
"""Rows of fp32 below which torch's own attention is as fast."""
Plans = tuple[Plan, Plan]
"""The keys' and the values'."""


def path(store: Store) -> str:
    """Which way a step takes: "fused cpu int4 | int4", or "eager: why"."""
    found = _plans(store)
    why = found if isinstance(found, str) else rows_apart(store)
    if why:
        return f"eager: {why}"
    by = "triton" if found[0].triton else "cpu"  # type: ignore[union-attr]
    return f"fused {by} " + " | ".join(side.chain.format.kernel_format for side in store.sides.values())


def decode(store: Store, q: Tensor, rule: Rule) -> Tensor | None:
    """Output [B, Hq, 1, dv] of one step's queries [B, Hq, 1, dk] over all rows held; None where no kernel applies."""
    if q.shape[2] != 1 or q.dtype not in TYPES or isinstance(plans := _plans(store), str):
        return None
    keys, values = store.keys, store.values
    attended = _by_triton if plans[0].triton else _by_cpu
    # keys that are rotated after they are decoded are rebuilt tile by tile, offset and all
    maps, offset = (None, None) if store.method.k.before_rope else keys.maps()
    back, shift = values.maps()
    if (offset is not None or shift is not None) and not rule.plain:
        return None  # a shift of all logits alike, or of all rows, matters to a cap and to a sink
    out = attended(store, q, q if maps is None else _into(q, maps), rule, plans)
    if back is None or out is None:
        return out
    full = _out_of(out, back)
    return (full if shift is None else full + _spread(shift, q.shape[1]).to(full.dtype)).to(q.dtype)


def _small(store: Store, q: Tensor, rule: Rule) -> bool:
    """Whether torch's own attention takes the rows as they are, and as fast."""
    plain = store.policy is None and all(side.plain and side.basis is None for side in store.sides.values())
    return plain and rule.plain and q.dtype == torch.float32 and store.keys.rows < PLAIN


def _into(q: Tensor, maps: Tensor) -> Tensor:
    """Queries in the latent of their KV head, fp32 [B, Hq, 1, r]."""
    batch, heads, _, width = q.shape
    found = q.reshape(batch, maps.shape[1], -1, width).float() @ maps.float().transpose(2, 3)
    return found.reshape(batch, heads, 1, -1)


def _out_of(latent: Tensor, maps: Tensor) -> Tensor:
    batch, heads, _, width = latent.shape
    return (latent.reshape(batch, maps.shape[1], -1, width).float() @ maps.float()).reshape(batch, heads, 1, -1)


def _spread(offset: Tensor, heads: int) -> Tensor:
    return offset.repeat_interleave(heads // offset.shape[1], dim=1)


def _by_triton(store: Store, q: Tensor, inner: Tensor, rule: Rule, plans: Plans) -> Tensor | None:
    """Rows are asked for with the queries q, attended with those in the latent."""
    from runtime.kernels import triton_decode  # imports Triton, which need not be there

    pairs, turns = q.shape[0] * store.keys.twins.inner.place.heads, store.method.k.before_rope
    rows = triton_decode.rows_of(read_by(store, q), store.keys.rows, pairs, q.device)
    if rows is None or (turns and rows.mode):
        return None
    return triton_decode.attended(store, inner.contiguous(), rule, rows, plans)


def _by_cpu(store: Store, q: Tensor, inner: Tensor, rule: Rule, plans: Plans) -> Tensor | None:
    spans = spans_of(store, q)
    if isinstance(spans, str) or (spans is None and _small(store, q, rule)):
        return None
    return _attended(store, inner.contiguous(), rule, spans, plans)


def _attended(store: Store, q: Tensor, rule: Rule, spans: Spans | None, plans: Plans) -> Tensor:
    keys, values = store.keys, store.values
    found = library()
    assert isinstance(found, Library)
    (k, k_table), (v, v_table) = (reading(s, p).counted(s) for s, p in zip((keys, values), plans, strict=True))
    batch, query_heads = q.shape[:2]
    heads, rows = keys.twins.inner.place.heads, keys.rows
    out = torch.empty((batch, query_heads, 1, values.twins.inner.place.width), dtype=q.dtype)
    sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
    threads = max(1, min(torch.get_num_threads(), batch * query_heads * rows // ALONE + 1))
    problem = CProblem(k=k, v=v, q=q.data_ptr(), out=out.data_ptr(),
                       type=TYPES[q.dtype], batch=batch, heads=heads, queries=query_heads // heads, rows=rows,
                       scaling=rule.scaling, softcap=rule.softcap, sinks=0 if sinks is None else sinks.data_ptr(),
                       chunk=_chunk(batch * heads, rows, threads, query_heads // heads), threads=threads)
    if spans is not None:
        problem.spans, problem.span_at = spans[0].data_ptr(), spans[1].data_ptr()
    found.attend(ctypes.addressof(problem))
    del k_table, v_table  # were used until here
    return out


def _chunk(pairs: int, rows: int, threads: int, queries: int) -> int:
    """Tokens of a task: many enough to share out, few enough to stay in a core's cache where rows are read again."""
    wanted = rows * pairs // (threads * TASKS) if threads > 1 else rows
    most = (32 if queries <= AT_ONCE else 8) * CHUNK
    return max(CHUNK, min(most, -(-wanted // CHUNK) * CHUNK))


def _plans(store: Store) -> Plans | str:
    """Both sides' plans, or why a step over the store is eager."""
    policy = store.policy
    if store.joint:
        return "keys and values share coefficients"
    if policy is not None and (why := _policy_needs(policy)):
        return why
    plans = []
    for name, side in store.sides.items():
        found = _plan(side)
        if isinstance(found, str):
            return f"{name}: {found}"
        plans.append(found)
    if len(plans) < 2:
        return "keys are values too"
    if store.method.k.before_rope and (why := _turn_needs(store, plans[0])):
        return why
    keys, values = store.keys, store.values
    if keys.twins.inner.place.heads != values.twins.inner.place.heads:
        return "keys and values are held in different numbers of heads"
    if keys.rows != values.rows or not keys.rows:
        return "sides hold different rows" if keys.rows else "no rows"
    return plans[0], plans[1]


def _turn_needs(store: Store, plan: Plan) -> str:
    if not plan.triton:
        return "keys are rotated after they are decoded"
    from runtime.kernels import triton_turn  # imports Triton, which need not be there

    return triton_turn.why_not(store)


def _policy_needs(policy: PolicyTwin) -> str:
    if policy.step_weights:
        return f"{policy.part.name} looks at the weights"
    if type(policy).bias is not PolicyTwin.bias:
        return f"{policy.part.name} adds to the logits"
    return ""


def _plan(side: Side) -> Plan | str:
    found = planned(side.format, side.setting.device)
    if isinstance(found, str):
        return found
    if side.fixes:
        return f"{side.fixes[0].part_name} corrects the rows"
    if side.by_block:
        return "blocks have coordinates of their own"
    if side.setting.dtype not in TYPES:
        return f"rows are {side.setting.dtype}"
    rest = side.rest
    if rest is not None and rest.rows and rest.dtype not in TYPES:
        return "the tail's dtype"
    if side.basis is not None and not side.ready:
        return "the basis waits for its first rows"
    return found if found.triton or reading(side, found).alike else "buffers break at different rows"
