"""Which layers see a window: the rules by which configuration classes resolve layer_types, patterns and switches."""

from __future__ import annotations

from collections.abc import Callable

from kvsim.architectures.fields import Fields
from kvsim.errors import shown

Rule = Callable[[Fields, int], list[int]]
"""From the fields and the number of layers to one window a layer, 0 where a layer attends everything."""

FULL, SLIDING = "full_attention", "sliding_attention"
_OLD = {"attention": FULL, "mamba": "linear_attention"}


def layer_types(f: Fields, count: int, allowed: tuple[str, ...] = (FULL, SLIDING),
                name: str = "layer_types") -> list[str] | None:
    """The file's layer_types, checked against what the family can hold; None where the file has none."""
    found = f.items(name, "str", count)
    if found is None:
        return None
    found = [_OLD.get(x, x) for x in found]
    for index, word in enumerate(found):
        if word not in allowed:
            raise f.fail(f"{name}[{index}]", f"= {shown(word)} is not known in {f.model_type!r} ({', '.join(allowed)})")
    return found


def _by_type(f: Fields, types: list[str], window: int | None = None) -> list[int]:
    """Windows of a resolved list of types."""
    if SLIDING not in types:
        f.ignore("sliding_window")
        return [0] * len(types)
    window = f.size("sliding_window") if window is None else window
    return [window if t == SLIDING else 0 for t in types]


def full(f: Fields, count: int) -> list[int]:
    """No layer has a window; a window in the file is an error, because the class would cache by it."""
    _all_full(f, count)
    if f.flag("use_sliding_window", default=True):
        for name in ("sliding_window", "attention_chunk_size"):
            if f.get(name) is not None:
                raise f.fail(name, f"= {shown(f.get(name))} is not accounted for: {f.model_type!r} has no window")
    f.ignore("sliding_window", "max_window_layers")
    return [0] * count


def _all_full(f: Fields, count: int) -> None:
    layer_types(f, count, (FULL,))


def every(f: Fields, count: int) -> list[int]:
    """`sliding_window`, where not null, holds for every layer (Mistral, Mixtral, Starcoder2, Phi-3)."""
    types = layer_types(f, count)
    if types is not None:
        return _by_type(f, types)
    window = f.maybe("sliding_window", low=1)
    if window and not f.flag("use_sliding_window", default=True):
        raise f.fail("use_sliding_window", f"= false is no field of {f.model_type!r}; its class keeps the window")
    f.ignore("use_sliding_window")
    return [window or 0] * count


def switched(f: Fields, count: int) -> list[int]:
    """`use_sliding_window` decides; then layers from `max_window_layers` on have it (Qwen2, Qwen3)."""
    f.ignore("sliding_window", "max_window_layers", "use_sliding_window")
    types = layer_types(f, count)
    on = f.flag("use_sliding_window") and f.get("sliding_window", "sliding_window") is not None
    if types is None:
        first = f.size("max_window_layers", low=0) if on else count
        types = [SLIDING if i >= first else FULL for i in range(count)]
    if SLIDING in types and not on:
        raise f.fail("layer_types", "has sliding layers but use_sliding_window is off")
    return _by_type(f, types)


def switched_every(f: Fields, count: int) -> list[int]:
    """`use_sliding_window` decides for all layers (Qwen3-MoE has no layer_types)."""
    f.ignore("max_window_layers")
    types = layer_types(f, count)
    window = f.maybe("sliding_window", low=1) if f.flag("use_sliding_window") else None
    f.ignore("sliding_window")
    if types is not None and (SLIDING in types) != bool(window):
        raise f.fail("layer_types", "and use_sliding_window disagree")
    return _by_type(f, types, window) if types is not None else [window or 0] * count


def switched_even(f: Fields, count: int) -> list[int]:
    """`use_sliding_window`: even layers below `max_window_layers` have the window (Qwen2-MoE)."""
    f.ignore("sliding_window", "max_window_layers")
    types, on = layer_types(f, count), f.flag("use_sliding_window")
    if types is None:
        last = f.size("max_window_layers", low=0) if on else 0
        types = [SLIDING if i % 2 == 0 and i < last else FULL for i in range(count)]
    if SLIDING in types and not on:
        raise f.fail("layer_types", "has sliding layers but use_sliding_window is off")
    return _by_type(f, types)


def from_layer(f: Fields, count: int) -> list[int]:
    """Layers from `max_window_layers` on have `sliding_window`, where that is not null (dots.llm1)."""
    types = layer_types(f, count)
    window = f.maybe("sliding_window", low=1)
    if types is None:
        first = f.size("max_window_layers", low=0)
        types = [SLIDING if window and i >= first else FULL for i in range(count)]
    f.ignore("max_window_layers")
    return _by_type(f, types)


def pattern(default: int, name: str = "sliding_window_pattern", offset: int = 1, fixed: bool = False) -> Rule:
    """Layer i is full where (i + offset) is a multiple of the pattern; `fixed`: the file cannot change the pattern."""

    def rule(f: Fields, count: int) -> list[int]:
        types = layer_types(f, count)
        if types is not None:
            f.ignore(name)
            return _by_type(f, types)
        f.ignore("sliding_window_size")  # old Gemma-2 files say the window twice
        step = default if fixed else f.size(name, derive=default)
        return _by_type(f, [FULL if (i + offset) % step == 0 else SLIDING for i in range(count)])

    return rule


def optional_pattern(f: Fields, count: int) -> list[int]:
    """Exaone-4: no window at all where `sliding_window` is null, else 3 sliding to 1 full ("LLLG" or an int)."""
    types = layer_types(f, count)
    window = f.maybe("sliding_window", low=1)
    step = f.get("sliding_window_pattern")
    if types is None:
        if isinstance(step, str) and window:
            if not step or set(step) - set("LG"):
                raise f.fail("sliding_window_pattern", f"must be a whole number or letters L and G, got {shown(step)}")
            types = [SLIDING if step[i % len(step)] == "L" else FULL for i in range(count)]
        else:
            every_nth = f.size("sliding_window_pattern") if window else 1
            types = [FULL if (i + 1) % every_nth == 0 else SLIDING for i in range(count)]
    return _by_type(f, types)


def typed(default: str = FULL) -> Rule:
    """`layer_types`, else every layer is of the default type (Ministral: sliding where there is a window)."""

    def rule(f: Fields, count: int) -> list[int]:
        types = layer_types(f, count)
        if types is None:
            types = [SLIDING if default == SLIDING and f.maybe("sliding_window", low=1) else FULL] * count
        return _by_type(f, types)

    return rule


def where_no_rope(f: Fields, count: int) -> list[int]:
    """SmolLM3: with `use_sliding_window`, the layers without RoPE have the window."""
    types = layer_types(f, count)
    on = f.flag("use_sliding_window") and f.maybe("sliding_window", low=1) is not None
    f.ignore("no_rope_layers", "no_rope_layer_interval", "sliding_window")
    if types is None:
        step = f.size("no_rope_layer_interval")
        rope = f.items("no_rope_layers", "int", count) or [int((i + 1) % step != 0) for i in range(count)]
        types = [SLIDING if on and not r else FULL for r in rope]
    return _by_type(f, types)


def coded_full(f: Fields, count: int) -> list[int]:
    """MiniMax-M2: `attn_type_list`, where given, must say full attention (1) for every layer."""
    coded = f.items("attn_type_list", "int", count)
    if coded is not None and set(coded) != {1}:
        raise f.fail("attn_type_list", f"holds kinds other than 1 (full attention), which {f.model_type!r} has not")
    return full(f, count)
