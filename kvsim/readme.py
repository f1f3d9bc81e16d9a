"""`python -m kvsim.readme`: write the parts of README.md that follow from the code; a test says when that is due."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvsim.errors import KvsimError
from kvsim.knowledge import method_rows, preset_rows

QUESTION = ("fit", "--model", "llama-3.1-8b", "--device", "rtx-4090", "--prompt", "128k", "--batch", "1")
WIDTH = 112

FOLDERS = {
    ".ci": "what continuous integration runs: `make test`",
    "hardware_profiles": "one TOML file a device, each number with its source; `families/`: calibrated coefficients",
    "kvsim": "numbers only: numpy, scipy, click and rich, never torch",
    "kvsim/architectures": "families of `config.json`, each read exactly or refused",
    "kvsim/bases": "bases, one file a part",
    "kvsim/data": "model facts, presets and engine tables, with sources",
    "kvsim/engines": "how serving engines account for memory, and what their logs say",
    "kvsim/formats": "number formats and corrections, one file a part",
    "kvsim/plot": "pictures: records, plans, sweeps or DataFrames in, matplotlib axes out",
    "kvsim/tokens": "token policies, one file a part",
    "notebooks": "walk-throughs, outputs stripped",
    "runtime": "the same parts, running in torch",
    "runtime/bases": "twins, same file names",
    "runtime/formats": "twins, same file names",
    "runtime/tokens": "twins, same file names",
    "tests": "`kvsim/` runs without torch; `runtime/` with it; `data/` holds measured facts with sources",
}
WHOLE = (".ci", "hardware_profiles", "kvsim/data", "kvsim/bases", "kvsim/formats", "kvsim/tokens", "notebooks",
         "runtime/bases", "runtime/formats", "runtime/tokens", "tests")  # fmt: skip
"""Folders that the tree names without their files: what lies there is told by their line."""

TOP = {
    "LICENSE": "Apache-2.0",
    "Makefile": "demo, test, lint, bench",
    "README.md": "this page; `make readme` writes its generated parts",
    "constraints.txt": "versions known to work together",
    "pyproject.toml": "packaging and all configuration",
}


def root() -> Path:
    """The checkout that this file lies in; KvsimError where kvsim is installed without one."""
    found = Path(__file__).resolve().parents[1]
    if not (found / "README.md").is_file() or not (found / "pyproject.toml").is_file():
        raise KvsimError("kvsim.readme works on a checkout: run it in a clone, with PYTHONPATH set to it")
    return found


def answer() -> str:
    """The real output of the question of `make demo`, as a block of text."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "kvsim", *QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root(), check=False)
    if done.returncode:
        raise KvsimError(f"the README's question was not answered: {done.stderr.strip()}")
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
    return "\n".join(["```text", "$ kvsim " + " ".join(QUESTION), *lines, "```"])


def methods() -> str:
    """The parts as a table, then the presets folded away."""
    rows = ["| part | kind | what it does | survey | source |", "| --- | --- | --- | --- | --- |"]
    kinds = {"tokens": "token policy"}
    for r in method_rows():
        cells = (f"`{r['name']}`", kinds.get(r["kind"], r["kind"]), r["summary"], r["survey"], r["source"])
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    rows += ["", "<details><summary>Presets: names for the methods people know</summary>", ""]
    rows += ["| preset | method | what it is |", "| --- | --- | --- |"]
    rows += [f"| `{r['name']}` | `{_cell(r['method'])}` | {_cell(r['summary'])} |" for r in preset_rows()]
    return "\n".join([*rows, "", "</details>"])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def tree() -> str:
    """Every folder and file of the project, one line each, with what its own docstring says it is."""
    lines = [f"{name:28} {line}" for name, line in sorted(TOP.items()) if (root() / name).exists()]
    for folder, line in sorted(folders().items()):
        lines += [f"{folder + '/':28} {line}", *([] if folder in WHOLE else _files(folder))]
    return "\n".join(["```text", *lines, "```"])


def folders() -> dict[str, str]:
    """Folders with what they hold: FOLDERS, and packages that are not named there by their own docstring."""
    found = {folder: line for folder, line in FOLDERS.items() if (root() / folder).is_dir()}
    for half in ("kvsim", "runtime"):
        for start in (root() / half).rglob("__init__.py"):
            found.setdefault(start.parent.relative_to(root()).as_posix(), about(start) or "(no docstring)")
    return found


def _files(folder: str) -> Iterator[str]:
    for file in sorted((root() / folder).glob("*.py")):
        if file.name != "__init__.py":
            yield f"  {file.name:26} {about(file)}"


def about(file: Path) -> str:
    """What a module's docstring says it is: its first line up to a semicolon."""
    text = (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]
    return text.rstrip(".").partition("; ")[0]


def written(text: str) -> str:
    """README text with every generated part as it must be now."""
    for name, make in (("answer", answer), ("methods", methods), ("tree", tree)):
        start, end = f"<!-- {name}: written by `make readme` -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise KvsimError(f"README.md has lost its marks for {name!r}: {start} ... {end}")
        text = f"{before}{start}\n{make()}\n{end}{after}"
    return text


def main() -> None:
    """Write README.md."""
    file = root() / "README.md"
    file.write_text(written(file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
