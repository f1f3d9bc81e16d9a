"""Small settings of every part, so that groups, tails and budgets all act within a few dozen rows.

A part that is not named here joins with its defaults.
"""

from kvsim.parts import parts

SMALL = {
    "int": [
        "int(bits=4,group=8)",
        "int(bits=3,symmetric=true)",
        "int(bits=4,axis=channel,group=8)",
        "int(bits=2,axis=channel,group=8,residual=16)",
        "int(bits=4,residual=16,flush=all)",
        "int(bits=4,residual=16)",
        "int(bits=4,axis=channel,group=8,rope=pre)",
        "int(bits=8,axis=head,group=8)",
        "int(bits=8,axis=layer,group=8)",
    ],
    "float8": ["float8", "float8(scale=none)", "float8(scale=tensor)", "float8(residual=8)"],
    "nvfp4": ["nvfp4", "nvfp4(scale=row)", "nvfp4(residual=16,flush=all)"],
    "kmeans": ["kmeans(bits=4)", "kmeans(bits=3,per=tensor)", "kmeans(bits=3,rope=pre,weighting=fisher)"],
    "sketch": ["sketch(m=64)"],
    "rotated": ["rotated(bits=3)"],
    "log": ["log(bits=4)"],
    "gguf": ["gguf(type=q4_0)", "gguf(type=q8_0)"],
    "svd": ["svd(rank=8)", "svd(rank=8,rope=pre)", "svd(rank=16,joint=heads)"],
    "online_svd": ["online_svd(rank=8)"],
    "cp": ["cp(rank=8)"],
    "tucker": ["tucker(ranks=(16,0,16))"],
    "nmf": ["nmf(rank=4)", "nmf(rank=8,sign=shift)"],
    "random_projection": ["random_projection(rank=16)", "random_projection(rank=16,kind=embedding)"],
    "learned_projection": ["learned_projection(rank=16)"],
    "elitekv": ["elitekv(frequencies=2,rank=16)"],
    "window": ["window(sinks=4,recent=28)", "window(sinks=0,recent=9)"],
    "h2o": ["h2o(budget=0.5)", "h2o(budget=24)"],
    "snapkv": ["snapkv(budget=0.5,window=8)", "snapkv(budget=24,window=8)"],
    "tova": ["tova(budget=0.5)"],
    "stride": ["stride(every=4,recent=16)"],
    "pyramid": ["pyramid(budget=0.5,window=8)"],
    "ada": ["ada(budget=0.5,window=8)"],
    "scissorhands": ["scissorhands(budget=0.5)"],
    "topk": ["topk(budget=0.5)", "topk(budget=0.5,score=knorm)", "topk(budget=0.5,score=auxiliary)"],
    "pages": ["pages(size=8,top=0.25)"],
    "lsh_merge": ["lsh_merge(planes=3,recent=16)", "lsh_merge(planes=3,recent=16,when=running)"],
    "hierarchy": ["hierarchy(recent=16,block=4,summaries=2)"],
    "modal": ["modal(segments=text3-image4x4-video2x3x2-audio5-text)"],
    "tiers": ["tiers(sizes=(16,32),strides=(1,4))"],
    "multiscale": ["multiscale(windows=(16,32),strides=(1,4))"],
    "outliers": ["outliers(fraction=0.05)"],
    "lowrank": ["lowrank(rank=4)"],
}
NEUTRAL = ("keep", "identity", "full")


def of_role(role):
    """Every variant of every part of a role."""
    found = [SMALL.get(name, [name]) for name, part in parts().items() if part.role == role and name not in NEUTRAL]
    return [text for texts in found for text in texts]


def singles():
    """Every variant of every part alone."""
    return [
        *of_role("tokens"),
        *of_role("basis"),
        *of_role("format"),
        *(f"int(bits=4,group=8)+{c}" for c in of_role("correction")),
    ]


def pairs():
    """Every pair of parts of different roles, in the order in which they are written."""
    tokens, bases, formats, fixes = (of_role(r) for r in ("tokens", "basis", "format", "correction"))
    yield from (f"{f}+{c}" for f in formats for c in fixes)
    yield from (f"{p} | {x}" for p in tokens for x in (*bases, *formats))
    yield from (f"{b} | {f}" for b in bases for f in formats)


def triples():
    """A covering set of deeper compositions: both corrections, all three choices, sides that differ, both protocols."""
    yield from (
        "int(bits=2,group=8)+outliers(0.05)+lowrank(4)",
        "gear(residual=16)",
        "h2o(budget=0.5) | svd(rank=8) | int(bits=4)",
        "window(sinks=4,recent=28) | svd(rank=8) | int(bits=4,residual=8)",
        "snapkv(budget=0.5,window=8) | online_svd(rank=8) | int(bits=8,residual=16,flush=all)",
        "snapkv(budget=0.5,window=8) | nmf(rank=4) | int(bits=4,axis=channel,group=8)",
        "k:int(bits=4,axis=channel,group=8) v:int(bits=2,group=8)",
        "k:svd(rank=8,rope=pre) | int(bits=4) v:float8",
        "h2o(budget=0.5) | k:int(bits=4) v:svd(rank=8)",
        "k:sketch(m=64) v:int(bits=2,group=8)",
        "pages(size=8,top=0.25) | k:int(bits=4,rope=pre) v:log(bits=4)",
        "int(bits=4,group=8) @ on_write",
        "window(sinks=4,recent=28) | int(bits=4,axis=channel,group=8,rope=pre) @ on_write",
        "h2o(budget=0.5) | int(bits=4) @ on_write",
        "ada(budget=0.5,window=8) | svd(rank=8) | int(bits=4,residual=16)",
        "lsh_merge(planes=3,recent=16,when=running) | svd(rank=8,rope=pre) | int(bits=8)",
    )
