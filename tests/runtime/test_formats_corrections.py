"""Outliers and low rank: exact where they say so, the best where they say so, and worth their bytes."""

import numpy as np
import pytest
import torch
from running_parts import DTYPES, normal, one_block, relative_error, running

from kvsim import parse_method


def corrected(form, x, **where):
    """What a store does with one block: take out, encode, describe what is left, and put everything back."""
    twin, fixes = running(form, width=x.shape[3], heads=x.shape[1], dtype=x.dtype, **where)
    taken, inner, blocks = [], x, one_block(x.shape[2])
    for fix in fixes:
        inner, found = fix.before(inner)
        taken.append(found)
    fixed = twin.model_buffers() | twin.start(inner)
    plain = back = twin.decode(twin.encode(inner, fixed), fixed, blocks)
    for fix, found in zip(fixes, taken, strict=True):
        if found:
            back = fix.restore(back, found, blocks)
    for i, fix in enumerate(fixes):
        taken[i] = taken[i] | fix.after(x, back)
    back = plain
    for fix, found in reversed(list(zip(fixes, taken, strict=True))):
        back = fix.restore(back, found, blocks)
    return back, taken


class TestOutliers:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [64, 80, 300])
    def test_kept_values_are_exact(self, width, dtype):
        x = (normal(2, 2, 7, width) ** 3).to(DTYPES[dtype])
        back, (kept,) = corrected("int(bits=2)+outliers(fraction=0.05)", x)
        count = -(-width * 5 // 100)
        assert kept["values"].shape == (2, 2, 7, count)
        assert kept["index"].dtype == (torch.uint8 if width <= 256 else torch.int16)
        where = kept["index"].to(torch.int64)
        assert torch.equal(back.gather(-1, where), x.gather(-1, where))
        far = (x.float() - x.float().mean(-1, keepdim=True)).abs()
        rest = far.scatter(-1, where, 0.0).amax(-1)
        assert (far.gather(-1, where).amin(-1) >= rest).all()

    @pytest.mark.parametrize("place", [0, 13, 63])
    @pytest.mark.parametrize("size", [1000.0, -1000.0])
    def test_one_loud_value_spoils_nothing(self, place, size):
        """The scale that the format then finds is that of the row without it (its mean stands in its place)."""
        x = normal(1, 1, 4, 64)
        x[..., place] = size
        back, (kept,) = corrected("int(bits=4)+outliers(fraction=0.01)", x)
        assert (kept["index"] == place).all()
        assert (back[..., place] == size).all()
        quiet = x.clone()
        quiet[..., place] = 0
        assert relative_error(quiet, torch.where(x == size, 0.0, back)) < 0.02

    def test_kept_values_may_be_larger_than_a_scale_can_say(self):
        x = normal(1, 2, 4, 64)
        x[..., 3] = 1e7
        back, _ = corrected("int(bits=4)+outliers(fraction=0.01)", x)
        assert (back[..., 3] == 1e7).all()

    def test_all_of_a_row(self):
        x = normal(1, 2, 4, 64)
        assert torch.equal(corrected("int(bits=2)+outliers(fraction=1.0)", x)[0], x)

    def test_wide_rows_and_wrapping_indices(self):
        """Positions above 32767 need all 16 bits."""
        x = torch.zeros(1, 1, 1, 40_000)
        x[..., 39_999] = 7.0
        back, _ = corrected("int(bits=4)+outliers(fraction=0.00001)", x)
        assert torch.equal(back, x)


class TestLowRank:
    @pytest.mark.parametrize("rank", [1, 4, 16])
    def test_nearly_the_best_of_its_rank(self, rank):
        """Eckart-Young: no factors of this rank leave less than the tail of the error's singular values."""
        x = normal(1, 2, 128, 64) @ normal(64, 64, seed=2)
        form = f"int(bits=2,residual=128,flush=all)+lowrank(rank={rank})"
        back, _ = corrected(form, x)
        plain, _ = corrected("int(bits=2,residual=128,flush=all)", x)
        for head in range(2):
            error = (x - plain)[0, head].double().numpy()
            tail = float((np.linalg.svd(error, compute_uv=False)[rank:] ** 2).sum())
            left = float((x - back)[0, head].double().square().sum())
            assert tail * (1 - 1e-5) <= left <= tail * 1.15
            assert left < float((error**2).sum())

    def test_an_error_of_that_rank_vanishes(self):
        twin, (fix,) = running("int(bits=2,residual=64,flush=all)+lowrank(rank=4)")
        x = normal(1, 2, 64, 64)
        decoded = x - normal(1, 2, 64, 4, seed=1) @ normal(1, 2, 4, 64, seed=2)
        factors = fix.after(x, decoded)
        assert factors["row_factors"].shape == (1, 2, 64, 4)
        assert factors["block_factors"].shape == (1, 2, 4, 64)
        torch.testing.assert_close(fix.restore(decoded, factors, one_block(64)), x, rtol=0, atol=1e-4)
        assert fix.rows_per("block_factors") == 0
        assert twin.part.block_rows == 64

    def test_every_row_takes_its_own_blocks_factors(self):
        _, (fix,) = running("int(bits=2,residual=64,flush=all)+lowrank(rank=3)")
        pieces = [(normal(1, 2, n, 64, seed=n), normal(1, 2, n, 64, seed=n + 1)) for n in (64, 128, 64)]
        factors = [fix.after(x, decoded) for x, decoded in pieces]
        joined = {k: torch.cat([f[k] for f in factors], dim=2) for k in factors[0]}
        blocks = torch.arange(3).repeat_interleave(torch.tensor([64, 128, 64]))
        together = fix.restore(torch.cat([d for _, d in pieces], dim=2), joined, blocks)
        apart = [fix.restore(d, f, one_block(d.shape[2])) for (_, d), f in zip(pieces, factors, strict=True)]
        torch.testing.assert_close(together, torch.cat(apart, dim=2))
        middle = {"row_factors": factors[1]["row_factors"], "block_factors": joined["block_factors"]}
        torch.testing.assert_close(fix.restore(pieces[1][1], middle, torch.ones(128, dtype=torch.int64)), apart[1])

    def test_rows_after_a_corrected_prompt_stay_as_they_are(self):
        """A format that flushes row by row has factors for the prompt's block alone."""
        _, (fix,) = running("int(bits=2)+lowrank(rank=4)")
        x, decoded = normal(1, 2, 100, 64), normal(1, 2, 100, 64, seed=1)
        factors = fix.after(x[:, :, :80], decoded[:, :, :80])
        blocks = torch.cat((one_block(80), torch.arange(1, 21)))
        back = fix.restore(decoded, factors, blocks)
        torch.testing.assert_close(back[:, :, :80], fix.restore(decoded[:, :, :80], factors, one_block(80)))
        assert torch.equal(back[:, :, 80:], decoded[:, :, 80:])
        none = factors | {"row_factors": factors["row_factors"][:, :, :0]}
        assert torch.equal(fix.restore(decoded, none, blocks), decoded)

    def test_fewer_rows_or_channels_than_the_rank(self):
        _, (fix,) = running("int(bits=2,residual=64,flush=all)+lowrank(rank=20)", width=16)
        for n in (3, 64):
            x, decoded = normal(1, 2, n, 16), normal(1, 2, n, 16, seed=1)
            factors = fix.after(x, decoded)
            assert factors["row_factors"].shape == (1, 2, n, 20)
            assert factors["block_factors"].shape == (1, 2, 20, 16)
            torch.testing.assert_close(fix.restore(decoded, factors, one_block(n)), x, rtol=0, atol=1e-5)


def test_gear_beats_its_parts_and_its_public_codes_levels():
    """GEAR at 2 bits: each correction helps, together most. Its code has bits^2 - 1 levels: 63, not 255, at 8 bits."""
    x = normal(1, 2, 128, 64) @ (torch.eye(64) + 0.3 * normal(64, 64, seed=3))
    x = torch.where(normal(1, 2, 128, 64, seed=4) > 2.3, x * 8, x)
    form = "int(bits=2,residual=128,flush=all)"
    plain, out, low, both = (
        relative_error(x, corrected(form + more, x)[0])
        for more in ("", "+outliers(fraction=0.02)", "+lowrank(rank=4)", "+outliers(fraction=0.02)+lowrank(rank=4)")
    )
    assert both < out < plain
    assert both < low < plain
    eight, _ = corrected("int(bits=8,residual=128,flush=all)", x)
    steps = 255 / 63
    assert relative_error(x, eight) * steps**2 > relative_error(x, corrected("int(bits=6)", x)[0]) * 0.9
    assert parse_method("gear").k.format.bits == 2


def test_an_untouched_row_stays_untouched_without_buffers():
    for form in ("int(bits=2)+outliers(fraction=0.1)", "int(bits=2,residual=64,flush=all)+lowrank(rank=2)"):
        _, (fix,) = running(form)
        x = normal(1, 2, 64, 64)
        assert torch.equal(fix.restore(x, {}, one_block(64)), x)
