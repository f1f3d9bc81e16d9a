"""The commands codesign and multimodal: hardware that would help a method, and prompts of pictures, films and sound."""

from __future__ import annotations

import click

from kvsim.cli_answers import batch_option, method_option, new_option, prompt_option, split_methods
from kvsim.cli_options import Asked, asks, json_option, print_json


@click.command("codesign")
@asks
@method_option
@prompt_option
@new_option
@batch_option
@json_option
def codesign_command(asked: Asked, method: str, prompt: int, new: int, batch: int, as_json: bool) -> None:
    """Say which added hardware would speed up a step."""
    from kvsim.codesign import codesign

    case = asked.case(method, batch, prompt, new)
    found = codesign(case)
    if as_json:
        print_json(found.to_json())
        return
    from kvsim.report import Column, console, duration, quantity, say, table

    out = console()
    say(out, f"{case.method} on {case.model.name}, {case.hardware.name}, {batch} x {prompt + new:,} tokens: a step "
             f"takes {duration(found.step_s)}, most of it {found.dominant}; attention {duration(found.attention_s)} "
             f"({found.attention_term})")  # fmt: skip
    heads = [Column("added"), Column("from", True), Column("step then", True), Column("step at infinite", True),
             Column("saves", True)]  # fmt: skip
    rows = [(a.name, "nothing to gain" if a.least is None else quantity(a.least, a.unit), duration(a.step_s),
             duration(a.limit_s), f"{a.share:.0%}") for a in found.added]  # fmt: skip
    table(out, heads, rows, "each added alone")
    heads = [Column("format"), Column("bits", True), Column("values/s now", True), Column("break-even", True),
             Column("enough", True), Column("", fold=True)]  # fmt: skip
    told = [(f.format, f"{f.bits:g}", _rate(f.now), _rate(f.even), _rate(f.enough), f.verdict) for f in found.formats]
    if told:
        table(out, heads, told, "one layer's attention against full precision")
    limits = [(n, duration(s)) for n, s in found.bounds]
    table(out, [Column("bound"), Column("step", True)], limits, "no addition passes")
    best = found.best
    say(out, "no addition is worth it: the bottleneck lies elsewhere" if best is None else
             f"{best.name} at {quantity(best.least, best.unit)} removes the bottleneck: {duration(found.step_s)} "
             f"becomes {duration(best.step_s)}; assumed and not built: wider intervals, no area, no power")  # fmt: skip


def _rate(value: float | None) -> str:
    from kvsim.report import quantity

    return "-" if value is None else "no limit" if value == float("inf") else quantity(value)


@click.command("multimodal")
@asks
@click.option("--segments", required=True, metavar="S", help="text40-image24x24-video8x448x448px-audio30s-text20.")
@click.option("--methods", metavar="S,S..", help="Besides full and the pooled ones.  [snapkv, int4]")
@click.option("--space", type=int, default=2, help="Patches pooled along each side.  [2]")
@click.option("--time", "frames", type=int, default=2, help="Video frames pooled.  [2]")
@click.option("--audio", type=int, default=2, help="Audio frames pooled; also a stride over cross-attention.  [2]")
@new_option
@batch_option
@json_option
def multimodal_command(asked: Asked, segments: str, methods: str | None, space: int, frames: int, audio: int, new: int,
                       batch: int, as_json: bool) -> None:  # fmt: skip
    """Predict prompts of text, pictures, films and sound."""
    from kvsim.multimodal import answers, pooled

    model, device = asked.load()
    work = pooled(model, segments, batch, new)
    more = split_methods(methods, "--methods") if methods else []
    found = answers(model, device, work, (space, frames, audio), more, weights=asked.weights, kv_dtype=asked.kv_dtype,
                    devices=asked.devices, reserve=asked.reserve, kernel=asked.kernel)  # fmt: skip
    if as_json:
        print_json({"model": model.name, "segments": [{"segment": str(s), "tokens": s.tokens} for s in work.segments],
                    "tokens": work.tokens, "answers": [a.to_json() for a in found]})  # fmt: skip
        return
    from kvsim.report import Column, console, milliseconds, say, size, table

    out = console()
    told = ", ".join(f"{s} = {s.tokens:,} tokens" for s in work.segments)
    say(out, f"{model.name} on {device.name}: {told}; {batch} x {work.tokens:,} tokens")
    heads = [Column("method", fold=True), Column("rows", True), Column("cache", True), Column("cross", True),
             Column("less", True), Column("TTFT ms", True), Column("ms/token", True)]  # fmt: skip
    first = found[0]
    rows = [(a.name, f"{a.rows:,}", size(a.cache_bytes), size(a.cross_bytes), f"{first.held / max(a.held, 1):.1f}x",
             milliseconds(a.prefill_s), milliseconds(a.decode_s)) for a in found]  # fmt: skip
    table(out, heads, rows)


COMMANDS = (codesign_command, multimodal_command)
"""What this module adds to the program."""
