# ruff: noqa: E501, ANN001, ANN201, N803, PLR0913, PLR0917, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Dense linear layers of a decode step: one row by multiply-add, a few rows on matrix units.

Such a layer is a stream of weights. With PDL (programmatic dependent launch, NVIDIA only) a kernel
starts while its predecessor ends and waits where it first reads what that one wrote; a GEMV has its
first weights on their way by then. A GATED weight has its gate rows first and
its up rows after them, N each; the result is `act(gate) * up`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait


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
    """Y [N] = W x + bias for one row x [K] and W [N, K]; weights pass through, evicted first.

    Loads run one tile ahead.
    """
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = (n < N)[:, None]
    k = tl.arange(0, BK)
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    high = tl.cast(N, tl.int64) * K  # an N of 1 is a constant, not a tensor
    w = tl.load(at, mask=inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(
            at + high, mask=inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
        )
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    pdl_wait(PDL)
    for k0 in range(0, K, BK):
        after = inside & (k0 + BK + k < K)[None, :]
        next_w = tl.load(at + (k0 + BK), mask=after, other=0.0, eviction_policy="evict_first")
        xk = tl.load(x + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * xk
        w = next_w
        if GATED:
            next_u = tl.load(
                at + high + (k0 + BK), mask=after, other=0.0, eviction_policy="evict_first"
            )
            up += u.to(tl.float32) * xk
            u = next_u
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, tl.sum(up, 1), GATED)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def weight_tile(weight, n, k, N, K, EVEN: tl.constexpr):
    """W [BN, BK] at rows n and columns k."""
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(
        at,
        mask=(n < N)[:, None] & (k < K)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def dense_skinny(
    x,
    weight,
    bias,
    y,
    partial,
    joins,
    M,
    N,
    K,
    x_stride,
    y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y [M, N] = x W^T + bias for M <= BM rows; grid (tiles of N, PARTS of K).

    The weights are the first factor: they go from shared memory straight into the matrix units.
    Of the PARTS programs of a tile the last to arrive at `joins` adds what all left in `partial`
    [tiles, PARTS, BN, BM], in order, and leaves the counter at 0. EVEN: no tile is cut off.
    """
    pdl_launch(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    depth = tl.cdiv(tl.cdiv(K, BK), PARTS) * BK
    begin = part * depth
    end = tl.minimum(begin + depth, K)
    pdl_wait(PDL)
    source = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        if EVEN:
            xt = tl.load(source + k[:, None])
        else:
            xt = tl.load(source + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(weight_tile(weight, n, k, N, K, EVEN), xt, acc, input_precision="ieee")
        if GATED:
            wt = weight_tile(weight + N.to(tl.int64) * K, n, k, N, K, EVEN)
            up = tl.dot(wt, xt, up, input_precision="ieee")
    last = True
    if PARTS > 1:
        own = partial + tile * (PARTS * BN * BM)
        at = tl.arange(0, BN)[:, None] * BM + m[None, :]
        tl.store(own + part * (BN * BM) + at, acc)
        # all threads have stored before one of them says so
        tl.debug_barrier()
        last = tl.atomic_add(joins + tile, 1, sem="acq_rel") == PARTS - 1
        if last:
            acc = tl.zeros([BN, BM], tl.float32)
            for p in tl.static_range(PARTS):
                # past the first-level cache: it may hold what lay here before
                acc += tl.load(own + p * (BN * BM) + at, cache_modifier=".cg")
            tl.store(joins + tile, 0)
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = gated(acc, up, GATED)
        to = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
