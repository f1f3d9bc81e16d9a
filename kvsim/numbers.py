"""A ModelSpec from architecture numbers alone, for logs and what-if questions; no config file is read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvsim.errors import KvsimError, did_you_mean, shown, word
from kvsim.model import Attention, Layer, Matrix, ModelSpec, State
from kvsim.workload import one_whole

BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8}
ALIASES = {
    "heads": "n_heads", "kv_heads": "n_kv_heads", "attn_layers": "full_attn_layers", "mamba_layers": "linear_layers",
    "state": "ssm_d_state", "n_groups": "ssm_n_group", "d_conv": "ssm_d_conv", "sliding_window": "window",
    "sliding_layers": "swa_layers", "vocab": "vocab_size", "context_length": "max_context", "experts": "n_experts",
    "kv_lora_rank": "mla_kv_lora_rank", "qk_rope_head_dim": "mla_rope_dim", "v_head_dim": "head_dim_v",
}  # fmt: skip
WORDS = {
    "full": "full", "full_attention": "full", "global": "full", "attention": "full", "mla": "full",
    "sliding": "sliding", "sliding_attention": "sliding", "swa": "sliding", "local": "sliding",
    "chunked": "chunked", "chunked_attention": "chunked", "shared": "shared",
    "linear": "linear", "linear_attention": "linear", "mamba": "linear", "recurrent": "linear", "none": "none",
    "mlp": "none", "moe": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Numbers:
    """What `from_numbers` accepts, beside the shorter names in ALIASES.

    Counts by kind (`full_attn_layers`, `swa_layers`, `chunked_layers`, `linear_layers`, `kv_owning_full_layers`) spread
    evenly, the full ones closing each period; `layer_types` or `window_pattern` say the exact order. n_heads and
    n_kv_heads may be one number a layer (0: no attention there). `*_full` and `*_swa` are for kinds that differ.
    mla_* makes latent layers; latent_dim a K-only cache of that width. `parameters`: a known total, where the matrices
    (made when hidden_size is given) do not say it. ssm_dtype: of the recurrent state, the model's unless said.
    """

    layers: int
    n_heads: int | Sequence[int] | None = None
    n_kv_heads: int | Sequence[int] | None = None
    head_dim: int | None = None
    head_dim_k: int | None = None
    head_dim_v: int | None = None
    n_embd_gqa: int | None = None
    full_attn_layers: int | None = None
    swa_layers: int | None = None
    chunked_layers: int | None = None
    linear_layers: int | None = None
    kv_owning_full_layers: int | None = None
    kv_owning_swa_layers: int | None = None
    layer_types: Sequence[str] | None = None
    window_pattern: int | None = None
    window: int | None = None
    kv_heads_full: int | None = None
    head_dim_full: int | None = None
    kv_heads_swa: int | None = None
    head_dim_swa: int | None = None
    mla_kv_lora_rank: int | None = None
    mla_rope_dim: int | None = None
    q_lora_rank: int | None = None
    indexer_dim: int | None = None
    indexer_layers: int | Sequence[int] | None = None
    indexer_topk: int | None = None
    latent_dim: int | None = None
    ssm_d_inner: int | None = None
    ssm_d_state: int | None = None
    ssm_n_group: int | None = None
    ssm_d_conv: int | None = None
    mamba_heads: int | None = None
    mamba_head_dim: int | None = None
    ssm_dtype: str | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    tied: bool = False
    gated: bool = True
    n_experts: int | None = None
    top_k: int | None = None
    expert_intermediate_size: int | None = None
    n_shared_experts: int = 0
    dense_layers: int = 0
    parameters: int | None = None
    next_n_layers: int = 0
    max_context: int = 0
    dtype: str = "bf16"
    name: str = "model from numbers"

    def __post_init__(self) -> None:
        for name in ("name", "dtype"):
            word(getattr(self, name), name)
        for name in ("tied", "gated"):
            if not isinstance(getattr(self, name), bool):
                raise KvsimError(f"{name} is True or False, got {shown(getattr(self, name))}")
        if self.layer_types is not None and not isinstance(self.layer_types, (list, tuple)):
            raise KvsimError(f"layer_types is a list of words, one a layer, got {shown(self.layer_types)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or item.name in ("tied", "gated", "layer_types", "name", "dtype", "ssm_dtype"):
                continue
            many = isinstance(value, (list, tuple)) and item.name in ("n_heads", "n_kv_heads", "indexer_layers")
            low = 1 if item.name == "layers" else 0
            numbers = [one_whole(one, item.name, low=low, high=2**48) for one in (value if many else (value,))]
            object.__setattr__(self, item.name, tuple(numbers) if many else numbers[0])
            if many and item.name != "indexer_layers" and len(value) != self.layers:
                raise KvsimError(f"{item.name} lists {len(value)} values for {self.layers} layers: give one a layer")
        one_whole(self.layers, "layers", low=1, high=10_000)
        if self.ssm_dtype is not None and self.ssm_dtype not in BITS:
            raise KvsimError(f"ssm_dtype {shown(self.ssm_dtype)} is not one of {', '.join(BITS)}")


def from_numbers(layers: int, n_heads: int | Sequence[int] | None = None,
                 n_kv_heads: int | Sequence[int] | None = None, head_dim: int | None = None, **more: Any) -> ModelSpec:
    """Build a ModelSpec from numbers; every name of `Numbers` (and its ALIASES) is a keyword.

    Raises KvsimError for an unknown name (with the nearest known one), a name given twice, counts that do not add up
    to `layers`, and sizes that the asked layer kinds need but that are missing.
    """
    known = {f.name for f in fields(Numbers)}
    given: dict[str, Any] = {"layers": layers}
    pairs = [("n_heads", n_heads), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim), *more.items()]
    for key, value in pairs:
        target = ALIASES.get(key, key)
        if target not in known:
            raise KvsimError(f"from_numbers knows no {key!r}{did_you_mean(key, known | set(ALIASES))}")
        if value is None:
            continue
        if target in given:
            raise KvsimError(f"{key!r} and {target!r} are the same number: give one of them")
        given[target] = value
    return _spec(Numbers(**given))


def _spec(n: Numbers) -> ModelSpec:
    kinds = _kinds(n)
    notes = []
    if n.hidden_size is None:
        notes.append("no hidden_size: weight matrices are not known, so only the cache is described")
    if n.kv_owning_full_layers is not None and "shared" in kinds:
        notes.append(f"{kinds.count('shared')} layers are taken to share another layer's rows and store none")
    mixer_only = "none" in kinds  # Nemotron-H style: a layer is one of attention, Mamba or MLP
    indexed = _indexed(n, kinds)
    built = []
    for index, kind in enumerate(kinds):
        attention = _attention(n, kind, index, index in indexed) if kind not in ("linear", "none") else None
        states = _states(n) if kind == "linear" else ()
        matrices: tuple[Matrix, ...] = ()
        if n.hidden_size is not None:
            matrices = _mixer(n, attention, states, n.hidden_size)
            if not mixer_only or kind == "none":
                matrices += _mlp(n, index, n.hidden_size)
        built.append(Layer(attention=attention, states=states, matrices=matrices))
    embeddings: tuple[Matrix, ...] = ()
    head = None
    if n.hidden_size and n.vocab_size:
        embeddings = (Matrix("embed", n.vocab_size, n.hidden_size),)
        head = Matrix("head", n.vocab_size, n.hidden_size)
    spec = ModelSpec(
        name=n.name, architecture="numbers", layers=tuple(built), hidden_size=n.hidden_size or 0,
        vocab_size=n.vocab_size or 0, embeddings=embeddings, head=head, tied=n.tied, dtype=n.dtype,
        max_context=n.max_context, next_n_layers=n.next_n_layers, source="numbers given by hand", warnings=tuple(notes),
    )  # fmt: skip
    if n.parameters is None:
        return spec
    rest = n.parameters - spec.parameters
    if rest < 0:
        raise KvsimError(f"parameters={n.parameters} is less than the {spec.parameters} that the given sizes make")
    return ModelSpec(**{f.name: getattr(spec, f.name) for f in fields(spec)} | {"other_parameters": rest})


def _kinds(n: Numbers) -> list[str]:
    """The kind of every layer: an explicit list, a period, or counts spread evenly."""
    if n.layer_types is not None:
        if len(n.layer_types) != n.layers:
            raise KvsimError(f"layer_types lists {len(n.layer_types)} layers, layers={n.layers}")
        for word in n.layer_types:
            if word not in WORDS:
                raise KvsimError(f"layer type {shown(word)} is unknown{did_you_mean(str(word), WORDS)}")
        return [WORDS[word] for word in n.layer_types]
    if n.window_pattern:
        return ["full" if (i + 1) % n.window_pattern == 0 else "sliding" for i in range(n.layers)]
    if isinstance(n.n_kv_heads, Sequence):
        bare = "linear" if n.linear_layers or n.ssm_d_state else "none"
        return ["full" if heads else bare for heads in n.n_kv_heads]
    full = n.full_attn_layers if n.full_attn_layers is not None else n.kv_owning_full_layers
    counts = {"sliding": n.swa_layers or n.kv_owning_swa_layers or 0, "chunked": n.chunked_layers or 0,
              "linear": n.linear_layers or 0}  # fmt: skip
    others = sum(counts.values())
    if full is None:
        if others == 0:
            only = "sliding" if n.window else "full"
            return [only] * n.layers
        full = n.layers - others
    counts["full"] = full
    rest = n.layers - full - others
    if rest < 0:
        raise KvsimError(f"the layer counts add up to {full + others}, more than layers={n.layers}")
    if n.kv_owning_full_layers is not None:
        counts["shared"] = rest
    elif rest and counts["linear"]:
        counts["none"] = rest
    elif rest:
        raise KvsimError(f"{full + others} of {n.layers} layers have a kind: say what the other {rest} are "
                         "(swa_layers, chunked_layers, linear_layers, kv_owning_full_layers or layer_types)")
    return _spread(counts, n.layers)


def _spread(counts: dict[str, int], layers: int) -> list[str]:
    """Each kind evenly over the depth: the rarest first, its k-th layer closing the k-th share of the free places."""
    kinds = [""] * layers
    order = sorted((c, kind) for kind, c in counts.items() if c)
    for count, kind in order:
        free = [i for i, k in enumerate(kinds) if not k]
        for k in range(count):
            kinds[free[(k + 1) * len(free) // count - 1]] = kind
    return kinds


def _indexed(n: Numbers, kinds: list[str]) -> set[int]:
    """Which layers own an indexer: all, a count of them spread evenly, or those listed."""
    if not n.indexer_dim:
        return set()
    if n.indexer_layers is None:
        return set(range(n.layers))
    if isinstance(n.indexer_layers, Sequence):
        return set(n.indexer_layers)
    if n.indexer_layers > n.layers:
        raise KvsimError(f"indexer_layers={n.indexer_layers} is more than layers={n.layers}")
    marks = _spread({"yes": n.indexer_layers, "no": n.layers - n.indexer_layers}, n.layers)
    return {i for i, mark in enumerate(marks) if mark == "yes"}


def _one(value: int | Sequence[int] | None, index: int) -> int | None:
    return value[index] if isinstance(value, Sequence) else value


def _attention(n: Numbers, kind: str, index: int, indexed: bool) -> Attention:
    """The attention of one layer; unknown query heads count as the stored ones."""
    windowed = kind in ("sliding", "chunked")
    window = (n.window or 0) if windowed else 0
    if windowed and not window:
        raise KvsimError(f"{kind} layers need window=")
    index_dim = (n.indexer_dim or 0) if indexed else 0
    heads = _one(n.n_heads, index)
    if n.mla_kv_lora_rank:
        qk = n.head_dim_k or (n.head_dim or 0)
        return Attention("sliding" if windowed else "mla", heads or 1, 1, n.mla_kv_lora_rank, n.mla_rope_dim or 0,
                         window=window, qk_dim=qk, out_dim=n.head_dim_v or n.head_dim or 0, index_dim=index_dim,
                         selected=(n.indexer_topk or 0) if index_dim else 0)  # fmt: skip
    if n.latent_dim:
        return Attention("sliding" if window else "full", heads or 1, 1, n.latent_dim, 0, window=window)
    kv, dim = (n.kv_heads_swa, n.head_dim_swa) if windowed else (n.kv_heads_full, n.head_dim_full)
    kv = kv if kv is not None else _one(n.n_kv_heads, index)
    dim = dim if dim is not None else n.head_dim
    if dim is None and not n.head_dim_k and n.hidden_size and heads and not n.n_embd_gqa:
        dim = n.hidden_size // heads
    if n.n_embd_gqa:
        kv = kv or (n.n_embd_gqa // dim if dim else 1)
        if n.n_embd_gqa % kv or (dim and kv * dim != n.n_embd_gqa):
            raise KvsimError(f"n_embd_gqa={n.n_embd_gqa} is not kv_heads * head_dim ({kv} * {dim})")
        dim = n.n_embd_gqa // kv
    kv = kv if kv is not None else heads
    k_dim, v_dim = n.head_dim_k or dim, n.head_dim_v or dim
    if kv is None or k_dim is None or v_dim is None:
        raise KvsimError(f"a {kind} layer needs its KV heads and head_dim: give n_kv_heads and head_dim")
    queries = heads if heads is not None and heads >= kv else kv
    return Attention("shared" if kind == "shared" else kind, queries, kv, k_dim, v_dim, window=window,  # type: ignore[arg-type]
                     index_dim=index_dim, selected=(n.indexer_topk or 0) if index_dim else 0)  # fmt: skip


def _states(n: Numbers) -> tuple[State, ...]:
    """Convolution and recurrent state of a Mamba or gated-delta layer; channels = d_inner + 2 * groups * d_state."""
    inner = n.ssm_d_inner or (n.mamba_heads or 0) * (n.mamba_head_dim or 0)
    if not inner or not n.ssm_d_state:
        raise KvsimError("linear layers need ssm_d_state and ssm_d_inner (or mamba_heads and mamba_head_dim)")
    bits = BITS.get(n.dtype, 16)
    if n.mamba_heads:
        shape = (n.mamba_heads, inner // n.mamba_heads, n.ssm_d_state)
    elif inner % n.ssm_d_state == 0:  # square heads, as gated-delta layers have them
        shape = (inner // n.ssm_d_state, n.ssm_d_state, n.ssm_d_state)
    else:
        shape = (1, inner, n.ssm_d_state)
    channels = inner + 2 * (n.ssm_n_group or 0) * n.ssm_d_state
    recurrent = State("recurrent", shape, BITS[n.ssm_dtype] if n.ssm_dtype else bits)
    return (State("conv", (channels, n.ssm_d_conv), bits), recurrent) if n.ssm_d_conv else (recurrent,)


def _mixer(n: Numbers, a: Attention | None, states: tuple[State, ...], hidden: int) -> tuple[Matrix, ...]:
    """Projections of the attention or the state-space mixer."""
    if a is None:
        if not states:
            return ()
        conv, heads = (states[0].shape[0] if states[0].name == "conv" else 0), states[-1].shape[0]
        inner = heads * states[-1].shape[1]
        return Matrix("in_proj", inner + max(conv, inner) + heads, hidden), Matrix("out_proj", hidden, inner)
    q_out, o_in = a.n_heads * a.qk_dim, a.n_heads * a.out_dim
    if a.kind == "mla":
        latent, rope = a.k_dim, a.v_dim
        q = (Matrix("q", q_out, hidden),) if not n.q_lora_rank else (
            Matrix("q_a", n.q_lora_rank, hidden), Matrix("q_b", q_out, n.q_lora_rank))  # fmt: skip
        up = a.n_heads * (a.qk_dim - rope + a.out_dim)
        return (*q, Matrix("kv_a", latent + rope, hidden), Matrix("kv_b", up, latent), Matrix("o", hidden, o_in))
    kv: tuple[Matrix, ...] = ()
    if a.kind != "shared":
        kv = (Matrix("k", a.n_kv_heads * a.k_dim, hidden), Matrix("v", a.n_kv_heads * a.v_dim, hidden))
    return (Matrix("q", q_out, hidden), *(m for m in kv if m.out_features), Matrix("o", hidden, o_in))


def _mlp(n: Numbers, index: int, hidden: int) -> tuple[Matrix, ...]:
    """Dense or routed feed-forward matrices; the first `dense_layers` of a mixture are dense."""
    names = ("gate", "up", "down") if n.gated else ("up", "down")

    def block(prefix: str, width: int, copies: int = 1, active: int = 1, routed: bool = False) -> tuple[Matrix, ...]:
        return tuple(
            Matrix(prefix + x, *((hidden, width) if x == "down" else (width, hidden)), copies, active, routed)
            for x in names
        )

    if n.n_experts and index >= n.dense_layers:
        width = n.expert_intermediate_size or n.intermediate_size
        if not width or not n.top_k or n.top_k > n.n_experts:
            raise KvsimError("a mixture of experts needs top_k <= n_experts and expert_intermediate_size")
        shared = block("shared_", width * n.n_shared_experts) if n.n_shared_experts else ()
        return (Matrix("router", n.n_experts, hidden), *block("expert_", width, n.n_experts, n.top_k, True), *shared)
    return block("", n.intermediate_size) if n.intermediate_size else ()
