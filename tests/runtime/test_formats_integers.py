"""Uniform integers: the formula by hand and by numpy, exact bounds, hard groups, and the survey's version too."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running_parts import normal, one_block, relative_error, rows, run, there_and_back

from kvsim.errors import KvsimError
from runtime.packing import unpack

AXES = ["token,group=16", "row", "channel,group=8", "head,group=8", "layer,group=8"]
SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}


def groups_of(x, axis, group):
    """Numpy's own cut into groups, in the order of the scale buffer; the last of a row may be shorter."""
    b, h, n, d = x.shape
    if axis in ("token", "row"):
        group = d if axis == "row" else group
        cuts = range(group, d, group)
        return [g for row in x.reshape(-1, d) for g in np.split(row, list(cuts))]
    blocks = x.reshape(b, h, n // group, group, d)
    if axis == "channel":
        return list(blocks.transpose(0, 1, 2, 4, 3).reshape(-1, group))
    if axis == "head":
        return list(blocks.reshape(-1, group * d))
    return list(blocks.transpose(0, 2, 1, 3, 4).reshape(-1, h * group * d))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_scales_and_minima_are_numpys(axis, bits):
    """s = (max - min) / (2^b - 1), m = min, group by group, to the rounding of fp16."""
    x = normal(2, 2, 16, 40, seed=bits)
    coded = run(f"int(bits={bits},axis={axis})", width=40).encode(x, {})
    groups = groups_of(x.numpy().astype(np.float64), axis.split(",")[0], int(axis.split("=")[-1]) if "=" in axis else 0)
    low = np.array([g.min() for g in groups])
    step = np.array([np.ptp(g) for g in groups]) / (2**bits - 1)
    # a minimum moves by half its last place, which moves the range; a scale is rounded up by one last place at most
    np.testing.assert_allclose(coded["min"].double().reshape(-1), low, rtol=2**-11)
    slack = step * 2**-9 + np.abs(low) * 2**-10 / (2**bits - 1)
    assert (np.abs(coded["scale"].double().reshape(-1).numpy() - step) <= slack).all()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("symmetric", ["false", "true"])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), bits=st.integers(2, 8), scale=st.sampled_from(["fp16", "bf16", "fp32"]))
def test_half_a_step_is_the_bound(axis, symmetric, data, bits, scale):
    unit = 8 if "8" in axis else 1
    x = data.draw(rows(widths=(16, 33, 80), unit=unit))
    twin = run(f"int(bits={bits},axis={axis},symmetric={symmetric},scale_dtype={scale})", width=x.shape[3])
    try:
        coded = twin.encode(x, {})
    except KvsimError:
        assert float(x.float().abs().max()) > 30_000
        return
    back = twin.decode(coded, {}, one_block(x.shape[2])).double().numpy()
    kind, size = axis.split(",")[0], int(axis.split("=")[-1]) if "=" in axis else 0
    exact = x.double().numpy()
    stored = coded["scale"].double().reshape(-1).numpy()
    least = coded["min"].double().reshape(-1).numpy() if "min" in coded else None
    where = enumerate(zip(groups_of(exact, kind, size), groups_of(back, kind, size), strict=True))
    for i, (before, after) in where:
        bound = stored[i] / 2 * (1 + 2**-10) + np.abs(before).max() * 2**-20 + 1e-37
        if least is not None:
            bound += abs(least[i] - before.min())
        assert np.abs(before - after).max() <= bound, i


