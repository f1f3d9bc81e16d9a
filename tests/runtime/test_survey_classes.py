"""The survey's classes and formulas, as printed, beside what stands for them here; others are in the parts' tests."""

import pytest
import torch
from families import logits, model_of, prompt
from rows import Shape, layer_of
from torch import nn

from kvsim import compare, parse_method
from kvsim.evidence import shipped
from kvsim.parts import Place, parts
from runtime import CompressedCache
from runtime.attention import Rule
from runtime.calibration import calibrate
from runtime.parts import Setting, twins


def there_and_back(text, x):
    part = parse_method(text).k.format
    twin = twins()[part.name](part, Setting(Place("k", x.shape[1], x.shape[3], x.shape[1], 32), torch.float32))
    return twin.decode(twin.encode(x, {}), {}, torch.zeros(x.shape[2], dtype=torch.int64))


def test_the_surveys_logarithm_has_one_code_for_many_values_and_too_many_codes():
    """3.1.2: x_q = sign(x) * round(log2(|x| + eps)): the exponent's own sign meets that of x, and no b bits hold it."""

    def published(x):
        return x.sign() * (x.abs() + 1e-12).log2().round()

    x = torch.tensor([0.0, 1.0, -1.0, 0.25, -4.0])
    assert published(x).tolist() == [0, 0, 0, -2, -2]  # zero, one and minus one; 1/4 and minus 4
    spread = torch.logspace(-6, 4, 64)
    assert len(published(spread).unique()) == 34 > 2**4  # exponents -20 to 13 in what should be 4 bits
    ours = there_and_back("log(bits=4)", x.view(1, 1, 1, 5)).flatten()
    assert ours.tolist() == [0.0, 1.0, -1.0, 0.25, -4.0]
    back = there_and_back("log(bits=4)", spread.view(1, 1, 1, 64)).flatten()
    assert len(back.unique()) <= 2**4
    # values beyond the range lose at most half the smallest magnitude, 10^4 / 64
    assert float((back - spread)[spread < 78].abs().max()) <= 10**4 / 128


class SurveyOnlineSVDCache:
    """5.6's OnlineSVDCache.update and _incremental_update, line by line, without its fallback."""

    def __init__(self, num_heads, rank):
        self.rank = rank
        self.U, self.S, self.Vt = ([None] * num_heads for _ in range(3))

    def update(self, k, v):
        for h in range(k.shape[1]):
            k_head = k[:, h, :, :].squeeze(0).T
            if self.U[h] is None:
                U, S, Vt = torch.linalg.svd(k_head, full_matrices=False)
                self.U[h], self.S[h], self.Vt[h] = U[:, : self.rank], S[: self.rank], Vt[: self.rank, :]
            else:
                self._incremental_update(h, k_head)

    def _incremental_update(self, h, k_new):
        residual = k_new - self.U[h] @ (self.U[h].T @ k_new)
        U_new, S_new, Vt_new = torch.linalg.svd(residual, full_matrices=False)
        self.U[h] = torch.cat([self.U[h], U_new[:, :1]], dim=1)[:, : self.rank]
        self.S[h] = torch.cat([self.S[h], S_new[:1]])[: self.rank]
        self.Vt[h] = torch.cat([self.Vt[h], Vt_new[:1, :]], dim=0)[: self.rank, :]


def test_the_surveys_svd_ignores_values_and_fails_at_the_second_token():
    rows = [torch.randn((1, 2, n, 32), generator=torch.Generator().manual_seed(n)) for n in (40, 1)]
    survey = SurveyOnlineSVDCache(2, 8)
    survey.update(rows[0], rows[0])
    held = [x.clone() for parts in (survey.U, survey.S, survey.Vt) for x in parts]
    other = SurveyOnlineSVDCache(2, 8)
    other.update(rows[0], 100 * torch.ones_like(rows[0]))
    assert all(torch.equal(a, b) for a, b in zip(held, other.U + other.S + other.Vt, strict=True))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        survey.update(rows[1], rows[1])  # coefficients of 1 row below those of 40
    layer, at = layer_of("online_svd(rank=32)", Shape()), 0
    values = [torch.randn_like(x) for x in rows]
    for k, v in zip(rows, values, strict=True):
        layer.update(k, v, kwargs={"position_ids": torch.arange(at, at + k.shape[2])[None]})
        layer.attend(torch.randn(1, 4, k.shape[2], 32), None, Rule(0.1))
        at += k.shape[2]
    for held, given in zip(layer.pieces[0].store.read(), (rows, values), strict=True):
        torch.testing.assert_close(held, torch.cat(given, dim=2), atol=1e-4, rtol=1e-4)  # of full rank: all is there


