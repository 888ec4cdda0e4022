"""Linear layers over dense and bit-plane weights: GEMV for one row, tiled GEMM for more, experts.

FORMAT is `PlaneFormat.index` (0: dense); HIGH its extra bits; OFFSET what a code of zero stands for.
A GATED weight has its gate rows first and its up rows after them, N each; the result is
`act(gate) * up`. With PDL a kernel starts while its predecessor ends and waits where it first reads
what that one wrote (programmatic dependent launch, NVIDIA only).
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait


@triton.jit
def _code_floats(words, high, i: tl.constexpr, w, HIGH: tl.constexpr, OFFSET: tl.constexpr):
    """Codes of element 4 i + w of blocks as float32; `high` are the extra bits' words."""
    if HIGH == 0:
        # nibbles go into a mantissa in place: value = 2^(23 - p) + code, so one `or`, one subtraction
        if i < 5:
            p: tl.constexpr = 4 * i
            masked = words & (15 << p)
        else:
            p: tl.constexpr = 4 * i - 12
            masked = (words >> 12) & (15 << p)
        top: tl.constexpr = (150 - p) << 23
        value = (masked | top).to(tl.float32, bitcast=True)
        base: tl.constexpr = (1 << (23 - p)) + OFFSET
        return value - base
    code = (words >> (4 * i)) & 15
    if HIGH == 1:
        code = code | (((high >> (4 * i + w)) & 1) << 4)
    else:
        code = code | (((high >> (2 * (4 * (i % 4) + w))) & 3) << 4)
    return (code - OFFSET).to(tl.float32)


