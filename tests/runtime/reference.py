"""Slow float64 references of compressed attention, written against the method's words and not against the runtime.

Every layer keeps all keys and values that ever came, exact, in a plain transformers cache. What a method would hold is
made from them anew at each step: rows that are encoded are rounded (`rounded`), rows that were dropped are masked, and
dense float64 attention runs over the rest.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

RUNNING = ContextVar("reference")


def groups_rounded(x, bits, size, dim):
    """Asymmetric b-bit codes of groups of `size` along `dim` (fp16 minimum, fp16 scale rounded up), decoded."""
    x = x.double()
    moved = x.movedim(dim, -1)
    found = []
    for piece in moved.split(size, dim=-1):
        least = piece.amin(-1, keepdim=True).half().double()
        step = ((piece.amax(-1, keepdim=True) - least).clamp(min=0) / (2**bits - 1)).float()
        near = step.half()
        low = near.double() * (1 + 2.0**-20) < step.double()
        step = torch.where(low, (near.view(torch.int16) + 1).view(torch.float16), near).double()
        codes = torch.where(step > 0, ((piece - least) / step).round().clamp(0, 2**bits - 1), 0.0)
        found.append(codes * step + least)
    return torch.cat(found, -1).movedim(-1, dim)


@dataclass
class Held:
    """One layer: which rows [H, n] each head may see (None: all), and what a policy has summed up."""

    alive: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    fitted: dict = field(default_factory=dict)


class Method:
    """Everything is kept as it is. `settled`: rows that had come when the last step ended."""

    def __init__(self, model):
        self.model = model
        self.layers = [Held() for _ in range(model.config.num_hidden_layers)]

    def prompt(self, held, weights, q, k, v):
        """The prompt ended: causal weights [Hq, T, T], float64 rows [., T, d]."""

    def rounded(self, held, k, v, settled):
        """Keys and values as the cache gives them back; rows from `settled` on are still exact."""
        return k, v

    def after(self, held, weights, total):
        """A step ended: weights [Hq, n] of its query."""

    def attention(self, module, query, key, value, mask, scaling=None, **_):
        """Dense float64 attention of one sequence over what the method holds."""
        held, (q, k, v) = self.layers[module.layer_idx], (x[0].double() for x in (query, key, value))
        m, n, group = q.shape[1], k.shape[1], q.shape[0] // k.shape[0]
        if m < n:
            k, v = self.rounded(held, k, v, n - m)
        logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
        seen = torch.ones((m, n)).tril(n - m).bool().expand(k.shape[0], m, n)
        if held.alive is not None:
            seen = (
                seen & torch.cat([held.alive, held.alive.new_ones((k.shape[0], n - held.alive.shape[1]))], 1)[:, None]
            )
        weights = torch.softmax(logits.masked_fill(~seen.repeat_interleave(group, 0), float("-inf")), -1)
        out = weights @ v.repeat_interleave(group, 0)
        if m == n:
            self.prompt(held, weights, q, k, v)
        else:
            self.after(held, weights[:, -1], n)
        return out.transpose(0, 1)[None].to(query.dtype), None

    def run(self, ids, steps):
        """Logits [K, vocabulary] after the prompt ids [1, T] and each of the steps [1, K]."""
        before = self.model.config._attn_implementation
        AttentionInterface.register("reference", lambda *a, **k: RUNNING.get().attention(*a, **k))
        AttentionMaskInterface.register("reference", lambda *a, **k: None)
        token = RUNNING.set(self)
        self.model.set_attn_implementation("reference")
        try:
            cache = DynamicCache()
            with torch.no_grad():
                self.model(ids, cache=cache)
                return torch.cat(
                    [self.model(steps[:, i : i + 1], cache=cache).logits[0] for i in range(steps.shape[1])]
                )
        finally:
            self.model.set_attn_implementation(before)
            RUNNING.reset(token)


class Int4(Method):
    """Every row is coded by itself once its step is over, in groups along the row."""

    def __init__(self, model, group):
        super().__init__(model)
        self.group = group

    def rounded(self, held, k, v, settled):
        return (torch.cat([groups_rounded(x[:, :settled], 4, self.group, 2), x[:, settled:]], 1) for x in (k, v))


class Kivi(Method):
    """Keys by channel over `group` tokens, whole multiples of R; values by token, all but the last R."""

    def __init__(self, model, bits, group, residual):
        super().__init__(model)
        self.bits, self.group, self.residual = bits, group, residual

    def rounded(self, held, k, v, settled):
        keys, values = settled // self.residual * self.residual, max(0, settled - self.residual)
        k = torch.cat([groups_rounded(k[:, :keys], self.bits, self.group, 1), k[:, keys:]], 1) if keys else k
        v = torch.cat([groups_rounded(v[:, :values], self.bits, self.group, 2), v[:, values:]], 1) if values else v
        return k, v


class Window(Method):
    """The first `sinks` and the last `recent` rows."""

    def __init__(self, model, sinks, recent):
        super().__init__(model)
        self.sinks, self.recent = sinks, recent

    def prompt(self, held, weights, q, k, v):
        self._mark(held, k.shape[0], k.shape[1])

    def after(self, held, weights, total):
        self._mark(held, held.alive.shape[0], total)

    def _mark(self, held, heads, total):
        at = torch.arange(total)
        held.alive = ((at < self.sinks) | (at >= total - self.recent)).expand(heads, -1)


class H2O(Method):
    """ceil(b n) rows a head: the newest half, and those of largest accumulated weight."""

    def __init__(self, model, budget):
        super().__init__(model)
        self.budget = budget

    def prompt(self, held, weights, q, k, v):
        heads = k.shape[0]
        held.mass = weights.sum(1).reshape(heads, -1, weights.shape[2]).sum(1)
        held.alive = torch.ones_like(held.mass, dtype=torch.bool)
        self._evict(held)

    def after(self, held, weights, total):
        heads = held.mass.shape[0]
        held.mass = torch.cat([held.mass, torch.zeros((heads, 1), dtype=torch.float64)], 1)
        held.mass += weights.reshape(heads, -1, total).sum(1)
        held.alive = torch.cat([held.alive, torch.ones((heads, 1), dtype=torch.bool)], 1)
        self._evict(held)

    def _evict(self, held):
        total = held.mass.shape[1]
        budget = -(-total * self.budget[0] // self.budget[1])
        for h in range(held.mass.shape[0]):
            alive = held.alive[h].nonzero()[:, 0].tolist()
            newest = alive[len(alive) - budget // 2 :]
            others = sorted((i for i in alive if i not in newest), key=lambda i: -float(held.mass[h, i]))
            kept = newest + others[: budget - len(newest)]
            held.alive[h] = False
            held.alive[h, kept] = True


class SnapKV(Method):
    """The prompt's last w rows, and of the others those that these queries attend most, smoothed over neighbours."""

    def __init__(self, model, budget, window, kernel=5):
        super().__init__(model)
        self.budget, self.window, self.kernel = budget, window, kernel

    def prompt(self, held, weights, q, k, v):
        heads, total = k.shape[0], k.shape[1]
        before, half = total - self.window, self.kernel // 2
        score = weights[:, -self.window :, :before].reshape(heads, -1, self.window, before).mean((1, 2))
        smooth = torch.stack([score[:, max(0, i - half) : i + half + 1].mean(1) for i in range(before)], 1)
        count = -(-total * self.budget[0] // self.budget[1]) - self.window
        held.alive = torch.zeros((heads, total), dtype=torch.bool)
        held.alive.scatter_(1, smooth.topk(count, dim=1).indices, True)
        held.alive[:, before:] = True


class SvdBeforeRotation(Method):
    """Keys turned back to before the rotation and put on the prompt's first right singular vectors; values likewise."""

    def __init__(self, model, rank):
        super().__init__(model)
        self.rank = rank

    def _turn(self, x, back):
        width, theta = x.shape[2], self.model.config.rope_parameters["rope_theta"]
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] / theta ** (
            torch.arange(0, width, 2).double() / width
        )
        cos, sin = angle.cos(), angle.sin() * (-1 if back else 1)
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def prompt(self, held, weights, q, k, v):
        for name, rows in (("k", self._turn(k, True)), ("v", v)):
            held.fitted[name] = torch.linalg.svd(rows, full_matrices=False)[2][:, : self.rank]

    def rounded(self, held, k, v, settled):
        # the new row is projected too: coefficients are all that the cache has of it
        plain = self._turn(k, True)
        keys = plain @ held.fitted["k"].transpose(1, 2) @ held.fitted["k"]
        return self._turn(keys, False), v @ held.fitted["v"].transpose(1, 2) @ held.fitted["v"]
