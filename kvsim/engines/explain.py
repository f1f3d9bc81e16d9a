"""A server's start-up log, its KV figures beside what the rules predict: reading, safely, any file a user points at.

What an engine prints is known to one module `explain_<engine>.py` of this package, which states
`KEYWORDS` (bytes without colour codes inside: only lines that hold one are read) and
`findings(lines: Sequence[Line], model: ModelSpec | None) -> list[Finding]`.
Nothing of a log's text is repeated in the answer: numbers, cache types and device names only (and this project's own
name of a model that the log names).
"""

from __future__ import annotations

import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

if TYPE_CHECKING:
    from rich.table import Table

MAX_BYTES = 64 * 2**20
MAX_LINES = 5_000
MAX_WIDTH = 1536
MAX_TEXT = 2**20
MAX_SERVERS = 16
PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files, which are refused: what they unfold to has no bound."""
T = TypeVar("T")
ANSI = re.compile(r"\x1b\[[0-9;?]{0,32}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|\x1b.")
SOURCE = re.compile(
    r"\((?:[\w.-]{1,64} )?pid=\d{1,10}\)|\[\w{0,24}\d\]|\b(?:TP|DP|PP|EP|Worker|Engine)[\w-]{0,24}|^[\w.-]{1,64}\s*\|"
)


@dataclass(frozen=True)
class Line:
    """One line of a log: `text` from the keyword on, `prefix` what stood before it, `source` the process it names."""

    number: int
    text: str
    prefix: str
    source: str


@dataclass(frozen=True)
class Finding:
    """One printed figure beside its prediction, both written with the digits of the print.

    predicted is None and matches None where the log and the model do not say enough (`rule` says what lacks).
    hints: for a mismatch, inputs that would explain it. server: counts the servers of the file from 1.
    """

    engine: str
    name: str
    printed: str
    unit: str
    predicted: str | None
    matches: bool | None
    rule: str
    hints: tuple[str, ...] = ()
    line: int = 0
    server: int = 1


@dataclass(frozen=True)
class Explanation:
    """All findings of a file, in its order, and what could not be read."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was predicted and every prediction is what was printed."""
        judged = [f.matches for f in self.findings if f.matches is not None]
        return bool(judged) and all(judged)

    def to_json(self) -> dict[str, Any]:
        """The fields of `kvsim explain --json`: findings, notes, counts of matches, mismatches and unknowns."""
        counts = Counter({True: "matches", False: "mismatches", None: "unknown"}[f.matches] for f in self.findings)
        rows = [asdict(f) | {"hints": list(f.hints)} for f in self.findings]
        totals = {word: counts[word] for word in ("matches", "mismatches", "unknown")}
        return {"ok": self.ok, **totals, "findings": rows, "notes": list(self.notes)}

    def table(self) -> Table:
        """A table for people: printed beside predicted, with the rule, and hints below a mismatch."""
        from rich.table import Table

        found = Table(title="printed beside predicted")
        for name, justify in (("line", "right"), ("server", "left"), ("figure", "left"), ("printed", "right"),
                              ("predicted", "right"), ("", "center"), ("rule", "left")):  # fmt: skip
            found.add_column(name, justify=justify, overflow="fold", no_wrap=name != "rule")  # type: ignore[arg-type]
        for f in self.findings:
            mark = {True: "=", False: "differs", None: "?"}[f.matches]
            rule = "\n".join((f.rule, *(f"could be: {hint}" for hint in f.hints)))
            found.add_row(str(f.line), f"{f.engine} {f.server}", f.name, f"{f.printed} {f.unit}",
                          "-" if f.predicted is None else f"{f.predicted} {f.unit}", mark, rule)  # fmt: skip
        return found


@cache
def parsers() -> tuple[ModuleType, ...]:
    """The modules that know an engine's log."""
    names = (info.name for info in iter_modules([str(Path(__file__).parent)]))
    found = (import_module(f"kvsim.engines.{name}") for name in names if name.startswith("explain_"))
    return tuple(m for m in found if hasattr(m, "KEYWORDS"))


