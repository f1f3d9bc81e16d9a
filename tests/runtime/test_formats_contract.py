"""What every running format owes: the declared bytes, pure encoding, finite rows or one clear line."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running_parts import DTYPES, normal, one_block, relative_error, rows, run, running, there_and_back

from kvsim.errors import KvsimError
from kvsim.parts import parts
from runtime.parts import twins

FORMS = [
    "int(bits=4)",
    "int(bits=8,group=32,symmetric=true,scale_dtype=fp32)",
    "int(bits=3,group=24,scale_dtype=bf16)",
    "int(bits=1,axis=row)",
    "int(bits=2,group=32,axis=channel,residual=128,flush=all)",
    "int(bits=5,group=16,axis=channel,symmetric=true)",
    "int(bits=6,group=8,axis=head)",
    "int(bits=7,group=8,axis=layer)",
    "log(bits=4)",
    "log(bits=3,group=24)",
    "kmeans(bits=3)",
    "kmeans(bits=4,per=tensor)",
    "kmeans(bits=2,per=layer,scale=row)",
    "mixed(bits=(2,4,8),mean=4,group=16)",
    "mixed(bits=(1,3,5),mean=2.3,group=24)",
    "widths(bits=(5,))",
    "widths(bits=(3,),group=24)",
    "float8(kind=e4m3)",
    "float8(kind=e5m2)",
    "float8(scale=none)",
    "float8(kind=e5m2,scale=none)",
    "nvfp4",
    "nvfp4(scale=row)",
    "mxfp(bits=4)",
    "mxfp(bits=8)",
    "rotated(bits=4)",
    "rotated(bits=3)",
    "sketch(m=256)",
    "sketch(m=100)",
    *(f"gguf(type={t})" for t in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")),
]
CORRECTED = [
    "int(bits=2,residual=64,flush=all)+outliers(fraction=0.02)+lowrank(rank=4)",
    "nvfp4+outliers(fraction=0.3)",
]
REBUILDING = [f for f in FORMS if not f.startswith("sketch")]


def test_every_format_and_correction_has_its_twin():
    wanted = {name for name, part in parts().items() if part.role in ("format", "correction")}
    assert wanted <= set(twins())
    named = {form.split("(")[0] for forms in (FORMS, CORRECTED) for f in forms for form in f.split("+")}
    assert wanted == named | {"full"}


def flushed(part, rows_held):
    """Rows of each block when `rows_held` rows are encoded, the first block as large as a prompt of half of them."""
    unit = getattr(part, "unit", 1)
    first = rows_held // 2 // unit * unit
    return [size for size in (first, rows_held - first) if size]


def encoded_bytes(form, rows_held, heads, width, dtype=torch.bfloat16, batch=1):
    """(bytes by buffer name as held, as declared) for a sequence, everything concatenated as a store does."""
    twin, fixes = running(form, heads=heads, width=width, dtype=dtype)
    blocks = flushed(twin.part, rows_held)
    held, fixed = {}, None
    for block in blocks:
        x = normal(batch, heads, block, width, seed=block, dtype=dtype)
        found = {}
        for fix in fixes:
            x, taken = fix.before(x)
            found |= taken
        if fixed is None:
            fixed = twin.start(x)
        coded = twin.encode(x, twin.model_buffers() | fixed)
        back = twin.decode(coded, twin.model_buffers() | fixed, one_block(block))
        for fix in fixes:
            found |= fix.after(x, back)
        for name, tensor in (coded | found).items():
            held[name] = held.get(name, 0) + tensor.nbytes
    for name, tensor in (fixed or {}).items():
        held[name] = tensor.nbytes
    model = {name: tensor.nbytes for name, tensor in twin.model_buffers().items()}
    declared, per_model = {}, {}
    for part in [twin.part, *(f.part for f in fixes)]:
        for b in part.buffers(sum(blocks), len(blocks), twin.place):
            (per_model if b.per_model else declared)[b.name] = int(b.bytes) * (1 if b.per_model else batch)
    return held, declared, model, per_model


@pytest.mark.parametrize("form", ["full", *FORMS, *CORRECTED])
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_bytes_are_as_declared(form, width):
    if "gguf" in form and width % 32:
        with pytest.raises(KvsimError, match="32"):
            running(form, width=width)
        return
    unit = getattr(running(form, width=width)[0].part, "unit", 1)
    group, residual = max(unit, 16), 128
    lengths = {1, group - 1, group, group + 1, residual - 1, residual + 1}
    for turn, rows_held in enumerate(sorted({n // unit * unit for n in lengths} - {0})):
        heads = (1, 3)[turn % 2]
        held, declared, model, per_model = encoded_bytes(form, rows_held, heads, width)
        assert held == declared, (rows_held, heads)
        assert model == per_model


@pytest.mark.parametrize("form", ["full", *FORMS, *CORRECTED])
def test_bytes_at_long_odd_lengths(form):
    unit = getattr(running(form)[0].part, "unit", 1)
    for n in (1000, 1001):
        held, declared, model, per_model = encoded_bytes(form, n // unit * unit, 1, 64, dtype=torch.float32, batch=2)
        assert (held, model) == (declared, per_model)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_buffer_match_rows_per(form):
    twin = run(form, width=64)
    x = normal(1, 2, 64, 64)
    for name, tensor in twin.encode(x, twin.model_buffers() | twin.start(x)).items():
        per = twin.rows_per(name)
        assert tensor.shape[2] == (64 // per if per else 1), name
        assert tensor.shape[:2] in ((1, 2), (1, 1))


@pytest.mark.parametrize("form", FORMS)
def test_encoding_is_pure(form):
    """A flush depends on its own rows only: blocks encoded one by one decode as they would alone, in any order."""
    twin = run(form, width=64, dtype=torch.bfloat16)
    pieces = [normal(2, 2, n, 64, seed=n, dtype=torch.bfloat16) for n in (64, 32, 128)]
    fixed = twin.model_buffers() | twin.start(pieces[0])
    coded = [twin.encode(x, fixed) for x in pieces]
    again = [twin.encode(x, fixed) for x in reversed(pieces)][::-1]
    for a, b in zip(coded, again, strict=True):
        assert all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)
    alone = [twin.decode(c, fixed, one_block(x.shape[2])) for c, x in zip(coded, pieces, strict=True)]
    joined = {k: torch.cat([c[k] for c in coded], dim=2) for k in coded[0]}
    blocks = torch.repeat_interleave(torch.arange(3), torch.tensor([64, 32, 128]))
    assert torch.equal(twin.decode(joined, fixed, blocks), torch.cat(alone, dim=2))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_row_addressable_format_stand_alone(form):
    twin = run(form, width=64)
    if not twin.part.row_addressable:
        return
    x = normal(1, 2, 10, 64)
    fixed = twin.model_buffers() | twin.start(x)
    coded, whole = twin.encode(x, fixed), there_and_back(twin, x)
    kept = torch.tensor([1, 4, 9])
    some = {k: v.index_select(2, kept) for k, v in coded.items()}
    assert torch.allclose(twin.decode(some, fixed, one_block(3)), whole.index_select(2, kept), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [f for f in FORMS if "axis=" in f and "axis=row" not in f])
def test_a_run_may_end_within_a_unit(form):
    twin = run(form, width=64)
    x = normal(1, 2, 64, 64)
    coded, whole = twin.encode(x, {}), there_and_back(twin, x)
    some = {k: v if twin.rows_per(k) > 1 else v[:, :, :61] for k, v in coded.items()}
    assert torch.equal(twin.decode(some, {}, one_block(61)), whole[:, :, :61])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_with_the_place(form, bad):
    twin = run(form, width=64, layer=7)
    x = normal(1, 2, 64, 64)
    fixed = twin.model_buffers() | twin.start(x)
    x[0, 1, 5, 3] = bad
    with pytest.raises(KvsimError, match=r"keys of layer 7 \(width 64\) hold NaN or infinity"):
        twin.encode(x, fixed)


@pytest.mark.parametrize("form", ["int(bits=4)", "int(bits=1)", "log(bits=4)", "rotated(bits=4)", "sketch(m=64)"])
def test_overflow_of_a_scale_is_an_error_not_infinity(form):
    twin = run(form, width=64, side="k", layer=3)
    with pytest.raises(KvsimError, match=r"keys of layer 3 .*more than its fp16 scale can carry"):
        twin.encode(normal(1, 2, 4, 64) * 1e6, twin.model_buffers())


@pytest.mark.parametrize("form", REBUILDING)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_finite_rows_or_one_clear_line(form, data):
    """No value, however large, small or lopsided, comes back infinite or farther off than twice the largest."""
    unit = getattr(run(form, width=64).part, "unit", 1)
    x = data.draw(rows(widths=(32, 64, 96), unit=unit))
    twin = run(form, width=x.shape[3], dtype=x.dtype)
    try:
        back = there_and_back(twin, x)
    except KvsimError:
        assert float(x.float().abs().max()) > 1000
        return
    assert back.dtype == x.dtype
    assert torch.isfinite(back).all()
    if "scale=none" not in form:  # a plain cast saturates
        reach = float(x.float().abs().max())
        assert float((back.float() - x.float()).abs().max()) <= 2 * reach * 1.01 + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", REBUILDING)
def test_input_dtype_hardly_matters(form, dtype):
    """The same values through a narrower cache: the error grows by no more than that dtype's own rounding."""
    x = normal(1, 2, 64, 64, dtype=torch.bfloat16)
    wide, narrow = run(form, dtype=torch.float32), run(form, dtype=DTYPES[dtype])
    reference = relative_error(x, there_and_back(wide, x.float()))
    assert relative_error(x, there_and_back(narrow, x.to(DTYPES[dtype]))) <= reference * 1.05 + 2**-16


@pytest.mark.parametrize("name", ["int", "log", "kmeans", "rotated"])
def test_more_bits_less_error(name):
    x = normal(1, 2, 256, 64)
    first = 2 if name == "log" else 1
    errors = [relative_error(x, there_and_back(run(f"{name}(bits={b})"), x)) for b in range(first, 9)]
    if name == "log":  # beyond four bits only the range grows: factors of two stay factors of two
        assert errors[0] > errors[1] > errors[2]
        assert errors[-1] <= errors[2]
    else:
        assert all(a > 2 * b for a, b in pairwise(errors))


def test_no_rows_encode_to_no_rows():
    for form in FORMS:
        twin = run(form, width=64)
        x = normal(1, 2, 64, 64)
        fixed = twin.model_buffers() | twin.start(x)
        if twin.part.row_addressable:
            empty = twin.encode(x[:, :, :0], fixed)
            assert twin.decode(empty, fixed, one_block(0)).shape == (1, 2, 0, 64), form
