// Products of 8-bit codes with 8-bit activations, four at a time, for each instruction set:
//   partial           sums at hand; FLUSH(bits): how many products of four it holds
//   begin(sum, bits)  a partial, perhaps going on from `sum`
//   dot(p, w, x, i, bits, flip)  p + per lane, four codes of w times x[4 i] .. x[4 i + 3]; codes are
//                     unsigned, but those of 8 bits signed where SIGNED8 says so
//   settle(sum, p, bits)  32-bit sums, `sum` included
//   ready(w, bits, flip)  codes as dot wants them, which it is given once for each row. With `flip`
//                     (8 bits, where FLIPS) it lacks below_zero's sums, 32-bit ones per feature
//   add_high(w, masks, g, lane)  w + 16 where group g of `masks` has a bit
#pragma once
#include "vec.h"

#if defined(HX_AVX512)

#define SIGNED8 0 // 8-bit codes are made unsigned, 128 too high
#define FLUSH(bits) 8
typedef vb operand;
typedef vi partial;
INLINE partial begin(vi sum, int bits) { return sum; }
INLINE partial dot(partial p, operand w, const int8_t *x, int i, int bits, int flip) {
    int32_t four;
    memcpy(&four, x + 4 * i, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)p, (__m512i)w, _mm512_set1_epi32(four));
}
INLINE vi settle(vi sum, partial p, int bits) { return p; }
INLINE vb add_high(vb w, const uint8_t *masks, int g, int lane) {
    uint64_t m;
    memcpy(&m, masks + g * 8, 8);
    return (vb)_mm512_mask_add_epi8((__m512i)w, m, (__m512i)w, _mm512_set1_epi8(16));
}

#elif defined(HX_AVX2)

// 16-bit sums while they cannot overflow: 8, 4, 2 groups of 4-, 5-, 6-bit codes; 8 bits: 32-bit ones
#define SIGNED8 1
#define FLUSH(bits) ((bits) == 5 ? 4 : (bits) == 6 ? 2 : 8)
#define EACH_GROUP UNROLL(8)
#define KEPT(v) __asm__("" : "+x"(v)) // in order: else GCC adds up as a tree and spills its leaves
typedef vi partial;
INLINE partial begin(vi sum, int bits) { return bits == 8 ? sum : (vi){0}; }
// Of signed codes the sizes are multiplied, the signs moved to x. One instruction does that, on few of
// the core's units; bits flipped by any unit give -x - 1, so that sizes of negative codes are to be added.
#define FLIPS 1
typedef struct { __m256i size, sign; } operand;
INLINE operand ready(vb w, int bits, int flip) {
    __m256i c = (__m256i)w;
    if (bits != 8) return (operand){c, c};
    return (operand){_mm256_abs_epi8(c), flip ? _mm256_cmpgt_epi8(_mm256_setzero_si256(), c) : c};
}
INLINE partial dot(partial p, operand w, const int8_t *x, int i, int bits, int flip) {
    int32_t four;
    memcpy(&four, x + 4 * i, 4);
    __m256i xs = _mm256_set1_epi32(four);
    if (bits == 8) xs = flip ? _mm256_xor_si256(xs, w.sign) : _mm256_sign_epi8(xs, w.sign);
    xs = _mm256_maddubs_epi16(w.size, xs);
    if (bits == 8) p += (vi)_mm256_madd_epi16(xs, _mm256_set1_epi16(1));
    else p = (vi)_mm256_add_epi16((__m256i)p, xs);
    KEPT(p);
    return p;
}
// Sums [k / 32, TILE] of the sizes of negative codes of a Q8_0 tile.
static void below_zero(const uint8_t *w, int64_t k, int32_t *sums) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1);
    for (int64_t b = 0; b < k / QK; b++, w += 544)
        for (int lane = 0; lane < TILE; lane += VL) {
            __m256i sum = zero;
            for (int g = 0; g < 8; g++) {
                __m256i c = _mm256_min_epi8((__m256i)vb_load(w + g * 64 + lane * 4), zero);
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(c), ones));
            }
            sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
            memcpy(sums + b * TILE + lane, &sum, sizeof sum);
        }
}
INLINE vi settle(vi sum, partial p, int bits) {
    if (bits == 8) return p;
    sum += (vi)_mm256_madd_epi16((__m256i)p, _mm256_set1_epi16(1));
    KEPT(sum);
    return sum;
}
INLINE vb add_high(vb w, const uint8_t *masks, int g, int lane) {
    uint32_t m;
    memcpy(&m, masks + g * 8 + lane / 2, 4); // 4 bits per row
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(0x8040201008040201);
    __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32(m), spread);
    v = _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
    return w | (vb)_mm256_and_si256(v, _mm256_set1_epi8(16));
}

#elif defined(HX_ANY_NEON)
#include "dot_neon.h"
#else

#define SIGNED8 1
#define FLUSH(bits) 8
typedef vb operand;
typedef vi partial;
INLINE partial begin(vi sum, int bits) { return sum; }
INLINE partial dot(partial p, operand w, const int8_t *x, int i, int bits, int flip) {
    for (int l = 0; l < VL; l++)
        for (int j = 0; j < 4; j++)
            p[l] += (bits == 8 ? (int8_t)w[4 * l + j] : w[4 * l + j]) * x[4 * i + j];
    return p;
}
INLINE vi settle(vi sum, partial p, int bits) { return p; }
INLINE vb add_high(vb w, const uint8_t *masks, int g, int lane) {
    uint16_t m;
    memcpy(&m, masks + g * 8 + lane / 2, 2); // 4 bits per row
    for (int i = 0; i < VL * 4; i++) w[i] |= (m >> i & 1) << 4;
    return w;
}

#endif

#if !defined(EACH_GROUP)
#define EACH_GROUP
#endif
#if !defined(FLIPS)
#define FLIPS 0
INLINE operand ready(vb w, int bits, int flip) { return w; }
#endif
