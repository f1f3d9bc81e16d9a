"""The shipped models: index and files agree, names resolve without guessing, counts are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvsim.catalogue
from kvsim.catalogue import catalogue, entries, find
from kvsim.configs import load_model
from kvsim.errors import KvsimError

FOLDER = Path(kvsim.catalogue.__file__).with_name("data") / "models"


def test_index_and_files_agree() -> None:
    files = {p.stem for p in FOLDER.glob("*.json")} - {"index"}
    assert files == set(catalogue())
    assert len(files) >= 90
    for name, entry in entries().items():
        row = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        assert (row["name"], tuple(row["aliases"]), row["source"]) == (name, entry.aliases, entry.source)
        assert entry.source


@pytest.mark.parametrize("name", catalogue())
def test_every_model_loads_with_its_count(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.parameters == entries()[name].parameters
    assert model.cache_bytes(1024) + model.state_bytes() > 0
    for alias in entries()[name].aliases:
        assert load_model(alias).groups == model.groups


# The counts that papers and model cards print, in billions, to the digits they print.
PUBLISHED = {
    "llama-7b": 6.74, "llama-13b": 13.02, "llama-30b": 32.53, "llama-65b": 65.29, "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "smollm2-135m": 0.13, "gemma-3-270m": 0.27,
    "gemma-3-27b": 27.43, "mistral-7b-v0.1": 7.24, "mixtral-8x7b": 46.70, "qwen2.5-7b": 7.62, "qwen3-32b": 32.76,
    "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "deepseek-v3": 671.03, "phi-4": 14.66, "phi-2": 2.78, "gpt2-xl": 1.56,
    "bloom-176b": 176.25, "opt-6.7b": 6.66, "gpt-neox-20b": 20.55, "gpt-j-6b": 6.05, "pythia-6.9b": 6.86,
             "falcon-7b": 6.92,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name: str) -> None:
    assert round(load_model(name).parameters / 1e9, 2) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "means"), [
    ("llama-3.1-8b", "llama-3.1-8b"), ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
                                             ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
    ("LLAMA_3_1_8B", "llama-3.1-8b"), ("LLaMA-7B", "llama-7b"), ("gpt oss 20b", "gpt-oss-20b"),
                                             ("deepseek-r1", "deepseek-r1"),
    ("google/gemma-3-27b-it", "gemma-3-27b"),
])
def test_names_resolve_case_and_punctuation_aside(name: str, means: str) -> None:
    entry = find(name)
    assert entry is not None
    assert entry.name == means


@pytest.mark.parametrize(("name", "part"), [
    ("llama-3.1", "ambiguous: llama-3.1-405b, llama-3.1-70b, llama-3.1-8b"),
    ("qwen3", "ambiguous"),
    ("llama-3.1-9b", "did you mean 'llama-3.1-8b'?"),
    ("no-such-model", "is not known"),
])
def test_names_that_mean_nothing_or_several(name: str, part: str) -> None:
    with pytest.raises(KvsimError, match="model") as caught:
        find(name)
    assert part in str(caught.value)
    assert find(name, must=False) is None


def test_no_two_models_answer_to_one_name() -> None:
    owners: dict[str, str] = {}
    for entry in entries().values():
        for spelling in (entry.name, *entry.aliases):
            folded = "".join(c for c in spelling.lower() if c.isalnum())
            assert owners.setdefault(folded, entry.name) == entry.name, spelling
