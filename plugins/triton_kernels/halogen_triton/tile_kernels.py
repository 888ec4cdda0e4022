# ruff: noqa: E501, ANN001, ANN201, ANN202, C901, D403, N803, PLR0912, PLR0913, PLR0915, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Packed weights on tensor cores, for one row and for a few (see `tiles` for the layout).

Codes go into mantissas as they lie, two per 32-bit operation, and are multiplied as BASE + code: 128 in
bfloat16, 1024 in float16, where all are exact. Sums over a scale's block stay apart in float32, so scale
and offset are applied once per block and row: value = scale * (code - ZERO) - low, and the sums of x that
offsets need come from the same units, by rows of a constant.

SCALES, PER, PARTS, FIELDS, SPAN, HIGH and ZERO are those of `Tiles.constants`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait
from halogen_triton.tile_codes import (
    block_scales,
    chunk_scales,
    code_products,
    codes_of,
)


@triton.jit
def _joined(acc, parts, tickets, ticket):
    """(whether this program is the last of a tile's parts, the sum of all parts in order)."""
    size: tl.constexpr = acc.shape[0] * acc.shape[1]
    count = tl.num_programs(1)
    at = parts + (ticket * count).to(tl.int64) * size
    at += tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    tl.store(at + tl.program_id(1) * size, acc)
    tl.debug_barrier()
    last = tl.atomic_add(tickets + ticket, 1, sem="acq_rel") == count - 1
    if last:
        acc = tl.zeros_like(acc)
        for p in range(count):
            acc += tl.load(at + p * size, cache_modifier=".cg")
        tl.store(tickets + ticket, 0)
    return last, acc


@triton.constexpr_function
def _words_at(load, words):
    """Where a chunk's load begins; blocks of 16 lie in words as [half, 2, 16], others as [load, 32]."""
    return load * 512 if words == 32 else load // 2 * 512 + load % 2 * 16


