"""A small model that sees and hears, trained here on scikit-learn's digits: patches, films, tones in, answers out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.errors import KvsimError

Kind = Literal["image", "video", "audio"]
PATCH, SIDE, FRAMES, BANDS, SOUND = 2, 8, 4, 8, 64
"""Pixels of a patch's side, pixels of a digit's, frames of a film; bands and frames of a sound."""
GRID = SIDE // PATCH
SEGMENTS: dict[Kind, str] = {"image": "text1-image8x8", "video": "text1-video4x4x4", "audio": "text1-audio64"}
"""What the prompts consist of: a start token, then patches or frames; questions come as later tokens."""
DIGITS, ASKED, START, VOCABULARY = 10, 18, 22, 24
"""Answers are tokens 0-9 (digits) and 10-17 (notes); questions 18-21 (which quarter, frame or note)."""
QUESTIONS = 4
TRAINED = 1297
"""Of the 1,797 digits, those that are trained on; the others are held out."""
HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 3, 4, 2


@dataclass(frozen=True)
class Asked:
    """Prompts as embeddings' inputs and their questions: content [B, n, w], questions and answers [B, q]."""

    kind: Kind
    content: Tensor
    questions: Tensor
    answers: Tensor


class Senses(nn.Module):
    """A decoder (Llama, rotary positions along the sequence) with a projector for pixels and one for sound.

    Like a vision-language model, it sees content as embeddings: a projected patch plus where it lies on its grid.
    """

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS,
            max_position_embeddings=512, tie_word_embeddings=False, use_cache=True,
        )  # fmt: skip
        self.decoder = LlamaForCausalLM(config)
        self.pixel, self.tone = nn.Linear(PATCH**2, HIDDEN), nn.Linear(BANDS, HIDDEN)
        self.row, self.column, self.frame = (nn.Embedding(n, HIDDEN) for n in (2 * GRID, 2 * GRID, FRAMES))
        for table in (self.row, self.column, self.frame):
            nn.init.normal_(table.weight, std=0.3)

    def embedded(self, asked: Asked) -> Tensor:
        """The prompt [B, 1 + n, hidden]."""
        words: Any = self.decoder.get_input_embeddings()
        start = words(torch.full((len(asked.content), 1), START))
        if asked.kind == "audio":
            return torch.cat([start, self.tone(asked.content)], 1)
        side = 2 * GRID if asked.kind == "image" else GRID
        at = torch.arange(asked.content.shape[1])
        place = self.row(at // side % side) + self.column(at % side) + self.frame(at // side**2)
        return torch.cat([start, self.pixel(asked.content) + place], 1)

    def words(self, tokens: Tensor) -> Tensor:
        """Questions as embeddings."""
        found: Tensor = self.decoder.get_input_embeddings()(tokens)
        return found

    def forward(self, asked: Asked) -> Tensor:
        """Logits [B, q, vocabulary] of all questions at once, each seeing those before it."""
        x = torch.cat([self.embedded(asked), self.words(asked.questions)], 1)
        logits: Tensor = self.decoder(inputs_embeds=x, use_cache=False).logits
        return logits[:, -asked.questions.shape[1] :]


class Examples:
    """Prompts drawn from scikit-learn's digits (real scans of handwriting) and from made-up tones, by a seed."""

    def __init__(self, held_out: bool, seed: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise KvsimError("the digits need scikit-learn: pip install scikit-learn") from None
        data = load_digits()
        own = slice(TRAINED, None) if held_out else slice(0, TRAINED)
        self.images = torch.tensor(data.images[own], dtype=torch.float32) / 16
        self.labels = torch.tensor(data.target[own])
        self.generator, self.moves = torch.Generator().manual_seed(seed), not held_out

    def _pick(self, count: int) -> tuple[Tensor, Tensor]:
        """Digits [count, 8, 8], moved by up to a pixel in training, and what they are."""
        at = torch.randint(len(self.images), (count,), generator=self.generator)
        found = self.images[at]
        if self.moves:
            shift = torch.randint(-1, 2, (2,), generator=self.generator).tolist()
            padded = functional.pad(found, (1, 1, 1, 1))
            found = padded[:, 1 + shift[0] : 1 + shift[0] + SIDE, 1 + shift[1] : 1 + shift[1] + SIDE]
        return found, self.labels[at]

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw(self, kind: Kind, count: int) -> Asked:
        """A batch of one kind, all four questions in an order of their own."""
        order = torch.rand((count, QUESTIONS), generator=self.generator).argsort(1)
        content, answers = {"image": self._pages, "video": self._films, "audio": self._tones}[kind](count)
        return Asked(kind, content, ASKED + order, answers.gather(1, order))

    def _pages(self, count: int) -> tuple[Tensor, Tensor]:
        """Four digits on a page of two by two."""
        digits, labels = self._pick(4 * count)
        pages = digits.reshape(count, 2, 2, SIDE, SIDE).permute(0, 1, 3, 2, 4).reshape(count, 1, 2 * SIDE, 2 * SIDE)
        return patches(pages), labels.reshape(count, 4)

    def _films(self, count: int) -> tuple[Tensor, Tensor]:
        """Four noisy frames: one digit up to a cut, which may never come, then another."""
        (a, one), (b, two) = self._pick(count), self._pick(count)
        cut = torch.randint(1, FRAMES + 1, (count, 1), generator=self.generator)
        late = torch.arange(FRAMES)[None] >= cut
        frames = torch.where(late[..., None, None], b[:, None], a[:, None])
        return patches(frames + 0.1 * self._noise(*frames.shape)), torch.where(late, two[:, None], one[:, None])

    def _tones(self, count: int) -> tuple[Tensor, Tensor]:
        """Four tones of different lengths in noise: energies of 8 bands in 64 frames."""
        notes = torch.randint(BANDS, (count, QUESTIONS), generator=self.generator)
        share = torch.rand((count, QUESTIONS), generator=self.generator) + 0.5
        ends = (share.cumsum(1) / share.sum(1, keepdim=True) * SOUND).round()
        which = (torch.arange(SOUND)[None, :, None] >= ends[:, None]).sum(2).clamp(max=QUESTIONS - 1)
        frames = functional.one_hot(notes.gather(1, which), BANDS) + 0.4 * self._noise(count, SOUND, BANDS)
        return frames, DIGITS + notes


def patches(frames: Tensor) -> Tensor:
    """Frames [B, f, h, w] as patches [B, f * h/2 * w/2, 4], each frame row by row, pixels from -1 to 1."""
    batch, count, height, width = frames.shape
    cut = frames.reshape(batch, count, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 1, 2, 4, 3, 5)
    return 2 * cut.reshape(batch, -1, PATCH**2) - 1


BATCH = 16
TURNS: tuple[Kind, ...] = ("image", "video", "image", "audio")
PAUSE = 100
"""Steps after which a run that may be interrupted is kept."""


def trained(steps: int, seed: int = 0, report: int = 0, keep: Path | None = None) -> Senses:
    """Train from nothing: AdamW, a cosine from 2e-3, kinds in turn; the same seed gives the same weights.

    keep: a file to which the run is written every PAUSE steps, and from which it goes on, to the same weights. Raises
    KvsimError where that file is of another run.
    """
    torch.manual_seed(seed)
    model, examples = Senses(), Examples(held_out=False, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=max(steps, 2), pct_start=0.1)
    run = {"steps": steps, "seed": seed}
    first = _resumed(keep, run, (model, optimizer, plan), examples) if keep is not None and keep.exists() else 0
    for step in range(first, steps):
        asked = examples.draw(TURNS[step % len(TURNS)], BATCH)
        logits = model(asked)
        loss = functional.cross_entropy(logits.flatten(0, 1), asked.answers.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()
        if report and step % report < len(TURNS):
            right = (logits.argmax(-1) == asked.answers).float().mean()
            print(f"{step}: {asked.kind} loss {loss.item():.3f}, right {right.item():.2f}", flush=True)
        if keep is not None and (step + 1) % PAUSE == 0:
            _keep(keep, run | {"done": step + 1}, (model, optimizer, plan), examples)
    return model.eval()


def _keep(keep: Path, run: dict[str, int], parts: tuple[Any, ...], examples: Examples) -> None:
    """Write a run with safetensors: tensors as such, what else it takes as words beside them."""
    from safetensors.torch import save_file

    model, optimizer, plan = (part.state_dict() for part in parts)
    tensors = {f"model.{name}": x for name, x in model.items()} | {"drawn": examples.generator.get_state()}
    tensors |= {f"adam.{i}.{name}": x for i, held in optimizer["state"].items() for name, x in held.items()}
    said = {"run": run, "groups": optimizer["param_groups"], "plan": plan}
    save_file({name: x.clone() for name, x in tensors.items()}, keep, {k: json.dumps(v) for k, v in said.items()})


def _resumed(keep: Path, run: dict[str, int], parts: tuple[Any, ...], examples: Examples) -> int:
    """Put a kept run back in place and tell how many of its steps are done."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(keep, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
        held = said["run"]
        if {name: held[name] for name in run} != run:
            raise KvsimError(f"{keep} keeps a run of {held['steps']} steps with seed {held['seed']}; ask for that one")
        state: dict[int, dict[str, Tensor]] = {}
        for name, x in tensors.items():
            if name.startswith("adam."):
                _, index, what = name.split(".")
                state.setdefault(int(index), {})[what] = x
        model = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
        optimizer = {"state": state, "param_groups": said["groups"]}
        for part, put in zip(parts, (model, optimizer, said["plan"]), strict=True):
            part.load_state_dict(put)
        examples.generator.set_state(tensors["drawn"])
        return int(held["done"])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise KvsimError(f"{keep} keeps no run of this model: {str(error).splitlines()[0]}") from None


def saved(model: Senses, path: Path) -> None:
    """Write the weights with safetensors."""
    from safetensors.torch import save_model

    save_model(model, str(path))


def loaded(path: Path) -> Senses:
    """Read them back; KvsimError where the file is of another model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    model = Senses()
    try:
        load_model(model, str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise KvsimError(f"{path} does not hold this model's weights: {str(error).splitlines()[0]}") from None
    return model.eval()
