"""`kvsim quality --others`: caches of other libraries on the same model, text and bytes, beside methods from here.

Every one of them takes the same prompt rows that the methods here take, by its own code, and answers for the same
tokens in the model's own attention: transformers' quantized caches with quanto and HQQ, kvpress's scores.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.evidence import Evidence
from kvsim.method import parse_method
from runtime.quality_reference import Reference, handed
from runtime.quality_run import Bench, Sizes, interval, rounded
from runtime.quality_scoring import compared
from runtime.quality_subjects import Subject, Text

TAIL = 128
"""Rows that transformers' caches keep in full precision before they quantize, its default."""

OURS = (
    f"int(bits=4,residual={TAIL},flush=all)",
    f"k:int(bits=4,group=64,axis=channel,residual={TAIL},flush=all) v:int(bits=4,residual={TAIL},flush=all)",
    f"int(bits=2,residual={TAIL},flush=all)",
    f"k:int(bits=2,group=64,axis=channel,residual={TAIL},flush=all) v:int(bits=2,residual={TAIL},flush=all)",
    f"k:int(bits=2,group=64,axis=channel,rope=pre,residual={TAIL},flush=all) v:int(bits=2,residual={TAIL},flush=all)",
    f"rotated(bits=4,residual={TAIL},flush=all)",
    f"rotated(bits=2,residual={TAIL},flush=all)",
    *(f"{policy}(budget=0.25)" for policy in ("snapkv", "ada", "pyramid")),
    *(f"snapkv(budget=0.25,score={score})" for score in ("knorm", "keydiff", "expected")),
    "snapkv(budget=0.25,window=64)",
    "snapkv(budget=0.25,sinks=4)",
    "ada(budget=0.25,sinks=4)",
)
KEEP = 0.25
"""Share of the prompt that kvpress's presses keep here."""

PRESSES = ("KnormPress", "SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress", "TOVAPress", "KeyDiffPress")


@dataclass(frozen=True)
class Other:
    """A cache of another library: its name, which library, and how it is filled and held for one segment.

    fill(reference of one segment) -> (a transformers cache, bits stored for each value of the full cache).
    """

    name: str
    library: str
    package: str
    fill: Callable[[Reference], tuple[Any, float]]


def report(subject: Subject, text: Text, sizes: Sizes, methods: Sequence[str] | None = None) -> dict[str, Any]:
    """Rows of other libraries and of methods here; for each of the former the best of the latter at no more bytes."""
    bench = Bench(subject, text, sizes)
    if any(x.attention and x.attention.window for x in bench.spec.layers):
        raise KvsimError("quality --others needs a model without sliding layers: theirs are not compressed there")
    if sizes.scored > TAIL:
        raise KvsimError(f"quality --others scores at most {TAIL} tokens: transformers' caches quantize again after")
    rows, skipped = [], []
    for maker in (_quantized, _presses):
        for found in maker(bench):
            if isinstance(found, dict):
                skipped.append(found)
                continue
            try:
                rows.append(_measured(bench, found))
            except (TypeError, AttributeError, ValueError, RuntimeError) as problem:
                # written for another release of torch or transformers: the table goes on without it
                skipped.append({"name": found.name, "reason": f"does not run here: {problem}".splitlines()[0][:200]})
    for method in methods or OURS:
        try:
            rows.append(_own(bench, method))
        except KvsimError as problem:
            skipped.append({"name": str(method), "reason": str(problem)})
    return {
        "model": subject.name,
        "model_hash": subject.hash,
        "text": text.name,
        "text_hash": text.hash,
        "segments": sizes.segments,
        "prompt": sizes.prompt,
        "scored": sizes.scored,
        "seed": sizes.seed,
        "rows": rows,
        "pairs": [_paired(r, [o for o in rows if o["by"] == "kvsim"]) for r in rows if r["by"] != "kvsim"],
        "skipped": skipped,
    }


# -- transformers' quantized caches ----------------------------------------------------------------------------------


