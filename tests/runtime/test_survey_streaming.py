"""The survey's StreamingAttention (4.5) as printed, and its count of intervals (3.1.1), beside what runs here."""

import pytest
import torch
from test_tokens_survey import SurveyH2O
from torch import nn

from kvsim import parse_method
from kvsim.parts import Place
from runtime.parts import Setting, twins

HEADS, WIDTH = 2, 4


class SurveyStreamingAttention(nn.Module):
    """4.5's class: forward line by line, the output projection left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, HEADS * WIDTH) for _ in range(3))
        self.kv_cache = None

    def forward(self, x, use_cache=True):
        batch, seq_len, _ = x.shape
        q, k, v = (p(x).view(batch, seq_len, HEADS, WIDTH) for p in (self.q_proj, self.k_proj, self.v_proj))
        scale = WIDTH**-0.5
        if seq_len == 1 and use_cache and self.kv_cache is not None:
            k_cache, v_cache = self.kv_cache.get_cache()
            k_full = torch.cat([k_cache, k], dim=2)
            v_full = torch.cat([v_cache, v], dim=2)
            attn_weights = torch.matmul(q.transpose(1, 2) * scale, k_full.transpose(1, 2).transpose(2, 3))
            attn_weights = torch.softmax(attn_weights, dim=-1)
            self.kv_cache.update(k, v, attn_weights[:, :, :-1, :])
            return torch.matmul(attn_weights, v_full.transpose(1, 2)).transpose(1, 2)
        attn_weights = torch.matmul(q.transpose(1, 2) * scale, k.transpose(1, 2).transpose(2, 3))
        return torch.matmul(torch.softmax(attn_weights, dim=-1), v.transpose(1, 2)).transpose(1, 2)

    def init_cache(self, max_seq_len):
        self.kv_cache = SurveyH2O(max_seq_len, HEADS, WIDTH, 0.5)


@torch.no_grad()
def test_the_surveys_streaming_attention_forgets_the_prompt_and_stops_at_the_first_step():
    layer = SurveyStreamingAttention()
    layer.init_cache(16)
    layer(torch.randn(1, 5, 8))
    assert layer.kv_cache.current_len == 0  # five tokens came, none was stored
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer(torch.randn(1, 1, 8))  # joined along the heads: 0 rows do not fit 1
    # with one row in place the join runs, over heads, and the scores that should be kept are an empty tensor
    layer.kv_cache.current_len = 1
    assert torch.cat([layer.kv_cache.get_cache()[0], torch.zeros(1, 1, HEADS, WIDTH)], 2).shape[2] == 2 * HEADS
    assert torch.ones(1, HEADS, 1, 3)[:, :, :-1, :].numel() == 0


def test_b_bits_are_that_many_levels_and_one_interval_less():
    """3.1.1 speaks of 2^b intervals; its own scale, range / (2^b - 1), makes 2^b levels and 2^b - 1 of them."""
    x = torch.tensor([0.0, 1.0, 2.0, 3.0]).view(1, 1, 1, 4)
    part = parse_method("int(bits=2,group=4)").k.format
    twin = twins()["int"](part, Setting(Place("k", 1, 4, 1, 32), torch.float32))
    assert torch.equal(twin.decode(twin.encode(x, {}), {}, torch.zeros(1, dtype=torch.int64)), x)
    four_intervals = (x / 0.75).round().clamp(0, 3) * 0.75
    assert (four_intervals - x).abs().max() == 0.75
