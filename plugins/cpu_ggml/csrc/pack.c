// Weights from GGUF order to tiles of 16 output features, so that one vector load holds 4 inputs of
// each. Codes and scales are moved, never rounded: a tile holds exactly the file's values.
#include "hx.h"

static const struct { int block, raw, head, part; } LAYOUT[] = {
    // elements per block, bytes in the file, tile bytes before the parts, tile bytes per 32 elements
    [HX_F32] = {1, 4, 0, 0},         [HX_F16] = {1, 2, 0, 0},        [HX_BF16] = {1, 2, 0, 0},
    [HX_Q4_0] = {32, 18, 0, 288},    [HX_Q4_1] = {32, 20, 0, 320},   [HX_Q5_0] = {32, 22, 0, 352},
    [HX_Q5_1] = {32, 24, 0, 384},    [HX_Q8_0] = {32, 34, 0, 544},   [HX_Q4_K] = {256, 144, 64, 288},
    [HX_Q5_K] = {256, 176, 64, 352}, [HX_Q6_K] = {256, 210, 32, 416},
};

int64_t hx_tile_bytes(int64_t format, int64_t k) {
    int block = LAYOUT[format].block;
    if (block == 1) return k * TILE * LAYOUT[format].raw;
    return k / block * (LAYOUT[format].head + block / 32 * LAYOUT[format].part);
}

static inline uint32_t u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline void put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

static void put_high_bits(uint8_t *masks, uint32_t bits, int row) {
    for (int g = 0; g < 8; g++) { // a bit per (row, element of the group of 4)
        uint64_t m;
        memcpy(&m, masks + g * 8, 8);
        m |= (uint64_t)(bits >> (4 * g) & 15) << (4 * row);
        memcpy(masks + g * 8, &m, 8);
    }
}

static void small_block(int format, const uint8_t *in, uint8_t *out, int row) {
    int five = format == HX_Q5_0 || format == HX_Q5_1, offset = format == HX_Q4_1 || format == HX_Q5_1;
    const uint8_t *codes = in + 2 + 2 * offset + 4 * five;
    int groups = format == HX_Q8_0 ? 8 : 4, scales = groups * 64 + 64 * five;
    for (int g = 0; g < groups; g++) put32(out + g * 64 + row * 4, u32(codes + 4 * g));
    if (five) put_high_bits(out + 256, u32(in + 2 + 2 * offset), row);
    memcpy(out + scales + row * 2, in, 2);
    if (offset) memcpy(out + scales + 32 + row * 2, in + 2, 2);
}

static void k_scale(int s, const uint8_t *q, uint8_t *scale, uint8_t *min) {
    if (s < 4) {
        *scale = q[s] & 63, *min = q[s + 4] & 63;
    } else {
        *scale = (q[s + 4] & 15) | (q[s - 4] >> 6) << 4;
        *min = q[s + 4] >> 4 | (q[s] >> 6) << 4;
    }
}

static void q45_k_block(int five, const uint8_t *in, uint8_t *out, int row) {
    const uint8_t *high = in + 16, *codes = in + 16 + 32 * five;
    memcpy(out + row * 2, in, 2);
    memcpy(out + 32 + row * 2, in + 2, 2);
    out += 64;
    for (int s = 0; s < 8; s++, out += 288 + 64 * five) {
        for (int j = 0; j < 4; j++) {
            uint32_t lo = u32(codes + s / 2 * 32 + 4 * j), hi = u32(codes + s / 2 * 32 + 16 + 4 * j);
            if (s & 1) lo >>= 4, hi >>= 4;
            put32(out + j * 64 + row * 4, (lo & 0x0f0f0f0f) | (hi & 0x0f0f0f0f) << 4);
        }
        uint8_t *scales = out + 256 + 64 * five;
        if (five) {
            uint32_t bits = 0;
            for (int i = 0; i < 32; i++) bits |= (uint32_t)(high[i] >> s & 1) << i;
            put_high_bits(out + 256, bits, row);
        }
        k_scale(s, in + 4, scales + row, scales + 16 + row);
    }
}

static void q6_k_block(const uint8_t *in, uint8_t *out, int row) {
    const uint8_t *low = in, *high = in + 128, *scales = in + 192;
    memcpy(out + row * 2, in + 208, 2);
    out += 32;
    for (int s = 0; s < 8; s++, out += 416) {
        const uint8_t *lo = low + s / 4 * 64 + (s & 1) * 32, *hi = high + s / 4 * 32;
        int half = s & 2 ? 4 : 0, pair = (s & 3) * 2;
        for (int i = 0; i < 32; i++) {
            int at = i / 4 % 4 * 64 + row * 4 + i % 4; // elements 16.. share bytes with 0..15
            out[at] |= (lo[i] >> half & 15) << (i < 16 ? 0 : 4);
            out[256 + i / 16 * 64 + row * 4 + i % 4] |= (hi[i] >> pair & 3) << (i / 4 % 4 * 2);
        }
        out[384 + row] = scales[2 * s], out[400 + row] = scales[2 * s + 1];
    }
}

#define FLOATS(size) \
    for (int64_t i = 0; i < k; i++) \
        for (int r = 0; r < rows; r++) memcpy(out + (i * TILE + r) * size, in + (r * k + i) * size, size)

static void floats(int size, const uint8_t *in, uint8_t *out, int64_t k, int rows) {
    if (size == 4) FLOATS(4);
    else FLOATS(2);
}

// Tiles first .. last - 1 of a matrix [n, k]; rows past n become zeros.
__attribute__((visibility("default")))
void hx_pack_tiles(int64_t format, const uint8_t *raw, int64_t n, int64_t k, uint8_t *tiles,
                   int64_t first, int64_t last) {
    int64_t bytes = hx_tile_bytes(format, k), blocks = k / LAYOUT[format].block;
    int64_t row_bytes = blocks * LAYOUT[format].raw;
    int64_t block_bytes = LAYOUT[format].head + LAYOUT[format].block / 32 * LAYOUT[format].part;
    for (int64_t t = first; t < last; t++) {
        uint8_t *out = tiles + t * bytes;
        memset(out, 0, bytes);
        int rows = n - t * TILE < TILE ? (int)(n - t * TILE) : TILE;
        if (format <= HX_BF16) {
            floats(LAYOUT[format].raw, raw + t * TILE * row_bytes, out, k, rows);
            continue;
        }
        for (int64_t b = 0; b < blocks; b++)
            for (int r = 0; r < rows; r++) {
                const uint8_t *in = raw + (t * TILE + r) * row_bytes + b * LAYOUT[format].raw;
                uint8_t *to = out + b * block_bytes;
                if (format == HX_Q6_K) q6_k_block(in, to, r);
                else if (format >= HX_Q4_K) q45_k_block(format == HX_Q5_K, in, to, r);
                else small_block(format, in, to, r);
            }
    }
}

__attribute__((visibility("default"))) int64_t hx_tile_size(int64_t format, int64_t k) {
    return hx_tile_bytes(format, k);
}
