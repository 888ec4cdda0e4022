// Products of 8-bit codes with 8-bit activations, four at a time, for each instruction set:
//   partial           sums at hand; FLUSH(bits): how many products of four it holds
//   begin(sum)        a partial, perhaps going on from `sum`
//   dot(p, w, x, i, bits)  p + per lane, four codes of w times x[4 i] .. x[4 i + 3]; codes are
//                     unsigned, but those of 8 bits signed where SIGNED8 says so
//   settle(sum, p)    32-bit sums, `sum` included
//   add_high(w, masks, g, lane)  w + 16 where group g of `masks` has a bit
#pragma once
#include "vec.h"

#if defined(HX_AVX512)

#define SIGNED8 0 // 8-bit codes are made unsigned, 128 too high
#define FLUSH(bits) 8
typedef vi partial;
INLINE partial begin(vi sum) { return sum; }
INLINE partial dot(partial p, vb w, const int8_t *x, int i, int bits) {
    int32_t four;
    memcpy(&four, x + 4 * i, 4);
    return (vi)_mm512_dpbusd_epi32((__m512i)p, (__m512i)w, _mm512_set1_epi32(four));
}
INLINE vi settle(vi sum, partial p) { return p; }
INLINE vb add_high(vb w, const uint8_t *masks, int g, int lane) {
    uint64_t m;
    memcpy(&m, masks + g * 8, 8);
    return (vb)_mm512_mask_add_epi8((__m512i)w, m, (__m512i)w, _mm512_set1_epi8(16));
}

#elif defined(HX_AVX2)

// 16-bit sums while they cannot overflow: 8, 4, 2 groups of 4-, 5-, 6-bit codes; 8 bits at once
#define SIGNED8 1
#define FLUSH(bits) ((bits) == 4 ? 8 : (bits) == 5 ? 4 : (bits) == 6 ? 2 : 1)
#define EACH_GROUP UNROLL(8)
#define KEPT(v) __asm__("" : "+x"(v)) // in order: else GCC adds up as a tree and spills its leaves
typedef vi partial;
INLINE partial begin(vi sum) { return (vi){0}; }
INLINE partial dot(partial p, vb w, const int8_t *x, int i, int bits) {
    int32_t four;
    memcpy(&four, x + 4 * i, 4);
    __m256i xs = _mm256_set1_epi32(four), ws = (__m256i)w;
    if (bits == 8) xs = _mm256_sign_epi8(xs, ws), ws = _mm256_abs_epi8(ws);
    __m256i sum = _mm256_add_epi16((__m256i)p, _mm256_maddubs_epi16(ws, xs));
    KEPT(sum);
    return (vi)sum;
}
INLINE vi settle(vi sum, partial p) {
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
typedef vi partial;
INLINE partial begin(vi sum) { return sum; }
INLINE partial dot(partial p, vb w, const int8_t *x, int i, int bits) {
    for (int l = 0; l < VL; l++)
        for (int j = 0; j < 4; j++)
            p[l] += (bits == 8 ? (int8_t)w[4 * l + j] : w[4 * l + j]) * x[4 * i + j];
    return p;
}
INLINE vi settle(vi sum, partial p) { return p; }
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
