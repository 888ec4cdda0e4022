// Repacked GEMM. Quantised weights meet activations rounded to 8 bits per 32; float weights meet
// floats. A row's result does not depend on how many rows are computed beside it.
#include "dot.h"
#include <math.h>

// ---------------------------------------------------------------- activations

INLINE void quantise_block(const float *x, uint8_t *block, int64_t rows, int64_t r) {
    vf top = {0}, poison = {0}; // NaN if x has a NaN or an infinity
    for (int i = 0; i < QK; i += VL) {
        vf v = vf_load(x + i);
        top = vf_max(top, vf_max(v, -v));
        poison = vf_fma(v, (vf){0}, poison);
    }
    float most = vf_top(top), inverse = most > 0 ? 127.f / most : 0.f;
    float d = most / 127.f + vf_sum(poison);
    int32_t half[2] = {0, 0};
    int8_t *codes = (int8_t *)block + r * QK;
    for (int i = 0; i < QK; i += VL) {
        vi q = vi_round(vf_load(x + i) * vf_set(inverse));
        vi_bytes(codes + i, q);
        half[i / 16] += vi_sum(q);
    }
    float *scale = (float *)(block + rows * QK) + r;
    int32_t sum = half[0] + half[1];
    scale[0] = d;
    ((int32_t *)scale)[rows] = -sum;
    scale[2 * rows] = d * sum;
    ((int32_t *)scale)[3 * rows] = -half[0];
    ((int32_t *)scale)[4 * rows] = -half[1];
}

