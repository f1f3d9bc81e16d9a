"""SGLang's start-up log: sizes of its token, window and state pools beside what rows times bytes give ("GB" is GiB)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsim.engines import sglang
from kvsim.engines.explain import Finding, Line, first, named, written
from kvsim.engines.pool import GIB
from kvsim.engines.result import Memory
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

KEYWORDS = (
    b"server_args=ServerArgs(", b"ServerArgs(model_path", b"Using KV cache dtype:", b"KV Cache is allocated",
    b"Mamba Cache is allocated", b"SWAKVPool mem usage",
)  # fmt: skip
COUNT = r"(\d{1,15})"
SIZE = r"(\d{1,9}\.\d{1,4}) ?GB"
FLAGS = {
    "tp_size": rf"\btp_size={COUNT}", "dp_size": rf"\bdp_size={COUNT}", "pp_size": rf"\bpp_size={COUNT}",
    "page_size": rf"\bpage_size={COUNT}",
}  # fmt: skip
MODEL = re.compile(r"\bmodel_path='([^']{1,300})'")
RATIO = re.compile(r"\bswa_full_tokens_ratio=(\d\.\d{1,6})")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
          "float4_e2m1fn_x2": "fp4_e2m1"}  # fmt: skip
DTYPE = re.compile(r"(?:cache dtype: |dtype: |kv_cache_dtype=')(?:torch\.)?([a-z0-9_]{2,24})")


@dataclass
class Server:
    """Flags of one server and its pool lines, each worker's repetition left out."""

    number: int
    flags: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    pools: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)


def findings(lines: Sequence[Line], model: ModelSpec | None) -> list[Finding]:
    """Every pool line of every server; figures that a model is needed for are unknown without one."""
    found = []
    for server in first(_servers(lines)):
        mine = model or named(server.model)
        told = f"; model {mine.name}, as the log names it" if mine is not None and model is None else ""
        found += [replace(f, rule=f.rule + told) for f in _judged(server, mine)]
    return found


def _servers(lines: Sequence[Line]) -> Iterator[Server]:
    server = Server(1)
    for line in lines:
        if "ServerArgs(" in line.text and server.pools:
            yield server
            server = Server(server.number + 1)
        _read(line, server)
    if server.pools:
        yield server


def _read(line: Line, server: Server) -> None:
    text = line.text
    stated = MODEL.search(text)
    server.model = stated[1] if stated else server.model
    for name, pattern in FLAGS.items():
        found = re.search(pattern, text)
        if found and int(found[1]) > 0:
            server.flags[name] = int(found[1])
    if "enable_dp_attention=" in text:
        server.flags["enable_dp_attention"] = "enable_dp_attention=True" in text
    ratio = RATIO.search(text)
    if ratio:
        server.flags["swa_full_tokens_ratio"] = float(ratio[1])
    dtype = DTYPE.search(text)
    if dtype and (dtype[1] in DTYPES or dtype[1] in sglang.WIDTHS or dtype[1] in sglang.FP4):
        server.flags["kv_cache_dtype"] = DTYPES.get(dtype[1], dtype[1])
    shapes = (
        ("K and V", rf"KV Cache is allocated.*#tokens: {COUNT}, K size: {SIZE}, V size: {SIZE}"),
        ("KV", rf"KV Cache is allocated.*#tokens: {COUNT}, KV size: {SIZE}"),
        ("states", rf"Mamba Cache is allocated.*max_mamba_cache_size: {COUNT}, conv_state size: {SIZE}, ?"
                   rf"ssm_state size: {SIZE}"),
        ("windows", rf"SWAKVPool mem usage: {SIZE}, swa size: {COUNT}, full size: {COUNT}"),
    )  # fmt: skip
    for name, pattern in shapes:
        found = re.search(pattern, text)
        if found and (name, found.groups()) not in [pool[:2] for pool in server.pools]:
            server.pools.append((name, found.groups(), line.number))


def _judged(server: Server, model: ModelSpec | None) -> Iterator[Finding]:
    for name, values, number in server.pools:
        rows = _rows(name, values)
        if model is None:
            lacks = "the log names no model known here: give --model"
            yield from (_finding(server, what, printed, unit, None, lacks, number)
                        for what, printed, unit in rows)
            continue
        try:
            tokens = int(values[2] if name == "windows" else 0 if name == "states" else values[0])
            slots = int(values[0]) if name == "states" else None
            memory = sglang.memory(model, tokens=tokens, max_mamba_cache_size=slots, **server.flags)
        except KvsimError as error:
            yield from (_finding(server, what, printed, unit, None, f"cannot be predicted: {error}", number)
                        for what, printed, unit in rows)
            continue
        for what, printed, unit in rows:
            options, rule = _options(what, memory, model)
            yield _finding(server, what, printed, unit, options, rule, number)


def _rows(name: str, values: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(figure, printed, unit) of a pool line."""
    if name == "K and V":
        return [("K size", values[1], "GB"), ("V size", values[2], "GB")]
    if name == "KV":
        return [("KV size", values[1], "GB")]
    if name == "states":
        return [("conv state", values[1], "GB"), ("ssm state", values[2], "GB")]
    return [("window and full pools", values[0], "GB"), ("window tokens", values[1], "tokens")]


def _options(what: str, memory: Memory, model: ModelSpec) -> tuple[list[float], str]:
    """What the print may show: the whole pool, one kind of layers where each has a pool of its own, a draft layer."""
    if what in ("conv state", "ssm state"):
        part = what.removesuffix(" state")
        return [c.bytes / GIB for c in memory.states if c.name == part], "(slots + 1) * bytes a slot"
    if what == "window tokens":
        return [float(c.tokens or 0) for c in memory.caches if c.name == "window"], "tokens * swa_full_tokens_ratio"
    rule = "(tokens + page_size) * bytes a token"
    pools = [c for c in memory.caches if c.name in ("attention", "window")]
    if what in ("KV size", "window and full pools"):
        plain = sum(c.bytes for c in pools) / GIB
        return [(memory.kv_bytes or 0) / GIB, plain], rule
    sides = [(c.k_bytes or 0) if what == "K size" else (c.v_bytes or 0) for c in pools]
    drafts = [c.layers for c in pools if c.layers and model.next_n_layers]
    found = [sum(sides) / GIB, *(side / GIB for side in sides)]
    return found + [sides[0] / n * model.next_n_layers / GIB for n in drafts[:1] if n], rule


def _finding(server: Server, what: str, printed: str, unit: str, options: list[float] | None, rule: str,
             number: int) -> Finding:
    texts = [written(value, printed) for value in options or ()]
    if not texts:
        return Finding("sglang", what, printed, unit, None, None, rule, (), number, server.number)
    matches = printed in texts
    hints: tuple[str, ...] = ()
    if not matches and float(texts[0]) > 0:
        share = float(printed) / float(texts[0])
        known = ((0.5, "kv_cache_dtype fp8 or twice the tp_size"), (2.0, "kv_cache_dtype bf16 or half the tp_size"))
        hints = tuple(text for ratio, text in known if abs(share / ratio - 1) < 0.01)
        hints = hints or (f"another model or dtype: printed is {share:.3f} of what this one stores",)
    return Finding("sglang", what, printed, unit, printed if matches else texts[0], matches, rule, hints, number,
                   server.number)  # fmt: skip
