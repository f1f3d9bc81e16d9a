"""What llama.cpp prints at start-up, from 2023 to now: facts of the model and context, and its KV lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsim.engines.explain import Line

KEYWORDS = (
    b"llama_model_loader: - kv", b"print_info: ", b"llm_load_print_meta: ", b"llama_model_load_internal: n_",
    b"llama_context: ", b"llama_context_base: n_", b"llama_new_context_with_model: ", b"llama_init_from_",
    b"KV buffer size", b"RS buffer size", b"KV self size", b"kv self size", b"llama_kv_cache", b"init: kv_size",
    b"llama_memory_recurrent: size", b"n_slots = ", b"memory.required.kv", b"--ctx-size", b"build = ", b"build: ",
)  # fmt: skip
ASKED = re.compile(r"--ctx-size (\d{1,9})")
FACT = re.compile(
    r"(print_info|llm_load_print_meta|llama_model_load_internal|llama_context|llama_context_base|"
    r"llama_new_context_with_model|llama_init_from_model): (\w{1,32}) {0,40}= (\[[\d, ]{1,4000}\]|\w{1,32})"
)
META = re.compile(
    r"- kv +\d+: +[\w-]{1,40}\.([\w.]{1,60}) +(?:u32|i32|u64|arr\[[ui]32,\d+\]) += (\[[\d, ]{1,2000}\]|\d{1,15})"
)
SUMMARY = re.compile(
    r"size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers, +(\d+)(?:/ *(\d+))? seqs\)"
    r"(?:, K \((\w+)\): +([\d.]+) MiB, V \((\w+)\): +([\d.]+) MiB)?"
)
RECURRENT = re.compile(
    r"llama_memory_recurrent: size = +([\d.]+) MiB "
    r"\( *(\d+) cells?, +(\d+) layers(?:, +(\d+) seqs(?: +(\d+) rs_seq)?)?\)"
    r"(?:, R \((\w+)\): +([\d.]+) MiB, S \((\w+)\): +([\d.]+) MiB)?"
)
SELF = re.compile(
    r"[Kk][Vv] self size += +([\d.]+) (MiB|MB)"
    r"(?:, (?:K|c\^KV) \((\w+)\): +([\d.]+) MiB(?:, V \((\w+)\): +([\d.]+) MiB)?)?"
)
BUFFER = re.compile(r"([A-Za-z]{1,16}\d{0,3}(?:_Host|_Mapped)?)(?:\(\w{0,8}\))? (KV|RS) buffer size = +([\d.]+) MiB")
CREATING = re.compile(
    r"creating +(non-SWA|SWA|main|indexer|DSV4 (?:raw|CSA|HCA|lightning)[\w -]{0,20}) ?KV cache"
    r"(?:, size = (\d+) cells)?"
)
NEW_MODEL = re.compile(r"llama_model_loader: - kv|print_info: |llm_load_print_meta: |llama_model_load_internal: ")
NEW_CONTEXT = re.compile(r"constructing llama_context|_(?:context|model|base): n_(?:seq_max|ctx) {0,40}= ")
REQUIRED = re.compile(r'memory\.required\.kv="([\d.]+) (GiB|MiB|KiB)"')
BUILD = re.compile(r"\bbuild(?:_info)?(?: = |: )b?(\d{2,6})\b")
METAS = {
    "block_count": "n_layer", "attention.head_count": "n_head", "attention.head_count_kv": "n_head_kv",
    "embedding_length": "n_embd", "attention.key_length": "n_embd_head_k", "attention.value_length": "n_embd_head_v",
    "attention.sliding_window": "n_swa", "attention.kv_lora_rank": "n_lora_kv", "rope.dimension_count": "n_rot",
    "ssm.conv_kernel": "ssm_d_conv", "ssm.inner_size": "ssm_d_inner", "ssm.state_size": "ssm_d_state",
    "ssm.group_count": "ssm_n_group", "full_attention_interval": "full_interval",
    "attention.indexer.key_length": "n_index", "nextn_predict_layers": "n_nextn", "context_length": "n_ctx_train",
}  # fmt: skip
Value = int | tuple[int, ...]


@dataclass
class Print:
    """A KV line: kind `cache`, `self`, `buffer`, `recurrent`, `states` or `required`, and its groups as printed."""

    kind: str
    line: int
    groups: tuple[str | None, ...]
    role: str = "kv"


@dataclass
class Context:
    """One llama_context of a server: facts that hold for it (the model's are shared) and its KV lines in order."""

    model: dict[str, Value]
    facts: dict[str, Value] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    cells: dict[str, int] = field(default_factory=dict)
    prints: list[Print] = field(default_factory=list)
    role: str = "kv"

    def get(self, name: str) -> int | None:
        """A single number of the context or the model; None when unsaid or a list."""
        value = self.facts.get(name, self.model.get(name))
        return value if isinstance(value, int) else None


def contexts(lines: Sequence[Line]) -> list[Context]:
    """The contexts of every process in the log, in order; processes are told apart by the prefixes of their lines."""
    result: list[Context] = []
    current: dict[str, list[Context]] = {}
    for line in lines:
        mine = current.setdefault(line.source, [])
        if not mine or (mine[-1].prints and NEW_MODEL.search(line.text)):
            mine[:] = [Context({})]
            result.append(mine[-1])
        elif mine[-1].prints and NEW_CONTEXT.search(line.text):
            mine.append(Context(mine[-1].model))
            result.append(mine[-1])
        _read(line, mine[-1])
        slots = re.search(r"\bn_slots = (\d{1,4})", line.text)
        for context in mine if slots else ():
            context.facts.setdefault("n_seq_max", int(slots.group(1)) if slots else 1)
    return [c for c in result if c.prints and c.model.get("no_alloc") != 1]


def _read(line: Line, context: Context) -> None:
    text = line.text
    for kind, pattern in (("recurrent", RECURRENT), ("cache", SUMMARY), ("self", SELF), ("required", REQUIRED)):
        found = pattern.search(text)
        if found:
            context.prints.append(Print(kind, line.number, found.groups(), context.role))
            return
    # a device's name stands before the words that made the line interesting
    part, made = BUFFER.search(line.prefix[-40:] + text), CREATING.search(text)
    if part:
        kind = "buffer" if part.group(2) == "KV" else "states"
        context.prints.append(Print(kind, line.number, (part.group(1), part.group(3)), context.role))
    elif made:
        context.role = made.group(1).strip()
        if context.role.startswith("DSV4"):
            context.facts["k_only"] = 1
        if made.group(2):
            context.cells[context.role] = int(made.group(2))
    else:
        _read_facts(text, context)


def _read_facts(text: str, context: Context) -> None:
    for found in re.finditer(r"type_([kv]) = '(\w{1,12})'", text):
        context.types[found.group(1)] = found.group(2)
    if "using full-size SWA cache" in text:
        context.facts["swa_full"] = 1
    build, asked, meta, fact = (p.search(text) for p in (BUILD, ASKED, META, FACT))
    if build:
        context.model["build"] = int(build.group(1))
    if asked:
        context.facts["n_ctx"] = int(asked.group(1))
    if meta and meta.group(1) in METAS:
        context.model.setdefault(METAS[meta.group(1)], _value(meta.group(2)))
    if not fact:
        return
    who, name, value = fact.groups()
    words = {"true": 1, "false": 0, "enabled": 1, "disabled": 0}
    if value in words or value[0].isdigit() or value[0] == "[":
        number: Value = words[value] if value in words else _value(value)
        (context.facts if "context" in who else context.model)[name] = number


def _value(text: str) -> Value:
    if text[0] == "[":
        return tuple(int(x) for x in text.strip("[]").split(",") if x.strip())
    digits = re.match(r"\d{1,15}", text)
    return int(digits.group()) if digits else 0