// Blocks first .. last - 1 of row m of `rows`, from x (of that row) into the panels at `out`.
void NAME(quantise)(const float *x, uint8_t *out, int64_t m, int64_t rows, int64_t k,
                    int64_t first, int64_t last) {
    int64_t size = hx_panel_rows(rows, PANEL), panel = m / size, nb = k / QK;
    int64_t here = rows - panel * size < size ? rows - panel * size : size;
    out += panel * size * nb * XROW;
    for (int64_t b = first; b < last; b++)
        quantise_block(x + b * QK, out + b * here * XROW, here, m - panel * size);
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

// ---------------------------------------------------------------- results

typedef struct {
    float *out;
    int64_t stride, n;
    const float *bias;
    float scale, softcap;
    int plain; // a whole tile, nothing to add or scale
} target;

static __attribute__((noinline)) void put_changed(const target *t, float *out, int64_t lane, vf v) {
    int64_t room = t->n - lane;
    for (int i = 0; t->bias && i < VL && i < room; i++) v[i] += t->bias[lane + i];
    v *= vf_set(t->scale);
    if (t->softcap > 0) v = vf_set(t->softcap) * vf_tanh(v / vf_set(t->softcap));
    for (int i = 0; i < VL && i < room; i++) out[i] = v[i];
}

INLINE void put(const target *t, int64_t row, int64_t lane, vf v) {
    float *out = t->out + row * t->stride + lane;
    if (t->plain) vf_store(out, v);
    else put_changed(t, out, lane, v);
}

// Vectors of features side by side: with two, each activation is loaded once for both.
#if defined(HX_AVX2)
#define SPAN 2
#else
#define SPAN 1
#endif
#define EACH_SPAN UNROLL(2) for (int s = 0; s < SPAN; s++)

// ---------------------------------------------------------------- quantised tiles

INLINE int code_bits(int f) {
    return f == HX_Q8_0 ? 8 : f == HX_Q6_K ? 6 : f == HX_Q5_0 || f == HX_Q5_1 || f == HX_Q5_K ? 5 : 4;
}

INLINE vb shifted(vb v, int bits) { return (vb)((vi)v >> bits); }

// codes of group g (4 inputs) for VL features from `lane` on
INLINE vb codes(int f, const uint8_t *w, int g, int lane) {
    const vb fifteen = (vb){0} + (uint8_t)15;
    if (f == HX_Q8_0) {
        vb v = vb_load(w + g * 64 + lane * 4);
        return SIGNED8 ? v : v ^ ((vb){0} + (uint8_t)128);
    }
    vb v = vb_load(w + g % 4 * 64 + lane * 4);
    v = (g < 4 ? v : shifted(v, 4)) & fifteen;
    if (code_bits(f) == 5) return add_high(v, w + 256, g, lane);
    if (f == HX_Q6_K) {
        vb two = shifted(vb_load(w + 256 + g / 4 * 64 + lane * 4), g % 4 * 2) & ((vb){0} + (uint8_t)3);
        v |= (vb)((vi)two << 4);
    }
    return v;
}

INLINE int code_shift(int f) { // log2 of what codes are too high by; 0: a minimum is stored
    return f == HX_Q4_0 ? 3 : f == HX_Q5_0 ? 4 : f == HX_Q6_K ? 5 : f == HX_Q8_0 && !SIGNED8 ? 7 : 0;
}

INLINE int part_bytes(int f) {
    switch (f) {
    case HX_Q4_0: return 288;
    case HX_Q4_1: return 320;
    case HX_Q5_0: return 352;
    case HX_Q5_1: return 384;
    case HX_Q8_0: return 544;
    case HX_Q4_K: return 288;
    case HX_Q5_K: return 352;
    default: return 416;
    }
}

typedef struct { vf scale, least; } factors;

INLINE vf u8_at(const uint8_t *p, int lane) { return vf_u8(p + lane); }

// 32 inputs of SPAN * VL features against R rows: acc += scale * d * (sum of products) + least * (d * sum)
INLINE void one_block(const int f, const int R, const uint8_t *w, const uint8_t *x, int lane,
                      const factors *super, vf (*acc)[PANEL]) {
    const float *d = (const float *)(x + R * QK), *ds = d + 2 * R;
    const int32_t *minus = (const int32_t *)(d + R), *half = minus + 2 * R;
    const int bits = code_bits(f), shift = code_shift(f), parts = f == HX_Q6_K ? 2 : 1;
    const int flush = FLUSH(bits), high = bits == 5 ? 64 : 0;
    UNROLL(2) for (int part = 0; part < parts; part++) {
        vi sum[SPAN][PANEL];
        EACH_ROW {
            int32_t first = parts == 2 ? half[part * R + r] : minus[r];
            EACH_SPAN sum[s][r] = shift ? ((vi){0} + first) << shift : (vi){0};
        }
        const int last = part * 4 + 8 / parts;
        UNROLL(8) for (int g = part * 4; g < last; g += flush) {
            partial run[SPAN][PANEL];
            EACH_ROW EACH_SPAN run[s][r] = begin(sum[s][r]);
            EACH_GROUP for (int i = g; i < g + flush; i++) {
                if (i == last) break;
                vb c[SPAN];
                EACH_SPAN c[s] = codes(f, w, i, lane + s * VL);
                EACH_ROW EACH_SPAN
                    run[s][r] = dot(run[s][r], c[s], (const int8_t *)x + r * QK, i, bits);
            }
            EACH_ROW EACH_SPAN sum[s][r] = settle(sum[s][r], run[s][r]);
        }
        EACH_SPAN {
            const int at = lane + s * VL;
            vf scale, least = {0};
            if (f == HX_Q6_K) scale = super[s].scale * vf_i8(w + 384 + part * 16 + at);
            else if (f >= HX_Q4_K) {
                scale = super[s].scale * u8_at(w + 256 + high, at);
                least = -super[s].least * u8_at(w + 272 + high, at);
            } else {
                const uint8_t *scales = w + (f == HX_Q8_0 ? 512 : 256) + high;
                scale = vf_f16(scales + at * 2);
                if (f == HX_Q4_1 || f == HX_Q5_1) least = vf_f16(scales + 32 + at * 2);
            }
            const int has_least = f == HX_Q4_1 || f == HX_Q5_1 || f == HX_Q4_K || f == HX_Q5_K;
            EACH_ROW {
                acc[s][r] = vf_fma(vf_int(sum[s][r]), scale * vf_set(d[r]), acc[s][r]);
                if (has_least) acc[s][r] = vf_fma(least, vf_set(ds[r]), acc[s][r]);
            }
        }
    }
}

INLINE void quant_tile(const int f, const int R, const uint8_t *w, const uint8_t *x, int64_t k,
                       const target *t, int64_t row) {
    const int super = f == HX_Q4_K || f == HX_Q5_K ? 64 : f == HX_Q6_K ? 32 : 0;
    for (int lane = 0; lane < TILE; lane += SPAN * VL) {
        vf acc[SPAN][PANEL];
        EACH_ROW EACH_SPAN acc[s][r] = (vf){0};
        const uint8_t *at = w, *xb = x;
        factors top[SPAN] = {0};
        for (int64_t b = 0; b < k / QK; b++) {
            if (super && b % 8 == 0) {
                EACH_SPAN {
                    top[s].scale = vf_f16(at + (lane + s * VL) * 2);
                    if (f != HX_Q6_K) top[s].least = vf_f16(at + 32 + (lane + s * VL) * 2);
                }
                at += super;
            }
            __builtin_prefetch(at + 2048);
            __builtin_prefetch(at + 2048 + 64);
            __builtin_prefetch(at + 2048 + 128);
            __builtin_prefetch(at + 2048 + 192);
            one_block(f, R, at, xb, lane, top, acc);
            at += part_bytes(f);
            xb += R * XROW;
        }
        EACH_ROW EACH_SPAN put(t, row + r, lane + s * VL, acc[s][r]);
    }
}

// ---------------------------------------------------------------- float tiles

INLINE vf float_at(const int f, const uint8_t *w, int64_t i) {
    return f == HX_F32 ? vf_load((const float *)w + i)
         : f == HX_F16 ? vf_f16((const uint16_t *)w + i) : vf_bf16((const uint16_t *)w + i);
}

INLINE void float_step(const int f, const int R, const uint8_t *w, const float *x, int64_t i, int lane,
                       vf (*sum)[PANEL]) {
    vf v[SPAN];
    EACH_SPAN v[s] = float_at(f, w, i * TILE + lane + s * VL);
    EACH_ROW EACH_SPAN sum[s][r] = vf_fma(v[s], vf_set(x[i * R + r]), sum[s][r]);
}

// Four sums over k mod 4, each in ascending order, then together: the same for any R
INLINE void float_tile(const int f, const int R, const uint8_t *w, const uint8_t *xs, int64_t k,
                       const target *t, int64_t row) {
    const float *x = (const float *)xs;
    for (int lane = 0; lane < TILE; lane += SPAN * VL) {
        vf some[4][SPAN][PANEL];
        UNROLL(4) for (int c = 0; c < 4; c++) EACH_ROW EACH_SPAN some[c][s][r] = (vf){0};
        if (R * SPAN <= 4) { // all four at once: few rows are not bound by the latency of one chain
            int64_t i = 0;
            for (; i + 4 <= k; i += 4)
                UNROLL(4) for (int c = 0; c < 4; c++) float_step(f, R, w, x, i + c, lane, some[c]);
            for (int c = 0; i < k; i++, c++) float_step(f, R, w, x, i, lane, some[c]);
        } else {
            UNROLL(4) for (int c = 0; c < 4; c++)
                for (int64_t i = c; i < k; i += 4) float_step(f, R, w, x, i, lane, some[c]);
        }
        EACH_ROW EACH_SPAN put(t, row + r, lane + s * VL,
                               (some[0][s][r] + some[1][s][r]) + (some[2][s][r] + some[3][s][r]));
    }
}

// ---------------------------------------------------------------- dispatch

#define ROWS_CASE(F, KIND, R) case R: KIND(F, R, w, x, k, t, row); break;
#if PANEL == 12
#define ROWS(F, KIND) switch (rows) { ROWS_CASE(F, KIND, 1) ROWS_CASE(F, KIND, 2) \
    ROWS_CASE(F, KIND, 3) ROWS_CASE(F, KIND, 4) ROWS_CASE(F, KIND, 5) ROWS_CASE(F, KIND, 6) \
    ROWS_CASE(F, KIND, 7) ROWS_CASE(F, KIND, 8) ROWS_CASE(F, KIND, 9) ROWS_CASE(F, KIND, 10) \
    ROWS_CASE(F, KIND, 11) ROWS_CASE(F, KIND, 12) }
