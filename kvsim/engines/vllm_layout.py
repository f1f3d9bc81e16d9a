"""vLLM's block manager: pages of each layer, pages made equal, layers in groups, blocks that one request needs.

A block id owns one page in every layer of one group; all groups draw ids from one pool. Source of the rules: vLLM
v1/core/kv_cache_utils.py, v1/kv_cache_interface.py and platforms/interface.py (hybrid block alignment).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvsim.engines.parallel import rank_attention, rank_states
from kvsim.engines.vllm_formats import SKIPPED_EACH_END, token_bytes
from kvsim.engines.vllm_versions import Release
from kvsim.errors import KvsimError
from kvsim.model import Attention, Layer, ModelSpec

PageKind = Literal["full", "sliding", "chunked", "state", "cross"]


@dataclass(frozen=True)
class Setup:
    """What the server was started with, as far as its cache layout depends on it; None where it is unknown."""

    release: Release
    dtype: str
    width: int
    block: int
    max_len: int
    batched: int
    ranks: int = 1
    pipeline: int = 1
    hybrid: bool = True
    mamba_mode: str = "none"
    ssm_bits: int = 0
    spec_tokens: int = 0
    context_ranks: int = 1
    sparse: bool = False

    @property
    def in_flight(self) -> int:
        """Scheduled tokens that a window holds beside itself."""
        return self.batched * self.release.batches(self.pipeline)


@dataclass(frozen=True)
class Page:
    """One layer's page: `tokens` rows (0: one state of any length) in `bytes`, of which k, v and index are live."""

    kind: PageKind
    tokens: int
    bytes: int
    k: int = 0
    v: int = 0
    index: int = 0
    window: int = 0
    heads: int = 0

    @property
    def shelf(self) -> str:
        """Under which name a single group's bytes are told."""
        return "indexer" if self.index else "state" if self.kind == "state" else "attention"

    def blocks(self, setup: Setup, length: int) -> int:
        """Blocks of this layer's group that one request of `length` tokens may come to hold."""
        if self.kind == "state":
            if setup.mamba_mode == "all":
                return -(-length // setup.block)
            return (2 if setup.mamba_mode == "align" else 1) + setup.spec_tokens
        if self.kind == "cross":
            return -(-self.window // self.tokens)
        if self.kind == "sliding":  # the window may begin inside a block
            return -(-min(self.window - 1 + setup.in_flight, length) // self.tokens) + 1
        if self.kind == "chunked":
            return -(-min(self.window + setup.in_flight, length) // self.tokens)
        own = -(-length // setup.context_ranks)
        return -(-own // self.tokens)


@dataclass(frozen=True)
class Group:
    """Layers that share a block table: their pages are alike, or (in a single group of one kind) only of one kind."""

    pages: tuple[Page, ...]

    @property
    def page(self) -> Page:
        """The page that stands for the group."""
        return self.pages[0]


@dataclass(frozen=True)
class Plan:
    """Groups of one pipeline stage; `block_bytes` is what one block id costs over the stage's pools."""

    groups: tuple[Group, ...]
    pools: int
    block_bytes: int
    padding: int = 0

    def blocks_per_request(self, setup: Setup, length: int) -> int:
        """Blocks of all groups for one request of `length` tokens."""
        if len(self.groups) == 1:
            return max(page.blocks(setup, length) for page in self._kinds)
        return sum(group.page.blocks(setup, length) for group in self.groups)

    @cached_property
    def _kinds(self) -> tuple[Page, ...]:
        """The different pages of the only group: hundreds of layers ask for the same blocks."""
        return tuple(dict.fromkeys(self.groups[0].pages))

    def longest(self, setup: Setup, blocks: int, limit: int) -> int:
        """The longest request, up to `limit` tokens, that `blocks` hold; 0 when one token does not fit."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(setup, middle) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def aligned_block(model: ModelSpec, setup: Setup) -> int:
    """The block size after vLLM grew it until an attention page holds a recurrent state; unchanged without states.

    Multiples of max(16, block): 672 tokens for Nemotron Nano 9B v2. Mode `all` (states kept along the prompt) aligns to
    the kernel's chunk too, taken as 256.
    """
    state = max((_state_bytes(layer, setup) for layer, _ in model.groups), default=0)
    attention = [layer.attention for layer, _ in model.groups if layer.attention and layer.attention.kind != "shared"]
    if not state or not attention:
        return setup.block
    heads = rank_attention(attention[0], setup.ranks)
    one = token_bytes(attention[0], heads, setup.dtype, setup.width, setup.sparse).attention
    step = max(16, setup.block)
    if setup.mamba_mode == "all":
        step = max(step, 256)
    return max(setup.block, step * -(-state // (step * one)))


def pages(model: ModelSpec, setup: Setup) -> list[list[Page]]:
    """Pages of every layer (attention, cross-attention, states; drafting layers last), before they are made equal."""
    kept: set[int] = set()
    if setup.dtype.startswith("turboquant") and not any(x.states for x, _ in model.groups):
        ends = min(SKIPPED_EACH_END, model.n_layers // 2)
        kept = {*range(ends), *range(model.n_layers - ends, model.n_layers)}
    found: list[list[Page]] = [[] for _ in model.layers]
    for layer, where in model.groups:
        for plain in (True, False):
            mine = [i for i in where if (i in kept) is plain]
            built = _layer_pages(layer, replace(setup, dtype="auto") if plain else setup) if mine else []
            for index in mine:
                found[index] = built
    return found + [_layer_pages(layer, setup) for layer in _drafting_layers(model, setup)]


def plan(layer_pages: Sequence[Sequence[Page]], setup: Setup, stage: range | None = None) -> Plan:
    """Group the model's pages and project them on one pipeline stage (None: all layers).

    Raises KvsimError where vLLM cannot make the pages equal.
    """
    flat = [(index, page) for index, found in enumerate(layer_pages) for page in found]
    held = range(len(layer_pages)) if stage is None else stage
    if not flat:
        return Plan((), 0, 0)
    if _one_type([p for _, p in flat]):
        own = tuple(p for i, p in flat if i in held)
        return Plan((Group(own),) if own else (), len(own), sum(p.bytes for p in own))
    size = _common_page([p for _, p in flat], setup)
    buckets: dict[Page, list[int]] = {}
    for index, page in flat:
        buckets.setdefault(_equalized(page, size), []).append(index)
    least, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    group_size = most if most < least * setup.release.group_slack else least
    groups, padding, pools = [], 0, 0
    for page, where in buckets.items():
        count = -(-len(where) // group_size)
        padding += count * group_size - len(where)
        for k in range(count):
            own_layers = [i for i in where[k::count] if i in held]
            groups.append(Group((page,) * len(own_layers) or (page,)))
            pools = max(pools, len(own_layers))
    return Plan(tuple(groups), pools, pools * size, padding)


def _drafting_layers(model: ModelSpec, setup: Setup) -> list[Layer]:
    """Multi-token-prediction layers, there when tokens are drafted: attention like the last full one of the model."""
    if not setup.spec_tokens or not model.next_n_layers:
        return []
    full = [x.attention for x in model.layers if x.attention and x.attention.kind in ("full", "mla")]
    like = [a for a in full if a.index_dim] or full  # a drafting layer has an indexer of its own
    return [Layer(attention=like[-1])] * model.next_n_layers if like else []


def _layer_pages(layer: Layer, setup: Setup) -> list[Page]:
    found = []
    for attention in (layer.attention, layer.cross):
        if attention is not None and attention.kind != "shared":
            found += _attention_pages(attention, setup)
    state = _state_bytes(layer, setup)
    if state:
        found.append(Page("state", 0, state))
    return found


def _attention_pages(attention: Attention, setup: Setup) -> list[Page]:
    if attention.kind in ("csa", "hca"):
        raise KvsimError("vLLM packs compressed attention (DeepSeek-V4) in a layout that is not modelled here")
    heads = rank_attention(attention, setup.ranks)
    one = token_bytes(attention, heads, setup.dtype, setup.width, setup.sparse)
    kind: PageKind = "full"
    window = 0
    if attention.kind == "cross":
        kind, window = "cross", attention.cross_tokens
    elif attention.kind == "sliding" and setup.hybrid:
        kind, window = "sliding", attention.window
    elif attention.kind == "chunked" and setup.hybrid and setup.release.chunked_hybrid:
        kind, window = "chunked", attention.window
    block = setup.block
    main = Page(kind, block, block * one.attention, block * one.k, block * one.v, window=window, heads=heads)
    if not one.index:
        return [main]
    return [main, Page(kind, block, block * one.index, index=block * one.index, window=window, heads=1)]


def _state_bytes(layer: Layer, setup: Setup) -> int:
    """A page of convolution and recurrent state on one rank; the convolution holds kernel - 1 (+ drafted) columns."""
    total = 0
    for state in rank_states(layer.states, setup.ranks):
        values = 1
        for axis in state.shape:
            values *= axis
        if state.name == "conv":
            total += state.shape[0] * (state.shape[1] - 1 + setup.spec_tokens) * setup.width
        else:
            total += values * (setup.ssm_bits or state.bits) // 8
    return total


def _one_type(found: list[Page]) -> bool:
    """Whether one block table serves all layers: the same kind, block and window; sizes may differ."""
    return len({(p.kind, p.tokens, p.window) for p in found}) == 1


def _common_page(found: list[Page], setup: Setup) -> int:
    size = max(p.bytes for p in found)
    uneven = [p for p in found if p.kind != "state" and size % p.bytes]
    if uneven and not setup.release.pads_pages:
        raise KvsimError(f"vLLM {setup.release.text} cannot give these layers one page size: {uneven[0].bytes} bytes "
                         f"do not divide {size}; a newer version pads them (version=0.20 or later)")
    return size


def _equalized(page: Page, size: int) -> Page:
    """The page with more tokens until it fills `size`; padded where it does not divide, as states always are."""
    if page.kind == "state" or page.bytes == size:
        return replace(page, bytes=size)
    if size % page.bytes:
        return replace(page, bytes=size)
    ratio = size // page.bytes
    return replace(page, tokens=page.tokens * ratio, bytes=size, k=page.k * ratio, v=page.v * ratio,
                   index=page.index * ratio)  # fmt: skip
