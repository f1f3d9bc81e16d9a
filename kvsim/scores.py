"""Importance scores of cached rows: what each needs, holds and costs; numbers only, the twin computes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from kvsim.buffers import Eager
from kvsim.parts import Buffer, Place, Work
from kvsim.workload import Count

Need = Literal["weights", "queries", "keys", "values", "gradients", "calibration"]
Span = Literal["none", "last", "window", "all"]
Update = Literal["none", "weights", "keys"]

SOFTMAX_FLOPS = 5
"""Operations a weight beside its dot product: maximum, subtract, exponential, sum, divide."""
EMA_RATE = 0.1
"""online_average: share of the newest query's weights in the moving average."""
HIDDEN = 32
"""auxiliary: hidden units of the estimator, one for each KV head; input is the key, output one score."""
FUTURE_POSITIONS = 512
"""expected: positions after the prompt over which the rotation is averaged (Devoto et al. 2025; kvpress default)."""
SKIPPED_QUERIES = 4
"""expected: first queries left out of the statistics, as outliers (kvpress `n_sink`)."""


@dataclass(frozen=True)
class State:
    """What a running policy holds for each stored row and head; width 0 stands for the observed queries."""

    name: str
    bits: int
    width: int = 1


@dataclass(frozen=True)
class Score:
    """An importance of cached rows, larger = kept longer.

    needs: what must be at hand. `weights` are the softmax weights of all prompt queries, which fused attention never
        writes; `queries` are the last ones, from which a few rows of weights are computed anew.
    span: prompt queries it looks at. dots: products of length d for each (query head, query, row). pair_flops,
        pair_widths: further operations for each of them, and for each of its d values. row_dots: products of length d
        for each (KV head, row). row_products: the same, with one matrix for all rows. quadratics: forms m . k + k . S k
        for each (query head, row), and as many updates of S.
    calls, passes, spreads: what torch does besides to score a prompt: calls (views included, counted by dispatching
        them), fp32 passes over all pairs, and over a row once for each query head. step_calls: calls of a running
        policy's step, choosing and dropping included.
    update: what a running policy's step needs to score the old rows: nothing (their score stands), the step's weights,
        or all keys again.
    by_head: whether KV heads rank differently. running: whether it can be kept up while generating.
    """

    name: str
    formula: str
    needs: tuple[Need, ...]
    survey: str
    source: str
    span: Span = "none"
    dots: int = 0
    pair_flops: int = 0
    row_dots: int = 0
    pair_widths: int = 0
    row_products: int = 0
    quadratics: int = 0
    state: tuple[State, ...] = (State("scores", 32),)
    update: Update = "none"
    by_head: bool = True
    running: bool = True
    calls: int = 0
    passes: int = 0
    spreads: int = 0
    step_calls: int = 0

    @property
    def needs_weights(self) -> bool:
        """Whether attention must write its weights, which rules fused kernels out."""
        return "weights" in self.needs

    def queries(self, prompt: Count, observed: int) -> Any:
        """Queries of a prompt that the score looks at, as a float (they are squared next)."""
        t = 1.0 * prompt
        limit = {"none": 0.0, "last": 1.0, "window": 1.0 * observed, "all": t}[self.span]
        return limit if self.span == "all" else limit - (limit - t) * (t < limit)

    def prompt_work(self, prompt: Count, place: Place, observed: int) -> Work:
        """Work to score a prompt of T rows in one layer.

        Written weights: n_heads * T^2 values are written twice and read three times (products; softmax; values;
        column sums), one addition each. Other scores read the keys (values where they need them) once and compute
        their products; gradients look at the causal half of the pairs. The backward pass through the rest of the
        network, which `gradients` presuppose, is not a layer's work and is not in here.
        """
        t = 1.0 * prompt
        size = place.value_bits / 8
        if self.needs_weights:
            pairs = place.n_heads * t * t
            return Work(pairs * max(1, self.pair_flops), 3 * size * pairs, 2 * size * pairs)
        pairs = place.n_heads * self.queries(prompt, observed) * t
        pairs = pairs * (0.5 if "gradients" in self.needs else 1.0)
        d = place.width
        flops = pairs * (self.pair_flops + self.pair_widths * d) + 2 * d * self.row_dots * place.heads * t
        products = pairs * 2 * d * self.dots + (4 * d * d + 2 * d) * self.quadratics * place.n_heads * t
        products = products + 2 * d * self.row_products * place.heads * t
        sides = ("keys" in self.needs) + ("values" in self.needs)
        read = sides * place.heads * t * d * size
        query_rows = self.queries(prompt, observed) + self.quadratics * t
        read = read + place.n_heads * d * size * query_rows * (2 if "gradients" in self.needs else 1)
        return Work(flops, read, 4.0 * place.heads * t, products)

    def prompt_eager(self, prompt: Count, place: Place, observed: int, chosen_calls: int = 0) -> Eager:
        """What torch does besides to score T rows: its calls, and float32 values that pass from one to the next.

        All queries' weights are formed anew beside fused attention, in products and a softmax of their own. Gradients
        come from outside, ready.
        """
        t, d = 1.0 * prompt, place.width
        pairs = place.n_heads * self.queries(prompt, observed) * t
        work = Work(0.0, 4.0 * (self.passes * pairs + self.spreads * place.n_heads * t * d))
        if self.needs_weights:
            work = work + Work(SOFTMAX_FLOPS * pairs, 0.0, 0.0, 2.0 * d * pairs)
        return Eager(1.0 * (self.calls + chosen_calls), work)

    def step_work(self, rows: Count, heads: int, place: Place, observed: int) -> Work:
        """Work of one step over `rows` attended rows: the newest row's score, and the old ones' where they change.

        Weights that attention wrote are read; otherwise the newest query's products with the keys are computed again.
        """
        n, d, size = 1.0 * rows, place.width, place.value_bits / 8
        state = heads * sum(-(-s.bits * (s.width or observed) // 8) for s in self.state)
        own = 2.0 * d * (self.row_dots + self.row_products) * place.heads
        if self.update == "none":
            return Work(own, 0.0, 1.0 * state)
        if self.update == "keys":
            return Work(own * n, n * place.heads * d * size, 4.0 * heads * n)
        pairs = place.n_heads * n
        moved = state * n
        if self.needs_weights:
            return Work(pairs, 4.0 * pairs + moved, moved)
        return Work(pairs * (SOFTMAX_FLOPS + 1), n * place.heads * d * size + moved, moved, pairs * 2 * d)

    def buffers(self, stored: Count | None, heads: int, place: Place, observed: int) -> tuple[Buffer, ...]:
        """State of one layer: a row's share where the policy runs on (`stored` rows), and what is fixed."""
        found = []
        if stored is not None:
            found = [Buffer(s.name, heads, stored, s.width or observed, s.bits) for s in self.state]
            if self.update == "keys":
                found.append(Buffer("anchor", heads, 1, place.width, 32, 0))
        if "calibration" in self.needs:
            found.append(Buffer("estimator", place.heads, HIDDEN, place.width + 2, 16, 0, per_model=True))
        return tuple(found)


_ALL = (
    Score(
        "query_key", "q_n . k_j / sqrt(d) for the newest query, mean over the query heads of a KV head",
        ("queries", "keys"), "4.2.1", "survey 4.2.1, before the softmax",
        span="last", dots=1, pair_flops=1, state=(), update="weights",
        calls=17, passes=4, spreads=2, step_calls=52,
    ),
    Score(
        "cumulative", "sum over all queries of the softmax weights on row j, sum over the query heads of a KV head",
        ("weights",), "4.1.2, 4.2.1", "Zhang et al., H2O, arXiv 2306.14048",
        span="all", update="weights",
        calls=36, passes=4, step_calls=54,
    ),
    Score(
        "normalised", "cumulative, divided by the number of queries that could see row j",
        ("weights",), "4.1.2, 4.2.1", "Zhang et al., H2O, arXiv 2306.14048; kvpress ObservedAttentionPress",
        span="all", state=(State("scores", 32), State("arrived", 32)), update="weights",
        calls=38, passes=4, step_calls=76,
    ),
    Score(
        "last", "softmax weight of the newest query on row j, mean over all heads of the layer",
        ("queries", "keys"), "4.2.1", "Oren et al., TOVA, arXiv 2401.06104",
        span="last", dots=1, pair_flops=SOFTMAX_FLOPS + 1, state=(), update="weights", by_head=False,
        calls=26, passes=8, spreads=2, step_calls=38,
    ),
    Score(
        "persistence", "how many of the newest w queries put more than 1/n on row j, mean over the query heads of a KV "
        "head; one bit a query and row, bit i mod w is query i's",
        ("queries", "keys"), "4.2.1", "Liu et al., Scissorhands, arXiv 2305.17118",
        span="window", dots=1, pair_flops=SOFTMAX_FLOPS + 2, state=(State("history", 1, 0),), update="weights",
        calls=30, passes=10, spreads=2, step_calls=74,
    ),
    Score(
        "window", "softmax weights of the prompt's last w queries on row j, mean over them and the query heads of a KV "
        "head",
        ("queries", "keys"), "4.2.1", "Li et al., SnapKV, arXiv 2404.14469",
        span="window", dots=1, pair_flops=SOFTMAX_FLOPS + 1, running=False,
        calls=25, passes=8, spreads=2,
    ),
    Score(
        "knorm", "-||k_j||, in fp32 since half precision ties",
        ("keys",), "4.2.3", "Devoto et al., arXiv 2406.11430; kvpress KnormPress",
        row_dots=1, calls=3, step_calls=53,
    ),
    Score(
        "keydiff", "-cos(k_j, mean of the normalised keys)",
        ("keys",), "4.2.3", "Park et al., KeyDiff, arXiv 2504.15364; kvpress KeyDiffPress",
        row_dots=2, state=(), update="keys",
        calls=13, step_calls=55,
    ),
    Score(
        "expected", "softmax_j(m . k_j / sqrt(d) + k_j . S k_j / (2 d)), mean over the query heads of a KV head, times "
        "||v_j||; m and S are mean and covariance of the prompt's queries, rotated on",
        ("queries", "keys", "values"), "4.2.2", "Devoto et al., Expected Attention, arXiv 2510.00636; kvpress",
        row_dots=1, quadratics=1, running=False,
        calls=109, spreads=28,
    ),
    Score(
        "loss_attention", "sum over queries of |dL/dA_ij| = |dO_i . v_j|, sum over the query heads of a KV head",
        ("gradients", "values"), "4.2.1", "survey 4.2.1",
        span="all", dots=1, pair_flops=2, running=False,
    ),
    Score(
        "saliency", "sum over queries of |A_ij (dL/dA_ij - sum_k A_ik dL/dA_ik)| = |dL/dS_ij|, S the logits, sum over "
        "the query heads of a KV head: what taking row j out changes, to first order",
        ("gradients", "keys", "values"), "4.2.1", "survey 4.2.1 times the weight; cf. Michel et al., arXiv 1905.10650",
        span="all", dots=2, pair_flops=SOFTMAX_FLOPS + 5, running=False,
    ),
    Score(
        "gradient", "||dL/dK_j|| + ||dL/dV_j||",
        ("gradients", "keys", "values"), "4.2.2",
        "survey 4.2.2; S again, dV, dP and dK of Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2",
        span="all", dots=4, pair_flops=SOFTMAX_FLOPS, row_dots=2, running=False,
    ),
    Score(
        "perturbation", "a_ij / (1 - a_ij) * ||v_j - o_i||, mean over the last w queries and the query heads of a KV "
        "head: exactly how far attention's output o_i moves when row j is taken out",
        ("queries", "keys", "values"), "4.2.2", "survey 4.2.2; leave-one-out as in Li et al., arXiv 1612.08220",
        span="window", dots=2, pair_flops=SOFTMAX_FLOPS + 8, pair_widths=3, running=False,
        calls=40, passes=19, spreads=4,
    ),
    Score(
        "mutual_information", "sum_i p_ij log(p_ij / (p_i p_j)) with p_ij = a_ij / w over the last w queries: row j's "
        "part of the mutual information between query and attended row (plug-in estimate), mean over query heads",
        ("queries", "keys"), "4.2.2", "survey 4.2.2; Cover and Thomas, Elements of Information Theory, section 2.3",
        span="window", dots=1, pair_flops=SOFTMAX_FLOPS + 5, running=False,
        calls=33, passes=19, spreads=2,
    ),
    Score(
        "auxiliary", "a network with one hidden layer of 32 on k_j, trained to give the log of the cumulative score",
        ("keys", "calibration"), "4.2.3", "survey 4.2.3; cf. KVzap, arXiv 2601.07891",
        row_products=HIDDEN, calls=18, step_calls=68,
    ),
    Score(
        "online_average", "s_j <- 0.9 s_j + 0.1 a_ij for each newest query i, a_ij the mean over the query heads of a "
        "KV head; the prompt's last w queries start it from 0",
        ("queries", "keys"), "4.2.3", "survey 4.2.3, online update",
        span="window", dots=1, pair_flops=SOFTMAX_FLOPS + 2, update="weights",
        calls=30, passes=9, spreads=2, step_calls=59,
    ),
    Score("random", "a uniform random number for each row, drawn once", (), "4.1.1", "baseline",
          calls=2, step_calls=51),
)

SCORES: Mapping[str, Score] = MappingProxyType({s.name: s for s in _ALL})
"""Every importance score by name."""
