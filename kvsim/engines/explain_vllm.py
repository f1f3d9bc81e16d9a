"""vLLM's start-up log: what it prints of its KV cache, beside what the block rules give for the same pool and flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsim.engines import vllm
from kvsim.engines.explain import Finding, Line, first, named, written
from kvsim.engines.pool import GIB
from kvsim.engines.result import Memory
from kvsim.engines.vllm_formats import SPELLINGS
from kvsim.errors import KvsimError
from kvsim.model import ModelSpec

KEYWORDS = (
    b"LLM engine (v", b"non-default args:", b"vLLM API server version", b"Available KV cache memory:",
    b"GPU KV cache size:", b"Maximum concurrency for", b"GPU blocks:", b"CUDA blocks:", b"cuda blocks:",
    b"reserved for KV Cache is", b"kv_cache_size=", b"Setting attention block size to", b"padding layers, may waste",
    b"To serve at least one request", b"max_num_batched_tokens=", b"data type to store kv cache",
    b"larger than the maximum number of tokens",
)  # fmt: skip
NUMBER = r"(\d[\d,]{0,22}\d|\d)"
DECIMAL = r"(-?\d{1,12}(?:\.\d{1,6})?)"
FACTS = {
    "max_model_len": rf"\b(?:max_seq_len=|'?max_model_len'?[=:] ?){NUMBER}",
    "tensor_parallel_size": rf"'?tensor_parallel_size'?[=:] ?{NUMBER}",
    "pipeline_parallel_size": rf"'?pipeline_parallel_size'?[=:] ?{NUMBER}",
    "max_num_batched_tokens": rf"'?max_num_batched_tokens'?[=:] ?{NUMBER}",
    "block_size": rf"'block_size': ?{NUMBER}",
    "num_speculative_tokens": rf"num_speculative_tokens'?[=:] ?{NUMBER}",
}
DTYPE = re.compile(r"'?kv_cache_dtype'?[=:] ?'?(?:torch\.)?([a-z0-9_]{2,24})|^data type to store kv cache")
PREFIX = re.compile(r"enable_prefix_caching'?[=:] ?(True|False)")
VERSION = re.compile(r"(?:LLM engine \(v|API server version )(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)")
MODEL = re.compile(r"\bmodel='([^']{1,300})'")
POOLS = re.compile(rf"(?:Available KV cache memory: |reserved for KV Cache is |kv_cache_size=){DECIMAL} ?GiB")
UNKNOWN_VERSIONS = ("0.25", "0.19", "0.27")
MAX_BLOCKS_TRIED = 600
BEFORE_POOL = {"attention block", "padding waste"}
"""Figures that a server prints before its pool; a pool after any other is another server's."""


@dataclass
class Server:
    """What one server of the file printed: flags as it states them, its pools by worker, its figures."""

    number: int
    flags: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    model: str = ""
    v1: bool | None = None
    pools: list[str] = field(default_factory=list)
    figures: dict[str, tuple[str, str, int]] = field(default_factory=dict)


def findings(lines: Sequence[Line], model: ModelSpec | None) -> list[Finding]:
    """Every figure of every server, judged where a model is given or named in the log."""
    seen: dict[str, list[Finding]] = {}  # a server that starts over and over is judged once
    found = []
    for server in first(_servers(lines)):
        what = {name: figure[:2] for name, figure in server.figures.items()}
        key = repr((server.flags, server.version, server.v1, server.model, server.pools, what))
        if key not in seen:
            mine = model or named(server.model)
            told = f"; model {mine.name}, as the log names it" if mine is not None and model is None else ""
            seen[key] = [replace(f, rule=f.rule + told) for f in _judged(server, mine)]
        found += [replace(f, line=server.figures[f.name][2], server=server.number) for f in seen[key]]
    return found


def _servers(lines: Sequence[Line]) -> Iterator[Server]:
    server = Server(1)
    for line in lines:
        starts = "LLM engine (v" in line.text or "API server version" in line.text
        after = set(server.figures) - BEFORE_POOL
        again = POOLS.match(line.text) and after and "tokens" not in line.text
        if (starts or again) and server.figures:
            yield server
            old = Server(0) if starts else server
            server = Server(server.number + 1, dict(old.flags), old.version, old.model)
        _read(line, server)
    if server.figures:
        yield server