#elif PANEL == 6
#define ROWS(F, KIND) switch (rows) { ROWS_CASE(F, KIND, 1) ROWS_CASE(F, KIND, 2) \
    ROWS_CASE(F, KIND, 3) ROWS_CASE(F, KIND, 4) ROWS_CASE(F, KIND, 5) ROWS_CASE(F, KIND, 6) }
#elif PANEL == 8
#define ROWS(F, KIND) switch (rows) { ROWS_CASE(F, KIND, 1) ROWS_CASE(F, KIND, 2) \
    ROWS_CASE(F, KIND, 3) ROWS_CASE(F, KIND, 4) ROWS_CASE(F, KIND, 5) ROWS_CASE(F, KIND, 6) \
    ROWS_CASE(F, KIND, 7) ROWS_CASE(F, KIND, 8) }
#else
#define ROWS(F, KIND) switch (rows) { ROWS_CASE(F, KIND, 1) ROWS_CASE(F, KIND, 2) \
    ROWS_CASE(F, KIND, 3) ROWS_CASE(F, KIND, 4) }
#endif
#define FORMAT(F, KIND) static __attribute__((noinline)) void run_##F(int rows, const uint8_t *w, \
    const uint8_t *x, int64_t k, const target *t, int64_t row) { ROWS(F, KIND) }