@triton.constexpr_function
def _high_at(high, load, words, i, odd):
    """The bit of a word of high bits that belongs to code i of a load."""
    if high == 1:
        return 8 * odd + 4 * load + i
    return 8 * (load * words // 32) + 2 * i


@triton.jit(do_not_specialize=["M", "CHUNKS"])
def tile_linear(
    x,
    codes,
    high,
    records,
    bias,
    parts,
    tickets,
    y,
    M,
    N,
    CHUNKS,
    x_stride,
    y_stride,
    BN: tl.constexpr,
    ONE: tl.constexpr,
    TWO: tl.constexpr,
    SCALES: tl.constexpr,
    PER: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    SPAN: tl.constexpr,
    HIGH: tl.constexpr,
    ZERO: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    BASE: tl.constexpr,
    ASM: tl.constexpr,
):
    """y [M, N] = x W^T + bias; grid (tiles of BN rows of W, parts of K, 8 rows of x or with TWO 16).

    A column of the product is a row of x. With ONE (M = 1) it is one of the blocks that a chunk of 256
    elements has: x is given as 8 columns that hold one block each. The last part of K to arrive adds up
    all.
    """
    pdl_launch(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = SCALES == 6
    """Blocks are of 16: a chunk has 16 of them, and as columns they come in two lots."""
    EACH: tl.constexpr = 8 // PER
    FEW: tl.constexpr = 2 if HIGH == 4 else 4
    """Codes per word."""
    WORDS: tl.constexpr = 16 if HALVES and not ONE else 32
    LOADS: tl.constexpr = 256 // (WORDS * FEW)
    SUMS: tl.constexpr = HIGH != 4 and SCALES != 5
    """Whether sums of x are needed."""
    LOWS: tl.constexpr = SCALES == 2 or SCALES == 3 or SCALES == 4
    PAIR: tl.constexpr = 2 if HIGH == 1 else 1
    """A word of single high bits serves two chunks."""
    ROWS: tl.constexpr = BN // 2 if GATED else BN
    CHUNK_WORDS: tl.constexpr = 4096 // FEW

    r = tl.arange(0, BN)
    m = tl.arange(0, 8)
    j = tl.arange(0, WORDS)
    k = tl.arange(0, 16)
    tile = tl.program_id(0)
    steps = (CHUNKS + PAIR - 1) // PAIR
    first = tl.program_id(1) * steps // tl.num_programs(1)
    end = (tl.program_id(1) + 1) * steps // tl.num_programs(1)
    start = (tile * (ROWS // 16)).to(tl.int64)
    # tiles past the last read that one again; GATED: half gate rows, half up rows
    own = tl.minimum(r % ROWS // 16, N // 16 - 1 - tile * (ROWS // 16)) + r // ROWS * (N // 16)
    own = own[:, None]
    lane = (r % 16)[:, None]
    words = (
        codes + start * CHUNKS * CHUNK_WORDS + own * (CHUNKS * CHUNK_WORDS) + lane * 32 + j[None, :]
    )
    tops = high + start * steps * 512 + own * (steps * 512) + lane * 32 + j[None, :]
    spans = CHUNKS // SPAN
    fields = own * (spans * (FIELDS * 16)) + lane + k[None, :] * 16
    # 16 rows of a field are neighbours
    fields = tl.max_contiguous(tl.multiple_of(fields, [16, 1]), [16, 1])
    fields = records + start * spans * (FIELDS * 16) + fields
    row = tl.program_id(2) * (16 if TWO else 8)
    xp = x + row.to(tl.int64) * x_stride + j[:, None]
    if ONE:
        xp += 0 * m[None, :]
    else:
        xp += m.to(tl.int64)[None, :] * x_stride
    live = (m >= 0)[None, :] & (j >= 0)[:, None]
    acc = tl.zeros([BN, 8], tl.float32)
    acc2 = acc
    none = acc
    # formats with an offset of their own have no minimum, and the other way round
    constant = tl.full([BN, WORDS], -(BASE + ZERO), DTYPE)
    pdl_wait(PDL)
    for step in range(first, end):
        if HIGH == 1:
            top = tl.load(tops + step * 512, eviction_policy="evict_first")
        for odd in tl.static_range(PAIR):
            chunk = tl.minimum(step * PAIR + odd, CHUNKS - 1)
            there = live
            if PAIR == 2:
                there = live & (step * PAIR + odd < CHUNKS)
            record = tl.load(
                fields + (chunk // SPAN) * (FIELDS * 16),
                mask=(k < FIELDS)[None, :] & (r >= 0)[:, None],
                other=0,
                eviction_policy="evict_first",
            )
            part, xsum, total, low = none, none, none, none
            part2, xsum2, total2, low2 = none, none, none, none
            for load in tl.static_range(LOADS):
                word = tl.load(
                    words + chunk * CHUNK_WORDS + _words_at(load, WORDS),
                    eviction_policy="evict_first",
                )
                if HIGH == 2:
                    top = tl.load(
                        tops + chunk * 512 + _words_at(load, WORDS) % 512,
                        eviction_policy="evict_first",
                    )
                elif HIGH != 1:
                    top = word
                for i in tl.static_range(FEW):
                    if ONE and HALVES:
                        column = m[None, :] == i + 4 * (j // 16)[:, None]
                        xp = x + 16 * m[None, :] + (j % 16)[:, None]
                        xb = tl.load(xp + chunk * 256 + load * 128, mask=column, other=0.0)
                    elif ONE:
                        column = (m == load * FEW + i)[None, :] & there
                        xb = tl.load(
                            xp + chunk * 256 + (load * FEW + i) * 32, mask=column, other=0.0
                        )
                    else:
                        xc = xp + chunk * 256 + (load * FEW + i) * WORDS
                        xb = tl.load(xc, mask=there & (m < M - row)[None, :], other=0.0)
                        if (load * FEW + i) % EACH == 0:
                            part, xsum, part2, xsum2 = none, none, none, none
                    if SUMS:
                        xsum = tl.dot(constant, xb, xsum, input_precision="ieee")
                    if EACH == 1 and not ONE:
                        part = xsum
                    code = codes_of(
                        word, top, i, _high_at(HIGH, load, WORDS, i, odd), DTYPE, SCALES, HIGH, ASM
                    )
                    part = code_products(part, code, word, xb, i, HIGH, ASM)
                    if TWO:
                        xb = tl.load(
                            xc + 8 * x_stride, mask=there & (m < M - row - 8)[None, :], other=0.0
                        )
                        if SUMS:
                            xsum2 = tl.dot(constant, xb, xsum2, input_precision="ieee")
                        if EACH == 1:
                            part2 = xsum2
                        part2 = code_products(part2, code, word, xb, i, HIGH, ASM)
                    if not ONE and (load * FEW + i + 1) % EACH == 0:
                        block = load * FEW + i + 0 * m
                        scale, offset = block_scales(record, block, SCALES, PER, PARTS, 8, ASM)
                        if EACH > 1:
                            part += xsum
                        total += scale * part
                        if LOWS:
                            low += offset * xsum
                        if TWO:
                            if EACH > 1:
                                part2 += xsum2
                            total2 += scale * part2
                            if LOWS:
                                low2 += offset * xsum2
                if ONE and (HALVES or load == LOADS - 1):
                    block = m + 8 * load if HALVES else m
                    scale, offset = block_scales(record, block, SCALES, PER, PARTS, 8, ASM)
                    total += scale * (part + xsum)
                    if LOWS:
                        low += offset * xsum
                    part, xsum = none, none
            if SCALES == 3 or SCALES == 6:
                d, dmin = chunk_scales(record, SCALES, 8, ASM)
                total *= d
                total2 *= d
                low *= dmin
                low2 *= dmin
            acc += total
            if LOWS:
                acc += low * (1.0 / BASE)
            if TWO:
                acc2 += total2
                if LOWS:
                    acc2 += low2 * (1.0 / BASE)
    ticket = tl.program_id(2) * tl.num_programs(0) + tile
    if ONE:
        acc = tl.sum(acc, 1)[:, None]
    elif TWO:
        # columns [8, 2], so that nothing moves between threads
        acc = tl.reshape(tl.join(acc, acc2), [BN, 16])
    if SPLIT:
        last, acc = _joined(acc, parts, tickets, ticket)
        if not last:
            return
    if ONE:
        column = tl.zeros([1], tl.int32)
    elif TWO:
        column = row + tl.arange(0, 16) // 2 + tl.arange(0, 16) % 2 * 8
    else:
        column = row + m
    n = tile * ROWS + r % ROWS
    if BIAS:
        acc += tl.load(bias + n + (r // ROWS) * N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        both = tl.reshape(acc, [2, ROWS, acc.shape[1]])
        gate, up = tl.split(tl.permute(both, (1, 2, 0)))
        acc = gated(gate, up, GATED)
        n = tile * ROWS + tl.arange(0, ROWS)
    at = y + column.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(n < N)[:, None] & (column < M)[None, :])
