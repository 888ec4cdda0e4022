# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0913, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Rows of packed weights in `tiles`' layout, dequantised exactly: embeddings, and weights for the library."""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.tile_codes import code_bits, e2m1_value


@triton.jit
def _field(record, at, live):
    return tl.load(record + at * 16, mask=live, other=0)


@triton.jit
def _float(field, DTYPE: tl.constexpr):
    return field.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _byte(record, index, live):
    """Byte `index` of fields."""
    return (_field(record, index // 2, live).to(tl.int32) >> (index % 2 * 8)) & 255


@triton.jit
def field_scales(record, block, live, SCALES: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr):
    """(scale, low) float32 of blocks, by loads: as `block_scales`, complete, but of SCALES 4 the zero."""
    none = block.to(tl.float32) * 0.0
    if SCALES == 3:
        pair = _field(record, block, live).to(tl.int32)
        d = _float(_field(record, 8 + 0 * block, live), tl.float16)
        dmin = _float(_field(record, 9 + 0 * block, live), tl.float16)
        return (pair & 63).to(tl.float32) * d, ((pair >> 8) & 63).to(tl.float32) * dmin
    elif SCALES == 6:
        byte = _byte(record, block, live)
        d = _float(_field(record, 8 + 0 * block, live), tl.float16)
        return (byte - 2 * (byte & 128)).to(tl.float32) * d, none
    elif SCALES == 5:
        byte = _byte(record, block, live)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        return bits.to(tl.float32, bitcast=True), none
    else:
        return _group_fields(record, block * PER // 8, block, live, SCALES, PER, PARTS)


@triton.jit
def _group_fields(
    record, g, block, live, SCALES: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr
):
    """`field_scales` of floats."""
    if PARTS == 3:
        scale = _float(_field(record, g, live), tl.bfloat16)
        scale += _float(_field(record, PER + g, live), tl.bfloat16)
        scale += _float(_field(record, 2 * PER + g, live), tl.bfloat16)
    else:
        scale = _float(_field(record, g, live), tl.float16)
    if SCALES == 2:
        return scale, -_float(_field(record, 8 + block, live), tl.float16)
    elif SCALES == 4:
        return scale, _byte(record, 2 * PARTS * PER + g, live).to(tl.float32)
    else:
        return scale, scale * 0.0


@triton.jit
def tile_rows(
    ids,
    codes,
    high,
    records,
    y,
    CHUNKS,
    factor,
    SCALES: tl.constexpr,
    PER: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
):
    """y [T, K] = rows `ids` of the weight, times `factor`; grid (T, 1024 words of codes)."""
    FEW: tl.constexpr = 2 if HIGH == 4 else 4
    WORDS: tl.constexpr = 256 // FEW
    RUN: tl.constexpr = 16 if SCALES == 6 else 32
    """Neighbouring words whose codes share scales."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + t)
    # what a run shares has one dimension, so that a thread loads it once
    run = tl.program_id(1) * 1024 + tl.arange(0, 1024 // RUN) * RUN
    j = tl.arange(0, RUN)[None, :]
    chunk = run // WORDS
    live = chunk < CHUNKS
    word = run % WORDS
    tile = (row // 16).to(tl.int64) * CHUNKS
    lane = row % 16
    place = (tile + chunk) * (WORDS * 16) + word // 32 * 512 + lane * 32 + word % 32
    place = tl.max_contiguous(tl.multiple_of(place[:, None] + j, [1, RUN]), [1, RUN])
    w = tl.load(codes + place, mask=live[:, None], other=0)
    h = w
    if HIGH == 1 or HIGH == 2:
        group = tile + chunk
        if HIGH == 1:
            group = (row // 16).to(tl.int64) * ((CHUNKS + 1) // 2) + chunk // 2
        place = group * 512 + lane * 32 + word % 32
        place = tl.max_contiguous(tl.multiple_of(place[:, None] + j, [1, RUN]), [1, RUN])
        h = tl.load(high + place, mask=live[:, None], other=0)
    record = records + (tile // SPAN + chunk // SPAN) * (FIELDS * 16) + lane
    for i in tl.static_range(FEW):
        if SCALES == 6:
            block = word // 32 * 8 + word % 32 // 16 * 4 + i
            bit = word // 32 * 8 + 2 * i
        else:
            block = word // 32 * FEW + i
            bit = chunk % 2 * 8 + block
        code = code_bits(w, h, i, bit[:, None], HIGH)
        scale, low = field_scales(record, block, live, SCALES, PER, PARTS)
        scale = scale[:, None]
        low = low[:, None]
        if SCALES == 5:
            value = scale * e2m1_value(code)
        elif SCALES == 4:
            value = scale * (code.to(tl.float32) - low)
        else:
            value = scale * (code - ZERO).to(tl.float32) - low
        at = t * CHUNKS * 256 + chunk * 256 + block * RUN
        at = tl.max_contiguous(tl.multiple_of(at[:, None] + j, [1, RUN]), [1, RUN])
        tl.store(y + at, (value * factor).to(y.dtype.element_ty), mask=live[:, None])
