"""`kvsim ranks`: ranks that move while decoding, and ranks that were learned, against fixed ones at equal bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from kvsim.adaptive_steps import cache_part, decision, ranked_step
from kvsim.cli_options import Count
from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.ranks import HeadState, cache_bytes, level, limit_bytes, lost, rounded_ranks
from runtime.cache import spec_of
from runtime.dynamic_rank import DynamicRankCache, Mode
from runtime.quality_reference import Reference, handed, reference
from runtime.quality_run import interval, rounded
from runtime.quality_scoring import compared
from runtime.quality_subjects import Subject, Text, load_subject, load_text
from runtime.rank_learning import Learned, RankNetwork, relaxed_loss, spectra_of, train
from runtime.sensitivity import weights
from runtime.shipped import check_counts, check_out, earlier, finish, labelled, numbers, write
from runtime.step_time import WARM, beside, timed_steps

PIECE, PIECES = 256, 4
"""Text that weights and the network learn from; none of it is scored."""


def head_weights(model: Any, pieces: Tensor) -> Tensor:
    """What a squared error costs in each (layer, side, head): mean squared gradient of the loss, largest 1."""
    per = [torch.stack([k.mean((0, 2, 3)), v.mean((0, 2, 3))]) for k, v in weights(model, pieces, "gradient")]
    found = torch.stack(per).float()
    return found / found.max()


def scored(subject: Subject, found: Reference, cache: DynamicRankCache) -> dict[str, Any]:
    """KL and top-1 after the prompt, fed `every` tokens at a time; bytes at the end and at most, within a sequence."""
    with cache, torch.no_grad():
        cache.take(found)
        logits, most = [], cache.nbytes()
        for part in found.scored.split(cache.every, dim=1):
            logits.append(subject.model(part, **handed(subject.model, cache)).logits)
            most = max(most, cache.nbytes())
        predicted = cache_bytes(cache.states(), cache.bits)
        if cache.nbytes() != predicted:
            raise KvsimError(f"ranks: {cache.nbytes()} bytes held, {predicted} predicted")
        kl, top1, nll, full = compared(found.logits, torch.cat(logits, dim=1), found.targets)
        mean, low, high = interval(kl)
        count = len(found.tokens)
        first, last = (np.stack(cache.decisions[at]) for at in (slice(0, count), slice(-count, None)))
        return {"kl": rounded(mean), "kl_low": rounded(max(0.0, low)), "kl_high": rounded(high),
                "segment_kl": [rounded(float(x)) for x in kl], "top1": rounded(float(top1.mean())),
                "ppl_ratio": rounded(float((nll - full).mean().exp())), "bytes": cache.nbytes(), "predicted": predicted,
                "most_bytes": most, "rank_k": rounded(float(last[:, :, 0].mean())),
                "rank_v": rounded(float(last[:, :, 1].mean())), "rank_least": int(last.min()),
                "rank_most": int(last.max()), "moved": int(np.abs(last - first).sum() / count),
                "ranks_by_layer": last.mean((0, 2, 3)).round(1).tolist()}


def step_times(subject: Subject, device: HardwareProfile, found: Reference, cache: DynamicRankCache) -> dict[str, Any]:
    """A step of the first segment, token by token, and the first decision in it: predicted and measured.

    Predicted from the ranks halfway to the decision, and from those before it.
    """
    first, states = found.of(slice(0, 1)), dict[int, list[HeadState]]()
    count = min(cache.every + WARM, int(first.scored.shape[1]))
    with cache:
        cache.take(first)

        def noted(i: int) -> None:
            if i in (count // 2, cache.every - 1):
                states[i] = cache.states()

        took = timed_steps(subject.model, cache, first.scored[:, :count], before=noted)
    spec = replace(spec_of(subject.model), dtype="fp32")
    predicted = ranked_step(spec, states[count // 2], device)
    row: dict[str, Any] = beside("step", predicted, took.step)
    row |= beside("cache", cache_part(spec, predicted), took.cache)
    if took.decisions:
        waiting = [replace(s, tail=s.tail + 1) for s in states[cache.every - 1]]
        decided = decision(spec, waiting, device, cache.mode == "dynamic")
        row |= beside("decision", decided, took.decisions[0])
    return row


def check_rank(subject: Subject, rank: int) -> None:
    """KvsimError where ranks exceed a head's width: told before anything is run."""
    width = min(layer.attention.k_dim for layer in spec_of(subject.model).layers if layer.attention)
    if rank > width:
        raise KvsimError(f"--rank {rank} exceeds the {width} channels of a head of {subject.name}; give fewer")


