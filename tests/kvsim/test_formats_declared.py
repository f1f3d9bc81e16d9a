"""What formats declare (conversion, kernels, addressable rows, work), and block sizes against ggml's own table."""

from typing import ClassVar

import pytest

from kvsim.formats.float8 import Float8
from kvsim.formats.full import Full
from kvsim.formats.gguf import BLOCK_BYTES, VALUES, Gguf
from kvsim.formats.int import Int
from kvsim.formats.kmeans import KMeans
from kvsim.formats.log import Log
from kvsim.formats.lowrank import LowRank
from kvsim.formats.mixed import Mixed
from kvsim.formats.mxfp import MxFp
from kvsim.formats.nvfp4 import NvFp4
from kvsim.formats.outliers import Outliers
from kvsim.formats.rotated import Rotated
from kvsim.formats.sketch import Sketch
from kvsim.formats.widths import Widths
from kvsim.parts import Place

SMOL = Place("k", 3, 64, 9)
WIDE = Place("k", 8, 128, 32)


def at(width, heads=1):
    return Place("k", heads, width, heads)


class TestDeclarations:
    CONVERSION: ClassVar = {
        Int(bits=8): "scale",
        Int(bits=4): "unpack",
        Log(): "lookup",
        KMeans(): "lookup",
        Mixed(): "unpack",
        Widths(): "unpack",
        Float8(): "scale",
        Float8(scale="none"): "cast",
        NvFp4(): "unpack",
        MxFp(bits=8): "scale",
        MxFp(): "unpack",
        Gguf(): "scale",
        Gguf(type="q4_0"): "unpack",
        Gguf(type="iq4_nl"): "lookup",
        Rotated(): "lookup",
        Full(): "none",
    }

    @pytest.mark.parametrize("part", CONVERSION, ids=str)
    def test_conversion(self, part):
        assert part.conversion == self.CONVERSION[part]

    def test_names_of_kernels(self):
        parts = [Int(bits=4), Float8(kind="e5m2"), NvFp4(), MxFp(bits=8), Gguf(type="q5_1")]
        assert [p.kernel_format for p in parts] == ["int4", "fp8", "nvfp4", "mxfp8", "q5_1"]

    def test_rows_that_can_leave(self):
        alone = [
            Int(),
            Int(axis="row"),
            Log(),
            KMeans(),
            Mixed(),
            Float8(),
            NvFp4(scale="row"),
            MxFp(),
            Gguf(),
            Rotated(),
        ]
        assert all(p.row_addressable for p in [*alone, Sketch(), Outliers()])
        tied = [Int(axis="channel"), Int(axis="head"), Int(axis="layer"), NvFp4(), LowRank()]
        assert not any(p.row_addressable for p in tied)

    def test_flops(self):
        # 80 = 64 + 16: signs 80, 64 log2 64 = 384, 16 log2 16 = 64
        assert Rotated.turn_flops(80) == 80 + 384 + 64
        assert Rotated(bits=4).step_flops(at(80, heads=2)) == 2 * 528
        assert Rotated(bits=4, rope="pre").step_flops(at(80)) == 0
        assert Rotated(bits=4, rope="pre").read_flops(at(80)) == 528 + 3 * 80
        assert Int(rope="pre").read_flops(SMOL) == 3 * 64
        assert Int().read_flops(SMOL) == Int().step_flops(SMOL) == 0
        assert Sketch(m=256).step_flops(WIDE) == 32 * 2 * 256 * 128
        assert Int().encode_row_flops(SMOL) == 6 * 64
        assert KMeans(bits=3).encode_row_flops(SMOL) == 5 * 64
        # rank 4: the error 2 a value, five products with 4 columns
        assert LowRank(rank=4).encode_row_flops(SMOL) == (2 + 5 * 8) * 64
        assert LowRank(rank=4).read_flops(SMOL) == 2 * 4 * 64
        assert Outliers().read_flops(WIDE) == 2


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_ggml_block_sizes(name):
    gguf = pytest.importorskip("gguf")
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert (values, size) == (VALUES, BLOCK_BYTES[name])


def test_allocation_units():
    # codes grow by 256 rows, channel groups of 32 rows by 8, a block scale of 128-row blocks by 2, bits of one row
    def units(part, blocks=1):
        return {b.name: b.rows_per_unit for b in part.buffers(128, blocks, SMOL)}

    assert units(Int(axis="channel", group=32)) == {"codes": 256, "scale": 8, "min": 8}
    assert units(NvFp4(residual=128, flush="all"))["block_scale"] == 2
    assert units(NvFp4())["block_scale"] == 256
    assert units(LowRank(rank=4)) == {"row_factors": 256, "block_factors": 16}
    assert units(KMeans())["codebook"] == 0