class SurveyProjection(nn.Module):
    """5.6's LowRankProjection, learnable: two untrained matrices, and nothing that leads back."""

    def __init__(self, head_dim, rank_ratio=0.5):
        super().__init__()
        self.rank = int(head_dim * rank_ratio)
        self.k_proj = nn.Linear(head_dim, self.rank, bias=False)
        self.v_proj = nn.Linear(head_dim, self.rank, bias=False)


def test_the_surveys_projection_is_never_learned_and_never_undone():
    """Even with the best way back, rank 8 of an untrained projection is far from 8 learned directions."""
    model, ids, seen = model_of("llama"), prompt(1, 120), {}
    own = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, a, out: seen.update(k=out))
    logits(model, ids)
    own.remove()
    rows = seen["k"].unflatten(-1, (2, 16)).transpose(1, 2)[0, 0]  # head 0's keys before the rotation
    torch.manual_seed(0)
    survey = SurveyProjection(16)
    down = survey.k_proj.weight.detach().T
    best_back = torch.linalg.lstsq(rows @ down, rows).solution
    theirs = float((rows @ down @ best_back - rows).square().sum() / rows.square().sum())
    found = calibrate(model, [ids[0]], "k:learned_projection(rank=8,rope=pre) v:full").tensors
    up, back = (found[f"layer.0.k.learned_projection.pre.{n}"][0] for n in ("encoder", "decoder"))
    ours = float((rows @ up.mT @ back - rows).square().sum() / rows.square().sum())
    assert ours < 0.7 * theirs


class SurveyAdaptiveRank(nn.Module):
    """5.6's AdaptiveRankCache: ranks, as printed."""

    def __init__(self, num_heads, max_rank):
        super().__init__()
        self.max_rank = max_rank
        self.base_rank = nn.Parameter(torch.ones(num_heads) * (max_rank // 2))
        self.rank_adapter = nn.Sequential(
            nn.Linear(1, max_rank // 2), nn.GELU(), nn.Linear(max_rank // 2, num_heads)
        )

    def get_effective_rank(self, importance_score):
        delta_rank = self.rank_adapter(importance_score.unsqueeze(-1))
        return (self.base_rank + delta_rank.squeeze(-1)).clamp(1, self.max_rank).long()


def test_the_surveys_adaptive_ranks_are_a_square_and_hold_no_budget():
    """Four heads get 4 x 4 ranks, which nothing can learn; here each layer and side has its own, counted in bytes."""
    torch.manual_seed(0)
    ranks = SurveyAdaptiveRank(4, 32).get_effective_rank(torch.rand(4))
    assert ranks.shape == (4, 4)
    assert not ranks.requires_grad
    model, sizes = model_of("llama"), {}
    for text in ("svd(rank=8)", "k:svd(rank=12) v:svd(rank=4)", "svd(rank=4); layers=0-1: svd(rank=12)"):
        with CompressedCache(text, model) as cache:
            logits(model, prompt(1, 64), cache)
            sizes[text] = cache.nbytes()
    assert len(set(sizes.values())) == 1  # other ranks, the same bytes


def test_the_surveys_low_rank_examples_are_none():
    """6.1 names KVMem and LearnLM; of this family are EliteKV and Palu, and the ratios are computed from evidence."""
    sources = " ".join(f"{p.source} {p.summary}" for p in parts().values())
    assert "KVMem" not in sources
    assert "LearnLM" not in sources
    assert {"elitekv", "palu"} <= {n for n, p in parts().items() if "5.3.2" in p.survey}
    cells = compare.matrix(compare.members(shipped()))
    ratios = {c.family: (c.survey, c.here) for c in cells if c.row == "ratio"}
    assert all(here and here != survey for survey, here in ratios.values())
