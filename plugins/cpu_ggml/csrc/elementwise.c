// Norms, gates, rotary embedding and the KV write.
#include "vec.h"
#include <math.h>

void NAME(quantise)(const float *x, uint8_t *out, int64_t m, int64_t rows, int64_t k,
                    int64_t first, int64_t last);

// ---------------------------------------------------------------- norm

// out = x / sqrt(mean(x^2) + eps) * weight; n floats
static void norm_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
    vf squares = {0};
    int64_t i = 0;
    for (; i + VL <= n; i += VL) squares = vf_fma(vf_load(x + i), vf_load(x + i), squares);
    float total = vf_sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    float factor = 1.f / sqrtf(total / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL)
        vf_store(out + i, vf_load(x + i) * vf_set(factor) * vf_load(weight + i));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

static int64_t norm_units(const void *params, int threads, int64_t *cost) {
    const hx_norm *p = params;
    *cost = p->width / 2;
    return *p->rows;
}

static void norm_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_norm *p = params;
    int64_t n = p->width, rows = *p->rows;
    for (int64_t m = first; m < last; m++) {
        const float *x = p->x + m * n;
        if (p->residual) {
            float *sum = p->sum + m * n;
            for (int64_t i = 0; i < n; i++) sum[i] = x[i] + p->residual[m * n + i];
            x = sum;
        }
        norm_row(x, p->weight, p->out + m * n, n, p->eps);
        if (p->packed) NAME(quantise)(p->out + m * n, p->packed, m, rows, n, 0, n / QK);
    }
}

const hx_kernel NAME(norm) = {norm_units, norm_run};

// ---------------------------------------------------------------- gated activation

INLINE vf gated(vf gate, vf up, int64_t kind) {
    if (kind == HX_SILU) return gate * vf_sigmoid(gate) * up;
    if (kind == HX_GELU_TANH) { // x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
        vf inner = gate * vf_fma(gate * gate, vf_set(0.044715f), vf_set(1.f));
        return gate * vf_sigmoid(inner * vf_set(1.5957691216f)) * up;
    }
    gate = -vf_max(vf_set(-7.f), -gate); // in this order a NaN stays
    up = vf_max(vf_set(-7.f), -vf_max(vf_set(-7.f), -up));
    return gate * vf_sigmoid(gate * vf_set(1.702f)) * (up + vf_set(1.f));
}

static int64_t gate_units(const void *params, int threads, int64_t *cost) { // blocks of a row
    const hx_gate *p = params;
    *cost = 50;
    return *p->rows * ((p->width + QK - 1) / QK);
}

static void gate_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_gate *p = params;
    int64_t f = p->width, blocks = (f + QK - 1) / QK;
    for (int64_t u = first; u < last; u++) {
        int64_t m = u / blocks, i = u % blocks * QK, end = i + QK < f ? i + QK : f;
        const float *gate = p->gate_up + m * 2 * f, *up = gate + f;
        float *out = p->out + m * f;
        for (; i + VL <= end; i += VL)
            vf_store(out + i, gated(vf_load(gate + i), vf_load(up + i), p->kind));
        if (i < end) {
            float g[VL] = {0}, v[VL] = {0}, o[VL];
            memcpy(g, gate + i, (end - i) * 4);
            memcpy(v, up + i, (end - i) * 4);
            vf_store(o, gated(vf_load(g), vf_load(v), p->kind));
            memcpy(out + i, o, (end - i) * 4);
        }
        if (p->packed) NAME(quantise)(out, p->packed, m, *p->rows, f, u % blocks, u % blocks + 1);
    }
}

const hx_kernel NAME(gate) = {gate_units, gate_run};

// ---------------------------------------------------------------- rotary embedding and KV write

static int64_t angles_units(const void *params, int threads, int64_t *cost) {
    const hx_angles *p = params;
    *cost = p->dim * 15;
    return p->step->tokens;
}

static void angles_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_angles *p = params;
    int64_t half = p->dim / 2;
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = p->step->positions[t] * p->inv_freq[i];
            p->out[t * p->dim + i] = (float)cos(angle) * p->factor;
            p->out[t * p->dim + half + i] = (float)sin(angle) * p->factor;
        }
}

const hx_kernel NAME(angles) = {angles_units, angles_run};

