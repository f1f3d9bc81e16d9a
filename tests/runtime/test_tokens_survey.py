"""The survey's H2O (section 4.5) beside the twin: each of its slips fails a check that the twin passes."""

import pytest
import torch
from policy_runs import Cache, Text, mean_group, softmax_weights

from runtime.attention import Rule, observe
from runtime.parts import Prompt


class SurveyH2O:
    """The survey's class, its arithmetic unchanged (batch 1; weights [1, heads, rows, 1])."""

    def __init__(self, max_seq_len, num_heads, head_dim, budget_ratio):
        self.max_seq_len, self.budget_ratio = max_seq_len, budget_ratio
        self.cumulative_attn = torch.zeros(max_seq_len, num_heads)
        self.kept_indices = []
        self.k_cache, self.v_cache = (torch.zeros(max_seq_len, num_heads, head_dim) for _ in range(2))
        self.current_len = 0

    def update(self, k_new, v_new, attn_weights):
        pos = self.current_len
        self.k_cache[pos] = k_new.squeeze(2).squeeze(0)
        self.v_cache[pos] = v_new.squeeze(2).squeeze(0)
        self.cumulative_attn[: pos + 1] += attn_weights.squeeze(0).squeeze(-1).T
        self.current_len += 1
        if self.current_len > self.max_seq_len * self.budget_ratio:
            self._compress()

    def _compress(self):
        budget = int(self.max_seq_len * self.budget_ratio)
        importance = self.cumulative_attn[: self.current_len].mean(dim=1)
        _, top_indices = torch.topk(importance, k=min(budget, len(importance)))
        top_indices = top_indices.sort()[0]
        self.k_cache[: len(top_indices)] = self.k_cache[top_indices]
        self.v_cache[: len(top_indices)] = self.v_cache[top_indices]
        self.cumulative_attn[: len(top_indices)] = self.cumulative_attn[top_indices]
        self.kept_indices = top_indices.tolist()
        self.current_len = len(top_indices)

    def get_cache(self):
        return self.k_cache[: self.current_len].unsqueeze(0), self.v_cache[: self.current_len].unsqueeze(0)

    def step(self, stream, i):
        """Token i arrives and attends to all rows, itself included, one query head a KV head."""
        held = torch.cat([self.k_cache[: self.current_len].permute(1, 0, 2)[None], stream.k[:, :, i : i + 1]], 2)
        weights = softmax_weights(stream.q[:, :, i : i + 1], held, stream.scaling).float()
        self.update(stream.k[:, :, i : i + 1], stream.v[:, :, i : i + 1], weights.transpose(2, 3))

    def tokens(self, stream, head=0):
        """Which tokens it holds, found by content."""
        found = (self.k_cache[: self.current_len, None, head] == stream.k[0, head][None]).all(-1)
        return found.float().argmax(1).tolist()


def both(tokens, budget, heads=3, seed=0):
    stream = Text.draw(tokens, heads=heads, group=1, seed=seed)
    survey = SurveyH2O(40, heads, 8, budget / 40)
    twin = Cache(f"h2o(budget={budget})", stream, 0)
    for i in range(tokens):
        survey.step(stream, i)
        twin.step()
    return stream, survey, twin


def test_heads_choose_their_own_rows():
    stream, survey, twin = both(40, 12)
    assert len({tuple(survey.tokens(stream, h)) for h in range(3)}) == 1
    assert len({tuple(twin.held(0, h)) for h in range(3)}) > 1


def test_the_newest_rows_stay():
    dropped = 0
    for seed in range(8):
        stream, survey, twin = both(30, 12, seed=seed)
        assert all(twin.held(0, h)[-6:] == list(range(24, 30)) for h in range(3))
        dropped += survey.tokens(stream)[-6:] != list(range(24, 30))
    assert dropped == 8


def test_a_new_row_starts_from_nothing():
    """After a compression the survey's next row finds the mass of a row that has moved or left in its slot."""
    stream = Text.draw(14, heads=1, group=1)
    survey, twin = SurveyH2O(40, 1, 8, 12 / 40), Cache("h2o(budget=12)", stream, 0)
    for i in range(13):
        survey.step(stream, i)
        twin.step()
    assert survey.current_len == 12
    assert survey.cumulative_attn[survey.current_len, 0] > 0  # where row 13 is about to be counted
    held = torch.cat([twin.runs[0].k, stream.k[:, :, 13:14]], 2)
    twin.step()
    newest = softmax_weights(stream.q[:, :, 13:14], held, stream.scaling)[0, 0, 0, -1]
    assert twin.held()[-1] == 13
    assert twin.runs[0].state["scores"][0, 0, -1, 0].item() == pytest.approx(newest.item(), rel=1e-6)


