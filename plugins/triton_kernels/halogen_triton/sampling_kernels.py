# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0913
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Picking a token per row on the device: no sort, no synchronisation, any mix of rows.

Truncations are thresholds, found by bisection on the ordered bits of a logit: top-k by count, top-p
by mass of what top-k left. Ties at a threshold are kept from the lowest id up. The draw is an inverse
CDF in token-id order with a number that the core made, so a seed means the same token on any device
(up to rounding at a boundary).
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import pdl_launch, pdl_wait


@triton.jit
def _ordered(x):
    """float32 to int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """Between two int32 without overflow, rounded up."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _count_and_mass(row, V, top, inverse, least, floor, BLOCK: tl.constexpr):
    """How many logits are at or above `least`, and the mass of those that also reach `floor`."""
    count = 0
    mass = 0.0
    for v0 in range(0, V, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf"))
        key = _ordered(x)
        inside = (v < V) & (key >= least)
        count += tl.sum(inside.to(tl.int32), 0)
        p = tl.exp((x - top) * inverse)
        mass += tl.sum(tl.where(inside & (key >= floor), p, 0.0), 0)
    return count, mass


@triton.jit
def greedy_rows(
    logits,
    values,
    ids,
    joins,
    out,
    V,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [R] int32: the lowest id of the highest logit of [R, V] float32; grid (R, blocks of V).

    The last program of a row to arrive at `joins` [R] picks from what all left in `values` and
    `ids` [R, blocks], and leaves the counter at 0. PARTS is at least the number of blocks.
    """
    pdl_launch(PDL)
    r = tl.program_id(0).to(tl.int64)
    blocks = tl.num_programs(1)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    x = tl.load(logits + r * V + v, mask=v < V, other=float("-inf"))
    top = tl.max(x, 0)
    at = r * blocks + tl.program_id(1)
    tl.store(values + at, top)
    tl.store(ids + at, tl.min(tl.where((x == top) & (v < V), v, V), 0))
    # all threads have stored before one of them says so
    tl.debug_barrier()
    if tl.atomic_add(joins + r, 1, sem="acq_rel") == blocks - 1:
        b = tl.arange(0, PARTS)
        own = r * blocks + b
        # past the first-level cache: it may hold what lay here before
        tops = tl.load(values + own, mask=b < blocks, other=float("-inf"), cache_modifier=".cg")
        first = tl.load(ids + own, mask=b < blocks, other=0x7FFFFFFF, cache_modifier=".cg")
        chosen = tl.min(tl.where(tops == tl.max(tops, 0), first, V), 0)
        tl.store(out + r, tl.minimum(chosen, V - 1))
        tl.store(joins + r, 0)


@triton.jit
def sample_rows(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    out,
    V,
    BLOCK: tl.constexpr,
):
    """out [R] int32 from logits [R, V] float32; one program per row. Temperature 0 is greedy."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * V
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32)
    for v0 in range(0, V, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = tl.load(row + v, mask=v < V, other=float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, v, where)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, where, V), 0)
    t = tl.load(temperature + r)
    if t > 0.0:
        k = tl.load(top_k + r)
        p = tl.load(top_p + r)
        u = tl.load(uniforms + r)
        floor = tl.load(min_p + r)
        chosen = _draw(row, V, top, 1.0 / t, k, p, floor, u, chosen, BLOCK)
    tl.store(out + r, tl.minimum(chosen, V - 1))


@triton.jit
def _draw(row, V, top, inverse, k, p, min_p, u, greedy, BLOCK: tl.constexpr):
    highest = _ordered(top)
    lowest = _ordered(float("-inf") + top * 0.0)
    k = tl.where((k <= 0) | (k > V), V, k)
    # the largest threshold that at least k logits reach
    low = lowest
    high = highest
    if k < V:
        while low < high:
            middle = _middle(low, high)
            count, _ = _count_and_mass(row, V, top, inverse, middle, middle, BLOCK)
            enough = count >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    least = low
    above, mass_above = _count_and_mass(row, V, top, inverse, least + 1, least + 1, BLOCK)
    level = tl.where(least < 0, least ^ 0x7FFFFFFF, least).to(tl.float32, bitcast=True)
    weight = tl.exp((level - top) * inverse)
    room = k - above
    if k == V:
        room = V
    if p < 1.0:
        _, whole = _count_and_mass(row, V, top, inverse, least, least, BLOCK)
        if k < V:
            whole = mass_above + room.to(tl.float32) * weight
        target = p * whole
        # the largest threshold whose mass above does not yet hold the target
        low = least
        high = highest
        while low < high:
            middle = _middle(low, high)
            _, mass = _count_and_mass(row, V, top, inverse, middle, middle, BLOCK)
            reached = mass >= target
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        if low > least:
            least = low
            room = V
            level = tl.where(least < 0, least ^ 0x7FFFFFFF, least).to(tl.float32, bitcast=True)
            weight = tl.exp((level - top) * inverse)
            _, mass_above = _count_and_mass(row, V, top, inverse, least + 1, least + 1, BLOCK)
        fits = tl.maximum(tl.ceil((target - mass_above) / tl.maximum(weight, 1e-38)), 1.0)
        room = tl.minimum(room, tl.minimum(fits, 1.0e9).to(tl.int32))
    return _inverse_cdf(row, V, top, inverse, least, room, min_p, u, greedy, BLOCK)


@triton.jit
def _kept(row, v, V, top, inverse, least, room, min_p, ties):
    """Weights of tokens v under all truncations, and the ties seen so far."""
    x = tl.load(row + v, mask=v < V, other=float("-inf"))
    key = _ordered(x)
    tie = ((v < V) & (key == least)).to(tl.int32)
    rank = ties + tl.cumsum(tie, 0)
    keep = (v < V) & ((key > least) | ((tie > 0) & (rank <= room)))
    p = tl.exp((x - top) * inverse)
    return tl.where(keep & (p >= min_p), p, 0.0), ties + tl.sum(tie, 0)


@triton.jit
def _inverse_cdf(row, V, top, inverse, least, room, min_p, u, greedy, BLOCK: tl.constexpr):
    # float64 across tiles: a float32 running sum is off by more than many tokens' mass
    total = u.to(tl.float64) * 0.0
    ties = 0
    for v0 in range(0, V, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        w, ties = _kept(row, v, V, top, inverse, least, room, min_p, ties)
        total += tl.sum(w, 0).to(tl.float64)
    target = u.to(tl.float64) * total
    before = target * 0.0
    ties = 0
    found = V
    last = greedy * 0 - 1
    for v0 in range(0, V, BLOCK):
        if found == V:
            v = v0 + tl.arange(0, BLOCK)
            w, ties = _kept(row, v, V, top, inverse, least, room, min_p, ties)
            running = before + tl.cumsum(w, 0).to(tl.float64)
            hit = (running > target) & (w > 0.0)
            found = tl.min(tl.where(hit, v, V), 0)
            last = tl.maximum(tl.max(tl.where(w > 0.0, v, -1), 0), last)
            before += tl.sum(w, 0).to(tl.float64)
    return tl.where(found == V, last, found)
