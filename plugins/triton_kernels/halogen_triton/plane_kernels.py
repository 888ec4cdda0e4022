# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, PLR0913, RET505, SIM108
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Reading bit planes inside kernels: codes, extra bits, scales (see `planes`).

FORMAT is `PlaneFormat.index`, HIGH its extra bits (-1: codes are E2M1), OFFSET what a code of zero
stands for; KB is the number of 32-element blocks in a row, so that addresses are known multiples of 16
bytes. Where groups are the file's choice (indices 5 and 6), FORMAT has 16 times the blocks per scale on
top (4095: one scale per row), and `ZEROS` more where a group has a zero of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halogen_triton.pointwise_kernels import pdl_wait

ZEROS = 131072
"""Also written as a number below, where kernels may not read a global."""


@triton.jit
def code_floats(words, high, i: tl.constexpr, w, HIGH: tl.constexpr, OFFSET: tl.constexpr):
    """Codes of element 4 i + w of blocks as float32; `high` are the extra bits' words."""
    if HIGH == -1:
        code = (words >> (4 * i)) & 15
        # sign, exponent and mantissa go where float32 has them: 2^126 too small
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif HIGH == 0:
        # nibbles go into a mantissa in place: value = 2^(23 - p) + code, so one `or`, one subtraction
        if i < 5:
            p: tl.constexpr = 4 * i
            masked = words & (15 << p)
        else:
            p: tl.constexpr = 4 * i - 12
            masked = (words >> 12) & (15 << p)
        top: tl.constexpr = (150 - p) << 23
        value = (masked | top).to(tl.float32, bitcast=True)
        base: tl.constexpr = (1 << (23 - p)) + OFFSET
        return value - base
    elif HIGH == 1:
        code = ((words >> (4 * i)) & 15) | (((high >> (4 * i + w)) & 1) << 4)
        return (code - OFFSET).to(tl.float32)
    else:
        code = ((words >> (4 * i)) & 15) | (((high >> (2 * (4 * (i % 4) + w))) & 3) << 4)
        return (code - OFFSET).to(tl.float32)


@triton.jit
def kind_of(FORMAT: tl.constexpr):
    """`PlaneFormat.index` alone."""
    return FORMAT % 16


@triton.jit
def has_min(FORMAT: tl.constexpr):
    """Whether values have something subtracted after scaling."""
    return FORMAT == 2 or FORMAT == 3 or FORMAT >= 131072


