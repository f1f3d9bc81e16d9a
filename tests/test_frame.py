"""The house itself: who imports whom, twins, no leftovers, a README that tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvsim import readme
from kvsim.parts import parts

ROOT = Path(__file__).resolve().parents[1]
PART_FOLDERS = ("formats", "bases", "tokens")
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "runtime", "sklearn", "tensorly")
# What stands in a later line may import what stands before it, never the other way round.
ORDER = (
    ("errors", "workload", "model", "hardware"),
    ("settings", "parts"),
    PART_FOLDERS,
    ("method", "grammar"),
    ("record",),
    ("layout", "work", "cost", "prediction"),
    ("plan", "grid"),
    ("report", "report_plan", "report_record", "report_lists"),
    ("cli", "cli_answers", "cli_engines", "cli_lists", "cli_runtime"),
)
KVSIM = sorted(ROOT.glob("kvsim/**/*.py"))
PARTS = [
    p for folder in PART_FOLDERS for p in sorted((ROOT / "kvsim" / folder).glob("*.py")) if p.name != "__init__.py"
]
CODE = [p for folder in ("kvsim", "runtime", "tests") for p in sorted((ROOT / folder).rglob("*.py"))]


def name_of(file: Path) -> str:
    """kvsim/formats/int.py -> kvsim.formats.int"""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def imports(file: Path, everywhere: bool) -> Iterator[str]:
    """Dotted names that a module imports: at module level only, or in its functions too; type checking aside."""
    pending: list[ast.AST] = list(tree_of(file).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and any(word in ast.dump(node.test) for word in ("TYPE_CHECKING", "__main__")):
            pending += node.orelse
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


@cache
def needs(file: Path) -> frozenset[str]:
    """Modules of kvsim that a module imports at module level."""
    known = {name_of(f) for f in KVSIM}
    found = set()
    for dotted in imports(file, everywhere=False):
        module = dotted if dotted in known else dotted.rpartition(".")[0]
        if module in known and module != "kvsim":
            found.add(module)
    return frozenset(found)


def reach(name: str, seen: tuple[str, ...] = ()) -> set[str]:
    """Everything that a module needs, directly or not; fails on a circle."""
    assert name not in seen, f"a circle of imports: {' -> '.join((*seen, name))}"
    return _reach(name, seen)


_REACHED: dict[str, set[str]] = {}


def _reach(name: str, seen: tuple[str, ...]) -> set[str]:
    if name not in _REACHED:
        found: set[str] = set()
        for other in needs(FILES[name]):
            found |= {other} | reach(other, (*seen, name))
        _REACHED[name] = found
    return _REACHED[name]


FILES = {name_of(f): f for f in KVSIM}


def level(name: str) -> int | None:
    """The line of ORDER that a module stands in; None for a helper, which takes its place from what it imports."""
    top = name.removeprefix("kvsim.").split(".")[0]
    identity = name in ("kvsim.formats.full", "kvsim.bases.identity", "kvsim.tokens.keep")
    return None if identity else next((i for i, line in enumerate(ORDER) if top in line), None)


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_module_reaches_above_itself(name):
    mine = level(name)
    reached = reach(name)
    if mine is not None:
        above = sorted(r for r in reached if (theirs := level(r)) is not None and theirs > mine)
        assert not above, f"{name} stands below {above}"


@pytest.mark.parametrize("file", KVSIM, ids=name_of)
def test_kvsim_imports_nothing_heavy_and_never_runtime(file):
    at_start = {dotted.split(".")[0] for dotted in imports(file, everywhere=False)}
    assert not at_start & {*HEAVY, "scipy"}
    later = {dotted.split(".")[0] for dotted in imports(file, everywhere=True)}
    assert not later & {"runtime", "torch", "transformers"}


@pytest.mark.parametrize("file", PARTS, ids=name_of)
def test_a_part_imports_no_other_part_and_nothing_that_knows_time(file):
    own = name_of(file)
    others = {name_of(p) for p in PARTS} - {own}
    above = {f"kvsim.{m}" for line in ORDER[3:] for m in line} | {"kvsim.engines", "kvsim.hardware", "kvsim.kernels"}
    for dotted in imports(file, everywhere=True):
        module = dotted if dotted in FILES else dotted.rpartition(".")[0]
        assert module not in others, f"{own} imports the part {module}"
        assert module not in above, f"{own} imports {module}"
    words = {n.id for n in ast.walk(tree_of(file)) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree_of(file)) if isinstance(n, ast.Attribute)}
    assert not [w for w in words if "seconds" in w]


def test_cost_names_no_part():
    file = ROOT / "kvsim" / "cost.py"
    folders = tuple(f"kvsim.{folder}" for folder in PART_FOLDERS)
    assert not [d for d in imports(file, everywhere=True) if d.startswith((*folders, "kvsim.method", "kvsim.grammar"))]
    texts = {n.value for n in ast.walk(tree_of(file)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    # A model's own attention window is an argument of kernels; it only shares its name with the token policy.
    assert not texts & set(parts()) - {"window"}


@pytest.mark.parametrize("file", sorted(ROOT.glob("kvsim/engines/*.py")), ids=name_of)
def test_engines_stand_on_models_devices_and_methods_alone(file):
    too_high = {f"kvsim.{m}" for line in ORDER[4:] for m in line}
    for dotted in imports(file, everywhere=True):
        assert dotted not in too_high
        assert dotted.rpartition(".")[0] not in too_high


@pytest.mark.parametrize("folder", PART_FOLDERS)
def test_every_part_has_its_twin(folder):
    there = ROOT / "runtime" / folder
    if not there.is_dir():
        pytest.skip(f"runtime/{folder} does not exist yet: the running half is built after the analytic one")
    mine, theirs = ({p.name for p in f.glob("*.py")} for f in (ROOT / "kvsim" / folder, there))
    assert sorted(mine - theirs) == [], f"kvsim/{folder} has parts without a twin in runtime/{folder}"
    assert sorted(theirs - mine) == [], f"runtime/{folder} has twins of no part in kvsim/{folder}"


def test_one_file_holds_one_part():
    names = {}
    for kind in parts().values():
        names.setdefault(kind.__module__, []).append(kind.name)
    assert {name_of(p) for p in PARTS} == set(names)
    assert not {m: n for m, n in names.items() if len(n) != 1}


@pytest.mark.parametrize("file", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_short_and_says_what_it_is(file):
    text = file.read_text("utf-8")
    assert text.count("\n") <= 350
    if file.parent.name != "data" and text.strip():
        assert ast.get_docstring(tree_of(file)), f"{file.name} has no docstring"
    assert file.name not in ("utils.py", "helpers.py", "misc.py", "common.py")


# Written apart, so that this file does not find itself.
LEFTOVERS = re.compile(
    "|".join(("/wo" + "rk/", "/ro" + "ot/", r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b",
              "NotImpl" + "ementedError", r"except Exc" + r"eption\b", r"except" + r":", r"break" + r"point\(",
              "pdb" + r"\.set_trace", "<<<<" + "<<<", ">>>>" + ">>>"))
)  # fmt: skip


def texts() -> list[Path]:
    """Text files of the project, generated folders aside."""
    kinds = (".py", ".md", ".toml", ".txt", ".json", ".csv")
    found = [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in kinds or p.name == "Makefile")]
    for folder in (".ci", "kvsim", "runtime", "hardware_profiles", "notebooks", "tests"):
        found += [p for p in (ROOT / folder).rglob("*") if p.is_file() and not _generated(p.relative_to(ROOT / folder))]
    return sorted(p for p in found if p.suffix in (*kinds, "") and p.stat().st_size < 2**20)


def _generated(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def test_no_machine_paths_and_no_leftovers():
    found = []
    for file in texts():
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if LEFTOVERS.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_readme_is_what_the_code_says():
    text = (ROOT / "README.md").read_text("utf-8")
    assert readme.written(text) == text, "README.md is out of date: make readme"


def test_the_tree_names_every_file_once():
    names = re.findall(r"^  (\S+\.py) ", readme.tree(), re.MULTILINE)
    folders = [f for f in readme.folders() if f not in readme.WHOLE]
    expected = [p.name for f in sorted(folders) for p in sorted((ROOT / f).glob("*.py")) if p.name != "__init__.py"]
    assert names == expected
    inside = {str(p.parent.relative_to(ROOT)) for p in CODE if p.parts[len(ROOT.parts)] != "tests"}
    assert inside <= set(readme.folders()), "a folder with code that is no package: give it an __init__.py"


def test_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_importing_kvsim_brings_nothing_heavy(capsys):
    code = (
        "import sys, time; start = time.perf_counter(); import kvsim; took = time.perf_counter() - start;"
        f"print([m for m in {(*HEAVY, 'scipy', 'rich', 'click')!r} if m in sys.modules]); print(took)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy, took = done.stdout.splitlines()
    with capsys.disabled():
        print(f"\nimport kvsim: {float(took) * 1e3:.0f} ms")
    assert heavy == "[]"


def test_a_whole_plan_needs_no_torch():
    code = (
        "import sys, kvsim; m = kvsim.load_model('llama-3.1-8b'); d = kvsim.load_device('rtx-4090');"
        "assert kvsim.fit(m, d, kvsim.Workload(1, 8192)).chosen;"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_constraints_pin_what_the_project_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [
        d for group in (project["dependencies"], *(extras[e] for e in ("runtime", "eval", "dev"))) for d in group
    ]
    names = {re.split(r"[\[<>=]", d)[0].lower() for d in declared} - {"kvsim"}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split() if "==" in line)
    assert names <= {n.lower() for n in pinned}
    assert pinned["torch"] == "2.13.0"