def _quantized(bench: Bench) -> Iterator[Other | dict[str, str]]:
    for backend, package, axes in (("quanto", "optimum-quanto", (0, -1)), ("hqq", "hqq", (0, 1))):
        if missing := _missing(package):
            yield {"name": f"transformers {backend}", "reason": missing}
            continue
        for bits in (4, 2):
            for axis in axes:
                name = f"QuantizedCache({backend}, nbits={bits}, axis={axis})"
                yield Other(name, "transformers", package, partial(_fill_quantized, bench, backend, bits, axis))


def _fill_quantized(bench: Bench, backend: str, bits: int, axis: int, found: Reference) -> tuple[Any, float]:
    from transformers import QuantizedCache

    config = bench.subject.model.config
    cache = QuantizedCache(backend, config, bits, axis, axis, q_group_size=64, residual_length=TAIL)
    for index, rows in enumerate(found.prompt):
        cache.update(rows.k, rows.v, index)
    held = sum(_held_bytes(x) for layer in cache.layers for x in (layer._quantized_keys, layer._quantized_values))
    return cache, 8 * held / sum(rows.k.numel() + rows.v.numel() for rows in found.prompt)


def _held_bytes(quantized: Any) -> int:
    """Bytes of a quanto or HQQ tensor: codes as they are packed, scales and zeros at 16 bits as a bf16 model has."""
    if isinstance(quantized, tuple):
        codes, meta = quantized
        return int(codes.nbytes + 2 * (meta["scale"].numel() + meta["zero"].numel()))
    codes = getattr(quantized._data, "_data", quantized._data)
    shift = getattr(quantized, "_shift", None)
    return int(codes.nbytes + 2 * (quantized._scale.numel() + (0 if shift is None else shift.numel())))


# -- kvpress ---------------------------------------------------------------------------------------------------------


def _presses(bench: Bench) -> Iterator[Other | dict[str, str]]:
    if missing := _missing("kvpress"):
        yield {"name": "kvpress", "reason": missing}
        return
    try:
        kvpress = _imported_unpatched("kvpress")
    except (ImportError, RuntimeError) as problem:
        yield {"name": "kvpress", "reason": f"cannot be imported: {problem}".splitlines()[0][:200]}
        return
    presses = {name: getattr(kvpress, name)(compression_ratio=1 - KEEP) for name in PRESSES}
    pressed = Pressed(bench.subject.model, presses)
    for name in PRESSES:
        yield Other(f"{name}({1 - KEEP:g})", "kvpress", "kvpress", partial(pressed.fill, name))


