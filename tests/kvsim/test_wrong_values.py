"""Wrong values in Python: whatever the type, an answer or one line."""

import numpy as np
import pytest

import kvsim
from kvsim.choice import Limits
from kvsim.errors import KvsimError

LLAMA = kvsim.load_model("llama-3.1-8b")
H100 = kvsim.load_device("h100-sxm")

ODD = [None, 5, -1, 1.5, float("nan"), "", "x", [], [1], {}, b"x", True, 10**30, 10**400, np.array([]),
       np.array([1, 2]), np.array(["a"]), np.array([[1, 2]]), object(), 1j]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda v: type(v).__name__)
def test_values_of_any_type_are_answered_or_refused_in_one_line(odd):
    """Every keyword of the Python face, one at a time, given what makes no sense there."""
    int4, work = kvsim.parse_method("int4"), kvsim.Workload(1, 128)
    case = {"model": LLAMA, "hardware": H100, "method": int4, "workload": work}
    options = ("weights", "kv_dtype", "devices", "reserve_bytes", "kernel", "layout")
    attend = {"phase": "decode", "batch": 1, "tokens": 9, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64}
    sizes = {"layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    grid = {"methods": ["full"], "prompt_tokens": 128}
    questions = [
        *((lambda **k: kvsim.predict(kvsim.Case(**k)), case | {name: odd}) for name in (*case, *options)),
        *((kvsim.Workload, {name: odd}) for name in ("batch", "prompt_tokens", "new_tokens")),
        *((kvsim.attention_seconds, attend | {"device": H100, name: odd})
          for name in (*attend, "format", "window", "kernel")),
        *((kvsim.matmul_seconds, {"device": H100, "m": 1, "n": 1, "k": 1} | {name: odd})
          for name in ("m", "n", "k", "dtype")),
        *((kvsim.ModelSpec.from_numbers, sizes | {name: odd})
          for name in (*sizes, "layer_types", "dtype", "tied", "window", "hidden_size")),
        *((kvsim.sweep, {"model": LLAMA, "device": H100, **grid} | {name: odd})
          for name in (*grid, "batch", "new_tokens")),
        *((lambda **k: kvsim.fit(LLAMA, H100, **k), {"workload": work, "methods": ["int4"]} | {name: odd})
          for name in ("workload", "objective", "limits", "engine", *options) if (name, odd) != ("methods", None)),
        *((LLAMA.cache_bytes, {"tokens": 9, name: odd}) for name in ("tokens", "batch", "bits")),
        *((Limits, {name: odd}) for name in ("max_ttft_ms", "max_tpot_ms", "min_context")),
        (kvsim.load_model, {"source": odd}), (kvsim.parse_method, {"text": odd}),
    ]  # fmt: skip
    for ask_it, given_it in questions:
        try:
            ask_it(**given_it)
        except KvsimError as refusal:
            told = str(refusal)
            assert told
            assert "\n" not in told


@pytest.mark.parametrize("methods", ["int4", None, 5, np.array(3)])
def test_one_method_is_no_list(methods):
    with pytest.raises(KvsimError, match="methods are a list"):
        kvsim.sweep(LLAMA, H100, methods, 128)


def test_more_tokens_at_once_than_can_be_counted():
    with pytest.raises(KvsimError, match="batch x tokens is"):
        kvsim.Case(LLAMA, H100, kvsim.parse_method("full"), kvsim.Workload(2**40, 2**17))


def test_dtypes_are_read_in_any_case():
    case = kvsim.Case(LLAMA, H100, kvsim.parse_method("full"), kvsim.Workload(1, 128), kv_dtype="FP8", weights="BF16")
    assert (case.kv_dtype, case.value_bits) == ("fp8", 8)