FORMAT(HX_F32, float_tile)
FORMAT(HX_F16, float_tile)
FORMAT(HX_BF16, float_tile)
FORMAT(HX_Q4_0, quant_tile)
FORMAT(HX_Q4_1, quant_tile)
FORMAT(HX_Q5_0, quant_tile)
FORMAT(HX_Q5_1, quant_tile)
FORMAT(HX_Q8_0, quant_tile)
FORMAT(HX_Q4_K, quant_tile)
FORMAT(HX_Q5_K, quant_tile)
FORMAT(HX_Q6_K, quant_tile)

typedef void runner(int, const uint8_t *, const uint8_t *, int64_t, const target *, int64_t);
static runner *const RUN[] = {
    run_HX_F32, run_HX_F16, run_HX_BF16, run_HX_Q4_0, run_HX_Q4_1, run_HX_Q5_0,
    run_HX_Q5_1, run_HX_Q8_0, run_HX_Q4_K, run_HX_Q5_K, run_HX_Q6_K,
};

#define CACHED (384 * 1024) // bytes of activations that stay in L2 while weights pass by

// A unit is one tile against the panels of a chunk.
typedef struct { int64_t rows, size, panels, tiles, held, chunks; } grid;

static grid grid_of(const hx_linear *p) {
    grid g = {.rows = *p->rows, .size = hx_panel_rows(*p->rows, PANEL)};
    g.panels = (g.rows + g.size - 1) / g.size;
    for (int64_t i = 0; i < p->nparts; i++) g.tiles += (p->parts[i].n + TILE - 1) / TILE;
    g.held = CACHED / (g.size * p->k * 3 / 2 + 1);
    g.held = g.held < 1 ? 1 : g.held;
    g.chunks = (g.panels + g.held - 1) / g.held;
    return g;
}

static int64_t linear_units(const void *params, int threads, int64_t *cost) {
    const hx_linear *p = params;
    grid g = grid_of(p);
    int64_t rows = g.chunks > 1 ? g.held * g.size : g.rows;
    *cost = p->k * (2 + rows) / 3;
    return g.tiles * g.chunks;
}

static void tile_rows(const hx_linear *p, const grid *g, int64_t tile, int64_t chunk) {
    const hx_part *part = p->parts;
    for (; tile >= (part->n + TILE - 1) / TILE; part++) tile -= (part->n + TILE - 1) / TILE;
    int64_t row_bytes = part->format <= HX_BF16 ? p->k * 4 : p->k / QK * XROW;
    int64_t column = part->column + tile * TILE;
    target t = {p->out + column, p->stride, part->n - tile * TILE,
                p->bias ? p->bias + column : 0, p->scale, p->softcap, 0};
    t.plain = t.n >= TILE && !t.bias && t.scale == 1.f && !(t.softcap > 0);
    const uint8_t *w = part->tiles + tile * hx_tile_bytes(part->format, p->k);
    for (int64_t i = chunk * g->held; i < g->panels && i < (chunk + 1) * g->held; i++) {
        int64_t here = g->rows - i * g->size < g->size ? g->rows - i * g->size : g->size;
        RUN[part->format](here, w, part->x + i * g->size * row_bytes, p->k, &t, i * g->size);
    }
}

static void linear_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_linear *p = params;
    grid g = grid_of(p);
    for (int64_t u = first; u < last; u++) tile_rows(p, &g, u % g.tiles, u / g.tiles);
}

const hx_kernel NAME(linear) = {linear_units, linear_run, .streams = 1};
