"""Scores from gradients against finite differences on tiny random models."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from kvsim import KvsimError
from runtime.gradients import gradient_scores, next_token_loss, tapped

SIZES = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}


def llama(heads=3, group=2):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_attention_heads=heads * group, num_key_value_heads=heads, initializer_range=0.4)
    return LlamaForCausalLM(config).double().eval()


def gemma():
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, num_attention_heads=6, num_key_value_heads=3, initializer_range=0.4,
                          attn_logit_softcapping=2.0, sliding_window=4)
    return Gemma2ForCausalLM(config).double().eval()


def ids(batch, tokens=7):
    return torch.randint(0, 40, (batch, tokens), generator=torch.Generator().manual_seed(1))


def loss_with(model, tokens, layer, side, at, step):
    """The loss with one value of one row of a layer's keys or values moved."""
    with tapped(model) as taps, torch.no_grad():
        next_token_loss(model, tokens)
        offsets = [torch.zeros_like(taps.keys[layer]), torch.zeros_like(taps.values[layer])]
        offsets[side][at] = step
        taps.offsets[layer] = (offsets[0], offsets[1])
        return next_token_loss(model, tokens).item()


@pytest.mark.parametrize(("model", "batch"), [(llama(), 1), (llama(1, 1), 3), (gemma(), 2)])
def test_gradients_are_slopes_of_the_loss(model, batch):
    tokens, h = ids(batch), 2e-3  # norms and softmax run in float32 in these models
    found = gradient_scores(model, tokens, "gradient")
    heads = model.config.num_key_value_heads
    assert [f.shape for f in found] == [(batch, heads, 7)] * 2
    for layer, b, head, row in ((0, 0, 0, 0), (0, batch - 1, heads - 1, 3), (1, 0, heads - 1, 2)):
        lengths = []
        for side in (0, 1):
            slopes = [(loss_with(model, tokens, layer, side, (b, head, row, c), h)
                       - loss_with(model, tokens, layer, side, (b, head, row, c), -h)) / (2 * h) for c in range(4)]
            lengths.append(sum(s * s for s in slopes) ** 0.5)
        assert found[layer][b, head, row].item() == pytest.approx(sum(lengths), rel=3e-3)
    # the newest row is seen by its own query alone, whose prediction nobody scores
    assert all((f[:, :, -1] == 0).all() for f in found)


@pytest.mark.parametrize(("heads", "group", "batch"), [(3, 2, 2), (1, 1, 1)])
def test_slopes_along_weights(heads, group, batch):
    """Moving A_ij by h moves the output of query i by h v_j."""
    model, tokens, h, layer, head = llama(heads, group), ids(batch), 2e-3, 1, heads - 1
    found = gradient_scores(model, tokens, "loss_attention")
    with tapped(model) as taps, torch.no_grad():
        next_token_loss(model, tokens)
        values = taps.values[layer]
    assert (values == 0).all()  # the taps add nothing
    seen = {}

    def note(module, args, out):
        seen["v"] = out.reshape(*out.shape[:2], heads, 4).transpose(1, 2)

    def moved(i, j, query_head, step):
        def move(module, args):
            out = args[0].clone()
            out[0, i, query_head * 4 : query_head * 4 + 4] += step * seen["v"][0, head, j]
            return (out,)

        attention = model.model.layers[layer].self_attn
        handles = [attention.v_proj.register_forward_hook(note), attention.o_proj.register_forward_pre_hook(move)]
        with torch.no_grad():
            loss = next_token_loss(model, tokens).item()
        for handle in handles:
            handle.remove()
        return loss

    for j in (0, 4):
        total = sum(abs(moved(i, j, head * group + g, h) - moved(i, j, head * group + g, -h)) / (2 * h)
                    for i in range(j, 7) for g in range(group))
        assert found[layer][0, head, j].item() == pytest.approx(total, rel=3e-3)


def test_sequences_do_not_mix_and_the_model_is_as_before():
    model, tokens = llama(), ids(3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = model.config._attn_implementation
    model.train()
    for kind in ("gradient", "loss_attention", "saliency"):
        together = gradient_scores(model, tokens, kind)
        for b in range(3):
            alone = gradient_scores(model, tokens[b : b + 1], kind)
            assert all(torch.allclose(x[b], y[0], rtol=1e-6) for x, y in zip(together, alone, strict=True))
    assert model.training
    assert model.config._attn_implementation == before


def test_half_precision_gives_finite_scores():
    found = gradient_scores(llama().bfloat16(), ids(1), "gradient")
    assert all(f.dtype == torch.float32 and torch.isfinite(f).all() and f.max() > 0 for f in found)


def test_refusals():
    with pytest.raises(KvsimError, match="loss_attention"):
        gradient_scores(llama(), ids(1), "hessian")
    with pytest.raises(KvsimError, match="two tokens"):
        gradient_scores(llama(), ids(1, 1), "gradient")


def test_saliency_is_the_slope_along_the_logits():
    """dL/dS by autograd through the softmax; S is the logarithm of the weights, the logits but for a constant."""
    model, tokens = llama(), ids(2)
    found = gradient_scores(model, tokens, "saliency")
    with tapped(model) as taps, torch.enable_grad():
        loss = next_token_loss(model, tokens)
        slopes = torch.autograd.grad(loss, [taps.weights[n] for n in (0, 1)])
    for n in (0, 1):
        logits = taps.weights[n].detach().log().requires_grad_()
        (along,) = torch.autograd.grad((torch.softmax(logits, -1) * slopes[n]).sum(), logits)
        expected = along.nan_to_num(0).abs().sum(2).unflatten(1, (3, 2)).sum(2)
        torch.testing.assert_close(found[n], expected.float(), rtol=1e-4, atol=1e-7)
    # a row that nobody attends has no saliency, whatever dL/dA says of it
    assert (found[0][:, :, -1] == 0).all()
