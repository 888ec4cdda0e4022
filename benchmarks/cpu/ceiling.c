// What this machine can do at most: reading memory, integer and float multiplications. Prints JSON.
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define BYTES (192ul << 20)
#define ROUNDS 4
#define PEAK_ROUNDS 2000 // short ones, so that some meet no other process
#define PEAK_STEPS 20000

static pthread_barrier_t gate;
static char *memory[64];
static double seconds[64];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *read_memory(void *id) {
    long i = (long)id;
    double best = 1e9;
    for (int r = 0; r < ROUNDS; r++) {
        pthread_barrier_wait(&gate);
        double began = now();
        __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
        for (size_t at = 0; at < BYTES; at += 128) {
            const __m256i *p = (const __m256i *)(memory[i] + at);
            _mm_prefetch((const char *)p + 4096, _MM_HINT_T0);
            _mm_prefetch((const char *)p + 4160, _MM_HINT_T0);
            a = _mm256_add_epi64(a, p[0]), b = _mm256_add_epi64(b, p[1]);
            c = _mm256_add_epi64(c, p[2]), d = _mm256_add_epi64(d, p[3]);
        }
        __asm__ volatile("" :: "x"(a), "x"(b), "x"(c), "x"(d));
        double took = now() - began;
        best = took < best ? took : best;
    }
    seconds[i] = best;
    return 0;
}

static double read_rate(int threads) {
    pthread_t t[64];
    double rate = 0;
    pthread_barrier_init(&gate, 0, threads);
    for (long i = 0; i < threads; i++) pthread_create(t + i, 0, read_memory, (void *)i);
    for (int i = 0; i < threads; i++) pthread_join(t[i], 0), rate += BYTES / seconds[i] / 1e9;
    return rate;
}

#define PEAK(name, type, zero, op, each) \
    __attribute__((noinline)) static double name(void) { \
        type x[12], w = zero; \
        double best = 1e9; \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) x[i] = zero; \
        for (int r = 0; r < PEAK_ROUNDS; r++) { \
            double began = now(); \
            for (int n = 0; n < PEAK_STEPS; n++) { \
                _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) { \
                    x[i] = op; \
                    __asm__ volatile("" : "+x"(w)); /* else it is computed once for all */ \
                } \
            } \
            double took = now() - began; \
            best = took < best ? took : best; \
        } \
        _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) __asm__ volatile("" :: "x"(x[i])); \
        return 1. * PEAK_STEPS * 12 * each / best / 1e9; \
    }

PEAK(fma_256, __m256, _mm256_setzero_ps(), _mm256_fmadd_ps(w, w, x[i]), 16.)
PEAK(maddubs_256, __m256i, _mm256_setzero_si256(),
     _mm256_add_epi16(x[i], _mm256_maddubs_epi16(w, w)), 64.)
#ifdef __AVX512VNNI__
PEAK(fma_512, __m512, _mm512_setzero_ps(), _mm512_fmadd_ps(w, w, x[i]), 32.)
PEAK(dpbusd_512, __m512i, _mm512_setzero_si512(), _mm512_dpbusd_epi32(x[i], w, w), 128.)
#endif

int main(int argc, char **argv) {
    int threads = atoi(argv[1]);
    for (int i = 0; i < threads; i++) {
        char *p = mmap(0, BYTES + (2 << 20) + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory[i] = (char *)(((size_t)p + (2 << 20) - 1) & ~((2ul << 20) - 1));
        madvise(memory[i], BYTES, MADV_HUGEPAGE);
        memset(memory[i], 1, BYTES);
    }
    double one = read_rate(1), all = threads > 1 ? read_rate(threads) : one;
    printf("{\"read_gb_s\": [%.1f, %.1f], \"avx2_int8\": %.0f, \"avx2_f32\": %.0f", one, all,
           maddubs_256(), fma_256());
#ifdef __AVX512VNNI__
    printf(", \"avx512_int8\": %.0f, \"avx512_f32\": %.0f", dpbusd_512(), fma_512());
#endif
    printf("}\n");
}