def _imported_unpatched(name: str) -> Any:
    """A module that wraps every attention function of transformers when imported, without those wraps.

    They are for heads that mask rows of their own, which no press here does, and they take arguments by position.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as known

    before = dict(known.items())
    module = importlib.import_module(name)
    for key, function in before.items():
        known[key] = function
    return module


class Pressed:
    """The presses' own choices of rows, asked after each layer of one prefill as their hooks would ask."""

    def __init__(self, model: Any, presses: dict[str, Any]) -> None:
        self.model, self.presses = model, presses
        self.kept: dict[tuple[int, ...], dict[str, list[tuple[Tensor, Tensor]]]] = {}

    def fill(self, name: str, found: Reference) -> tuple[Any, float]:
        """A cache of the rows that a press keeps of one segment, and their bits."""
        from transformers import DynamicCache

        key = tuple(found.tokens.flatten().tolist())
        if key not in self.kept:
            self.kept[key] = self._choose(found)
        cache, kept = DynamicCache(), self.kept[key][name]
        for index, (k, v) in enumerate(kept):
            cache.update(k, v, index)
        return cache, 16 * sum(k.shape[2] for k, _ in kept) / (len(kept) * found.prompt_tokens)

    def _choose(self, found: Reference) -> dict[str, list[tuple[Tensor, Tensor]]]:
        model, handles = self.model, []
        kept: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.presses}

        def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            rows = found.prompt[module.layer_idx]
            for name, press in self.presses.items():
                kept[name].append(press.compress(module, kwargs["hidden_states"], rows.k, rows.v, None, kwargs))

        for press in self.presses.values():
            press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress's own context does
            handles.append(layer.self_attn.register_forward_hook(after, with_kwargs=True))
        try:
            model(found.tokens[:, : found.prompt_tokens], use_cache=False, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
            for layer in model.model.layers:
                del layer.self_attn.rotary_emb
        return kept


# -- the table -------------------------------------------------------------------------------------------------------


def _missing(package: str) -> str:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: pip install {package}"
    return ""


def _measured(bench: Bench, other: Other) -> dict[str, Any]:
    """Segment by segment, since some of these group values across a batch; the scored tokens attend at once."""
    found, bits, parts = bench.reference, 0.0, []
    for i in range(len(found.tokens)):
        one = found.of(slice(i, i + 1))
        with torch.no_grad():
            cache, bits = other.fill(one)
            logits = bench.subject.model(
                one.scored, **handed(bench.subject.model, cache), position_ids=one.scored_positions
            ).logits
        parts.append(compared(one.logits, logits, one.targets))
    kl, top1, nll, full = (torch.cat(x) for x in zip(*parts, strict=True))
    version = importlib.metadata.version(other.package)
    return _row(other.name, f"{other.library} ({other.package} {version})", bits, kl, top1, nll - full)


def _row(name: str, by: str, bits: float, kl: Tensor, top1: Tensor, extra: Tensor) -> dict[str, Any]:
    mean, low, high = interval(kl)
    return {
        "name": name,
        "by": by,
        "prompt_bits": rounded(bits),
        "kl": rounded(mean),
        "kl_low": rounded(max(0.0, low)),
        "kl_high": rounded(high),
        "top1": rounded(float(top1.mean())),
        "ppl_ratio": rounded(float(extra.mean().exp())),
        "segment_kl": [rounded(float(x), 3) for x in kl],
    }


def _own(bench: Bench, text: str) -> dict[str, Any]:
    from kvsim.evidence import stored_bits

    method = parse_method(text)
    row: Evidence = bench.measure(method)
    return {
        "name": row.method,
        "by": "kvsim",
        "prompt_bits": rounded(stored_bits(method, bench.sizes.prompt, 0, bench.spec)),
        **{k: getattr(row, k) for k in ("kl", "kl_low", "kl_high", "top1", "ppl_ratio")},
        "segment_kl": list(row.segment_kl),
    }


def _paired(other: dict[str, Any], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """The best method here at no more bytes than another library's, and whether it loses no more."""
    able = [o for o in ours if o["prompt_bits"] <= other["prompt_bits"] * 1.001]
    best = min(able, key=lambda o: o["kl"], default=None)
    if best is None:
        return {"other": other["name"], "ours": "", "ratio": None, "at_least_as_good": False, "segments_won": 0}
    won = sum(a <= b for a, b in zip(best["segment_kl"], other["segment_kl"], strict=True))
    return {
        "other": other["name"],
        "ours": best["name"],
        "ratio": rounded(best["kl"] / other["kl"], 3) if other["kl"] else None,
        "at_least_as_good": best["kl"] <= other["kl"],
        "segments_won": won,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a table: by bytes, then by loss."""
    width = min(74, max(len(r["name"]) for r in found["rows"])) if found["rows"] else 6
    out = [
        f"{found['model']} on {found['text']}, {found['segments']} x {found['prompt']}+{found['scored']} tokens; bits: "
        "stored for each value of the prompt, scales at 16 bits",
        f"{'cache':{width}}  {'by':32} {'bits':>6} {'KL':>9} {'95% interval':>19} {'top-1':>7} {'ppl x':>8}",
    ]
    for r in sorted(found["rows"], key=lambda r: (round(r["prompt_bits"], 1), r["kl"])):
        between = f"{r['kl_low']:.2g} - {r['kl_high']:.2g}"
        out.append(
            f"{r['name'][:width]:{width}}  {r['by'][:32]:32} {r['prompt_bits']:6.2f} {r['kl']:9.3g} {between:>19} "
            f"{r['top1']:7.3f} {r['ppl_ratio']:8.3f}"
        )
    for p in found["pairs"]:
        verdict = "at least as good" if p["at_least_as_good"] else "worse"
        better = f"{p['ours']}: KL x {p['ratio']:g}, {p['segments_won']} segments won" if p["ours"] else "none as small"
        out.append(f"{p['other']}: here {better}; {verdict}")
    out += [f"left out: {s['name']}: {s['reason']}" for s in found["skipped"]]
    return out