def changed(text: Text, other: Text, count: int, prompt: int, scored_tokens: int) -> Tensor:
    """Segments whose text changes after the prompt: the first text's tokens, then the other's."""
    first, second = text.segments(count, prompt), other.segments(count, scored_tokens + 1)
    return torch.cat([first, second], dim=1)


def decoding(subject: Subject, found: Reference, share: float, weigh: Tensor, every: int, name: str,
             device: HardwareProfile, done: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Uniform, static and dynamic at the same limit of bytes, with and without weights of heads.

    done: rows of an earlier run, given as they are.
    """
    ways: list[tuple[str, Mode, Tensor | None]] = [
        ("uniform, as svd", "uniform", None), ("uniform", "uniform", None), ("static by energy", "static", None),
        ("static by weighted energy", "static", weigh), ("dynamic by energy", "dynamic", None),
        ("dynamic by weighted energy", "dynamic", weigh),
    ]
    horizon, known = int(found.scored.shape[1]), {(r["text"], r["share"], r["way"]): r for r in done}
    for way, mode, own in ways:
        if (name, share, way) in known:
            yield known[name, share, way]
            continue
        apart = way != "uniform, as svd"

        make = partial(DynamicRankCache, subject.model, share, weights=own, mode=mode, every=every, horizon=horizon,
                       centre=apart, sinks=4 * apart)
        end = found.prompt_tokens + horizon
        limit = len(found.tokens) * limit_bytes(spec_of(subject.model), share, end, 32)
        row = {"text": name, "way": way, "share": share, "limit": limit} | scored(subject, found, make())
        if row["most_bytes"] > limit:
            raise KvsimError(f"--shares {share:g}: {limit:,} bytes are fewer than the {row['most_bytes']:,} that the "
                             "first rows, means and notes take; give a larger share")
        yield row | step_times(subject, device, found, make())


def learned(subject: Subject, found: Reference, pieces: Tensor, weigh: Tensor, rank: int, every: int,
            seed: int) -> dict[str, Any]:
    """The survey's AdaptiveRankCache against water-filling: energy lost and KL on text that neither was made on."""
    seen, prompts = reference(subject.model, pieces, pieces.shape[1] - 2), spectra_of(found, weigh)
    groups, width = prompts.shape[1:]
    total = rank * groups
    network, losses = train(spectra_of(seen, weigh), total, seed)
    even = rounded_ranks(np.full(groups, float(rank)), total, width)
    average = level(spectra_of(seen, weigh).double().mean(0).numpy(), total)
    rows = []
    for name in ("uniform", "untrained network", "trained network", "water-filling of other text", "water-filling"):
        gone, figures = [], []
        for i, energies in enumerate(prompts):
            ranks = {
                "uniform": lambda e: even,
                "untrained network": lambda e: Learned(RankNetwork(groups, width, seed)).ranks(e, total),
                "trained network": lambda e: Learned(network).ranks(e, total),
                "water-filling of other text": lambda e: average,
                "water-filling": lambda e: level(e.double().numpy(), total),
            }[name](energies)
            gone.append(lost(energies.double().numpy(), ranks))
            shape = (len(found.prompt), 2, groups // (2 * len(found.prompt)))
            cache = DynamicRankCache(subject.model, 1.0, mode="static", every=every, ranks=ranks.reshape(shape))
            figures.append(scored(subject, found.of(slice(i, i + 1)), cache))
        rows.append({"ranks": name, "energy_lost": rounded(float(np.mean(gone))),
                     "kl": rounded(float(np.mean([f["kl"] for f in figures]))),
                     "top1": rounded(float(np.mean([f["top1"] for f in figures]))),
                     "bytes": sum(f["bytes"] for f in figures)})
        click.echo(f"{name}: energy lost {rows[-1]['energy_lost']:g}, KL {rows[-1]['kl']:g}", err=True)
    with torch.no_grad():
        relaxed = float(np.mean([float(relaxed_loss(e, network(e, total), 0.5)) for e in prompts]))
    return {"rank": rank, "directions": total, "rows": rows, "relaxed_lost": rounded(relaxed),
            "first_loss": rounded(losses[0]), "last_loss": rounded(losses[-1]), "texts": len(pieces)}


@click.command("ranks")
@click.option("--model", default="smollm2-135m", metavar="M", help="A folder with weights, or a packaged model.")
@click.option("--text", "text_file", type=click.Path(), metavar="FILE", help="Text.  [Python's own reference]")
@click.option("--other", "other_file", type=click.Path(exists=True), metavar="FILE",
              help="A text of another kind that follows the prompt, where the text changes.  [none]")
@click.option("--shares", default="0.6,0.4", metavar="X[,X..]", help="Of the uncompressed bytes.  [0.6,0.4]")
@click.option("--rank", type=Count(), default=32, metavar="R", help="Mean rank of the learned ones.  [32]")
@click.option("--segments", type=Count(), default=3, metavar="N", help="Pieces of text.  [3]")
@click.option("--prompt", type=Count(), default=512, metavar="T", help="Tokens of the prompt.  [512]")
@click.option("--scored", "count", type=Count(), default=64, metavar="K", help="Tokens that are scored.  [64]")
@click.option("--every", type=Count(), default=32, metavar="N", help="Rows between two decisions.  [32]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the network.  [0]")
@click.option("--device", metavar="FILE", help="A profile that `kvsim calibrate` wrote here.  [the newest one kept]")
@click.option("--out", type=click.Path(), metavar="FILE", help="Keep the result as JSON; what it holds already stays.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(model: str, text_file: str | None, other_file: str | None, shares: str, rank: int, segments: int,
            prompt: int, count: int, every: int, seed: int, device: str | None, out: str | None, as_json: bool) -> None:
    """Measure ranks here: uniform, decided once, decided again while decoding, and learned; and what a step takes."""
    from runtime.measure import profile_here

    torch.set_num_threads(1)
    check_counts(rank=rank, segments=segments, prompt=prompt, scored=count, every=every)
    check_out(out)
    wanted = numbers(shares, "--shares", 0, 1)
    profile = profile_here(device)
    subject = load_subject(model)
    check_rank(subject, rank)
    text = load_text(subject.tokenizer, text_file)
    pieces = torch.stack(text.between(segments, prompt + count + 1, PIECES, PIECE))
    weigh = head_weights(subject.model, pieces)
    texts = {"the same text": reference(subject.model, text.segments(segments, prompt + count + 1), prompt)}
    other = None
    if other_file:
        other = load_text(subject.tokenizer, other_file)
        texts["a change of text"] = reference(subject.model, changed(text, other, segments, prompt // 2, 4 * count),
                                              prompt // 2)
    result = labelled("ranks", subject, text, seed) | {
        "segments": segments, "prompt": prompt, "scored": count, "every": every, "device": profile.name,
        "other": other.hash if other else None,
    }
    done, result["rows"] = earlier(result, out), []
    for name, found in texts.items():
        for share in wanted:
            for row in decoding(subject, found, share, weigh, every, name, profile, done):
                result["rows"].append(row)
                write(result, out)
                click.echo(f"{row['text']}, {row['share']:g}, {row['way']}: KL {row['kl']:g}", err=True)
    result["learned"] = learned(subject, texts["the same text"], pieces, weigh, rank, every, seed)
    finish(result, out, as_json)
