"""Arrival processes, seeded: times in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs


@attrs.frozen(kw_only=True)
class Arrival:
    """A request: tokens in, tokens wanted, priority (higher is sooner)."""

    at: float
    input_len: int = 128
    output_len: int = 64
    priority: int = 0


def poisson(rate: float, seconds: float, *, seed: int = 0) -> Iterator[Arrival]:
    """Independent arrivals, `rate` per second; lengths mixed 30 / 40 / 30 % short, middle, long."""
    rng, now = random.Random(seed), 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        yield _drawn(rng, now)


def bursty(rate: float, seconds: float, *, burst: int = 8, seed: int = 0) -> Iterator[Arrival]:
    """The same mean rate in bursts of `burst` within a millisecond each."""
    rng, now = random.Random(seed), 0.0
    while (now := now + rng.expovariate(rate / burst)) < seconds:
        for _ in range(burst):
            yield _drawn(rng, now + rng.random() * 1e-3)


def _drawn(rng: random.Random, now: float) -> Arrival:
    low, high = rng.choices([(16, 127), (128, 1024), (1025, 4096)], weights=[3, 4, 3])[0]
    return Arrival(
        at=now,
        input_len=rng.randint(low, high),
        output_len=rng.randint(16, 128),
        priority=int(rng.random() < 0.1),
    )
