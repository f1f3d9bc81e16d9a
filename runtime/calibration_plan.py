"""What a calibration measures: shapes, methods that show one part each, models; and its quick edition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.microbench import Shape

SHAPES = (Shape(1, 3, 3, 64, 300), Shape(1, 8, 4, 128, 700), Shape(4, 3, 3, 64, 900), Shape(1, 3, 3, 64, 1500),
          Shape(1, 2, 7, 64, 3000), Shape(1, 8, 4, 128, 1400), Shape(3, 8, 1, 64, 400), Shape(2, 4, 4, 128, 150))
"""Layers of one size and another, most telling first."""
PROMPTS = (Shape(1, 3, 3, 64, 256), Shape(1, 3, 3, 64, 1024), Shape(1, 8, 4, 128, 512), Shape(2, 3, 3, 64, 600),
           Shape(1, 8, 4, 128, 1536), Shape(1, 2, 7, 64, 2048))

FORMATS = ("int(bits=8)", "int(bits=4)", "int(bits=2)", "int(bits=3)", "float8(kind=e4m3,scale=none)", "q8_0", "q4_0",
           "q5_0", "iq4_nl", "kmeans(bits=4)", "log(bits=4)", "rotated(bits=2)", "rotated(bits=3)", "nvfp4",
           "mxfp(bits=4)", "mxfp(bits=8)", "mixed")
TAILED = ("int(bits=4,axis=channel)", "int(bits=2,residual=64)")
"""Formats that hold the newest rows as they are and write blocks of them."""
POLICIES = ("snapkv(budget=0.5)", "topk(budget=0.5)", "pages(size=16,top=256)", "pages(size=64,top=384)", "stride",
            "tiers", "multiscale",
            "window(sinks=4,recent=252)", "h2o(budget=0.5)", "tova(budget=0.5)", "scissorhands(budget=0.5)",
            "ada(budget=0.5)", "pyramid(budget=0.5)", "hierarchy", "lsh_merge", "modal(segments=image32x32-text)")
BASES = ("svd(rank=32)", "random_projection(rank=32)", "online_svd(rank=16)", "tucker", "nmf(rank=16)")
CORRECTED = ("int(bits=4)+outliers(fraction=0.02)", "int(bits=4)+lowrank(rank=4)")
LEAVING = tuple(f"{policy} | int(bits={bits})" for policy in ("tova(budget=0.5)", "window(sinks=4,recent=252)")
                for bits in (4, 8))
"""Policies that take rows out of packed ones, chosen and by position."""
PLAIN_POLICIES = ("snapkv", "topk", "ada")
"""Policies that add nothing to attention: what they show is the kernel on full-precision rows, fewer of them, and with
`ada` one store after another."""
SAME_POLICIES = ("pyramid",)
"""Policies that add nothing either, and whose last layer has too few rows to show more than that."""


@dataclass(frozen=True)
class Plan:
    """A calibration: methods with the number of shapes each is run on, products, prompts, models, sizes of streams."""

    methods: tuple[tuple[str, int], ...]
    products: tuple[tuple[int, int, int], ...]
    prompts: tuple[Shape, ...]
    models: tuple[tuple[dict[str, Any], int, int], ...]
    streams: tuple[int, ...]
    budget_s: float


Sizes = tuple[tuple[int, ...], ...]


def _products(rows: tuple[int, ...], matrices: Sizes, most: float) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of at most `most` multiplications."""
    return tuple((m, n, k) for n, k in matrices for m in rows if m * n * k <= most)


def _model(hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 8 // 3 // 64 * 64,
            "num_hidden_layers": 4, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 2048,
            "max_position_embeddings": 4096, "tie_word_embeddings": True}


SMALL, LARGE = _model(576, 9, 3), _model(1024, 16, 8)
MATRICES = ((192, 576), (576, 576), (1536, 576), (576, 1536), (2048, 2048), (5632, 2048), (49152, 576))
GPU_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (1, 14336, 4096), (64, 14336, 4096))
"""What fills a GPU, whose peak small products do not show."""
FULL = Plan(
    (("full", 8), *((f, 7) for f in FORMATS), *((m, 3) for m in (*TAILED, *LEAVING)),
     *((p, 5) for p in POLICIES), *((b, 5) for b in BASES), *((c, 4) for c in CORRECTED)),
    _products((1, 2, 4, 8, 32, 128, 512, 2048), MATRICES, 2.5e9),
    PROMPTS,
    tuple((model, batch, prompt) for model in (SMALL, LARGE) for batch, prompt in ((1, 64), (1, 700), (4, 300))),
    tuple(2**n for n in range(18, 29)),
    0.12,
)
QUICK = Plan(
    (("full", 4), *((f, 4) for f in FORMATS[:7]), *((p, 3) for p in ("snapkv(budget=0.5)", "window(sinks=4,recent=252)",
     "h2o(budget=0.5)", "pages(size=16,top=256)")), ("svd(rank=32)", 3)),
    _products((1, 4, 32, 512), MATRICES[1:5], 1.2e9),
    PROMPTS[:4],
    ((SMALL, 1, 64), (SMALL, 1, 500), (SMALL, 4, 200)),
    tuple(2**n for n in range(20, 29, 2)),
    0.05,
)
