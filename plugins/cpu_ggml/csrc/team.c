// One team of threads runs a program, kernel by kernel. Nobody waits for a thread that is late:
// work is claimed item by item, and a kernel is over when its items are done, not when everybody
// has arrived. A thread that the system has taken its core from holds up the others only while it
// has an item in hand.
#define _GNU_SOURCE
#include "hx.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#define WORTH 3000 // ns of work that are worth telling others about
#define ITEM 1500  // ns, at least, of an item
#define MOST 4095  // items of a kernel
#define SPIN 1500  // pauses before a thread sleeps: about 50 us

// All that claims depend on is in one word, so a claim that succeeds is known to be current.
typedef struct { uint32_t run, op, limit, item; } place;

static uint64_t word(place p) {
    return (uint64_t)(p.run & 0xffffff) << 40 | (uint64_t)p.op << 24 | p.limit << 12 | p.item;
}
static place place_of(uint64_t w) {
    return (place){w >> 40, w >> 24 & 0xffff, w >> 12 & 0xfff, w & 0xfff};
}

struct hx_team {
    _Alignas(64) _Atomic uint64_t at;
    _Alignas(64) _Atomic int64_t done; // items of the kernel at hand
    _Alignas(64) int64_t units;        // of it; with ops and n valid for whoever holds an item
    const hx_op *ops;
    int64_t n;
    _Alignas(64) _Atomic int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int threads;
    _Atomic int stopping;
    const int *cpus; // null: not pinned
    pthread_t *helpers;
};

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void move_to(hx_team *t, place next) {
    atomic_store(&t->at, word(next));
    if (!atomic_load(&t->sleepers)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->moved);
    pthread_mutex_unlock(&t->lock);
}

static void wait_while(hx_team *t, uint64_t seen) {
    for (int i = 0; i < SPIN; i++) {
        if (atomic_load_explicit(&t->at, memory_order_acquire) != seen) return;
        pause_a_little();
    }
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->at) == seen && !t->stopping) pthread_cond_wait(&t->moved, &t->lock);
    atomic_fetch_sub(&t->sleepers, 1);
    pthread_mutex_unlock(&t->lock);
}

// Items that `units` of `cost` ns are worth.
static int64_t items_of(const hx_kernel *kernel, int64_t units, int64_t cost, int threads) {
    int64_t work = units * (cost > 0 ? cost : 1), items = work / ITEM;
    if (threads == 1 || work < WORTH || units < 2) return 1;
    items = items < units ? items : units;
    if (kernel->streams && units >= 4 * threads) items = threads + items / 4;
    return items < MOST ? items : MOST;
}

// Where an item begins. Streams: a long item for each thread, 3/4 in all, then short ones.
static int64_t begin(const hx_kernel *kernel, int64_t units, int64_t item, int64_t items,
                     int threads) {
    if (!kernel->streams || units < 4 * threads) return units * item / items;
    int64_t most = items > threads ? units * 3 / 4 : units;
    if (item <= threads) return most * item / threads;
    return most + (units - most) * (item - threads) / (items - threads);
}

// From kernel `op` on: run those that are not worth sharing, offer the first that is.
static void open_from(hx_team *t, uint32_t run, int64_t op, int thread) {
    for (; op < t->n; op++) {
        const hx_op *o = t->ops + op;
        int64_t cost, units = o->kernel->units(o->params, t->threads, &cost);
        int64_t items = items_of(o->kernel, units, cost, t->threads);
        if (items > 1) {
            t->units = units;
            atomic_store_explicit(&t->done, 0, memory_order_relaxed);
            move_to(t, (place){run, op, items, 0});
            return;
        }
        if (units) o->kernel->run(o->params, 0, units, thread, t->threads);
    }
    move_to(t, (place){run, 0xffff, 0, 0});
}

// Do an item of where the team is, if there is one left; 0: there was none.
static int claim(hx_team *t, uint64_t seen, int thread) {
    place p = place_of(seen);
    if (p.item >= p.limit) return 0;
    if (!atomic_compare_exchange_weak(&t->at, &seen, seen + 1)) return 1;
    const hx_op *o = t->ops + p.op;
    int64_t first = begin(o->kernel, t->units, p.item, p.limit, t->threads);
    int64_t last = begin(o->kernel, t->units, p.item + 1, p.limit, t->threads);
    o->kernel->run(o->params, first, last, thread, t->threads);
    if (atomic_fetch_add_explicit(&t->done, 1, memory_order_acq_rel) + 1 == p.limit)
        open_from(t, p.run, p.op + 1, thread);
    return 1;
}

