// Repacked GEMM. Quantised weights meet activations of 8 bits (activations.c), float weights floats.
// A row's result does not depend on how many rows are computed beside it.
#include "dot.h"
#include <math.h>

// ---------------------------------------------------------------- results

typedef struct {
    float *out;
    int64_t stride, n;
    const float *bias;
    float scale, softcap;
    int plain; // a whole tile, nothing to add or scale
    const int32_t *below; // what products with flipped bits lack, or null
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

#define HX_FLIPPED 11 // Q8_0, its products with flipped bits

INLINE int code_bits(int f) {
    return f == HX_Q8_0 || f == HX_FLIPPED ? 8 : f == HX_Q6_K ? 6 : f == HX_Q5_0 || f == HX_Q5_1 || f == HX_Q5_K ? 5 : 4;
}

INLINE vb shifted(vb v, int bits) { return (vb)((vi)v >> bits); }

// codes of group g (4 inputs) for VL features from `lane` on
INLINE vb codes(int f, const uint8_t *w, int g, int lane) {
    const vb fifteen = (vb){0} + (uint8_t)15;
    if (code_bits(f) == 8) {
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
    case HX_Q8_0: case HX_FLIPPED: return 544;
    case HX_Q4_K: return 288;
    case HX_Q5_K: return 352;
    default: return 416;
    }
}

typedef struct { vf scale, least; } factors;

INLINE int has_least(int f) {
    return f == HX_Q4_1 || f == HX_Q5_1 || f == HX_Q4_K || f == HX_Q5_K;
}

// of VL features from `lane` on for 32 inputs (Q6_K: 16); `super`: those of their 256
INLINE factors factors_of(int f, const uint8_t *w, int part, int lane, const factors *super) {
    const int high = code_bits(f) == 5 ? 64 : 0;
    if (f == HX_Q6_K) return (factors){super->scale * vf_i8(w + 384 + part * 16 + lane)};
    if (f == HX_Q4_K || f == HX_Q5_K)
        return (factors){super->scale * vf_u8(w + 256 + high + lane),
                         -super->least * vf_u8(w + 272 + high + lane)};
    const uint8_t *scales = w + (code_bits(f) == 8 ? 512 : 256) + high + lane * 2;
    factors of = {vf_f16(scales)};
    if (has_least(f)) of.least = vf_f16(scales + 32);
    return of;
}

// 32 inputs of SPAN * VL features against R rows: acc += scale * d * (sum of products) + least * (d * sum)
INLINE void one_block(const int f, const int R, const uint8_t *w, const uint8_t *x, int lane,
                      const factors *super, vf (*acc)[PANEL], const int32_t *below) {
    const float *d = (const float *)(x + R * QK), *ds = d + 2 * R;
    const int32_t *minus = (const int32_t *)(d + R), *half = minus + 2 * R;
    const int bits = code_bits(f), shift = code_shift(f), parts = f == HX_Q6_K ? 2 : 1;
    const int flush = FLUSH(bits), flip = f == HX_FLIPPED;
    UNROLL(2) for (int part = 0; part < parts; part++) {
        vi sum[SPAN][PANEL];
        EACH_ROW {
            int32_t first = parts == 2 ? half[part * R + r] : minus[r];
            EACH_SPAN
                sum[s][r] = flip ? vi_load(below + lane + s * VL) : shift ? ((vi){0} + first) << shift : (vi){0};
        }
        const int last = part * 4 + 8 / parts;
        UNROLL(8) for (int g = part * 4; g < last; g += flush) {
            partial run[SPAN][PANEL];
            EACH_ROW EACH_SPAN run[s][r] = begin(sum[s][r], bits);
            EACH_GROUP for (int i = g; i < g + flush; i++) {
                if (i == last) break;
                operand c[SPAN];
                EACH_SPAN c[s] = ready(codes(f, w, i, lane + s * VL), bits, flip);
                EACH_ROW EACH_SPAN
                    run[s][r] = dot(run[s][r], c[s], (const int8_t *)x + r * QK, i, bits, flip);
            }
            EACH_ROW EACH_SPAN sum[s][r] = settle(sum[s][r], run[s][r], bits);
        }
        EACH_SPAN {
            factors of = factors_of(f, w, part, lane + s * VL, super + s);
            EACH_ROW {
                acc[s][r] = vf_fma(vf_int(sum[s][r]), of.scale * vf_set(d[r]), acc[s][r]);
                if (has_least(f)) acc[s][r] = vf_fma(of.least, vf_set(ds[r]), acc[s][r]);
            }
        }
    }
}

INLINE int head_bytes(int f) { // of 256 inputs, before their parts
    return f == HX_Q4_K || f == HX_Q5_K ? 64 : f == HX_Q6_K ? 32 : 0;
}

INLINE factors head_of(int f, const uint8_t *w, int lane) {
    factors of = {0};
    if (head_bytes(f)) of.scale = vf_f16(w + lane * 2);
    if (head_bytes(f) == 64) of.least = vf_f16(w + 32 + lane * 2);
    return of;
}

// acc += x times the weights of VL features at one input of block b
INLINE vf add_outlier(int f, const uint8_t *w, int64_t b, int input, int lane, float x, vf acc) {
    const uint8_t *head = w + b / 8 * (head_bytes(f) + 8 * part_bytes(f));
    const uint8_t *part = head + head_bytes(f) + b % 8 * part_bytes(f);
    const factors super = head_of(f, head, lane), of = factors_of(f, part, input / 16, lane, &super);
    vi c = (vi)codes(f, part, input / 4, lane) << (24 - input % 4 * 8) >> 24;
    if (code_bits(f) != 8 || !SIGNED8) c = (c & 255) - (1 << code_shift(f) & ~1);
    return vf_fma(vf_fma(of.scale, vf_int(c), of.least), vf_set(x), acc);
}

static __attribute__((noinline)) void add_outliers(int f, int R, const uint8_t *w, const uint8_t *x,
                                                   int64_t k, int lane, vf (*acc)[PANEL]) {
    const uint8_t *places = x + k / QK * R * XROW;
    uint64_t eight;
    for (int64_t i = 0, n = k / QK * R; i < n; i++) {
        if (i + 8 <= n && (memcpy(&eight, places + i, 8), !eight)) i += 7;
        else if (places[i]) {
            int64_t b = i / R, r = i % R;
            const float *apart = (const float *)(x + b * R * XROW + R * QK) + 5 * R;
            EACH_SPAN acc[s][r] = add_outlier(f, w, b, places[i] - 1, lane + s * VL, apart[r], acc[s][r]);
        }
    }
}

INLINE void quant_tile(const int f, const int R, const uint8_t *w, const uint8_t *x, int64_t k,
                       const target *t, int64_t row) {
    for (int lane = 0; lane < TILE; lane += SPAN * VL) {
        vf acc[SPAN][PANEL], all[SPAN][PANEL]; // apart: what a call is given lies in memory, always
        EACH_ROW EACH_SPAN acc[s][r] = (vf){0};
        const uint8_t *at = w, *xb = x;
        factors top[SPAN] = {0};
        for (int64_t b = 0; b < k / QK; b++) {
            if (head_bytes(f) && b % 8 == 0) {
                EACH_SPAN top[s] = head_of(f, at, lane + s * VL);
                at += head_bytes(f);
            }
            __builtin_prefetch(at + 2048);
            __builtin_prefetch(at + 2048 + 64);
            __builtin_prefetch(at + 2048 + 128);
            __builtin_prefetch(at + 2048 + 192);
            one_block(f, R, at, xb, lane, top, acc, t->below + b * TILE);
            at += part_bytes(f);
            xb += R * XROW;
        }
        EACH_ROW EACH_SPAN all[s][r] = acc[s][r];
        add_outliers(f, R, w, x, k, lane, all);
        EACH_ROW EACH_SPAN put(t, row + r, lane + s * VL, all[s][r]);
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
#if FLIPS
FORMAT(HX_FLIPPED, quant_tile)
#endif

typedef void runner(int, const uint8_t *, const uint8_t *, int64_t, const target *, int64_t);
static runner *const RUN[] = {
    run_HX_F32, run_HX_F16, run_HX_BF16, run_HX_Q4_0, run_HX_Q4_1, run_HX_Q5_0,
    run_HX_Q5_1, run_HX_Q8_0, run_HX_Q4_K, run_HX_Q5_K, run_HX_Q6_K,
};

#define WORTH_FLIPPING 3 // panels for which a tile's sums are made
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
    int64_t row_bytes = part->format <= HX_BF16 ? p->k * 4 : hx_q8_bytes(p->k);
    int64_t column = part->column + tile * TILE;
    target t = {p->out + column, p->stride, part->n - tile * TILE,
                p->bias ? p->bias + column : 0, p->scale, p->softcap};
    t.plain = t.n >= TILE && !t.bias && t.scale == 1.f && !(t.softcap > 0);
    const uint8_t *w = part->tiles + tile * hx_tile_bytes(part->format, p->k);
    runner *run = RUN[part->format];
#if FLIPS
    int32_t below[p->k / QK * TILE + 1]; // of codes below zero
    if (part->format == HX_Q8_0 && g->panels >= WORTH_FLIPPING)
        below_zero(w, p->k, below), t.below = below, run = run_HX_FLIPPED;
#endif
    for (int64_t i = chunk * g->held; i < g->panels && i < (chunk + 1) * g->held; i++) {
        int64_t here = g->rows - i * g->size < g->size ? g->rows - i * g->size : g->size;
        run(here, w, part->x + i * g->size * row_bytes, p->k, &t, i * g->size);
    }
}

static void linear_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_linear *p = params;
    grid g = grid_of(p);
    for (int64_t u = first; u < last; u++) tile_rows(p, &g, u % g.tiles, u / g.tiles);
}

const hx_kernel NAME(linear) = {linear_units, linear_run, .streams = 1};