static void rotate(float *x, const float *angles, int64_t dim, int interleaved) {
    int64_t half = dim / 2;
    const float *c = angles, *s = angles + half;
    int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i * step], b = x[i * step + apart];
        x[i * step] = a * c[i] - b * s[i];
        x[i * step + apart] = a * s[i] + b * c[i];
    }
}

// codes of 32 floats and their scale, as ggml's q8_0; the scale is NaN if x has a NaN or an infinity
INLINE float q8_codes(const float *x, int8_t *codes) {
    uint32_t top = 0; // as bits a NaN is the largest
    for (int i = 0; i < 32; i++) {
        uint32_t size = f32_bits(x[i]) & 0x7fffffff;
        top = size > top ? size : top;
    }
    float most = bits_f32(top), d = most / 127.f + most * 0.f, inverse = d > 0 ? 1.f / d : 0.f;
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)roundf(x[i] * inverse);
    return d;
}

INLINE void put_one(int64_t type, uint8_t *p, float v) {
    uint16_t h;
    switch (type) {
    case HX_KV_F32: memcpy(p, &v, 4); break;
    case HX_KV_F16: h = f32_f16(v); memcpy(p, &h, 2); break;
    case HX_KV_BF16: h = f32_bf16(v); memcpy(p, &h, 2); break;
    default: *p = f32_e5m2(v);
    }
}

static const int KV_BYTES[] = {4, 2, 2, 1, 1};

// K of one token and head: a column of its tile [dp][16] (q8_0: scales [dp / 32][16] behind)
static void store_k(const hx_pool *pool, int64_t slot, int64_t head, const float *x) {
    int64_t block = slot / pool->block, at = slot % pool->block, size = KV_BYTES[pool->type];
    uint8_t *tile = hx_block(pool, pool->k, block)
        + (head * (pool->block / TILE) + at / TILE) * pool->k_tile;
    at %= TILE;
    if (pool->type == HX_KV_Q8_0) {
        for (int64_t b = 0; b < pool->d / 32; b++) {
            int8_t codes[32];
            uint16_t d = f32_f16(q8_codes(x + b * 32, codes));
            for (int i = 0; i < 32; i++) tile[(b * 32 + i) * TILE + at] = codes[i];
            memcpy(tile + pool->dp * TILE + (b * TILE + at) * 2, &d, 2);
        }
        return;
    }
    for (int64_t i = 0; i < pool->d; i++) put_one(pool->type, tile + (i * TILE + at) * size, x[i]);
}

// V of one token and head: a row [dp] (q8_0: scales [dp / 32] behind)
static void store_v(const hx_pool *pool, int64_t slot, int64_t head, const float *x) {
    int64_t block = slot / pool->block, at = slot % pool->block, size = KV_BYTES[pool->type];
    uint8_t *row = hx_block(pool, pool->v, block) + (head * pool->block + at) * pool->v_row;
    if (pool->type == HX_KV_Q8_0) {
        for (int64_t b = 0; b < pool->d / 32; b++) {
            uint16_t d = f32_f16(q8_codes(x + b * 32, (int8_t *)row + b * 32));
            memcpy(row + pool->dp + b * 2, &d, 2);
        }
        return;
    }
    for (int64_t i = 0; i < pool->d; i++) put_one(pool->type, row + i * size, x[i]);
}

static int64_t store_units(const void *params, int threads, int64_t *cost) { // heads of a token
    const hx_store *p = params;
    *cost = p->pool.d;
    return p->step->tokens * (p->hq + 2 * p->pool.hkv);
}

static void store_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_store *p = params;
    int64_t d = p->pool.d, hq = p->hq, hkv = p->pool.hkv, heads = hq + 2 * hkv;
    float room[1024];
    for (int64_t u = first; u < last; u++) {
        int64_t t = u / heads, h = u % heads, slot = p->step->slots[t];
        const float *x = p->qkv + (t * heads + h) * d;
        if (h >= hq + hkv) {
            store_v(&p->pool, slot, h - hq - hkv, x);
            continue;
        }
        float *out = h < hq ? p->out + (t * hq + h) * d : room;
        const float *weight = h < hq ? p->q_norm : p->k_norm;
        if (weight) norm_row(x, weight, out, d, p->eps);
        else memcpy(out, x, d * 4);
        if (p->angles) rotate(out, p->angles + t * p->dim, p->dim, (int)p->interleaved);
        if (h >= hq) store_k(&p->pool, slot, h - hq, out);
    }
}

const hx_kernel NAME(store) = {store_units, store_run};
