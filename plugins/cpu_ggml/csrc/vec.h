// One vector width per instruction set; arithmetic on vf/vi uses GCC's vector operators.
#pragma once
#include "hx.h"
#include <math.h>

#define CAT_(a, b, c) a##b##c
#define CAT(a, b, c) CAT_(a, b, c)
#define NAME(x) CAT(hx_, HX_ISA, _##x)
#define UNROLL_(n) _Pragma(#n)
#define UNROLL(n) UNROLL_(GCC unroll n)
#define EACH_ROW UNROLL(12) for (int r = 0; r < R; r++) // R and the arrays' bound are constants
#define INLINE static inline __attribute__((always_inline))

#if defined(HX_AVX512)
#include <immintrin.h>
#define VL 16
#define PANEL 12
#elif defined(HX_AVX2)
#include <immintrin.h>
#define VL 8
#define PANEL 6
#elif defined(HX_NEON_DOTPROD)
#define HX_ANY_NEON
#define VL 4
#define PANEL 8
#elif defined(HX_NEON)
#define HX_ANY_NEON
#define VL 4
#define PANEL 4
#else
#define HX_PORTABLE
#define VL 4
#define PANEL 4
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint8_t vb __attribute__((vector_size(VL * 4)));
typedef int8_t vsb __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t viu __attribute__((vector_size(VL * 4), aligned(4)));
typedef uint8_t vbu __attribute__((vector_size(VL * 4), aligned(1)));

INLINE vf vf_load(const float *p) { return *(const vfu *)p; }
INLINE void vf_store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf vf_set(float x) { return x - (vf){0}; }
INLINE vb vb_load(const uint8_t *p) { return *(const vbu *)p; }
INLINE vi vi_load(const int32_t *p) { return *(const viu *)p; }

#if defined(HX_AVX512)
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_int(vi a) { return _mm512_cvtepi32_ps((__m512i)a); }
INLINE vi vi_round(vf a) { return (vi)_mm512_cvtps_epi32(a); }
INLINE vf vf_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void vf_to_f16(void *p, vf v) { _mm256_storeu_si256(p, _mm512_cvtps_ph(v, 0)); }
INLINE vf vf_bf16(const void *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
}
INLINE vf vf_e5m2(const void *p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 8));
}
INLINE vf vf_i8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}
INLINE vf vf_u8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p)));
}
#elif defined(HX_AVX2)
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_int(vi a) { return _mm256_cvtepi32_ps((__m256i)a); }
INLINE vi vi_round(vf a) { return (vi)_mm256_cvtps_epi32(a); }
INLINE vf vf_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void vf_to_f16(void *p, vf v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, 0)); }
INLINE vf vf_bf16(const void *p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16);
}
INLINE vf vf_e5m2(const void *p) {
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p)), 8));
}
INLINE vf vf_i8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}
INLINE vf vf_u8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)));
}
#elif defined(HX_ANY_NEON)
#include "vec_neon.h"
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vf_max(vf a, vf b) {
    vi more = a > b;
    return (vf)(((vi)a & more) | ((vi)b & ~more));
}
INLINE vf vf_int(vi a) { return __builtin_convertvector(a, vf); }
INLINE vi vi_round(vf a) {
    const vf magic = vf_set(12582912.f);
    return (vi)(a + magic) - (vi)magic;
}
#define EACH(expr) ({ vf v_; for (int i = 0; i < VL; i++) v_[i] = (expr); v_; })
#endif

