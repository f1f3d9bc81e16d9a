"""`python -m runtime.multimodal`: pooled patches, films and sound against uniform policies at equal bytes, running."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import click
import torch
from torch import Tensor

from kvsim.configs import load_model
from kvsim.hardware import load_device
from kvsim.method import parse_method
from kvsim.modality import cells
from kvsim.prediction import predict
from kvsim.record import Case
from kvsim.workload import Workload
from runtime.cache import CompressedCache
from runtime.senses import (
    DIGITS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    SEGMENTS,
    Asked,
    Examples,
    Kind,
    Senses,
    loaded,
    saved,
    trained,
)
from runtime.shipped import run_alone

PROMPTS = 200
POOLS: dict[Kind, tuple[tuple[int, int, int], ...]] = {
    "image": ((2, 1, 1), (4, 1, 1)),
    "video": ((1, 2, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1)),
    "audio": ((1, 1, 2), (1, 1, 4), (1, 1, 8)),
}
"""Patches along a side, frames, audio frames that become one row."""


@dataclass(frozen=True)
class Result:
    """One method on one kind of prompt: rows and bytes held after it, KL from the full cache, right answers."""

    kind: str
    method: str
    family: str
    share: float
    rows: int
    held_bytes: int
    predicted_bytes: int
    kl: float
    kl_error: float
    right: float


@torch.no_grad()
def answered(model: Senses, asked: Asked, method: str) -> tuple[Tensor, int, int]:
    """Logits [B, q, vocabulary] of questions asked one after another of a compressed prompt; its bytes and rows."""
    with CompressedCache(method, model.decoder) as cache:
        model.decoder(inputs_embeds=model.embedded(asked), past_key_values=cache)
        held, rows = cache.nbytes(), _most(cache.rows())
        found = [
            model.decoder(inputs_embeds=model.words(asked.questions[:, i : i + 1]), past_key_values=cache).logits
            for i in range(asked.questions.shape[1])
        ]
    return torch.cat(found, 1).float(), held, rows


def _most(rows: Any) -> int:
    """The most rows that any layer, sequence and head holds."""
    return max(map(_most, rows)) if isinstance(rows, list | tuple) else int(torch.as_tensor(rows).max())


def predicted(model: Senses, asked: Asked, method: str) -> int:
    """Bytes that kvsim says the cache holds after the prompt."""
    spec, device = load_model(json.loads(model.decoder.config.to_json_string())), load_device("h100-sxm")
    batch, tokens = asked.content.shape[0], asked.content.shape[1] + 1
    return int(predict(Case(spec, device, parse_method(method), Workload(batch, tokens), kv_dtype="fp32")).cache_bytes)


def rivals(kind: Kind, pool: tuple[int, int, int]) -> list[tuple[str, str]]:
    """(family, method): the pooled prompt, and uniform or importance policies that hold at least as many bytes."""
    space, time, audio = pool
    segments, tokens = SEGMENTS[kind], 65
    kept = cells(segments, space, time, audio).kept(tokens)
    width = 2 * KV_HEADS * HIDDEN // HEADS  # values of a row in a layer, both sides
    rows = -(-kept * (4 * width + 4) // (4 * width))
    every = round(tokens / kept)
    own = f"segments={segments},space={space},time={time},audio={audio}"
    flat = [] if kind == "audio" else [("uniform 1-D mean", f"modal(segments=text1-audio64,audio={every})")]
    return [
        ("modal", f"modal({own})"),
        ("modal, keys before rotation", f"modal({own},rope=pre)"),
        *flat,
        ("stride", f"stride(every={every},recent=1,sinks=1)"),
        ("window", f"window(sinks=1,recent={rows - 1})"),
        ("random", f"topk(budget={rows},score=random,recent=0,sinks=1)"),
        ("key norm", f"topk(budget={rows},score=knorm,recent=0,sinks=1)"),
        ("snapkv", f"snapkv(budget={rows},window=1,kernel=1,sinks=1)"),
    ]


def compared(model: Senses, prompts: int = PROMPTS, seed: int = 1) -> list[Result]:
    """Every kind of prompt, held out, under every pool and its rivals; bytes must be those predicted."""
    found = []
    for kind in get_args(Kind):
        asked = Examples(held_out=True, seed=seed).draw(kind, prompts)
        full, whole, most = answered(model, asked, "full")
        right = _right(full, asked)
        found.append(Result(kind, "full", "full", 1.0, most, whole, predicted(model, asked, "full"), 0.0, 0.0, right))
        for pool in POOLS[kind]:
            for family, method in rivals(kind, pool):
                logits, held, rows = answered(model, asked, method)
                kl = (full.softmax(-1) * (full.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean(1)
                error = float(kl.std() / len(kl) ** 0.5)
                found.append(Result(kind, method, family, held / whole, rows, held, predicted(model, asked, method),
                                    float(kl.mean()), error, _right(logits, asked)))  # fmt: skip
    return found


def _right(logits: Tensor, asked: Asked) -> float:
    return float((logits[..., : DIGITS + 8].argmax(-1) == asked.answers).float().mean())


def lines(found: list[Result]) -> list[str]:
    """A table for people."""
    told = [f"a decoder of {LAYERS} layers trained here on scikit-learn's digits and made-up tones; questions come "
            "after the prompt was compressed"]  # fmt: skip
    for r in found:
        exact = "exact" if r.held_bytes == r.predicted_bytes else f"predicted {r.predicted_bytes:,}"
        told.append(f"{r.kind:6} {r.family:28} {r.share:5.0%} of bytes ({exact})  {r.rows:3} rows  "
                    f"KL {r.kl:.3f} +- {r.kl_error:.3f}  right {r.right:.1%}")  # fmt: skip
    return told


@click.command()
@click.option("--weights", type=click.Path(path_type=Path), help="Trained before, or where to keep it.")
@click.option("--steps", type=click.IntRange(1), default=2000,
              help="Training steps where there are no weights yet (2 minutes on one core).")
@click.option("--prompts", type=click.IntRange(1), default=PROMPTS, help="Held-out prompts of each kind.")
@click.option("--seed", default=0, help="Of weights and training; prompts are drawn with the next.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(weights: Path | None, steps: int, prompts: int, seed: int, out: Path | None) -> None:
    """Train a small model that sees and hears, compress its prompts in many ways, and compare."""
    torch.set_num_threads(1)
    if weights is not None and weights.exists():
        model = loaded(weights)
    else:
        model = trained(steps, seed, 200, None if weights is None else weights.with_suffix(".run"))
        if weights is not None:
            saved(model, weights)
    found = compared(model, prompts, seed + 1)
    click.echo("\n".join(lines(found)))
    if out is not None:
        out.write_text(json.dumps([asdict(r) for r in found], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    run_alone(main)
