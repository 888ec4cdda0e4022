"""B11: blocks are there from the start, and steps allocate nothing that lasts."""

import gc
import sys
from array import array

import pytest

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.policies import eviction_policy
from halogen_core.scheduler.sequence import Sequence


@pytest.fixture
def counted():
    """Blocks that Python's allocator has given out, with no collector to tidy up."""
    gc.collect()
    gc.disable()
    yield sys.getallocatedblocks
    gc.enable()


def decode(driver):
    """A step with a token whose int object exists already."""
    plan = driver.scheduler.schedule(driver.now)
    driver.scheduler.update(plan, [[7] if item.samples else [] for item in plan.items])
    for item in plan.items:
        if item.seq.num_generated >= item.seq.max_new_tokens:
            driver.scheduler.finish(item.seq)
    return plan.num_tokens


def test_a_step_between_block_boundaries_allocates_nothing_that_stays(drive, sequence, counted):
    driver = drive(4096, 16, max_batch=64, max_batch_tokens=4096)
    for i in range(64):
        driver.scheduler.add(sequence(range(i, i + 32), 200, arrival=0.0))
    for _ in range(4):
        decode(driver)
    left = []
    for _ in range(12):
        before = counted()
        decode(driver)
        left.append(counted() - before)
    # other threads of the process may allocate at any moment; what a step leaves is in most counts
    assert sorted(left[2:])[5] == 0


STALE = 2 * 64
"""Objects of entries that a heap has yet to drop: at most 64 more than it has candidates."""


@pytest.mark.parametrize(
    ("policy", "slack"), [("lru", 0), ("session_priority+lru", STALE), ("cheapest_loss", 0)]
)
def test_thousands_of_steps_over_a_full_cache_leave_memory_as_it_was(policy, slack, drive, counted):
    """Cycles of the same load, new tokens each: what the next cycles cache replaces the last's."""
    pool = BlockPool(128, 16, eviction=eviction_policy(policy))
    driver = drive(pool=pool, max_batch=8, max_batch_tokens=512)
    sizes, steps = array("q", [0] * 120), 0  # an array: a list would hold new ints
    for cycle in range(120):
        for i in range(16):
            prompt = [cycle, i, *range(100)]
            driver.scheduler.add(
                Sequence(
                    seq_id=i,
                    token_ids=prompt,
                    max_new_tokens=40,
                    arrival=float(cycle),
                    session=str(i),
                    priority=i % 3,
                )
            )
        while driver.scheduler.num_running or driver.scheduler.num_waiting:
            decode(driver)
            driver.now += 0.01
            steps += 1
        sizes[cycle] = counted()
    assert steps > 4000
    assert pool.stats().free < 16, "the cache is not full: nothing was replaced"
    # of the last cycles the smallest: other threads of the process may allocate at any moment
    assert min(sizes[90:]) <= max(sizes[30:90]) + slack
