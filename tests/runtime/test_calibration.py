"""Recording against the model's own cache and gradients; what parts learn against brute force; files of one model."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError
from kvsim.parts import Place
from runtime.bases.elitekv import choose_frequencies, split_channels
from runtime.calibration import calibrate, load
from runtime.latent import rebuild, right_vectors
from runtime.parts import Setting, twins
from runtime.recording import record

HEADS, KV, WIDTH = 6, 2, 16


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=97, hidden_size=96, intermediate_size=64, num_hidden_layers=2, head_dim=WIDTH,
                         num_attention_heads=HEADS, num_key_value_heads=KV, attention_bias=True, **changes)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny()


def ids(tokens, seed=0):
    return torch.randint(97, (tokens,), generator=torch.Generator().manual_seed(seed))


def place(side="k"):
    return Place(side, KV, WIDTH, HEADS, 32)


def twin(part, side, tensors, layer=0):
    prefix = f"layer.{layer}.{side}."
    own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    return twins()[part.name](part, Setting(place(side), torch.float32, calibration=own))


def test_recorded_rows_are_those_of_a_plain_cache(model):
    text = ids(40)
    before = model.config._attn_implementation
    seen = record(model, [text], rows=100)
    cache = DynamicCache()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        out = model(text[None], past_key_values=cache, output_attentions=True)
    model.set_attn_implementation(before)
    for layer in (0, 1):
        torch.testing.assert_close(seen[layer].keys, cache.layers[layer].keys[0])
        torch.testing.assert_close(seen[layer].values, cache.layers[layer].values[0])
        assert seen[layer].positions.tolist() == list(range(40))
        weights = out.attentions[layer][0].reshape(KV, 3, 40, 40).mean(1)
        # row j is seen by the 40 - j queries from its own on
        torch.testing.assert_close(seen[layer].use, weights.sum(1) / torch.arange(40, 0, -1))
        assert seen[layer].key_slopes.shape == (KV, 0, WIDTH)


def test_recording_leaves_the_model_alone(model):
    before, text = model.config._attn_implementation, ids(30)
    with torch.no_grad():
        want = model(text[None]).logits
    model.train()
    record(model, [text], rows=10, slopes=True)
    assert model.training
    model.eval()
    assert model.config._attn_implementation == before
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(text[None]).logits, want)


def test_slopes_are_the_models_gradients(model):
    text, before = ids(40), model.config._attn_implementation
    seen = record(model, [text], rows=100, slopes=True)
    model.set_attn_implementation("eager")
    model(text[None], labels=text[None]).loss.backward()
    model.set_attn_implementation(before)
    for layer in (0, 1):
        attention = model.model.layers[layer].self_attn
        # a bias on values is added to every row: its gradient is the sum of theirs
        found = seen[layer].value_slopes.sum(1).flatten()
        torch.testing.assert_close(found, attention.v_proj.bias.grad, rtol=1e-4, atol=1e-7)
        # the same vector added to all keys after the rotation changes no softmax
        assert seen[layer].key_slopes.sum(1).abs().max() < 1e-4 * seen[layer].key_slopes.abs().sum(1).max()
    model.zero_grad(set_to_none=True)


def test_samples_are_drawn_evenly_and_by_the_seed(model):
    texts = [ids(40, 1), ids(60, 2)]
    one, two, other = (record(model, texts, rows=25, seed=s)[1] for s in (5, 5, 6))
    assert one.keys.shape == (KV, 50, WIDTH)
    assert one.queries.shape == (HEADS, 50, WIDTH)
    assert torch.equal(one.keys, two.keys)
    assert not torch.equal(one.positions, other.positions)
    assert (one.positions[:25].diff() > 0).all()
    assert (one.positions[25:].diff() > 0).all()


def test_palu_is_the_whitened_svd_of_the_projection(model):
    """Palu's own way: S = chol(X^T X), SVD of S W, L R from it; the rows it gives are ours."""
    text = ids(60)
    made = calibrate(model, [text], "k:full v:palu(rank=9,rope=post)")
    hidden = []
    hook = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda m, a, o: hidden.append((a[0], o)))
    with torch.no_grad():
        model(text[None])
    hook.remove()
    x, y = (t[0].double() for t in hidden[0])
    # 60 rows of 96 inputs and a bias as one more; the Cholesky factor of what is singular: of its QR instead
    x = torch.cat([x, torch.ones(60, 1)], dim=1)
    layer = model.model.layers[0].self_attn.v_proj
    weight = torch.cat([layer.weight.T, layer.bias[None]])
    s = torch.linalg.qr(x).R
    _, _, vectors = torch.linalg.svd(s @ weight.detach().double())
    want = y @ vectors[:9].T @ vectors[:9]
    basis = twin(part_of("k:full v:palu(rank=9,rope=post)", "v"), "v", made.tensors)
    rows = y.float().reshape(60, KV, WIDTH).transpose(0, 1)[None]
    back = rebuild(basis.project(rows, {}), basis.maps({}))
    torch.testing.assert_close(back[0].transpose(0, 1).reshape(60, -1).double(), want, rtol=1e-3, atol=1e-5)


