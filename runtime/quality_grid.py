"""Which methods the committed evidence covers: everything that `fit` considers, finer steps, and both protocols."""

from __future__ import annotations

from kvsim.candidates import candidates
from kvsim.errors import KvsimError
from kvsim.method import Method, parse_method

QUICK = (
    "full",
    "int8",
    "int4",
    "kivi-4",
    "kivi-2",
    "k4v2",
    "turboquant-4",
    "snapkv(budget=0.25)",
    "window(sinks=4,recent=124)",
    "window(sinks=0,recent=128)",
    "svd(rank=32)",
    "int4 @ on_write",
)

_WIDTHS = [f"int(bits={b})" for b in (2, 3, 5, 6)] + [f"int(bits={b},group=32)" for b in (2, 3, 4, 8)]
_TAILS = [f"int(bits={b},residual={r})" for b in (4, 3, 2) for r in (32, 128)] + ["int(bits=8,residual=128)"]
_CHANNELS = [
    f"k:int(bits={k},group=32,axis=channel{rope}) v:int(bits={v},group=32)"
    for k, v in ((4, 4), (2, 2), (4, 2))
    for rope in ("", ",rope=pre")
]
_UNEQUAL = [
    f"k:int(bits={k},group=32) v:int(bits={v},group=32)" for k, v in ((8, 4), (8, 2), (6, 4), (4, 2), (2, 4), (4, 8))
]
_ROTATED = [f"rotated(bits={b})" for b in (2, 3, 4, 5, 6)] + [
    "rotated(bits=4,residual=128)",
    "rotated(bits=3,residual=128)",
]
_BLOCKS = [f"gguf(type={t},residual=128)" for t in ("q8_0", "q4_0")] + ["k:gguf(type=q8_0) v:gguf(type=q4_0)"]
_RANKS = [f"svd(rank={r})" for r in (16, 32, 48, 56)] + [f"k:svd(rank={r},rope=pre) v:full" for r in (16, 32, 48)]
_RANKS += [f"k:svd(rank={r}) v:full" for r in (16, 32, 48)] + [f"k:full v:svd(rank={r})" for r in (16, 32, 48)]
_RANKS += [
    "svd(rank=96,joint=heads)",
    "svd(rank=144,joint=heads)",
    "k:svd(rank=96,joint=heads,rope=pre) v:svd(rank=96,joint=heads)",
]
_PROJECTIONS = [
    "random_projection(rank=48)",
    "learned_projection(rank=32)",
    "learned_projection(rank=48)",
    "palu(rank=128)",
    "nmf(rank=32)",
    "cp(rank=96)",
    "tucker",
    "elitekv",
]
_BUDGETS = [
    f"{name.format(b=b)}"
    for b in (0.5, 0.25, 0.1)
    for name in (
        "h2o(budget={b})",
        "h2o(budget={b},score=normalised)",
        "snapkv(budget={b})",
        "pyramid(budget={b})",
        "ada(budget={b})",
        "tova(budget={b})",
        "scissorhands(budget={b})",
        "topk(budget={b},score=knorm)",
        "topk(budget={b},score=keydiff)",
        "topk(budget={b},score=expected,recent=0)",
        "topk(budget={b},score=random)",
    )
]
_SCORES = [
    f"topk(budget=0.25,score={s})"
    for s in (
        "query_key",
        "cumulative",
        "normalised",
        "window",
        "gradient",
        "loss_attention",
        "online_average",
        "last",
        "mutual_information",
        "perturbation",
        "auxiliary",
    )
]
_POSITIONS = [f"window(sinks={s},recent={n - s})" for n in (512, 256, 128) for s in (4, 0)]
_POSITIONS += [
    "stride(every=4)",
    "stride(every=4,recent=128)",
    "tiers",
    "multiscale",
    "hierarchy",
    "pages(top=256)",
    "pages(top=512)",
    "pages(top=128)",
    "lsh_merge",
]
_HYBRIDS = [
    f"{p} | {f}"
    for p in ("snapkv(budget=0.25)", "snapkv(budget=0.5)", "window(sinks=4,recent=508)", "ada(budget=0.25)")
    for f in ("int(bits=4,residual=128)", "kivi-4", "kivi-2", "rotated(bits=4)", "int(bits=8)")
]
_HYBRIDS += [f"h2o(budget={b}) | {f}" for b in (0.5, 0.25) for f in ("int(bits=8)", "int(bits=4)", "rotated(bits=4)")]
_HYBRIDS += [
    "svd(rank=48) | int(bits=8)",
    "svd(rank=48) | int(bits=4)",
    "pages(top=256) | int(bits=4)",
    "pages(top=256) | int(bits=8)",
]
_ON_WRITE = [
    f"{m} @ on_write"
    for m in (
        "full",
        "int8",
        "int4",
        "int(bits=4,group=32)",
        "int(bits=3)",
        "int(bits=6)",
        "kivi-4",
        "kivi-2",
        "k4v2",
        "turboquant-4",
        "turboquant-3",
        "nvfp4",
        "mxfp4",
        "mxfp8",
        "fp8",
        "q8_0",
        "q4_0",
        "int(bits=4,residual=128)",
        "svd(rank=32)",
        "svd(rank=48)",
        "snapkv(budget=0.25)",
        "snapkv(budget=0.25) | int(bits=4)",
    )
]


def full_grid(head_dim: int) -> list[Method]:
    """Every preset and composition that `fit` considers, then finer steps; each once, only what composes."""
    texts: list[str | Method] = [m for _, m, _ in candidates(head_dim) if m is not None]
    texts += [*_WIDTHS, *_TAILS, *_CHANNELS, *_UNEQUAL, *_ROTATED, *_BLOCKS, *_RANKS, *_PROJECTIONS]
    texts += [*_BUDGETS, *_SCORES, *_POSITIONS, *_HYBRIDS, *_ON_WRITE]
    found: dict[Method, None] = {}
    for text in texts:
        try:
            found[parse_method(text)] = None
        except KvsimError:  # refused at parse time: what cannot compose has no quality
            continue
    return list(found)


def preset_methods(head_dim: int) -> list[Method]:
    """Every preset by its default settings, and the protocol on_write where that is how methods are used most."""
    from kvsim.grammar import presets

    found: dict[Method, None] = {}
    for text in (
        "full",
        *presets(),
        "int8 @ on_write",
        "int4 @ on_write",
        "kivi-4 @ on_write",
        "q8_0 @ on_write",
        "q4_0 @ on_write",
    ):
        try:
            found[parse_method(text)] = None
        except KvsimError:
            continue
    return list(found)
