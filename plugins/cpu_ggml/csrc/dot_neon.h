// Products of NEON: sdot where the CPU has it (armv8.2 dotprod), else 16-bit sums.
#pragma once

#define SIGNED8 1
typedef vb operand;
#define EACH_GROUP UNROLL(8) // so that each group's lane is a constant

#if defined(HX_NEON_DOTPROD)

// Codes of fewer than 8 bits are the same signed. The activations of four groups lie in one register.
#define FLUSH(bits) 8
typedef vi partial;
INLINE partial begin(vi sum, int bits) { return sum; }
INLINE partial dot(partial p, operand w, const int8_t *x, int i, int bits, int flip) {
    int8x16_t xs = vld1q_s8(x + i / 4 * 16), ws = (int8x16_t)w;
    switch (i % 4) { // the lane is part of the instruction
    case 0: return vdotq_laneq_s32(p, ws, xs, 0);
    case 1: return vdotq_laneq_s32(p, ws, xs, 1);
    case 2: return vdotq_laneq_s32(p, ws, xs, 2);
    default: return vdotq_laneq_s32(p, ws, xs, 3);
    }
}
INLINE vi settle(vi sum, partial p, int bits) { return p; }

#else

// Each product has a 16-bit sum of its own: 8 of 5 bits and 4 of 6 bits stay below 2^15, 2 of 8 bits.
#define FLUSH(bits) ((bits) < 6 ? 8 : (bits) == 6 ? 4 : 2)
typedef struct { int16x8_t low, high; } partial;
INLINE partial begin(vi sum, int bits) { return (partial){vdupq_n_s16(0), vdupq_n_s16(0)}; }
INLINE partial dot(partial p, operand w, const int8_t *x, int i, int bits, int flip) {
    int32_t four;
    memcpy(&four, x + 4 * i, 4);
    int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(four)), ws = (int8x16_t)w;
    p.low = vmlal_s8(p.low, vget_low_s8(ws), vget_low_s8(xs));
    p.high = vmlal_high_s8(p.high, ws, xs);
    return p;
}
INLINE vi settle(vi sum, partial p, int bits) {
    return sum + vpaddq_s32(vpaddlq_s16(p.low), vpaddlq_s16(p.high));
}

#endif

INLINE vb add_high(vb w, const uint8_t *masks, int g, int lane) {
    const uint8x16_t spread = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint16_t m; // 4 bits per row
    memcpy(&m, masks + g * 8 + lane / 2, 2);
    uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(m)), spread);
    return w | (vb)(vtstq_u8(bytes, bit) & vdupq_n_u8(16));
}