def part_of(text, side):
    from kvsim.method import parse_method

    method = parse_method(text)
    return (method.k if side == "k" else method.v).basis


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_learned_keys_lose_least_of_the_logits(rope):
    """Queries that look at some channels more than at others: what is learned spends its rank there."""
    model, text = tiny(), ids(300)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= (2.0 ** -torch.arange(8.0)).repeat(2 * HEADS)[:, None]
    method = f"k:learned_projection(rank=6,rope={rope}) v:full"
    made = calibrate(model, [text], method)
    sample = record(model, [text], rows=4096)[0]
    basis = twin(part_of(method, "k"), "k", made.tensors)
    keys, queries = sample.keys, sample.queries
    if rope == "pre":
        from runtime.rope import Rotation

        turn = Rotation(model, model.model.layers[0].self_attn)
        keys = turn.unrotate(keys[None], sample.positions[None])[0]
    back = rebuild(basis.project(keys[None], {}), basis.maps({}))[0]
    vectors, _ = right_vectors(keys, 6)
    plain = keys @ vectors.mT @ vectors
    visible = torch.tril(torch.ones(300, 300))

    def lost(rows):
        error = rows - keys
        if rope == "pre":
            error = turn.rotate(error[None], sample.positions[None])[0]
        return float(((queries @ error.repeat_interleave(HEADS // KV, dim=0).mT).square() * visible).sum())

    assert lost(back) < 0.5 * lost(plain)
    # in plain squares the plain SVD is the better one: Eckart and Young
    assert (plain - keys).square().sum() < (back - keys).square().sum()


def test_learned_values_lose_least_behind_the_output_projection(model):
    text = ids(300)
    made = calibrate(model, [text], "k:full v:learned_projection(rank=6)")
    basis = twin(part_of("k:full v:learned_projection(rank=6)", "v"), "v", made.tensors)
    values = record(model, [text], rows=4096)[0].values
    out = model.model.layers[0].self_attn.o_proj.weight.detach().reshape(96, KV, 3, WIDTH)
    vectors, _ = right_vectors(values, 6)

    def lost(rows):
        return float(torch.einsum("hnd,ohgd->nohg", rows - values, out).square().sum())

    back = rebuild(basis.project(values[None], {}), basis.maps({}))[0]
    assert lost(back) < lost(values @ vectors.mT @ vectors)


def test_frequencies_by_brute_force():
    g = torch.Generator().manual_seed(0)
    # frequency 2 turns much where scores are large: the others' queries are small, frequency 0 never turns
    q, k = (torch.randn(1, 20, 8, generator=g) * torch.tensor([1, 0.3, 2, 0.4] * 2) for _ in range(2))
    angle = torch.arange(20.0)[:, None] * torch.tensor([0.0, 0.9, 0.5, 0.2])

    def turn(x):
        a, b = x.split(4, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    visible = torch.tril(torch.ones(20, 20)).bool()

    def lost(kept):
        pairs, _ = split_channels(torch.tensor([kept]), 8, 8)
        mask = torch.zeros(8, dtype=torch.bool).index_fill(0, pairs[0], True)
        mixed = [torch.where(mask, turn(x), x) for x in (q, k)]
        error = (mixed[0] @ mixed[1].mT - turn(q) @ turn(k).mT)[0].double() * visible
        return float(((error - error.sum(1, keepdim=True) / visible.sum(1, keepdim=True)) * visible).square().sum())

    for count in (1, 2, 3):
        chosen = choose_frequencies((turn(q), q), (turn(k), k), visible, 8, count)[0].tolist()
        assert lost(chosen) == min(lost(list(c)) for c in itertools.combinations(range(4), count))
    assert choose_frequencies((turn(q), q), (turn(k), k), visible, 8, 1).tolist() == [[2]]


@pytest.mark.parametrize("frequencies", [0, 3, 8])
def test_elitekv_answers_queries_in_mixed_coordinates(model, frequencies):
    """Full joint rank: what comes back is the keys, elite frequencies rotated, and the values, both exactly."""
    rank = 2 * KV * WIDTH - 2 * frequencies * KV if 2 * frequencies * KV > 32 else KV * WIDTH
    method = f"elitekv(frequencies={frequencies},rank={min(rank, KV * WIDTH)})"
    text = ids(120)
    made = calibrate(model, [text], method)
    part = part_of(method, "k")
    k, v = twin(part, "k", made.tensors), twin(part, "v", made.tensors)
    sample = record(model, [text], rows=4096)[0]
    from runtime.rope import Rotation

    turn = Rotation(model, model.model.layers[0].self_attn)
    keys = sample.keys[None]
    mixed = k.mix(keys, turn.unrotate(keys, sample.positions[None]), {})
    c = k.project(mixed, {}) + v.project(sample.values[None], {})
    back, values = rebuild(c, k.maps({})), rebuild(c, v.maps({}))
    if frequencies == 8:
        # every frequency is elite: keys are exact and the latent holds the values alone, 32 of 32
        torch.testing.assert_close(back, keys)
        torch.testing.assert_close(values, sample.values[None], rtol=1e-3, atol=1e-5)
    pairs, _ = split_channels(made.tensors[f"layer.0.k.elitekv.{frequencies}.elite"], WIDTH, WIDTH)
    torch.testing.assert_close(back.gather(3, pairs[None, :, None].expand(1, -1, 120, -1)),
                               keys.gather(3, pairs[None, :, None].expand(1, -1, 120, -1)))
    # joint rows in the latent: their error is the tail of the two sides together
    both = torch.cat([mixed - back, sample.values[None] - values], dim=3)
    rest = torch.cat([mixed.masked_fill(mask_of(pairs), 0), sample.values[None]], dim=3).transpose(1, 2).flatten(2)
    tail = np.linalg.svd(rest[0].double().numpy(), compute_uv=False)[part.rank :]
    assert float(both.double().square().sum()) == pytest.approx((tail**2).sum(), rel=1e-3, abs=1e-6)


def mask_of(pairs):
    return torch.zeros(KV, WIDTH, dtype=torch.bool).scatter(1, pairs, True)[None, :, None]


def test_formats_and_policies_learn_too(model):
    method = ("topk(budget=0.5,score=auxiliary) | "
              "k:kmeans(bits=3,weighting=fisher)+outliers(fraction=0.1) v:float8(scale=tensor)")
    made = calibrate(model, [ids(150)], method).tensors
    assert {k.removeprefix("layer.1.") for k in made if k.startswith("layer.1.")} == {
        "k.codebook", "v.scale", "tokens.estimator"
    }
    assert made["layer.0.k.codebook"].shape[-1] == 8
    assert made["layer.0.tokens.estimator"].shape == (1, KV, 32, WIDTH + 2)
    others = {"k:mixed(by=hessian,group=4) v:full": "k.sensitivity", "svd(rank=4) | kmeans(bits=2)": "v.codebook"}
    for text, name in others.items():
        found = calibrate(model, [ids(150)], text).tensors[f"layer.0.{name}"]
        assert torch.isfinite(found).all()
        assert (found > 0).any()


def test_weights_move_the_codebook(model):
    plain, weighed = (calibrate(model, [ids(150)], f"k:kmeans(bits=2,per=tensor,weighting={w}) v:full").tensors
                      for w in ("none", "fisher"))
    assert not torch.allclose(plain["layer.0.k.codebook"], weighed["layer.0.k.codebook"])


def test_a_file_comes_back_and_fits_one_model(model, tmp_path):
    path = tmp_path / "palu.safetensors"
    made = calibrate(model, [ids(80), ids(70, 3)], "palu(rank=8)", length=50, seed=4)
    made.save(path)
    again = load(path, model)
    assert again.metadata == made.metadata
    assert again.metadata["tokens"] == "150"
    assert again.metadata["method"] == "palu(rank=8)"
    assert set(again.tensors) == set(made.tensors)
    assert all(torch.equal(again.tensors[k], made.tensors[k]) for k in made.tensors)
    same = calibrate(model, [ids(80), ids(70, 3)], "palu(rank=8)", length=50, seed=4)
    assert all(torch.equal(same.tensors[k], made.tensors[k]) for k in made.tensors)
    load(path, tiny().bfloat16())
    load(path, tiny().half())
    with pytest.raises(KvsimError, match="other weights"):
        load(path, tiny(seed=1))
    with pytest.raises(KvsimError, match="other weight matrices"):
        load(path, tiny(tie_word_embeddings=True))


@pytest.mark.parametrize("sketch", ["[", "3", '["a"]', "[" * 100_000, f"[1{'0' * 400}]", "[NaN]"])
def test_a_file_that_lies_about_its_weights_is_refused(model, sketch):
    made = calibrate(model, [ids(80)], "palu(rank=8)")
    many = f"[{', '.join(['NaN'] * len(json.loads(made.metadata['sketch'])))}]" if sketch == "[NaN]" else sketch
    with pytest.raises(KvsimError, match=r"damaged|other weights"):
        replace(made, metadata=made.metadata | {"sketch": many}).check(model)


def test_what_is_no_calibration_is_refused(model, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(KvsimError, match="no such file"):
        load(tmp_path / "nothing")
    poison = tmp_path / "pickled"
    poison.write_bytes(pickle.dumps({"layer.0.k.encoder": [1.0]}))
    with pytest.raises(KvsimError, match="not a safetensors file"):
        load(poison)
    torch.save({"a": torch.ones(1)}, tmp_path / "torch.pt")
    with pytest.raises(KvsimError, match="not a safetensors file"):
        load(tmp_path / "torch.pt")
    save_file({"a": torch.ones(1)}, str(tmp_path / "other"))
    with pytest.raises(KvsimError, match="format None"):
        load(tmp_path / "other", model)
    with pytest.raises(KvsimError, match="no part that calibration"):
        calibrate(model, [ids(20)], "int(bits=4)")
    with pytest.raises(KvsimError, match="two tokens"):
        calibrate(model, [ids(1)], "palu(rank=8)")
    with pytest.raises(KvsimError, match="tokenizer"):
        calibrate(model, ["words"], "palu(rank=8)")


def test_texts_go_through_the_tokenizer(model):
    def tokenizer(text):
        return {"input_ids": [ord(c) % 97 for c in text]}

    made = calibrate(model, ["some words to learn from, " * 4], "palu(rank=8)", tokenizer=tokenizer)
    assert made.metadata["tokens"] == str(26 * 4)


@pytest.mark.parametrize("method", [
    "palu(rank=32)", "k:learned_projection(rank=16,rope=pre) v:learned_projection(rank=16)",
    "elitekv(frequencies=8,rank=32)",
])
def test_calibrated_bases_of_full_rank_leave_the_model_as_it_was(model, method, tmp_path):
    """From the file through the cache into generation: nothing is lost where no rank is; without it, said so."""
    from runtime import CompressedCache

    text = ids(60, 9)[None]
    calibrate(model, [ids(300)], method).save(tmp_path / "made.safetensors")
    with torch.no_grad():
        want = model(text).logits[:, 40:]
        with CompressedCache(method, model, calibration=tmp_path / "made.safetensors") as cache:
            model(text[:, :40], past_key_values=cache)
            got = torch.cat([model(text[:, i : i + 1], past_key_values=cache).logits for i in range(40, 60)], dim=1)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    with torch.no_grad(), pytest.raises(KvsimError, match="calibration=FILE"), CompressedCache(method, model) as cache:
        model(text[:, :40], past_key_values=cache)
