"""Preemption and reuse through lower tiers: tokens are those of an undisturbed run."""

import random

import numpy as np
import pytest

from halogen_core.kv.block_pool import BlockPool
from halogen_core.kv.cheapest_loss import CheapestLoss
from halogen_core.kv.tiers import Tier, Tiers


class StoreMover:
    """Moves rows of a driver's fake store; what a slot holds is kept by number."""

    def __init__(self, size):
        self.size = size
        self.bytes_per_block = 8
        self.contents = []
        self.driver = None

    def export_blocks(self, blocks):
        rows = np.zeros((len(blocks), 8), np.uint8)
        for row, block in zip(rows, blocks, strict=True):
            store = self.driver.store[block * self.size : (block + 1) * self.size]
            self.contents.append(list(store))
            row[:] = np.frombuffer(np.int64(len(self.contents) - 1).tobytes(), np.uint8)
        return rows

    def import_blocks(self, blocks, data):
        for block, row in zip(blocks, data, strict=True):
            held = self.contents[int(np.frombuffer(row.tobytes(), np.int64)[0])]
            self.driver.store[block * self.size : (block + 1) * self.size] = held


@pytest.mark.parametrize("seed", range(40))
def test_moved_blocks_hold_what_they_held(seed, drive, sequence, alone, tmp_path):
    rng = random.Random(seed)
    size = rng.choice([2, 4])
    mover = StoreMover(size)
    stack = (Tier.host(8 * rng.randrange(1, 20), 8), Tier.disk(tmp_path, 8 * 30, 8))
    policy = CheapestLoss() if seed % 2 else None
    pool = BlockPool(rng.randrange(10, 24), size, eviction=policy, tiers=Tiers(mover, stack))
    driver = drive(pool=pool, max_batch=6, max_batch_tokens=40)
    mover.driver = driver
    shared = [rng.randrange(50) for _ in range(8)]
    sequences = []
    for _ in range(30):
        prompt = shared[: rng.randrange(9)] + [
            rng.randrange(50) for _ in range(rng.randrange(1, 9))
        ]
        if sequences and rng.random() < 0.4:
            prompt = sequences[rng.randrange(len(sequences))].token_ids[:16] + prompt[:2]
        new = rng.randrange(1, 2 * size + 1)
        prompt = prompt[: pool.num_blocks * size - new]
        seq = sequence(prompt, new, arrival=driver.now)
        seq.payload = alone(prompt, new)
        driver.scheduler.add(seq)
        sequences.append(seq)
        driver.step()
    driver.run()
    for seq in sequences:
        assert seq.token_ids == seq.payload


def test_preempted_sequences_come_back_from_the_host_without_recomputing(drive, sequence, alone):
    """The same load with and without a host tier: the tier saves the recomputed tokens."""
    recomputed = {}
    for name in ("none", "host"):
        mover = StoreMover(4)
        tiers = Tiers(mover, (Tier.host(8 * 100, 8),)) if name == "host" else None
        driver = drive(pool=BlockPool(12, 4, tiers=tiers), max_batch=4)
        mover.driver = driver
        for i in range(4):
            driver.scheduler.add(sequence(range(10 * i, 10 * i + 8), 24, arrival=0.0))
        driver.run()
        for i, seq in enumerate(sorted(driver.finished, key=lambda s: s.seq_id)):
            assert seq.token_ids == alone(range(10 * i, 10 * i + 8), 24)
        assert driver.scheduler.counters()["preemptions"] > 0
        recomputed[name] = driver.scheduler.counters()["recomputed_tokens"]
    assert recomputed["host"] <= recomputed["none"] / 3, recomputed
