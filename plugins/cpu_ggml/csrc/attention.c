// Paged attention straight over the block table, prefill and decode alike (Kwon et al., SOSP 2023;
// split keys as in flash decoding, Dao et al. 2023).
//
// Up to 12 rows (query tokens x query heads of one KV head) share every KV load. Keys come in
// chunks of 256 at absolute positions; each chunk's softmax is its own and chunks are merged in
// order, so a row's result depends neither on the batch nor on how its prompt was cut.
#include "vec.h"
#include <math.h>

void NAME(quantise)(const float *x, uint8_t *out, int64_t m, int64_t rows, int64_t k,
                    int64_t first, int64_t last);

typedef struct {
    const hx_attend *p;
    const int32_t *table;
    int64_t head, rows, heads; // KV head, rows, query heads per token here
    int64_t first_head;        // query head of row 0
    int64_t token, position, tokens; // of the first query: its row in the step, its place
    int64_t next_head, next_base;    // whose keys will be read after this chunk's
} tile;

typedef struct { float most[MAX_R], sum[MAX_R]; float *out; } part; // out [rows][dp]

INLINE vf kv_at(const int64_t type, const uint8_t *p, int64_t i) {
    switch (type) {
    case HX_KV_F32: return vf_load((const float *)p + i);
    case HX_KV_F16: return vf_f16((const uint16_t *)p + i);
    case HX_KV_BF16: return vf_bf16((const uint16_t *)p + i);
    case HX_KV_E5M2: return vf_e5m2(p + i);
    default: return vf_i8(p + i);
    }
}

static const uint8_t *k_tile_at(const tile *t, int64_t head, int64_t key) {
    const hx_pool *pool = &t->p->pool;
    int64_t block = t->table[key / pool->block];
    return hx_block(pool, pool->k, block)
        + (head * (pool->block / TILE) + key % pool->block / TILE) * pool->k_tile;
}

static const uint8_t *v_row_at(const tile *t, int64_t key) {
    const hx_pool *pool = &t->p->pool;
    int64_t block = t->table[key / pool->block];
    return hx_block(pool, pool->v, block) + (t->head * pool->block + key % pool->block) * pool->v_row;
}

// ---------------------------------------------------------------- scores of 16 keys

typedef struct { const uint8_t *k, *v; } ahead;

#define KV_SIZE(type) ((type) == HX_KV_F32 ? 4 : (type) <= HX_KV_BF16 ? 2 : 1)

INLINE void fetch(const ahead *next, int64_t offset, int lane) {
    if (lane) return;
    __builtin_prefetch(next->k + offset, 0, 3);
    __builtin_prefetch(next->v + offset, 0, 2);
}

// Meanwhile the K tile after next comes into the first cache, the V rows of these keys into the second.
INLINE void scores(const int64_t type, const int R, const uint8_t *k, const ahead *next, int64_t dp,
                   const float *q, float *s) {
    for (int lane = 0; lane < TILE; lane += VL) {
        vf acc[MAX_R];
        EACH_ROW acc[r] = (vf){0};
        if (type == HX_KV_Q8_0) {
            const uint8_t *scale = k + dp * TILE;
            for (int64_t b = 0; b < dp / 32; b++) {
                vf some[MAX_R], factor = vf_f16(scale + (b * TILE + lane) * 2);
                EACH_ROW some[r] = (vf){0};
                for (int64_t i = b * 32; i < b * 32 + 32; i++) {
                    fetch(next, i * TILE, lane);
                    vf v = vf_i8(k + i * TILE + lane);
                    EACH_ROW some[r] = vf_fma(v, vf_set(q[i * R + r]), some[r]);
                }
                EACH_ROW acc[r] = vf_fma(some[r], factor, acc[r]);
            }
        } else {
            for (int64_t i = 0; i < dp; i++) {
                fetch(next, i * TILE * KV_SIZE(type), lane);
                vf v = kv_at(type, k, i * TILE + lane);
                EACH_ROW acc[r] = vf_fma(v, vf_set(q[i * R + r]), acc[r]);
            }
        }
        EACH_ROW vf_store(s + r * CHUNK + lane, acc[r]);
    }
}

// ---------------------------------------------------------------- weighted sum of V

