"""Codes of 1 to 8 bits in whole bytes and back; it knows neither scales nor formats."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsim.errors import KvsimError


def packed_bytes(width: int, bits: int) -> int:
    """Bytes of a packed row of `width` codes."""
    return -(-width * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., w] uint8 below 2^bits to [..., ceil(w*bits/8)] uint8.

    Code i takes bits i*b to (i+1)*b of the row, counted from the lowest bit of the first byte; spare bits are zero.
    """
    _check(bits)
    width = codes.shape[-1]
    if bits == 8:
        return codes
    if not codes.numel():
        return codes.new_empty(*codes.shape[:-1], packed_bytes(width, bits))
    if bits in (1, 2, 4):
        whole = _filled(codes, 8 // bits)
        # in one dimension: a single row of wider ones counts as contiguous, and may lie at an odd stride
        joined = whole.contiguous().view(-1)
        for step in range(4 - bits.bit_length()):
            joined = _join(joined, bits << step)
        return joined.view(*whole.shape[:-1], -1)
    groups = _filled(codes, 8).unflatten(-1, (-1, 8))
    word = groups[..., 0].to(torch.int64)
    for place in range(1, 8):
        word |= groups[..., place].to(torch.int64) << (place * bits)
    # a group of eight codes fills `bits` bytes of its (little-endian) word
    packed = word.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return packed[..., : packed_bytes(width, bits)].contiguous()


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """The inverse of `pack`: [..., ceil(w*bits/8)] uint8 to codes [..., w] uint8."""
    _check(bits)
    if bits == 8:
        return packed
    if not packed.numel():
        return packed.new_empty(*packed.shape[:-1], width)
    if bits in (1, 2, 4):
        codes = packed
        for step in reversed(range(4 - bits.bit_length())):
            codes = _split(codes, bits << step)
        return codes[..., :width]
    groups = _filled(packed, bits).unflatten(-1, (-1, bits))
    word = pad(groups, (0, 8 - bits)).contiguous().view(torch.int64)
    codes = torch.empty(*word.shape[:-1], 8, dtype=torch.uint8, device=packed.device)
    for place in range(8):
        codes[..., place] = ((word[..., 0] >> (place * bits)) & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(-2)[..., :width]


def pack_uneven(codes: Tensor, bits: Tensor, size: int) -> Tensor:
    """Codes [..., w] int32 below 2^bits to [..., size] uint8, each of its own bits [..., w] (1 to 8; broadcasts).

    Codes follow one another without gaps, lowest bits first; spare bits are zero.
    """
    byte, shift, _ = _uneven(bits)
    spread = codes << shift
    # bits of different codes never overlap, so that adding is joining
    packed = codes.new_zeros(*codes.shape[:-1], size + 1)
    packed.scatter_add_(-1, byte.expand_as(codes), spread & 255)
    packed.scatter_add_(-1, (byte + 1).expand_as(codes), spread >> 8)
    return packed[..., :-1].to(torch.uint8)


def unpack_uneven(packed: Tensor, bits: Tensor) -> Tensor:
    """The inverse of `pack_uneven`: codes [..., w] int32, each cut out of the two bytes it may lie in."""
    byte, shift, mask = _uneven(bits)
    held = packed.to(torch.int32)
    shape = (*held.shape[:-1], bits.shape[-1])
    high = held.gather(-1, (byte + 1).clamp(max=held.shape[-1] - 1).expand(shape))
    return ((held.gather(-1, byte.expand(shape)) | (high << 8)) >> shift) & mask


def _uneven(bits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First byte, shift and mask of each code."""
    wide = bits.to(torch.int64)
    first = wide.cumsum(-1) - wide
    return first // 8, (first % 8).to(torch.int32), ((1 << wide) - 1).to(torch.int32)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Pairs of codes into one of twice the bits, two bytes at a time as one 16-bit word."""
    pair = codes.view(torch.int16)
    return (pair | (pair >> (8 - bits))).to(torch.uint8)


def _split(codes: Tensor, bits: int) -> Tensor:
    """Each code into two of half the bits: the inverse of `_join`."""
    wide = codes.to(torch.int16, memory_format=torch.contiguous_format)
    mask = (2**bits - 1) * 0x0101
    return ((wide | (wide << (8 - bits))) & mask).view(torch.uint8)


def _filled(values: Tensor, multiple: int) -> Tensor:
    """Zeros after the last value up to a multiple."""
    spare = -values.shape[-1] % multiple
    return pad(values, (0, spare)) if spare else values


def _check(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise KvsimError(f"codes have 1 to 8 bits, got {bits}")
