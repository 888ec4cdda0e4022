# ruff: noqa: E501, ANN001, ANN201, ANN202, N803, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Codes of 4-bit weights as operands of matrix units, and the scales that their sums are due.

FORMAT is the index of `Tiles.constants`, BASE what is added to every code (see `tile_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _field(words, i: tl.constexpr):
    return (words.to(tl.int32) >> (4 * i)) & 15


@triton.jit
def _e2m1(words, i: tl.constexpr, DTYPE: tl.constexpr):
    """Values of E2M1 codes: bits put where float32 has them, 2^126 too small."""
    code = _field(words, i)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)


@triton.constexpr_function
def _pair_asm(i, magic):
    """PTX: nibbles i of both halves of a word in the mantissas of the pair `magic`."""
    if i == 0:
        return f"lop3.b32 $0, $1, 0x000f000f, {magic}, 0xea;"
    shift = f"shr.u32 t, $1, {4 * i};"
    return f"{{ .reg .b32 t; {shift} lop3.b32 $0, t, 0x000f000f, {magic}, 0xea; }}"


@triton.constexpr_function
def _e2m1_asm(i):
    """PTX: sign to bit 15, exponent and mantissa to bits 8 to 6, then times 2^126, in bfloat16."""
    value = f"shl.b32 m, $1, {6 - 4 * i};" if i < 2 else f"shr.u32 m, $1, {4 * i - 6};"
    rest = "mov.b32 c, 0x7e807e80; mul.rn.bf16x2 $0, m, c; }"
    if i == 3:
        return f"{{ .reg .b32 m, c; {value} and.b32 m, m, 0x01c001c0; lop3.b32 m, $1, 0x80008000, m, 0xea; {rest}"
    sign = f"shl.b32 s, $1, {12 - 4 * i};"
    return f"{{ .reg .b32 s, m, c; {sign} {value} and.b32 m, m, 0x01c001c0; lop3.b32 m, s, 0x80008000, m, 0xea; {rest}"


@triton.jit
def code_values(
    words,
    i: tl.constexpr,
    DTYPE: tl.constexpr,
    BASE: tl.constexpr,
    FORMAT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Nibble i of int16 words as BASE + code, or as an E2M1 value."""
    if FORMAT == 5:
        if ASM and tl.bfloat16 == DTYPE:
            return tl.inline_asm_elementwise(_e2m1_asm(i), "=r,r", [words], tl.bfloat16, True, 2)
        else:
            return _e2m1(words, i, DTYPE)
    elif ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _pair_asm(i, "0x43004300"), "=r,r", [words], tl.bfloat16, True, 2
        )
    elif ASM and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            _pair_asm(i, "0x64006400"), "=r,r", [words], tl.float16, True, 2
        )
    else:
        return (_field(words, i).to(tl.float32) + BASE).to(DTYPE)


@triton.jit
def _low_half(x):
    return (x & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(x):
    return ((x >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_shift(s, e, BASE: tl.constexpr, FORMAT: tl.constexpr, ZERO: tl.constexpr):
    """(scale, shift) float32 of loaded records: value = scale * (BASE + code) - shift."""
    if FORMAT == 2:
        scale = _low_half(s)
        return scale, scale * BASE - _high_half(s)
    elif FORMAT == 3:
        pair = s.to(tl.int32)
        scale = (pair & 255).to(tl.float32) * _low_half(e)
        return scale, scale * BASE + ((pair >> 8) & 255).to(tl.float32) * _high_half(e)
    elif FORMAT == 4:
        scale = s.to(tl.float32)
        return scale, scale * (BASE + e.to(tl.float32))
    elif FORMAT == 5:
        bits = s.to(tl.int32)
        # 2^-127 is below the exponents' range
        bits = tl.where(bits == 0, 0x00400000, bits << 23)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale * 0.0
    else:
        scale = s.to(tl.float32)
        return scale, scale * (BASE + ZERO)
