// Shared by all kernels: parameter structs (mirrored in native.py) and work sharing.
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define TILE 16           // output features per weight tile, KV tokens per K tile
#define QK 32             // elements per activation block
#define XROW 56           // bytes of one row's activation block: 32 codes, d, -sum, d*sum, 2 half -sums,
                          // an outlier
#define CHUNK 256         // keys per attention chunk, aligned to absolute positions
#define GROUP 16          // blocks of all layers that lie together
#define MAX_R 12          // rows computed together

enum hx_format {
    HX_F32, HX_F16, HX_BF16, HX_Q4_0, HX_Q4_1, HX_Q5_0, HX_Q5_1, HX_Q8_0, HX_Q4_K, HX_Q5_K, HX_Q6_K
};
enum hx_kv { HX_KV_F32, HX_KV_F16, HX_KV_BF16, HX_KV_E5M2, HX_KV_Q8_0 };
enum hx_act { HX_SILU, HX_GELU_TANH, HX_SWIGLU_OAI };

// A kernel's work on a step falls into units that may run in any order and on any thread: where
// they run never changes a result.
typedef struct {
    // how many units; *cost: about how long one takes, ns
    int64_t (*units)(const void *params, int threads, int64_t *cost);
    void (*run)(void *params, int64_t first, int64_t last, int thread, int threads);
    int streams; // bound by memory: long runs of units are read faster than short ones
} hx_kernel;

typedef struct { const hx_kernel *kernel; void *params; } hx_op;
typedef struct hx_team hx_team;

// Kernels run one after another, within one ggml node.
typedef struct {
    hx_team *team;
    const hx_op *ops;
    int64_t n;
    _Atomic int64_t arrived, left; // of ggml's threads: at the barriers, at the end
} hx_program;

typedef struct {
    int64_t tokens, rows, sequences;
    const int32_t *positions;
    const int64_t *slots;
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t table_stride;
    const int32_t *logit_rows;
    uint8_t *workspace;
    int64_t workspace_bytes;
} hx_step;

// x [rows, k] float32 -> panels of 8-bit blocks (quantised weights) or of floats (float weights)
typedef struct { const int64_t *rows; const float *x; int64_t k; uint8_t *out; } hx_pack_x;

typedef struct {
    const uint8_t *x, *tiles;
    int64_t format, n, column;
} hx_part;

// out[:, column : column + n] = x @ part.T (+ bias) for each part, then scale and softcap
typedef struct {
    const int64_t *rows;
    int64_t k;
    float *out;
    int64_t stride;
    const float *bias;
    float scale, softcap;
    int64_t nparts;
    const hx_part *parts;
} hx_linear;

typedef struct {
    const int64_t *rows;
    const float *x, *residual, *weight;
    float *out, *sum;
    int64_t width;
    float eps;
    uint8_t *packed; // the result also in 8-bit panels, if wanted
} hx_norm;

typedef struct {
    const int64_t *rows;
    const float *gate_up;
    float *out;
    int64_t width, kind;
    uint8_t *packed;
} hx_gate;

// cos, sin [tokens, dim] (cos in the first half of a row) from inv_freq [dim / 2]
typedef struct {
    const hx_step *step;
    const double *inv_freq;
    int64_t dim;
    float factor;
    float *out;
} hx_angles;

typedef struct {
    uint8_t *k, *v; // of one layer
    int64_t type, block, hkv, d, dp;
    int64_t k_tile, v_row; // bytes of a K tile (16 tokens of one head) and of a V row
    int64_t group;         // bytes from one group of blocks to the next
} hx_pool;

// A block's K or V, all heads.
static inline uint8_t *hx_block(const hx_pool *pool, uint8_t *side, int64_t block) {
    return side + block / GROUP * pool->group + block % GROUP * (pool->hkv * pool->block * pool->v_row);
}

typedef struct {
    const hx_step *step;
    const float *qkv, *angles, *q_norm, *k_norm;
    float *out;
    int64_t hq, dim, interleaved;
    float eps;
    hx_pool pool;
} hx_store;

typedef struct {
    const hx_step *step;
    const float *q, *sinks;
    float *out;
    int64_t hq, window;
    float scale, softcap;
    hx_pool pool;
    uint8_t *packed;
} hx_attend;

typedef struct {
    const int64_t *rows;
    const float *logits;
    int64_t vocab;
    float *scratch; // [threads, 2 * vocab]
    const float *temperature, *top_p, *min_p, *repetition, *presence, *frequency, *uniforms;
    const int32_t *top_k, *forced, *history_start, *history_ids, *history_counts;
    const int32_t *bias_start, *bias_ids;
    const float *bias_values;
    const uint32_t *mask;
    int32_t *out;
} hx_sample;

// rows of x [tokens, width] that need logits
typedef struct {
    const hx_step *step;
    const float *x;
    float *out;
    int64_t width;
} hx_rows;

#define HX_MOST_PARTS 4

// Experts and their weights for each row of logits [rows, experts]
typedef struct {
    const int64_t *rows;
    const float *logits;
    int64_t experts, top, sigmoid, normalise;
    float scale;
    int32_t *chosen; // [rows, top]
    float *share;
} hx_choose;

// Rows by expert: expert e has order[start[e] .. start[e + 1] - 1]; place is order's inverse
typedef struct {
    const int64_t *rows;
    const int32_t *chosen;
    int64_t experts, top;
    int64_t *start, *total;
    int32_t *order, *place;
} hx_group;

// x into panels per expert: row order[j] / top (or j) as row j
typedef struct {
    const int64_t *start;
    int64_t experts;
    const int32_t *order;
    int64_t top;
    const float *x;
    int64_t k, floats;
    uint8_t *out;
} hx_regroup;

// as hx_linear for each group, over stacked weights
typedef struct {
    const int64_t *start;
    int64_t experts, k;
    float *out;
    int64_t stride, nparts;
    const hx_part *parts;
} hx_experts;

typedef struct {
    const int64_t *rows;
    int64_t top, width;
    const int32_t *place;
    const float *share, *x;
    float *out;
} hx_combine;

typedef struct {
    const char *isa;
    int64_t panel; // most rows of a panel
    const hx_kernel *pack_q8, *pack_f32, *linear, *norm, *gate, *angles, *store, *attend, *sample, *rows;
    const hx_kernel *choose, *group, *regroup, *experts, *combine;
} hx_table;

// Panels: rows split evenly so that none is larger than `most`.
static inline int64_t hx_panel_rows(int64_t rows, int64_t most) {
    int64_t panels = (rows + most - 1) / most;
    return panels ? (rows + panels - 1) / panels : 1;
}

// Bytes of a row of activations in 8 bits: its blocks and, behind those of its panel, a byte for each
// block: the place of an outlier + 1.
static inline int64_t hx_q8_bytes(int64_t k) { return k / QK * XROW + (k / QK + 3) / 4 * 4; }

int64_t hx_tile_bytes(int64_t format, int64_t k);
