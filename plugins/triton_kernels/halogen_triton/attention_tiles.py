# ruff: noqa: E501, ANN001, ANN201, N803, PLR0913, PLR0917, RET505, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""What prefill and decode share: reading tiles of the paged cache, the online softmax, the end."""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.attention_q8 import q8_scores, q8_sums

LOG2E = tl.constexpr(1.4426950408889634)
NATIVE = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
E5M2 = tl.constexpr(2)


@triton.jit
def kv_tile(
    data,
    scales,
    rows,
    inside,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BN: tl.constexpr,
    STORE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Cache `rows` [BN] (in units of D) in `dtype`: [D_PAD, BN] with KEYS, else [BN, D_PAD]."""
    d = tl.arange(0, D_PAD)
    if KEYS:
        at = rows[None, :] * D + d[:, None]
        mask = inside[None, :] & (d < D)[:, None]
    else:
        at = rows[:, None] * D + d[None, :]
        mask = inside[:, None] & (d < D)[None, :]
    if MASKED or D != D_PAD:
        x = tl.load(data + at, mask=mask, other=0)
    else:
        x = tl.load(data + at)
    if STORE == NATIVE:
        return x.to(dtype)
    elif STORE == Q8_0:
        # one load per scale, spread over its 32 elements
        g = tl.arange(0, D_PAD // 32)
        if KEYS:
            at = rows[None, :] * (D // 32) + g[:, None]
            s = tl.load(scales + at, mask=inside[None, :] & (g < D // 32)[:, None], other=0.0)
            s = tl.broadcast_to(s[:, None, :], [D_PAD // 32, 32, BN]).reshape(D_PAD, BN)
        else:
            at = rows[:, None] * (D // 32) + g[None, :]
            s = tl.load(scales + at, mask=inside[:, None] & (g < D // 32)[None, :], other=0.0)
            s = tl.broadcast_to(s[:, :, None], [BN, D_PAD // 32, 32]).reshape(BN, D_PAD)
        if dtype == tl.float32:
            return x.to(tl.float32) * s.to(tl.float32)
        else:
            # in f16: half the registers, and its rounding is below that of bf16
            return (x.to(tl.float16) * s).to(dtype)
    else:
        # e5m2 is the upper byte of an f16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def blocks_of(table, n0, end, PAGE: tl.constexpr, BN: tl.constexpr):
    """The one or two blocks of a tile of keys from n0 on; anything where a tile lies otherwise."""
    last = (end - 1) // PAGE
    first = tl.minimum(n0 // PAGE, last)
    if PAGE % BN == 0:
        block = tl.load(table + first)
        return block, block
    elif BN == 2 * PAGE:
        return tl.load(table + first), tl.load(table + tl.minimum(n0 // PAGE + 1, last))
    else:
        return last, last


@triton.jit
def rows_of_keys(
    table,
    low_block,
    high_block,
    n0,
    n,
    inside,
    head,
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
):
    """Row index [BN] into [N * 2 * Hkv * B] of keys n0 + n of one KV head."""
    if PAGE % BN == 0:
        return (low_block.to(tl.int64) * (2 * HKV) + head) * PAGE + n0 % PAGE + n
    elif BN == 2 * PAGE:
        block = tl.where(n < PAGE, low_block, high_block).to(tl.int64)
        return (block * (2 * HKV) + head) * PAGE + n % PAGE
    else:
        block = tl.load(table + (n0 + n) // PAGE, mask=inside, other=0).to(tl.int64)
        return (block * (2 * HKV) + head) * PAGE + (n0 + n) % PAGE


@triton.jit
def attend(
    acc,
    m_i,
    l_i,
    q,
    k,
    ks,
    v,
    vs,
    table,
    low_block,
    high_block,
    n0,
    end,
    head,
    positions,
    qk_scale,
    softcap,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    LAZY: tl.constexpr,
    GROUPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of BN keys from n0: new (acc, m_i, l_i); m_i in log2 units; qk_scale is positive.

    LAZY: l_i [BM, BN] is summed over keys at the end, not over the warps of every tile.
    GROUPED: q and acc come as [D_PAD / 32, BM, 32], see `attention_q8`.
    """
    n = tl.arange(0, BN)
    inside = n0 + n < end
    rows = rows_of_keys(table, low_block, high_block, n0, n, inside, head, HKV, PAGE, BN)
    if GROUPED:
        s = q8_scores(q, k, ks, rows, inside, D, D_PAD)
    else:
        kt = kv_tile(k, ks, rows, inside, D, D_PAD, BN, STORE, True, MASKED, q.dtype)
        s = tl.dot(q, kt, input_precision="ieee")
    # scores become log2 units on their way into exp2, one multiply-add each
    unit = qk_scale * LOG2E
    if SOFTCAP:
        s = s * (qk_scale / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))
        unit = 1.0
    if MASKED:
        keys = (n0 + n)[None, :]
        seen = (keys <= positions[:, None]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (keys > positions[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1) * unit)
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * unit - safe[:, None])
    alpha = tl.exp2(m_i - safe)
    if LAZY:
        l_i = l_i * alpha[:, None] + p
    else:
        l_i = l_i * alpha + tl.sum(p, 1)
    if GROUPED:
        acc = q8_sums(acc * alpha[None, :, None], p, v, vs, rows, inside, D, D_PAD, q.dtype)
    else:
        vt = kv_tile(v, vs, rows, inside, D, D_PAD, BN, STORE, False, MASKED, q.dtype)
        acc = tl.dot(p.to(q.dtype), vt, acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i


@triton.jit
def attend_range(
    q,
    k,
    ks,
    v,
    vs,
    table,
    low,
    high,
    before,
    end,
    head,
    positions,
    qk_scale,
    softcap,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STORE: tl.constexpr,
    UNMASKED: tl.constexpr,
    LAZY: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """(acc, m_i, l_i) of keys low to high, low a multiple of BN. `before` is the first query's
    position: tiles that end at or before it need no mask, and with UNMASKED get a loop of their own.
    """
    m_i = tl.full([BM], float("-inf"), tl.float32)
    l_i = tl.zeros([BM, BN] if LAZY else [BM], tl.float32)
    if GROUPED:
        acc = tl.zeros([D_PAD // 32, BM, 32], tl.float32)
        q = tl.permute(tl.reshape(q, [BM, D_PAD // 32, 32]), (1, 0, 2))
    else:
        acc = tl.zeros([BM, D_PAD], tl.float32)
    # one tile ahead, so that no load of K waits for a load of the table
    low_block, high_block = blocks_of(table, low, end, PAGE, BN)
    if UNMASKED and WINDOW == 0:
        seen = tl.maximum(tl.minimum((before + 1) // BN * BN, high), low)
        for n0 in range(low, seen, BN):
            next_low, next_high = blocks_of(table, n0 + BN, end, PAGE, BN)
            acc, m_i, l_i = attend(
                acc, m_i, l_i, q, k, ks, v, vs, table, low_block, high_block, n0, end, head,
                positions, qk_scale, softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, LAZY,
                GROUPED, False,
            )  # fmt: skip
            low_block, high_block = next_low, next_high
        low = seen
    for n0 in range(low, high, BN):
        next_low, next_high = blocks_of(table, n0 + BN, end, PAGE, BN)
        acc, m_i, l_i = attend(
            acc, m_i, l_i, q, k, ks, v, vs, table, low_block, high_block, n0, end, head, positions,
            qk_scale, softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, LAZY, GROUPED,
            True,
        )  # fmt: skip
        low_block, high_block = next_low, next_high
    if LAZY:
        l_i = tl.sum(l_i, 1)
    if GROUPED:
        acc = tl.reshape(tl.permute(acc, (1, 0, 2)), [BM, D_PAD])
    return acc, m_i, l_i


@triton.jit
def query_rows(starts, seq, SINGLE: tl.constexpr):
    """(first row in q, number of queries) of a sequence; SINGLE: each has one."""
    if SINGLE:
        return seq, 1
    else:
        first_row = tl.load(starts + seq)
        return first_row, tl.load(starts + seq + 1) - first_row


@triton.jit
def load_q(
    q,
    first_row,
    token,
    h,
    valid,
    q_stride,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """Query rows [BM, D_PAD]; their type is that of the dot products."""
    d = tl.arange(0, D_PAD)
    at = (first_row + token).to(tl.int64) * q_stride + h * D
    x = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if STORE != NATIVE and x.dtype == tl.bfloat16:
        # quantised KV decodes to f16 exactly; bf16 would need a rounding per element
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def finish(
    acc,
    m_i,
    l_i,
    sinks,
    h,
    out,
    first_row,
    token,
    valid,
    HQ: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Normalise and store rows of out [T, Hq D]."""
    d = tl.arange(0, D_PAD)
    if SINKS:
        sink = tl.load(sinks + h, mask=valid, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m_i, sink)
        scale = tl.exp2(m_i - top)
        acc = acc * scale[:, None]
        l_i = l_i * scale + tl.exp2(sink - top)
    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    at = ((first_row + token).to(tl.int64) * HQ + h) * D
    tl.store(
        out + at[:, None] + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=valid[:, None] & (d < D)[None, :],
    )