// -- float16 and its relatives, one by one (tails, other machines)
INLINE float bits_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t f32_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
#if defined(__F16C__)
INLINE float f16_f32(uint16_t h) { return _cvtsh_ss(h); }
INLINE uint16_t f32_f16(float f) { return _cvtss_sh(f, 0); }
#elif !defined(HX_ANY_NEON)
INLINE float f16_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if (rest >= 0x0f800000) return bits_f32(sign | rest | 0x7f800000);    // inf, nan
    return bits_f32(f32_bits(bits_f32(rest) * 0x1p112f) | sign);           // subnormals too
}
INLINE uint16_t f32_f16(float f) {
    uint32_t u = f32_bits(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return sign | 0x7e00;
    if (u >= 0x477ff000) return sign | 0x7c00;
    if (u < 0x38800000) return sign | (uint16_t)(f32_bits(bits_f32(u) + 0.5f) - 0x3f000000);
    return sign | (uint16_t)((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13);
}
#endif
INLINE float bf16_f32(uint16_t h) { return bits_f32((uint32_t)h << 16); }
INLINE uint16_t f32_bf16(float f) {
    uint32_t u = f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return u >> 16 | 64;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
INLINE uint8_t f32_e5m2(float f) { // the largest number where f is beyond it, if f is a number
    if (f > 57344.f && f < INFINITY) f = 57344.f;
    if (f < -57344.f && f > -INFINITY) f = -57344.f;
    uint16_t h = f32_f16(f);
    if ((h & 0x7fff) > 0x7c00) return h >> 8 | 2;
    return (h + 0x7f + (h >> 8 & 1)) >> 8;
}
#if defined(HX_PORTABLE)
INLINE vf vf_f16(const void *p) { const uint16_t *h = p; return EACH(f16_f32(h[i])); }
INLINE void vf_to_f16(void *p, vf v) {
    for (int i = 0; i < VL; i++) ((uint16_t *)p)[i] = f32_f16(v[i]);
}
INLINE vf vf_bf16(const void *p) { const uint16_t *h = p; return EACH(bf16_f32(h[i])); }
INLINE vf vf_e5m2(const void *p) { const uint8_t *h = p; return EACH(f16_f32(h[i] << 8)); }
INLINE vf vf_i8(const void *p) { const int8_t *h = p; return EACH((float)h[i]); }
INLINE vf vf_u8(const void *p) { const uint8_t *h = p; return EACH((float)h[i]); }
#endif

INLINE float vf_sum(vf v) {
    float s[VL];
    vf_store(s, v);
    for (int n = VL / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
}

#if defined(HX_AVX512)
INLINE int32_t vi_sum(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE void vi_bytes(int8_t *out, vi v) { // the low bytes of VL integers
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)v));
}
#elif defined(HX_AVX2)
INLINE int32_t vi_sum(vi v) {
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v),
                              _mm256_extracti128_si256((__m256i)v, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}
INLINE void vi_bytes(int8_t *out, vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v),
                                    _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(words, words));
}
#elif defined(HX_PORTABLE)
INLINE int32_t vi_sum(vi v) {
    int32_t s = 0;
    for (int i = 0; i < VL; i++) s += v[i];
    return s;
}
INLINE void vi_bytes(int8_t *out, vi v) {
    for (int i = 0; i < VL; i++) out[i] = (int8_t)v[i];
}
#endif

INLINE float vf_top(vf v) {
    float s[VL];
    vf_store(s, v);
    for (int n = VL / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] = s[i] > s[i + n] ? s[i] : s[i + n];
    return s[0];
}

// e^x to about 1 ulp; 0 below -87, x clamped at 88, NaN kept (Cody-Waite reduction, degree 6)
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set(12582912.f + 127); // n + 127, an exponent's bits, ends up at t's end
    vi dead = x <= vf_set(-87.f);
    x = -vf_max(vf_set(-88.f), -vf_max(vf_set(-87.f), x)); // in this order a NaN stays
    vf t = vf_fma(x, vf_set(1.44269504f), magic), n = t - magic;
    vf r = vf_fma(n, vf_set(-0.693145752f), x);
    r = vf_fma(n, vf_set(-1.42860677e-6f), r);
    vf p = vf_set(1.f / 720);
    p = vf_fma(p, r, vf_set(1.f / 120));
    p = vf_fma(p, r, vf_set(1.f / 24));
    p = vf_fma(p, r, vf_set(1.f / 6));
    p = vf_fma(p, r, vf_set(.5f));
    p = vf_fma(p, r, vf_set(1.f));
    p = vf_fma(p, r, vf_set(1.f));
    p *= (vf)((vi)t << 23); // a product: added to a NaN's bits, the exponent could make it a number
    return (vf)((vi)p & ~dead);
}

INLINE vf vf_sigmoid(vf x) { return vf_set(1.f) / (vf_set(1.f) + vf_exp(-x)); }
INLINE vf vf_tanh(vf x) { return vf_set(2.f) * vf_sigmoid(x + x) - vf_set(1.f); }
