"""Run methods over a model and a text and keep a row of evidence for each; what is done already is not done again."""

from __future__ import annotations

import datetime
import gc
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvsim
from kvsim.errors import KvsimError
from kvsim.evidence import Evidence, kept, read, stored_bits
from kvsim.method import Method, parse_method
from kvsim.model import ModelSpec
from runtime.cache import spec_of
from runtime.calibration import calibrate
from runtime.gradients import KINDS, gradient_scores
from runtime.quality_reference import Reference, reference
from runtime.quality_scoring import Scores, score
from runtime.quality_subjects import Subject, Text

PIECES, PIECE = 8, 512
"""Text that calibrated methods learn from: pieces and their tokens, none of which is scored."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: segments of prompt + scored tokens; on_write costs a prefill a method and gets fewer."""

    segments: int = 8
    prompt: int = 1024
    scored: int = 128
    on_write_segments: int = 4
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens of a segment, the last target included."""
        return self.prompt + self.scored + 1

    def segments_of(self, method: Method) -> int:
        """How many segments a method is scored on."""
        return min(self.segments, self.on_write_segments) if method.protocol == "on_write" else self.segments


@dataclass
class Bench:
    """A model and a text, ready to score methods; what all methods need is computed once, when first asked for."""

    subject: Subject
    text: Text
    sizes: Sizes
    spec: ModelSpec = field(init=False)
    _reference: Reference | None = None
    _gradients: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.subject.model)

    @property
    def reference(self) -> Reference:
        """The uncompressed model on all segments."""
        if self._reference is None:
            tokens = self.text.segments(self.sizes.segments, self.sizes.length)
            self._reference = reference(self.subject.model, tokens, self.sizes.prompt)
        return self._reference

    def key(self, method: Method) -> tuple[str, ...]:
        """As Evidence.key."""
        s = self.sizes
        numbers = (s.segments_of(method), s.prompt, s.scored, s.seed)
        return (str(method), self.subject.hash, self.text.hash, *map(str, numbers))

    def measure(self, method: Method) -> Evidence:
        """Score one method; KvsimError where it cannot run on this model."""
        start = time.process_time()
        count = self.sizes.segments_of(method)
        found = self.reference if count == self.sizes.segments else self.reference.of(slice(0, count))
        tensors = self._calibration(method)
        scores = score(
            self.subject.model,
            found,
            method,
            calibration=tensors,
            seed=self.sizes.seed,
            outside=self._scores(method, count),
        )
        return self._row(method, scores, tensors is not None, time.process_time() - start)

    def _calibration(self, method: Method) -> Any:
        if not learns(method):
            return None
        pieces = self.text.between(self.sizes.segments, self.sizes.length, PIECES, PIECE)
        return calibrate(self.subject.model, pieces, method, length=PIECE, seed=self.sizes.seed)

    def _scores(self, method: Method, count: int) -> list[Tensor] | None:
        kind = getattr(method.tokens, "score", "")
        if kind not in KINDS:
            return None
        if kind not in self._gradients:
            prompts = self.reference.tokens[:, : self.sizes.prompt]
            each = [gradient_scores(self.subject.model, p[None], kind) for p in prompts]
            self._gradients[kind] = [torch.cat(layer) for layer in zip(*each, strict=True)]
        return [x[:count] for x in self._gradients[kind]]

    def _row(self, method: Method, scores: Scores, calibrated: bool, seconds: float) -> Evidence:
        kl, kl_low, kl_high = interval(scores.kl)
        top1, top1_low, top1_high = interval(scores.top1)
        ppl, ppl_low, ppl_high = (math.exp(x) for x in interval(scores.nll - scores.full_nll))
        s, n_layers = self.sizes, self.spec.n_layers
        return Evidence(
            model=self.subject.name,
            method=str(method),
            kl=rounded(kl),
            kl_low=rounded(max(0.0, kl_low)),
            kl_high=rounded(kl_high),
            top1=rounded(top1),
            top1_low=rounded(max(0.0, top1_low)),
            top1_high=rounded(min(1.0, top1_high)),
            ppl_ratio=rounded(ppl),
            ppl_low=rounded(ppl_low),
            ppl_high=rounded(ppl_high),
            ppl_full=rounded(math.exp(float(scores.full_nll.mean()))),
            segments=len(scores.kl),
            prompt=s.prompt,
            scored=s.scored,
            kept=rounded(kept(method, s.prompt, s.scored, self.spec)),
            bits=rounded(stored_bits(method, s.prompt, s.scored, self.spec)),
            text=self.text.name,
            text_hash=self.text.hash,
            model_hash=self.subject.hash,
            seed=s.seed,
            machine=machine(),
            date=datetime.date.today().isoformat(),
            versions=versions(),
            calibrated=calibrated,
            seconds=round(seconds, 1),
            segment_kl=tuple(rounded(float(x), 3) for x in scores.kl),
            attention_error=tuple(rounded(float(x), 3) for x in scores.attention_error.mean(0)[:n_layers]),
        )


def learns(method: Method) -> bool:
    """Whether a part of the method has something to learn from texts before it can run, or run well."""
    parts = method.parts()
    asks = any(getattr(p, "calibrated", False) is True or p.name in ("kmeans", "palu", "elitekv") for p in parts)
    scaled = any(p.name == "float8" and getattr(p, "scale", "") == "tensor" for p in parts)
    hessian = any(getattr(p, "by", "") in ("hessian", "attention") for p in parts)
    return asks or scaled or hessian or getattr(method.tokens, "score", "") == "auxiliary"


def interval(x: Tensor) -> tuple[float, float, float]:
    """(mean, low, high) of a 95% t interval over segments; of one segment it is the mean itself."""
    from scipy.stats import t

    values = x.double()
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean, mean
    half = float(t.ppf(0.975, len(values) - 1)) * float(values.std()) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def rounded(x: float, digits: int = 4) -> float:
    """Significant digits that a rerun on the same machine gives again; below 1e-7 it is noise of float32."""
    return 0.0 if abs(x) < 1e-7 else float(f"{x:.{digits}g}")


def machine() -> str:
    """The processor, as the system names it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of what the figures rest on."""
    return {
        "kvsim": kvsim.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


Said = Callable[[str, Evidence | None, str], None]


def run(bench: Bench, methods: Sequence[str | Method], out: Path | None, said: Said) -> Iterator[Evidence]:
    """Measure methods one after another, appending each row to `out` at once; rows that are there are given as is.

    said(method, row or None, reason): called after each. A method that cannot run on this model is said and left out.
    """
    done = {row.key: row for row in (read(out) if out is not None and out.is_file() else ())}
    for text in methods:
        try:
            method = parse_method(text)
            row = done.get(bench.key(method))
            if row is None:
                row = done[bench.key(method)] = bench.measure(method)
                # what watches a run holds it in a circle, and the collector counts objects, not the gigabytes in them
                gc.collect()
                if out is not None:
                    _append(out, row)
        except KvsimError as problem:
            said(str(text), None, str(problem))
            continue
        said(str(text), row, "")
        yield row


def _append(out: Path, row: Evidence) -> None:
    """One line, whole: a half line that an earlier run left behind is cut off first."""
    line = json.dumps(row.to_json(), allow_nan=False) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_file():
        held = out.read_bytes()
        if held and not held.endswith(b"\n"):
            out.write_bytes(held[: held.rfind(b"\n") + 1])
    with out.open("a", encoding="utf-8") as file:
        file.write(line)


def quick(sizes: Sizes) -> Sizes:
    """A first look in a few minutes."""
    return replace(sizes, segments=3, prompt=512, scored=64, on_write_segments=1)
