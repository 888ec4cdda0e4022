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

from halogen_triton.attention_tiles import attend_range, finish, load_q, query_rows


@triton.jit(do_not_specialize=["S", "table_stride"])
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
    GROUPED: tl.constexpr,
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
    length = tl.load(seq_lens + seq)
    first_row, n_q = query_rows(starts, seq, False)
    r = tl.arange(0, BM)
    token = block * BQ + r // G
    h = head * G + r % G
    valid = (r < BQ * G) & (token < n_q)
    qt = load_q(q, first_row, token, h, valid, q_stride, D, D_PAD, STORE)
    before = length - n_q + block * BQ
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before - WINDOW + 1, 0) // BN * BN
    end = tl.minimum(before + BQ, length)
    acc, m_i, l_i = attend_range(
        qt, k, ks, v, vs, tables + seq.to(tl.int64) * table_stride, begin, end, before, end, head,
        length - n_q + token, qk_scale, softcap, HKV, D, D_PAD, PAGE, BM, BN, WINDOW, SOFTCAP,
        STORE, UNMASKED, False, GROUPED,
    )  # fmt: skip
    finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)
