# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0124, PLR0913, PLR0917
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Picking a token per row on the device: no sort, no synchronisation, any mix of rows.

Many programs go over each row: `top_rows` finds the highest logit and the mass of all, `level_rows` a
level above which all that truncations can keep lies, by a histogram of distances to the top, and
`pick_rows` picks that. `draw_rows`, one program a row, cuts what was picked and draws; where truncations
may keep more than MOST blocks it goes over the row itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import pdl_launch, pdl_wait
from halogen_triton.truncation_kernels import address, draw, float_pointer

BINS = tl.constexpr(1024)
PER_NAT = tl.constexpr(32)
"""Bins of the histogram for a factor e of probability: 32 nats in all."""
MOST = tl.constexpr(8)
"""Blocks of candidates that are collected; where there may be more, the row is gone over."""


@triton.jit
def _arrives_last(joins, r, programs):
    """Whether this program of a row is the last to come here; then the counter is 0 again."""
    # all threads have stored before one of them says so
    tl.debug_barrier()
    last = tl.atomic_add(joins + r, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(joins + r, 0)
    return last


@triton.jit
def _truncation(top_k, top_p, r, V):
    """(k, p, whether either truncates)."""
    k = tl.load(top_k + r)
    k = tl.where((k <= 0) | (k > V), V, k)
    p = tl.load(top_p + r)
    return k, p, (k < V) | (p < 1.0)


@triton.jit
def top_rows(
    logits,
    mask,
    allowed,
    temperature,
    values,
    ids,
    masses,
    joins,
    tops,
    out,
    V,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [R] int32: the lowest id of the highest logit of [R, V] float32, or -1 where that is not
    finite; grid (R, blocks of V).

    MASKED: of what `mask` [R, ceil(V / 32)] forbids the logit is -inf, also in `allowed` [R, V] for
    the kernels after this. SAMPLES: `tops` [R, 2] are it and the mass of all tokens beside it. `values`, `ids` and
    `masses` [R, blocks] are for the last program. PARTS is at least the number of blocks.
    """
    pdl_launch(PDL)
    r = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(1)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    x = tl.load(logits + r * V + v, mask=v < V, other=float("-inf"))
    # so that the top of a row with a NaN is not finite
    x = tl.where(x != x, float("inf"), x)
    if MASKED:
        words = (V + 31) // 32
        word = tl.load(mask + r * words + v // 32, mask=v < V, other=0)
        x = tl.where(((word >> (v % 32)) & 1) != 0, x, float("-inf"))
        if SAMPLES:
            tl.store(allowed + r * V + v, x, mask=v < V)
    top = tl.max(x, 0)
    at = r * blocks + tl.program_id(1)
    tl.store(values + at, top)
    tl.store(ids + at, tl.min(tl.where((x == top) & (v < V), v, V), 0))
    inverse = 0.0
    if SAMPLES:
        t = tl.load(temperature + r)
        inverse = tl.where(t > 0.0, 1.0 / t, 0.0)
        # a block without a possible token has no mass
        p = tl.where(x > float("-inf"), tl.exp((x - top) * inverse), 0.0)
        tl.store(masses + at, tl.sum(p, 0))
    if _arrives_last(joins, r, blocks):
        b = tl.arange(0, PARTS)
        own = r * blocks + b
        # past the first-level cache: it may hold what lay here before
        found = tl.load(values + own, mask=b < blocks, other=float("-inf"), cache_modifier=".cg")
        first = tl.load(ids + own, mask=b < blocks, other=0x7FFFFFFF, cache_modifier=".cg")
        top = tl.max(found, 0)
        chosen = tl.min(tl.where(found == top, first, V), 0)
        finite = (top > float("-inf")) & (top < float("inf"))
        tl.store(out + r, tl.where(finite, chosen, -1))
        if SAMPLES:
            mass = tl.load(masses + own, mask=b < blocks, other=0.0, cache_modifier=".cg")
            mass = tl.where(mass > 0.0, mass * tl.exp((found - top) * inverse), 0.0)
            tl.store(tops + r * 2, top)
            tl.store(tops + r * 2 + 1, tl.sum(mass, 0))


@triton.jit
def _bins(x, top, inverse):
    """Bin of each logit by its distance from the top, in nats."""
    return tl.minimum((top - x) * inverse * PER_NAT, BINS - 1.0).to(tl.int32)


@triton.jit
def level_rows(
    logits,
    temperature,
    top_k,
    top_p,
    tops,
    counts,
    joins,
    chosen,
    levels,
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`levels` [R]: the last bin that truncations can keep; grid (R, blocks of V).

    `counts` [R, BINS] are zeros, and are left so. The last bin holds all that is further away.
    """
    pdl_launch(PDL)
    r = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(temperature + r)
    k, p, truncates = _truncation(top_k, top_p, r, V)
    pdl_wait(PDL)
    if (t > 0.0) & truncates & (tl.load(chosen + r) >= 0):
        top = tl.load(tops + r * 2)
        x = tl.load(logits + r * V + v, mask=v < V, other=float("-inf"))
        possible = x > float("-inf")
        bins = _bins(tl.where(possible, x, top), top, 1.0 / t)
        bins = tl.where(possible, bins, BINS - 1)
        b = tl.arange(0, BINS)
        found = tl.histogram(bins, BINS)
        # what cannot be drawn was counted in the last bin
        found -= tl.where(b == BINS - 1, tl.sum((x == float("-inf")).to(tl.int32), 0), 0)
        tl.atomic_add(counts + r * BINS + b, found, mask=found > 0)
        if _arrives_last(joins, r, tl.num_programs(1)):
            found = tl.load(counts + r * BINS + b, cache_modifier=".cg")
            tl.store(counts + r * BINS + b, tl.zeros([BINS], tl.int32))
            # no token of a bin weighs more than one at its near edge
            most = found.to(tl.float32) * tl.exp(-b.to(tl.float32) / PER_NAT)
            upper = tl.sum(most, 0)
            left_out = upper - tl.cumsum(most, 0) + 1e-6 * upper
            enough = left_out <= (1.0 - p) * tl.load(tops + r * 2 + 1) * 0.999
            # top-p takes its share of what top-k left, so all of that is needed
            reached = tl.where(k < V, tl.cumsum(found, 0) >= k, enough)
            tl.store(levels + r, tl.min(tl.where(reached, b, BINS - 1), 0))


@triton.jit
def _collect(
    row, picks, ends, few, few_ids, total, V,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`few` logits and their ids, in order, of the `total` that blocks picked; `ends` [PARTS]."""
    for i0 in range(0, total, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        # whose block each is: bisection
        block = tl.zeros([BLOCK], tl.int32)
        start = tl.zeros([BLOCK], tl.int32)
        for bit in tl.static_range(16):
            if (PARTS >> (bit + 1)) > 0:
                end = tl.load(ends + block + ((PARTS >> (bit + 1)) - 1)).to(tl.int32)
                block = tl.where(i >= end, block + (PARTS >> (bit + 1)), block)
                start = tl.where(i >= end, end, start)
        inside = i < total
        at = block * BLOCK + i - start
        place = tl.load(picks + at, mask=inside, other=0).to(tl.int32)
        v = tl.where(inside, block * BLOCK + place, V)
        tl.store(few + i, tl.load(row + v, mask=v < V, other=float("-inf")), mask=inside)
        tl.store(few_ids + i, v, mask=inside)


@triton.jit
def _in_block(
    row, masses, V, top, inverse, floor, u,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A token by the inverse CDF, where only `floor` (min-p) truncates; blocks weigh `masses`."""
    b = tl.arange(0, PARTS)
    # float64 across blocks: a float32 running sum is off by more than many tokens' mass
    masses = masses.to(tl.float64)
    target = u.to(tl.float64) * tl.sum(masses, 0)
    hit = (tl.cumsum(masses, 0) > target) & (masses > 0.0)
    block = tl.min(tl.where(hit, b, PARTS), 0)
    block = tl.where(block == PARTS, tl.max(tl.where(masses > 0.0, b, 0), 0), block)
    v = block * BLOCK + tl.arange(0, BLOCK)
    w = _weights(tl.load(row + v, mask=v < V, other=float("-inf")), v, V, top, inverse, floor)
    before = tl.sum(tl.where(b < block, masses, 0.0), 0)
    running = before + tl.cumsum(w, 0).to(tl.float64)
    chosen = tl.min(tl.where((running > target) & (w > 0.0), v, V), 0)
    return tl.where(chosen == V, tl.max(tl.where(w > 0.0, v, -1), 0), chosen)


@triton.jit
def _weights(x, v, V, top, inverse, floor):
    w = tl.exp((x - top) * inverse)
    return tl.where((v < V) & (w >= floor), w, 0.0)


@triton.jit
def pick_rows(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    tops,
    levels,
    chosen,
    picks,
    sums,
    V,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What each block of a row gives to its draw; grid (R, blocks of V).

    Where truncations cut: `picks` int16 [R, blocks, BLOCK], its tokens above the level, and in `sums`
    float32 [R, 2 PARTS] how many; elsewhere in `sums` how heavy its tokens are.
    """
    pdl_launch(PDL)
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    v = part * BLOCK + i
    t = tl.load(temperature + r)
    _, _, truncates = _truncation(top_k, top_p, r, V)
    pdl_wait(PDL)
    if (t > 0.0) & (tl.load(chosen + r) >= 0):
        top = tl.load(tops + r * 2)
        x = tl.load(logits + r * V + v, mask=v < V, other=float("-inf"))
        if truncates:
            possible = x > float("-inf")
            near = _bins(tl.where(possible, x, top), top, 1.0 / t) <= tl.load(levels + r)
            above = (possible & near).to(tl.int32)
            place = (r * tl.num_programs(1) + part) * BLOCK + tl.cumsum(above, 0) - 1
            tl.store(picks + place, i.to(tl.int16), mask=above > 0)
            total = tl.sum(above, 0).to(tl.float32)
        else:
            total = tl.sum(_weights(x, v, V, top, 1.0 / t, tl.load(min_p + r)), 0)
        tl.store(sums + r * (2 * PARTS) + part, total)


@triton.jit
def draw_rows(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    tops,
    levels,
    picks,
    sums,
    few,
    few_ids,
    out,
    V,
    blocks,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [R]: draws of rows with a temperature, the others stay; grid (R).

    `few` and `few_ids` [R, MOST BLOCK] take what blocks have picked.
    """
    pdl_launch(PDL)
    r = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, PARTS)
    t = tl.load(temperature + r)
    k, p, truncates = _truncation(top_k, top_p, r, V)
    floor = tl.load(min_p + r)
    u = tl.load(uniforms + r)
    pdl_wait(PDL)
    chosen = tl.load(out + r)
    if (t > 0.0) & (chosen >= 0):
        top = tl.load(tops + r * 2)
        inverse = 1.0 / t
        row = address(logits + r * V, PDL)
        own = sums + r * (2 * PARTS)
        each = tl.load(own + b, mask=b < blocks, other=0.0)
        if truncates:
            level = tl.load(levels + r)
            edge = top - (level + 2.0) * t / PER_NAT
            bottom = tl.where(level == BINS - 1, float("-inf"), edge)
            mass = tl.load(tops + r * 2 + 1)
            ends = tl.cumsum(each.to(tl.int32), 0)
            total = tl.max(ends, 0)
            found = few_ids + r * (MOST * BLOCK)
            size = V
            if total <= MOST * BLOCK:
                tl.store(own + PARTS + b, ends.to(tl.float32))
                # all threads have stored before one of them reads
                tl.debug_barrier()
                _collect(
                    logits + r * V, picks + r * blocks * BLOCK, own + PARTS,
                    few + r * (MOST * BLOCK), found, total, V, BLOCK, PARTS,
                )  # fmt: skip
                tl.debug_barrier()
                row = address(few + r * (MOST * BLOCK), PDL)
                size = total
            chosen = draw(
                float_pointer(row, PDL), size, top, bottom, inverse, mass, k < V,
                tl.minimum(k, size), p, floor, u, chosen, BLOCK,
            )  # fmt: skip
            if total <= MOST * BLOCK:
                chosen = tl.load(found + chosen)
        else:
            chosen = _in_block(logits + r * V, each, V, top, inverse, floor, u, BLOCK, PARTS)
        tl.store(out + r, chosen)
