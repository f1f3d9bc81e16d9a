"""What training bought: the trained method beside SVD, Palu and formats alone at no more bytes, on text held out."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsim.errors import KvsimError
from kvsim.evidence import stored_bits
from kvsim.formats.int import Int
from kvsim.layout import layer_layout
from kvsim.method import Chain, Method, parse_method
from kvsim.model import ModelSpec
from runtime.cache import CompressedCache
from runtime.quality_forced import take_prompt
from runtime.quality_reference import reference
from runtime.quality_run import interval, learns, machine, rounded, versions
from runtime.quality_scoring import Scores, score
from runtime.quality_subjects import Subject, Text
from runtime.training import Recipe, Training
from runtime.training_file import calibration
from runtime.training_gates import Key, whole_rank

CHOSEN, TRAINED = "its ranks and bits, untrained", "trained"
HELD, PROMPT, SCORED = 8, 1024, 128
"""Segments of the text that training never sees, tokens of their prompts, and tokens that are scored."""


Said = Callable[[str, float], None]
"""(a rival's name, its KL on the segment that was just measured)."""


@dataclass(frozen=True)
class Held:
    """What is held out: the first `count` of `segments` evenly spread pieces of prompt + scored tokens."""

    segments: int = HELD
    prompt: int = PROMPT
    scored: int = SCORED
    count: int = HELD

    @property
    def length(self) -> int:
        """Tokens of a segment, the last target included."""
        return self.prompt + self.scored + 1

    def lessons(self, text: Text, size: int) -> list[Tensor]:
        """All the text between the segments, in pieces of `size` tokens."""
        return text.between(self.segments, self.length, len(text.ids), size)


@dataclass(frozen=True)
class Rival:
    """A method to compare with, what it stands for, and its calibrated tensors if it needs any."""

    name: str
    method: Method
    tensors: Any = None


def cache_bytes(spec: ModelSpec, method: Method, prompt: int, new: int, value_bits: int) -> tuple[int, int]:
    """(bytes of one sequence, bytes of what belongs to the model), as kvsim predicts them."""
    own = model = 0
    for i, layer in enumerate(spec.layers):
        layout = layer_layout(layer, method.at(i, spec.n_layers), prompt, new, value_bits, i, spec.n_layers)
        for b in layout.buffers if layout is not None else ():
            own, model = (own, model + int(b.bytes)) if b.per_model else (own + int(b.bytes), model)
    return own, model


def rivals(training: Training, held: Held) -> list[Rival]:
    """Methods of no more bytes a sequence than the base: prompts' own SVD, the base calibrated, no basis, ablations."""
    base, spec = training.base, training.spec
    limit = stored_bits(base, held.prompt, held.scored, spec)
    # factors come in order of what they carry: cut to the base's rank they are what calibrating it gives
    found = [Rival("uniform, calibrated by SVD", base, training.svd())]
    rope = "pre" if base.k.before_rope else "post"
    form = f"svd(rank={{}},joint=heads,rope={rope}) | {base.k.format}"
    own = _largest(form, _whole(training), limit, held, spec)
    if own is not None:
        found.append(Rival("SVD of each prompt", own))
    plain = _largest("rotated(bits={})", 8, limit, held, spec)
    if plain is not None:
        found.append(Rival("no basis", plain))
    if any(isinstance(p, Int) for p in base.parts()):
        same = {k: getattr(training.layer(k[0]), k[1]) for k in training.sides()}
        found.append(_untrained("uniform, turned for rounding", training, same))
    found.append(_untrained(CHOSEN, training, training.chains))
    if training.recipe.policy:
        recipe = replace(training.recipe, policy=training.recipe.policy[::-1])
        found.append(_untrained("the policy upside down, untrained", training, None, recipe))
    if training.step:
        found.append(Rival(TRAINED, training.method, calibration(training)))
    return found


def _untrained(name: str, training: Training, chains: dict[Key, Chain] | None, recipe: Recipe | None = None) -> Rival:
    """SVD factors of these ranks, turned where they are rounded: where training of such ranks and bits starts."""
    start = replace(recipe or training.recipe, gates=0, steps=0)
    other = Training(training.model, training.pieces, start, factors=training.svd())
    other.begin(chains)
    return Rival(name, other.method, calibration(other))


def _whole(training: Training) -> int:
    key = training.sides()[0]
    chain: Chain = getattr(training.base, key[1])
    place = training.geometries[key[0]].place(key[1], 16)  # type: ignore[arg-type]
    return max(whole_rank(chain, place), place.heads * place.width)


def _largest(form: str, high: int, limit: float, held: Held, spec: ModelSpec) -> Method | None:
    """The method of largest setting within `limit` stored bits, or None."""
    for setting in range(high, 0, -1):
        try:
            method = parse_method(form.format(setting))
            if stored_bits(method, held.prompt, held.scored, spec) <= limit:
                return method
        except KvsimError:  # a setting that this part or place does not take
            continue
    return None


def measured(subject: Subject, text: Text, held: Held, listed: list[Rival], said: Said) -> list[Scores]:
    """Scores of each rival over the held-out segments, one segment at a time; what they share is computed once."""
    parts: list[list[Scores]] = [[] for _ in listed]
    for tokens in text.segments(held.segments, held.length)[: held.count]:
        found = reference(subject.model, tokens[None], held.prompt)
        for rival, scores in zip(listed, parts, strict=True):
            scores.append(score(subject.model, found, rival.method, calibration=rival.tensors))
            said(rival.name, float(scores[-1].kl[0]))
    names = ("kl", "top1", "nll", "full_nll", "attention_error")
    return [Scores(*(torch.cat([getattr(s, n) for s in each]) for n in names)) for each in parts]


def held_bytes(training: Training, text: Text, held: Held) -> int:
    """Bytes that a cache of the trained method really holds after one prompt."""
    tokens = text.segments(held.segments, held.length)[:1, : held.prompt + 2]
    found = reference(training.model, tokens, held.prompt)
    with CompressedCache(training.method, training.model, calibration=calibration(training)) as cache:
        take_prompt(cache, found)
        return cache.nbytes()


def report(subject: Subject, text: Text, training: Training, held: Held, listed: list[Rival],
           said: Said) -> dict[str, Any]:
    """Everything that a reader needs to judge the run, as plain numbers."""
    rows = [_row(training.spec, held, r, s)
            for r, s in zip(listed, measured(subject, text, held, listed, said), strict=True)]
    bits = torch.finfo(next(subject.model.parameters()).dtype).bits
    predicted = sum(cache_bytes(training.spec, training.method, held.prompt, 0, bits))
    recipe = asdict(training.recipe) | {"policy": "taken over" if training.recipe.policy else ""}
    return {
        "model": subject.name, "model_hash": subject.hash, "text": text.name, "text_hash": text.hash,
        "base": str(training.base), "method": str(training.method), "recipe": recipe, "seed": training.recipe.seed,
        "held_out": asdict(held), "predicted_bytes": predicted, "held_bytes": held_bytes(training, text, held),
        "losses": [rounded(x) for x in training.losses], "rows": rows, "date": datetime.date.today().isoformat(),
        "machine": machine(), "versions": versions(),
    }


def _row(spec: ModelSpec, held: Held, rival: Rival, scores: Scores) -> dict[str, Any]:
    kl, low, high = interval(scores.kl)
    own, model = cache_bytes(spec, rival.method, held.prompt, held.scored, 16)
    return {
        "name": rival.name, "method": str(rival.method),
        "bits": rounded(stored_bits(rival.method, held.prompt, held.scored, spec)),
        "sequence_bytes": own, "model_bytes": model, "calibrated": learns(rival.method),
        "kl": rounded(kl), "kl_low": rounded(max(0.0, low)), "kl_high": rounded(high),
        "top1": rounded(float(scores.top1.mean())),
        "ppl_ratio": rounded(math.exp(float((scores.nll - scores.full_nll).mean()))),
        "segment_kl": [rounded(float(x)) for x in scores.kl],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The report as a table, then what training won or lost against each rival."""
    held = found["held_out"]
    yield (f"{found['model']} on {found['text']}: {held['count']} held-out pieces of {held['prompt']} + "
           f"{held['scored']} tokens; KL in nats a token, 95% interval over pieces")
    yield f"{'what':34} {'bits':>5} {'KL':>8} {'95% interval':>17} {'top-1':>6} {'ppl x':>6}"
    for r in found["rows"]:
        between = f"{r['kl_low']:.3g} - {r['kl_high']:.3g}"
        yield f"{r['name']:34} {r['bits']:5.2f} {r['kl']:8.4f} {between:>17} {r['top1']:6.3f} {r['ppl_ratio']:6.3f}"
    names = [r["name"] for r in found["rows"]]
    mine = found["rows"][names.index(TRAINED if TRAINED in names else CHOSEN)]
    for r in found["rows"]:
        if r is not mine:
            ratio = r["kl"] / max(mine["kl"], 1e-12)
            verdict = f"loses {ratio:.2f} times less" if ratio >= 1 else f"loses {1 / ratio:.2f} times MORE"
            yield f"{mine['name']} {verdict} than {r['name']} ({r['method'][:70]})"
    same = "exactly" if found["predicted_bytes"] == found["held_bytes"] else "NOT"
    yield (f"bytes: {found['predicted_bytes']:,} predicted, {found['held_bytes']:,} held after {held['prompt']} "
           f"tokens: {same} the same")


