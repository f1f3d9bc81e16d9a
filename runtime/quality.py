"""`kvsim quality`: what methods cost a model in quality, measured on real text and kept as evidence."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvsim.cli_answers import split_methods
from kvsim.cli_options import Count, print_json
from kvsim.errors import KvsimError
from kvsim.evidence import Evidence, own_path
from runtime.files import write_whole
from runtime.quality_grid import QUICK, full_grid, preset_methods
from runtime.quality_run import Bench, Sizes, quick, rounded, run
from runtime.quality_subjects import Subject, Text, load_subject, load_text, use_threads
from runtime.shipped import check_counts, check_out


@click.command("quality", context_settings={"help_option_names": ["--help", "-h"]})
@click.option(
    "--model",
    default="smollm2-135m",
    metavar="M",
    help="A Hugging Face model's folder, or a packaged one.  [smollm2-135m]",
)
@click.option(
    "--text", "text_file", type=click.Path(), metavar="FILE", help="Text to measure on.  [Python's own reference]"
)
@click.option("--methods", "--method", metavar="S[,S..]", help="Methods to measure.  [every preset]")
@click.option("--segments", type=Count(), default=None, metavar="N", help="Pieces of text.  [8; 4 for @ on_write]")
@click.option(
    "--prompt", type=Count(), default=None, metavar="T", help="Tokens of a piece that are compressed.  [1024]"
)
@click.option("--scored", type=Count(), default=None, metavar="K", help="Tokens after them that are scored.  [128]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of random matrices.  [0]")
@click.option("--quick", "fast", is_flag=True, help="A dozen methods on three short pieces: a first look.")
@click.option(
    "--full", "everything", is_flag=True, help="The whole grid that the shipped evidence covers; can be resumed."
)
@click.option("--tasks", is_flag=True, help="Retrieval tasks instead of text: needles, key-value pairs, variables.")
@click.option(
    "--bounds", is_flag=True, help="How far methods are from what is provably possible, on this model's own rows."
)
@click.option(
    "--allocate", is_flag=True, help="Bits by layer and side under a byte budget, against the uniform choice."
)
@click.option(
    "--others", is_flag=True, help="Other libraries' caches (quanto, HQQ, kvpress) at equal bytes beside methods here."
)
@click.option(
    "--out",
    type=click.Path(),
    metavar="FILE",
    help="JSON lines to append to; the JSON of --tasks and the like.  [your evidence, which fit prefers]",
)
@click.option("--threads", type=int, default=None, metavar="N", help="Threads of the processor.  [torch's choice]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    model: str,
    text_file: str | None,
    methods: str | None,
    segments: int | None,
    prompt: int | None,
    scored: int | None,
    seed: int,
    fast: bool,
    everything: bool,
    tasks: bool,
    bounds: bool,
    allocate: bool,
    others: bool,
    out: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure what methods cost a model: divergence, agreement, perplexity, attention error, with 95% intervals.

    Every segment's prompt runs once, uncompressed; each method then takes its rows and answers for the tokens that
    follow, as it would while generating. Rows that the file holds already are not measured again.
    """
    if threads is not None:
        use_threads(threads)
    if fast and everything:
        raise KvsimError("quality: --quick and --full contradict each other; give one")
    asked = {k: v for k, v in {"segments": segments, "prompt": prompt, "scored": scored}.items() if v is not None}
    check_counts(**asked)
    named = split_methods(methods, "--methods") if methods is not None else None
    reports = {"tasks": tasks, "bounds": bounds, "allocate": allocate, "quality_others": others}
    wanted = [name for name, told in reports.items() if told]
    if wanted:
        _check_reports(wanted, out)
    sizes = replace(quick(Sizes(seed=seed)) if fast else Sizes(seed=seed), **asked)
    subject = load_subject(model)
    texts = load_text(subject.tokenizer, text_file)
    if wanted:
        _reports(wanted, subject, texts, sizes, named, out, as_json)
        return
    bench = Bench(subject, texts, sizes)
    head_dim = max(x.attention.k_dim for x in bench.spec.layers if x.attention)
    chosen = named or (QUICK if fast else full_grid(head_dim) if everything else preset_methods(head_dim))
    path = Path(out) if out else own_path()
    with progress(len(chosen)) as said:
        rows = list(run(bench, chosen, path, said))
    if not rows:
        raise KvsimError(f"quality: none of the {len(chosen)} methods could be measured; the lines above say why")
    if as_json:
        print_json({"rows": [r.to_json() for r in rows], "out": str(path)})
        return
    click.echo("\n".join(lines(rows)))
    click.echo(f"{subject.name} on {texts.name}: {len(rows)} rows in {path}")


def _check_reports(names: Sequence[str], out: str | None) -> None:
    """KvsimError, before anything runs, where reports were asked for in a way that cannot be."""
    if out is not None and len(names) > 1:
        raise KvsimError("quality: --out holds one report; ask for tasks, bounds, allocate and others one by one")
    check_out(out)


def _reports(
    names: Sequence[str], subject: Subject, texts: Text, sizes: Sizes, named: list[str] | None, out: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print what the modules of these names report, or keep it in a file as the evidence keeps it."""
    for name in names:
        module = import_module(f"runtime.{name}")
        found = module.report(subject, texts, sizes, named)
        if out is not None:
            write_whole(Path(out), kept_text(found))
        if as_json:
            print_json(found)
        else:
            click.echo("\n".join(module.lines(found)))


def kept_text(found: dict[str, Any]) -> str:
    """A report as a file keeps it: JSON whose lists of numbers take one line each."""
    text = json.dumps(tidy(found), allow_nan=False, indent=1)
    return re.sub(r"\[[\s\d.,e+-]+\]", lambda numbers: "[" + " ".join(numbers[0][1:-1].split()) + "]", text) + "\n"


def tidy(found: Any) -> Any:
    """Figures to the digits that a rerun gives again."""
    if isinstance(found, dict):
        return {k: tidy(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [tidy(v) for v in found]
    return rounded(found) if isinstance(found, float) else found


Said = Callable[[str, Evidence | None, str], None]


@contextmanager
def progress(count: int) -> Iterator[Said]:
    """A bar on stderr where that is a terminal, a line a method where it is not; what cannot run is said either way."""
    if not sys.stderr.isatty():

        def tell(method: str, row: Evidence | None, reason: str) -> None:
            click.echo(f"{method}: KL {row.kl:g}" if row else f"{method}: left out: {reason}", err=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("the uncompressed model", total=count)

        def move(method: str, row: Evidence | None, reason: str) -> None:
            if row is None:
                bar.console.print(f"{method}: left out: {reason}", markup=False)
            bar.update(task, advance=1, description=method[:40])

        yield move


def lines(rows: list[Evidence]) -> list[str]:
    """A table: least loss first."""
    width = min(70, max([len(r.method) for r in rows], default=6))
    found = [
        f"{'method':{width}}  {'bits':>5} {'kept':>5}  {'KL':>9} {'95% interval':>19}  {'top-1':>6}  {'ppl x':>7}  "
        f"segments"
    ]
    for r in sorted(rows, key=lambda r: r.kl):
        between = f"{r.kl_low:.2g} - {r.kl_high:.2g}"
        found.append(
            f"{r.method[:width]:{width}}  {r.bits:5.2f} {r.kept:5.0%}  {r.kl:9.2g} {between:>19}  {r.top1:6.3f}  "
            f"{r.ppl_ratio:7.3f}  {r.segments}"
        )
    return found
