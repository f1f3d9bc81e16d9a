"""Which shipped device a person means: names, marketing names and driver names to file stems; reads no file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from kvsim.errors import KvsimError, shown

NOISE = (
    "nvidia", "geforce", "tesla", "quadro", "amd", "instinct", "radeon", "intel", "apple", "google", "cloud", "aws",
    "amazon", "blackwell", "generation", "edition", "graphics", "gpu", "processor", "oam", "platinum", "plus", "dc",
    "data", "center", "t5000", "ac",
)  # fmt: skip
"""Words that never tell two devices apart."""
OPTIONAL = (
    "sxm", "pcie", "nvl", "ws", "server", "rtx", "rx", "arc", "tpu", "epyc", "xeon", "ryzen", "ai", "jetson", "agx",
)  # fmt: skip
"""Words of a stem that a person may leave out; two stems that then fit make the name ambiguous."""
SYNONYMS = (
    (r"\(r\)|\(tm\)|[^a-z0-9.]+", " "),
    (r"\bsxm\d", "sxm"),
    (r"\bh100 80gb hbm3\b", "h100 sxm"),  # what nvidia-smi prints for the SXM5 card
    (r"\bworkstation\b", "ws"),
    (r"\bdgx spark\b(?: gb10)?", "gb10"),
    (r"\bstrix halo\b", "ryzen ai max 395"),
    (r"\btrillium\b", "tpu v6e"),
    (r"\bironwood\b|\btpu ?v7x?\b", "tpu7x"),
    (r"\btrn2\b", "trainium2"),
    (r"\binf2\b", "inferentia2"),
    (r"\b\d+ cores?\b", " "),
    (r"\b(h|a|b|l|t|v|gb|gh|mi|gaudi|trainium) (\d)", r"\1\2"),
    (r"(\d) (gb|gib)\b", r"\1\2"),
    (r"(\d)gib\b", r"\1gb"),
)
MEMORY = re.compile(r"\b\d+gb\b")


def resolve(name: str, stems: Iterable[str]) -> tuple[str, int | None]:
    """Return the file stem that `name` means, and the capacity in GB that it names beyond the stem (for a check).

    Raises KvsimError when several devices fit (all listed) or none does (the nearest suggested).
    """
    stems = sorted(stems)
    if name in stems:
        return name, None
    query = _fold(name)
    found = {stem: rest for stem in stems if (rest := _left_over(query, stem)) is not None}
    if len(found) == 1:
        ((stem, memory),) = found.items()
        return stem, memory
    if found:
        exact = [stem for stem in found if _fold(stem) == query]
        if len(exact) == 1:
            return exact[0], None
        raise KvsimError(f"device {shown(name)} is ambiguous: choose one of {', '.join(found)}")
    near = _near(query, stems)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise KvsimError(f"unknown device {shown(name)}: {hint}see `kvsim devices`, or give a path to a .toml profile")


def _fold(name: str) -> str:
    text = name.lower()[:120]
    for pattern, new in SYNONYMS:
        text = re.sub(pattern, new, text).strip()
    return text


def _left_over(query: str, stem: str) -> int | None:
    """None if `query` is not this stem; else the memory size named beyond it (0 = none).

    The stem's words are cut out of the query (written together or apart, in any order); only noise may remain.
    """
    words = sorted(stem.split("-"), key=len, reverse=True)
    for word in words:
        cut = _cut(query, word)
        if cut is None and word not in OPTIONAL and not MEMORY.fullmatch(word):
            return None
        query = cut if cut is not None else query
    sizes = MEMORY.findall(query)
    rest = [w for w in MEMORY.sub(" ", query).split() if w not in NOISE]
    if rest and "".join(rest) not in {a + b for a in NOISE for b in ("", *NOISE)}:
        return None
    if len(sizes) > 1 or (sizes and any(MEMORY.fullmatch(w) for w in words)):
        return None
    return int(sizes[0][:-2]) if sizes else 0


def _cut(query: str, word: str) -> str | None:
    """`query` without the first `word` in it, unless digits continue across the cut (`a10` is not in `a100`)."""
    pattern = rf"(?<!\d){re.escape(word)}" if word[0].isdigit() else re.escape(word)
    found = re.search(pattern + (r"(?!\d)" if word[-1].isdigit() else ""), query)
    return f"{query[: found.start()]} {query[found.end() :]}" if found else None


def _near(query: str, stems: list[str]) -> list[str]:
    """Up to four stems that share most of the query's words, else the closest in spelling."""
    wanted = [w for w in query.split() if w not in NOISE and w not in OPTIONAL and not MEMORY.fullmatch(w)]
    shared = {s: sum(len(w) > 1 and any(p.startswith(w) for p in s.split("-")) for w in wanted) for s in stems}
    most = max(shared.values(), default=0)
    if most:
        return [s for s in stems if shared[s] == most][:4]
    return get_close_matches(" ".join(wanted).replace(" ", "-"), stems, n=2, cutoff=0.5)
