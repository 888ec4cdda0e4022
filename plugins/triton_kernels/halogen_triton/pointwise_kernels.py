# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0913, PLR0915, PLR0917, PLR1714, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Small fused kernels around the linear layers; one program per token."""

from __future__ import annotations

import triton
import triton.language as tl

SILU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
SWIGLU_OAI = tl.constexpr(3)


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Let the next kernel start while this one runs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the previous kernel has finished and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """`act(gate) * up` in float32."""
    if KIND == SILU:
        return gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == GELU_TANH:
        # tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)) * up
    else:
        # comparisons, because minimum and maximum would swallow a NaN
        g = tl.where(gate > 7.0, 7.0, gate)
        u = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)


@triton.jit
def gate_and_up(x, t, f, inside, F, x_stride):
    """Columns f of x[t, :F] and x[t, F:] in float32, 0 past their end."""
    gate = tl.load(x + t * x_stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * x_stride + F + f, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def gated_act(x, y, F, x_stride, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """y [T, F] = act(x[:, :F]) * x[:, F:]; grid (T, blocks of F)."""
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    pdl_wait(PDL)
    gate, up = gate_and_up(x, t, f, inside, F, x_stride)
    tl.store(y + t * F + f, gated(gate, up, KIND).to(y.dtype.element_ty), mask=inside)


@triton.jit
def normed_row(x, residual, weight, total, t, c, H, eps, ADD: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of row t in float32, 0 past its end; with ADD of x + residual, which goes to `total`."""
    inside = c < H
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    v = tl.load(x + t * H + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(residual + t * H + c, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + t * H + c, rounded, mask=inside)
        v = rounded.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / H + eps)
    return v * r * w


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    y,
    total,
    H,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, H] = RMSNorm(x) (Zhang and Sennrich, 2019); with ADD of `total` = x + residual."""
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    v = normed_row(x, residual, weight, total, t, c, H, eps, ADD, PDL)
    tl.store(y + t * H + c, v.to(y.dtype.element_ty), mask=c < H)


@triton.jit
def sin_cos(turns):
    """Sine and cosine of float64 `turns` (radians / 2 pi) in float32, to about 1e-7.

    float64 until whole turns are off: at position 100,000 a float32 angle is off by 0.004.
    Polynomials of an eighth of a turn (Moshier's Cephes, sinf and cosf): the library's functions would
    keep a table for huge angles in memory of their own.
    """
    part = (turns - tl.floor(turns)).to(tl.float32)
    quarter = tl.floor(part * 4.0 + 0.5)
    x = (part - quarter * 0.25) * 6.283185307179586
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    c = 1.0 - 0.5 * z
    c += z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    q = quarter.to(tl.int32)
    odd = q % 2 == 1
    sin = tl.where(odd, c, s) * tl.where((q & 2) == 0, 1.0, -1.0)
    cos = tl.where(odd, s, c) * tl.where(((q + 1) & 2) == 0, 1.0, -1.0)
    return sin, cos


@triton.jit
def _store_kv(
    cache, scales, rows, v, d, mask, D: tl.constexpr, STORE: tl.constexpr, D_PAD: tl.constexpr
):
    """Heads v [BH, D_PAD] to cache `rows` [BH] in the storage type."""
    at = rows[:, None] * D + d[None, :]
    if STORE == 0:
        tl.store(cache + at, v.to(cache.dtype.element_ty), mask=mask)
    elif STORE == 1:
        groups = tl.reshape(tl.where(mask, v, 0.0), [v.shape[0], D_PAD // 32, 32])
        # as bits a NaN is the largest: a maximum of floats would leave it out
        bits = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = tl.max(bits, 2).to(tl.float32, bitcast=True) / 127.0
        # an infinity spoils its group too, as a score of it could hide: exp(-inf) is 0
        scale += scale * 0.0
        inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)
        q = groups * inverse[:, :, None]
        # round half away from zero, as ggml does
        q = tl.where(q < 0.0, -tl.floor(0.5 - q), tl.floor(q + 0.5))
        tl.store(cache + at, tl.reshape(q, [v.shape[0], D_PAD]).to(tl.int8), mask=mask)
        g = tl.arange(0, D_PAD // 32)
        tl.store(
            scales + rows[:, None] * (D // 32) + g[None, :],
            scale.to(tl.float16),
            mask=(rows >= 0)[:, None] & (g < D // 32)[None, :],
        )
    else:
        # f16 to e5m2 drops a byte: round to nearest even on the bits that stay
        too_large = (tl.abs(v) > 57344.0) & (tl.abs(v) < float("inf"))
        v = tl.where(too_large, tl.where(v < 0.0, -57344.0, 57344.0), v)
        bits = v.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
        # a NaN may have all bits set, and would round up to a zero
        rounded = tl.where((bits & 0x7FFF) > 0x7C00, 0x7F, (bits + 127 + ((bits >> 8) & 1)) >> 8)
        tl.store(cache + at, rounded.to(tl.uint8), mask=mask)


@triton.jit
def qkv_rope_store(
    qkv,
    q_out,
    cache,
    scales,
    positions,
    slots,
    inv_freq,
    q_weight,
    k_weight,
    factor,
    eps,
    qkv_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROT: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    NEOX: tl.constexpr,
    ROPE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and rotate Q and K of one token, write K and V to the cache; grid (T, chunks of BH heads).

    `inv_freq` is float64 in turns (radians / 2 pi) per position.

    A partner element is read a second time rather than exchanged between threads: the row is in
    cache, and one code serves both pairings (`RopeStyle`). A slot below zero writes nothing.
    """
    pdl_launch(PDL)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d = tl.arange(0, D_PAD)
    pair = d % (ROT // 2) if NEOX else d // 2
    turned = d < ROT
    if NEOX:
        partner = tl.where(d < ROT // 2, d + ROT // 2, d - ROT // 2)
        sign = tl.where(d < ROT // 2, -1.0, 1.0)
    else:
        partner = tl.where(d % 2 == 0, d + 1, d - 1)
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    partner = tl.where(turned, partner, d)
    pdl_wait(PDL)
    position = tl.load(positions + t).to(tl.float64)
    slot = tl.load(slots + t)
    is_q = h < HQ
    is_k = (h >= HQ) & (h < HQ + HKV)
    is_v = (h >= HQ + HKV) & (h < HQ + 2 * HKV)
    inside = (h < HQ + 2 * HKV)[:, None] & (d < D)[None, :]
    at = t * qkv_stride + h * D
    x = tl.load(qkv + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(qkv + at[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        if Q_NORM:
            w = r[:, None] * tl.load(q_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            wp = r[:, None] * tl.load(q_weight + partner, mask=d < D, other=0.0).to(tl.float32)
            x = tl.where(is_q[:, None], x * w, x)
            y = tl.where(is_q[:, None], y * wp, y)
        if K_NORM:
            w = r[:, None] * tl.load(k_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            wp = r[:, None] * tl.load(k_weight + partner, mask=d < D, other=0.0).to(tl.float32)
            x = tl.where(is_k[:, None], x * w, x)
            y = tl.where(is_k[:, None], y * wp, y)
    if ROPE:
        sin, cos = sin_cos(position * tl.load(inv_freq + pair, mask=turned, other=0.0))
        cos = tl.where(turned, cos * factor, 1.0)
        sin = tl.where(turned, sin * factor, 0.0) * sign
        x = tl.where(is_v[:, None], x, x * cos[None, :] + y * sin[None, :])
    q_at = t * (HQ * D) + h * D
    tl.store(
        q_out + q_at[:, None] + d[None, :],
        x.to(q_out.dtype.element_ty),
        mask=inside & is_q[:, None],
    )
    live = slot >= 0
    k_head = h - HQ
    # V heads follow K heads in a block, as they do in qkv
    row = ((slot // PAGE) * (2 * HKV) + k_head) * PAGE + slot % PAGE
    row = tl.where((is_k | is_v) & live, row, -1)
    _store_kv(cache, scales, row, x, d, inside & (row >= 0)[:, None], D, STORE, D_PAD)
