// Runs kernels for a process of another kind of machine, under an emulator. That process's memory is
// brought in page by page, at the same addresses, when a kernel touches it; what a kernel has changed
// goes back. So kernels see the very structs and arrays that the process made.
#define _GNU_SOURCE
#include "../csrc/hx.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096
#define MOST_PAGES 65536

extern const hx_table *hx_kernels(const char *isa);
extern int64_t hx_tile_size(int64_t format, int64_t k);
extern void hx_pack_tiles(int64_t, const uint8_t *, int64_t, int64_t, uint8_t *, int64_t, int64_t);

static int memory; // of the other process: its /proc/self/mem
static struct { uint8_t *at, *was; } pages[MOST_PAGES];
static int count;

static void die(const char *what, const void *at) {
    fprintf(stderr, "emulated kernels: %s at %p\n", what, at);
    _exit(1);
}

static void bring(int signal, siginfo_t *info, void *context) {
    uint8_t *at = (uint8_t *)((uintptr_t)info->si_addr & -(uintptr_t)PAGE);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (count == MOST_PAGES) die("too many pages", at);
    if (mmap(at, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) != at) die("no room", at);
    if (pread(memory, at, PAGE, (off_t)at) != PAGE) die("the process has no memory", info->si_addr);
    uint8_t *was = mmap(0, PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    memcpy(was, at, PAGE);
    pages[count].at = at, pages[count++].was = was;
}

static void give_back(void) {
    for (; count; count--) {
        uint8_t *at = pages[count - 1].at, *was = pages[count - 1].was;
        for (int i = 0, end; i < PAGE; i = end + 1) {
            while (i < PAGE && at[i] == was[i]) i++;
            for (end = i; end < PAGE && at[end] != was[end];) end++;
            if (i < end && pwrite(memory, at + i, end - i, (off_t)(at + i)) != end - i)
                die("cannot write", at + i);
        }
        munmap(at, PAGE), munmap(was, PAGE);
    }
}

// Pieces in descending order: where and when units run must not matter.
static void run(const hx_table *table, const hx_op *ops, int64_t n, int threads) {
    const hx_kernel *const *kernels = &table->pack_q8; // ops name kernels by their place in the table
    for (const hx_op *op = ops; op < ops + n; op++) {
        const hx_kernel *kernel = kernels[(uintptr_t)op->kernel - 1];
        int64_t cost, units = kernel->units(op->params, threads, &cost);
        for (int i = threads - 1; i >= 0; i--)
            kernel->run(op->params, units * i / threads, units * (i + 1) / threads, i, threads);
    }
}

enum { PROGRAM, TILE_SIZE, PACK };

int main(int argc, char **argv) {
    const hx_table *table = hx_kernels(argv[1]);
    if (!table) die("no such kernels here", 0);
    memory = atoi(argv[2]);
    struct sigaction action = {.sa_sigaction = bring, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    int64_t a[8], result = table->panel;
    do {
        if (write(1, &result, sizeof result) != sizeof result) return 1;
        if (read(0, a, sizeof a) != sizeof a) return 0;
        result = 0;
        if (a[0] == PROGRAM) run(table, (const hx_op *)a[1], a[2], a[3]);
        else if (a[0] == TILE_SIZE) result = hx_tile_size(a[1], a[2]);
        else hx_pack_tiles(a[1], (const uint8_t *)a[2], a[3], a[4], (uint8_t *)a[5], a[6], a[7]);
        give_back();
    } while (1);
}
