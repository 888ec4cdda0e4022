# ruff: noqa: E501, ANN001, ANN201, D403, N803, PLR0913, PLR0917
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Products with q8_0 keys and values by groups of 32 elements, which have a scale each.

A warp can take groups of its own, so queries and sums are in fewer registers than as [BM, D], and scales of keys
meet scores, which are fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def q8_tile(
    data,
    scales,
    rows,
    inside,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Codes of cache `rows` [BN] by groups: [D_PAD / 32, 32, BN] with KEYS, else [D_PAD / 32, BN, 32];
    their scales [D_PAD / 32, BN] in float32.
    """
    g = tl.arange(0, D_PAD // 32)[:, None]
    e = tl.arange(0, 32)
    seen = inside[None, :] & (g < D // 32)
    scale = tl.load(scales + rows[None, :] * (D // 32) + g, mask=seen, other=0.0).to(tl.float32)
    at = rows[None, :] * D + g * 32
    if KEYS:
        codes = tl.load(data + at[:, None, :] + e[None, :, None], mask=seen[:, None, :], other=0)
    else:
        codes = tl.load(data + at[:, :, None] + e[None, None, :], mask=seen[:, :, None], other=0)
    return codes, scale


@triton.jit
def q8_scores(q, k, ks, rows, inside, D: tl.constexpr, D_PAD: tl.constexpr):
    """q [D_PAD / 32, BM, 32] times keys: [BM, BN]. A group's codes are multiplied as they are, exactly."""
    codes, scale = q8_tile(k, ks, rows, inside, D, D_PAD, True)
    s = tl.dot(q, codes.to(q.dtype), input_precision="ieee")
    return tl.sum(s * scale[:, None, :], 0)


@triton.jit
def q8_sums(acc, p, v, vs, rows, inside, D: tl.constexpr, D_PAD: tl.constexpr, dtype: tl.constexpr):
    """acc [D_PAD / 32, BM, 32] plus weights p [BM, BN] times values.

    Values are dequantised: small weights times small scales would leave float16's range.
    """
    codes, scale = q8_tile(v, vs, rows, inside, D, D_PAD, False)
    values = codes.to(dtype) * scale.to(dtype)[:, :, None]
    weights = tl.broadcast_to(p.to(dtype)[None, :, :], [D_PAD // 32, p.shape[0], p.shape[1]])
    return tl.dot(weights, values, acc, input_precision="ieee")
