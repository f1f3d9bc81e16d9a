"""Predict each KV line of a llama.cpp start-up log from the log's other lines, or from the model where they lack."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.engines.explain import Finding, Line, first, written
from kvsim.engines.llamacpp_layers import plan
from kvsim.engines.llamacpp_log import KEYWORDS, Context, Print, contexts
from kvsim.engines.llamacpp_types import BLOCKS
from kvsim.engines.llamacpp_widths import (
    MIB,
    Widths,
    a_value,
    bytes_of,
    cuda_tail,
    explanations,
    layer_widths,
    recurrent_layers,
    side_widths,
)
from kvsim.model import ModelSpec

__all__ = ["KEYWORDS", "findings"]
SIZES = {"KiB": 2**10, "MiB": 2**20, "MB": 2**20, "GiB": 2**30}  # llama.cpp's "MB" of 2023 was MiB


def findings(lines: Sequence[Line], model: ModelSpec | None) -> list[Finding]:
    """Findings of every context in the log."""
    result = []
    for server, context in enumerate(first(contexts(lines)), start=1):
        reader = _Reader(context, model, server)
        for item in context.prints:
            result += reader.judge(item)
    return result


class _Reader:
    """One context's prints, each judged with the facts of that context."""

    def __init__(self, context: Context, model: ModelSpec | None, server: int) -> None:
        self.context, self.model, self.server = context, model, server

    def judge(self, item: Print) -> list[Finding]:
        kinds = {"cache": self._cache, "self": self._self, "buffer": self._buffer, "recurrent": self._recurrent,
                 "states": self._states, "required": self._required}  # fmt: skip
        return kinds[item.kind](item)

    def _finding(self, item: Print, name: str, printed: str | None, value: float | None, rule: str, *,
                 unit: str = "MiB", hints: tuple[str, ...] = ()) -> list[Finding]:
        if printed is None:
            return []
        predicted = None if value is None else written(value, printed)
        matches = None if predicted is None else predicted == printed
        engine = "ollama" if item.kind == "required" else "llama.cpp"
        return [Finding(engine, name, printed, unit, predicted, matches, rule, () if matches else hints, item.line,
                        self.server)]  # fmt: skip

    # -- sizes

    def _cache(self, item: Print) -> list[Finding]:
        size, cells, layers, _, streams, type_k, k, type_v, v = item.groups
        rows = int(cells or 0) * int(streams or 1)
        name = "KV cache" if item.role == "kv" else f"{item.role} cache"
        found = self._cells(item, int(cells or 0), int(streams or 1), name)
        options = self._widths(item.role, int(layers or 0))
        return found + self._sides(item, name, (size, k, v), (type_k, type_v), rows, options)

    def _self(self, item: Print) -> list[Finding]:
        size, unit, type_k, k, type_v, v = item.groups
        rows = self.context.get("n_ctx")
        options = self._widths("kv", self.context.get("n_layer"))
        if rows is None:
            return self._finding(item, "KV cache", size, None, "the log does not say n_ctx", unit=unit or "MiB")
        types = (type_k or self.context.types.get("k", "f16"), type_v or self.context.types.get("v", "f16"))
        return self._sides(item, "KV cache", (size, k, v), types, rows, options)

    def _sides(self, item: Print, name: str, printed: tuple[str | None, ...], types: tuple[str | None, str | None],
               rows: int, options: list[Widths]) -> list[Finding]:
        size, k, v = printed
        type_k, type_v = types[0] or "f16", types[1] or "f16"
        if not options or type_k not in BLOCKS or type_v not in BLOCKS:
            lacks = "the log does not say the width of K and V: give --model" if not options else "unknown cache type"
            return self._finding(item, name, size, None, lacks)
        sums = [(bytes_of(w.k, type_k) * rows / MIB, bytes_of(w.v, type_v) * rows / MIB, w) for w in options]
        best = next((s for s in sums if size is not None and written(s[0] + s[1], size) == size), sums[0])
        side_k, side_v, w = best
        rule = f"{w.why}; {rows} cells; K {type_k}, V {type_v}"
        hints = explanations(float(size or 0), w, rows, (type_k, type_v), self.context)
        unit = item.groups[1] if item.kind == "self" and item.groups[1] else "MiB"
        found = self._finding(item, name, size, side_k + side_v, rule, unit=unit, hints=hints)
        found += self._finding(item, name + " K", k, side_k, f"cells x {w.k} values x {a_value(type_k)}", hints=hints)
        found += self._finding(item, name + " V", v, side_v, f"cells x {w.v} values x {a_value(type_v)}", hints=hints)
        return found

    def _buffer(self, item: Print) -> list[Finding]:
        """A device holds whole layers: the printed part must be so many times one layer."""
        device, size = item.groups
        name = f"KV buffer on {device}"
        shape = self._shape(item)
        if shape is None:
            return self._finding(item, name, size, None, "the log does not say the cells and widths of this cache")
        rows, types, options = shape
        for w in options:
            one = (bytes_of(w.k, types[0]) + bytes_of(w.v, types[1])) * rows / MIB / max(1, w.layers)
            if str(device).startswith(("CUDA", "ROCm")):
                one += (cuda_tail(w.k // w.layers, types[0]) + cuda_tail(w.v // w.layers, types[1])) / MIB
            count = round(float(size or 0) / one) if one else 0
            rule = f"{count} of {w.layers} layers, {one:.3f} MiB each"
            if count <= w.layers and size is not None and written(count * one, size) == size:
                return self._finding(item, name, size, count * one, rule)
        one_hint = (f"a layer would be {one:.3f} MiB: the layers on this device may differ in width, or the types do",)
        return self._finding(item, name, size, count * one, rule, hints=one_hint)

    def _shape(self, item: Print) -> tuple[int, tuple[str, str], list[Widths]] | None:
        """Rows, types and widths of the cache that a buffer is part of: from its summary line, else from the facts."""
        after = [p for p in self.context.prints if p.line >= item.line and p.role == item.role]
        for other in after:
            if other.kind == "cache":
                _, cells, layers, _, streams, type_k, _, type_v, _ = other.groups
                options = self._widths(item.role, int(layers or 0))
                rows, types = int(cells or 0) * int(streams or 1), (type_k or "f16", type_v or "f16")
                return (rows, types, options) if options and set(types) <= set(BLOCKS) else None
            if other.kind == "self":
                options = self._widths("kv", self.context.get("n_layer"))
                types = (other.groups[2] or "f16", other.groups[4] or "f16")
                context = self.context.get("n_ctx")
                return (context, types, options) if options and context and set(types) <= set(BLOCKS) else None
        known = self.context.cells.get(item.role) or self.context.get("n_ctx")
        options = self._widths(item.role, None)
        types = (self.context.types.get("k", "f16"), self.context.types.get("v", "f16"))
        return (known, types, options) if known and options and set(types) <= set(BLOCKS) else None

    def _required(self, item: Print) -> list[Finding]:
        size, unit = item.groups
        rows, options = self.context.get("n_ctx"), self._widths("kv", self.context.get("n_layer"))
        if rows is None or not options:
            lacks = "the log lacks --ctx-size or the model's widths"
            return self._finding(item, "memory.required.kv", size, None, lacks, unit=unit or "")
        value = 2 * (options[0].k + options[0].v) * rows / SIZES[unit or "MiB"]
        rule = f"{options[0].why}; {rows} tokens (num_ctx x num_parallel), f16"
        return self._finding(item, "memory.required.kv", size, value, rule, unit=unit or "")

    # -- cells

    def _cells(self, item: Print, cells: int, streams: int, name: str) -> list[Finding]:
        context = self.context
        slots = context.get("n_seq_max") or int(item.groups[3] or 1)
        total = context.get("n_ctx")
        base = context.get("n_ctx_seq") or context.get("n_ctx_per_seq")
        if base is None or streams == 1:
            base = total
        if base is None:
            return []
        if context.get("swa_full") and item.role == "SWA":
            return self._finding(item, name + " cells", str(cells), base, "--swa-full: all of n_ctx", unit="cells")
        if item.role.startswith("DSV4"):
            ratio = 128 if "HCA" in item.role else 4
            blocks = -(-(context.get("n_ctx_seq") or base) // ratio)
            rule = f"one row a {ratio} tokens of a slot, padded to 256"
            return self._finding(item, name + " cells", str(cells), -(-blocks // 256) * 256, rule, unit="cells")
        if item.role != "SWA":
            fits = ((-(-base // pad) * pad, pad) for pad in (256, 32, 1))
            value, pad = next(((c, p) for c, p in fits if c == cells), (-(-base // 256) * 256, 256))
            rule = f"n_ctx over {streams} streams, padded to {pad}"
            return self._finding(item, name + " cells", str(cells), value, rule, unit="cells")
        window, margin = context.get("n_swa"), context.get("n_ubatch")
        if not window and self.model is not None:
            window = max((x.attention.window for x in self.model.layers if x.attention), default=0)
        if not window:
            lacks = "the log does not say the window"
            return self._finding(item, name + " cells", str(cells), None, lacks, unit="cells")
        said = margin is not None
        wanted = window * (slots if streams == 1 else 1) + (margin or 512)
        value = -(-min(base, wanted) // 256) * 256
        if value != cells and min(base, -(-wanted // 32) * 32) == cells:
            value = cells  # builds before 2025-11 padded to 32 without flash attention
        rule = (f"min(n_ctx {base}, window {window} x {slots if streams == 1 else 1} + n_ubatch {margin or 512}"
                f"{'' if said else ', the default'}), padded to 256")  # fmt: skip
        room = cells - window * (slots if streams == 1 else 1)
        hints = [f"n_ubatch of up to {room}"] if room > 0 else []
        hints += ["--swa-full: the sliding cache has the full context"] if cells == base else []
        hints += [f"{n} slots" for n in range(1, 33) if -(-(window * n + (margin or 512)) // 256) * 256 == cells]
        return self._finding(item, name + " cells", str(cells), value, rule, unit="cells", hints=tuple(hints))

    # -- widths

    def _widths(self, role: str, layers: int | None) -> list[Widths]:
        """What the layers of a cache may store, the likeliest first: from the log's facts, else from the model."""
        facts, context = self.context.model, self.context
        if layers == 0:
            return [Widths(0, 0, 0, "no layers")]
        if role == "indexer" or role.startswith("DSV4"):
            rows = "DSV4 CSA" in role or "DSV4 HCA" in role
            one = context.get("n_embd_head_k" if rows else "n_index")
            why = f"{layers} layers x {one} values, K only"
            return [Widths(one * layers, 0, layers, why)] if one and layers else self._of_model(role)
        latent, rope = context.get("n_lora_kv"), context.get("n_rot")
        heads_k, heads_v = side_widths(facts)
        found: list[Widths] = []
        if latent and layers:
            width = latent + (rope or 64)
            both = f"{layers} layers x ({width} + {latent}) values (MLA with V, builds before 2026-01)"
            found += [Widths(width * layers, 0, layers, f"{layers} layers x {width} values, K only (MLA)"),
                      Widths(width * layers, latent * layers, layers, both)]  # fmt: skip
        if heads_k is not None and heads_v is not None:
            chosen = layer_widths(heads_k, heads_v, layers or 0, context.get("n_layer") or 0)
            if context.get("k_only"):
                chosen = [Widths(w.k, 0, w.layers, f"{w.layers} layers, {w.k} values of K only") for w in chosen]
            found += chosen
        return found or self._of_model(role)

    def _of_model(self, role: str) -> list[Widths]:
        if self.model is None:
            return []
        split = plan(self.model, True, False, role in ("SWA", "non-SWA"))
        rows = {"SWA": split.windowed, "indexer": split.indexer}.get(role, split.full)
        for kind, word in (("csa", "CSA"), ("hca", "HCA"), ("indexer", "lightning")):
            if f"DSV4 {word}" in role:
                rows = next((found for name, _, found in split.compressed if name == kind), ())
        if not rows:
            return []
        k, v = sum(r.k for r in rows), sum(r.v for r in rows)
        return [Widths(k, v, len(rows), f"the model's {len(rows)} layers with {k} + {v} values together")]

    # -- state

    def _recurrent(self, item: Print) -> list[Finding]:
        size, cells, _, _, snapshots, _, r, _, s = item.groups
        copies = int(cells or 1) * (1 + int(snapshots or 0))
        per = self._state_values()
        if per is None:
            lacks = "the log does not say the state's sizes or which layers are recurrent: give --model"
            return self._finding(item, "recurrent state", size, None, lacks)
        r_values, s_values, layers = per
        values = [4 * copies * x / MIB for x in (r_values + s_values, r_values, s_values)]
        rule = f"{layers} recurrent layers, f32, {copies} copies (slots x (1 + rs_seq))"
        found = self._finding(item, "recurrent state", size, values[0], rule)
        found += self._finding(item, "recurrent R", r, values[1], "(d_conv - 1) x (d_inner + 2 x groups x d_state)")
        return found + self._finding(item, "recurrent S", s, values[2], "d_state x d_inner")

    def _states(self, item: Print) -> list[Finding]:
        """A device's part of the state: whole layers, as its summary line counts copies (one where there is none)."""
        device, size = item.groups
        per, name = self._state_values(), f"RS buffer on {device}"
        if per is None:
            return self._finding(item, name, size, None, "the log does not say the state's sizes: give --model")
        after = [p.groups for p in self.context.prints if p.kind == "recurrent" and p.line >= item.line]
        copies = int(after[0][1] or 1) * (1 + int(after[0][4] or 0)) if after else self.context.get("n_seq_max") or 1
        one = 4 * copies * (per[0] + per[1]) / per[2] / MIB
        count = round(float(size or 0) / one)
        return self._finding(item, name, size, count * one, f"{count} of {per[2]} recurrent layers, {one:.3f} MiB each")

    def _state_values(self) -> tuple[int, int, int] | None:
        get = self.context.get
        inner, state, conv = get("ssm_d_inner"), get("ssm_d_state"), get("ssm_d_conv")
        layers = recurrent_layers(self.context)
        if inner and state and conv and layers:
            r = (conv - 1) * (inner + 2 * (get("ssm_n_group") or 0) * state)
            return layers * r, layers * state * inner, layers
        if self.model is None:
            return None
        found = plan(self.model, True, False, True).recurrent
        return (sum(x[1] for x in found), sum(x[2] for x in found), len(found)) if found else None
