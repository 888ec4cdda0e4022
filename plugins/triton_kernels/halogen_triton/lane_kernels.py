# ruff: noqa: E501, ANN001, ANN201, D403, N803, PLR0913, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""One row of x times bit planes: a lane takes RUN blocks in a row, and nothing is shared.

A lane loads codes, and the part of x that belongs to them, 16 bytes at a time; extra bits and scales of its
blocks lie side by side and come together. So the loop has no shared memory, no barrier and no wait for
everything. Nothing is masked either, or each load would get a branch and a wait: what lies past the end is
read from the last row or run, and its sums are dropped.

Tensors are [BN, G, ...]: rows, runs of RUN (1 or 2) blocks. FORMAT, HIGH and OFFSET as in `plane_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.plane_kernels import block_scales, code_floats, has_min, scale_and_min


@triton.jit
def lane_sums(
    x,
    codes,
    high,
    scales,
    supers,
    row,
    g,
    KB,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Products of rows [BN] with x over runs g [G], all of which exist: [BN, G] in float32."""
    run = row[:, None, None] * (KB // RUN) + g[None, :, None]
    packed = run_scales(scales, run, RUN, FORMAT)
    top = packed
    if FORMAT == 3 or FORMAT == 4:
        top = run_supers(supers, row, g, KB, RUN, FORMAT)
    bits = packed
    if HIGH > 0:
        bits = tl.load(high + run * (RUN * HIGH) + tl.arange(0, RUN * HIGH)[None, None, :])
    total = tl.zeros([row.shape[0], g.shape[0]], tl.float32)
    for j in tl.static_range(RUN):
        # x as if each row had one: then a lane reads what it multiplies
        xj = x + (row * 0)[:, None, None] + (g[None, :, None] * RUN + j) * 32
        block = run * RUN + j
        if FORMAT == 4:
            total += six_bit_sums(xj, codes, bits, block, pick(packed, j), j, OFFSET)
        else:
            if FORMAT % 16 == 5:
                part, xsum = byte_sums(xj, codes, block)
            else:
                part, xsum = nibble_sums(xj, codes, bits, block, j, FORMAT, HIGH, OFFSET)
            if FORMAT > 16:
                every = tl.full([row.shape[0], g.shape[0]], 1, tl.int1)
                b = (g * RUN + j)[None, :]
                scale, low = block_scales(scales, supers, row[:, None], b, every, KB, 0, FORMAT)
            else:
                scale, low = scale_and_min(typed(pick(packed, j), FORMAT), top, FORMAT)
            total += scale * part
            if has_min(FORMAT):
                total -= low * xsum
    if FORMAT == 4:
        total *= top.to(tl.float32)
    return total


@triton.jit
def pick(values, j: tl.constexpr):
    """Integers [BN, G] at place j of the last axis, which lies within a lane: no work."""
    at = tl.arange(0, values.shape[2])[None, None, :]
    return tl.sum(tl.where(at == j, values.to(tl.int32), 0), 2)


@triton.jit
def typed(word, FORMAT: tl.constexpr):
    """A scale as `scale_and_min` takes it, from `run_scales`."""
    if FORMAT == 1 or FORMAT == 5:
        return word.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return word


@triton.jit
def run_scales(scales, run, RUN: tl.constexpr, FORMAT: tl.constexpr):
    """Scales of runs [BN, G, RUN] as integers, one or a pair each; nothing where groups are the file's choice."""
    at = run * RUN + tl.arange(0, RUN)[None, None, :]
    if RUN == 1:
        # or a lane would load scales of its neighbours too, to hand them over through shared memory
        at = tl.max_contiguous(at, [1, 1, 1])
    if FORMAT > 16:
        return at
    elif FORMAT == 2:
        return tl.load(scales.to(tl.pointer_type(tl.int32)) + at)
    elif FORMAT == 7:
        return tl.load(scales + at)
    else:
        return tl.load(scales.to(tl.pointer_type(tl.int16)) + at)


@triton.jit
def run_supers(supers, row, g, KB, RUN: tl.constexpr, FORMAT: tl.constexpr):
    """What a run shares with the rest of its 256 elements [BN, G]: (d, dmin) of FORMAT 3, d of FORMAT 4."""
    at = row[:, None] * (KB // 8) + (g * RUN // 8)[None, :]
    if FORMAT == 3:
        return tl.load(supers.to(tl.pointer_type(tl.int32)) + at)
    else:
        return tl.load(supers + at)


@triton.jit
def nibble_sums(
    x,
    codes,
    bits,
    block,
    j: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Sums [BN, G] of blocks' codes times x, and of x where values have a min."""
    w = tl.arange(0, 4)[None, None, :]
    words = tl.load(codes + block * 4 + w, eviction_policy="evict_first")
    extra = words
    if HIGH == 1:
        extra = pick(bits, j)[:, :, None]
    part = tl.zeros(words.shape, tl.float32)
    xsum = tl.zeros(words.shape, tl.float32)
    for p in tl.static_range(4):
        xa, xb = x_fours(x, p)
        part += code_floats(words, extra, 2 * p, w, HIGH, OFFSET) * xa
        part += code_floats(words, extra, 2 * p + 1, w, HIGH, OFFSET) * xb
        if has_min(FORMAT):
            xsum += xa + xb
    return tl.sum(part, 2), tl.sum(xsum, 2)


@triton.jit
def six_bit_sums(x, codes, bits, block, pair, j: tl.constexpr, OFFSET: tl.constexpr):
    """As `nibble_sums` for FORMAT 4, scaled: `pair` are two signed bytes, for 16 elements each."""
    w = tl.arange(0, 4)[None, None, :]
    words = tl.load(codes + block * 4 + w, eviction_policy="evict_first")
    total = tl.zeros(pair.shape, tl.float32)
    for half in tl.static_range(2):
        extra = pick(bits, 2 * j + half)[:, :, None]
        part = tl.zeros(words.shape, tl.float32)
        for q in tl.static_range(2):
            xa, xb = x_fours(x, 2 * half + q)
            part += code_floats(words, extra, 4 * half + 2 * q, w, 2, OFFSET) * xa
            part += code_floats(words, extra, 4 * half + 2 * q + 1, w, 2, OFFSET) * xb
        scale = (pair << (24 - 8 * half)) >> 24
        total += scale.to(tl.float32) * tl.sum(part, 2)
    return total


@triton.jit
def byte_sums(x, codes, block):
    """As `nibble_sums` for codes that are bytes."""
    part = tl.zeros([block.shape[0], block.shape[1], 8], tl.float32)
    for half in tl.static_range(2):
        e = 16 * half + tl.arange(0, 16)[None, None, :]
        q = tl.load(codes + block * 32 + e, eviction_policy="evict_first")
        q = tl.reshape(q, [block.shape[0], block.shape[1], 2, 8])
        qa, qb = tl.split(tl.permute(q, (0, 1, 3, 2)))
        part += qa.to(tl.float32) * x_eight(x, 2 * half).to(tl.float32)
        part += qb.to(tl.float32) * x_eight(x, 2 * half + 1).to(tl.float32)
    return tl.sum(part, 2), 0.0


@triton.jit
def x_eight(x, p: tl.constexpr):
    """Elements 8 p to 8 p + 7 of the blocks that x points to: [BN, G, 8]."""
    return tl.load(x + 8 * p + tl.arange(0, 8)[None, None, :])


@triton.jit
def x_fours(x, p: tl.constexpr):
    """Elements 8 p + w and 8 p + 4 + w of the blocks that x points to, [BN, G, 4] each, in float32."""
    both = x_eight(x, p)
    both = tl.reshape(both, [both.shape[0], both.shape[1], 2, 4])
    xa, xb = tl.split(tl.permute(both, (0, 1, 3, 2)))
    return xa.to(tl.float32), xb.to(tl.float32)
