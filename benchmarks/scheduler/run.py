"""Times of the scheduler and the KV block manager, against a naive baseline in the same run.

    python benchmarks/scheduler/run.py [--json benchmarks/scheduler/result.json]

Each figure is the median over interleaved rounds: ours, baseline, ours, ... A round of steps is
two blocks of tokens long and prompts differ in length, so that blocks fill as in life: a sixteenth
of the sequences in each step. Cost growth is measured from 1 to 4,096 sequences and from 1K to 1M
blocks.
"""

import argparse
import gc
import itertools
import json
import platform
import random
import statistics
import time
from pathlib import Path

from naive import NaiveBlocks, NaiveScheduler, NaiveSequence

from halogen_core.engine.garbage import EVERY_STEPS, SetAside
from halogen_core.kv.block_pool import BlockPool
from halogen_core.scheduler.config import SchedulerConfig
from halogen_core.scheduler.scheduler import Scheduler
from halogen_core.scheduler.sequence import Sequence

SIZE = 16


def timed(work, number, *, tidy=True):
    """Seconds per call."""
    if tidy:
        gc.collect()
    gc.disable()
    began = time.thread_time()
    for _ in range(number):
        work()
    elapsed = (time.thread_time() - began) / number
    gc.enable()
    return elapsed


def each(work, number):
    """Seconds of every single call."""
    gc.collect()
    gc.disable()
    times = [time.thread_time()]
    for _ in range(number):
        work()
        times.append(time.thread_time())
    gc.enable()
    return [after - before for before, after in itertools.pairwise(times)]


def interleaved(ours, baseline, *, rounds, number=1):
    """Medians of both, taken in turns, and the ratio baseline / ours."""
    pairs = [(timed(ours, number), timed(baseline, number)) for _ in range(rounds)]
    a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "ours_us": round(a * 1e6, 2),
        "baseline_us": round(b * 1e6, 2),
        "ratio": round(b / a, 2),
    }


def our_scheduler(running, waiting, num_blocks=None, prompt=100):
    pool = BlockPool(num_blocks or running * 64 + 1024, SIZE)
    config = SchedulerConfig(
        max_batch=running, max_batch_tokens=max(8192, running * (prompt + SIZE)), max_queue=10**6
    )
    scheduler = Scheduler(config, pool)
    rng = random.Random(1)
    for i in range(running + waiting):
        tokens = [rng.randrange(32_000) for _ in range(prompt + i % SIZE)]
        scheduler.add(Sequence(seq_id=i, token_ids=tokens, max_new_tokens=600))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, [[1]] * len(plan.items))
    assert scheduler.num_running == running
    return scheduler


def our_step(scheduler):
    sampled = [[7]] * scheduler.num_running

    def step():
        scheduler.update(scheduler.schedule(1.0), sampled)

    return step


def naive_step(running, waiting):
    scheduler = NaiveScheduler(NaiveBlocks(running * 64 + 1024, SIZE), running)
    rng = random.Random(1)
    for i in range(running + waiting):
        tokens = [rng.randrange(32_000) for _ in range(100 + i % SIZE)]
        scheduler.waiting.append(NaiveSequence(i, tokens))
    scheduler.admit()
    for seq in scheduler.running:
        seq.token_ids.append(1)
    tokens = [7] * running

    def step():
        scheduler.update(scheduler.schedule(), tokens)

    return step


def step_at_256():
    return interleaved(
        our_step(our_scheduler(256, 10_000)),
        naive_step(256, 10_000),
        rounds=9,
        number=2 * SIZE,
    )


