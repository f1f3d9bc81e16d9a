"""Checked reading of one config object: every value typed and bounded, every fallback noted, leftovers judged."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

from kvsim.errors import KvsimError, did_you_mean, shown

LAYERS_MAX = 1024
"""More layers than this are refused: the largest published decoder has about 130."""
SIZE_MAX = 2**26
"""Upper bound of any width, head count, vocabulary or expert count in a config."""

# Words in the name of a field that builders did not read and that could move the cache or the parameters.
_SHAPING = re.compile(
    r"head|layer|window|slid|chunk|kv|share|sharing|latent|rank|expert|moe|mla|rope_dim|nope|hidden|embd|embed|inner|d_model"
    r"|ffn|intermediate|width|conv|ssm|mamba|state|linear_|index|compress|sparse|pattern|attn|attention|block|bias|"
    r"per_layer|altup|laurel|loop|recur|memory|adapter|lora|tie_|dim"
)
# Fields with such a word that change numerics, training, generation or the tokenizer only, in every known architecture.
_HARMLESS = re.compile(
    r"dropout|pdrop|drop_|layerdrop|_eps$|epsilon|_init|init_|initializer|_token|token_|_loss|loss_|aux_|router_|_act$|activation|softcap"
    r"|_scal|scale|scaling|multiplier|output_|_implementation|gradient|checkpointing|^use_cache|dtype|_version|theta"
    r"|quantization|kv_cache_scheme|max_position|model_max_length|^task_specific|auto_map|_fp32|in_fp|upcast|^id2label|"
    r"label2id|norm_topk|topk_|scoring_func|_group$|seq_aux|jitter|llm_compressor|^use_.*(kernels|mambapy|scan)|mtp|interleave|routing_bias|^quant|^pretraining|chunk_size_feed_forward|^attn_impl"
    r"|context|is_decoder|is_encoder_decoder|cross_attention_hidden_size|tie_encoder_decoder|position_embedding_type|rotary|^rope_"
    r"|prune|^use_flash|flash_attn|^_attn|_attn_logit|logit|summary|mup|qk_clip|layer_norm_type|embd_pdrop|finetuning"
    r"|moe_layer_freq_note|_speculat|time_step|chunk_size$|^chunk_length|tokenizer|encoder_no_repeat|no_repeat|length_penalty"
)
_NOTHING: tuple[object, ...] = (None, False, 0, "", "none")


@cache
def class_facts() -> dict[str, Any]:
    """What each transformers 5.24 configuration class fills in: {model_type: {class, fields, same}}."""
    text = Path(__file__).with_name("defaults.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)["types"]
    return facts


class Fields:
    """One JSON object of a config, read as the configuration class of `model_type` reads it.

    Every reader raises KvsimError naming the field. `notes` collects the fallbacks used and is shared with children.
    """

    def __init__(self, raw: dict[str, Any], model_type: str, path: str = "", notes: list[str] | None = None) -> None:
        facts = class_facts().get(model_type, {})
        self.raw, self.model_type, self.path = raw, model_type, path
        self.notes: list[str] = [] if notes is None else notes
        self.defaults: dict[str, Any] = facts.get("fields", {})
        self.owner: str = facts.get("class", "")
        self._same: dict[str, str] = facts.get("same", {})
        self._used: set[str] = set()
        self._children: list[Fields] = []

    # ---- raw access -------------------------------------------------------------------------------------------
    def where(self, name: str) -> str:
        """The field's full name as errors print it."""
        return f"{self.path}{name}"

    def names(self, name: str, others: tuple[str, ...] = ()) -> list[str]:
        """All spellings of one field: its own, the given ones and those that the configuration class maps."""
        found = [name, *others]
        found += [a for a, b in self._same.items() if b in found] + [b for a, b in self._same.items() if a in found]
        return list(dict.fromkeys(found))

    def get(self, name: str, *others: str) -> Any:
        """The file's value under any spelling, or None; two spellings that disagree are an error."""
        names = self.names(name, others)
        self._used.update(names)
        given = [(n, self.raw[n]) for n in names if self.raw.get(n) is not None]
        if any(value != given[0][1] for _, value in given[1:]):
            text = " and ".join(f"{self.where(n)} {shown(v, 30)}" for n, v in given)
            raise KvsimError(f"{text} are one field in {self.model_type!r} but disagree")
        return given[0][1] if given else None

    def has(self, name: str) -> bool:
        """Whether the file gives a value other than null."""
        return self.raw.get(name) is not None

    def ignore(self, *names: str) -> None:
        """Say that these fields were accounted for: they change neither cache nor parameters here."""
        self._used.update(names)

    def default(self, name: str, others: tuple[str, ...] = ()) -> Any:
        """The class's own value for a missing field; None where it derives one or where no class is known."""
        return next((self.defaults[n] for n in self.names(name, others) if self.defaults.get(n) is not None), None)

    def fail(self, name: str, why: str) -> KvsimError:
        """The error to raise about a field."""
        return KvsimError(f"{self.where(name)} {why}")

    # ---- typed readers ----------------------------------------------------------------------------------------
    def size(self, name: str, *others: str, low: int = 1, high: int = SIZE_MAX, derive: int | None = None) -> int:
        """A whole number in [low, high]: the file's, else the class default (noted), else `derive`, else an error."""
        value = self.get(name, *others)
        if value is None:
            value = self.default(name, others)
            explicit_null = any(n in self.raw for n in self.names(name, others))
            if value is not None and not explicit_null:
                self.notes.append(f"{self.where(name)} is missing: {value}, as {self.owner} has it")
            elif derive is not None:
                value = derive
            elif explicit_null:
                raise self.fail(name, f"is null; {self.model_type!r} needs a whole number there")
            else:
                near = did_you_mean(name, [k for k in self.raw if k not in self._used])
                raise self.fail(name, f"is missing; {self.model_type!r} cannot be read without it{near}")
        return self.checked(name, value, low, high)

    def checked(self, name: str, value: Any, low: int = 1, high: int = SIZE_MAX) -> int:
        """`value` as an int in [low, high], or an error naming `name`."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(name, f"must be a whole number, got {shown(value)}")
        if not low <= value <= high:
            raise self.fail(name, f"must lie between {low} and {high}, got {shown(value)}")
        return value

    def maybe(self, name: str, *others: str, low: int = 0, high: int = SIZE_MAX) -> int | None:
        """A whole number, or None where the file says null or where neither file nor class has one."""
        if any(n in self.raw for n in self.names(name, others)) and self.get(name, *others) is None:
            return None
        if self.get(name, *others) is None and self.default(name, others) is None:
            return None
        return self.size(name, *others, low=low, high=high)

    def flag(self, name: str, *others: str, default: bool = False) -> bool:
        """true or false; the class default, then `default`, where the file has none."""
        value = self.get(name, *others)
        if value is None:
            value = self.default(name, others)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e9) -> float:
        """A finite number in [low, high]."""
        value = self.get(name)
        value = self.default(name) if value is None else value
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, f"must be a number, got {shown(value)}")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(name, f"must lie between {low:g} and {high:g}, got {shown(value)}")
        return float(value)

    def text(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the allowed words."""
        value = self.get(name)
        value = self.default(name) if value is None else value
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.fail(name, f"must be one of {', '.join(allowed)}; got {shown(value)}")
        return value

    @overload
    def items(self, name: str, kind: Literal["int"], length: int | None = None) -> list[int] | None: ...
    @overload
    def items(self, name: str, kind: Literal["str"], length: int | None = None) -> list[str] | None: ...

    def items(self, name: str, kind: str, length: int | None = None) -> list[Any] | None:
        """A list of whole numbers or words (of `length` entries), or None where there is none."""
        value = self.get(name)
        if value is None:
            value = self.default(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > 4 * LAYERS_MAX:
            raise self.fail(name, f"must be a list, got {shown(value)}")
        for index, entry in enumerate(value):
            if kind == "int":
                self.checked(f"{name}[{index}]", entry, low=-1)
            elif not isinstance(entry, str):
                raise self.fail(f"{name}[{index}]", f"must be a word, got {shown(entry)}")
        if length is not None and len(value) != length:
            raise self.fail(name, f"has {len(value)} entries for {length} layers")
        return value

    def child(self, name: str, model_type: str | None = None, forced: str | None = None) -> Fields:
        """The object under `name` (the class's own where missing), its type `forced`, the file's or `model_type`."""
        value = self.get(name)
        if value is None:
            value = dict(class_facts().get(self.model_type, {}).get("inside", {}).get(name, {}))
            self.notes.append(f"{self.where(name)} is missing: all of it as its class has it")
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, got {shown(value)}")
        kind = forced or value.get("model_type") or model_type
        if not isinstance(kind, str):
            raise self.fail(f"{name}.model_type", f"must be a word, got {shown(kind)}")
        inner = Fields(dict(value), kind, f"{self.path}{name}.", self.notes)
        inner.ignore("model_type", "architectures", "quantization_config")
        self._children = [c for c in self._children if c.path != inner.path]
        self._children.append(inner)
        return inner

    # ---- leftovers --------------------------------------------------------------------------------------------
    def leftovers(self) -> None:
        """Refuse a field that nobody read, whose name says that it could move the cache or the parameters."""
        for name, value in self.raw.items():
            if name in self._used or any(value is x or (value == x and type(value) is type(x)) for x in _NOTHING):
                continue
            if value in ([], {}) or name.startswith("_") or not _SHAPING.search(name) or _HARMLESS.search(name):
                continue
            if name in self.defaults and value == self.defaults[name]:
                continue
            raise self.fail(name, f"= {shown(value, 40)} is not accounted for in {self.model_type!r} and could change "
                                  "the cache or the parameters; remove it if it has no effect")
        for inner in self._children:
            inner.leftovers()