@triton.jit
def scale_words(scales, supers, row, b, mask, KB, half: tl.constexpr, FORMAT: tl.constexpr):
    """What 32-blocks `b` of rows need for their scale, as loaded: (per block, per 256).

    Pairs come in one load: (scale, min) of FORMAT 2 and (d, dmin) of FORMAT 3 as int32, the two
    bytes of FORMAT 3 as int16. `half` picks the 16 elements that a scale of FORMAT 4 is for.
    """
    if FORMAT == 2:
        s = tl.load(scales.to(tl.pointer_type(tl.int32)) + row * KB + b, mask=mask, other=0)
        return s, s
    elif FORMAT == 3:
        s = tl.load(scales.to(tl.pointer_type(tl.int16)) + row * KB + b, mask=mask, other=0)
        top = supers.to(tl.pointer_type(tl.int32)) + row * (KB // 8) + b // 8
        return s, tl.load(top, mask=mask, other=0)
    elif FORMAT == 4:
        s = tl.load(scales + (row * KB + b) * 2 + half, mask=mask, other=0)
        return s, tl.load(supers + row * (KB // 8) + b // 8, mask=mask, other=0.0)
    elif FORMAT > 16:
        # groups of the file's choice
        per: tl.constexpr = (FORMAT % 131072) // 16
        if per == 4095:
            at = row + b * 0
        else:
            at = row * (KB // per) + b // per
        s = tl.load(scales + at, mask=mask, other=0.0)
        if FORMAT >= 131072:
            return s, tl.load(supers + at, mask=mask, other=0)
        else:
            return s, s
    else:
        s = tl.load(scales + row * KB + b, mask=mask, other=0)
        return s, s


@triton.jit
def _low_half(x):
    return (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(x):
    return ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_min(s, top, FORMAT: tl.constexpr):
    """(scale, min) float32 from `scale_words`; min is 0 where a format has none."""
    if FORMAT == 2:
        return _low_half(s), -_high_half(s)
    elif FORMAT == 3:
        pair = s.to(tl.int32)
        scale = (pair & 255).to(tl.float32) * _low_half(top)
        return scale, ((pair >> 8) & 255).to(tl.float32) * _high_half(top)
    elif FORMAT == 4:
        return s.to(tl.float32) * top.to(tl.float32), 0.0
    elif FORMAT == 7:
        bits = s.to(tl.int32)
        # 2^-127 is below the exponents' range
        return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True), 0.0
    elif FORMAT >= 131072:
        return s.to(tl.float32), s.to(tl.float32) * top.to(tl.float32)
    else:
        return s.to(tl.float32), 0.0


@triton.jit
def block_scales(scales, supers, row, b, mask, KB, half: tl.constexpr, FORMAT: tl.constexpr):
    """(scale, min) of 32-blocks `b` of rows."""
    s, top = scale_words(scales, supers, row, b, mask, KB, half, FORMAT)
    return scale_and_min(s, top, FORMAT)


@triton.jit
def load_blocks(
    codes,
    high,
    scales,
    supers,
    row,
    row_mask,
    b,
    KB,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
):
    """All bits of blocks b [NB] of rows [BN]: codes, two words of extra bits, two of scales."""
    mask = row_mask[:, None] & (b < KB)[None, :]
    at = row[:, None] * KB + b[None, :]
    if FORMAT % 16 == 5:
        e = tl.arange(0, 32)
        data = tl.load(
            codes + at[:, :, None] * 32 + e[None, None, :],
            mask=mask[:, :, None],
            other=0,
            eviction_policy="evict_first",
        )
    else:
        w = tl.arange(0, 4)
        data = tl.load(
            codes + at[:, :, None] * 4 + w[None, None, :],
            mask=mask[:, :, None],
            other=0,
            eviction_policy="evict_first",
        )
    s, top = scale_words(scales, supers, row[:, None], b[None, :], mask, KB, 0, FORMAT)
    upper = s
    upper2 = s
    s2 = s
    if HIGH == 1:
        upper = tl.load(high + at, mask=mask, other=0)
    if HIGH == 2:
        upper = tl.load(high + at * 2, mask=mask, other=0)
        upper2 = tl.load(high + at * 2 + 1, mask=mask, other=0)
    if FORMAT == 4:
        s2 = tl.load(scales + at * 2 + 1, mask=mask, other=0)
    return data, upper, upper2, s, s2, top


@triton.jit
def plane_products(
    acc,
    x,
    data,
    upper,
    upper2,
    s,
    s2,
    top,
    b,
    KB,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """acc [BN, NB] plus the products of loaded blocks b with x."""
    inside = (b < KB)[:, None]
    if FORMAT % 16 == 5:
        e = tl.arange(0, 32)
        xe = tl.load(x + b[:, None] * 32 + e[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += s.to(tl.float32) * tl.sum(data.to(tl.float32) * xe[None, :, :], 2)
    else:
        w = tl.arange(0, 4)
        part = tl.zeros(data.shape, tl.float32)
        xsum = tl.zeros([data.shape[1], 4], tl.float32)
        extra = upper[:, :, None]
        for i in tl.static_range(8):
            if HIGH == 2 and i == 4:
                extra = upper2[:, :, None]
            at = b[:, None] * 32 + 4 * i + w[None, :]
            xi = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            part += code_floats(data, extra, i, w[None, None, :], HIGH, OFFSET) * xi[None, :, :]
            if has_min(FORMAT):
                xsum += xi
            if FORMAT == 4 and i == 3:
                scale, _ = scale_and_min(s, top, FORMAT)
                acc += scale * tl.sum(part, 2)
                part = tl.zeros(data.shape, tl.float32)
        if FORMAT == 4:
            scale, low = scale_and_min(s2, top, FORMAT)
        else:
            scale, low = scale_and_min(s, top, FORMAT)
        acc += scale * tl.sum(part, 2)
        if has_min(FORMAT):
            acc -= low * tl.sum(xsum, 1)[None, :]
    return acc


@triton.jit
def ahead_sums(
    x,
    codes,
    high,
    scales,
    supers,
    row,
    inside,
    N,
    KB,
    BN: tl.constexpr,
    NB: tl.constexpr,
    FORMAT: tl.constexpr,
    HIGH: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [BN, NB] of rows and, with GATED, of rows N later, with loads one iteration ahead.

    The first ones do not wait for the previous kernel.
    """
    acc = tl.zeros([BN, NB], tl.float32)
    up = tl.zeros([BN, NB], tl.float32)
    b = tl.arange(0, NB)
    d, h, h2, s, s2, t = load_blocks(codes, high, scales, supers, row, inside, b, KB, FORMAT, HIGH)
    ud, uh, uh2, us, us2, ut = d, h, h2, s, s2, t
    if GATED:
        ud, uh, uh2, us, us2, ut = load_blocks(
            codes, high, scales, supers, row + N, inside, b, KB, FORMAT, HIGH
        )
    pdl_wait(PDL)
    for _ in range(0, KB, NB):
        nd, nh, nh2, ns, ns2, nt = load_blocks(
            codes, high, scales, supers, row, inside, b + NB, KB, FORMAT, HIGH
        )
        acc = plane_products(acc, x, d, h, h2, s, s2, t, b, KB, FORMAT, HIGH, OFFSET)
        d, h, h2, s, s2, t = nd, nh, nh2, ns, ns2, nt
        if GATED:
            nd, nh, nh2, ns, ns2, nt = load_blocks(
                codes, high, scales, supers, row + N, inside, b + NB, KB, FORMAT, HIGH
            )
            up = plane_products(up, x, ud, uh, uh2, us, us2, ut, b, KB, FORMAT, HIGH, OFFSET)
            ud, uh, uh2, us, us2, ut = nd, nh, nh2, ns, ns2, nt
        b += NB
    return acc, up