def explain(path: str | Path, model: ModelSpec | None = None) -> Explanation:
    """Read a start-up log and set every KV figure beside its prediction.

    Args:
        path: the log, of any size (the first 64 MiB are read) and any content; `-` for standard input.
        model: the model it served, where the log itself does not say enough.

    Raises KvsimError when the file cannot be read or is compressed. A log without KV lines is an answer: no
    findings, and a note.
    """
    data, notes = _read(str(path))
    findings: list[Finding] = []
    for parser in parsers():
        lines, cut = _lines(data, parser.KEYWORDS)
        if cut:
            notes.append(f"only the first {MAX_LINES} lines (1 MiB) that look like an engine's were read")
        findings += parser.findings(lines, model)
    findings.sort(key=lambda f: f.line)
    if any(f.server == MAX_SERVERS for f in findings):
        notes.append(f"at most {MAX_SERVERS} servers of an engine are judged: split the file to see more")
    if not findings:
        notes.append("no KV cache line of llama.cpp, vLLM or SGLang was found: give the start-up part of the log, "
                     "where the server prints its cache (llama.cpp: lines with `KV buffer size` or `KV self size`; "
                     "vLLM: `GPU KV cache size`; SGLang: `KV Cache is allocated`)")  # fmt: skip
    return Explanation(tuple(findings), tuple(dict.fromkeys(notes)))


def named(text: str) -> ModelSpec | None:
    """The shipped model that a log names, by its hub name or the last part of its path; None where none is meant."""
    from kvsim.catalogue import find
    from kvsim.configs import load_model

    for name in (text, text.replace("\\", "/").rstrip("/").rpartition("/")[2]):
        entry = find(name, must=False) if name else None
        if entry is not None:
            return load_model(entry.name)
    return None


def first(servers: Iterable[T]) -> Iterator[T]:
    """The servers of a file that are judged: a log that repeats its start-up for ever is answered all the same."""
    return islice(servers, MAX_SERVERS)


def _read(path: str) -> tuple[bytes, list[str]]:
    name = Path(path).name
    if path not in ("-", "/dev/stdin"):
        _check_regular(Path(path))
    try:
        if path in ("-", "/dev/stdin"):
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise KvsimError(f"cannot read the log {name!r}: {error.strerror or 'not readable'}") from None
    for start, kind in PACKED.items():
        if data.startswith(start):
            raise KvsimError(f"the log {name!r} is {kind}-compressed: unpack it first")
    notes = [f"only the first {MAX_BYTES >> 20} MiB were read"] if len(data) > MAX_BYTES else []
    return _utf8(data[:MAX_BYTES]), notes


def _check_regular(path: Path) -> None:
    """Refuse what is no file: opening a pipe would wait for its writer, a device may never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise KvsimError(f"cannot read the log {path.name!r}: {error.strerror or 'not readable'}") from None
    except ValueError:
        raise KvsimError("cannot read the log: its name holds a character that no file name has") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise KvsimError(f"cannot read the log {path.name!r}: it is {what}; give a file, or - for standard input")


def _utf8(data: bytes) -> bytes:
    """The text in UTF-8: PowerShell's `>` writes UTF-16, with its mark or, after a split, without."""
    coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    sample = data[:2000]
    for start, guess in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros = sample[start::2]
        if not coding and len(zeros) > 8 and zeros.count(0) > 0.9 * len(zeros) and sample[1 - start :: 2].count(0) == 0:
            coding = guess
    return data.decode(coding, errors="replace").encode("utf-8", errors="replace") if coding else data


def _lines(data: bytes, keywords: tuple[bytes, ...]) -> tuple[list[Line], bool]:
    """The lines that hold a keyword, found by searching for the keywords: quick whatever else the file holds."""
    starts: dict[int, int] = {}
    cut = False
    for keyword in keywords:
        at, count = data.find(keyword), 0
        while at >= 0:
            count += 1
            if count > MAX_LINES:
                cut = True
                break
            start = data.rfind(b"\n", max(0, at - MAX_WIDTH), at) + 1 or max(0, at - MAX_WIDTH)
            starts[start] = min(at, starts.get(start, at))
            end = data.find(b"\n", at, at + MAX_WIDTH)
            at = data.find(keyword, end if end >= 0 else at + MAX_WIDTH)
    found: list[Line] = []
    number, counted, read = 1, 0, 0
    for start in sorted(starts)[:MAX_LINES]:
        number += data.count(b"\n", counted, start)
        counted = start
        end = data.find(b"\n", starts[start], starts[start] + MAX_WIDTH)
        raw = data[start : end if end >= 0 else starts[start] + MAX_WIDTH // 8]  # no server prints such a line
        read += len(raw)
        if read > MAX_TEXT:
            return found, True
        prefix = ANSI.sub("", raw[: starts[start] - start].decode("utf-8", errors="replace"))
        text = ANSI.sub("", raw[starts[start] - start :].decode("utf-8", errors="replace")).rstrip("\r")
        found.append(Line(number, text, prefix, " ".join(SOURCE.findall(prefix[:256]))))
    return found, cut or len(starts) > MAX_LINES


def written(value: float, like: str) -> str:
    """`value` with as many decimals as the printed figure `like` has."""
    return f"{value:.{len(like.partition('.')[2])}f}"