// WIDE vectors of V at a time, so that R * WIDE sums stay in registers. Meanwhile the K that is read
// next comes into the second cache: memory never waits for arithmetic.
INLINE void weigh(const int64_t type, const int R, const int WIDE, const tile *t, int64_t base,
                  int64_t first, int64_t last, const float *s, int64_t dp, float *out) {
    const int64_t row = t->p->pool.v_row;
    for (int64_t i = 0; i + WIDE * VL <= dp; i += WIDE * VL) {
        vf acc[MAX_R][4];
        EACH_ROW UNROLL(4) for (int w = 0; w < WIDE; w++) acc[r][w] = (vf){0};
        for (int64_t key = first; key < last;) {
            const uint8_t *v = v_row_at(t, base + key), *next = v;
            if (i == 0 && t->next_base + key < t->position + t->tokens)
                next = k_tile_at(t, t->next_head, t->next_base + key) + (base + key) % TILE * row;
            int64_t stop = key + t->p->pool.block - (base + key) % t->p->pool.block;
            for (stop = stop < last ? stop : last; key < stop; key++, v += row, next += row) {
                for (int64_t line = 0; i == 0 && line < row; line += 64)
                    __builtin_prefetch(next + line, 0, 2);
                vf x[4];
                UNROLL(4) for (int w = 0; w < WIDE; w++) {
                    x[w] = kv_at(type, v, i + w * VL);
                    if (type == HX_KV_Q8_0) {
                        uint16_t d;
                        memcpy(&d, v + dp + (i + w * VL) / 32 * 2, 2);
                        x[w] *= vf_set(f16_f32(d));
                    }
                }
                EACH_ROW {
                    vf weight = vf_set(s[r * CHUNK + key]);
                    UNROLL(4) for (int w = 0; w < WIDE; w++)
                        acc[r][w] = vf_fma(x[w], weight, acc[r][w]);
                }
            }
        }
        EACH_ROW UNROLL(4) for (int w = 0; w < WIDE; w++)
            vf_store(out + r * dp + i + w * VL, acc[r][w]);
    }
}

#if VL == 16 || defined(HX_ANY_NEON) // 32 registers
#define WIDTH(R) ((R) <= 6 ? 4 : 2)
#else
#define WIDTH(R) ((R) <= 2 ? 4 : (R) <= 5 ? 2 : 1)
#endif

INLINE void weigh_all(const int64_t type, const int R, const tile *t, int64_t base, int64_t first,
                      int64_t last, const float *s, int64_t dp, float *out) {
    int64_t wide = dp / (WIDTH(R) * VL) * WIDTH(R) * VL;
    if (wide == dp) weigh(type, R, WIDTH(R), t, base, first, last, s, dp, out);
    else weigh(type, R, 1, t, base, first, last, s, dp, out);
}

typedef void score_fn(const uint8_t *, const ahead *, int64_t, const float *, float *);
typedef void weigh_fn(const tile *, int64_t, int64_t, int64_t, const float *, int64_t, float *);

#define BOTH(T, R) \
    static void score_##T##_##R(const uint8_t *k, const ahead *next, int64_t dp, const float *q, \
                                float *s) { \
        scores(T, R, k, next, dp, q, s); \
    } \
    static void weigh_##T##_##R(const tile *t, int64_t base, int64_t first, int64_t last, \
                                const float *s, int64_t dp, float *out) { \
        weigh_all(T, R, t, base, first, last, s, dp, out); \
    }
#define EVERY(M, T) M(T, 1) M(T, 2) M(T, 3) M(T, 4) M(T, 5) M(T, 6) M(T, 7) M(T, 8) M(T, 9) \
    M(T, 10) M(T, 11) M(T, 12)
EVERY(BOTH, HX_KV_F32) EVERY(BOTH, HX_KV_F16) EVERY(BOTH, HX_KV_BF16) EVERY(BOTH, HX_KV_E5M2)
EVERY(BOTH, HX_KV_Q8_0)
#define SCORE(T, R) score_##T##_##R,
#define WEIGH(T, R) weigh_##T##_##R,
static score_fn *const SCORES[][MAX_R] = {
    {EVERY(SCORE, HX_KV_F32)}, {EVERY(SCORE, HX_KV_F16)}, {EVERY(SCORE, HX_KV_BF16)},
    {EVERY(SCORE, HX_KV_E5M2)}, {EVERY(SCORE, HX_KV_Q8_0)}};