static void pin(const hx_team *t, int thread) {
#ifdef __linux__
    cpu_set_t set;
    if (!t->cpus) return;
    CPU_ZERO(&set);
    CPU_SET(t->cpus[thread], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

typedef struct { hx_team *team; int thread; } seat;

static void *help(void *given) {
    seat s = *(seat *)given;
    free(given);
    pin(s.team, s.thread);
    for (;;) {
        uint64_t seen = atomic_load(&s.team->at);
        if (claim(s.team, seen, s.thread)) continue;
        if (s.team->stopping) return 0;
        wait_while(s.team, seen);
    }
}

// `cpus`: one per thread to be pinned to, kept by the caller, or null. Null: no threads to be had.
__attribute__((visibility("default"))) hx_team *hx_team_new(int threads, const int *cpus) {
    hx_team *t = aligned_alloc(64, sizeof *t);
    if (!t) return 0;
    memset(t, 0, sizeof *t);
    atomic_store(&t->at, word((place){0, 0xffff, 0, 0}));
    pthread_mutex_init(&t->lock, 0);
    pthread_cond_init(&t->moved, 0);
    t->cpus = cpus;
    t->helpers = calloc(threads, sizeof *t->helpers);
    for (t->threads = 1; t->threads < threads; t->threads++) {
        seat *s = malloc(sizeof *s);
        *s = (seat){t, t->threads};
        if (pthread_create(t->helpers + t->threads, 0, help, s)) {
            free(s);
            break;
        }
    }
    return t;
}

__attribute__((visibility("default"))) int hx_team_threads(const hx_team *t) { return t->threads; }

__attribute__((visibility("default"))) void hx_team_free(hx_team *t) {
    pthread_mutex_lock(&t->lock);
    t->stopping = 1;
    pthread_cond_broadcast(&t->moved);
    pthread_mutex_unlock(&t->lock);
    for (int i = 1; i < t->threads; i++) pthread_join(t->helpers[i], 0);
    free(t->helpers);
    free(t);
}

static void run_with_team(hx_team *t, const hx_program *p) {
    static __thread const hx_team *pinned;
    if (t->cpus && pinned != t) pin(t, 0), pinned = t;
    uint32_t run = place_of(atomic_load(&t->at)).run + 1;
    t->ops = p->ops, t->n = p->n;
    open_from(t, run, 0, 0);
    for (;;) {
        uint64_t seen = atomic_load(&t->at);
        if (place_of(seen).op == 0xffff) return;
        if (!claim(t, seen, 0)) wait_while(t, seen);
    }
}

// ggml's threads are here already: everybody does a fixed share of each kernel.
static void run_with_ggml(hx_program *p, int ith, int nth) {
    for (int64_t i = 0; i < p->n; i++) {
        const hx_op *o = p->ops + i;
        int64_t cost, units = o->kernel->units(o->params, nth, &cost);
        int64_t first = units * ith / nth, last = units * (ith + 1) / nth;
        if (first < last) o->kernel->run(o->params, first, last, ith, nth);
        if (i + 1 == p->n) break; // ggml has a barrier of its own behind the node
        atomic_fetch_add(&p->arrived, 1);
        for (int spins = 0; atomic_load(&p->arrived) < (i + 1) * nth; spins++) {
            if (spins < SPIN) pause_a_little();
            else sched_yield();
        }
    }
    if (atomic_fetch_add(&p->left, 1) + 1 < nth) return;
    atomic_store(&p->arrived, 0);
    atomic_store(&p->left, 0);
}

struct ggml_tensor;

// A ggml custom op.
__attribute__((visibility("default")))
void hx_run_program(struct ggml_tensor *node, int ith, int nth, void *params) {
    hx_program *p = params;
    if (nth == 1) run_with_team(p->team, p);
    else run_with_ggml(p, ith, nth);
}

// Run a program `times` times with each kernel on its own; ns[i]: the shortest time of kernel i.
__attribute__((visibility("default")))
void hx_time_program(const hx_program *p, int64_t times, double *ns) {
    for (int64_t round = 0; round < times; round++)
        for (int64_t i = 0; i < p->n; i++) {
            hx_program one = {.team = p->team, .ops = p->ops + i, .n = 1};
            struct timespec a, b;
            clock_gettime(CLOCK_MONOTONIC, &a);
            run_with_team(p->team, &one);
            clock_gettime(CLOCK_MONOTONIC, &b);
            double took = (b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec);
            ns[i] = round && ns[i] < took ? ns[i] : took;
        }
}
