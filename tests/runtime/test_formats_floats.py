"""Float formats and ggml's blocks against other people's code: torch's casts, the gguf package, the OCP tables."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running_parts import KINDS, normal, one_block, relative_error, rows, run, there_and_back

from kvsim.errors import KvsimError
from runtime.levels import E2M1, from_e2m1, to_e2m1
from runtime.packing import unpack

GGML = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


@pytest.fixture(scope="module")
def quants():
    return pytest.importorskip("gguf.quants")


class TestGguf:
    @pytest.mark.parametrize("kind", GGML)
    @pytest.mark.parametrize("values", [v for v in KINDS if v not in ("tiny", "subnormal", "vanishing")])
    def test_blocks_are_the_gguf_packages_byte_for_byte(self, quants, kind, values):
        x = KINDS[values](normal(2, 3, 7, 96, seed=3)) / (4 if values == "huge" else 1)
        ours = run(f"gguf(type={kind})", heads=3, width=96).encode(x, {})["blocks"]
        theirs = quants.quantize(x.numpy(), quants.GGMLQuantizationType[kind.upper()])
        np.testing.assert_array_equal(ours.numpy(), theirs)

    @pytest.mark.parametrize("kind", [*GGML, "iq4_nl"])
    @settings(max_examples=25, deadline=None)
    @given(x=rows(widths=(32, 96)))
    def test_their_decoder_reads_our_blocks(self, quants, kind, x):
        twin = run(f"gguf(type={kind})", width=x.shape[3])
        try:
            coded = twin.encode(x, {})
        except KvsimError:
            assert float(x.float().abs().max()) > 65504
            return
        theirs = quants.dequantize(coded["blocks"].numpy(), quants.GGMLQuantizationType[kind.upper()])
        np.testing.assert_array_equal(twin.decode(coded, {}, one_block(x.shape[2])).numpy(), theirs)

    def test_iq4_nl_takes_the_nearest_level_of_its_first_scale(self, quants):
        """quantize_row_iq4_nl_ref: the largest value is level -127; then the least squares scale, weights x^2."""
        x = normal(1, 1, 4, 32, seed=5)
        coded = run("gguf(type=iq4_nl)", heads=1, width=32).encode(x, {})["blocks"].numpy()[0, 0]
        levels = np.array(quants.IQ4_NL.kvalues, dtype=np.float64)
        for row, block in zip(x[0, 0].double().numpy(), coded, strict=True):
            peak = row[np.abs(row).argmax()]
            codes = np.abs(row[:, None] / (peak / -127) - levels).argmin(1)
            q, w = levels[codes], row**2
            scale = (w * q * row).sum() / (w * q * q).sum()
            np.testing.assert_array_equal(np.concatenate((block[2:] & 15, block[2:] >> 4)), codes)
            assert block[:2].view(np.float16)[0] == pytest.approx(scale, rel=2**-11)

    def test_more_bits_less_error(self):
        x = normal(1, 2, 64, 64)
        q8, q51, q50, q41, iq4, q40 = (
            relative_error(x, there_and_back(run(f"gguf(type={t})"), x))
            for t in ("q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0")
        )
        assert q8 < q51 < q50 < q41 < q40
        assert iq4 < q40


class TestFloat8:
    @pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
    def test_the_plain_cast_is_torchs(self, kind, dtype):
        x = normal(1, 2, 8, 64) * 10
        back = there_and_back(run(f"float8(kind={kind},scale=none)"), x)
        assert torch.equal(back, x.to(dtype).float())

    @pytest.mark.parametrize(("kind", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
    def test_casts_saturate(self, kind, largest):
        x = torch.tensor([largest, largest * 1.07, 1e6, -1e30, 65504.0, -largest]).view(1, 1, 1, 6)
        back = there_and_back(run(f"float8(kind={kind},scale=none)", heads=1, width=6), x)
        expected = [largest, largest, largest, -largest, largest, -largest]
        assert back.flatten().tolist() == expected

    @pytest.mark.parametrize(("kind", "mantissa", "below"), [("e4m3", 3, 2.0**-10), ("e5m2", 2, 2.0**-17)])
    @settings(max_examples=25, deadline=None)
    @given(x=rows())
    def test_half_a_last_place_is_the_bound(self, kind, mantissa, below, x):
        """Relative 2^-(m+1) for normal numbers, half the smallest subnormal times the scale below them."""
        twin = run(f"float8(kind={kind})", width=x.shape[3])
        try:
            coded = twin.encode(x, {})
        except KvsimError:
            assert float(x.float().abs().max()) > 65504
            return
        back = twin.decode(coded, {}, one_block(x.shape[2]))
        wide = x.float()
        bound = (wide.abs() * 2.0 ** -(mantissa + 1)).maximum(coded["scale"].float() * below) * 1.001 + 1e-37
        assert ((back - wide).abs() <= bound).all()

    def test_later_and_larger_rows_keep_their_own_scale(self):
        """Trap 7: a scale frozen at the first rows would clip these to a thousandth of what they are."""
        twin = run("float8")
        fixed = twin.start(normal(1, 2, 8, 64))
        later = normal(1, 2, 8, 64) * 1000
        back = twin.decode(twin.encode(later, fixed), fixed, one_block(8))
        assert relative_error(later, back) < 1e-3

    def test_the_tensor_scale_is_calibrated_and_never_clips_silently(self):
        with pytest.raises(KvsimError, match="scale=tensor runs with calibration only"):
            run("float8(scale=tensor)").encode(normal(1, 2, 8, 64), {})
        found = run("float8(scale=tensor)").calibrate(normal(1, 2, 512, 64))
        twin = run("float8(scale=tensor)", calibration=found, layer=2)
        assert twin.model_buffers()["scale"].shape == (1, 1, 1, 1)
        x = normal(1, 2, 64, 64, seed=9)
        assert relative_error(x, there_and_back(twin, x)) < 1e-3
        assert relative_error(1.9 * x, there_and_back(twin, 1.9 * x * 0.99)) < 2e-3  # within the headroom of two
        with pytest.raises(KvsimError, match=r"keys of layer 2 .* times the calibrated range"):
            twin.encode(x * 5, {})


class TestE2M1:
    def test_every_code_survives(self):
        codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16)
        back = to_e2m1(from_e2m1(codes))
        assert back.flatten().tolist() == [*range(8), 0, *range(9, 16)]  # minus zero becomes zero

    def test_nearest_with_ties_to_even(self):
        # halfway points of 0 .5 1 1.5 2 3 4 6: mantissa bit 0 are 0, 1, 2, 4 (and 6 is odd)
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
        assert from_e2m1(to_e2m1(ties.view(1, 1, 1, 8))).flatten().tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
        x = torch.linspace(-8, 8, 4001).view(1, 1, 1, -1)
        distance = (x.flatten()[:, None] - torch.tensor([*E2M1, *(-v for v in E2M1)])).abs().amin(1)
        torch.testing.assert_close((from_e2m1(to_e2m1(x)) - x).abs().flatten(), distance)


class TestMxFp:
    def test_mxfp4_is_the_gguf_packages(self, quants):
        """Same exponents, and the same values: their block keeps j and j + 16 in a byte, ours 2j and 2j + 1."""
        x = normal(2, 3, 7, 96, seed=1)
        twin = run("mxfp(bits=4)", heads=3, width=96)
        coded = twin.encode(x, {})
        blocks = quants.quantize(x.numpy(), quants.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(coded["scale"].numpy(), blocks.reshape(2, 3, 7, 3, 17)[..., 0])
        theirs = quants.dequantize(blocks, quants.GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(twin.decode(coded, {}, one_block(7)).numpy(), theirs)

    def test_mxfp8_is_torchs_cast_under_the_standards_scale(self):
        x = normal(1, 2, 5, 64, seed=2)
        back = there_and_back(run("mxfp(bits=8)"), x)
        groups = x.reshape(-1, 32)
        scale = 2.0 ** (groups.abs().amax(1, keepdim=True).log2().floor() - 8)
        theirs = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(back.reshape(-1, 32), theirs)

    def test_by_hand(self):
        # largest 5: floor(log2 5) = 2, exponent 2 - 2 = 0; 5 -> 4 (tie to even), -0.3 -> -0.5, and 7 saturates at 6
        x = torch.zeros(1, 1, 2, 32)
        x[0, 0, 0, :2] = torch.tensor([5.0, -0.3])
        x[0, 0, 1, :2] = torch.tensor([7.0, 1.2])
        twin = run("mxfp(bits=4)", heads=1, width=32)
        coded = twin.encode(x, {})
        assert coded["scale"].flatten().tolist() == [127, 127]
        assert twin.decode(coded, {}, one_block(2))[0, 0, :, :2].tolist() == [[4.0, -0.5], [6.0, 1.0]]


class TestNvFp4:
    def test_their_decoder_agrees_on_group_scales(self, quants):
        """gguf reads the same e4m3 bytes and E2M1 codes, once they lie in its layout; the fp32 scale is beside it."""
        x = normal(1, 1, 3, 64, seed=4)
        twin = run("nvfp4", heads=1)
        coded = twin.encode(x, {})
        codes = unpack(coded["codes"], 4, 64).view(3, 4, 2, 8)
        blocks = torch.cat((coded["scale"].view(3, 4), (codes[:, :, 0] | (codes[:, :, 1] << 4)).view(3, 32)), dim=1)
        theirs = quants.dequantize(blocks.numpy(), quants.GGMLQuantizationType.NVFP4) * coded["block_scale"].item()
        np.testing.assert_allclose(twin.decode(coded, {}, one_block(3)).numpy()[0, 0], theirs, rtol=1e-6)

    @pytest.mark.parametrize("scale", ["block", "row"])
    @settings(max_examples=25, deadline=None)
    @given(x=rows(widths=(16, 40, 64)))
    def test_bound(self, scale, x):
        """Half of the widest gap (2) and an e4m3 scale that may be 1/16 too small: 6 - 6 * 16/17 < 1 as well."""
        twin = run(f"nvfp4(scale={scale})", width=x.shape[3])
        coded = twin.encode(x, {})
        back = twin.decode(coded, {}, one_block(x.shape[2]))
        groups = torch.nn.functional.pad(x.float(), (0, -x.shape[3] % 16)).unflatten(-1, (-1, 16))
        away = torch.nn.functional.pad(back - x.float(), (0, -x.shape[3] % 16)).unflatten(-1, (-1, 16)).abs()
        over_all = groups.abs().amax((1, 2, 3, 4) if scale == "block" else (3, 4), keepdim=True)
        # a scale is at least 2^-9 of the fp32 scale, largest / 2688; gaps of the smallest scale are 2 of it
        bound = groups.abs().amax(-1, keepdim=True) / 6 * (17 / 16) + over_all / 2688 * 2**-9 + 1e-34
        assert (away <= bound).all()

    def test_a_faint_group_beside_a_loud_one(self):
        """fp32 scale 2688 / 2688 = 1; 6 * 2^-11 wants a group scale of 2^-11, gets the smallest, 2^-9, and code 1.5."""
        x = torch.zeros(1, 1, 1, 32)
        x[..., 0], x[..., 16] = 2688.0, 6 * 2.0**-11
        back = there_and_back(run("nvfp4", heads=1, width=32), x)
        assert torch.equal(back, x)

    def test_a_later_block_has_its_own_scale(self):
        twin = run("nvfp4")
        first, later = normal(1, 2, 16, 64), normal(1, 2, 16, 64, seed=1) * 1e4
        coded = [twin.encode(x, {}) for x in (first, later)]
        joined = {k: torch.cat([c[k] for c in coded], dim=2) for k in coded[0]}
        back = twin.decode(joined, {}, torch.arange(2).repeat_interleave(16))
        assert relative_error(first, back[:, :, :16]) < 0.02
        assert relative_error(later, back[:, :, 16:]) < 0.02

    def test_order_of_four_bit_formats(self):
        """Measured order on Gaussian rows: finer scales help, and 16 values share one better than 32."""
        x = normal(1, 2, 512, 64)
        nv, mx = (relative_error(x, there_and_back(run(f), x)) for f in ("nvfp4", "mxfp(bits=4)"))
        assert nv < 0.010 < mx < 0.016


@given(st.integers(0, 255))
def test_e8m0_covers_its_range(exponent):
    """Any power of two that fp32 holds comes back exactly from mxfp, between 2^-126 and 2^127."""
    value = 2.0 ** min(max(exponent - 127, -126), 127)
    x = torch.full((1, 1, 1, 32), value)
    for bits in (4, 8):
        assert torch.equal(there_and_back(run(f"mxfp(bits={bits})", heads=1, width=32), x), x)