static weigh_fn *const WEIGHS[][MAX_R] = {
    {EVERY(WEIGH, HX_KV_F32)}, {EVERY(WEIGH, HX_KV_F16)}, {EVERY(WEIGH, HX_KV_BF16)},
    {EVERY(WEIGH, HX_KV_E5M2)}, {EVERY(WEIGH, HX_KV_Q8_0)}};

// ---------------------------------------------------------------- one chunk of keys

// keys that the tile's queries may see, first row's window start to last row's own position
static void key_range(const tile *t, int64_t *first, int64_t *last) {
    int64_t lo = t->p->window > 0 ? t->position - t->p->window + 1 : 0;
    *first = lo > 0 ? lo : 0;
    *last = t->position + t->tokens;
}

// s -> softmax numerators over keys first .. last - 1 of the chunk at `base`
static void soften(const tile *t, int64_t base, int64_t first, int64_t last, int64_t r, float *s,
                   part *out) {
    int64_t position = t->position + r / t->heads, lo = 0, hi = position + 1 - base;
    if (t->p->window > 0) lo = position - t->p->window + 1 - base;
    int64_t end = (last + TILE - 1) / TILE * TILE;
    for (int64_t i = first; i < lo && i < end; i++) s[i] = -INFINITY;
    for (int64_t i = hi > first ? hi : first; i < end; i++) s[i] = -INFINITY;
    if (t->p->softcap > 0) {
        vf cap = vf_set(t->p->softcap);
        for (int64_t i = first; i < end; i += VL) vf_store(s + i, cap * vf_tanh(vf_load(s + i) / cap));
        for (int64_t i = first; i < lo && i < end; i++) s[i] = -INFINITY;
        for (int64_t i = hi > first ? hi : first; i < end; i++) s[i] = -INFINITY;
    }
    vf top = vf_set(-INFINITY), sum = {0};
    for (int64_t i = first; i < end; i += VL) top = vf_max(top, vf_load(s + i));
    float most = vf_top(top);
    out->most[r] = most;
    float shift = most == -INFINITY ? 0 : most;
    for (int64_t i = first; i < end; i += VL) {
        vf e = vf_exp(vf_load(s + i) - vf_set(shift));
        vf_store(s + i, e);
        sum += e;
    }
    out->sum[r] = vf_sum(sum);
}

static void chunk(const tile *t, const float *q, int64_t index, float *s, part *out) {
    const hx_pool *pool = &t->p->pool;
    int64_t base = index * CHUNK, first, last;
    key_range(t, &first, &last);
    first = first > base ? (first - base) / TILE * TILE : 0; // whole tiles of keys
    last = last - base < CHUNK ? last - base : CHUNK;
    for (int64_t key = first; key < last; key += TILE) {
        int64_t later = key + 3 * TILE < last ? key + 3 * TILE : key;
        ahead next = {k_tile_at(t, t->head, base + later), v_row_at(t, base + key)};
        SCORES[pool->type][t->rows - 1](k_tile_at(t, t->head, base + key), &next, pool->dp, q, s + key);
    }
    for (int64_t r = 0; r < t->rows; r++) soften(t, base, first, last, r, s + r * CHUNK, out);
    WEIGHS[pool->type][t->rows - 1](t, base, first, last, s, pool->dp, out->out);
}

// total = total and piece together; both of `rows` rows of dp floats
static void merge(part *total, const part *piece, int64_t rows, int64_t dp) {
    for (int64_t r = 0; r < rows; r++) {
        // no keys, unless the sum is NaN: of scores that are all NaN the most is -INFINITY too
        if (piece->most[r] == -INFINITY && piece->sum[r] == 0) continue;
        float most = fmaxf(total->most[r], piece->most[r]);
        float a = total->most[r] == -INFINITY ? 0 : expf(total->most[r] - most);
        float b = expf(piece->most[r] - most);
        total->sum[r] = total->sum[r] * a + piece->sum[r] * b;
        total->most[r] = most;
        float *o = total->out + r * dp;
        const float *n = piece->out + r * dp;
        for (int64_t i = 0; i < dp; i += VL)
            vf_store(o + i, vf_load(o + i) * vf_set(a) + vf_load(n + i) * vf_set(b));
    }
}

