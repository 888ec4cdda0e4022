"""Random loads over tiny pools: tokens do not depend on what shares the pool and the batch."""

import random

import pytest


def load(rng, size, count):
    shared = [rng.randrange(50) for _ in range(size * 3)]
    for _ in range(count):
        tail = [rng.randrange(50) for _ in range(rng.randrange(1, 2 * size + 1))]
        yield shared[: rng.randrange(len(shared) + 1)] + tail, rng.randrange(1, 2 * size + 1)


@pytest.mark.parametrize("seed", range(150))
def test_every_sequence_says_what_it_says_alone(seed, drive, sequence, alone):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    batch = rng.randrange(1, 12)
    driver = drive(
        rng.randrange(8, 40),
        size,
        max_batch=batch,
        max_batch_tokens=batch + rng.randrange(50),
    )
    todo = list(load(rng, size, rng.randrange(1, 25)))
    sequences = []
    while todo or driver.scheduler.num_running or driver.scheduler.num_waiting:
        for prompt, new in [todo.pop() for _ in range(min(len(todo), rng.randrange(3)))]:
            seq = sequence(prompt, new, arrival=driver.now, use_prefix_cache=rng.random() < 0.9)
            driver.scheduler.add(seq)
            sequences.append((seq, alone(prompt, new)))
        driver.step()
        assert driver.steps < 20_000
    for seq, tokens in sequences:
        assert seq.token_ids == tokens


@pytest.mark.parametrize("seed", range(60))
def test_aborts_in_any_state_free_everything(seed, drive, sequence):
    rng = random.Random(seed)
    driver = drive(rng.randrange(8, 40), 4)
    live = []
    for prompt, new in load(rng, 4, 30):
        live.append(sequence(prompt, new, arrival=driver.now))
        driver.scheduler.add(live[-1])
        if rng.random() < 0.5:
            driver.step()
        if rng.random() < 0.4:
            driver.scheduler.abort(rng.choice(live).seq_id)
            driver.audit()
    driver.run()
    stats = driver.pool.stats()
    assert stats.active == 0
    assert stats.free + stats.cached == stats.total
