# ruff: noqa: E501, ANN001, ANN201, N803, PLR0913, PLR0917, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Dense linear layers of a decode step: one row by multiply-add, a few rows on matrix units.

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
def warmed(weight, n, begin, end, K, BN: tl.constexpr):
    """Ask the second-level cache for rows n [BN] of W, columns begin to end, line by line."""
    WIDE: tl.constexpr = 256 // BN if BN < 256 else 1
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, WIDE) * LINE
    row = weight + n.to(tl.int64)[:, None] * K
    for k0 in range(begin, end, WIDE * LINE):
        k = tl.minimum(k0 + lines, end - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(row + k[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def inputs(at, k, K, EVEN: tl.constexpr):
    """What lies `at` columns k of x."""
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=k < K, other=0.0)


@triton.jit
def share_of(K, BK: tl.constexpr, PARTS: tl.constexpr):
    """(begin, end) of this program's part of K."""
    begin = 0
    end = K
    if PARTS > 1:
        depth = tl.cdiv(tl.cdiv(K, BK), PARTS) * BK
        begin = tl.program_id(1) * depth
        end = tl.minimum(begin + depth, K)
    return begin, end


@triton.jit
def one_row(
    x, weight, w, u, first, second, inside, begin, end, K,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """([BN], [BN]): products of the row x with rows `first` and, of a PAIR, `second`.

    w and u are their first tiles; loads run one tile ahead.
    """
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    k = begin + tl.arange(0, BK)
    xk = inputs(x + k, k, end, EVEN)
    for k0 in range(begin, end, BK):
        # a mask rather than a last round apart: that takes a third more registers
        k = k0 + BK + tl.arange(0, BK)
        more = inside & (k0 + BK < end)
        next_w = weight_tile(weight, first, k, more, K, False)
        next_x = tl.load(x + k, mask=k < end, other=0.0)
        acc += w.to(tl.float32) * xk.to(tl.float32)[None, :]
        w = next_w
        if PAIR:
            next_u = weight_tile(weight, second, k, more, K, False)
            up += u.to(tl.float32) * xk.to(tl.float32)[None, :]
            u = next_u
        xk = next_x
    return tl.sum(acc, 1), tl.sum(up, 1)


@triton.jit
def few_rows(
    x, weight, w, u, first, second, inside, begin, end, M, K, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """([BN, BM], [BN, BM]): as `one_row` for M rows of x.

    The weights are the first factor: they go from shared memory straight into the matrix units.
    """
    m = tl.minimum(tl.arange(0, BM), M - 1)
    source = x + m.to(tl.int64)[None, :] * x_stride
    k = begin + tl.arange(0, BK)
    xt = inputs(source + k[:, None], k[:, None], K, EVEN)
    acc = tl.dot(w, xt, input_precision="ieee")
    up = acc
    if PAIR:
        up = tl.dot(u, xt, input_precision="ieee")
    for k0 in range(begin + BK, end, BK):
        k = k0 + tl.arange(0, BK)
        xt = inputs(source + k[:, None], k[:, None], K, EVEN)
        w = weight_tile(weight, first, k, inside, K, EVEN)
        acc = tl.dot(w, xt, acc, input_precision="ieee")
        if PAIR:
            u = weight_tile(weight, second, k, inside, K, EVEN)
            up = tl.dot(u, xt, up, input_precision="ieee")
    return acc, up


@triton.jit
def sums(
    x, weight, w, u, first, second, inside, begin, end, M, K, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """([BN, BM], [BN, BM]): this program's part of the products; one row of x where BM is 1."""
    if BM == 1:
        acc, up = one_row(x, weight, w, u, first, second, inside, begin, end, K, BN, BK, EVEN, PAIR)
        acc = acc[:, None]
        up = up[:, None]
    else:
        acc, up = few_rows(
            x, weight, w, u, first, second, inside, begin, end, M, K, x_stride,
            BM, BN, BK, EVEN, PAIR,
        )  # fmt: skip
    return acc, up


@triton.jit
def joined(
    acc, up, partial, joins,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """(whole sums, whole sums, whether they are whole).

    Of the PARTS programs of a tile the last to arrive at `joins` adds what all left in `partial`
    [tiles, PARTS, 1 or 2, BN, BM], in order, and leaves the counter at 0.
    """
    tile = tl.program_id(0)
    size: tl.constexpr = BN * BM * (2 if PAIR else 1)
    own = partial + tile * (PARTS * size)
    at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
    mine = own + tl.program_id(1) * size + at
    tl.store(mine, acc)
    if PAIR:
        tl.store(mine + BN * BM, up)
    # all threads have stored before one of them says so
    tl.debug_barrier()
    last = tl.atomic_add(joins + tile, 1, sem="acq_rel") == PARTS - 1
    if last:
        acc = tl.zeros([BN, BM], tl.float32)
        up = tl.zeros([BN, BM], tl.float32)
        for p in tl.static_range(PARTS):
            # past the first-level cache: it may hold what lay here before
            acc += tl.load(own + p * size + at, cache_modifier=".cg")
            if PAIR:
                up += tl.load(own + p * size + BN * BM + at, cache_modifier=".cg")
        tl.store(joins + tile, 0)
    return acc, up, last


@triton.jit
def squares_of(squares, tiles, M, BM: tl.constexpr):
    """[CHUNK, BM]: squares [tiles, M] folded, to be summed when the products are there."""
    CHUNK: tl.constexpr = 1024 if BM == 1 else 64
    t = tl.arange(0, CHUNK)[:, None]
    m = tl.arange(0, BM)[None, :]
    found = tl.load(squares + t * M + m, mask=(t < tiles) & (m < M), other=0.0)
    for t0 in range(CHUNK, tiles, CHUNK):
        more = t0 + t
        found += tl.load(squares + more * M + m, mask=(more < tiles) & (m < M), other=0.0)
    return found


@triton.jit
def divided(acc, squares, K, eps, NORMED: tl.constexpr):
    """Sums [BN, BM] over rows whose RMSNorm lacks the division."""
    if NORMED:
        acc *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)[None, :]
    return acc


@triton.jit
def with_bias(acc, bias, n, inside, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def dense(
    x, weight, bias, y, squares, tiles, eps, partial, joins, M, N, K, x_stride, y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    NORMED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Y [M, N] = x W^T + bias for M <= BM rows; grid (tiles of N, PARTS of K).

    A GATED weight has N gate rows, then N up rows; the result is `act(gate) * up`. EVEN: no tile is
    cut off. NORMED: x lacks the division of its RMSNorm, see `squares_of`.
    """
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    second = n + N
    begin, end = share_of(K, BK, PARTS)
    k = begin + tl.arange(0, BK)
    w = weight_tile(weight, n, k, inside, K, EVEN)
    u = w
    if GATED:
        u = weight_tile(weight, second, k, inside, K, EVEN)
    pdl_wait(PDL)
    squared = 0.0
    if NORMED and BM > 1:
        squared = squares_of(squares, tiles, M, BM)
    acc, up = sums(
        x, weight, w, u, n, second, inside, begin, end, M, K, x_stride,
        BM, BN, BK, EVEN, GATED > 0,
    )  # fmt: skip
    # early its registers would cost one row more than waiting does
    if NORMED and BM == 1:
        squared = squares_of(squares, tiles, M, BM)
    last = True
    if PARTS > 1:
        acc, up, last = joined(acc, up, partial, joins, BM, BN, PARTS, GATED > 0)
    if last:
        acc = with_bias(divided(acc, squared, K, eps, NORMED), bias, n, inside, BIAS)
        if GATED:
            acc = gated(acc, divided(up, squared, K, eps, NORMED), GATED)
        m = tl.arange(0, BM)
        to = y + m.to(tl.int64)[None, :] * y_stride + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & inside[:, None])


@triton.jit
def dense_stream(
    x, weight, bias, residual, norm, stream, weighted, squares, partial, joins, M, N, K, x_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    WARM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`stream` [M, N] = residual + x W^T + bias; `weighted` = stream * norm; grid as `dense`.

    `squares` [tiles of N, M] are sums over a tile's part of a row of the stream.
    """
    pdl_launch(PDL)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    inside = n < N
    mask = inside[:, None] & (m < M)[None, :]
    begin, end = share_of(K, BK, PARTS)
    w = weight_tile(weight, n, begin + tl.arange(0, BK), inside, K, EVEN)
    if WARM:
        warmed(weight, tl.minimum(n, N - 1), begin, end, K, BN)
    g = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    pdl_wait(PDL)
    before = tl.load(residual + at, mask=mask, other=0.0)
    acc, up = sums(
        x, weight, w, w, n, n, inside, begin, end, M, K, x_stride, BM, BN, BK, EVEN, False
    )
    last = True
    if PARTS > 1:
        acc, up, last = joined(acc, up, partial, joins, BM, BN, PARTS, False)
    if last:
        acc = with_bias(acc, bias, n, inside, BIAS) + before.to(tl.float32)
        rounded = acc.to(stream.dtype.element_ty)
        tl.store(stream + at, rounded, mask=mask)
        v = rounded.to(tl.float32)
        tl.store(weighted + at, (v * g).to(weighted.dtype.element_ty), mask=mask)
        tl.store(squares + tile * M + m, tl.sum(v * v, 0), mask=m < M)


@triton.jit
def dense_heads(
    x, weight, bias, q, cache, positions, slots, turns, factor,
    squares, tiles, eps, partial, joins, M, K, x_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    NEOX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    NORMED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Q, K and V of x [M, K]: Q and K rotated, Q to q [M, HQ D], K and V to the cache.

    `qkv_rope_store` of a product that is never written. Grid (tiles of BN pairs, PARTS of K); a
    tile lies within a head, the two elements that a turn mixes in the two sums of a pair.
    """
    pdl_launch(PDL)
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * BN
    head = pair // HALF
    p = pair % HALF + tl.arange(0, BN)
    d = p if NEOX else 2 * p
    apart: tl.constexpr = HALF if NEOX else 1
    n = head * D + d
    m = tl.arange(0, BM)
    inside = tl.full([BN], 1, tl.int1)
    begin, end = share_of(K, BK, PARTS)
    k = begin + tl.arange(0, BK)
    w = weight_tile(weight, n, k, inside, K, EVEN)
    u = weight_tile(weight, n + apart, k, inside, K, EVEN)
    # positions and slots come from the host, long before the previous kernel
    slot = tl.load(slots + m, mask=m < M, other=-1)
    position = tl.load(positions + m, mask=m < M, other=0).to(tl.float64)
    angle = tl.where(head < HQ + HKV, tl.load(turns + p), 0.0)[:, None]
    pdl_wait(PDL)
    squared = 0.0
    if NORMED and BM > 1:
        squared = squares_of(squares, tiles, M, BM)
    acc, up = sums(
        x, weight, w, u, n, n + apart, inside, begin, end, M, K, x_stride,
        BM, BN, BK, EVEN, True,
    )  # fmt: skip
    if NORMED and BM == 1:
        squared = squares_of(squares, tiles, M, BM)
    last = True
    if PARTS > 1:
        acc, up, last = joined(acc, up, partial, joins, BM, BN, PARTS, True)
    if last:
        a = with_bias(divided(acc, squared, K, eps, NORMED), bias, n, inside, BIAS)
        b = with_bias(divided(up, squared, K, eps, NORMED), bias, n + apart, inside, BIAS)
        sin, cos = sin_cos(position[None, :] * angle)
        scale = tl.where(head < HQ + HKV, factor, 1.0)
        sin *= scale
        cos *= scale
        one = a * cos - b * sin
        two = b * cos + a * sin
        to_q = q + m.to(tl.int64)[None, :] * (HQ * D) + n[:, None]
        is_q = (m < M)[None, :] & (head < HQ) & inside[:, None]
        tl.store(to_q, one.to(q.dtype.element_ty), mask=is_q)
        tl.store(to_q + apart, two.to(q.dtype.element_ty), mask=is_q)
        # V heads follow K heads in a block, as they do in the weight
        row = ((slot // PAGE) * (2 * HKV) + head - HQ) * PAGE + slot % PAGE
        to_kv = cache + row[None, :] * D + d[:, None]
        stored = (slot >= 0)[None, :] & (head >= HQ) & inside[:, None]
        tl.store(to_kv, one.to(cache.dtype.element_ty), mask=stored)
        tl.store(to_kv + apart, two.to(cache.dtype.element_ty), mask=stored)
