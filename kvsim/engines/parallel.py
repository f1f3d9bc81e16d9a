"""How a model is split over ranks: weights, KV heads, stages and the traffic between ranks; not what it costs in time.

Rules of Megatron-style tensor parallelism as vLLM, SGLang and TensorRT-LLM apply them: query heads, MLP columns and the
vocabulary are divided, norms and MLA's down-projections are replicated, KV heads are divided or, where there are fewer
heads than ranks, replicated; the MLA latent is whole on every rank. Vocabulary rows are padded to a multiple of 64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kvsim.errors import KvsimError
from kvsim.model import Attention, Layer, Matrix, ModelSpec, State
from kvsim.workload import whole

MAX_RANKS = 2**16
VOCAB_PAD = 64
"""Rows to which vLLM and SGLang pad the vocabulary before dividing it."""

REPLICATED = ("router", "q_a", "kv_a", "wk", "weights", "wq_b", "shared_expert_gate")
"""Matrices that every rank holds whole: routers, MLA's down-projections, the indexer."""


@dataclass(frozen=True)
class ParallelLayout:
    """Ranks of one server.

    Args:
        tensor: ranks that share each layer's matrices.
        pipeline: stages; each holds a run of layers. devices = tensor * pipeline.
        expert: ranks over which routed experts are dealt whole (1: they are cut like other matrices). Divides tensor.
        attention_data: groups of the tensor ranks that each attend their own sequences (data-parallel attention):
            attention is cut over tensor / attention_data ranks, experts over all of them. Divides tensor.

    Raises KvsimError on counts below 1 or that do not divide.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    attention_data: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "attention_data"):
            whole(getattr(self, name), f"{name} parallel size", low=1, high=MAX_RANKS)
        for name in ("expert", "attention_data"):
            if self.tensor % getattr(self, name):
                size = getattr(self, name)
                raise KvsimError(f"{name} parallel size {size} does not divide the {self.tensor} tensor ranks")

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def attention_ranks(self) -> int:
        """Ranks over which one sequence's attention is cut."""
        return self.tensor // self.attention_data

    def check(self, model: ModelSpec) -> None:
        """Raise KvsimError, in the engines' words, when the model cannot be cut this way."""
        ranks = self.attention_ranks
        for attention in _attentions(model):
            guessed = model.architecture == "numbers" and attention.n_heads == attention.n_kv_heads
            if attention.n_heads % ranks and not guessed:
                heads = attention.n_heads
                raise KvsimError(f"tensor parallel size {ranks} is impossible: the number of attention heads ({heads})"
                                 f" must be divisible by it; use one of {_divisors(heads)}")
            if attention.kind != "mla":
                kv_heads(attention.n_kv_heads, ranks)
        for layer, _ in model.groups:
            rank_states(layer.states, ranks)
        if self.pipeline > model.n_layers:
            raise KvsimError(f"pipeline parallel size {self.pipeline} is more than the model's {model.n_layers} layers")


def kv_heads(total: int, ranks: int) -> int:
    """KV heads on each rank: total/ranks, at least one (replicated); KvsimError when neither divides the other."""
    if total >= ranks and total % ranks == 0:
        return total // ranks
    if ranks > total and ranks % total == 0:
        return 1
    raise KvsimError(f"{total} KV heads can be neither divided over nor replicated on {ranks} tensor ranks: "
                     f"use a tensor parallel size that divides {total} or is a multiple of it")


def rank_attention(attention: Attention, ranks: int) -> int:
    """Stored heads of one attention on each rank: divided or replicated; a latent is one head everywhere."""
    if attention.kind == "mla" or attention.n_kv_heads == 1:
        return attention.n_kv_heads
    return kv_heads(attention.n_kv_heads, ranks)


