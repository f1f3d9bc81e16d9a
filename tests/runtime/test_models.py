"""Real architectures with random weights: `full` is the model's own cache; windows stay; other kinds are refused."""

from copy import deepcopy

import pytest
import torch
import transformers as hf
from families import FAMILIES, differences, generate, model_of, prompt, record
from transformers import DynamicCache

from kvsim.errors import KvsimError
from runtime import CompressedCache

UNROTATED = ["gpt2", "opt", "gptj", "gpt_neox", "glm4", "gpt_oss", "stablelm"]
"""No rotary embedding, one that does not say where rows stand, or one of another kind than `rotate_half`."""
OUTPUT = {"return_dict_in_generate": True, "output_logits": True}


def both(model, method, ids, **more):
    """(own, compressed) outputs of greedy generation."""
    own = generate(model, ids, DynamicCache(config=model.config), **OUTPUT, **more)
    with CompressedCache(method, model) as cache:
        mine = generate(model, ids, cache, **OUTPUT, **more)
    return own, mine


def distance(own, mine):
    return max(float((a - b).abs().max()) for a, b in zip(own.logits, mine.logits, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_is_the_models_own_cache(family, padded):
    model, ids = model_of(family), prompt()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :7] = ids[0, :7] = 0
    own, mine = both(model, "full", ids, attention_mask=mask)
    assert torch.equal(own.sequences, mine.sequences)
    assert distance(own, mine) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_stay_near_and_bytes_are_exact(family):
    model, ids = model_of(family), prompt()
    own = generate(model, ids, DynamicCache(config=model.config), **OUTPUT)
    with CompressedCache("int(bits=8,group=16)", model) as cache:
        mine = generate(model, ids, cache, **OUTPUT)
        assert not differences(cache, record(model, "int(bits=8,group=16)", 2, 40, 19))
    # of the first new token nothing was compressed yet
    assert torch.equal(own.sequences[:, 40], mine.sequences[:, 40])
    spread = float(own.logits[1].std())
    assert 0 < float((own.logits[1] - mine.logits[1]).abs().mean()) < 0.1 * spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_half_precision(family, dtype):
    model, ids = deepcopy(model_of(family)).to(dtype), prompt()
    own, mine = both(model, "full", ids)
    # in half precision near ties may fall either way, and what follows differs
    assert torch.equal(own.sequences[:, :41], mine.sequences[:, :41])
    for a, b in zip(own.logits[:2], mine.logits[:2], strict=True):
        assert float((a - b).abs().max()) < 0.05 * float(a.float().std())
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for method in ("full", "int(bits=4,group=16)", "h2o(budget=0.5) | int(bits=4,group=16)", "svd(rank=8)"):
        with CompressedCache(method, model) as cache:
            generate(model, ids, cache)
            assert not differences(cache, record(model, method, 2, 40, 19, kv_dtype=name))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in UNROTATED])
def test_keys_before_the_rotation(family):
    """Without rounding, undoing and redoing the rotation changes nothing."""
    model, ids = model_of(family), prompt()
    own, mine = both(model, "int(bits=8,group=1,scale_dtype=fp32,rope=pre)", ids, new=4)
    other, after = both(model, "int(bits=8,group=1,scale_dtype=fp32)", ids, new=4)
    assert distance(own, mine) < 2e-3
    assert distance(other, after) < 2e-3


@pytest.mark.parametrize("family", UNROTATED)
def test_a_rotation_that_is_not_there_or_not_known_is_refused(family):
    with (
        pytest.raises(KvsimError, match="rope=pre"),
        CompressedCache("int(bits=8,rope=pre)", model_of(family)) as cache,
    ):
        generate(model_of(family), prompt(), cache, new=2)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_change_with_the_length_are_refused(kind):
    more = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0} | (more if kind == "longrope" else {})
    config = hf.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=parameters,
    )
    with pytest.raises(KvsimError, match=f"{kind} angles change"):
        CompressedCache("int(bits=8,rope=pre)", hf.LlamaForCausalLM(config))


def dense_window(model, ids, new, window, sinks=0):
    """Greedy tokens of a model whose every layer sees the last `window` rows and the first `sinks`, by a 4-D mask."""
    found = ids
    for _ in range(new):
        n = found.shape[1]
        at = torch.arange(n)
        seen = (at[None] <= at[:, None]) & ((at[None] > at[:, None] - window) | (at[None] < sinks))
        mask = torch.zeros((1, 1, n, n)).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(found, attention_mask=mask.expand(len(ids), -1, -1, -1), use_cache=False).logits[:, -1]
        found = torch.cat([found, logits.argmax(-1, keepdim=True)], dim=1)
    return found, logits


def test_sliding_layers_are_a_model_run_with_the_same_mask():
    """Mistral's window as its own cache has it, and as a Llama of the same weights sees it through a mask."""
    model = model_of("mistral")
    plain = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **{
                k: v
                for k, v in model.config.to_dict().items()
                if k
                in (
                    "vocab_size",
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "rms_norm_eps",
                    "rope_parameters",
                    "tie_word_embeddings",
                )
            }
        )
    ).eval()
    plain.load_state_dict(model.state_dict())
    ids = prompt()
    expected, logits = dense_window(plain, ids, 12, window=16)
    with CompressedCache("full", model) as cache:
        out = generate(model, ids, cache, new=12, **OUTPUT)
        assert cache.layers[0].rows() == [16] * 4
    assert torch.equal(out.sequences, expected)
    torch.testing.assert_close(out.logits[-1], logits, atol=2e-5, rtol=1e-4)


def refused():
    small = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    yield "mamba", hf.MambaForCausalLM, hf.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2), "state"
    mla = hf.DeepseekV3Config(
        **small,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        v_head_dim=16,
        qk_nope_head_dim=16,
    )
    yield "mla", hf.DeepseekV3ForCausalLM, mla, "mla"
    chunked = hf.Llama4TextConfig(
        **small | {"num_hidden_layers": 4},
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
    )
    yield "chunked", hf.Llama4ForCausalLM, chunked, "chunked"
    shared = hf.Gemma3nTextConfig(
        **small | {"num_hidden_layers": 4},
        intermediate_size=64,
        num_key_value_heads=2,
        head_dim=16,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        sliding_window=16,
        layer_types=ALTERNATING,
        activation_sparsity_pattern=[0.0] * 4,
    )
    yield "shared", hf.Gemma3nForCausalLM, shared, "shared"
    t5 = hf.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    yield "t5", hf.T5ForConditionalGeneration, t5, "encoder-decoder"
    yield "bloom", hf.BloomForCausalLM, hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4), "interface"
    falcon = hf.FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    yield "falcon", hf.FalconForCausalLM, falcon, "interface"


ALTERNATING = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("name", "kind", "config", "why"), list(refused()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_cannot_be_held_is_refused_in_words(name, kind, config, why):
    model = kind(config)
    before = model.config._attn_implementation
    with pytest.raises(KvsimError, match=why):
        CompressedCache("int(bits=4)", model)
    assert model.config._attn_implementation == before