def test_mass_is_the_sum_of_all_weights():
    """While nothing has been dropped, a row's score is the column sum of the causal weights."""
    stream = Text.draw(20, heads=3, group=2)
    cache = Cache("h2o(budget=1.0)", stream, 8)
    for _ in range(12):
        cache.step()
    weights = softmax_weights(stream.q, stream.k, stream.scaling)
    sums = mean_group(weights, 3).sum(2) * 2
    assert torch.allclose(cache.runs[0].state["scores"][..., 0].double(), sums, atol=1e-5)


def test_the_budget_follows_the_tokens_seen():
    stream = Text.draw(30, heads=3, group=1)
    survey, twin = SurveyH2O(1000, 3, 8, 0.3), Cache("h2o(budget=0.3)", stream, 0)
    for i in range(30):
        survey.step(stream, i)
        twin.step()
    assert survey.current_len == 30  # 0.3 of the longest text there might ever be: nothing has been dropped
    assert twin.runs[0].rows == 9


def test_tokens_seen_are_not_rows_held():
    _, survey, twin = both(30, 12)
    assert survey.current_len == 12  # the survey's next token would stand at position 12
    assert twin.runs[0].seen == 30
    stream = Text.draw(40, heads=3, group=1)
    normal = Cache("h2o(budget=12,score=normalised)", stream, 30)
    normal.step()
    held = torch.tensor([[normal.held(0, h) for h in range(3)]], dtype=torch.int32)
    assert torch.equal(normal.runs[0].state["arrived"][..., 0], held)


def test_the_prompts_weights_are_causal():
    stream = Text.draw(16, heads=3, group=2)
    k = stream.k.repeat_interleave(2, 1)
    survey = torch.softmax(stream.q @ k.transpose(2, 3) * stream.scaling, -1)  # no mask: rows look ahead
    assert survey.triu(1).sum() > 1
    prompt = Prompt(stream.k, stream.v, stream.scaling)
    observe(prompt, stream.q, Rule(stream.scaling))
    causal = softmax_weights(stream.q, stream.k, stream.scaling)
    assert torch.allclose(prompt.mass.double(), mean_group(causal, 3).sum(2), atol=1e-5)
    # the newest row is seen by one query only
    assert torch.allclose(prompt.mass[:, :, -1].double(), mean_group(causal, 3)[:, :, -1, -1], atol=1e-6)
    assert not torch.allclose(mean_group(survey, 3).sum(2)[:, :, -1], prompt.mass[:, :, -1], atol=0.1)


def test_rows_are_joined_along_the_rows():
    """The survey joins [1, rows, heads, d] and [B, rows, heads, d] along the heads."""
    stream = Text.draw(4, heads=3, group=1)
    survey = SurveyH2O(40, 3, 8, 0.5)
    for i in range(3):
        survey.step(stream, i)
    k_cache, _ = survey.get_cache()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([k_cache, stream.k[:, :, 3].reshape(1, 1, 3, 8)], dim=2)
    twin = Cache("h2o(budget=0.9)", stream, 3)
    twin.step()
    assert twin.runs[0].k.shape == (1, 3, 4, 8)


def test_sequences_of_a_batch_choose_apart():
    stream = Text.draw(40, batch=3)
    together = Cache("h2o(budget=0.3)", stream, 30)
    texts = [Text(*(x[b : b + 1] for x in (stream.k, stream.v, stream.q))) for b in range(3)]
    alone = [Cache("h2o(budget=0.3)", text, 30) for text in texts]
    for _ in range(10):
        together.step()
        for cache in alone:
            cache.step()
    assert [together.held(b, 1) for b in range(3)] == [cache.held(0, 1) for cache in alone]
    with pytest.raises(RuntimeError):  # the survey takes one sequence
        SurveyH2O(40, 3, 8, 0.5).update(stream.k[:, :, :1], stream.v[:, :, :1], torch.ones(3, 3, 1, 1))
