# ruff: noqa: E501, ANN001, ANN201, C901, D403, N803, PLR0912, PLR0913, PLR0915, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""4-bit weights on tensor cores, for one row and for a few (see `tiles` for the layout).

Codes go into mantissas as they lie, two per 32-bit operation, and are multiplied as BASE + code: 128 in
bfloat16, 1024 in float16, where all 16 are exact. Sums over a scale's block stay apart in float32,
so scale and offset are applied once per block and row: value = scale * (BASE + code) - shift, and the
sums of x that `shift` needs come from the same units, by a row of ones.

FORMAT is the index of `Tiles.constants`; PER scales per 256 elements, one record for SPAN chunks of 256. With ASM two
codes are taken at once by NVIDIA's instructions; without, the same in Triton's own language.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait
from halogen_triton.tile_codes import code_values, scale_and_shift


@triton.jit
def _records(
    scales, extra, chunk, row, ROWS, PER: tl.constexpr, SPAN: tl.constexpr, FORMAT: tl.constexpr
):
    """Scales [BN, PER] of one chunk of 256 elements, and what comes with them."""
    at = (chunk // SPAN) * ROWS + row
    each = at[:, None] * PER + tl.arange(0, PER)[None, :]
    s = tl.load(scales + each)
    if FORMAT == 3:
        return s, tl.load(extra + at)[:, None]
    elif FORMAT == 4:
        return s, tl.load(extra + each)
    else:
        return s, s


@triton.jit
def _eight(values, PER: tl.constexpr):
    """[BN, PER] repeated to [BN, 8]."""
    if PER == 8:
        return values
    else:
        wide = tl.broadcast_to(values[:, :, None], values.shape[0], PER, 8 // PER)
        return tl.reshape(wide, values.shape[0], 8)


@triton.jit
def _row_words(codes, row, CHUNKS, j):
    """Pointers to words j of rows: tiles of 16 rows, 32 words of each row for 128 elements."""
    tile = (row // 16).to(tl.int64) * (CHUNKS * 1024) + (row % 16) * 32
    return codes + tile[:, None] + ((j // 32) * 512 + j % 32)[None, :]


@triton.jit
def tile_gemv(
    x,
    codes,
    scales,
    extra,
    bias,
    parts,
    tickets,
    y,
    N,
    ROWS,
    CHUNKS,
    steps,
    BN: tl.constexpr,
    FORMAT: tl.constexpr,
    PER: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    BASE: tl.constexpr,
    ASM: tl.constexpr,
):
    """y [N] = W x + bias for one row x [K]; grid (tiles of BN, SPLIT parts of K, `steps` chunks each).

    A chunk of x is given as 8 columns that hold one block of 32 each, so a column of the product is
    one block's sum. The last program of a tile to arrive joins the parts, in order.
    """
    pdl_launch(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    j = tl.arange(0, 64)
    c = tl.arange(0, 8)
    first = tl.program_id(1) * steps
    end = tl.minimum(first + steps, CHUNKS)
    words = _row_words(codes, row, CHUNKS, j)
    acc = tl.zeros([BN, 8], tl.float32)
    up = tl.zeros([BN, 8], tl.float32)
    ones = tl.full([BN, 64], 1.0, DTYPE)
    s, e = _records(scales, extra, first, row, ROWS, PER, SPAN, FORMAT)
    us, ue = s, e
    if GATED:
        us, ue = _records(scales, extra, first, row + N, ROWS, PER, SPAN, FORMAT)
    pdl_wait(PDL)
    for chunk in range(first, end):
        w = tl.load(words + chunk * 1024, eviction_policy="evict_first")
        after = tl.minimum(chunk + 1, end - 1)
        s2, e2 = _records(scales, extra, after, row, ROWS, PER, SPAN, FORMAT)
        us2, ue2 = s2, e2
        uw = w
        if GATED:
            uw = tl.load(
                words + (N // 16).to(tl.int64) * (CHUNKS * 1024) + chunk * 1024,
                eviction_policy="evict_first",
            )
            us2, ue2 = _records(scales, extra, after, row + N, ROWS, PER, SPAN, FORMAT)
        part = tl.zeros([BN, 8], tl.float32)
        upart = tl.zeros([BN, 8], tl.float32)
        xsum = tl.zeros([BN, 8], tl.float32)
        for i in tl.static_range(4):
            block = c[None, :] == i + 4 * (j // 32)[:, None]
            xb = tl.load(
                x + chunk * 256 + 32 * c[None, :] + (j % 32)[:, None], mask=block, other=0.0
            )
            part = tl.dot(
                code_values(w, i, DTYPE, BASE, FORMAT, ASM), xb, part, input_precision="ieee"
            )
            if GATED:
                upart = tl.dot(
                    code_values(uw, i, DTYPE, BASE, FORMAT, ASM), xb, upart, input_precision="ieee"
                )
            if FORMAT != 5:
                xsum = tl.dot(ones, xb, xsum, input_precision="ieee")
        scale, shift = scale_and_shift(s, e, BASE, FORMAT, ZERO)
        acc += _eight(scale, PER) * part
        if FORMAT != 5:
            acc -= _eight(shift, PER) * xsum
        s, e = s2, e2
        if GATED:
            scale, shift = scale_and_shift(us, ue, BASE, FORMAT, ZERO)
            up += _eight(scale, PER) * upart
            if FORMAT != 5:
                up -= _eight(shift, PER) * xsum
            us, ue = us2, ue2
    total = tl.sum(acc, 1)
    utotal = tl.sum(up, 1)
    inside = n < N
    if SPLIT > 1:
        tl.store(parts + tl.program_id(1) * ROWS + n, total, mask=inside)
        if GATED:
            tl.store(parts + tl.program_id(1) * ROWS + N + n, utotal, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(tickets + tl.program_id(0), 1, sem="acq_rel") != SPLIT - 1:
            return
        total = tl.zeros([BN], tl.float32)
        utotal = tl.zeros([BN], tl.float32)
        for p in tl.static_range(SPLIT):
            total += tl.load(parts + p * ROWS + row, cache_modifier=".cg")
            if GATED:
                utotal += tl.load(parts + p * ROWS + N + row, cache_modifier=".cg")
        tl.store(tickets + tl.program_id(0), 0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, utotal, GATED)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _block_records(
    scales,
    extra,
    group,
    row,
    ROWS,
    b: tl.constexpr,
    PER: tl.constexpr,
    SPAN: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Scale [BN] of block b of a group of 128 elements, and what comes with it."""
    at = (group // (2 * SPAN)) * ROWS + row
    each = at * PER + ((group % 2) * 4 + b) * PER // 8
    s = tl.load(scales + each)
    if FORMAT == 3:
        return s, tl.load(extra + at)
    elif FORMAT == 4:
        return s, tl.load(extra + each)
    else:
        return s, s


@triton.jit
def tile_gemm(
    x,
    codes,
    scales,
    extra,
    bias,
    parts,
    tickets,
    y,
    M,
    N,
    ROWS,
    CHUNKS,
    steps,
    x_stride,
    y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FORMAT: tl.constexpr,
    PER: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    BASE: tl.constexpr,
    ASM: tl.constexpr,
):
    """y [M, N] = x W^T + bias for a few rows; grid (tiles of BN, SPLIT parts of K, tiles of BM).

    A product of 32 elements at a time keeps a block's sum apart; `steps` counts groups of 128.
    """
    pdl_launch(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    EACH: tl.constexpr = 4 if PER > 2 else 1
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    j = tl.arange(0, 32)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * steps
    end = tl.minimum(first + steps, CHUNKS * 2)
    words = _row_words(codes, row, CHUNKS, j)
    xp = x + m.to(tl.int64)[None, :] * x_stride + j[:, None]
    live = (m < M)[None, :] & (j >= 0)[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    none = tl.zeros([BN, BM], tl.float32)
    ones = tl.full([BN, 32], 1.0, DTYPE)
    s0, e0 = _block_records(scales, extra, first, row, ROWS, 0, PER, SPAN, FORMAT)
    s1, e1, s2, e2, s3, e3 = s0, e0, s0, e0, s0, e0
    if EACH == 4:
        s1, e1 = _block_records(scales, extra, first, row, ROWS, 1, PER, SPAN, FORMAT)
        s2, e2 = _block_records(scales, extra, first, row, ROWS, 2, PER, SPAN, FORMAT)
        s3, e3 = _block_records(scales, extra, first, row, ROWS, 3, PER, SPAN, FORMAT)
    pdl_wait(PDL)
    for group in range(first, end):
        w = tl.load(words + group * 512, eviction_policy="evict_first")
        after = tl.minimum(group + 1, end - 1)
        t0, f0 = _block_records(scales, extra, after, row, ROWS, 0, PER, SPAN, FORMAT)
        t1, f1, t2, f2, t3, f3 = t0, f0, t0, f0, t0, f0
        if EACH == 4:
            t1, f1 = _block_records(scales, extra, after, row, ROWS, 1, PER, SPAN, FORMAT)
            t2, f2 = _block_records(scales, extra, after, row, ROWS, 2, PER, SPAN, FORMAT)
            t3, f3 = _block_records(scales, extra, after, row, ROWS, 3, PER, SPAN, FORMAT)
        part = none
        xsum = none
        for i in tl.static_range(4):
            xb = tl.load(xp + group * 128 + 32 * i, mask=live, other=0.0)
            if EACH == 4:
                part = none
                xsum = none
            part = tl.dot(
                code_values(w, i, DTYPE, BASE, FORMAT, ASM), xb, part, input_precision="ieee"
            )
            if FORMAT != 5:
                xsum = tl.dot(ones, xb, xsum, input_precision="ieee")
            if EACH == 4 or i == 3:
                if EACH == 1 or i == 0:
                    scale, shift = scale_and_shift(s0, e0, BASE, FORMAT, ZERO)
                elif i == 1:
                    scale, shift = scale_and_shift(s1, e1, BASE, FORMAT, ZERO)
                elif i == 2:
                    scale, shift = scale_and_shift(s2, e2, BASE, FORMAT, ZERO)
                else:
                    scale, shift = scale_and_shift(s3, e3, BASE, FORMAT, ZERO)
                acc += scale[:, None] * part
                if FORMAT != 5:
                    acc -= shift[:, None] * xsum
        s0, e0, s1, e1, s2, e2, s3, e3 = t0, f0, t1, f1, t2, f2, t3, f3
    inside = (n < N)[:, None] & (m < M)[None, :]
    if SPLIT > 1:
        at = parts + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at + tl.program_id(1).to(tl.int64) * M * N, acc, mask=inside)
        tl.debug_barrier()
        ticket = tickets + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") != SPLIT - 1:
            return
        acc = tl.zeros([BN, BM], tl.float32)
        for p in tl.static_range(SPLIT):
            acc += tl.load(
                at + p * (M * N).to(tl.int64), mask=inside, other=0.0, cache_modifier=".cg"
            )
        tl.store(ticket, 0)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def tile_rows(
    ids,
    codes,
    scales,
    extra,
    y,
    ROWS,
    CHUNKS,
    factor,
    FORMAT: tl.constexpr,
    PER: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
):
    """y [T, K] = rows `ids` of the weight, times `factor`; grid (T, four chunks of 256)."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + t) + tl.zeros([1], tl.int32)
    word = tl.arange(0, 256)
    chunk = tl.program_id(1) * 4 + word // 64
    live = chunk < CHUNKS
    j = word % 64
    tile = (row // 16).to(tl.int64) * (CHUNKS * 1024) + (row % 16) * 32
    place = tile + chunk * 1024 + (j // 32) * 512 + j % 32
    place = tl.max_contiguous(tl.multiple_of(place, [32]), [32])
    w = tl.load(codes + place, mask=live, other=0)
    at = (chunk // SPAN) * ROWS + row
    for i in tl.static_range(4):
        block = (j // 32) * 4 + i
        each = at * PER + block * PER // 8
        s = tl.load(scales + each, mask=live, other=0)
        e = s
        if FORMAT == 3:
            e = tl.load(extra + at, mask=live, other=0)
        if FORMAT == 4:
            e = tl.load(extra + each, mask=live, other=0)
        scale, shift = scale_and_shift(s, e, 0, FORMAT, ZERO)
        code = code_values(w, i, tl.float32, 0, FORMAT, False)
        if FORMAT == 4:
            value = scale * (code - e.to(tl.float32))
        elif FORMAT == 1:
            value = scale * (code - ZERO)
        else:
            value = scale * code - shift
        place = t * CHUNKS * 256 + chunk * 256 + block * 32 + j % 32
        place = tl.max_contiguous(tl.multiple_of(place, [32]), [32])
        tl.store(y + place, (value * factor).to(y.dtype.element_ty), mask=live)
