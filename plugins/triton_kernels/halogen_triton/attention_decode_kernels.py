# ruff: noqa: E501, ANN001, ANN201, ANN202, N803, N806, PLR0913, PLR0915, PLR0917, PLR1714, RET505, SIM108, SIM114
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Paged attention of sequences with few queries, split over the device and joined by whoever is last."""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.attention_tiles import attend_range, finish, load_q, query_rows
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
    SINGLE: tl.constexpr,
):
    """Per sequence: tiles of one head [S_PAD], first tile [S_PAD], inclusive prefix over heads."""
    s = tl.arange(0, S_PAD)
    live = s < S
    length = tl.load(seq_lens + s, mask=live, other=0)
    queries = live.to(tl.int32)
    if not SINGLE:
        start = tl.load(starts + s, mask=live, other=0)
        queries = tl.load(starts + s + 1, mask=live, other=0) - start
    first = tl.zeros([S_PAD], tl.int32)
    if WINDOW > 0:
        first = tl.maximum(length - queries - WINDOW + 1, 0) // BN
    decodes = live & (queries > 0) & (queries <= MAX_DECODE)
    tiles = tl.where(decodes, (length + BN - 1) // BN - first, 0)
    return tiles, first, tl.cumsum(tiles * HKV, 0)


@triton.jit
def first_tile(program, each, more):
    """Where a program's share of the line begins: the first `more` programs take `each` + 1 tiles."""
    return program * each + tl.minimum(program, more)


