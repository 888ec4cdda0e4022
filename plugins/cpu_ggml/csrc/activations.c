// Activations as the products want them: panels of rows, block by block, so that what is multiplied
// together lies together. Before quantised weights they are rounded to 8 bits per 32, outliers apart.
#include "vec.h"
#include <math.h>

#define APART 4.f // how many times larger than all others of its block an outlier is

// Where the element is that dwarfs the others of its block, if there is one: else -1. Rounded
// with it they would share steps made for it alone; some features of a model are always such
// (mixed-precision decomposition: Dettmers et al., LLM.int8(), NeurIPS 2022, there for whole columns).
INLINE int outlier(const float *x, float most) {
    vi large = {0};
    for (int i = 0; i < QK; i += VL) {
        vf v = vf_load(x + i);
        large -= vf_max(v, -v) > vf_set(most / APART);
    }
    if (vi_sum(large) != 1) return -1;
    int at = 0;
    while (!(fabsf(x[at]) > most / APART)) at++;
    return at;
}

INLINE float largest(const float *x) {
    vf top = {0};
    for (int i = 0; i < QK; i += VL) {
        vf v = vf_load(x + i);
        top = vf_max(top, vf_max(v, -v));
    }
    return vf_top(top);
}

INLINE void quantise_block(const float *x, uint8_t *block, int64_t rows, int64_t r, uint8_t *place) {
    vf poison = {0}; // NaN if x has a NaN or an infinity
    for (int i = 0; i < QK; i += VL) poison = vf_fma(vf_load(x + i), (vf){0}, poison);
    float most = largest(x), apart = 0.f, others[QK];
    int at = outlier(x, most);
    if (at >= 0) {
        memcpy(others, x, sizeof others);
        apart = x[at], others[at] = 0.f;
        x = others, most = largest(x);
    }
    float inverse = most > 0 ? 127.f / most : 0.f, d = most / 127.f + vf_sum(poison);
    int32_t half[2] = {0, 0};
    int8_t *codes = (int8_t *)block + r * QK;
    for (int i = 0; i < QK; i += VL) {
        vi q = vi_round(vf_load(x + i) * vf_set(inverse));
        vi_bytes(codes + i, q);
        half[i / 16] += vi_sum(q);
    }
    float *scale = (float *)(block + rows * QK) + r;
    int32_t *whole = (int32_t *)scale, sum = half[0] + half[1];
    scale[0] = d;
    whole[rows] = -sum;
    scale[2 * rows] = d * sum;
    whole[3 * rows] = -half[0];
    whole[4 * rows] = -half[1];
    scale[5 * rows] = apart;
    *place = (uint8_t)(at + 1);
}

// Blocks first .. last - 1 of row m of `rows`, from x (of that row) into the panels at `out`.
void NAME(quantise)(const float *x, uint8_t *out, int64_t m, int64_t rows, int64_t k,
                    int64_t first, int64_t last) {
    int64_t size = hx_panel_rows(rows, PANEL), panel = m / size, nb = k / QK;
    int64_t here = rows - panel * size < size ? rows - panel * size : size;
    out += panel * size * hx_q8_bytes(k), m -= panel * size;
    uint8_t *places = out + here * nb * XROW + m;
    for (int64_t b = first; b < last; b++)
        quantise_block(x + b * QK, out + b * here * XROW, here, m, places + b * here);
}

static int64_t pack_q8_units(const void *params, int threads, int64_t *cost) { // blocks of a row
    const hx_pack_x *p = params;
    *cost = 20;
    return *p->rows * (p->k / QK);
}

static void pack_q8_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_pack_x *p = params;
    int64_t rows = *p->rows, nb = p->k / QK;
    for (int64_t u = first; u < last;) {
        int64_t m = u / nb, b = u % nb, end = b + last - u < nb ? b + last - u : nb;
        NAME(quantise)(p->x + m * p->k, p->out, m, rows, p->k, b, end);
        u += end - b;
    }
}

const hx_kernel NAME(pack_q8) = {pack_q8_units, pack_q8_run};

static int64_t pack_f32_units(const void *params, int threads, int64_t *cost) {
    const hx_pack_x *p = params;
    *cost = p->k / 2;
    return *p->rows;
}

static void pack_f32_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_pack_x *p = params;
    int64_t rows = *p->rows, size = hx_panel_rows(rows, PANEL), k = p->k;
    for (int64_t m = first; m < last; m++) {
        int64_t panel = m / size, here = rows - panel * size < size ? rows - panel * size : size;
        float *out = (float *)p->out + panel * size * k + (m - panel * size);
        for (int64_t i = 0; i < k; i++) out[i * here] = p->x[m * k + i];
    }
}

const hx_kernel NAME(pack_f32) = {pack_f32_units, pack_f32_run};
