# ruff: noqa: E501, ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915, PLR0917, PLR1714, RET505, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Paged attention of sequences with few queries, split over the device and joined again."""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.attention_tiles import LOG2E, attend, finish, load_q
from halogen_triton.pointwise_kernels import pdl_launch, pdl_wait


@triton.jit
def tile_ledger(
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
    tiles, first, cum = tile_ledger(seq_lens, starts, S, S_PAD, HKV, BN, MAX_DECODE, WINDOW)
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
        qt = load_q(q, first_row, token, h, valid, q_stride, D, D_PAD, STORE)
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
                acc, m_i, l_i = attend(
                    acc, m_i, l_i, qt, k, ks, v, vs, table, n0, length, head, positions, qk_scale,
                    softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, False,
                )  # fmt: skip
            low = seen
        for n0 in range(low, high, BN):
            acc, m_i, l_i = attend(
                acc, m_i, l_i, qt, k, ks, v, vs, table, n0, length, head, positions, qk_scale,
                softcap, HKV, D, D_PAD, PAGE, BN, WINDOW, SOFTCAP, STORE, True,
            )  # fmt: skip
        if count == share:
            finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)
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
    tiles, _, cum = tile_ledger(seq_lens, starts, S, S_PAD, HKV, BN, MAX_DECODE, WINDOW)
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
