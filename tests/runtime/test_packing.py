"""Packing against numpy's own bit packing, and exactly inverse for every width and shape."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsim.errors import KvsimError
from runtime.packing import pack, packed_bytes, unpack


def numpy_pack(codes, bits):
    """The same layout by numpy: every code's bits, lowest first, then eight to a byte."""
    spread = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(spread.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 15, 16, 17, 64, 80, 96, 127, 128, 129])
def test_layout_is_numpys(bits, width):
    rng = np.random.default_rng(bits * 1000 + width)
    codes = rng.integers(0, 2**bits, (2, 3, 5, width), dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, packed_bytes(width, bits))
    np.testing.assert_array_equal(packed.numpy(), numpy_pack(codes, bits))
    np.testing.assert_array_equal(unpack(packed, bits, width).numpy(), codes)


@given(
    bits=st.integers(1, 8),
    shape=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    width=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
def test_round_trip(bits, shape, width, seed):
    codes = torch.randint(0, 2**bits, (*shape, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack(pack(codes, bits), bits, width), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_strided_codes(bits):
    codes = torch.randint(0, 2**bits, (3, 24, 5), dtype=torch.uint8).transpose(1, 2)
    packed = pack(codes, bits)
    np.testing.assert_array_equal(packed.numpy(), numpy_pack(codes.numpy(), bits))
    assert torch.equal(unpack(packed[:, ::2], bits, 24), codes[:, ::2])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_one_row_of_an_odd_stride(bits):
    # as the row of one sequence and one head lies after its groups were filled up: torch calls it contiguous
    wide = torch.arange(105, dtype=torch.uint8).reshape(1, 1, 1, 105) & (2**bits - 1)
    row = wide[..., :100]
    assert row.is_contiguous()
    packed = pack(row, bits)
    assert packed.shape == (1, 1, 1, packed_bytes(100, bits))
    assert torch.equal(unpack(packed, bits, 100), row)


def test_by_hand():
    # 3-bit codes 1, 2, 7: 1 + (2 << 3) + (7 << 6) = 1 + 16 + 448 = 465 = 0x01D1 -> bytes D1 01
    assert pack(torch.tensor([1, 2, 7], dtype=torch.uint8), 3).tolist() == [0xD1, 0x01]
    # 2-bit codes 3, 0, 1, 2, 1: 3 + (1 << 4) + (2 << 6) = 147, then 1
    assert pack(torch.tensor([3, 0, 1, 2, 1], dtype=torch.uint8), 2).tolist() == [147, 1]


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_impossible_bits(bits):
    with pytest.raises(KvsimError, match="1 to 8 bits"):
        pack(torch.zeros(4, dtype=torch.uint8), bits)
