// Vectors of NEON, as every armv8-a machine has it: 4 lanes, 32 registers, float16 conversion.
#pragma once
#include <arm_neon.h>

INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); } // NaN if either is
INLINE vf vf_int(vi a) { return vcvtq_f32_s32(a); }
INLINE vi vi_round(vf a) { return vcvtnq_s32_f32(a); }

INLINE vf halves(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
INLINE vf vf_f16(const void *p) { return halves(vld1_u16(p)); }
INLINE void vf_to_f16(void *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
INLINE vf vf_bf16(const void *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

INLINE uint8x8_t four_bytes(const void *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vreinterpret_u8_u32(vdup_n_u32(four));
}
INLINE vf vf_e5m2(const void *p) { return halves(vget_low_u16(vshll_n_u8(four_bytes(p), 8))); }
INLINE vf vf_i8(const void *p) {
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(four_bytes(p)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
INLINE vf vf_u8(const void *p) {
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))));
}

INLINE float f16_f32(uint16_t h) { __fp16 v; memcpy(&v, &h, 2); return v; }
INLINE uint16_t f32_f16(float f) { __fp16 v = f; uint16_t h; memcpy(&h, &v, 2); return h; }

INLINE int32_t vi_sum(vi v) { return vaddvq_s32(v); }
INLINE void vi_bytes(int8_t *out, vi v) {
    int16x4_t words = vmovn_s32(v);
    int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    vst1_lane_u32((void *)out, vreinterpret_u32_s8(bytes), 0);
}