def rank_states(states: tuple[State, ...], ranks: int) -> tuple[State, ...]:
    """A layer's states on one rank: the first axis divided; KvsimError when it cannot be.

    Convolution channels are heads * head_dim + 2 * groups * d_state; with fewer groups than ranks each rank keeps one
    group of its own (vLLM's and SGLang's Mamba2 rule), so the sum over ranks is larger than the model's.
    """
    if ranks == 1 or not states:
        return states
    recurrent = next((s for s in states if s.name == "recurrent" and len(s.shape) == 3), None)
    found = []
    for state in states:
        first = state.shape[0]
        if state.name == "conv" and recurrent is not None:
            heads, dim, d_state = recurrent.shape
            groups, rest = divmod(first - heads * dim, 2 * d_state)
            if groups > 0 and rest == 0 and groups % ranks:
                first = heads * dim + 2 * ranks * d_state
        if first % ranks:
            what = "channels" if state.name == "conv" else "heads"
            raise KvsimError(f"the {state.name} state of {first} {what} cannot be divided over {ranks} tensor ranks")
        found.append(replace(state, shape=(first // ranks, *state.shape[1:])))
    return tuple(found)


def stages(n_layers: int, pipeline: int) -> tuple[range, ...]:
    """Layers of each pipeline stage: equal runs; what is left goes one each to the later stages but not the last.

    The rule of vLLM's get_pp_indices (30 layers over 4: 7, 8, 8, 7), since the last stage also holds the head.
    """
    if not 1 <= pipeline <= n_layers:
        raise KvsimError(f"pipeline parallel size must lie between 1 and the {n_layers} layers, got {pipeline}")
    counts = [n_layers // pipeline] * pipeline
    rest = n_layers % pipeline
    for back in range(2, rest + 2):
        counts[-back] += 1
    ends = [sum(counts[: i + 1]) for i in range(pipeline)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def rank_layer_bytes(layer: Layer, layout: ParallelLayout, bits: float = 16) -> int:
    """Weight bytes of one layer on one rank; `bits` a matrix value with scales, norms and small vectors at 16."""
    from kvsim.engines.sharding import rank_matrix

    values = sum(rank_matrix(m, layer, layout).parameters for m in layer.matrices)
    return -(-int(values * bits) // 8) + 2 * layer.other_parameters


def weight_bytes(
    model: ModelSpec, layout: ParallelLayout, bits: float = 16, table_bits: float = 16
) -> tuple[int, ...]:
    """Weight bytes of one rank of each pipeline stage; the largest decides what is left for the cache.

    Args:
        model: needs its matrices (a config, or from_numbers with hidden_size).
        bits: bits a value of the layers' matrices, scales included. table_bits: of embeddings and head. Norms and
            towers stay at 16 bits.

    Raises KvsimError when the layout cannot cut the model.
    """
    layout.check(model)
    held = []
    runs = stages(model.n_layers, layout.pipeline)
    by_layer = _bytes_by_layer(model, layout, bits)
    for number, run in enumerate(runs):
        total = sum(by_layer[i] for i in run)
        if number == 0:
            total += sum(_vocabulary_bytes(m, layout, table_bits) for m in model.embeddings)
            total += 2 * sum(m.parameters for m in model.towers)
        if number == len(runs) - 1:
            total += 2 * model.other_parameters
            if model.head is not None and (not model.tied or layout.pipeline > 1):
                total += _vocabulary_bytes(model.head, layout, table_bits)
        held.append(total)
    return tuple(held)


def cache_bytes(
    model: ModelSpec, layout: ParallelLayout, tokens: int, batch: int = 1, bits: int = 16
) -> tuple[int, ...]:
    """Uncompressed KV bytes on one rank of each stage for `batch` sequences of `tokens` (the server's, not the rank's).

    With data-parallel attention a rank holds the sequences of its own group: ceil(batch / groups).
    """
    layout.check(model)
    own = -(-batch // layout.attention_data)
    totals = []
    for run in stages(model.n_layers, layout.pipeline):
        total = 0
        for index in run:
            attention = model.layers[index].attention
            if attention is None:
                continue
            heads = rank_attention(attention, layout.attention_ranks)
            for store in attention.stores(tokens):
                count = heads if store.name in ("k", "v") else store.heads
                total += count * int(store.rows) * -(-store.width * bits // 8)
        totals.append(total * own)
    return tuple(totals)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one forward step on one tensor group: `count` all-reduces of `bytes` each over `ranks`."""

    count: int
    bytes: int
    ranks: int


def allreduce_traffic(model: ModelSpec, layout: ParallelLayout, tokens: int, bits: int = 16) -> Traffic:
    """All-reduces of one step over `tokens` tokens (the whole batch's), hidden * tokens values each.

    One after each mixer and each MLP, over the whole depth (pipeline stages follow one another). With data-parallel
    attention only the MLPs communicate (a gather and a scatter, which move what one all-reduce moves). No traffic at
    one rank.
    """
    if layout.tensor == 1:
        return Traffic(0, 0, 1)
    count = sum(len(where) * reductions(layer, layout) for layer, where in model.groups)
    return Traffic(count, tokens * model.hidden_size * bits // 8, layout.tensor)


def reductions(layer: Layer, layout: ParallelLayout) -> int:
    """All-reduces after one layer: one for its mixer where that is cut, one for its MLP; 0 at one rank."""
    if layout.tensor == 1:
        return 0
    mixer = layout.attention_ranks > 1 and (layer.attention is not None or bool(layer.states))
    return mixer + any(core(m.name) in ("down", "fc2", "w2") for m in layer.matrices)


def _attentions(model: ModelSpec) -> list[Attention]:
    found = []
    for layer, _ in model.groups:
        found += [a for a in (layer.attention, layer.cross) if a is not None and a.kind != "shared"]
    return found


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)


@cache
def _bytes_by_layer(model: ModelSpec, layout: ParallelLayout, bits: float) -> tuple[int, ...]:
    found = [0] * model.n_layers
    for layer, where in model.groups:
        size = rank_layer_bytes(layer, layout, bits)
        for index in where:
            found[index] = size
    return tuple(found)


def core(name: str) -> str:
    """What a matrix does, without where it stands: `experts.gate_proj`, `shared_gate` and `gate` are all gate."""
    own = name.rpartition(".")[2].removesuffix("_proj")
    return own if own in REPLICATED else own.removeprefix("shared_").removeprefix("expert_")


def _vocabulary_bytes(matrix: Matrix, layout: ParallelLayout, bits: float) -> int:
    rows = -(-matrix.out_features // VOCAB_PAD) * VOCAB_PAD
    return -(-int(-(-rows // layout.tensor) * matrix.in_features * bits) // 8)