def _read(line: Line, server: Server) -> None:
    """Take flags and figures out of one line."""
    text = line.text
    for name, pattern in FACTS.items():
        found = re.search(pattern, text)
        if found and "To serve" not in text:
            server.flags[name] = int(found[1].replace(",", "") or 0)
    dtype = DTYPE.search(text)
    word = dtype[1] if dtype and dtype[1] else line.prefix.split()[-1] if dtype and line.prefix.split() else ""
    if word.removeprefix("torch.") in SPELLINGS:
        server.flags["kv_cache_dtype"] = word.removeprefix("torch.")
    prefix = PREFIX.search(text)
    if prefix:
        server.flags["enable_prefix_caching"] = prefix[1] == "True"
    version = VERSION.search(text)
    if version:
        server.version = version[1]
        stated = MODEL.search(text)
        server.model = stated[1] if stated else server.model
        if "LLM engine" in text:
            server.v1 = "V1" in line.prefix
    pool = POOLS.search(text)
    if pool:
        server.pools.append(pool[1])
    shapes = (
        ("tokens", rf"GPU KV cache size: {NUMBER} tokens", "tokens"),
        ("concurrency", rf"Maximum concurrency for {NUMBER} tokens per request: {DECIMAL}x", "x"),
        ("GPU blocks", rf"(?:GPU|CUDA|cuda) blocks: {NUMBER}", "blocks"),
        ("CPU blocks", rf"# CPU blocks: {NUMBER}", "blocks"),
        ("attention block", rf"Setting attention block size to {NUMBER} tokens", "tokens"),
        ("padding waste", rf"padding layers, may waste at most {DECIMAL}%", "%"),
        ("KV needed", rf"max seq len \({NUMBER}\), \(?{DECIMAL} GiB KV cache is needed", "GiB"),
        ("longest request", rf"estimated maximum model length is {NUMBER}", "tokens"),
        ("longest request", rf"can be stored in KV cache \({NUMBER}\)", "tokens"),
    )
    for name, pattern, unit in shapes:
        found = re.search(pattern, text)
        if not found:
            continue
        server.figures.setdefault(name, (found.groups()[-1], unit, line.number))
        if name in ("concurrency", "KV needed"):
            server.flags["max_model_len"] = int(found[1].replace(",", "") or 0)
        available = re.search(rf"available KV cache memory \({DECIMAL} GiB\)", text)
        if available:
            server.pools.append(available[1])


def _judged(server: Server, model: ModelSpec | None) -> list[Finding]:
    """The server's findings with the version that explains most, its own where it states one."""
    if model is None:
        return [_without_model(server, name) for name in server.figures]
    best: list[Finding] = []
    for version in _versions(server):
        found = _with_version(server, model, version, {})
        if not best or sum(f.matches is True for f in found) > sum(f.matches is True for f in best):
            best = found
    if any(f.matches is False for f in best):
        hints = tuple(_hints(server, model, best))
        hints = hints or tuple(_implied(server, model, best))
        best = [f if f.matches is not False else replace(f, hints=hints) for f in best]
    return best


def _versions(server: Server) -> tuple[str, ...]:
    if server.version:
        minor = int(server.version.split(".")[1])
        named = "" if server.v1 is None or not 7 <= minor < 11 else " V1" if server.v1 else " V0"  # both shipped
        return (server.version + named,)
    if "CPU blocks" in server.figures:
        return ("0.6",)
    return UNKNOWN_VERSIONS


def _with_version(server: Server, model: ModelSpec, version: str, other: dict[str, Any]) -> list[Finding]:
    flags = {**server.flags, **other, "version": version}
    try:
        answers, rule = _answers(server, model, flags)
    except KvsimError as error:
        return [_finding(server, name, None, f"cannot be predicted: {error}") for name in server.figures]
    rule = f"{rule}; vLLM {version}"
    return [_finding(server, name, [_value(name, m) for m in answers], rule) for name in server.figures]


def _answers(server: Server, model: ModelSpec, flags: dict[str, Any]) -> tuple[list[Memory], str]:
    """The memories of every block count that the printed figures allow, narrowed by the token count."""
    blocks = server.figures.get("GPU blocks")
    if blocks:
        count = int(blocks[0].replace(",", ""))
        one = vllm.memory(model, **flags, num_gpu_blocks_override=max(1, count))
        if server.pools:
            return [vllm.memory(model, **flags, num_gpu_blocks_override=n) for n in _range(server, one)] or [one], (
                f"floor(pool {_pool(server)} GiB / {_block_bytes(one)} bytes a block)")  # fmt: skip
        return [one], f"{count} blocks as printed"
    if not server.pools:
        need = vllm.memory(model, **flags)
        return [need], "one request of the longest length"
    one = vllm.memory(model, **flags, pool_bytes=max(float(_pool(server)), 0.001) * GIB)
    found = [vllm.memory(model, **flags, num_gpu_blocks_override=n) for n in _range(server, one)] or [one]
    tokens = server.figures.get("tokens")
    if tokens:
        printed = int(tokens[0].replace(",", ""))
        found = [m for m in found if m.tokens == printed] or found
    return found, f"floor(pool {_pool(server)} GiB / {_block_bytes(one)} bytes a block)"


def _pool(server: Server) -> str:
    return min(server.pools, key=float)


def _block_bytes(one: Memory) -> int:
    total = one.caches[0].bytes if one.caches and one.caches[0].name == "shared pool" else one.kv_bytes or 0
    return total // max(1, one.blocks or 1)


