"""Stores with random rows for the kernels' tests, and the oracle: the same store attended eagerly."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.method import parse_method
from runtime import kernels
from runtime.attention import Rule, attend, observe
from runtime.kernels.load import Library, library
from runtime.parts import Prompt, Step
from runtime.rope import Rotation
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.store import Store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton's kernels are tried: on a GPU where there is one, interpreted otherwise."""
needs_kernels = pytest.mark.skipif(not isinstance(library(), Library), reason="no compiler: the kernels do not exist")


def filled(
    method, prompt, steps=0, d=64, heads=2, group=3, batch=1, dtype=torch.float32, window=0, seed=0, device="cpu",
    rotation=None,
):  # fmt: skip
    """A store after a prompt and `steps` tokens more, the last of which has just been written and not yet encoded."""
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry(heads * group, heads, d, d, window)
    store = Store(LayerTwins(parse_method(method), geometry, Surroundings(dtype, torch.device(device), rotation)))
    rows = [torch.randn(batch, heads, prompt + steps, d, generator=generator) for _ in range(2)]
    # some channels of keys are large, as in real models
    k = (rows[0] * (1 + 4 * torch.rand(1, heads, 1, d, generator=generator)) + rows[0][:, :, :1]).to(dtype)
    k, v = k.to(device), rows[1].to(device, dtype)
    at = torch.arange(prompt + steps, device=device)[None].expand(batch, -1)
    q = torch.randn(batch, heads * group, prompt, d, generator=generator).to(device, dtype)
    seen = Prompt(k[:, :, :prompt], v[:, :, :prompt], d**-0.5, queries=q)
    if store.policy is not None and store.policy.prompt_weights:
        observe(seen, q, Rule(d**-0.5))
    store.take_prompt(seen, at[:, :prompt])
    for i in range(prompt, prompt + steps):
        store.append(k[:, :, i : i + 1], v[:, :, i : i + 1], at[:, i : i + 1])
        if i + 1 < prompt + steps:
            store.after_step(Step(seen=store.seen, rows=store.keys.rows, new=1))
    return store


def rotation(d, device="cpu"):
    """The rotary embedding of a Llama with heads of width d."""
    config = LlamaConfig(hidden_size=d, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=d,
                         num_key_value_heads=1, vocab_size=8, max_position_embeddings=256)  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    return Rotation(model, model.model.layers[0].self_attn)


def query(store, seed=1, dtype=torch.float32, batch=1):
    g = store.geometry
    made = torch.randn(batch, g.n_heads, 1, g.k_dim, generator=torch.Generator().manual_seed(seed))
    return made.to(store.around.device, dtype)


def oracle(store, q, rule, monkeypatch):
    """The eager output; the store may hold interleaved rows."""
    with monkeypatch.context() as patch:
        patch.setenv("KVSIM_KERNELS", "eager")
        assert kernels.decode(store, q, rule) is None
        return attend(store, q, rule)[0]


def assert_fused_is_eager(store, monkeypatch, rule=None, seed=1, batch=1, dtype=torch.float32):
    """The kernels' output equals the oracle's: to some roundings of fp32, or to those that the oracle makes in between.

    In half precision the eager version rounds each decoded row, the kernels only what they return.
    """
    q = query(store, seed, dtype, batch)
    rule = rule or Rule(store.geometry.k_dim**-0.5)
    wanted = oracle(store, q, rule, monkeypatch)
    found = kernels.decode(store, q, rule)
    assert found is not None, kernels.path(store)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    # three products of shorter factors stand for one of fp32 on a GPU
    tolerance = 3e-2 if dtype != torch.float32 else 2e-4 if q.is_cuda else 2e-5
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
