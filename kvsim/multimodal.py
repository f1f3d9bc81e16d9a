"""Answers for prompts of typed segments: modality-aware policies beside plain ones at equal rows, with exact bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from kvsim.errors import KvsimError
from kvsim.hardware import HardwareProfile
from kvsim.layout import layer_keys, layer_layout
from kvsim.method import parse_method
from kvsim.modality import Multimodal, cells
from kvsim.model import ModelSpec
from kvsim.prediction import predict
from kvsim.record import Case


@dataclass(frozen=True)
class Answer:
    """One method on the prompt: rows of a full-attention layer, bytes, seconds of the prompt and of a step."""

    name: str
    method: str
    rows: int
    cache_bytes: int
    cross_bytes: int
    prefill_s: float
    decode_s: float

    @property
    def held(self) -> int:
        """Cache and cross-attention."""
        return self.cache_bytes + self.cross_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def pooled(model: ModelSpec, text: str, batch: int = 1, new: int = 0) -> Multimodal:
    """The segments as the model's decoder sees them; what only reaches cross-attention is no prompt of its own."""
    work = Multimodal.of(model, text, batch, new)
    if any(x.cross for x in model.layers) and any(s.kind != "text" for s in work.segments):
        inside = tuple(s for s in work.segments if s.kind == "text")
        if not inside:
            raise KvsimError(f"segments: {model.name} sees pictures and sound through cross-attention; give its "
                             "decoder some text too, such as audio30s-text50")
        return replace(work, segments=inside)
    return work


def rows_held(case: Case) -> int:
    """Rows that the fullest layer holds at the end."""
    work, model = case.workload, case.model
    shape = (work.prompt_tokens, work.new_tokens, case.value_bits)
    layouts = (layer_layout(layer, method, *shape, where[0], model.n_layers)
               for (layer, method, _), where in layer_keys(model, case.method).items())  # fmt: skip
    return max((int(x.rows.stored) for x in layouts if x is not None), default=0)


def strided(model: ModelSpec, stride: int) -> ModelSpec:
    """The model whose decoder attends every stride-th row of the encoder's output (of 1500 and 2: 750)."""
    def cut(layer: Any) -> Any:
        if layer.cross is None:
            return layer
        return replace(layer, cross=replace(layer.cross, cross_tokens=ceil(layer.cross.cross_tokens / stride)))

    return replace(model, layers=tuple(cut(x) for x in model.layers))


def answers(model: ModelSpec, device: HardwareProfile, work: Multimodal, pools: tuple[int, int, int],
            methods: list[str] | None = None, *, weights: str = "", kv_dtype: str = "", devices: int = 1,
            reserve: int | None = None, kernel: str | None = None) -> list[Answer]:  # fmt: skip
    """The full cache, the pooled one, rivals of as many rows, and the asked-for methods.

    Args:
        pools: patches along a side, video frames and audio frames that become one row.
    """
    def answer(name: str, text: str, of: ModelSpec = model) -> Answer:
        case = Case(of, device, parse_method(text), work.workload, weights, kv_dtype, devices, reserve, kernel)
        record = predict(case)
        return Answer(name, str(case.method), rows_held(case), int(record.cache_bytes), int(record.cross_bytes),
                      float(record.prefill.seconds), float(record.decode.seconds))  # fmt: skip

    space, time, audio = pools
    found = [answer("full", "full")]
    if any(s.kind != "text" for s in work.segments):
        modal = work.method(space, time, audio)
        found.append(answer(f"modal({space}x{space} patches, {time} frames, {audio} of audio)", modal))
        kept = cells(work.written, space, time, audio).kept(work.tokens)
        every = max(1, round(work.tokens / kept))
        found += [answer(f"stride, every {every}", f"stride(every={every},recent=1,sinks=1)"),
                  answer("snapkv, as many rows", f"snapkv(budget={max(kept, 33)})"),
                  answer("modal, then int4", f"{modal} | int(bits=4)"),
                  answer("int4 alone", "int(bits=4)")]  # fmt: skip
    if any(x.cross for x in model.layers):
        found += [answer("int8 (cross-attention too)", "int(bits=8)"),
                  answer(f"every {audio}nd row of the encoder", "full", strided(model, audio))]  # fmt: skip
    return found + [answer(m, m) for m in methods or []]
