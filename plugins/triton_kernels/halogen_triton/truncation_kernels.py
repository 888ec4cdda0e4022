# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0913, PLR0917, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Truncations of one row and a draw from what they leave, by one program.

Truncations are thresholds, found by bisection on the ordered bits of a logit: top-k by count, top-p
by mass of what top-k left. Ties at a threshold are kept from the lowest id up. The draw is an inverse
CDF in token-id order with a number that the core made, so a seed means the same token on any device
(up to rounding at a boundary).
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def draw(
    row, V, top, bottom, inverse, whole, cut, k, p, min_p, u, greedy, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token of a row [V] whose top is known, as is a `bottom` below all that is kept.

    `whole` is the mass of all beside the top's. `cut`: top-k truncates. The row may be what is left of a longer one, if nothing is missing that
    top-k keeps or, without it, top-p.
    """
    highest = _ordered(top)
    # the largest threshold that at least k logits reach
    low = _ordered(bottom)
    high = highest
    if cut:
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
    if cut == 0:
        room = V
    if p < 1.0:
        if cut:
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
def _inverse_cdf(
    row, V, top, inverse, least, room, min_p, u, greedy,
    BLOCK: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def address(pointer, PDL: tl.constexpr):
    """A pointer as a number, but for NVIDIA's GPUs: Triton 3.6 compiles no choice of pointers for AMD's."""
    if PDL:
        return pointer
    else:
        return pointer.to(tl.int64)


@triton.jit
def float_pointer(address, PDL: tl.constexpr):
    """The float32 pointer of an `address`."""
    if PDL:
        return address
    else:
        return address.to(tl.pointer_type(tl.float32))
