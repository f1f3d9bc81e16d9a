"""The question: a model on devices with a workload, a method and how they are run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import KvsimError, did_you_mean, shown, word
from kvsim.hardware import HardwareProfile
from kvsim.method import Method
from kvsim.model import DTYPE_BITS, ModelSpec
from kvsim.weights import default_weights, weight_format
from kvsim.workload import MAX_COUNT, Workload, one_whole

if TYPE_CHECKING:
    from kvsim.engines.parallel import ParallelLayout


@dataclass(frozen=True, eq=False)
class Case:
    """A question: this model on this device with this method for this workload.

    Args:
        weights: format of the weights (`bf16`, `fp8`, `int4`, `q4_k_m` ...); empty: the model's dtype.
        kv_dtype: full precision of the cache; empty: the model's dtype.
        devices: how many of the device, used with tensor parallelism; bytes are those of the fullest one.
        reserve_bytes: memory that the runtime keeps for itself on a device; None: by the kind of device.
        kernel: attention kernel family whose coefficients to use; None: the device's default.
        layout: tensor, pipeline, expert and attention-data ranks (kvsim.engines.parallel), which then say how many
            devices; None: `devices` tensor ranks.
    """

    model: ModelSpec
    hardware: HardwareProfile
    method: Method
    workload: Workload
    weights: str = ""
    kv_dtype: str = ""
    devices: int = 1
    reserve_bytes: int | None = None
    kernel: str | None = None
    layout: ParallelLayout | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("model", ModelSpec),
            ("hardware", HardwareProfile),
            ("method", Method),
            ("workload", Workload),
        ):
            if not isinstance(getattr(self, name), kind):
                raise KvsimError(f"case: {name} is a {kind.__name__}, got {shown(getattr(self, name))}")
        for name in ("weights", "kv_dtype", "kernel"):
            if getattr(self, name) is not None or name != "kernel":
                word(getattr(self, name), f"case: {name}")
        weight_format(self.weights or default_weights(self.model))
        object.__setattr__(self, "kv_dtype", self.kv_dtype.lower())
        if self.kv_dtype and self.kv_dtype not in DTYPE_BITS:
            known = ", ".join(DTYPE_BITS)
            nearest = did_you_mean(self.kv_dtype, DTYPE_BITS)
            raise KvsimError(f"kv dtype {shown(self.kv_dtype)} is not one of {known}{nearest}")
        one_whole(self.devices, "devices", low=1, high=2**16)
        self._check_layout()
        if self.reserve_bytes is not None:
            one_whole(self.reserve_bytes, "reserve bytes")
        self._check_sizes()

    def _check_sizes(self) -> None:
        at_once = float(np.max(np.multiply(self.workload.batch, np.asarray(self.workload.tokens, float))))
        if at_once > MAX_COUNT:
            raise KvsimError(
                f"batch x tokens is {at_once:.3g}, more than {MAX_COUNT}; ask for fewer sequences or shorter ones"
            )
        limit, asked = self.model.max_context, np.max(self.workload.tokens)
        if limit and asked > limit:
            raise KvsimError(
                f"{asked} tokens are more than {self.model.name}'s context of {limit};"
                " shorten the prompt or the new tokens"
            )

    def _check_layout(self) -> None:
        if self.layout is None:
            return
        from kvsim.engines.parallel import ParallelLayout

        if not isinstance(self.layout, ParallelLayout):
            raise KvsimError(f"case: layout is a ParallelLayout, got {shown(self.layout)}")
        if self.devices not in (1, self.layout.devices):
            raise KvsimError(f"devices {self.devices} and a layout of {self.layout.devices} ranks: give one of them")
        object.__setattr__(self, "devices", self.layout.devices)

    @cached_property
    def parallel(self) -> ParallelLayout:
        """The layout, or that of `devices` tensor ranks."""
        from kvsim.engines.parallel import ParallelLayout

        return self.layout or ParallelLayout(tensor=self.devices)

    @property
    def value_bits(self) -> int:
        """Bits of a full-precision cached value."""
        return DTYPE_BITS[self.kv_dtype or self.model.dtype]


def case_json(case: Case) -> dict[str, Any]:
    """The question in names and numbers."""
    work = case.workload
    return {
        "model": case.model.name,
        "device": case.hardware.name,
        "devices": case.devices,
        **({"layout": asdict(case.layout)} if case.layout else {}),
        "method": str(case.method),
        "batch": plain(work.batch),
        "prompt_tokens": plain(work.prompt_tokens),
        "new_tokens": plain(work.new_tokens),
        "weights": case.weights or default_weights(case.model),
        "kv_dtype": case.kv_dtype or case.model.dtype,
    }


def plain(value: Any, whole_numbers: bool = False) -> Any:
    """numpy to JSON's own types; whole numbers stay exact."""
    if isinstance(value, np.ndarray | np.generic):
        if whole_numbers and value.dtype.kind == "f":
            value = np.rint(value).astype(np.int64)
        return value.tolist()
    return round(value) if whole_numbers and isinstance(value, float) else value
