# ruff: noqa: E501, ANN001, ANN201, ANN202, D403, N803, RET505
# Triton's language: constants in capitals, pointers without types, `else` where a branch is compiled away.
"""Codes of packed weights as operands of matrix units, and the scales that their sums are due.

SCALES is the kind of record, HIGH the bits of a code beyond four (4: bytes), BASE what is added to every
code: see `Tiles.constants` and `tile_kernels`. With ASM two codes are taken at once by NVIDIA's
instructions; without, the same in Triton's own language.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _fields_asm(shift, mask, magic):
    """PTX: bits of both halves of a word, moved down by `shift`, in the mantissas of the pair `magic`."""
    if shift == 0:
        return f"lop3.b32 $0, $1, {mask}, {magic}, 0xea;"
    return f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; lop3.b32 $0, t, {mask}, {magic}, 0xea; }}"


@triton.constexpr_function
def _joined_asm(shift, high, mask, magic):
    """PTX: nibbles as `_fields_asm`, and above them bits of the second word moved up by `high`."""
    low = "mov.b32 t, $1;" if shift == 0 else f"shr.u32 t, $1, {shift};"
    top = f"shl.b32 h, $2, {high};" if high >= 0 else f"shr.u32 h, $2, {-high};"
    join = f"lop3.b32 t, t, 0x000f000f, {magic}, 0xea; lop3.b32 $0, h, {mask}, t, 0xea;"
    return f"{{ .reg .b32 t, h; {low} {top} {join} }}"


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
def e2m1_value(code):
    """E2M1 codes as float32: bits put where float32 has them, 2^126 too small."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _e2m1(words, i: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    if ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(_e2m1_asm(i), "=r,r", [words], tl.bfloat16, True, 2)
    else:
        return e2m1_value((words.to(tl.int32) >> (4 * i)) & 15).to(DTYPE)


@triton.jit
def _in_mantissa(
    words, shift: tl.constexpr, bits: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """128 (bfloat16) or 1024 (float16) and a field of `bits` bits."""
    if ASM and tl.bfloat16 == DTYPE:
        mask: tl.constexpr = 0x00010001 * ((1 << bits) - 1)
        return tl.inline_asm_elementwise(
            _fields_asm(shift, mask, 0x43004300), "=r,r", [words], tl.bfloat16, True, 2
        )
    elif ASM and tl.float16 == DTYPE:
        mask: tl.constexpr = 0x00010001 * ((1 << bits) - 1)
        return tl.inline_asm_elementwise(
            _fields_asm(shift, mask, 0x64006400), "=r,r", [words], tl.float16, True, 2
        )
    else:
        field = (words.to(tl.int32) >> shift) & ((1 << bits) - 1)
        return (field.to(tl.float32) + base_of(DTYPE)).to(DTYPE)


@triton.jit
def base_of(DTYPE: tl.constexpr):
    """What `code_values` adds to codes, so that they are exact in a mantissa as they lie."""
    if tl.float16 == DTYPE:
        return 1024.0
    else:
        return 128.0


@triton.jit
def _negative_sign(words, shift: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """-(BASE + 128 b) for bit 7 of bytes: with their lower bits, `_in_mantissa`, the signed byte."""
    if ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _fields_asm(shift, 0x00800080, 0xC300C300), "=r,r", [words], tl.bfloat16, True, 2
        )
    elif ASM and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            _fields_asm(shift, 0x00800080, 0xE400E400), "=r,r", [words], tl.float16, True, 2
        )
    else:
        sign = (words.to(tl.int32) >> shift) & 128
        return (-(sign.to(tl.float32) + base_of(DTYPE))).to(DTYPE)


@triton.jit
def _with_high(
    words,
    high,
    shift: tl.constexpr,
    at: tl.constexpr,
    HIGH: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """BASE + nibble, HIGH bits of the words `high` at bit `at` above it."""
    mask: tl.constexpr = 0x00100010 * ((1 << HIGH) - 1)
    if ASM and tl.bfloat16 == DTYPE:
        asm: tl.constexpr = _joined_asm(shift, 4 - at, mask, 0x43004300)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [words, high], tl.bfloat16, True, 2)
    elif ASM and tl.float16 == DTYPE:
        asm: tl.constexpr = _joined_asm(shift, 4 - at, mask, 0x64006400)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [words, high], tl.float16, True, 2)
    else:
        code = code_bits(words, high, shift // 4, at, HIGH)
        return (code.to(tl.float32) + base_of(DTYPE)).to(DTYPE)


@triton.jit
def code_bits(words, high, i: tl.constexpr, at, HIGH: tl.constexpr):
    """Code i of words as int32; `at` is where its high bits lie."""
    if HIGH == 4:
        byte = (words.to(tl.int32) >> (8 * i)) & 255
        return byte - 2 * (byte & 128)
    else:
        code = (words.to(tl.int32) >> (4 * i)) & 15
        if HIGH > 0:
            code |= ((high.to(tl.int32) >> at) & ((1 << HIGH) - 1)) << 4
        return code


@triton.jit
def codes_of(
    words,
    high,
    i: tl.constexpr,
    at: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
    ASM: tl.constexpr,
):
    """Code i of words as an operand: BASE + code, of E2M1 its value, of bytes BASE + their lower 7 bits."""
    if HIGH == 4:
        return _in_mantissa(words, 8 * i, 7, DTYPE, ASM)
    elif SCALES == 5:
        return _e2m1(words, i, DTYPE, ASM)
    elif HIGH > 0:
        return _with_high(words, high, 4 * i, at, HIGH, DTYPE, ASM)
    else:
        return _in_mantissa(words, 4 * i, 4, DTYPE, ASM)


@triton.jit
def code_products(acc, code, words, xb, i: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """acc [BN, columns] plus `codes_of` words [BN, block] times xb [block, columns]; bytes are signed."""
    acc = tl.dot(code, xb, acc, input_precision="ieee")
    if HIGH == 4:
        sign = _negative_sign(words, 8 * i, xb.dtype, ASM)
        acc = tl.dot(sign, xb, acc, input_precision="ieee")
    return acc


@triton.jit
def _ones(chosen, DTYPE: tl.constexpr):
    return chosen.to(tl.float32).to(DTYPE)


@triton.jit
def _only(words, field: tl.constexpr, ASM: tl.constexpr):
    """Words [BN, 16] with zeros in all fields but one: others' bits may be no numbers."""
    k = tl.arange(0, 16)
    mask = tl.where(k == field, -1, 0).to(tl.int16)[None, :]
    mask = tl.broadcast_to(mask, words.shape[0], 16)
    if ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, mask], tl.int16, True, 2
        )
    else:
        return words & mask


