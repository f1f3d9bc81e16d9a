"""`kvsim train`: a method's projections, ranks and bits learned on a frozen model, and what that bought."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvsim.cli_options import Count, print_json
from kvsim.errors import KvsimError, shown
from runtime.quality_subjects import Subject, Text, load_subject, load_text, use_threads
from runtime.shipped import check_out
from runtime.training import Recipe, Training
from runtime.training_file import calibration, policy_of, resume, save_checkpoint
from runtime.training_report import Held, lines, report, rivals

METHOD = "palu(rank=192) | int(bits=3)"
EVERY = 5
"""Steps between checkpoints."""
QUICK = Recipe("", steps=8, gates=3, prompt=96, scored=64, texts=4)


@click.command("train", context_settings={"help_option_names": ["--help", "-h"]})
@click.option("--model", default="smollm2-135m", metavar="M", help="A Hugging Face model's folder, or a packaged one.")
@click.option("--method", default=METHOD, metavar="S", show_default=True,
              help="Where training starts, and the bytes that it may spend: palu or learned_projection, full or int.")
@click.option("--out", required=True, type=click.Path(), metavar="FILE", help="The calibration to write (safetensors).")
@click.option("--text", "text_file", type=click.Path(), metavar="FILE",
              help="Text to learn from and to hold out of.  [Python's own reference]")
@click.option("--steps", type=Count(), default=None, metavar="N", help="Steps in all.  [400]")
@click.option("--gates", type=Count(), default=None, metavar="N", help="Of these, with open gates.  [120]")
@click.option("--texts", type=Count(), default=None, metavar="N", help="Pieces of text, gone over again.  [48]")
@click.option("--prompt", type=Count(), default=None, metavar="T", help="Tokens of a piece's prompt.  [256]")
@click.option("--scored", type=Count(), default=None, metavar="K", help="Tokens after it that are learned from.  [256]")
@click.option("--rate", type=float, default=None, metavar="R", help="Step size for projections (Adam).  [0.00005]")
@click.option("--gate-rate", type=float, default=None, metavar="R", help="Step size for gates, in bits.  [0.1]")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the order of texts and of rotations.  [0]")
@click.option("--policy", type=click.Path(), metavar="FILE",
              help="Take ranks and bits by relative depth from a file trained on another model.")
@click.option("--held", type=Count(), default=None, metavar="N", help="Held-out pieces that are measured, 1 to 8.  [8]")
@click.option("--quick", is_flag=True, help="A few short steps on a few short pieces: a first look.")
@click.option("--resume", "go_on", is_flag=True, help="Go on from the checkpoint beside --out.")
@click.option("--threads", type=int, default=1, metavar="N", help="Threads; one repeats bit by bit.  [1]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(model: str, method: str, out: str, text_file: str | None, steps: int | None, gates: int | None,
            texts: int | None, prompt: int | None, scored: int | None, rate: float | None, gate_rate: float | None,
            seed: int, policy: str | None, held: int | None, quick: bool, go_on: bool, threads: int,
            as_json: bool) -> None:
    """Train a method's projections to keep a model's answers; ranks and bits of every layer are learned under a budget.

    The model is frozen. Each step compares its next-token distributions with and without the compressed cache (KL);
    rounding passes gradients straight through, and soft gates move ranks and bits at the same bytes until they are
    rounded to whole ones. The rest of the steps train the matrices at those. Afterwards the result is measured on text
    that was held out, beside SVD and Palu at no more bytes.
    """
    use_threads(threads)
    check_out(out)
    for name, value in (("--rate", rate), ("--gate-rate", gate_rate)):
        if value is not None and not 0 <= value <= 1e3:
            raise KvsimError(f"{name} is a step size from 0 to 1000, got {shown(value)}")
    given = {"steps": steps, "gates": gates, "texts": texts, "prompt": prompt, "scored": scored, "rate": rate,
             "gate_rate": gate_rate}
    asked = {k: v for k, v in given.items() if v is not None}
    start = replace(QUICK, method=method) if quick else Recipe(method)
    if "steps" in asked and "gates" not in asked:
        asked["gates"] = min(start.gates, int(0.3 * asked["steps"]))
    if policy is not None:
        asked |= {"policy": policy_of(policy), "gates": asked.get("gates", 0) if gates is not None else 0}
    recipe = replace(start, seed=seed, **asked)  # type: ignore[arg-type]
    target = Path(out)
    apart = Held(8, 256, 64, 2) if quick else Held()
    if held is not None and not 1 <= held <= apart.segments:
        raise KvsimError(f"--held is 1 to {apart.segments} pieces, got {held}")
    apart = replace(apart, count=held) if held is not None else apart
    recipe = replace(recipe, at=apart.prompt + apart.scored)
    subject = load_subject(model)
    text = load_text(subject.tokenizer, text_file)
    size = recipe.prompt + recipe.scored + 1
    training = Training(subject.model, apart.lessons(text, size), recipe)
    _train(training, target, go_on)
    calibration(training).save(target)
    found = _compared(subject, text, training, apart)
    found["out"] = str(target)
    _checkpoint(target).unlink(missing_ok=True)
    if as_json:
        print_json(found)
        return
    click.echo("\n".join(lines(found)))
    click.echo(f"written: {target}; run it with its own method, which the file names:\n{found['method']}")


def _checkpoint(target: Path) -> Path:
    return target.with_name(f"{target.name}.checkpoint")


def _train(training: Training, target: Path, go_on: bool) -> None:
    point = _checkpoint(target)
    if go_on and not point.is_file():
        raise KvsimError(f"--resume: there is no checkpoint {shown(str(point))}; leave --resume away to begin")
    if go_on:
        resume(training, point)
    else:
        training.begin()
    with progress("training", training.recipe.steps, training.step) as move:

        def seen(step: int, kl: float, rate: float) -> None:
            if step % EVERY == 0 or step == training.recipe.steps:
                save_checkpoint(training, point)
            gates = f", bytes {rate:.3f} of the budget's" if training.gates else ""
            move(step, f"step {step}: KL {kl:.4f}{gates}")

        training.run(seen)


def _compared(subject: Subject, text: Text, training: Training, held: Held) -> dict[str, Any]:
    listed, done = rivals(training, held), 0
    with progress("measuring", held.count * len(listed), 0) as move:

        def said(name: str, kl: float) -> None:
            nonlocal done
            done += 1
            move(done, f"{name}: KL {kl:.4f}")

        return report(subject, text, training, held, listed, said)


Move = Callable[[int, str], None]


@contextmanager
def progress(what: str, count: int, first: int) -> Iterator[Move]:
    """A bar on stderr where that is a terminal, some twenty lines where it is not."""
    if not sys.stderr.isatty():

        def tell(step: int, words: str) -> None:
            if step % max(1, count // 20) == 0 or step == count:
                click.echo(f"{what} {step}/{count}: {words}", err=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=count, completed=first)

        def move(step: int, words: str) -> None:
            bar.update(task, completed=step, description=f"{what}: {words}")

        yield move