def _range(server: Server, one: Memory) -> range:
    """Block counts that the pool's two decimals allow."""
    text = _pool(server)
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    size = _block_bytes(one)
    low, high = (int(max(0.0, float(text) + end) * GIB) // size for end in (-half, half))
    return range(max(1, low), max(1, low) + min(high - low + 1, MAX_BLOCKS_TRIED))


def _value(name: str, found: Memory) -> float | None:
    """The figure of that name in an answer."""
    plain = {"tokens": found.tokens, "concurrency": found.max_concurrency, "GPU blocks": found.blocks,
             "attention block": found.block_tokens}  # fmt: skip
    if name in plain:
        return plain[name]
    refused = re.search(r"([\d.]+) GiB KV cache is needed.*length is (\d+)", found.refused)
    if name in ("KV needed", "longest request"):
        told = refused[1 if name == "KV needed" else 2] if refused else None
        whole = (found.kv_bytes or 0) / GIB if name == "KV needed" else None
        return float(told) if told else whole
    pattern = r"# CPU blocks: (\d+)" if name == "CPU blocks" else r"may waste at most ([\d.]+)%"
    noted = next((m for m in (re.search(pattern, w) for w in found.warnings) if m), None)
    return float(noted[1]) if noted else None


def _without_model(server: Server, name: str) -> Finding:
    """What the figures say of each other: tokens (or 16 a block) over the request's length, by tokens or by blocks."""
    length = server.flags.get("max_model_len", 0)
    tokens, blocks = (int(server.figures[key][0].replace(",", "")) if key in server.figures else 0
                      for key in ("tokens", "GPU blocks"))  # fmt: skip
    held = tokens or 16 * blocks
    if name == "concurrency" and held and length:
        found = _finding(server, name, [held / length, held / 16 / -(-length // 16)], "tokens / max_model_len")
        if found.matches:
            return found
    return _finding(server, name, None, "the log names no model known here: give --model")


def _finding(server: Server, name: str, values: list[float | None] | None, rule: str) -> Finding:
    printed, unit, number = server.figures[name]
    plain = printed.replace(",", "")
    texts = [written(v, plain) for v in values or () if v is not None]
    if not texts:
        return Finding("vllm", name, printed, unit, None, None, rule, (), number, server.number)
    ends = sorted(set(texts), key=float)
    inside = float(ends[0]) <= float(plain) <= float(ends[-1])
    shown = plain if plain in ends else ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
    return Finding("vllm", name, printed, unit, shown, inside, rule, (), number, server.number)


def _implied(server: Server, model: ModelSpec, base: list[Finding]) -> Iterator[str]:
    """What the pool and the tokens say by themselves, where no single other input explains a figure."""
    tokens = int(server.figures["tokens"][0].replace(",", "")) if "tokens" in server.figures else 0
    stored = _token_bytes(server, model) if tokens and server.pools else 0
    if stored:
        meant = float(_pool(server)) * GIB / tokens
        yield f"another model: pool / tokens is {meant:,.0f} bytes a token and rank; {model.name} stores {stored:,.0f}"
    else:
        yield "another model, or two inputs at once: no single one explains every figure"


def _token_bytes(server: Server, model: ModelSpec) -> float:
    """Bytes that a token costs where all layers share one table; 0 in hybrids, whose prints are no such quotient."""
    try:
        flags = {**server.flags, "version": _versions(server)[0]}
        one = vllm.memory(model, **flags, pool_bytes=max(float(_pool(server)), 0.001) * GIB)
    except KvsimError:
        return 0
    shared = one.caches and one.caches[0].name == "shared pool"
    return 0 if shared else (one.kv_bytes or 0) / max(1, one.tokens or 1)


def _hints(server: Server, model: ModelSpec, base: list[Finding]) -> Iterator[str]:
    """Single changes of the inputs under which every figure comes out."""
    score = sum(f.matches is True for f in base)
    version = _versions(server)[0]
    changes: list[dict[str, Any]] = [{"kv_cache_dtype": d} for d in ("auto", "fp8", "nvfp4", "int8_per_token_head")]
    changes += [{"tensor_parallel_size": n} for n in (1, 2, 4, 8)]
    changes += [{"mamba_ssm_cache_dtype": d} for d in ("float32", "bfloat16")] + [{"enable_prefix_caching": True}]
    changes += [{"max_num_batched_tokens": n} for n in (1024, 2048, 2496, 4096, 5120, 8192, 16384, 32768)]
    for change in changes:
        found = _with_version(server, model, version, change)
        if sum(f.matches is True for f in found) > score and not any(f.matches is False for f in found):
            yield ", ".join(f"{key} {value}" for key, value in change.items())
    if len(server.pools) == 1 and server.flags.get("tensor_parallel_size", 1) > 1:
        yield "another worker's pool is smaller: the smallest decides and the log shows one"