@triton.jit
def _block_scales(scales, supers, row, b, mask, KB, half: tl.constexpr, FORMAT: tl.constexpr):
    """(scale, min) of 32-blocks `b` of rows; `half` picks the 16 elements that FORMAT 4 scales."""
    if FORMAT == 1 or FORMAT == 5:
        s = tl.load(scales + row * KB + b, mask=mask, other=0.0).to(tl.float32)
        return s, s * 0.0
    if FORMAT == 2:
        at = scales + (row * KB + b) * 2
        s = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        return s, -tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
    if FORMAT == 3:
        at = scales + (row * KB + b) * 2
        top = supers + (row * (KB // 8) + b // 8) * 2
        s = tl.load(at, mask=mask, other=0).to(tl.float32)
        low = tl.load(at + 1, mask=mask, other=0).to(tl.float32)
        d = tl.load(top, mask=mask, other=0.0).to(tl.float32)
        dmin = tl.load(top + 1, mask=mask, other=0.0).to(tl.float32)
        return s * d, low * dmin
    s = tl.load(scales + (row * KB + b) * 2 + half, mask=mask, other=0).to(tl.float32)
    d = tl.load(supers + row * (KB // 8) + b // 8, mask=mask, other=0.0).to(tl.float32)
    return s * d, s * 0.0


@triton.jit
def _plane_products(
    acc,
    x,
    codes,
    high,
    scales,
    supers,
    row,
    row_mask,
    b,
    KB,
    BN: tl.constexpr,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """acc [BN, NB] plus the products of blocks b of rows with x."""
    inside = b < KB
    mask2 = row_mask[:, None] & inside[None, :]
    w = tl.arange(0, 4)
    at = (row[:, None, None] * KB + b[None, :, None]) * 4 + w[None, None, :]
    words = tl.load(codes + at, mask=mask2[:, :, None], other=0)
    part = tl.zeros([BN, NB, 4], tl.float32)
    xsum = tl.zeros([NB, 4], tl.float32)
    upper = words
    if HIGH == 1:
        upper = tl.load(high + row[:, None] * KB + b[None, :], mask=mask2, other=0)[:, :, None]
    for i in tl.static_range(8):
        if HIGH == 2 and i % 4 == 0:
            upper = tl.load(
                high + (row[:, None] * KB + b[None, :]) * 2 + i // 4, mask=mask2, other=0
            )[:, :, None]
        xi = tl.load(x + b[:, None] * 32 + 4 * i + w[None, :], mask=inside[:, None], other=0.0).to(
            tl.float32
        )
        part += _code_floats(words, upper, i, w[None, None, :], HIGH, OFFSET) * xi[None, :, :]
        xsum += xi
        if FORMAT == 4 and i == 3:
            s, _ = _block_scales(scales, supers, row[:, None], b[None, :], mask2, KB, 0, FORMAT)
            acc += s * tl.sum(part, 2)
            part = tl.zeros([BN, NB, 4], tl.float32)
    s, low = _block_scales(scales, supers, row[:, None], b[None, :], mask2, KB, 1, FORMAT)
    acc += s * tl.sum(part, 2)
    if FORMAT == 2 or FORMAT == 3:
        acc -= low * tl.sum(xsum, 1)[None, :]
    return acc


@triton.jit
def _byte_products(
    acc,
    x,
    codes,
    scales,
    row,
    row_mask,
    b,
    KB,
):
    inside = b < KB
    mask2 = row_mask[:, None] & inside[None, :]
    e = tl.arange(0, 32)
    at = (row[:, None, None] * KB + b[None, :, None]) * 32 + e[None, None, :]
    q = tl.load(codes + at, mask=mask2[:, :, None], other=0).to(tl.float32)
    xi = tl.load(x + b[:, None] * 32 + e[None, :], mask=inside[:, None], other=0.0)
    s = tl.load(scales + row[:, None] * KB + b[None, :], mask=mask2, other=0.0)
    return acc + s.to(tl.float32) * tl.sum(q * xi.to(tl.float32)[None, :, :], 2)


@triton.jit
def plane_gemv(
    x,
    codes,
    high,
    scales,
    supers,
    bias,
    y,
    N,
    KB,
    BN: tl.constexpr,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [N] = W x + bias for one row x [K]; NB blocks of 32 at a time."""
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    row = n.to(tl.int64)
    acc = tl.zeros([BN, NB], tl.float32)
    up = tl.zeros([BN, NB], tl.float32)
    pdl_wait(PDL)
    for b0 in range(0, KB, NB):
        b = b0 + tl.arange(0, NB)
        if FORMAT == 5:
            acc = _byte_products(acc, x, codes, scales, row, inside, b, KB)
            if GATED:
                up = _byte_products(up, x, codes, scales, row + N, inside, b, KB)
        else:
            acc = _plane_products(
                acc, x, codes, high, scales, supers, row, inside, b, KB,
                BN, NB, FORMAT, HIGH, OFFSET,
            )  # fmt: skip
            if GATED:
                up = _plane_products(
                    up, x, codes, high, scales, supers, row + N, inside, b, KB,
                    BN, NB, FORMAT, HIGH, OFFSET,
                )  # fmt: skip
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, tl.sum(up, 1), GATED)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def dense_gemv(
    x,
    weight,
    bias,
    y,
    N,
    K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [N] = W x + bias for one row x [K] and W [N, K]; weights pass through, evicted first."""
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    k = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    pdl_wait(PDL)
    for k0 in range(0, K, BK):
        live = k0 + k < K
        mask = inside[:, None] & live[None, :]
        xk = tl.load(x + k0 + k, mask=live, other=0.0).to(tl.float32)[None, :]
        w = tl.load(at + k0, mask=mask, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * xk
        if GATED:
            u = tl.load(
                at + N.to(tl.int64) * K + k0, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            up += u.to(tl.float32) * xk
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, tl.sum(up, 1), GATED)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def dense_gemm(
    x,
    weight,
    bias,
    y,
    row_ids,
    block_expert,
    M,
    N,
    K,
    x_stride,
    y_stride,
    top_k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, N] = x W^T + bias, float32 accumulation. With EXPERTS see `expert_rows`."""
    pdl_launch(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pdl_wait(PDL)
    source, m, expert = expert_rows(m, M, row_ids, block_expert, top_k, EXPERTS)
    if expert < 0:
        return
    xp = x + source.to(tl.int64)[:, None] * x_stride + k[None, :]
    wp = weight + (expert * N + n.to(tl.int64))[None, :] * K + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        live = k0 + k < K
        xt = tl.load(xp + k0, mask=(m < M)[:, None] & live[None, :], other=0.0)
        wt = tl.load(wp + k0, mask=(n < N)[None, :] & live[:, None], other=0.0)
        acc = tl.dot(xt, wt, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def expert_rows(m, M, row_ids, block_expert, top_k, EXPERTS: tl.constexpr):
    """(row of x, row of y, expert) per tile row; a tile's rows belong to one expert.

    `row_ids` lists (token, choice) pairs as token * top_k + choice, padded with values >= M;
    expert -1 marks a block that nobody uses.
    """
    if EXPERTS:
        expert = tl.load(block_expert + tl.program_id(1)).to(tl.int64)
        pair = tl.load(row_ids + m)
        return tl.where(pair < M, pair // top_k, 0), pair, expert
    expert = tl.program_id(1).to(tl.int64) * 0
    return tl.where(m < M, m, 0), m, expert


@triton.jit
def plane_gemm(
    x,
    codes,
    high,
    scales,
    supers,
    bias,
    y,
    row_ids,
    block_expert,
    M,
    N,
    KB,
    x_stride,
    y_stride,
    top_k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `dense_gemm` over bit planes, dequantised to the type of x, NB blocks of 32 at a time."""
    pdl_launch(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    pdl_wait(PDL)
    source, m, expert = expert_rows(m, M, row_ids, block_expert, top_k, EXPERTS)
    if expert < 0:
        return
    j = tl.arange(0, NB * 4)
    row = (expert * N + tl.where(n < N, n, 0).to(tl.int64))[None, :]
    xrow = x + source.to(tl.int64)[:, None] * x_stride
    dtype = x.dtype.element_ty
    acc = tl.zeros([BM, BN], tl.float32)
    for b0 in range(0, KB, NB):
        b = b0 + j // 4
        inside = b < KB
        mask = inside[:, None] & (n < N)[None, :]
        x_mask = inside[None, :] & (m < M)[:, None]
        xb = xrow + (b * 32 + j % 4)[None, :]
        s, low = _block_scales(scales, supers, row, b[:, None], mask, KB, 0, FORMAT)
        if FORMAT == 5:
            for i in tl.static_range(8):
                q = tl.load(
                    codes + (row * KB + b[:, None]) * 32 + (j % 4)[:, None] + 4 * i,
                    mask=mask,
                    other=0,
                )
                xt = tl.load(xb + 4 * i, mask=x_mask, other=0.0)
                acc = tl.dot(xt, (q.to(tl.float32) * s).to(dtype), acc, input_precision="ieee")
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
                    s, low = _block_scales(scales, supers, row, b[:, None], mask, KB, 1, FORMAT)
                q = _code_floats(words, upper, i, (j % 4)[:, None], HIGH, OFFSET)
                value = q * s
                if FORMAT == 2 or FORMAT == 3:
                    value -= low
                xt = tl.load(xb + 4 * i, mask=x_mask, other=0.0)
                acc = tl.dot(xt, value.to(dtype), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = y + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def plane_rows(
    ids,
    codes,
    high,
    scales,
    supers,
    y,
    KB,
    factor,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """y [T, K] = rows `ids` of the weight, times `factor`; grid (T, blocks of NB)."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + t).to(tl.int64)
    j = tl.arange(0, NB * 4)
    b = tl.program_id(1) * NB + j // 4
    mask = b < KB
    s, low = _block_scales(scales, supers, row, b, mask, KB, 0, FORMAT)
    words = j
    if FORMAT != 5:
        words = tl.load(codes + (row * KB + b) * 4 + j % 4, mask=mask, other=0)
    upper = words
    if HIGH == 1:
        upper = tl.load(high + row * KB + b, mask=mask, other=0)
    for i in tl.static_range(8):
        if HIGH == 2 and i % 4 == 0:
            upper = tl.load(high + (row * KB + b) * 2 + i // 4, mask=mask, other=0)
        if FORMAT == 4 and i == 4:
            s, low = _block_scales(scales, supers, row, b, mask, KB, 1, FORMAT)
        k = b * 32 + 4 * i + j % 4
        if FORMAT == 5:
            q = tl.load(codes + row * KB * 32 + k, mask=mask, other=0).to(tl.float32)
        else:
            q = _code_floats(words, upper, i, j % 4, HIGH, OFFSET)
        value = q * s
        if FORMAT == 2 or FORMAT == 3:
            value -= low
        tl.store(y + t * KB * 32 + k, (value * factor).to(y.dtype.element_ty), mask=mask)
