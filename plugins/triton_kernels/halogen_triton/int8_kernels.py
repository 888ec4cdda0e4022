# ruff: noqa: E501, ANN001, ANN201, N803, PLR0913
# Triton's language: constants in capitals, pointers without types.
"""W8A8: int8 weights with a scale per output, activations rounded to int8 with a scale per token."""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import gate_and_up, gated, normed_row, pdl_launch, pdl_wait


@triton.jit
def scale_of(magnitudes):
    """Of a row, from magnitudes [BLOCK] that hold its largest; NaN where one is NaN or infinite."""
    # a maximum over lanes leaves NaNs out
    return tl.maximum(tl.max(magnitudes, 0) / 127.0, 1e-30) + tl.sum(magnitudes * 0.0, 0)


@triton.jit
def code_of(v, scale):
    """int8 codes of values: symmetric, to nearest, halves to even."""
    # adding and taking away 1.5 * 2^23 rounds halves to even
    code = (v / scale + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def store_rounded(v, codes, scales, t, k, K):
    """Row t, whole in v (0 past its end), as codes and scale."""
    scale = scale_of(tl.abs(v))
    tl.store(scales + t, scale)
    tl.store(codes + t * K + k, code_of(v, scale), mask=k < K)


@triton.jit
def round_rows(x, codes, scales, K, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """int8 codes [T, K] and float32 scales [T] of x: symmetric, to nearest, halves to even; grid (T,)."""
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    most = tl.zeros([BLOCK], tl.float32)
    for k0 in range(0, K, BLOCK):
        v = tl.load(x + t * x_stride + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
    scale = scale_of(most)
    tl.store(scales + t, scale)
    for k0 in range(0, K, BLOCK):
        v = tl.load(x + t * x_stride + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        code = code_of(v, scale)
        tl.store(codes + t * K + k0 + k, code, mask=k0 + k < K)


@triton.jit
def rms_norm_rounded(
    x,
    residual,
    weight,
    y,
    total,
    codes,
    scales,
    H,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rms_norm`, and what `round_rows` makes of its y; grid (T,)."""
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    v = normed_row(x, residual, weight, total, t, c, H, eps, ADD, PDL).to(y.dtype.element_ty)
    tl.store(y + t * H + c, v, mask=c < H)
    store_rounded(v.to(tl.float32), codes, scales, t, c, H)


@triton.jit
def gated_rounded(
    x, codes, scales, F, x_stride, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):
    """What `round_rows` makes of `gated_act`; grid (T,)."""
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    gate, up = gate_and_up(x, t, f, f < F, F, x_stride)
    # as if it had been stored between
    v = gated(gate, up, KIND).to(x.dtype.element_ty)
    store_rounded(v.to(tl.float32), codes, scales, t, f, F)


@triton.jit(do_not_specialize=["M"])
def int8_gemm(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    M,
    N,
    K,
    y_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y [M, N] = (x W^T) * x_scales * scales + bias, summed exactly in int32 (K up to 133,000)."""
    pdl_launch(PDL)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pdl_wait(PDL)
    row = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.where(n < N, n, 0).to(tl.int64)
    acc = tl.zeros([BM, BN], tl.int32)
    for k0 in range(0, K, BK):
        live = k0 + k < K
        xt = tl.load(x + row[:, None] * K + (k0 + k)[None, :], mask=live[None, :], other=0)
        wt = tl.load(weight + column[None, :] * K + (k0 + k)[:, None], mask=live[:, None], other=0)
        acc = tl.dot(xt, wt, acc, out_dtype=tl.int32)
    total = (
        acc.to(tl.float32) * tl.load(x_scales + row)[:, None] * tl.load(scales + column)[None, :]
    )
    if BIAS:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    at = y + row[:, None] * y_stride + n[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