@pytest.mark.parametrize("symmetric", ["true", "false"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14, 0.1, 60000.0, -65504.0, 6e-8, -1e-5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_constant_group_comes_back_exactly(bits, axis, symmetric, value, dtype):
    form = f"int(bits={bits},axis={axis},symmetric={symmetric})"
    value = float(torch.tensor(value, dtype=torch.float16))
    x = torch.full((1, 2, 8, 40), value, dtype=dtype)
    assert torch.equal(there_and_back(run(form, width=40, dtype=dtype), x), x)


def test_the_largest_fp16_value_does_not_round_to_infinity():
    # s = 65504 / 15 = 4366.9, in fp16 4368; code 15 stands for 65520, which fp16 rounds to infinity; code 9 for 39312,
    # between 1228 and 1229 steps of 32, even: 39296
    x = torch.tensor([0.0, 65504.0, 100.0, 40000.0]).half().view(1, 1, 1, 4)
    back = there_and_back(run("int(bits=4)", heads=1, width=4, dtype=torch.float16), x)
    assert back.flatten().tolist() == [0.0, 65504.0, 0.0, 39296.0]


def test_a_constant_in_bf16_scales():
    x = torch.full((1, 1, 2, 8), 3.0e38).bfloat16()
    for symmetric in ("true", "false"):
        twin = run(f"int(bits=4,scale_dtype=bf16,symmetric={symmetric})", heads=1, width=8, dtype=torch.bfloat16)
        assert torch.equal(there_and_back(twin, x), x)


@pytest.mark.parametrize("offset", [50.0, -50.0, 1000.0, -1000.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_groups_on_one_side_of_zero(offset, bits):
    """All positive, all negative: the error is that of the centred values, not of their distance from zero."""
    x = (normal(1, 2, 64, 64) + offset).half()
    back = there_and_back(run(f"int(bits={bits})", dtype=torch.float16), x)
    spread = float(x.float().amax() - x.float().amin())
    assert float((back.float() - x.float()).abs().max()) <= spread / (2**bits - 1) / 2 + abs(offset) * 2**-10


def test_codes_on_their_grid_are_a_fixed_point():
    """What was decoded encodes to the same codes again: no drift, whoever quantizes twice."""
    for form in ("int(bits=4)", "int(bits=2,group=32,axis=channel)", "int(bits=3,symmetric=true)"):
        twin = run(form)
        first = twin.encode(normal(1, 2, 64, 64), {})
        back = twin.decode(first, {}, one_block(64))
        again = twin.decode(twin.encode(back, {}), {}, one_block(64))
        assert float((again - back).abs().max()) <= 1e-5


def test_by_hand():
    # one group 0, 1, 2, 6 at 2 bits: s = 6 / 3 = 2, codes 0, round(.5) = 0, 1, 3, which stand for 0, 0, 2, 6;
    # packed 0 + 0*4 + 1*16 + 3*64 = 208
    twin = run("int(bits=2)", heads=1, width=4)
    coded = twin.encode(torch.tensor([0.0, 1.0, 2.0, 6.0]).view(1, 1, 1, 4), {})
    assert coded["codes"].flatten().tolist() == [208]
    assert (float(coded["scale"]), float(coded["min"])) == (2.0, 0.0)
    assert twin.decode(coded, {}, one_block(1)).flatten().tolist() == [0.0, 0.0, 2.0, 6.0]
    # symmetric at 3 bits: s = 6 / 3 = 2, codes -1.5 -> -2 (ties to even), 1, 2, 3; stored + 3 = 1, 4, 5, 6
    twin = run("int(bits=3,symmetric=true)", heads=1, width=4)
    coded = twin.encode(torch.tensor([-3.0, 2.0, 4.0, 6.0]).view(1, 1, 1, 4), {})
    assert unpack(coded["codes"], 3, 4).flatten().tolist() == [1, 4, 5, 6]
    assert twin.decode(coded, {}, one_block(1)).flatten().tolist() == [-4.0, 2.0, 4.0, 6.0]


def test_symmetric_codes_are_torchs():
    """torch's own fake quantization with our stored scales gives our values."""
    x = normal(1, 2, 16, 64)
    twin = run("int(bits=4,symmetric=true,axis=row)")
    coded = twin.encode(x, {})
    theirs = torch.fake_quantize_per_channel_affine(
        x.reshape(-1, 64), coded["scale"].float().flatten(), torch.zeros(32, dtype=torch.int32), 0, -7, 7
    )
    torch.testing.assert_close(twin.decode(coded, {}, one_block(16)).reshape(-1, 64), theirs)


def test_channel_groups_help_keys_with_a_hot_channel():
    """KIVI's reason for keys by channel: a channel far from zero stretches every token's group, and by channel none."""
    x = normal(1, 2, 128, 64)
    x[..., 5] += 30
    by_token = relative_error(x, there_and_back(run("int(bits=2,group=32)"), x))
    by_channel = relative_error(x, there_and_back(run("int(bits=2,group=32,axis=channel)"), x))
    assert by_channel < by_token / 5


class SurveyQuantizer:
    """GroupInt8Quantizer as the survey prints it in section 3.5 (arithmetic kept line by line)."""

    def __init__(self, group_size=128):
        self.group_size, self.num_groups = group_size, None

    def quantize(self, x):
        seq_len, hidden_dim = x.shape
        if self.num_groups is None:
            self.num_groups = hidden_dim // self.group_size
        x_reshaped = x.view(seq_len, self.num_groups, self.group_size)
        x_min = x_reshaped.amin(dim=-1, keepdim=True)
        x_max = x_reshaped.amax(dim=-1, keepdim=True)
        scale = (x_max - x_min) / 255.0
        zero_point = (-x_min / scale).round().clamp(0, 255)
        x_quantized = ((x_reshaped / scale) + zero_point).round().clamp(0, 255)
        quantized = x_quantized.view(seq_len, hidden_dim)
        return quantized.to(torch.uint8), scale.squeeze(-1), zero_point.squeeze(-1)

    def dequantize(self, quantized, scales, zero_points):
        seq_len, hidden_dim = quantized.shape
        q_reshaped = quantized.view(seq_len, self.num_groups, self.group_size)
        scales = scales.view(1, self.num_groups, 1)
        zero_points = zero_points.view(1, self.num_groups, 1)
        return ((q_reshaped.float() - zero_points) * scales).view(seq_len, hidden_dim)


class TestSurveySection35:
    """The published quantizer fails where ours must not."""

    def test_a_group_that_does_not_straddle_zero(self):
        x = 50 + normal(1, 64)
        theirs = SurveyQuantizer(64)
        lost = theirs.dequantize(*theirs.quantize(x))
        assert float((lost - x).abs().max()) > 40  # the zero point is clamped at 0: everything becomes 255 steps
        ours = there_and_back(run("int(bits=8,group=64)", heads=1), x.view(1, 1, 1, 64)).view(1, 64)
        assert float((ours - x).abs().max()) < 0.04  # half a step of 5 / 255, and fp16's rounding of a minimum near 47

    def test_a_constant_group(self):
        x = torch.full((1, 64), 1.5)
        theirs = SurveyQuantizer(64)
        assert theirs.dequantize(*theirs.quantize(x)).eq(0).all()  # divides by zero, and 1.5 comes back as 0
        assert there_and_back(run("int(bits=8,group=64)", heads=1), x.view(1, 1, 1, 64)).eq(1.5).all()

    def test_more_than_one_token(self):
        x = normal(3, 64)
        theirs = SurveyQuantizer(64)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            theirs.dequantize(*theirs.quantize(x))
        ours = there_and_back(run("int(bits=8,group=64)", heads=1), x.view(1, 1, 3, 64))
        assert relative_error(x, ours.view(3, 64)) < 1e-4

    def test_another_width_after_the_first(self):
        theirs = SurveyQuantizer(32)
        theirs.quantize(normal(1, 64))
        with pytest.raises(RuntimeError):  # the number of groups sticks to the first input
            theirs.quantize(normal(1, 96))

    def test_a_width_that_the_group_does_not_divide(self):
        with pytest.raises(RuntimeError):
            SurveyQuantizer(64).quantize(normal(1, 80))
        x = normal(1, 1, 1, 80)
        assert relative_error(x, there_and_back(run("int(bits=8,group=64)", heads=1, width=80), x)) < 1e-4

    def test_a_batch_stays_a_batch(self):
        """KVCacheQuantizer squeezes k[:, h] and so refuses more than one sequence; sequences here do not meet."""
        x = normal(3, 2, 5, 64)
        with pytest.raises(ValueError, match="too many values to unpack"):
            SurveyQuantizer(64).quantize(x[:, 0, :, :].squeeze(0))
        twin = run("int(bits=8,group=64)")
        alone = torch.cat([there_and_back(twin, x[i : i + 1]) for i in range(3)])
        assert torch.equal(there_and_back(twin, x), alone)

    def test_metadata_is_counted(self):
        """Section 3.2.2 and get_compression_ratio: 32 / 8 = 4 forgets scales; held are 64 + 2 + 2 bytes for 256."""
        coded = run("int(bits=8,group=64)", heads=1).encode(normal(1, 1, 1, 64), {})
        held = sum(tensor.nbytes for tensor in coded.values())
        assert held == 68
        assert 256 / held == pytest.approx(3.76, abs=0.01)
