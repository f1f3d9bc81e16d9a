"""The program `kvsim`: its commands, and one way for every mistake to end: one line on stderr and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import click

from kvsim import cli_adaptive, cli_answers, cli_codesign, cli_compare, cli_engines, cli_lists, cli_report, cli_runtime
from kvsim.cli_options import WRONG_QUESTION, refuse_repeats
from kvsim.errors import KvsimError, did_you_mean, shown

INTERRUPTED = 130


class _ReaderLeft(Exception):
    """Nobody reads standard output any more."""


class Program(click.Group):
    """The group of all commands, ending with 0, 1 or 2 and never with a traceback for what a user typed."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **settings: Any) -> NoReturn:
        """Run one command line and exit."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the caller (`>&-`)
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # a name in another alphabet must not end a plain terminal's answer
                stream.reconfigure(errors="backslashreplace")
        sys.exit(self._status(None if args is None else list(args)))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader that leaves is hidden from click, which would end with the status of no answer."""
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
            return found
        except BrokenPipeError:
            raise _ReaderLeft from None

    def _status(self, args: list[str] | None) -> int:
        try:
            status = super().main(args, prog_name="kvsim", standalone_mode=False)
            return status if isinstance(status, int) else 0
        except _ReaderLeft:
            # The reader has left (`| head`): nothing is wrong, and the interpreter must not try to flush again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (click.ClickException, KvsimError, OSError, MemoryError) as problem:
            return _wrong(_in_one_line(problem))
        except (KeyboardInterrupt, click.exceptions.Abort):
            click.echo("kvsim: interrupted", err=True)
            return INTERRUPTED

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a wrong name is told with the nearest right one."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            raise KvsimError(
                f"command {shown(args[0])} is not known{did_you_mean(args[0], known)}; the commands: {', '.join(known)}"
            )
        found = super().resolve_command(ctx, args)
        if found[1] is not None:
            refuse_repeats(found[1], found[2])
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order they were added, which is the order of use."""
        return list(self.commands)


def _wrong(message: str) -> int:
    """Say one line, whatever the message holds: no line breaks, no control characters."""
    line = " ".join(message.split())
    click.echo("kvsim: " + "".join(c if c.isprintable() else "?" for c in line), err=True)
    return WRONG_QUESTION


def _in_one_line(problem: Exception) -> str:
    """A mistake as what, where, what to do."""
    if isinstance(problem, OSError):
        return f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem.strerror or problem)
    if isinstance(problem, MemoryError):
        return "not enough memory for this question; ask for fewer points at once"
    return _click_line(problem) if isinstance(problem, click.ClickException) else str(problem)


def _click_line(problem: click.ClickException) -> str:
    """What click found wrong on the command line."""
    ctx = getattr(problem, "ctx", None)
    command = ctx.command_path.removeprefix("kvsim").strip() if ctx is not None else ""
    help_line = f"`kvsim {command} --help`" if command else "`kvsim --help`"
    if isinstance(problem, click.NoSuchOption):
        known = _options(ctx)
        near = did_you_mean(problem.option_name, known)
        return f"{command}: no option {shown(problem.option_name)}{near}; {help_line} lists them"
    if isinstance(problem, click.MissingParameter):
        name = problem.param.opts[0] if problem.param is not None else "a value"
        needed = name if name.startswith("-") else name.upper()
        return f"{command} needs {needed}; {help_line} shows how"
    if isinstance(problem, click.BadParameter) and problem.param is not None:
        return f"{problem.param.opts[0]}: {problem.message}"
    return f"{command + ': ' if command else ''}{problem.format_message().rstrip('.')}; {help_line}"


def _options(ctx: click.Context | None) -> Iterable[str]:
    return [o for p in ctx.command.params for o in p.opts] if ctx is not None else []


@click.command(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110},
)
@click.version_option(package_name="kvsim", message="kvsim %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Which way of compressing the KV cache fits a device, what it costs in memory and time, and how sure that is.

    A model is a shipped name, a path to a config.json or a hub id; a device is a shipped name or a profile's path; a
    method is written like `int(bits=4)`, `h2o(budget=0.2) | int(bits=4)` or `kivi-4`. Sizes accept 128k.

    Exit status: 0 answered, 1 nothing fits or a limit is not met, 2 the question is wrong.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _module in (cli_answers, cli_engines, cli_compare, cli_report, cli_lists, cli_runtime, cli_adaptive, cli_codesign):
    for _command in _module.COMMANDS:
        main.add_command(_command)