static void clear(part *total, int64_t rows, int64_t dp) {
    for (int64_t r = 0; r < rows; r++) total->most[r] = -INFINITY, total->sum[r] = 0;
    memset(total->out, 0, rows * dp * 4);
}

static void finish(const tile *t, const part *total) {
    const hx_attend *p = t->p;
    int64_t d = p->pool.d, dp = p->pool.dp, tokens = p->step->tokens;
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t head = t->first_head + r % t->heads, token = t->token + r / t->heads;
        float scale = 1.f / total->sum[r];
        if (p->sinks) {
            float most = fmaxf(total->most[r], p->sinks[head]), keep = expf(total->most[r] - most);
            scale = keep / (total->sum[r] * keep + expf(p->sinks[head] - most));
        }
        float *row = p->out + token * p->hq * d, *o = row + head * d;
        for (int64_t i = 0; i < d; i++) o[i] = total->out[r * dp + i] * scale;
        if (p->packed)
            NAME(quantise)(row, p->packed, token, tokens, p->hq * d, head * d / QK, (head + 1) * d / QK);
    }
}

// q of the tile's rows, transposed to [dp][rows] and scaled
static void gather_q(const tile *t, float *q) {
    const hx_attend *p = t->p;
    int64_t d = p->pool.d;
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t head = t->first_head + r % t->heads, token = t->token + r / t->heads;
        const float *x = p->q + (token * p->hq + head) * d;
        for (int64_t i = 0; i < d; i++) q[i * t->rows + r] = x[i] * p->scale;
    }
    for (int64_t i = d * t->rows; i < p->pool.dp * t->rows; i++) q[i] = 0;
}

// ---------------------------------------------------------------- work items

#define COUNTERS 4096 // at the head of the workspace, zero between steps

typedef struct { // how one sequence is cut
    int64_t tokens, length, per_tile, tiles, groups, heads; // groups of query heads per KV head
    int64_t first_chunk, chunks;   // of a split sequence, else chunks is 0
} cut;

static cut cut_sequence(const hx_attend *p, int64_t s, int64_t few) {
    const hx_step *step = p->step;
    int64_t share = p->hq / p->pool.hkv;
    cut c = {.tokens = step->query_start[s + 1] - step->query_start[s], .length = step->seq_lens[s]};
    c.groups = (share + MAX_R - 1) / MAX_R;
    while (share % c.groups) c.groups++;
    c.heads = share / c.groups;
    c.per_tile = MAX_R / c.heads;
    c.tiles = (c.tokens + c.per_tile - 1) / c.per_tile;
    int64_t start = c.length - c.tokens, lo = p->window > 0 ? start - p->window + 1 : 0;
    c.first_chunk = lo > 0 ? lo / CHUNK : 0;
    int64_t chunks = (c.length + CHUNK - 1) / CHUNK - c.first_chunk;
    if (few && c.tiles == 1 && chunks > 1) c.chunks = chunks;
    return c;
}

static tile make_tile(const hx_attend *p, int64_t s, const cut *c, int64_t index) {
    int64_t per = p->pool.hkv * c->groups, at = c->tiles - 1 - index / per; // longest first
    tile t = {.p = p, .table = p->step->block_tables + s * p->step->table_stride};
    t.head = index % per / c->groups;
    t.heads = c->heads;
    t.first_head = index % per * c->heads;
    t.tokens = c->tokens - at * c->per_tile < c->per_tile ? c->tokens - at * c->per_tile : c->per_tile;
    t.rows = t.tokens * t.heads;
    t.token = p->step->query_start[s] + at * c->per_tile;
    t.position = c->length - c->tokens + at * c->per_tile;
    return t;
}

typedef struct { float *q, *s, *total, *piece; } room;

