# ruff: noqa: E501, ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915, PLR0917, PLR1714, RET505, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Paged attention kernels (Kwon et al., SOSP 2023) with an online softmax (FlashAttention-2, 2023).

A layer's K and V are [N, 2, Hkv, B, D], K before V: a block is contiguous per KV head. The query heads of one KV
head are packed into the rows of a tile, so K and V are read once per group: row r of a tile is
query token r // G, head r % G of the group of G.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import pdl_launch, pdl_wait

LOG2E = tl.constexpr(1.4426950408889634)
NATIVE = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
E5M2 = tl.constexpr(2)


@triton.jit
def _kv_tile(
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
def _rows_of_keys(
    table, n0, n, inside, head, HKV: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr
):
    """Row index [BN] into [N * 2 * Hkv * B] of keys n0 + n of one KV head."""
    if PAGE % BN == 0:
        block = tl.load(table + n0 // PAGE).to(tl.int64)
        return (block * (2 * HKV) + head) * PAGE + n0 % PAGE + n
    else:
        block = tl.load(table + (n0 + n) // PAGE, mask=inside, other=0).to(tl.int64)
        return (block * (2 * HKV) + head) * PAGE + (n0 + n) % PAGE


@triton.jit
def _attend(
    acc,
    m_i,
    l_i,
    q,
    k,
    ks,
    v,
    vs,
    table,
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
    MASKED: tl.constexpr,
):
    """One tile of BN keys from n0: new (acc, m_i, l_i). Scores are in log2 units."""
    n = tl.arange(0, BN)
    inside = n0 + n < end
    rows = _rows_of_keys(table, n0, n, inside, head, HKV, PAGE, BN)
    kt = _kv_tile(k, ks, rows, inside, D, D_PAD, BN, STORE, True, MASKED, q.dtype)
    s = tl.dot(q, kt, input_precision="ieee")
    if SOFTCAP:
        s = s * (qk_scale / softcap)
        s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E)) + 1.0))
    else:
        s = s * (qk_scale * LOG2E)
    if MASKED:
        keys = (n0 + n)[None, :]
        seen = (keys <= positions[:, None]) & inside[None, :]
        if WINDOW > 0:
            seen = seen & (keys > positions[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    safe = m_new
    if MASKED:
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - safe[:, None])
    alpha = tl.exp2(m_i - safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    vt = _kv_tile(v, vs, rows, inside, D, D_PAD, BN, STORE, False, MASKED, q.dtype)
    acc = tl.dot(p.to(q.dtype), vt, acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, l_i


@triton.jit
def _load_q(
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
def _finish(
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


@triton.jit
def prefill(
    q,
    k,
    ks,
    v,
    vs,
    tables,
    seq_lens,
    starts,
    sinks,
    out,
    qk_scale,
    softcap,
    S,
    table_stride,
    q_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    S_PAD: tl.constexpr,
    MAX_DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STORE: tl.constexpr,
    UNMASKED: tl.constexpr,
):
    """Sequences with more than MAX_DECODE queries: a program is BM // G query tokens of a KV head.

    Grid (upper bound of query blocks, Hkv); the longest blocks of a sequence start first.
    """
    G: tl.constexpr = HQ // HKV
    BQ: tl.constexpr = BM // G
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    s = tl.arange(0, S_PAD)
    lo = tl.load(starts + s, mask=s < S, other=0)
    queries = tl.load(starts + s + 1, mask=s < S, other=0) - lo
    blocks = tl.where((s < S) & (queries > MAX_DECODE), (queries + BQ - 1) // BQ, 0)
    cum = tl.cumsum(blocks, 0)
    if index >= tl.max(cum, 0):
        return
    seq = tl.sum((cum <= index).to(tl.int32), 0)
    block = index - tl.max(tl.where(cum <= index, cum, 0), 0)
    first_row = tl.load(starts + seq)
    n_q = tl.load(starts + seq + 1) - first_row
    length = tl.load(seq_lens + seq)
    r = tl.arange(0, BM)
    token = block * BQ + r // G
    h = head * G + r % G
    valid = (r < BQ * G) & (token < n_q)
    qt = _load_q(q, first_row, token, h, valid, q_stride, D, D_PAD, STORE)
    first_position = length - n_q + block * BQ
    positions = length - n_q + token
    end = tl.minimum(length - n_q + (block + 1) * BQ, length)
    table = tables + seq.to(tl.int64) * table_stride
    m_i = tl.full([BM], float("-inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D_PAD], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BN * BN
    elif UNMASKED:
        unmasked = (first_position + 1) // BN * BN
        for n0 in range(0, unmasked, BN):
            acc, m_i, l_i = _attend(
                acc, m_i, l_i, qt, k, ks, v, vs, table, n0, end, head, positions, qk_scale,
                softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, False,
            )  # fmt: skip
        begin = unmasked
    for n0 in range(begin, end, BN):
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, qt, k, ks, v, vs, table, n0, end, head, positions, qk_scale,
            softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, True,
        )  # fmt: skip
    _finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)


@triton.jit
def _tile_ledger(
    seq_lens,
    starts,
    S,
    S_PAD: tl.constexpr,
    HKV: tl.constexpr,
    BN: tl.constexpr,
    MAX_DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Per sequence: tiles of one head [S_PAD], first tile [S_PAD], inclusive prefix over heads."""
    s = tl.arange(0, S_PAD)
    live = s < S
    length = tl.load(seq_lens + s, mask=live, other=0)
    queries = tl.load(starts + s + 1, mask=live, other=0) - tl.load(starts + s, mask=live, other=0)
    first = tl.zeros([S_PAD], tl.int32)
    if WINDOW > 0:
        first = tl.maximum(length - queries - WINDOW + 1, 0) // BN
    decodes = live & (queries > 0) & (queries <= MAX_DECODE)
    tiles = tl.where(decodes, (length + BN - 1) // BN - first, 0)
    return tiles, first, tl.cumsum(tiles * HKV, 0)


@triton.jit
def decode(
    q,
    k,
    ks,
    v,
    vs,
    tables,
    seq_lens,
    starts,
    sinks,
    out,
    partial,
    lse,
    qk_scale,
    softcap,
    S,
    table_stride,
    q_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    S_PAD: tl.constexpr,
    MAX_DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STORE: tl.constexpr,
    DIRECT: tl.constexpr,
    UNMASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequences with at most MAX_DECODE queries.

    DIRECT: grid (S * Hkv), one program per sequence and KV head. Otherwise split-KV (flash
    decoding, Dao et al. 2023) in stream-K fashion: the tiles of all sequences and heads lie on one
    line and each of the C programs takes an equal piece, whatever the lengths; so the grid is fixed
    and a captured step stays balanced. A program that holds only part of a (sequence, head) leaves
    it in `partial` [C, 2, BM, D] and `lse` [C, 2, BM]; `decode_reduce` joins the parts.
    """
    G: tl.constexpr = HQ // HKV
    pdl_launch(PDL)
    # lengths and tables come from the host, long before the previous kernel
    tiles, first, cum = _tile_ledger(seq_lens, starts, S, S_PAD, HKV, BN, MAX_DECODE, WINDOW)
    index = tl.program_id(0)
    s = tl.arange(0, S_PAD)
    pdl_wait(PDL)
    if DIRECT:
        mine = index // HKV
        stop = tl.sum(tl.where(s == mine, cum, 0), 0)
        share = tl.sum(tl.where(s == mine, tiles, 0), 0)
        at = stop - share * (HKV - index % HKV)
        stop = at + share
    else:
        total = tl.max(cum, 0).to(tl.int64)
        programs = tl.num_programs(0)
        at = (index * total // programs).to(tl.int32)
        stop = ((index + 1) * total // programs).to(tl.int32)
    start = at
    r = tl.arange(0, BM)
    d = tl.arange(0, D_PAD)
    while at < stop:
        seq = tl.sum((cum <= at).to(tl.int32), 0)
        base = tl.max(tl.where(cum <= at, cum, 0), 0)
        share = tl.sum(tl.where(s == seq, tiles, 0), 0)
        origin = tl.sum(tl.where(s == seq, first, 0), 0)
        head = (at - base) // share
        tile = (at - base) % share
        count = tl.minimum(stop - at, share - tile)
        first_row = tl.load(starts + seq)
        n_q = tl.load(starts + seq + 1) - first_row
        length = tl.load(seq_lens + seq)
        token = r // G
        h = head * G + r % G
        valid = token < n_q
        qt = _load_q(q, first_row, token, h, valid, q_stride, D, D_PAD, STORE)
        positions = tl.where(valid, length - n_q + token, length - 1)
        table = tables + seq.to(tl.int64) * table_stride
        m_i = tl.full([BM], float("-inf"), tl.float32)
        l_i = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D_PAD], tl.float32)
        low = (origin + tile) * BN
        high = low + count * BN
        if UNMASKED and WINDOW == 0:
            seen = tl.maximum(tl.minimum((length - n_q + 1) // BN * BN, high), low)
            for n0 in range(low, seen, BN):
                acc, m_i, l_i = _attend(
                    acc, m_i, l_i, qt, k, ks, v, vs, table, n0, length, head, positions, qk_scale,
                    softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, False,
                )  # fmt: skip
            low = seen
        for n0 in range(low, high, BN):
            acc, m_i, l_i = _attend(
                acc, m_i, l_i, qt, k, ks, v, vs, table, n0, length, head, positions, qk_scale,
                softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, True,
            )  # fmt: skip
        if count == share:
            _finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)
        else:
            slot = (index * 2 + (at != start).to(tl.int32)) * BM + r
            tl.store(lse + slot, tl.where(l_i > 0.0, m_i + tl.log2(l_i), float("-inf")))
            norm = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
            tl.store(partial + slot[:, None] * D_PAD + d[None, :], norm)
        at += count


@triton.jit
def decode_reduce(
    seq_lens,
    starts,
    sinks,
    out,
    partial,
    lse,
    S,
    PROGRAMS,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    S_PAD: tl.constexpr,
    MAX_DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the parts that `decode` left; grid (S, Hq * MAX_DECODE), a program is one output row."""
    G: tl.constexpr = HQ // HKV
    pdl_launch(PDL)
    tiles, _, cum = _tile_ledger(seq_lens, starts, S, S_PAD, HKV, BN, MAX_DECODE, WINDOW)
    seq = tl.program_id(0)
    s = tl.arange(0, S_PAD)
    token = tl.program_id(1) // HQ
    h = tl.program_id(1) % HQ
    first_row = tl.load(starts + seq)
    share = tl.sum(tl.where(s == seq, tiles, 0), 0)
    if (share == 0) | (token >= tl.load(starts + seq + 1) - first_row):
        return
    total = tl.max(cum, 0).to(tl.int64)
    a = tl.sum(tl.where(s == seq, cum, 0), 0) - share * (HKV - h // G)
    # the owner of tile t is the last program whose first tile is not behind it
    low = (((a + 1).to(tl.int64) * PROGRAMS - 1) // total).to(tl.int32)
    high = (((a + share).to(tl.int64) * PROGRAMS - 1) // total).to(tl.int32)
    if low == high:
        return
    d = tl.arange(0, D_PAD)
    row = token * G + h % G
    pdl_wait(PDL)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([D_PAD], tl.float32)
    for c0 in range(low, high + 1, PARTS):
        c = c0 + tl.arange(0, PARTS)
        begins = (c * total // PROGRAMS).to(tl.int32)
        filled = (c <= high) & (begins < ((c + 1) * total // PROGRAMS).to(tl.int32))
        slot = (c * 2 + (begins < a).to(tl.int32)) * BM + row
        part = tl.load(lse + slot, mask=filled, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(part, 0))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2(part - safe)
        x = tl.load(partial + slot[:, None] * D_PAD + d[None, :], mask=filled[:, None], other=0.0)
        alpha = tl.exp2(m_i - safe)
        acc = acc * alpha + tl.sum(x * w[:, None], 0)
        l_i = l_i * alpha + tl.sum(w, 0)
        m_i = m_new
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(m_i, sink)
        acc = acc * tl.exp2(m_i - top)
        l_i = l_i * tl.exp2(m_i - top) + tl.exp2(sink - top)
    acc = acc / tl.where(l_i > 0.0, l_i, 1.0)
    at = ((first_row + token).to(tl.int64) * HQ + h) * D
    tl.store(out + at + d, acc.to(out.dtype.element_ty), mask=d < D)
