// Mixture of experts: choose, bring the rows of one expert together, products per group, weighted
// sum. Groups change where a row lies, never how it is summed.
#include "vec.h"
#include <math.h>

extern const hx_kernel NAME(linear);
void NAME(quantise)(const float *x, uint8_t *out, int64_t m, int64_t rows, int64_t k,
                    int64_t first, int64_t last);

// ---------------------------------------------------------------- choosing

static int64_t choose_units(const void *params, int threads, int64_t *cost) {
    const hx_choose *p = params;
    *cost = p->experts * (p->top + 4);
    return *p->rows;
}

// The next expert after (score, index) in descending order; equal scores go to the lower one.
static int64_t next_best(const float *scores, int64_t n, float score, int64_t index) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; e++) {
        int later = scores[e] < score || (scores[e] == score && e > index);
        if (later && (best < 0 || scores[e] > scores[best])) best = e;
    }
    return best < 0 ? 0 : best; // only NaN is left; it comes out as such
}

static void choose_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_choose *p = params;
    for (int64_t t = first; t < last; t++) {
        const float *logits = p->logits + t * p->experts;
        int32_t *chosen = p->chosen + t * p->top;
        float *share = p->share + t * p->top, sum = 0.f, total = 0.f, most = -INFINITY;
        for (int64_t e = 0; e < p->experts; e++) most = logits[e] > most ? logits[e] : most;
        for (int64_t e = 0; e < p->experts && !p->sigmoid; e++) sum += expf(logits[e] - most);
        float score = INFINITY;
        for (int64_t r = 0, at = -1; r < p->top; r++) {
            at = next_best(logits, p->experts, score, at);
            score = logits[at];
            chosen[r] = (int32_t)at;
            share[r] = p->sigmoid ? 1.f / (1.f + expf(-score)) : expf(score - most) / sum;
            total += share[r];
        }
        float factor = p->normalise ? p->scale / fmaxf(total, 1e-20f) : p->scale;
        for (int64_t r = 0; r < p->top; r++) share[r] *= factor;
    }
}

const hx_kernel NAME(choose) = {choose_units, choose_run};

// ---------------------------------------------------------------- grouping

static int64_t one_unit(const void *params, int threads, int64_t *cost) {
    const hx_group *p = params;
    *cost = *p->rows * p->top * 4 + p->experts;
    return 1;
}

static void group_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_group *p = params;
    int64_t n = *p->rows * p->top, *start = p->start;
    memset(start, 0, (p->experts + 1) * sizeof *start);
    for (int64_t i = 0; i < n; i++) start[p->chosen[i] + 1]++;
    for (int64_t e = 0; e < p->experts; e++) start[e + 1] += start[e];
    for (int64_t i = 0; i < n; i++) {
        p->place[i] = (int32_t)start[p->chosen[i]]++;
        p->order[p->place[i]] = (int32_t)i;
    }
    memmove(start + 1, start, p->experts * sizeof *start);
    start[0] = 0;
    *p->total = n;
}

const hx_kernel NAME(group) = {one_unit, group_run};

static int64_t regroup_units(const void *params, int threads, int64_t *cost) {
    const hx_regroup *p = params;
    *cost = p->k / 2;
    return p->start[p->experts];
}

static void regroup_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_regroup *p = params;
    int64_t k = p->k, e = 0, row_bytes = p->floats ? k * 4 : hx_q8_bytes(k);
    for (int64_t j = first; j < last; j++) {
        while (j >= p->start[e + 1]) e++;
        int64_t rows = p->start[e + 1] - p->start[e], m = j - p->start[e];
        const float *x = p->x + (p->order ? p->order[j] / p->top : j) * k;
        uint8_t *out = p->out + p->start[e] * row_bytes;
        if (!p->floats) {
            NAME(quantise)(x, out, m, rows, k, 0, k / QK);
            continue;
        }
        int64_t size = hx_panel_rows(rows, PANEL), panel = m / size;
        int64_t here = rows - panel * size < size ? rows - panel * size : size;
        float *to = (float *)out + panel * size * k + (m - panel * size);
        for (int64_t i = 0; i < k; i++) to[i * here] = x[i];
    }
}

const hx_kernel NAME(regroup) = {regroup_units, regroup_run};

// ---------------------------------------------------------------- products

// The linear of expert e over its group; rows and parts are the caller's memory.
static hx_linear of_expert(const hx_experts *p, int64_t e, int64_t *rows, hx_part *parts) {
    *rows = p->start[e + 1] - p->start[e];
    for (int64_t i = 0; i < p->nparts; i++) {
        const hx_part *all = p->parts + i;
        int64_t tiles = (all->n + TILE - 1) / TILE;
        int64_t row_bytes = all->format <= HX_BF16 ? p->k * 4 : hx_q8_bytes(p->k);
        parts[i] = *all;
        parts[i].x += p->start[e] * row_bytes;
        parts[i].tiles += e * tiles * hx_tile_bytes(all->format, p->k);
    }
    return (hx_linear){.rows = rows, .k = p->k, .out = p->out + p->start[e] * p->stride,
                       .stride = p->stride, .scale = 1.f, .nparts = p->nparts, .parts = parts};
}

static int64_t experts_units(const void *params, int threads, int64_t *cost) {
    const hx_experts *p = params;
    int64_t units = 0, work = 0, rows;
    hx_part parts[HX_MOST_PARTS];
    for (int64_t e = 0; e < p->experts; e++) {
        hx_linear linear = of_expert(p, e, &rows, parts);
        int64_t each = 0, n = rows ? NAME(linear).units(&linear, threads, &each) : 0;
        units += n, work += n * each;
    }
    *cost = units ? work / units : 0;
    return units;
}

static void experts_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_experts *p = params;
    int64_t base = 0, rows, cost;
    hx_part parts[HX_MOST_PARTS];
    for (int64_t e = 0; e < p->experts && base < last; e++) {
        hx_linear linear = of_expert(p, e, &rows, parts);
        int64_t n = rows ? NAME(linear).units(&linear, threads, &cost) : 0;
        int64_t from = first > base ? first - base : 0, to = last - base < n ? last - base : n;
        if (from < to) NAME(linear).run(&linear, from, to, thread, threads);
        base += n;
    }
}

const hx_kernel NAME(experts) = {experts_units, experts_run, .streams = 1};

// ---------------------------------------------------------------- the sum

static int64_t combine_units(const void *params, int threads, int64_t *cost) {
    const hx_combine *p = params;
    *cost = p->width * p->top / 4;
    return *p->rows;
}

static void combine_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_combine *p = params;
    for (int64_t t = first; t < last; t++) {
        float *out = p->out + t * p->width;
        for (int64_t r = 0; r < p->top; r++) {
            const float *x = p->x + p->place[t * p->top + r] * p->width;
            float share = p->share[t * p->top + r];
            for (int64_t i = 0; i < p->width; i++) out[i] = (r ? out[i] : 0.f) + share * x[i];
        }
    }
}

const hx_kernel NAME(combine) = {combine_units, combine_run};
