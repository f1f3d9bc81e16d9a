"""SmolLM2: text stays coherent under methods of all families, logits agree with slow references, bytes are exact."""

import pytest
import torch
from families import differences, record
from reference import H2O, Int4, Kivi, Method, SnapKV, SvdBeforeRotation, Window
from smollm2 import question, subject, topics

from runtime import CompressedCache

pytestmark = pytest.mark.slow
METHODS = {
    "full": 1.0,
    "int8": 3.7,
    "int(bits=4)": 7.0,
    "kivi-4": 2.3,
    "kivi-2": 2.5,
    "nvfp4": 7.0,
    "turboquant-4": 7.0,
    "q4_0": 7.0,
    "gear": 4.0,
    "svd(rank=48,rope=pre)": 1.1,
    "k:svd(rank=48,rope=pre) | int(bits=8) v:int(bits=4)": 4.0,
    "tucker(ranks=(128,0,48)) | int(bits=8)": 1.9,
    "h2o(budget=0.5)": 1.9,
    "snapkv(budget=0.5)": 1.7,
    "window(sinks=4,recent=150)": 2.1,
    "adakv(budget=0.5)": 1.7,
    "quest": 0.9,
    "snapkv(budget=0.5) | int(bits=4)": 12.0,
    "h2o(budget=0.5) | int(bits=4)": 13.0,
}
"""Each with the least factor by which its cache must be smaller than the uncompressed one."""


@pytest.mark.parametrize("method", METHODS)
def test_text_stays_coherent(method):
    """Of what was written, the uncompressed model itself thinks that it is likely text."""
    model, tokenizer = subject()
    ids = question("Who was the keeper of the lighthouse, and what did he do in the storm of 1933?")
    with torch.no_grad(), CompressedCache(method, model) as cache:
        out = model.generate(ids, cache=cache, max_new_tokens=40, do_sample=False, pad_token_id=0)
        new = out.shape[1] - ids.shape[1]
        rows = cache.rows() if cache.layers[0].twins.ragged else None
        assert not differences(cache, record(model, method, 1, ids.shape[1], new - 1, rows=rows))
        whole = (ids.shape[1] + new - 1) * 30 * 3 * 2 * 64 * 4
        assert whole / cache.nbytes() >= METHODS[method]
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    with torch.no_grad():
        logits = model(out).logits[0, ids.shape[1] - 1 : -1]
    surprise = torch.nn.functional.cross_entropy(logits, out[0, ids.shape[1] :])
    assert "lighthouse" in text
    assert float(surprise) < 2.0, text


CASES = {
    "int(bits=4)": lambda m: Int4(m, 64),
    "kivi-4": lambda m: Kivi(m, 4, 32, 128),
    "h2o(budget=0.25)": lambda m: H2O(m, (1, 4)),
    "snapkv(budget=0.25)": lambda m: SnapKV(m, (1, 4), 32),
    "svd(rank=32,rope=pre)": lambda m: SvdBeforeRotation(m, 32),
    "window(sinks=4,recent=60)": lambda m: Window(m, 4, 60),
}


def divergence(a, b):
    """Mean KL(a || b) of two sets of logits [K, vocabulary], in nats."""
    p, q = (torch.log_softmax(x.double(), -1) for x in (a, b))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("method", CASES)
def test_logits_are_those_of_a_slow_reference(method):
    model, _ = subject()
    ids, steps = topics(300), topics(24, start=300)
    with torch.no_grad():
        expected, plain = CASES[method](model).run(ids, steps), Method(model).run(ids, steps)
        with CompressedCache(method, model) as cache:
            model(ids, cache=cache)
            found = torch.cat([model(steps[:, i : i + 1], cache=cache).logits[0] for i in range(steps.shape[1])])
    effect = divergence(plain, expected)
    assert effect > 1e-4
    # later on, codes that fell to the other side of their threshold add up where every row is coded at once
    assert divergence(expected[:3], found[:3]) < 1e-6
    assert divergence(expected, found) < 0.1 * effect


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        "full",
        "int(bits=4)",
        "kivi-2",
        "h2o(budget=0.25) | int(bits=4)",
        "adakv",
        "svd(rank=32,rope=pre) | int(bits=4)",
        "lsh_merge(planes=6)",
    ],
)
def test_bytes_are_exact(method, batch):
    model, _ = subject()
    ids = topics(200 * batch).reshape(batch, 200)
    with torch.no_grad(), CompressedCache(method, model) as cache:
        model(ids, cache=cache)
        for i in range(5):
            model(ids[:, i : i + 1], cache=cache)
        rows = cache.rows() if cache.layers[0].twins.ragged else None
        assert not differences(cache, record(model, method, batch, 200, 5, rows=rows))
