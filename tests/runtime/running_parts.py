"""Parts by their written form, running: shared by the tests of formats and corrections."""

import torch
from hypothesis import strategies as st

from kvsim import parse_method
from kvsim.parts import Place
from runtime.parts import Setting, twins

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def running(form, *, heads=2, width=64, dtype=torch.float32, side="k", layer=0, calibration=None, seed=0):
    """(twin of the format, twins of its corrections) of e.g. `int(bits=2)+lowrank(rank=4)`."""
    chain = parse_method(f"k:{form} v:full" if side == "k" else f"k:full v:{form}")
    chain = chain.k if side == "k" else chain.v
    place = Place(side, heads, width, 2 * heads, torch.finfo(dtype).bits, layer)
    chain.format.check_place(place)
    setting = Setting(place, dtype, calibration=calibration or {}, seed=seed)
    known = twins()
    return known[chain.format.name](chain.format, setting), [known[c.name](c, setting) for c in chain.corrections]


def run(form, **where):
    """The format's twin alone."""
    return running(form, **where)[0]


def one_block(rows):
    return torch.zeros(rows, dtype=torch.int64)


def there_and_back(twin, x):
    fixed = twin.model_buffers() | twin.start(x)
    return twin.decode(twin.encode(x, fixed), fixed, one_block(x.shape[2]))


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(x, y):
    return float((y.float() - x.float()).square().mean() / x.float().square().mean())


@st.composite
def rows(draw, widths=(1, 5, 31, 32, 33, 64, 80), unit=1, heads=2):
    """Rows [B, H, n, d] of a kind of values that breaks quantizers, in any of the three dtypes."""
    batch, n, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)) * unit, draw(st.sampled_from(widths))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    x = normal(batch, heads, n, width, seed=draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(list(KINDS)))
    return KINDS[kind](x).to(dtype)


def _spiky(x):
    x = x.clone()
    x.view(-1)[:: max(1, x.numel() // 3)] *= 500
    return x


KINDS = {
    "normal": lambda x: x,
    "huge": lambda x: x * 4000,
    "tiny": lambda x: x * 1e-6,
    "subnormal": lambda x: x * 3e-8,
    "vanishing": lambda x: x * 1e-39,
    "constant": lambda x: torch.full_like(x, float(x.flatten()[0])),
    "zero": torch.zeros_like,
    "negative": lambda x: -5 - x.abs(),
    "positive": lambda x: 1000 + x.abs(),
    "two values": lambda x: torch.where(x > 0, 3.0, -1.0),
    "spiky": _spiky,
}
