"""The commands memory and explain: what a serving engine allocates, and what its log says it did."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from kvsim.cli_options import NOTHING_FITS, json_option, leave, model_option, print_json
from kvsim.errors import KvsimError, shown

_NUMBER = re.compile(r"-[\d.].*")


@click.command("memory", context_settings={"ignore_unknown_options": True})
@click.option("--engine", required=True, metavar="E", help="llama.cpp, vllm, sglang, tensorrt-llm, exllamav2 ...")
@model_option
@click.option("--flags", "list_flags", is_flag=True, help="List the flags that this engine takes here.")
@json_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE FLAGS]...")
def memory_command(engine: str, model: str, list_flags: bool, as_json: bool, flags: tuple[str, ...]) -> None:
    """Say what a server allocates with its own flags.

    Flags are the engine's: `--n-ctx 8192 -ctk q8_0` for llama.cpp, `--max-model-len 32k --pool-bytes 20e9` for vllm.
    """
    from kvsim.configs import load_model
    from kvsim.engines import flag_names, memory

    if list_flags:
        click.echo("\n".join("--" + name.replace("_", "-") for name in flag_names(engine)))
        return
    found = memory(engine, load_model(model), **read_flags(flags))
    if as_json:
        print_json(found.to_json())
    else:
        from kvsim.report import console
        from kvsim.report_lists import print_memory

        print_memory(console(), found)
    leave(NOTHING_FITS if found.refused else 0)


def read_flags(words: Sequence[str]) -> dict[str, str]:
    """`--n-ctx 8192 --type-k=q8_0 --swa-full` as names and texts; a flag without a value is switched on."""
    found: dict[str, str] = {}
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-") or not word.lstrip("-"):
            raise KvsimError(f"memory: {shown(word)} belongs to no flag; flags are written --name value")
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            value = "on"
            if i < len(words) and (not words[i].startswith("-") or _NUMBER.fullmatch(words[i])):
                value = words[i]
                i += 1
        if name in found:
            raise KvsimError(f"memory: flag {shown(name)} is given twice")
        found[name] = value
    return found


@click.command("explain")
@click.argument("logfile", type=click.Path())
@click.option("--model", metavar="M", help="The model it served, where the log does not say enough.")
@json_option
def explain_command(logfile: str, model: str | None, as_json: bool) -> None:
    """Set the figures of a server's log beside predicted ones.

    The log is what llama.cpp, ollama, vLLM or SGLang print at start-up; each figure comes with its rule.
    """
    from kvsim.configs import load_model
    from kvsim.engines.explain import explain

    found = explain(logfile, None if model is None else load_model(model))
    if as_json:
        print_json(found.to_json())
        return
    from kvsim.report import console, say

    out = console()
    if found.findings:
        out.print(found.table())
    for note in found.notes:
        say(out, f"note: {note}", indent=6)


COMMANDS = (memory_command, explain_command)