@triton.jit
def owner(tile, each, more):
    """The program in whose share a tile lies."""
    large = more * (each + 1)
    rest = (tile - large) // tl.maximum(each, 1)
    return tl.where(tile < large, tile // (each + 1), more + rest)


@triton.jit(do_not_specialize=["S", "table_stride"])
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
    joins,
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
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    S_PAD: tl.constexpr,
    MAX_DECODE: tl.constexpr,
    SINGLE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STORE: tl.constexpr,
    DIRECT: tl.constexpr,
    UNMASKED: tl.constexpr,
    LAZY: tl.constexpr,
    GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sequences with at most MAX_DECODE queries; SINGLE: all have exactly one.

    DIRECT: grid (S * Hkv), one program per sequence and KV head. Otherwise split-KV (flash
    decoding, Dao et al. 2023) in stream-K fashion: the tiles of all sequences and heads lie on one
    line and each of the C programs takes an equal piece, whatever the lengths; so the grid is fixed
    and a captured step stays balanced. A program that holds only part of a (sequence, head) leaves
    it in `partial` [C, 2, ROWS, D] and `lse` [C, 2, ROWS]; the last to arrive at the counter
    `joins` [S, Hkv] joins the parts in order (so bits do not depend on who is last) and leaves the
    counter at 0 for the next launch.
    """
    G: tl.constexpr = HQ // HKV
    pdl_launch(PDL)
    # lengths and tables come from the host, long before the previous kernel
    tiles, first, cum = tile_ledger(seq_lens, starts, S, S_PAD, HKV, BN, MAX_DECODE, WINDOW, SINGLE)
    index = tl.program_id(0)
    programs = tl.num_programs(0)
    s = tl.arange(0, S_PAD)
    total = tl.max(cum, 0)
    each = total // programs
    more = total % programs
    if DIRECT:
        stop = tl.sum(tl.where(s == index // HKV, cum, 0), 0)
        share = tl.sum(tl.where(s == index // HKV, tiles, 0), 0)
        at = stop - share * (HKV - index % HKV)
        stop = at + share
    else:
        at = first_tile(index, each, more)
        stop = first_tile(index + 1, each, more)
    start = at
    r = tl.arange(0, BM)
    while at < stop:
        seq = tl.sum((cum <= at).to(tl.int32), 0)
        base = tl.max(tl.where(cum <= at, cum, 0), 0)
        share = tl.sum(tl.where(s == seq, tiles, 0), 0)
        origin = tl.sum(tl.where(s == seq, first, 0), 0)
        head = (at - base) // share
        tile = (at - base) % share
        count = tl.minimum(stop - at, share - tile)
        length = tl.load(seq_lens + seq)
        first_row, n_q = query_rows(starts, seq, SINGLE)
        token = r // G
        h = head * G + r % G
        valid = token < n_q
        # the first wait is the last: all above is known before the previous kernel ends
        pdl_wait(PDL)
        qt = load_q(q, first_row, token, h, valid, q_stride, D, D_PAD, STORE)
        positions = tl.where(valid, length - n_q + token, length - 1)
        table = tables + seq.to(tl.int64) * table_stride
        low = (origin + tile) * BN
        acc, m_i, l_i = attend_range(
            qt, k, ks, v, vs, table, low, low + count * BN, length - n_q, length, head, positions,
            qk_scale, softcap, HKV, D, D_PAD, PAGE, BM, BN, WINDOW, SOFTCAP, STORE, UNMASKED,
            LAZY, GROUPED,
        )  # fmt: skip
        if DIRECT:
            finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)
        elif count == share:
            finish(acc, m_i, l_i, sinks, h, out, first_row, token, valid, HQ, D, D_PAD, SINKS)
        else:
            slot = (index * 2 + (at != start).to(tl.int32)) * ROWS + r
            leave_part(partial, lse, slot, r < ROWS, acc, m_i, l_i, D_PAD)
            a = at - tile
            low_part = owner(a, each, more)
            high_part = owner(a + share - 1, each, more)
            # all threads have stored before one of them says so
            tl.debug_barrier()
            arrived = tl.atomic_add(joins + seq * HKV + head, 1, sem="acq_rel")
            if arrived == high_part - low_part:
                if PARTS == 0:
                    m_j, l_j, acc_j = join_in_turn(
                        partial, lse, a, low_part, high_part, each, more, G * n_q, ROWS, D_PAD
                    )  # fmt: skip
                else:
                    m_j, l_j, acc_j = join_parts(
                        partial, lse, a, low_part, high_part, each, more, G * n_q, ROWS, PARTS, D_PAD
                    )  # fmt: skip
                rr = tl.arange(0, ROWS)
                finish(
                    acc_j, m_j, l_j, sinks, head * G + rr % G, out, first_row, rr // G,
                    rr // G < n_q, HQ, D, D_PAD, SINKS,
                )  # fmt: skip
                tl.store(joins + seq * HKV + head, 0)
        at += count


@triton.jit
def leave_part(partial, lse, slot, kept, acc, m_i, l_i, D_PAD: tl.constexpr):
    """Normalised rows acc [BM, D_PAD] and the logarithms of their weights, at slots [BM]."""
    d = tl.arange(0, D_PAD)
    tl.store(lse + slot, tl.where(l_i > 0.0, m_i + tl.log2(l_i), float("-inf")), mask=kept)
    norm = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    tl.store(partial + slot[:, None] * D_PAD + d[None, :], norm, mask=kept[:, None])


@triton.jit
def load_parts(
    partial,
    lse,
    c0,
    high,
    a,
    each,
    more,
    live,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """What programs c0 to c0 + PARTS - 1, at most `high`, left: lse [ROWS, PARTS], rows [ROWS, PARTS, D]."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    c = c0 + tl.arange(0, PARTS)
    filled = (r < live)[:, None] & (c <= high)[None, :]
    # a program's second slot is for the pair that begins within its share
    slot = (c * 2 + (first_tile(c, each, more) < a).to(tl.int32))[None, :] * ROWS + r[:, None]
    # past the first-level cache: it may hold what a slot held before
    part = tl.load(lse + slot, mask=filled, other=float("-inf"), cache_modifier=".cg")
    x = tl.load(
        partial + slot[:, :, None] * D_PAD + d[None, None, :],
        mask=filled[:, :, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return part, x


@triton.jit
def join_parts(
    partial,
    lse,
    a,
    low,
    high,
    each,
    more,
    live,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """(m, l, acc) of the (sequence, head) whose tiles begin at `a`, from parts of programs low to high.

    Rows come before parts, so that each warp has rows of its own and sums their parts in registers.
    The first parts are joined outside the loop: most pairs have no more, and the loop's values take
    their layouts, or each round would move its sums through shared memory.
    """
    part, x = load_parts(partial, lse, low, high, a, each, more, live, ROWS, PARTS, D_PAD)
    m_i = tl.max(part, 1)
    w = tl.exp2(part - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
    l_i = tl.sum(w, 1)
    acc = tl.sum(x * w[:, :, None], 1)
    for c0 in tl.range(low + PARTS, high + 1, PARTS, num_stages=1):
        part, x = load_parts(partial, lse, c0, high, a, each, more, live, ROWS, PARTS, D_PAD)
        m_new = tl.maximum(m_i, tl.max(part, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        w = tl.exp2(part - safe[:, None])
        alpha = tl.exp2(m_i - safe)
        acc = acc * alpha[:, None] + tl.sum(x * w[:, :, None], 1)
        l_i = l_i * alpha + tl.sum(w, 1)
        m_i = m_new
    return m_i, l_i, acc


@triton.jit
def load_part(
    partial, lse, c, high, a, each, more, live, ROWS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """What program c left, if it is at most `high`: lse [ROWS], rows [ROWS, D]."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    filled = (r < live) & (c <= high)
    slot = (c * 2 + (first_tile(c, each, more) < a).to(tl.int32)) * ROWS + r
    part = tl.load(lse + slot, mask=filled, other=float("-inf"), cache_modifier=".cg")
    at = partial + slot[:, None] * D_PAD + d[None, :]
    return part, tl.load(at, mask=filled[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def fold_part(m_i, l_i, acc, part, x):
    """(m, l, acc) with one part more."""
    m_new = tl.maximum(m_i, part)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    w = tl.exp2(part - safe)
    alpha = tl.exp2(m_i - safe)
    return m_new, l_i * alpha + w, acc * alpha[:, None] + x * w[:, None]


@triton.jit
def join_in_turn(
    partial, lse, a, low, high, each, more, live, ROWS: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """As `join_parts`, of [ROWS, D] alone: no value changes lanes, and few registers are held.

    On gfx1151 the compiler keeps a join's addresses in registers throughout the loop over keys, those of shared
    memory too. Two parts are loaded at once, so that half of the loads do not wait for others.
    """
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for c in tl.range(low, high + 1, 2, num_stages=1):
        part, x = load_part(partial, lse, c, high, a, each, more, live, ROWS, D_PAD)
        part2, x2 = load_part(partial, lse, c + 1, high, a, each, more, live, ROWS, D_PAD)
        m_i, l_i, acc = fold_part(m_i, l_i, acc, part, x)
        m_i, l_i, acc = fold_part(m_i, l_i, acc, part2, x2)
    return m_i, l_i, acc
