// Picking tokens, a row per work item; the rules are those of `SamplingBatch`.
#include "hx.h"
#include <float.h>
#include <math.h>
#include <stdlib.h>

static int64_t best(const float *x, int64_t n) {
    float most = -INFINITY;
    for (int64_t i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i++)
        if (x[i] == most) return i;
    return 0;
}

static void adjust(const hx_sample *p, int64_t r, float *x) {
    for (int32_t i = p->history_start[r]; i < p->history_start[r + 1]; i++) {
        float *v = x + p->history_ids[i];
        int32_t count = p->history_counts[i];
        *v = *v > 0 ? *v / p->repetition[r] : *v * p->repetition[r];
        *v = *v - p->frequency[r] * (float)count - p->presence[r] * (float)(count > 0);
    }
    for (int32_t i = p->bias_start[r]; i < p->bias_start[r + 1]; i++)
        x[p->bias_ids[i]] += p->bias_values[i];
    if (!p->mask) return;
    const uint32_t *mask = p->mask + r * ((p->vocab + 31) / 32);
    for (int64_t i = 0; i < p->vocab; i++)
        if (!(mask[i / 32] >> (i % 32) & 1)) x[i] = -INFINITY;
}

typedef struct { float chance; int32_t id; } candidate;

static int by_chance(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->chance != y->chance) return x->chance < y->chance ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

// Zero what top-k and then top-p of the rest leave out. Only tokens near the top are sorted: the
// bar falls until enough of them are above it. `list` holds vocab candidates.
static void truncate(float *x, int64_t n, double total, int64_t top_k, double top_p, float most,
                     candidate *list) {
    if (top_k <= 0 || top_k > n) top_k = n;
    for (float bar = most / 64;; bar /= 4096) {
        int64_t count = 0;
        if (bar < FLT_MIN) bar = 0;
        for (int64_t i = 0; i < n; i++)
            if (x[i] > bar) list[count++] = (candidate){x[i], (int32_t)i};
        qsort(list, count, sizeof *list, by_chance);
        int64_t most_kept = top_k < count ? top_k : count, kept = 0;
        double mass = total, before = 0;
        if (top_k < n) {
            if (count < top_k && bar > 0) continue;
            for (mass = 0; kept < most_kept; kept++) mass += list[kept].chance;
        }
        for (kept = 0; kept < most_kept && (kept == 0 || before < top_p * mass); kept++)
            before += list[kept].chance;
        if (kept == count && count < top_k && before < top_p * mass && bar > 0) continue;
        candidate last = list[kept - 1];
        for (int64_t i = 0; i < n; i++)
            if (x[i] < last.chance || (x[i] == last.chance && i > last.id)) x[i] = 0;
        return;
    }
}

static int64_t draw(const hx_sample *p, int64_t r, float *x, candidate *list) {
    int64_t n = p->vocab;
    float most = x[best(x, n)], sharp = 1.f / p->temperature[r];
    double total = 0;
    for (int64_t i = 0; i < n; i++) x[i] = expf((x[i] - most) * sharp);
    for (int64_t i = 0; i < n; i++) total += x[i];
    if ((p->top_k[r] > 0 && p->top_k[r] < n) || p->top_p[r] < 1)
        truncate(x, n, total, p->top_k[r], p->top_p[r], 1.f, list);
    if (p->min_p[r] > 0)
        for (int64_t i = 0; i < n; i++)
            if (x[i] < p->min_p[r]) x[i] = 0;
    double all = 0, running = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) all += x[i];
    double target = p->uniforms[r] * all;
    for (int64_t i = 0; i < n; i++) {
        if (x[i] > 0) last = i;
        running += x[i];
        if (running > target) return i;
    }
    return last;
}

static void pick(const hx_sample *p, int64_t r, float *scratch) {
    const float *logits = p->logits + r * p->vocab;
    int changed = p->mask || p->history_start[r] < p->history_start[r + 1]
        || p->bias_start[r] < p->bias_start[r + 1];
    if (p->forced[r] >= 0) {
        p->out[r] = p->forced[r];
        return;
    }
    if (p->temperature[r] == 0 && !changed) {
        p->out[r] = (int32_t)best(logits, p->vocab);
        return;
    }
    memcpy(scratch, logits, p->vocab * 4);
    adjust(p, r, scratch);
    candidate *list = (candidate *)(scratch + p->vocab);
    p->out[r] = (int32_t)(p->temperature[r] == 0 ? best(scratch, p->vocab) : draw(p, r, scratch, list));
}

static int64_t sample_units(const void *params, int threads, int64_t *cost) {
    const hx_sample *p = params;
    *cost = p->vocab / 4;
    return *p->rows;
}

static void sample_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_sample *p = params;
    float *scratch = p->scratch + (int64_t)thread * 3 * p->vocab;
    for (int64_t r = first; r < last; r++) pick(p, r, scratch);
}

const hx_kernel hx_sample_rows = {sample_units, sample_run};

static int64_t select_units(const void *params, int threads, int64_t *cost) {
    const hx_rows *p = params;
    *cost = p->width / 8;
    return p->step->rows;
}

static void select_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_rows *p = params;
    for (int64_t r = first; r < last; r++)
        memcpy(p->out + r * p->width, p->x + p->step->logit_rows[r] * p->width, p->width * 4);
}

const hx_kernel hx_select_rows = {select_units, select_run};
