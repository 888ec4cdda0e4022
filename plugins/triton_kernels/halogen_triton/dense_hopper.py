# ruff: noqa: E501, ANN001, ANN201, ANN202, C901, N803, N806, PLR0913, PLR0915, PLR0917
# Triton's language: constants in capitals, pointers without types.
"""Dense linear layers of few rows on Hopper, in Gluon: weights stream through a ring in shared memory.

A layer of a decode step is a stream of weights. The copy engine (TMA) keeps whole stages of it under
way, whatever the threads do; the weights are the first factor of `wgmma` where they lie, the rows of x
the second. A stage is asked for again as soon as its product is done. With PDL a program has its
whole ring under way before it waits for the kernel that makes x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halogen_triton.pointwise_kernels import gated

# names that differ between Triton 3.6 and 3.9
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_gated = gluon.jit(gated.fn)


def boxes(matrix, rows, columns):
    """A descriptor of a 16-bit matrix [R, C], read in boxes of rows by columns; zeros outside."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout
    )


@gluon.jit
def _joined(acc, up, part, parts, partial, joins, SIZE: gl.constexpr, PAIR: gl.constexpr):
    """(whole sums, whole sums, whether they are whole) of a tile, of which `part` is this program's.

    The last part to arrive at the counter `joins` adds what all left at `partial` [parts, 1 or 2, BN,
    BM], in order, and leaves the counter at 0.
    """
    whole: gl.constexpr = SIZE * (2 if PAIR else 1)
    gl.store(partial + part * whole, acc)
    if PAIR:
        gl.store(partial + part * whole + SIZE, up)
    # all threads have stored before one of them says so
    _barrier()
    last = gl.atomic_add(joins, 1, sem="acq_rel") == parts - 1
    if last:
        acc = gl.zeros_like(acc)
        up = gl.zeros_like(up)
        for p in range(parts):
            # past the first-level cache: it may hold what lay here before
            acc += gl.load(partial + p * whole, cache_modifier=".cg")
            if PAIR:
                up += gl.load(partial + p * whole + SIZE, cache_modifier=".cg")
        gl.store(joins, 0)
    return acc, up, last


@gluon.jit
def _share(whole, parts, chunks, SPLIT: gl.constexpr):
    """(tile, part of it, its first chunk, its chunks) of this program."""
    tile, part, first, count = gl.program_id(0), 0, 0, chunks
    if SPLIT:
        over = tile - whole
        if over >= 0:
            depth = gl.cdiv(chunks, parts)
            part = over % parts
            tile = whole + over // parts
            first = part * depth
            count = gl.minimum(depth, chunks - first)
    return tile, part, first, count


@gluon.jit
def _fetch_weights(w, n, k, N, full, w_s, u_s, there, LOAD: gl.constexpr, PAIR: gl.constexpr):
    """Ask for a chunk of W, and announce all that its stage will hold."""
    mbarrier.expect(full, LOAD, pred=there)
    _fetch(w, [n, k], full, w_s, pred=there)
    if PAIR:
        _fetch(w, [n + N, k], full, u_s, pred=there)


@gluon.jit
def _products(
    w, x, n, first, count, N, w_s, u_s, x_s, full,
    STAGES: gl.constexpr, LOAD: gl.constexpr, PAIR: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """([BN, BM], [BN, BM]): products of rows n and, of a PAIR, n + N over `count` chunks.

    The ring's first stages have been asked for.
    """
    BM: gl.constexpr = x.block_shape[0]
    BN: gl.constexpr = w.block_shape[0]
    BK: gl.constexpr = w.block_shape[1]
    acc = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, L))
    up = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, L))
    for i in range(count):
        stage, old = i % STAGES, (i + STAGES - 1) % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if PAIR:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        # every warp is done with the stage before: it is asked for again
        _barrier()
        k = (first + i + STAGES - 1) * BK
        again = (i > 0) & (i + STAGES - 1 < count)
        _fetch_weights(
            w, n, k, N, full.index(old), w_s.index(old), u_s.index(old), again, LOAD, PAIR
        )
        _fetch(x, [0, k], full.index(old), x_s.index(old), pred=again)
        rows = x_s.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_s.index(stage), rows, acc, is_async=True)
        if PAIR:
            up = warpgroup_mma(u_s.index(stage), rows, up, is_async=True)
    if PAIR:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        up = acc
    return acc, up


@gluon.jit(do_not_specialize=["M", "whole", "parts"])
def few_rows(
    w, x, bias, y, partial, joins, M, N, K, y_stride, whole, parts,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Y [M, N] = x W^T + bias for M <= BM rows; one program for each of `whole` tiles of N, then
    `parts` for each.

    `w` and `x` describe the matrices in boxes of [BN, BK] and [BM, BK]. A GATED weight has N gate rows,
    then N up rows; the result is `act(gate) * up`. With SPLIT there are tiles of more parts than one, of
    which the last to arrive adds up all; no part is empty.
    """
    BM: gl.constexpr = x.block_shape[0]
    BN: gl.constexpr = w.block_shape[0]
    BK: gl.constexpr = w.block_shape[1]
    PAIR: gl.constexpr = GATED > 0
    LOAD: gl.constexpr = (BN * (2 if PAIR else 1) + BM) * BK * 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    if PDL:
        gdc_launch_dependents()
    tile, part, first, count = _share(whole, parts, gl.cdiv(K, BK), SPLIT)
    w_s = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    u_s = w_s
    if PAIR:
        u_s = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    _barrier()
    for i in gl.static_range(STAGES):
        k = (first + i) * BK
        _fetch_weights(
            w, tile * BN, k, N, full.index(i), w_s.index(i), u_s.index(i), i < count, LOAD, PAIR
        )
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _fetch(x, [0, (first + i) * BK], full.index(i), x_s.index(i), pred=i < count)
    acc, up = _products(
        w, x, tile * BN, first, count, N, w_s, u_s, x_s, full, STAGES, LOAD, PAIR, L
    )
    r = gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, L))
    last = True
    if SPLIT:
        over = tile - whole
        if over >= 0:
            size: gl.constexpr = BN * BM * (2 if PAIR else 1)
            at = partial + over * parts * size + r[:, None] * BM + m[None, :]
            acc, up, last = _joined(acc, up, part, parts, at, joins + tile, BN * BM, PAIR)
    if last:
        n = tile * BN + r
        if BIAS:
            acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if PAIR:
            acc = _gated(acc, up, GATED)
        to = y + m.to(gl.int64)[None, :] * y_stride + n[:, None]
        gl.store(to, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
