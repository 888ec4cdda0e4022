# ruff: noqa: E501, ANN001, ANN201, N803, PLR0913, PLR0917, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Dense linear layers of one row, by multiply-add.

Such a layer is a stream of weights, and what surrounds it costs launches, not bytes; so its edges
are part of it. A product's results may be gated, added to the residual stream, or be heads that are
rotated and stored. RMSNorm needs a row's mean square before any result: whoever writes the stream
leaves it times the norm's weight beside the squares of its tile, and the product after it
divides its sums once all are known. With PDL (programmatic dependent launch, NVIDIA only) a kernel starts
while its predecessor ends: its first weights are on their way when it waits for what that one wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait, sin_cos


@triton.jit
def weight_tile(weight, n, k, inside, K, EVEN: tl.constexpr):
    """W [BN, BK] at rows n and columns k; weights pass through the caches, evicted first."""
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(
        at, mask=inside[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def inputs(at, k, K, EVEN: tl.constexpr):
    """What lies `at` columns k of x."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=k < K, other=0.0)


@triton.jit
def sums(
    x, weight, w, u, first, second, inside, K,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """([BN], [BN]): products of the row x with rows `first` and, of a PAIR, `second`.

    w and u are their first tiles; loads run one tile ahead.
    """
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    k = tl.arange(0, BK)
    xk = inputs(x + k, k, K, EVEN)
    for k0 in range(0, K, BK):
        # a mask rather than a last round apart: that takes a third more registers
        k = k0 + BK + tl.arange(0, BK)
        more = inside & (k0 + BK < K)
        next_w = weight_tile(weight, first, k, more, K, False)
        next_x = tl.load(x + k, mask=k < K, other=0.0)
        acc += w.to(tl.float32) * xk.to(tl.float32)[None, :]
        w = next_w
        if PAIR:
            next_u = weight_tile(weight, second, k, more, K, False)
            up += u.to(tl.float32) * xk.to(tl.float32)[None, :]
            u = next_u
        xk = next_x
    return tl.sum(acc, 1), tl.sum(up, 1)


@triton.jit
def norm_factor(squares, tiles, K, eps, NORMED: tl.constexpr):
    """What sums over a row are due whose RMSNorm lacks the division; `squares` [tiles]."""
    factor = 1.0
    if NORMED:
        t = tl.arange(0, 1024)
        found = tl.load(squares + t, mask=t < tiles, other=0.0)
        for t0 in range(1024, tiles, 1024):
            found += tl.load(squares + t0 + t, mask=t0 + t < tiles, other=0.0)
        factor = 1.0 / tl.sqrt(tl.sum(found, 0) / K + eps)
    return factor


@triton.jit
def with_bias(acc, bias, n, inside, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def dense(
    x, weight, bias, y, squares, tiles, eps, N, K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    NORMED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Y [N] = W x + bias of one row x [K]; grid: tiles of N.

    A GATED weight has N gate rows, then N up rows; the result is `act(gate) * up`. EVEN: no tile is
    cut off. NORMED: x lacks the division of its RMSNorm, see `norm_factor`.
    """
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    k = tl.arange(0, BK)
    w = weight_tile(weight, n, k, inside, K, EVEN)
    u = w
    if GATED:
        u = weight_tile(weight, n + N, k, inside, K, EVEN)
    pdl_wait(PDL)
    acc, up = sums(x, weight, w, u, n, n + N, inside, K, BN, BK, EVEN, GATED > 0)
    # asked for earlier, its registers would cost more than the wait does
    factor = norm_factor(squares, tiles, K, eps, NORMED)
    acc = with_bias(acc * factor, bias, n, inside, BIAS)
    if GATED:
        acc = gated(acc, up * factor, GATED)
    tl.store(y + n, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def dense_stream(
    x, weight, bias, residual, norm, stream, weighted, squares, N, K,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`stream` [N] = residual + W x + bias; `weighted` = stream * norm; grid: tiles of N.

    `squares` [tiles] are sums over a tile's part of the stream.
    """
    pdl_launch(PDL)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    inside = n < N
    w = weight_tile(weight, n, tl.arange(0, BK), inside, K, EVEN)
    g = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    before = tl.load(residual + n, mask=inside, other=0.0)
    acc, _ = sums(x, weight, w, w, n, n, inside, K, BN, BK, EVEN, False)
    acc = with_bias(acc, bias, n, inside, BIAS) + before.to(tl.float32)
    rounded = acc.to(stream.dtype.element_ty)
    tl.store(stream + n, rounded, mask=inside)
    v = rounded.to(tl.float32)
    tl.store(weighted + n, (v * g).to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + tile, tl.sum(v * v, 0))


@triton.jit
def dense_heads(
    x, weight, bias, q, cache, positions, slots, turns, factor, squares, tiles, eps, K,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    NEOX: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    NORMED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Q, K and V of one row x [K]: Q and K rotated, Q to q [HQ D], K and V to the cache.

    `qkv_rope_store` of a product that is never written. Grid: tiles of BN pairs; a tile lies within
    a head, the two elements that a turn mixes in the two sums of a pair.
    """
    pdl_launch(PDL)
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * BN
    head = pair // HALF
    p = pair % HALF + tl.arange(0, BN)
    d = p if NEOX else 2 * p
    apart: tl.constexpr = HALF if NEOX else 1
    n = head * D + d
    inside = tl.full([BN], 1, tl.int1)
    k = tl.arange(0, BK)
    w = weight_tile(weight, n, k, inside, K, EVEN)
    u = weight_tile(weight, n + apart, k, inside, K, EVEN)
    # position and slot come from the host, long before the previous kernel
    slot = tl.load(slots)
    position = tl.load(positions).to(tl.float64)
    turned = head < HQ + HKV
    angle = tl.where(turned, tl.load(turns + p), 0.0)
    pdl_wait(PDL)
    a, b = sums(x, weight, w, u, n, n + apart, inside, K, BN, BK, EVEN, True)
    division = norm_factor(squares, tiles, K, eps, NORMED)
    a = with_bias(a * division, bias, n, inside, BIAS)
    b = with_bias(b * division, bias, n + apart, inside, BIAS)
    sin, cos = sin_cos(position * angle)
    scale = tl.where(turned, factor, 1.0)
    sin *= scale
    cos *= scale
    one = a * cos - b * sin
    two = b * cos + a * sin
    is_q = inside & (head < HQ)
    tl.store(q + n, one.to(q.dtype.element_ty), mask=is_q)
    tl.store(q + n + apart, two.to(q.dtype.element_ty), mask=is_q)
    # V heads follow K heads in a block, as they do in the weight
    row = ((slot // PAGE) * (2 * HKV) + head - HQ) * PAGE + slot % PAGE
    to_kv = cache + row * D + d
    stored = inside & (slot >= 0) & (head >= HQ)
    tl.store(to_kv, one.to(cache.dtype.element_ty), mask=stored)
    tl.store(to_kv + apart, two.to(cache.dtype.element_ty), mask=stored)