static void whole_tile(tile *t, room *w) {
    int64_t dp = t->p->pool.dp, first, last;
    part total = {.out = w->total}, piece = {.out = w->piece};
    key_range(t, &first, &last);
    gather_q(t, w->q);
    clear(&total, t->rows, dp);
    for (int64_t c = first / CHUNK; c * CHUNK < last; c++) {
        t->next_head = t->head, t->next_base = (c + 1) * CHUNK;
        chunk(t, w->q, c, w->s, &piece);
        merge(&total, &piece, t->rows, dp);
    }
    finish(t, &total);
}

// Partial results of split sequences: per chunk most, sum and out of 12 rows; the thread that
// finishes a tile's last chunk merges them all, in order.
static void split_chunk(tile *t, int64_t index, const cut *c, _Atomic int64_t *done,
                        float *slot, room *w) {
    int64_t dp = t->p->pool.dp, size = MAX_R * (dp + 2);
    part piece = {.out = slot + index * size + 2 * MAX_R};
    int64_t base = (c->first_chunk + index) * CHUNK, wraps = t->head + 1 == t->p->pool.hkv;
    t->next_head = wraps ? 0 : t->head + 1, t->next_base = wraps ? base + CHUNK : base;
    gather_q(t, w->q);
    chunk(t, w->q, c->first_chunk + index, w->s, &piece);
    memcpy(slot + index * size, piece.most, sizeof piece.most);
    memcpy(slot + index * size + MAX_R, piece.sum, sizeof piece.sum);
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) != c->chunks - 1) return;
    atomic_store_explicit(done, 0, memory_order_relaxed);
    part total = {.out = w->total};
    clear(&total, t->rows, dp);
    for (int64_t i = 0; i < c->chunks; i++) {
        memcpy(piece.most, slot + i * size, sizeof piece.most);
        memcpy(piece.sum, slot + i * size + MAX_R, sizeof piece.sum);
        piece.out = slot + i * size + 2 * MAX_R;
        merge(&total, &piece, t->rows, dp);
    }
    finish(t, &total);
}

// Split: a chunk of keys for all heads, then the next, so that memory is read in order.
static int64_t worth_splitting(const hx_attend *p, int threads) {
    const hx_step *step = p->step;
    return step->sequences * p->pool.hkv < 8 * threads
        && step->sequences * p->hq < COUNTERS;
}

static int64_t attend_units(const void *params, int threads, int64_t *cost) {
    const hx_attend *p = params;
    int64_t few = worth_splitting(p, threads), units = 0, work = 0;
    for (int64_t s = 0; s < p->step->sequences; s++) {
        cut c = cut_sequence(p, s, few);
        int64_t keys = p->window > 0 && p->window < c.length ? p->window : c.length;
        units += c.tiles * p->pool.hkv * c.groups * (c.chunks ? c.chunks : 1);
        work += c.tokens * p->hq * (keys + 16);
    }
    *cost = units ? work * p->pool.dp / units / 12 : 0;
    return units;
}

static void attend_run(void *params, int64_t first, int64_t last, int thread, int threads) {
    const hx_attend *p = params;
    int64_t dp = p->pool.dp, few = worth_splitting(p, threads), base = 0;
    float memory[MAX_R * CHUNK + 3 * MAX_R * dp] __attribute__((aligned(64)));
    room w = {memory + MAX_R * CHUNK, memory, memory + MAX_R * CHUNK + MAX_R * dp,
              memory + MAX_R * CHUNK + 2 * MAX_R * dp};
    _Atomic int64_t *done = (_Atomic int64_t *)p->step->workspace;
    float *partials = (float *)(p->step->workspace + COUNTERS * sizeof *done);
    for (int64_t s = 0; s < p->step->sequences && base < last; s++) {
        cut c = cut_sequence(p, s, few);
        int64_t per = p->pool.hkv * c.groups, units = c.tiles * per * (c.chunks ? c.chunks : 1);
        int64_t stride = c.chunks * MAX_R * (dp + 2), end = last - base < units ? last - base : units;
        for (int64_t i = first > base ? first - base : 0; i < end; i++) {
            tile t = make_tile(p, s, &c, c.chunks ? i % per : i);
            if (c.chunks)
                split_chunk(&t, i / per, &c, done + i % per, partials + i % per * stride, &w);
            else whole_tile(&t, &w);
        }
        base += units;
        if (c.chunks) done += per, partials += per * stride;
    }
}

const hx_kernel NAME(attend) = {attend_units, attend_run};