@triton.jit
def _exponent(words, shift: tl.constexpr):
    """2^(byte - 127) in bfloat16; 2^-127 is below the exponents' range."""
    byte = (words.to(tl.int32) >> shift) & 255
    return tl.where(byte == 0, 64, byte << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def block_scales(
    record,
    block,
    SCALES: tl.constexpr,
    PER: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASM: tl.constexpr,
):
    """(scale, low) float32 [BN, COLUMNS] of blocks [COLUMNS]: value = scale * code - low.

    Records [BN, 16] hold 16-bit fields. A matrix unit takes the right ones: a product with ones where
    field and block belong together is exact, gives them where sums of products lie, and lets the
    compiler stage records as it stages codes. Of SCALES 3 and 6 both are due `chunk_scales`.
    """
    k = tl.arange(0, 16)[:, None]
    b = block[None, :]
    less = tl.full([record.shape[0], COLUMNS], -128.0, tl.float32)
    none = tl.zeros([record.shape[0], COLUMNS], tl.float32)
    if SCALES == 3:
        own = _ones(k == b, tl.bfloat16)
        scale = tl.dot(_in_mantissa(record, 0, 6, tl.bfloat16, ASM), own, less)
        return scale, tl.dot(_in_mantissa(record, 8, 6, tl.bfloat16, ASM), own, less)
    elif SCALES == 6:
        even = _ones((k == b // 2) & (b % 2 == 0), tl.bfloat16)
        odd = _ones((k == b // 2) & (b % 2 == 1), tl.bfloat16)
        scale = tl.dot(_in_mantissa(record, 0, 7, tl.bfloat16, ASM), even)
        scale = tl.dot(_negative_sign(record, 0, tl.bfloat16, ASM), even, scale)
        scale = tl.dot(_in_mantissa(record, 8, 7, tl.bfloat16, ASM), odd, scale)
        return tl.dot(_negative_sign(record, 8, tl.bfloat16, ASM), odd, scale), none
    elif SCALES == 5:
        even = _ones((k == b // 2) & (b % 2 == 0), tl.bfloat16)
        odd = _ones((k == b // 2) & (b % 2 == 1), tl.bfloat16)
        return tl.dot(_exponent(record, 8), odd, tl.dot(_exponent(record, 0), even)), none
    else:
        return _group_scales(record, b * PER // 8, b, SCALES, PER, PARTS, ASM)


@triton.jit
def _group_scales(
    record,
    g,
    b,
    SCALES: tl.constexpr,
    PER: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
):
    """`block_scales` of floats: groups g of blocks b [1, COLUMNS]."""
    k = tl.arange(0, 16)[:, None]
    half = record.to(tl.float16, bitcast=True)
    if PARTS == 3:
        own = _ones((k % PER == g) & (k < 3 * PER), tl.bfloat16)
        scale = tl.dot(record.to(tl.bfloat16, bitcast=True), own)
    else:
        scale = tl.dot(half, _ones(k == g, tl.float16))
    if SCALES == 2:
        return scale, -tl.dot(half, _ones(k == 8 + b, tl.float16))
    elif SCALES == 4:
        at = PARTS * PER + g // 2
        less = tl.full(scale.shape, -128.0, tl.float32)
        even = _ones((k == at) & (g % 2 == 0), tl.bfloat16)
        zero = tl.dot(_in_mantissa(record, 0, 6, tl.bfloat16, ASM), even, less)
        if PER > 1:
            odd = _ones((k == at) & (g % 2 == 1), tl.bfloat16)
            zero = tl.dot(_in_mantissa(record, 8, 6, tl.bfloat16, ASM), odd, zero)
        return scale, scale * zero
    else:
        return scale, scale


@triton.jit
def chunk_scales(record, SCALES: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """(d, dmin) float32 [BN, COLUMNS] of a chunk, by products as `block_scales`."""
    k = tl.arange(0, 16)[:, None]
    every = tl.zeros([1, COLUMNS], tl.int32)
    if SCALES == 6:
        d = _only(record, 8, ASM).to(tl.float16, bitcast=True)
        d = tl.dot(d, _ones(k == 8 + every, tl.float16))
        return d, d
    else:
        half = record.to(tl.float16, bitcast=True)
        d = tl.dot(half, _ones(k == 8 + every, tl.float16))
        return d, tl.dot(half, _ones(k == 9 + every, tl.float16))
