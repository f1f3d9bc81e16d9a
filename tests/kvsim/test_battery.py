"""Generated over every part and every pair of parts: nothing joins the list without passing here."""

from itertools import product

import numpy as np
import pytest

import kvsim
from kvsim.errors import KvsimError
from kvsim.parts import parts

MODEL = kvsim.ModelSpec.from_numbers(
    layers=4, n_heads=8, n_kv_heads=4, head_dim=64, hidden_size=512, intermediate_size=1024, vocab_size=1000
)
DEVICE = kvsim.load_device("h100-sxm")
TOKENS = np.array([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 1001, 1009, 4096])


def of(role):
    return [name for name, part in parts().items() if part.role == role]


PAIRS = [
    *parts(),
    *(f"{a} | {b}" for a, b in product(of("tokens"), of("basis") + of("format"))),
    *(f"{a} | {b}" for a, b in product(of("basis"), of("format"))),
    *(f"{a}+{b}" for a, b in product(of("format"), of("correction"))),
    *(f"k:{a} v:{b}" for a, b in product(of("format") + of("basis"), repeat=2)),
]


def composed(text):
    try:
        return kvsim.parse_method(text)
    except KvsimError as reason:
        told = str(reason)
        assert "\n" not in told
        pytest.skip(str(reason))


@pytest.mark.parametrize("text", PAIRS)
def test_part_or_pair(text):
    method = composed(text)
    assert kvsim.parse_method(str(method)) == method
    record = kvsim.predict(kvsim.Case(MODEL, DEVICE, method, kvsim.Workload(2, TOKENS, 7)))
    assert np.all(record.cache_bytes >= 0)
    assert np.all(record.cache_bytes <= record.allocated_bytes)
    assert np.all(np.isfinite(record.decode.seconds) & (record.decode.seconds > 0))
    assert np.all((record.prefill.seconds > 0) == (TOKENS > 0))
    assert np.all((record.decode.low <= record.decode.seconds) & (record.decode.seconds <= record.decode.high))
    single = kvsim.predict(kvsim.Case(MODEL, DEVICE, method, kvsim.Workload(2, 1001, 7)))
    at = int(np.nonzero(TOKENS == 1001)[0][0])
    assert record.cache_bytes[at] == single.cache_bytes
    one, three = (
        kvsim.predict(kvsim.Case(MODEL, DEVICE, method, kvsim.Workload(b, TOKENS, 7))).cache_bytes for b in (1, 3)
    )
    assert np.all(three - one == 2 * (record.cache_bytes - one))


@pytest.mark.parametrize("name", of("format"))
def test_formats_are_never_larger_than_full_and_monotone_up_to_a_tail(name):
    full, mine = (
        kvsim.predict(
            kvsim.Case(MODEL, DEVICE, kvsim.parse_method(text), kvsim.Workload(1, np.arange(0, 700)))
        ).cache_bytes
        for text in ("full", f"k:{name} v:full" if name == "sketch" else name)
    )
    assert np.all(mine[200:] <= full[200:])
    # a tail that flushes may shed at most its own full-precision rows
    tail = 4 * 4 * 64 * 2 * 2 * 64
    assert np.all(np.diff(mine) >= -tail)
