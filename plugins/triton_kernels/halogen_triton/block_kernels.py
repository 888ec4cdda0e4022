# ruff: noqa: E501, ANN001, ANN201, D403, N803, PLR0913, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Rows of x times bit planes, tile by tile, on matrix units.

Whole: all of a tile's values meet x in one `tl.dot`, so x comes by loads of 16 bytes, as codes do, and changes
layout once a tile. Sliced: in eight, of every eighth group of four elements, which stages well on NVIDIA
and needs an eighth of the shared memory. FORMAT, HIGH and OFFSET as in `plane_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.plane_kernels import block_scales, code_floats, has_min


@triton.jit
def whole_products(
    acc,
    xrow,
    m_mask,
    codes,
    high,
    scales,
    supers,
    row,
    KB,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """acc [BM, BN] plus rows of x [BM, 1] times weight rows [1, BN], which all exist."""
    k = tl.arange(0, NB * 32)[None, :]
    for b0 in range(0, KB, NB):
        xt = tl.load(xrow + b0 * 32 + k, mask=m_mask & (b0 * 32 + k < KB * 32), other=0.0)
        b = b0 + tl.arange(0, NB)[:, None]
        value = block_values(
            codes, high, scales, supers, row, b, KB, FORMAT, HIGH, OFFSET, xt.dtype
        )
        acc = tl.dot(xt, value, acc, input_precision="ieee")
    return acc


@triton.jit
def block_values(
    codes,
    high,
    scales,
    supers,
    row,
    b,
    KB,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):
    """Values of blocks b [NB, 1] of rows [1, BN] in `dtype`: [32 NB, BN]; codes where a row has one scale."""
    NB: tl.constexpr = b.shape[0]
    BN: tl.constexpr = row.shape[1]
    at = row * KB + b
    mask = tl.broadcast_to(b < KB, [NB, BN])
    if FORMAT == 5 + 16 * 4095:
        return tl.reshape(narrow(block_bytes(codes, row, b, KB), dtype), [NB * 32, BN])
    s, low = block_scales(scales, supers, row, b, mask, KB, 0, FORMAT)
    s = plain_nan(s)
    if FORMAT % 16 == 5:
        value = block_bytes(codes, row, b, KB) * s[:, None, :]
        return tl.reshape(narrow(value, dtype), [NB * 32, BN])
    else:
        w = tl.arange(0, 4)[None, :, None]
        words = tl.load(codes + at[:, None, :] * 4 + w, mask=mask[:, None, :], other=0)
        # of a block's second 16 elements
        s2 = s
        if has_min(FORMAT):
            low = plain_nan(low)
        upper = words
        upper2 = words
        if FORMAT == 4:
            s2, low = block_scales(scales, supers, row, b, mask, KB, 1, FORMAT)
            s2 = plain_nan(s2)
        if HIGH == 1:
            upper = tl.load(high + at, mask=mask, other=0)[:, None, :]
            upper2 = upper
        if HIGH == 2:
            upper = tl.load(high + at * 2, mask=mask, other=0)[:, None, :]
            upper2 = tl.load(high + at * 2 + 1, mask=mask, other=0)[:, None, :]
        v0 = nibble_value(words, upper, s, low, 0, w, FORMAT, HIGH, OFFSET, dtype)
        v1 = nibble_value(words, upper, s, low, 1, w, FORMAT, HIGH, OFFSET, dtype)
        v2 = nibble_value(words, upper, s, low, 2, w, FORMAT, HIGH, OFFSET, dtype)
        v3 = nibble_value(words, upper, s, low, 3, w, FORMAT, HIGH, OFFSET, dtype)
        v4 = nibble_value(words, upper2, s2, low, 4, w, FORMAT, HIGH, OFFSET, dtype)
        v5 = nibble_value(words, upper2, s2, low, 5, w, FORMAT, HIGH, OFFSET, dtype)
        v6 = nibble_value(words, upper2, s2, low, 6, w, FORMAT, HIGH, OFFSET, dtype)
        v7 = nibble_value(words, upper2, s2, low, 7, w, FORMAT, HIGH, OFFSET, dtype)
        # [NB, 4, BN] each; joins add the bits of i, the upper ones first
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 4, 5, 1, 2)), [NB * 32, BN])


@triton.jit
def plain_nan(scale):
    """`scale`, where NaN is the one with an empty payload: `narrow` would carry a full one into the sign."""
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """float32 to the nearest `dtype`; halves leave zero in bfloat16, which takes two operations instead of eight."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True) + 0x8000
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def block_bytes(codes, row, b, KB):
    """Codes that are bytes, of blocks b [NB, 1] of rows [1, BN], in float32: [NB, 32, BN].

    Past a row's end its last block is read again, not what lies behind the tensor; x is 0 there.
    """
    at = row * KB + tl.minimum(b, KB - 1)
    return tl.load(codes + at[:, None, :] * 32 + tl.arange(0, 32)[None, :, None]).to(tl.float32)


@triton.jit
def nibble_value(
    words,
    upper,
    s,
    low,
    i: tl.constexpr,
    w,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    dtype: tl.constexpr,
):
    """Values of elements 4 i + w of blocks [NB, BN]: [NB, 4, BN]."""
    value = code_floats(words, upper, i, w, HIGH, OFFSET) * s[:, None, :]
    if has_min(FORMAT):
        value -= low[:, None, :]
    return narrow(value, dtype)


@triton.jit
def sliced_products(
    acc,
    xrow,
    m_mask,
    j,
    codes,
    high,
    scales,
    supers,
    row,
    n_mask,
    KB,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """As `whole_products`, for words j [4 NB] of a tile at a time; rows of the weight are masked."""
    dtype = xrow.dtype.element_ty
    BY_ROW: tl.constexpr = FORMAT == 5 + 16 * 4095
    for b0 in range(0, KB, NB):
        b = b0 + j // 4
        inside = b < KB
        mask = inside[:, None] & n_mask
        x_mask = inside[None, :] & m_mask
        xb = xrow + (b * 32 + j % 4)[None, :]
        if not BY_ROW:
            s, low = block_scales(scales, supers, row, b[:, None], mask, KB, 0, FORMAT)
        if FORMAT % 16 == 5:
            for i in tl.static_range(8):
                q = tl.load(
                    codes + (row * KB + b[:, None]) * 32 + (j % 4)[:, None] + 4 * i,
                    mask=mask,
                    other=0,
                )
                xt = tl.load(xb + 4 * i, mask=x_mask, other=0.0)
                value = q.to(tl.float32)
                if not BY_ROW:
                    value *= s
                acc = tl.dot(xt, value.to(dtype), acc, input_precision="ieee")
        else:
            words = tl.load(
                codes + (row * KB + b[:, None]) * 4 + (j % 4)[:, None], mask=mask, other=0
            )
            upper = words
            if HIGH == 1:
                upper = tl.load(high + row * KB + b[:, None], mask=mask, other=0)
            for i in tl.static_range(8):
                if HIGH == 2 and i % 4 == 0:
                    upper = tl.load(high + (row * KB + b[:, None]) * 2 + i // 4, mask=mask, other=0)
                if FORMAT == 4 and i == 4:
                    s, low = block_scales(scales, supers, row, b[:, None], mask, KB, 1, FORMAT)
                q = code_floats(words, upper, i, (j % 4)[:, None], HIGH, OFFSET)
                value = q * s
                if has_min(FORMAT):
                    value -= low
                xt = tl.load(xb + 4 * i, mask=x_mask, other=0.0)
                acc = tl.dot(xt, value.to(dtype), acc, input_precision="ieee")
    return acc
