# ruff: noqa: E501, ANN001, ANN201, C901, D403, N803, PLR0913, PLR0915
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Linear layers: GEMV over bit planes for one row, tiled GEMM for more, experts.

FORMAT is `PlaneFormat.index` (0: dense); HIGH its extra bits; OFFSET what a code of zero stands for.
A GATED weight has its gate rows first and its up rows after them, N each; the result is
`act(gate) * up`. With PDL a kernel starts while its predecessor ends and waits where it first reads
what that one wrote (programmatic dependent launch, NVIDIA only).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from halogen_triton.block_kernels import sliced_products, whole_products
from halogen_triton.lane_kernels import lane_sums
from halogen_triton.plane_kernels import ahead_sums, block_scales, code_floats, has_min
from halogen_triton.pointwise_kernels import gated, pdl_launch, pdl_wait


def _run(arguments: Mapping[str, Any]) -> int:
    """Blocks of a lane; 0: `ahead_sums`, the form that was measured on NVIDIA's GPUs."""
    if arguments["PDL"]:
        return 0
    return 2 if arguments["KB"] % 2 == 0 and arguments["NB"] % 2 == 0 else 1


@triton.heuristics({"RUN": _run})
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
    RUN: tl.constexpr,
):
    """y [N] = W x + bias for one row x [K]; NB blocks of 32 at a time, RUN a lane (0: see `ahead_sums`)."""
    pdl_launch(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    if RUN == 0:
        acc, up = ahead_sums(
            x, codes, high, scales, supers, n.to(tl.int64), inside, N, KB, BN, NB, FORMAT, HIGH,
            OFFSET, GATED, PDL,
        )  # fmt: skip
    else:
        G: tl.constexpr = NB // RUN
        acc = tl.zeros([BN, G], tl.float32)
        up = tl.zeros([BN, G], tl.float32)
        row = tl.minimum(n, N - 1).to(tl.int64)
        pdl_wait(PDL)
        for g0 in range(0, KB // RUN, G):
            runs = g0 + tl.arange(0, G)
            seen = (runs < KB // RUN)[None, :]
            g = tl.minimum(runs, KB // RUN - 1)
            more = lane_sums(
                x, codes, high, scales, supers, row, g, KB, RUN, FORMAT, HIGH, OFFSET
            )  # fmt: skip
            acc += tl.where(seen, more, 0.0)
            if GATED:
                more = lane_sums(
                    x, codes, high, scales, supers, row + N, g, KB, RUN, FORMAT, HIGH, OFFSET
                )  # fmt: skip
                up += tl.where(seen, more, 0.0)
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = gated(total, tl.sum(up, 1), GATED)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
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


def _whole(arguments: Mapping[str, Any]) -> bool:
    """Whether blocks are multiplied whole: where loads are not staged and both tiles fit 32 KiB."""
    elements = (arguments["BM"] + arguments["BN"]) * arguments["NB"] * 32
    fits = elements * arguments["x"].element_size() <= 32768
    return fits and arguments.get("num_stages", 1) == 1


@triton.heuristics({"WHOLE": _whole})
@triton.jit(do_not_specialize=["M"])
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
    WHOLE: tl.constexpr,
):
    """As `dense_gemm` over bit planes, dequantised to the type of x, NB blocks of 32 at a time (WHOLE: at once)."""
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
    m_mask = (m < M)[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    if WHOLE:
        acc = whole_products(
            acc, xrow, m_mask, codes, high, scales, supers, row, KB, NB, FORMAT, HIGH, OFFSET
        )  # fmt: skip
    else:
        acc = sliced_products(
            acc, xrow, m_mask, j, codes, high, scales, supers, row, (n < N)[None, :], KB, NB,
            FORMAT, HIGH, OFFSET,
        )  # fmt: skip
    # int8 is exact in 16 bits: one scale per row meets the sum
    if FORMAT == 5 + 16 * 4095:
        acc *= tl.load(scales + row)
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
    s, low = block_scales(scales, supers, row, b, mask, KB, 0, FORMAT)
    words = j
    if FORMAT % 16 != 5:
        words = tl.load(codes + (row * KB + b) * 4 + j % 4, mask=mask, other=0)
    upper = words
    if HIGH == 1:
        upper = tl.load(high + row * KB + b, mask=mask, other=0)
    for i in tl.static_range(8):
        if HIGH == 2 and i % 4 == 0:
            upper = tl.load(high + (row * KB + b) * 2 + i // 4, mask=mask, other=0)
        if FORMAT == 4 and i == 4:
            s, low = block_scales(scales, supers, row, b, mask, KB, 1, FORMAT)
        k = b * 32 + 4 * i + j % 4
        if FORMAT % 16 == 5:
            q = tl.load(codes + row * KB * 32 + k, mask=mask, other=0).to(tl.float32)
        else:
            q = code_floats(words, upper, i, j % 4, HIGH, OFFSET)
        value = q * s
        if has_min(FORMAT):
            value -= low
        tl.store(y + t * KB * 32 + k, (value * factor).to(y.dtype.element_ty), mask=mask)
