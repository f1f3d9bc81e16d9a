"""A plain cache that a policy's twin drives: random rows, softmax weights, a rectangle for each head if ragged."""

from dataclasses import dataclass, replace

import torch

from kvsim import parse_method
from kvsim.parts import Place, Rows
from runtime.parts import Prompt, Setting, Step, twins


def policy(text):
    return parse_method(text).tokens


def softmax_weights(q, k, scaling, bias=None):
    """Causal weights [B, Hq, m, n] of the last m rows' queries."""
    group = q.shape[1] // k.shape[1]
    logits = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scaling
    if bias is not None:
        logits = logits + bias.double().repeat_interleave(q.shape[1] // bias.shape[1], 1)[:, :, None]
    m, n = logits.shape[2:]
    hidden = torch.arange(n)[None] > torch.arange(n - m, n)[:, None]
    return torch.softmax(logits.masked_fill(hidden, float("-inf")), -1)


def mean_group(x, heads):
    return x.unflatten(1, (heads, x.shape[1] // heads)).mean(2)


@dataclass
class Text:
    """Random keys, values and queries of n tokens."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor

    @classmethod
    def draw(cls, n, batch=1, heads=3, group=2, width=8, seed=0, dtype=torch.float32):
        g = torch.Generator().manual_seed(seed)
        shape = (batch, heads, n, width)
        k, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
        return cls(k, v, (2 * torch.randn((batch, heads * group, n, width), generator=g)).to(dtype))

    @property
    def scaling(self):
        return self.k.shape[3] ** -0.5

    def place(self, layer=3, n_layers=8, heads=None):
        own = heads or self.k.shape[1]
        group = self.q.shape[1] // self.k.shape[1]
        return Place("k", own, self.k.shape[3], own * group, 8 * self.k.element_size(), layer, n_layers)

    def prompt(self, twin, n, scores=None):
        """What the twin asks for, and nothing else."""
        heads = self.k.shape[1]
        found = Prompt(self.k[:, :, :n], self.v[:, :, :n], self.scaling, scores=scores)
        if twin.prompt_queries:
            found.queries = self.q[:, :, max(0, n - twin.prompt_queries) : n]
        if twin.prompt_weights:
            weights = mean_group(softmax_weights(self.q[:, :, :n], self.k[:, :, :n], self.scaling), heads)
            found.mass, found.seen_by = weights.sum(2).float(), torch.arange(n, 0, -1)
        return found


class Run:
    """One rectangle: rows held [B, H, n], by content and by the token that they came as."""

    def __init__(self, twin, keys, values, ids, state, seen):
        self.twin, self.k, self.v, self.ids, self.state, self.seen = twin, keys, values, ids, state, seen
        self.attended = self.bias = None

    @property
    def rows(self):
        return self.k.shape[2]

    def step(self, k, v, q, scaling, tail=0):
        """Append rows, attend, let the policy move on. Returns the output [B, Hq, m, d]."""
        m, seen = k.shape[2], self.seen
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        new = torch.arange(seen, seen + m).expand(*k.shape[:2], m)
        self.ids, self.seen = torch.cat([self.ids, new], 2), seen + m
        self.bias = self.twin.bias(self.state, seen, self.rows)
        weights = softmax_weights(q, self.k, scaling, self.bias)
        self.attended = self.twin.attended(self.state, q, self.rows)
        out = weights @ self.v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        step = Step(self.seen, self.rows, tail=tail, new=m, queries=q)
        if self.twin.step_weights:
            step.weights = mean_group(weights, k.shape[1]).float()
        if self.twin.step_rows != "none":
            step.keys, step.values = (x if self.twin.step_rows == "all" else x[:, :, -m:] for x in (self.k, self.v))
        self._take(step)
        return out

    def _take(self, step):
        fold = self.twin.fold(self.state, step)
        if fold is None:
            self.state, drop = self.twin.step(self.state, step)
        else:
            self.state, drop = fold.state, fold.drop
            assert (fold.at >= 0).all()
            wide = fold.at[..., None].expand(-1, -1, -1, self.k.shape[3])
            self.k, self.v = self.k.scatter(2, wide, fold.keys), self.v.scatter(2, wide, fold.values)
        if drop is not None:
            assert drop.dtype == torch.int64
            assert (drop >= 0).all()
            assert (drop.diff(dim=2) > 0).all()
            self.keep(drop)

    def keep(self, drop):
        batch, heads, rows = self.ids.shape
        left = torch.ones((batch, heads, rows), dtype=torch.bool).scatter(2, drop.expand(batch, heads, -1), False)
        index = torch.arange(rows).expand(batch, heads, rows)[left].reshape(batch, heads, -1)
        self.ids = self.ids.gather(2, index)
        wide = index[..., None].expand(-1, -1, -1, self.k.shape[3])
        self.k, self.v = self.k.gather(2, wide), self.v.gather(2, wide)
        for name, value in self.state.items():
            if value.shape[2] == rows:
                own = index[:, : value.shape[1], :, None].expand(-1, -1, -1, value.shape[3])
                self.state[name] = value.gather(2, own)


class Cache:
    """A layer's cache under a policy: the prompt taken in, then steps."""

    def __init__(self, text, stream, prompt, layer=3, n_layers=8, calibration=None, scores=None, seed=0):
        self.part = policy(text) if isinstance(text, str) else text
        self.stream, self.seen = stream, prompt
        self.setting = Setting(stream.place(layer, n_layers), stream.k.dtype, calibration=calibration or {}, seed=seed)
        self.twin = twins()[self.part.name](self.part, self.setting)
        given = stream.prompt(self.twin, prompt, scores)
        ids = torch.arange(prompt).expand(*stream.k.shape[:2], prompt)
        merged, k, v = self.twin.merge(given), given.keys, given.values
        if merged is not None:
            k, v, state, counts = merged.keys, merged.values, merged.state, merged.rows
            ids = torch.zeros(k.shape[:3], dtype=torch.int64)
        else:
            kept = self.twin.select(given)
            state = self.twin.start(given, kept)
            counts = None if kept is None else (kept >= 0).sum(2)
            if kept is not None:
                assert kept.dtype == torch.int64
                ids = kept
                wide = kept.clamp_min(0)[..., None].expand(-1, -1, -1, k.shape[3])
                k, v = k.gather(2, wide), v.gather(2, wide)
        whole = not self.twin.ragged
        self.runs = [Run(self.twin, k, v, ids, state, prompt)] if whole else self._split(k, v, ids, state, counts)

    def _split(self, k, v, ids, state, counts):
        found, alone = [], replace(self.setting, place=replace(self.setting.place, heads=1,
                                   n_heads=self.setting.place.n_heads // self.setting.place.heads))
        for b in range(k.shape[0]):
            for h in range(k.shape[1]):
                n = k.shape[2] if counts is None else int(counts[b, h])
                own = {}
                for name, x in state.items():
                    whole = x[b : b + 1, h : h + 1]
                    own[name] = whole[:, :, :n] if name in ("log_count", "hashes") else whole
                one = [x[b : b + 1, h : h + 1, :n] for x in (k, v, ids)]
                found.append(Run(type(self.twin)(self.part, alone), *one, own, self.seen))
        return found

    def step(self, m=1, tail=0):
        """Feed the next m tokens; the outputs [B, Hq, m, d]."""
        at = slice(self.seen, self.seen + m)
        k, v, q = (x[:, :, at] for x in (self.stream.k, self.stream.v, self.stream.q))
        self.seen += m
        if not self.twin.ragged:
            return self.runs[0].step(k, v, q, self.stream.scaling, tail)
        group, heads, out = q.shape[1] // k.shape[1], k.shape[1], []
        for i, run in enumerate(self.runs):
            b, h = divmod(i, heads)
            out.append(run.step(k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1],
                                q[b : b + 1, h * group : (h + 1) * group], self.stream.scaling, tail))
        return torch.cat(out, 1).reshape(k.shape[0], q.shape[1], *out[0].shape[2:])

    def counts(self):
        """Rows held, by sequence and head, [B, H]."""
        batch, heads = self.stream.k.shape[:2]
        if self.twin.ragged:
            return torch.tensor([r.rows for r in self.runs]).reshape(batch, heads)
        return torch.full((batch, heads), self.runs[0].rows)

    def held(self, b=0, h=0):
        """Tokens held by one head."""
        if self.twin.ragged:
            return self.runs[b * self.stream.k.shape[1] + h].ids[0, 0].tolist()
        return self.runs[0].ids[b, h].tolist()

    def state_bytes(self):
        """Bytes by buffer."""
        found = {}
        for run in self.runs:
            for name, x in run.state.items():
                found[name] = found.get(name, 0) + x.nbytes
        return found | {name: x.nbytes for name, x in self.twin.model_buffers().items()}

    def declared_bytes(self):
        """The same as the analytic part declares it for the rows that are held."""
        found = {}
        for run in self.runs:
            place = run.twin.place
            for buffer in self.part.buffers(Rows(run.rows, run.rows, run.rows), self.seen, place):
                held = 0 if buffer.per_model else found.get(buffer.name, 0)
                found[buffer.name] = held + buffer.bytes * (1 if buffer.per_model else run.k.shape[0])
        return found
