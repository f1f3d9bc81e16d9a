"""Compiles the Triton kernels for GPUs that are not here: to machine code, as ptxas checks more than Triton does.

`python -m tests.runtime.triton_ahead '[["int(bits=4)", 128, 4, "bfloat16", 80]]'`: method (or "write"), width, queries
of a head, dtype, compute capability; prints a JSON list. TRITON_INTERPRET must not be 1.
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsim.method import parse_method
from runtime.kernels import triton_attend, triton_decode, triton_encode, triton_plans
from runtime.kernels.triton_rows import Turn
from runtime.sharing import Geometry, LayerTwins, Surroundings
from runtime.store import Store
from tests.runtime.kernel_stores import rotation

FLOATS = ("scaling", "softcap")
WHOLE = ("k_encoded", "v_encoded", "pure", "each", "count", "start0", "rows0", "start1", "rows", "first",
         "shift")


def compiled(kernel, pointers, constants, capability, **options):
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name], aligned[i,] = "*" + pointers[name], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32" if name in WHOLE or "_step" in name else "*i64"
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def attention(method, width, queries, dtype, capability):
    geometry = Geometry(8 * queries, 8, width, width)
    around = Surroundings(dtype, rotation=rotation(width))
    store = Store(LayerTwins(parse_method(method), geometry, around))
    plans = [triton_plans.plan(side.format) for side in (store.keys, store.values)]
    k, v = (triton_decode.layout(side, p, dtype) for side, p in zip((store.keys, store.values), plans, strict=True))
    pointers = {"q": str(triton_decode.KINDS[dtype]), "sums_out": "fp32", "ends_out": "fp32"}
    for name, side, plan in zip("kv", (store.keys, store.values), plans, strict=True):
        if plan.table is not None:
            pointers[f"{name}_table"] = str(triton_decode.KINDS[plan.table(side.format).dtype])
    turn = None
    if "rope=pre" in method:
        turn = Turn(width // 2, max(16, triton.next_power_of_2(width // 2)), "svd" in method, False, 0, k.decoded)
        pointers |= {"maps": str(k.held), "offset": str(k.held), "angles": "fp32"}
    constants = {"HEADS": 8, "QUERIES": queries, "MODE": 0, "CAPPED": False, "K": k, "V": v, "T": turn,
                 "QB": triton_decode.queries_of(queries), "BLOCK": triton_decode.block_of(k, v)}  # fmt: skip
    return compiled(triton_attend.split, pointers, constants, capability, num_warps=triton_decode.warps_of(k, v),
                    num_stages=triton_decode.STAGES)  # fmt: skip


def writing(width, dtype, capability):
    padded = triton.next_power_of_2(width)
    pointers = {"x": str(triton_decode.KINDS[dtype]), "codes": "u8", "scale": "fp16", "low": "fp16", "bad": "i32"}
    constants = {"HEADS": 8, "WIDTH": width, "BITS": 4, "GROUP": 64, "GROUPS": -(-width // 64), "PADDED": padded,
                 "SYMMETRIC": False, "TOGETHER": 1}  # fmt: skip
    return compiled(triton_encode.encode, pointers, constants, capability, num_warps=1, enable_fp_fusion=False)


def main():
    found = []
    for what, width, queries, name, capability in json.loads(sys.argv[1]):
        dtype = getattr(torch, name)
        kernel = (writing(width, dtype, capability) if what == "write" else
                  attention(what, width, queries, dtype, capability))  # fmt: skip
        ahead = len(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10", kernel.asm["ptx"]))
        found.append({"what": what, "code": len(kernel.asm["cubin"]), "shared": kernel.metadata.shared, "ahead": ahead})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