def allocate_and_free(num_blocks):
    """100 blocks taken and given back, in a pool half full of cached blocks."""
    pool = BlockPool(num_blocks, SIZE)
    blocks = NaiveBlocks(num_blocks, SIZE)
    rng = random.Random(2)
    for i in range(max(1, num_blocks // 3200)):
        tokens = [rng.randrange(32_000) for _ in range(100 * SIZE)]
        lease = pool.open(i)
        pool.grow(lease, len(tokens))
        pool.release(lease, tokens, len(tokens))

    def ours():
        lease = pool.open(-1)
        pool.grow(lease, 100 * SIZE)
        pool.release(lease)

    def baseline():
        seq = NaiveSequence(0, [1] * (100 * SIZE - 1))
        seq.token_ids = list(range(100 * SIZE))
        for _ in range(100):
            block = blocks.free[0]
            blocks._take(block)
            seq.block_table.append(block)
        blocks.release(seq)

    return interleaved(ours, baseline, rounds=9, number=50)


def prefix_match(length):
    """The look-up of a prompt that is wholly cached."""
    rng = random.Random(3)
    tokens = [rng.randrange(32_000) for _ in range(length)]
    pool = BlockPool(length // SIZE + 8, SIZE)
    lease = pool.open(0)
    pool.grow(lease, length)
    pool.release(lease, tokens, length)
    naive = NaiveBlocks(length // SIZE + 8, SIZE)
    first = NaiveSequence(0, tokens)
    naive.allocate(first)
    lease = pool.open(1)

    def baseline():
        prefix = b""
        for at in range(0, length - SIZE, SIZE):
            part = tokens[at : at + SIZE]
            prefix = naive.digest(part, prefix)
            block = naive.by_hash.get(prefix, -1)
            assert naive.tokens[block] == part

    assert pool.match(lease, tokens).num_tokens == length - 1
    return interleaved(lambda: pool.match(lease, tokens), baseline, rounds=9, number=3)


def admission(waiting):
    """One `add` with so many waiting already."""
    scheduler = our_scheduler(8, waiting)
    ids = iter(range(10**6, 10**9))
    tokens = list(range(100))

    def add():
        scheduler.add(Sequence(seq_id=next(ids), token_ids=tokens, max_new_tokens=16))

    return round(statistics.median(timed(add, 200) for _ in range(9)) * 1e6, 2)


def step_growth(counts):
    """Decode steps of so many sequences; each fills a block every sixteenth."""
    rows = []
    for count in counts:
        step = our_step(our_scheduler(count, 0, num_blocks=count * 32 + 64))
        row = interleaved(step, naive_step(count, 0), rounds=7, number=2 * SIZE)
        steps = each(step, 4 * SIZE)
        rows.append(
            {
                "sequences": count,
                **row,
                "per_sequence_us": round(row["ours_us"] / count, 3),
                "median_step_us": round(statistics.median(steps) * 1e6, 1),
                "longest_us": round(max(steps) * 1e6, 1),
            }
        )
    return rows


def evict_growth(counts):
    """A block taken by eviction from a full cache of single-block prefixes (worst case)."""
    rows = []
    for count in counts:
        pool = BlockPool(count, SIZE)
        for i in range(count):
            lease = pool.open(i)
            pool.grow(lease, SIZE)
            pool.release(lease, [i] * SIZE, SIZE)
        lease = pool.open(-1)
        share = min(count // 2, 500)
        seconds = timed(
            lambda lease=lease, pool=pool, share=share: pool.grow(
                lease, len(lease.blocks) * SIZE + share * SIZE
            ),
            1,
        )
        rows.append(
            {
                "blocks": count,
                "evict_us": round(seconds * 1e6 / share, 3),
                "full_collection_ms": round(timed(gc.collect, 1) * 1e3, 2),
                "set_aside_ms": round(after_setting_aside() * 1e3, 3),
            }
        )
    return rows


def after_setting_aside():
    """A full collection as the engine's process has it, between 256 steps' worth of objects."""
    collector = SetAside()
    fresh = [[] for _ in range(20_000)]
    seconds = timed(gc.collect, 1, tidy=False)
    collector.after_step(EVERY_STEPS)
    gc.unfreeze()
    del fresh
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "note": "CPU time of the thread, medians",
        "step_256_running_10000_waiting": step_at_256(),
        "allocate_free_100_of_4096": allocate_and_free(4096),
        "allocate_free_100_of_131072": allocate_and_free(131_072),
        "prefix_match": {str(n): prefix_match(n) for n in (1024, 8192, 32_768, 131_072)},
        "add_us_by_waiting": {str(n): admission(n) for n in (0, 100, 1_000, 10_000, 100_000)},
        "step_growth": step_growth((1, 4, 16, 64, 256, 1024, 4096)),
        "evict_growth": evict_growth((1_000, 10_000, 100_000, 1_000_000)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
